"""A recipe becomes a plan: which nodes there are, what each needs, where its outputs go, and every mistake with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unicodedata import normalize

import pytest

from runner.errors import Invalid, Problem
from runner.language import document, inputs, parse
from runner.language.recipe import Recipe
from runner.planning.assemble import drop_echoes
from runner.planning.beforehand import DryRun
from runner.planning.compile import compile_plan
from runner.planning.patterns import encode_pattern
from runner.planning.plan import SKIP, WHEN_LATE, Node, Plan


def read(text: str, name: str = "recipe.yaml") -> Recipe:
    head = (
        ""
        if text.lstrip().startswith("recipe:")
        else f"recipe: {name.partition('.')[0]}@1\nsummary: A test\n"
    )
    return parse.recipe(document.parse((head + text).encode(), name))


def plan(
    text: str,
    given: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    globs: Mapping[str, tuple[str, ...]] | None = None,
    as_disk: Callable[[str], str] = str,
    **used: str,
) -> Plan:
    """Compile; `used` are other recipes, `inner` under the name `./inner.yaml`."""
    recipe = read(text)
    others = {f"{name}.yaml": read(other, f"{name}.yaml") for name, other in used.items()}
    values = inputs.bind(recipe, given or {}, preset=preset)
    trial = DryRun()
    found: list[Problem] = []
    try:
        compiled = compile_plan(
            recipe,
            values,
            digest="d",  # type: ignore[arg-type]
            used=others,
            globs=globs or {},
            bind=inputs.bind,
            kind_of=inputs.kind_of,
            preset=preset,
            trial=trial,
            as_disk=as_disk,
        )
    except Invalid as error:
        found = list(error.problems)
    if found or trial.problems:
        raise Invalid(drop_echoes([*found, *trial.problems]))
    return compiled


def problems(text: str, given: Mapping[str, Any] | None = None, **more: Any) -> list[Problem]:
    with pytest.raises(Invalid) as caught:
        plan(text, given, **more)
    return list(caught.value.problems)


def problem(text: str, given: Mapping[str, Any] | None = None, **more: Any) -> Problem:
    (only,) = problems(text, given, **more)
    return only


def pointed(found: Problem) -> str:
    assert found.where is not None
    return found.where.text[found.where.column - 1 :][: found.where.length]


def node(found: Plan, id: str) -> Node:
    return found.nodes[found.index[id]]


def edges(found: Plan) -> set[str]:
    return {f"{one} -> {other}" for one, other in found.graph.edges}


def author(found: Plan, id: str) -> dict[str, Any]:
    image = found.specs()[found.index[id]].author
    assert isinstance(image, dict)
    return image


def skipped(found: Plan) -> set[str]:
    return {n.id for n in found.nodes if n.flags & SKIP}


# -- edges ------------------------------------------------------------------------------------------------------------------------------------------


def test_a_mention_is_an_edge_and_nodes_stand_after_what_they_need() -> None:
    found = plan("""
steps:
  last: {run: "cat {{ steps.first.o }} > l", outputs: {o: l}}
  first: {run: "echo > f", outputs: {o: f}}
""")
    assert edges(found) == {"first -> last"} and [n.id for n in found.nodes] == ["first", "last"]
    assert node(found, "last").upstream == [(0, "o", "f", "")]


@pytest.mark.parametrize(
    "leaf",
    [
        'run: ["cat", "{{ steps.a.o }}"]',
        'run: x, env: {X: "{{ steps.a.o }}"}',
        'run: x, files: {c.json: {k: ["{{ steps.a.o }}"]}}',
    ],
)
def test_an_edge_comes_from_wherever_a_step_is_mentioned(leaf: str) -> None:
    found = plan(f"""
steps:
  a: {{run: "echo > f", outputs: {{o: f}}}}
  b: {{{leaf}}}
""")
    assert edges(found) == {"a -> b"} and node(found, "b").upstream


def test_needs_is_order_and_nothing_else() -> None:
    found = plan("""
steps:
  a: {run: "echo > f", outputs: {o: f}}
  b: {run: "x", needs: [a]}
""")
    assert (
        edges(found) == {"a -> b"}
        and not node(found, "b").upstream
        and node(found, "b").after == [0]
    )
    assert author(found, "b") == author(plan('steps: {b: {run: "x"}}'), "b")


@pytest.mark.parametrize(
    ("output", "dep"),
    [
        ("data/x.txt", "data/x.txt"),
        ("data/x.txt", "./data/x.txt"),
        ("data/x.txt", "data/*.txt"),
        ("data/", "data/x.txt"),
        ("data/", "data/*.txt"),
        ("data/", "d*/deep/**/*.txt"),
        ("data", "data/deep/x.txt"),
        ("{{ inputs.where }}/x.txt", "data/x.txt"),
        ("{{ inputs.where }}/", "data/*.txt"),
        ("data/x.txt", "{{ inputs.where }}/x.txt"),
    ],
)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_dep_on_what_another_step_makes_is_an_edge(output: str, dep: str, order: str) -> None:
    steps = {
        "a": f'  a: {{run: "x", outputs: {{o: "{output}"}}}}\n',
        "b": f'  b: {{run: "y", deps: ["{dep}"]}}\n',
    }
    found = plan(
        "inputs: {where: {type: string, default: data}}\nsteps:\n"
        + steps[order[0]]
        + steps[order[1]]
    )
    assert edges(found) == {"a -> b"}
    assert [u[1] for u in node(found, "b").upstream] == ["o"]


@pytest.mark.parametrize(
    ("output", "dep"),
    [
        ("data/deep/x.txt", "data/*.txt"),
        ("x.txt", "**/*.csv"),
        ("database/x", "data/*"),
        ("out", "**/y"),
    ],
)
def test_a_pattern_does_not_reach_what_it_does_not_match(output: str, dep: str) -> None:
    found = plan(f"""
steps:
  a: {{run: "x", outputs: {{o: "{output}"}}}}
  b: {{run: "y", deps: ["{dep}"]}}
""")
    assert edges(found) == set() and node(found, "b").deps == [dep]


def test_a_pattern_does_not_match_the_steps_own_output() -> None:
    found = plan(
        'steps: {merge: {run: "cat *.txt > all.txt", deps: ["*.txt"], outputs: {all: all.txt}}}'
    )
    assert edges(found) == set() and node(found, "merge").deps == ["*.txt"]


def test_a_dep_on_a_folder_in_which_another_step_publishes_is_an_error() -> None:
    found = problem("""
steps:
  a: {run: "x", outputs: {o: data/made.txt}}
  b: {run: "ls data", deps: [data]}
""")
    assert (
        found.code == "deps-hold-output"
        and '"data/made.txt", an output of "a"' in found.message
        and pointed(found) == "data"
    )


def test_a_dep_may_name_an_output_of_a_used_recipe_at_its_place() -> None:
    found = plan(
        'steps: {b: {run: "cat u/o.txt", deps: [u/o.txt]}, u: {uses: ./inner.yaml}}',
        inner='steps: {i: {run: "x", outputs: {o: o.txt}}}',
    )
    assert edges(found) == {"u/i -> b"} and node(found, "b").deps == []


# -- mistakes ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "path"),
    [
        (
            'a: {run: "cat {{ steps.b.o }}", outputs: {o: a}}, b: {run: "cat {{ steps.a.o }}", outputs: {o: b}}',
            "a -> b -> a",
        ),
        (
            'a: {run: "x", outputs: {o: a}, deps: [c]}, b: {run: "x", deps: [a], outputs: {o: b}}, c: {run: x, deps: [b], outputs: {o: c}}',
            "a -> c -> b -> a",
        ),
        ("a: {run: x, needs: [b]}, b: {run: x, needs: [a]}", "a -> b -> a"),
        ('a: {run: "x", deps: [a.txt], outputs: {o: a.txt}}', "a -> a"),
        (
            'a: {run: x, deps: ["b-x"], outputs: {o: "a-{{ inputs.n }}"}}, b: {run: x, deps: ["a-x"], outputs: {o: "b-{{ inputs.n }}"}}',
            "a -> b -> a",
        ),
        (
            'a: {run: x, when: "{{ steps.b.metrics.loss > 1 }}", outputs: {o: a}}, b: {run: "cat {{ steps.a.o }}", metrics: true}',
            "a -> b -> a",
        ),
    ],
)
def test_a_cycle_is_printed_as_it_goes_round(steps: str, path: str) -> None:
    found = problem(f"inputs: {{n: {{type: string, default: x}}}}\nsteps: {{{steps}}}")
    assert found.code == "cycle" and path in found.message and pointed(found) == "a"


def test_every_unknown_name_is_reported_with_its_place_and_what_was_meant() -> None:
    found = problems("""
inputs: {epochs: {type: integer, default: 1}}
steps:
  a:
    run: "{{ inputs.epoch }} {{ steps.z.x }} {{ matrix.q }} {{ outputs.z }} {{ state.k }} {{ host.gpu }} {{ foo }}"
  b: {run: [echo, "{{ steps.a }}", "{{ steps.b2.model }}", "{{ steps[inputs.epochs].x }}"], deps: ["{{ inputs.zz }}", ../x]}
  b2: {run: x, outputs: {modell: m}}
""")
    said = {pointed(p): p.fix for p in found}
    assert set(said) == {
        *("steps.z.x", "inputs.epoch", "matrix.q", "outputs.z", "state.k", "host.gpu", "foo"),
        *("steps.a", "steps.b2.model", "steps", "zz", "../x"),
    }
    assert said["inputs.epoch"] == 'did you mean "inputs.epochs"?'
    assert said["steps.b2.model"] == 'did you mean "steps.b2.modell"?'
    assert said["host.gpu"] == 'did you mean "host.gpus"?'
    assert all(p.where is not None and p.where.path == "recipe.yaml" for p in found)


def test_a_name_known_only_to_an_attempt_may_not_name_an_output() -> None:
    found = problem('steps: {a: {run: x, outputs: {o: "out-{{ run.id }}"}}}')
    assert found.code == "late-name" and pointed(found) == "run.id"


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/tmp/x",
        "~/x",
        "a/../../x",
        ".",
        "{{ inputs.up }}/x",
        "x/{{ inputs.up }}/{{ inputs.up }}/y",
    ],
)
def test_an_output_stays_in_its_attempt_directory(path: str) -> None:
    found = problem(
        f'inputs: {{up: {{type: string, default: ".."}}}}\nsteps: {{a: {{run: x, outputs: {{o: "{path}"}}}}}}'
    )
    assert found.code == "path-escape"


def test_an_output_may_not_lie_in_our_own_folder() -> None:
    assert problem("steps: {a: {run: x, outputs: {o: .recipe/recipe.db}}}").code == "path-escape"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x.txt", "x.txt"),
        ("x.txt", "./x.txt"),
        ("x/", "x/y.txt"),
        ("x/y/z", "x"),
        ("{{ inputs.n }}", "x"),
    ],
)
def test_two_makers_of_one_path_are_an_error(one: str, other: str) -> None:
    found = problem(f"""
inputs: {{n: {{type: string, default: x}}}}
steps:
  a: {{run: x, outputs: {{o: "{one}"}}}}
  b: {{run: x, outputs: {{o: "{other}"}}}}
""")
    assert found.code == "two-makers" and '"a"' in found.message and '"b"' in found.message


def test_instances_that_make_one_path_are_reported_with_the_axis_that_is_missing() -> None:
    found = problem("""
steps:
  a: {matrix: {lr: [1, 2], lr2: [1, 2]}, run: x, outputs: {o: "m-{{ matrix.lr2 }}.bin"}}
""")
    assert found.code == "two-makers" and found.fix == "use {{ matrix.lr }} in the path"
    twins = 'steps: {a: {matrix: {f: {glob: "**/*.txt"}}, run: x, outputs: {o: "out/{{ matrix.f | stem }}"}}}'
    found = problem(twins, globs={"**/*.txt": ("a.txt", "b/a.txt")})
    assert found.fix == "make the axes differ in the path: a[f=a.txt] and a[f=b%2Fa.txt] share one"


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        ("run: 'echo \"{{ state.s.latest }}\"'", "state.s.latest is null on the first attempt"),
        ("run: [echo, 'x={{ inputs.note }}']", "inputs.note is null here"),
        ("run: 'true'\n    env: {X: 'a{{ inputs.note }}'}", "inputs.note is null here"),
        ("run: 'true'\n    files: {a.txt: 'a{{ inputs.note }}'}", "inputs.note is null here"),
    ],
)
def test_null_in_a_text_is_reported_before_anything_runs(leaf: str, name: str) -> None:
    text = f"inputs: {{note: {{type: string, required: false}}}}\nsteps:\n  one:\n    state: {{s: {{checkpoint: c-*}}}}\n    {leaf}\n"
    assert name in problem(text).message
    if "note" in name:
        plan(text, {"note": "given"})


@pytest.mark.parametrize(
    "step",
    [
        "run: [echo, '{{ inputs.note }}', [--resume, '{{ state.s.latest }}']]",
        "run: echo {{ inputs.note | default('none') }} {{ state.s.latest | default('') }}",
        "run: echo {{ inputs.note }}\n    when: '{{ inputs.note is not none }}'",
        "run: 'true'\n    env: {X: '{{ inputs.note }}'}\n    files: {a.json: {note: '{{ inputs.note }}'}}",
    ],
)
def test_null_is_no_mistake_where_it_has_a_meaning_or_does_not_run(step: str) -> None:
    plan(
        f"inputs: {{note: {{type: string, required: false}}}}\nsteps:\n  one:\n    state: {{s: {{checkpoint: c-*}}}}\n    {step}\n"
    )


def test_a_preset_replaces_the_limits_it_names() -> None:
    text = "limits: {time: 6h, cost: 5 USD}\npresets: {p: {limits: {time: 2s}}}\nsteps: {a: {run: 'true'}}\n"
    assert plan(text).settings.limits.time == 21600
    assert plan(text, preset="p").settings.limits == plan(text).settings.limits._replace(time=2)


def test_a_secret_cannot_be_mentioned() -> None:
    found = problem("""
inputs: {token: {type: secret, env: TOKEN}}
steps: {a: {run: "curl {{ inputs.token }}", secrets: [token]}}
""")
    assert found.code == "secret" and pointed(found) == "inputs.token" and "$TOKEN" in found.fix


# -- matrix -----------------------------------------------------------------------------------------------------------------------------------------


def test_a_matrix_is_every_combination_in_order() -> None:
    found = plan("""
inputs: {seeds: {type: list, items: integer, default: [1, 2]}}
steps:
  train: {matrix: {lr: [0.1, 1e-4], seed: "{{ inputs.seeds }}"}, run: x, outputs: {o: "{{ matrix.lr }}-{{ matrix.seed }}"}}
  merge: {run: ["cat", "{{ steps.train.o }}"]}
""")
    ids = [
        "train[lr=0.1,seed=1]",
        "train[lr=0.1,seed=2]",
        "train[lr=0.0001,seed=1]",
        "train[lr=0.0001,seed=2]",
    ]
    assert [n.id for n in found.nodes] == [*ids, "merge"]
    assert author(found, "merge")["reads"] == {
        "steps.train.o": ["0.1-1", "0.1-2", "0.0001-1", "0.0001-2"]
    }


def test_ids_are_percent_encoded_and_long_ones_cut() -> None:
    found = plan(f"steps: {{a: {{matrix: {{m: [org/name, 'a,b=c', {'x' * 200}]}}, run: x}}}}")
    ids = [n.id for n in found.nodes]
    assert ids[:2] == ["a[m=org%2Fname]", "a[m=a%2Cb%3Dc]"] and len(ids[2]) < 90


def test_values_that_read_the_same_are_one_value_twice() -> None:
    for axis in ("[1, 1]", '[1, "1"]', "[true, 'true']"):
        assert problem(f"steps: {{a: {{matrix: {{m: {axis}}}, run: x}}}}").code == "matrix-axis"


def test_an_axis_must_be_a_list() -> None:
    found = problem(
        'inputs: {n: {type: integer, default: 3}}\nsteps: {a: {matrix: {m: "{{ inputs.n }}"}, run: x}}'
    )
    assert found.code == "matrix-axis" and "not a list" in found.message


def test_a_glob_axis_is_one_instance_a_file_and_depends_on_that_file_alone() -> None:
    found = plan(
        'steps: {a: {matrix: {f: {glob: "raw/*.txt"}}, run: "x {{ matrix.f }}", outputs: {o: "out/{{ matrix.f | stem }}.json"}}}',
        globs={"raw/*.txt": ("raw/a.txt", "raw/b.txt")},
    )
    assert [(n.id, n.deps, n.outputs[0][1]) for n in found.nodes] == [
        ("a[f=raw%2Fa.txt]", ["raw/a.txt"], "out/a.json"),
        ("a[f=raw%2Fb.txt]", ["raw/b.txt"], "out/b.json"),
    ]


def test_a_file_that_a_glob_axis_found_is_no_pattern_whatever_its_name() -> None:
    recipe = 'steps: {a: {matrix: {f: {glob: "raw/*.txt"}}, run: "x {{ matrix.f }}", deps: %s, outputs: {o: "out/{{ matrix.f | stem }}.json"}}}'
    for deps in ("[]", '["{{ matrix.f }}"]'):
        found = plan(recipe % deps, globs={"raw/*.txt": ("raw/a [1].txt", "raw/b.txt")})
        assert [n.deps for n in found.nodes] == [["raw/a [[]1].txt"], ["raw/b.txt"]]


LATE = """
steps:
  split: {run: x, outputs: {parts: parts/}}
  each: {matrix: {f: {glob: "{{ steps.split.parts }}/*.txt"}}, run: "x {{ matrix.f }}", outputs: {o: "out/{{ matrix.f | name }}"}}
  merge: {run: ["cat", "{{ steps.each.o }}"]}
  dep: {run: "cat out/1.txt", deps: [out/1.txt]}
  alone: {run: x}
"""


def test_a_glob_below_an_output_waits_and_so_does_what_needs_it() -> None:
    found = plan(LATE)
    assert {n.id for n in found.nodes} == {"split", "alone"}
    (pending,) = found.pending
    assert (pending.step, pending.producer, pending.output, pending.pattern) == (
        "each",
        "split",
        "parts",
        "*.txt",
    )


def test_a_glob_below_an_output_is_expanded_once_its_files_are_known() -> None:
    found = plan(LATE, globs={"split/parts:*.txt": ("1.txt", "2.txt")})
    assert found.pending == []
    assert edges(found) == {
        "split -> each[f=parts%2F1.txt]",
        "split -> each[f=parts%2F2.txt]",
        "each[f=parts%2F1.txt] -> merge",
        "each[f=parts%2F2.txt] -> merge",
        "each[f=parts%2F1.txt] -> dep",
    }
    assert node(found, "each[f=parts%2F1.txt]").upstream == [
        (found.index["split"], "parts", "parts/1.txt", "1.txt")
    ]


def test_an_axis_over_the_outputs_of_a_matrix_is_one_instance_an_output() -> None:
    found = plan("""
steps:
  a: {matrix: {n: [1, 2]}, run: x, outputs: {o: "a{{ matrix.n }}"}}
  b: {matrix: {m: "{{ steps.a.o }}"}, run: "cat {{ matrix.m }}", outputs: {o: "{{ matrix.m }}.b"}}
""")
    assert edges(found) == {"a[n=1] -> b[m=a1]", "a[n=2] -> b[m=a2]"}


def test_a_state_may_be_named_by_the_matrix() -> None:
    found = plan(
        'steps: {a: {matrix: {n: [1, 2]}, run: "x {{ state.s }}", state: {s: {path: "st/{{ matrix.n }}"}}, outputs: {o: "{{ matrix.n }}"}}}'
    )
    assert [spec.state[0].path for spec in found.specs()] == ["st/1", "st/2"]
    assert author(found, "a[n=2]")["reads"]["state.s"] == "st/2"


# -- select -----------------------------------------------------------------------------------------------------------------------------------------

SWEEP = """
steps:
  train: {matrix: {n: [1, 2]}, run: x, metrics: true, outputs: {model: "m{{ matrix.n }}.bin"}}
  best: {select: train, min: loss%s}
  use: {run: "x {{ steps.best.model }}"}
"""


def test_select_stands_between_the_instances_and_who_uses_the_best() -> None:
    found = plan(SWEEP % "")
    assert edges(found) == {"train[n=1] -> best", "train[n=2] -> best", "best -> use"}
    assert node(found, "use").upstream == [(found.index["best"], "model", "best/model.bin", "")]


def test_a_select_with_a_false_when_is_skipped_with_what_mentions_it() -> None:
    assert skipped(plan(SWEEP % ', when: "{{ false }}"')) == {"best", "use"}


def test_the_best_of_no_instances_is_still_a_step_that_others_need() -> None:
    found = plan(
        "inputs: {ns: {type: list, items: integer, default: []}}"
        + SWEEP.replace("[1, 2]", '"{{ inputs.ns }}"') % ""
    )
    assert edges(found) == {"best -> use"} and not skipped(found)


SWEPT = """
inputs: {n: {type: integer, default: 0}}
steps:
  data: {run: x, outputs: {o: data.txt}}
  train: {run: "x {{ steps.data.o }} {{ inputs.n }}", metrics: true, outputs: {model: m.bin}}
"""
OVER = """
steps:
  s: {matrix: {n: [1, 2]}, uses: ./inner.yaml, with: {n: "{{ matrix.n }}"}}
  best: {select: %s, min: loss}
  use: {run: "x {{ steps.best.model }}"}
"""
NESTED = "steps: {inner: {uses: ./inner.yaml}, other: {run: x, outputs: [o]}}"


def into(found: Plan, step: str) -> set[str]:
    """What a step needs."""
    return {found.nodes[each].id for each in found.dependencies(found.index[step])}


def test_select_takes_a_step_of_a_recipe_that_a_matrix_uses() -> None:
    found = plan(OVER % "s/train", inner=SWEPT)
    assert into(found, "best") == {"s[n=1]/train", "s[n=2]/train"} and into(found, "use") == {
        "best"
    }
    assert node(found, "use").upstream == [(found.index["best"], "model", "best/model.bin", "")]


def test_select_reaches_into_a_recipe_that_is_used_by_one_that_is_used() -> None:
    found = plan(
        (OVER % "s/inner/train").replace(
            'uses: ./inner.yaml, with: {n: "{{ matrix.n }}"}', "uses: ./mid.yaml"
        ),
        inner=SWEPT,
        mid=NESTED,
    )
    assert into(found, "best") == {"s[n=1]/inner/train", "s[n=2]/inner/train"}


WITHIN = SWEPT.replace("train: {", "train: {matrix: {k: [7, 8]}, ").replace(
    "m.bin", '"m{{ matrix.k }}.bin"'
)


def test_all_instances_compete_where_there_is_a_matrix_inside_a_matrix() -> None:
    assert into(plan(OVER % "s/train", inner=WITHIN), "best") == {
        f"s[n={n}]/train[k={k}]" for n in (1, 2) for k in (7, 8)
    }
    alone = 'steps: {s: {uses: ./inner.yaml}, best: {select: s/train, max: acc}, use: {run: "x {{ steps.best.model }}"}}'
    assert into(plan(alone, inner=WITHIN), "best") == {"s/train[k=7]", "s/train[k=8]"}


def test_the_best_of_a_recipe_competes_with_the_best_of_another_instance() -> None:
    found = plan(OVER % "s/best", inner=WITHIN + "  best: {select: train, min: loss}\n")
    assert into(found, "best") == {"s[n=1]/best", "s[n=2]/best"}
    assert node(found, "use").upstream == [(found.index["best"], "model", "best/model.bin", "")]


@pytest.mark.parametrize(
    ("select", "says", "fix"),
    [
        ("s", '"s" is a recipe, inner@1: which of its steps?', "select: s/train"),
        ("s/trian", 'inner@1, which "s" uses, has no step "trian"', 'did you mean "train"?'),
        ("s/train/deep", '"s/train" contains no steps', "select: s/train"),
        ("t/train", '"t" contains no steps', "select: t"),
        (
            "p/train",
            'step "p/train" has no `matrix` to select from',
            "use the step's outputs directly",
        ),
        ("q", '"q" is a recipe, mid@1: which of its steps?', "select: q/inner/train"),
        ("q/inner", '"q/inner" is a recipe, inner@1: which of its steps?', "select: q/inner/train"),
    ],
)
def test_a_select_that_names_no_matrix_of_steps_says_what_to_write(
    select: str, says: str, fix: str
) -> None:
    more = "  t: {run: x, matrix: {n: [1]}, outputs: {model: 't{{ matrix.n }}'}}\n  p: {uses: ./inner.yaml}\n  q: {matrix: {n: [1]}, uses: ./mid.yaml}\n"
    found = problem((OVER % select) + more, inner=SWEPT, mid=NESTED)
    assert (found.message, found.fix, pointed(found)) == (says, fix, select)


def test_an_output_that_the_best_does_not_have_is_named() -> None:
    found = problem((OVER % "s/train").replace("best.model", "best.adapter"), inner=SWEPT)
    assert found.code == "unknown-name" and "steps.best.model" in found.fix


# -- when -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        'run: "x {{ steps.a.o }}"',
        "run: x, needs: [a]",
        "run: x, deps: [f]",
        'run: [x, "{{ steps.m.o }}"]',
        "run: x, needs: [m]",
        "uses: ./inner.yaml, needs: [a]",
    ],
)
def test_what_needs_a_skipped_step_is_skipped(how: str) -> None:
    found = plan(
        f"""
inputs: {{on: {{type: boolean, default: false}}}}
steps:
  after: {{{how}}}
  a: {{run: x, when: "{{{{ inputs.on }}}}", outputs: {{o: f}}}}
  m: {{run: x, when: "{{{{ inputs.on }}}}", matrix: {{n: [1, 2]}}, outputs: {{o: "m{{{{ matrix.n }}}}"}}}}
""",
        inner="steps: {i: {run: x}}",
    )
    assert {id.partition("/")[0] for id in skipped(found)} == {"after", "a", "m[n=1]", "m[n=2]"}


def test_instances_skipped_by_value_are_left_out_of_the_list() -> None:
    found = plan("""
steps:
  m: {run: x, when: "{{ matrix.n > 1 }}", matrix: {n: [1, 2]}, outputs: {o: "m{{ matrix.n }}"}}
  all: {run: [cat, "{{ steps.m.o }}"]}
outputs: {all: "{{ steps.m.o }}"}
""")
    assert skipped(found) == {"m[n=1]"} and edges(found) == {"m[n=2] -> all"}
    assert [item[2] for item in found.publish] == ["m2"]


def test_a_when_over_metrics_is_decided_later_and_is_an_edge() -> None:
    found = plan("""
steps:
  a: {run: x, metrics: true}
  b: {run: x, when: "{{ steps.a.metrics.loss < 1 }}"}
""")
    assert node(found, "b").flags & WHEN_LATE and edges(found) == {"a -> b"}
    assert node(found, "b").late == [(0, "loss", "")]


@pytest.mark.parametrize("value", ['"yes"', "'{{ inputs.n }}'", "\"{{ 'x' }}\""])
@pytest.mark.parametrize("step", ["run: x", "uses: ./inner.yaml", "select: m, min: loss"])
def test_a_when_that_is_not_a_boolean_is_an_error(value: str, step: str) -> None:
    text = f"""
inputs: {{n: {{type: integer, default: 1}}}}
steps:
  m: {{run: x, matrix: {{k: [1]}}, metrics: true}}
  a: {{{step}, when: {value}}}
"""
    assert problem(text, inner="steps: {i: {run: x}}").code == "when"


def test_a_when_is_no_part_of_the_key() -> None:
    text = 'inputs: {n: {type: integer, default: 1}}\nsteps: {a: {run: x, outputs: {o: o}, when: "{{ inputs.n %s }}"}}'
    keys = {
        plan(text % test, {"n": n}).nodes[0].author
        for test, n in (("> 0", 1), ("> 0", 2), ("< 9", 1))
    }
    assert len(keys) == 1


# -- uses -------------------------------------------------------------------------------------------------------------------------------------------

INNER = """
inputs:
  data: {type: dataset}
  epochs: {type: integer, default: 3}
  token: {type: secret, env: HF_TOKEN, required: false}
presets:
  smoke: {epochs: 1}
  tiny: {epochs: 2}
steps:
  prepare: {run: "x {{ inputs.data }}", secrets: [token], outputs: {o: p.bin}}
  train: {run: "x {{ steps.prepare.o }} {{ inputs.epochs }}", outputs: {model: m.bin}}
outputs: {model: "{{ steps.train.model }}"}
"""


def test_a_step_sees_what_is_behind_the_name_of_a_file_and_is_given_the_file() -> None:
    hooks = 'inputs: {hooks: {type: list, items: file, member: true}}\nsteps: {s: {run: [x, "{{ inputs.hooks }}"]}}'
    handed = "inputs: {mine: {type: list, items: file, member: true}}\nsteps: {u: {uses: ./inner.yaml, with: {hooks: '{{ inputs.mine }}'}}}"
    for found, id in (
        (plan(hooks, {"hooks": ["src/a.py:Told", "src/a.py:More"]}), "s"),
        (plan(handed, {"mine": "src/a.py:Told,src/a.py:More"}, inner=hooks), "u/s"),
    ):
        assert found.specs()[found.index[id]].names.inputs["hooks"] == [
            "inputs/hooks/0/a.py:Told",
            "inputs/hooks/1/a.py:More",
        ]
        assert [source[:3] for source in node(found, id).takes] == [
            (f"inputs/hooks/{n}/a.py", "path", "src/a.py") for n in (0, 1)
        ]


def test_a_used_recipe_is_below_its_step() -> None:
    found = plan(
        'steps: {d: {run: x, outputs: {o: data/}}, sft: {uses: ./inner.yaml, with: {data: "{{ steps.d.o }}"}}, e: {run: "x {{ steps.sft.model }}"}}',
        inner=INNER,
    )
    assert edges(found) == {"d -> sft/prepare", "sft/prepare -> sft/train", "sft/train -> e"}
    assert node(found, "e").upstream == [(found.index["sft/train"], "model", "sft/m.bin", "")]
    assert node(found, "sft/prepare").upstream == [(found.index["d"], "o", "inputs/data/data", "")]
    assert ["sft/m.bin" in item for item in found.publish].count(True) == 1


def test_the_keys_of_a_used_recipe_are_those_it_has_alone() -> None:
    alone = plan("recipe: inner@1\nsummary: A test\n" + INNER, {"data": "./d"})
    found = plan('steps: {sft: {uses: ./inner.yaml, with: {data: "./d"}}}', inner=INNER)
    assert [n.author for n in found.nodes] == [n.author for n in alone.nodes]


def test_presets_reach_used_recipes_that_have_one_of_that_name_before_with() -> None:
    text = (
        "presets: {smoke: {}, other: {}}\nsteps: {u: {uses: ./inner.yaml%s, with: {data: ./d%s}}}"
    )

    def epochs(preset: str | None, own: str = "", given: str = "") -> object:
        return (
            plan(text % (own, given), preset=preset, inner=INNER).specs()[1].names.inputs["epochs"]
        )

    assert epochs(None) == 3 and epochs("smoke") == 1 and epochs("other") == 3
    assert epochs("smoke", ", preset: tiny") == 2 and epochs(None, ", preset: tiny") == 2
    assert epochs("smoke", given=", epochs: 7") == 7


def test_a_secret_is_handed_on_by_name() -> None:
    found = plan(
        'inputs: {mine: {type: secret, env: MINE}}\nsteps: {u: {uses: ./inner.yaml, with: {data: ./d, token: "{{ inputs.mine }}"}}}',
        inner=INNER,
    )
    assert found.specs()[0].secrets == [("token", "HF_TOKEN", "MINE", False)]


def test_uses_may_be_a_matrix_and_nested() -> None:
    found = plan(
        'steps: {u: {uses: ./middle.yaml, matrix: {n: [1, 2]}, with: {n: "{{ matrix.n }}"}}, all: {run: [cat, "{{ steps.u.model }}"]}}',
        middle="""
inputs: {n: {type: integer}}
steps: {sft: {uses: ./inner.yaml, with: {data: ./d, epochs: "{{ inputs.n }}"}}}
outputs: {model: "{{ steps.sft.model }}"}
""",
        inner=INNER,
    )
    assert "u[n=2]/sft/train" in found.index
    assert author(found, "all")["reads"] == {
        "steps.u.model": ["u[n=1]/sft/m.bin", "u[n=2]/sft/m.bin"]
    }


def test_resources_beside_uses_put_a_recipe_on_another_machine() -> None:
    middle = "resources: {gpus: 1, gpu_memory: 24GB}\npresets: {smoke: {resources: {gpus: 0}}, big: {resources: {gpus: 8}}}\nsteps: {t: {run: x, resources: {disk: 1GB}}}"
    mine = "presets: {smoke: {}}\nsteps: {u: {uses: ./middle.yaml, resources: {gpu: T4, gpu_memory: 16GB}PRESET}}"
    asked = {"gpus": 1, "gpu": "T4", "gpu_memory": 16 * 10**9, "disk": 10**9}
    assert plan(mine.replace("PRESET", ""), middle=middle).specs()[0].resources.as_key == asked
    assert plan(mine.replace("PRESET", ", preset: big"), middle=middle).specs()[
        0
    ].resources.as_key == {**asked, "gpus": 8}
    assert (
        plan(mine.replace("PRESET", ""), preset="smoke", middle=middle).specs()[0].resources.gpus
        == 0
    )
    four = mine.replace("gpu: T4", "gpus: 4")
    assert (
        plan(four.replace("PRESET", ", preset: big"), middle=middle).specs()[0].resources.gpus == 4
    )
    outer = "steps: {v: {uses: ./mine.yaml, resources: {gpus: 2}}}"
    assert plan(outer, mine=mine.replace("PRESET", ""), middle=middle).specs()[
        0
    ].resources.as_key == {**asked, "gpus": 2}


def test_recipes_that_use_each_other_are_a_cycle() -> None:
    found = problem(
        "steps: {u: {uses: ./one.yaml}}",
        one="steps: {u: {uses: ./two.yaml}}",
        two="steps: {u: {uses: ./one.yaml}}",
    )
    assert found.code == "cycle" and "one@1 -> two@1 -> one@1" in found.message


def test_with_takes_an_output_whole() -> None:
    found = problem(
        'steps: {d: {run: x, outputs: {o: d/}}, u: {uses: ./inner.yaml, with: {data: "{{ steps.d.o }}/train"}}}',
        inner=INNER,
    )
    assert found.code == "path-in-text" and pointed(found) == '"{{ steps.d.o }}/train"'


def test_a_list_of_outputs_keeps_its_edges_through_with() -> None:
    found = plan(
        'steps: {m: {run: x, matrix: {n: [1, 2]}, outputs: {o: "m{{ matrix.n }}.bin"}}, u: {uses: ./merge.yaml, with: {parts: "{{ steps.m.o }}"}}}',
        merge="inputs: {parts: {type: list, items: string}}\nsteps: {cat: {run: [cat, '{{ inputs.parts }}']}}",
    )
    assert edges(found) == {"m[n=1] -> u/cat", "m[n=2] -> u/cat"}
    assert author(found, "u/cat")["reads"] == {
        "inputs.parts": ["inputs/parts/0/m1.bin", "inputs/parts/1/m2.bin"]
    }


def test_a_bad_value_in_with_points_at_the_with() -> None:
    found = problem(
        "steps: {u: {uses: ./inner.yaml, with: {data: ./d, epochs: many}}}", inner=INNER
    )
    assert 'in `with` of "u"' in found.message and found.where is not None


def test_a_used_recipe_may_not_read_the_workspace() -> None:
    assert (
        problem(
            "steps: {u: {uses: ./inner.yaml}}", inner="steps: {i: {run: x, deps: [x.txt]}}"
        ).code
        == "library-deps"
    )


# -- inputs -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        ("file", "./data/train.csv", "inputs/x/train.csv"),
        ("file", "./odd@name.csv", "inputs/x/odd@name.csv"),
        ("dataset", "./folder/", "inputs/x/folder"),
        ("model", "hf://org/name@main", "inputs/x/name"),
        ("model", "org/name", "inputs/x/name"),
    ],
)
def test_a_path_keeps_the_last_part_of_its_name(kind: str, value: str, name: str) -> None:
    found = plan(
        f'inputs: {{x: {{type: {kind}}}}}\nsteps: {{a: {{run: [cat, "{{{{ inputs.x }}}}"]}}}}',
        {"x": value},
    )
    assert [take[0] for take in found.nodes[0].takes] == [name] and author(found, "a")["reads"] == {
        "inputs.x": name
    }


def test_what_a_step_does_not_mention_it_does_not_get() -> None:
    found = plan(
        "inputs: {x: {type: file, default: ./x}, n: {type: integer, default: 1}}\nsteps: {a: {run: x}}"
    )
    assert found.nodes[0].takes == [] and author(found, "a")["reads"] == {}


def test_key_false_and_continues() -> None:
    text = """
inputs: {workers: {type: integer, default: 1, key: false}, steps_max: {type: integer, default: 1, continues: true}}
steps: {a: {run: "x {{ inputs.workers }} {{ inputs.steps_max }}", state: {s: {}}, outputs: {o: o}}}
"""
    one, two, three = plan(text), plan(text, {"workers": 8}), plan(text, {"steps_max": 9})
    assert one.nodes[0].author == two.nodes[0].author != three.nodes[0].author
    assert (
        one.specs()[0].continues == {"steps_max": 1} and two.specs()[0].names.inputs["workers"] == 8
    )


def test_a_plan_survives_its_text() -> None:
    found = plan(LATE, globs={"split/parts:*.txt": ("1.txt",)})
    again = Plan.load("".join(found.dump()))
    assert (
        again.nodes == found.nodes
        and again.specs() == found.specs()
        and again.publish == found.publish
    )


def test_a_value_that_no_shell_can_take_is_reported_before_anything_runs() -> None:
    found = problem("""
inputs: {n: {type: integer, default: 1}}
steps: {a: {matrix: {k: [1, 2]}, run: "echo '{{ inputs.n }}'"}}
""")
    assert (
        "single quotes" in found.message
        and found.fix == "use double quotes"
        and "inputs.n" in pointed(found)
    )


def test_a_script_whose_expression_is_none_is_reported_once_with_its_place() -> None:
    found = problem("steps: {a: {run: 'echo {{ [1, 2 }}', outputs: {o: o}}}")
    assert found.message == "this `[` is never closed"
    assert pointed(found) == "["


def test_a_misspelt_name_is_one_error_wherever_its_text_is_rendered_too() -> None:
    for key in (
        'when: "{{ inputs.evv }}"',
        'nodes: "{{ inputs.evv }}"',
        'outputs: {o: "x/{{ inputs.evv }}"}',
    ):
        found = problem(
            f"inputs: {{ev: {{type: boolean, default: true}}}}\nsteps: {{s: {{run: [echo], {key}}}}}\n"
        )
        assert (found.code, found.fix) == ("unknown-name", 'did you mean "inputs.ev"?')


def test_a_step_knows_which_secret_inputs_it_does_not_get() -> None:
    text = "inputs: {key: {type: secret, env: A_KEY}, other: {type: secret, env: B_KEY}}\nsteps: {s: {run: [echo], secrets: [key]}}\n"
    (spec,) = plan(text).specs()
    assert spec.unlisted == {"B_KEY": "other"}


def test_two_misspelt_names_in_one_text_are_two_errors() -> None:
    text = 'inputs: {ev: {type: boolean, default: true}}\nsteps: {s: {run: [echo], when: "{{ inputs.evv or inputs.ew }}"}}\n'
    assert [pointed(found) for found in problems(text)] == ["inputs.evv", "inputs.ew"]


def test_what_is_wrong_in_the_environment_of_all_steps_is_one_error_and_stands_there() -> None:
    text = 'env: {A: "{{ inputs.evv }}", B: "{{ inputs.other }}"}\nsteps: {s: {run: [echo]}, t: {run: [echo], env: {B: "{{ inputs.own }}"}}}\n'
    assert [(found.where.line, pointed(found)) for found in problems(text) if found.where] == [
        (3, "inputs.evv"),
        (3, "inputs.other"),
        (4, "inputs.own"),
    ]


def test_a_step_that_says_it_takes_no_gpu_is_not_asked_to_have_the_machine_of_those_that_do() -> (
    None
):
    """A check of 50 ms needs none of the 64 GB of the training: nothing is rented for it."""
    machine = "{gpus: 2, gpu_memory: 24GB, memory: 64GB, disk: 100GB}"
    shared = f"resources: {machine}\n"
    steps = "steps: {guard: {run: x, resources: {gpus: 0RESOURCES}}, train: {run: y}}"
    guard, train = plan(shared + steps.replace("RESOURCES", "")).specs()
    assert not guard.resources.gpus and guard.resources.memory is guard.resources.disk is None
    assert (train.resources.gpus, train.resources.memory) == (2, 64 * 10**9)
    own = plan(shared + steps.replace("RESOURCES", ", memory: 32GB")).specs()[0]
    assert own.resources.memory == 32 * 10**9 and own.resources.disk is None
    presets = "presets: {big: {resources: {gpus: 8, memory: 96GB}}, long: {resources: {disk: 1TB}}, smoke: {resources: {gpus: 0, memory: 4GB}}}\n"
    for name, train_gpus, guard_memory in (("big", 8, None), ("long", 2, None), ("smoke", 0, 4)):
        guard, train = plan(shared + presets + steps.replace("RESOURCES", ""), preset=name).specs()
        assert not guard.resources.gpus and guard.resources.disk is None
        assert guard.resources.memory == (guard_memory and guard_memory * 10**9)
        assert train.resources.gpus == train_gpus
    used = "steps: {u: {uses: ./inner.yaml, resources: {gpus: 4, memory: 128GB}}}"
    inner = "recipe: inner@1\nsummary: s\n" + steps.replace("RESOURCES", "")
    guard, train = plan(used, inner=inner).specs()
    assert not guard.resources.gpus and guard.resources.memory is None
    assert (train.resources.gpus, train.resources.memory) == (4, 128 * 10**9)
    preset = f"resources: {{gpus: 1}}\npresets: {{big: {{resources: {machine}}}}}\n"
    beside = f"steps: {{u: {{uses: ./inner.yaml, resources: {machine}}}}}"
    whole = steps.replace("RESOURCES", "")
    for guard, train in (
        plan(preset + whole, preset="big").specs(),
        plan(beside, inner=whole).specs(),
    ):
        assert not guard.resources.gpus and guard.resources.memory is None
        assert (train.resources.gpus, train.resources.memory) == (2, 64 * 10**9)
    both = "resources: {gpus: 0, memory: 12GB}\n" + steps.replace("RESOURCES", "")
    assert plan(both).specs()[0].resources.memory == 12 * 10**9, "the machine of all steps"


@pytest.mark.parametrize(
    ("rest", "wrong"),
    [
        ('outputs: {o: "out/{{ matrix.w }}.txt"}', "matrix.w"),
        ('outputs: {o: "{{ matrix.v }}", p: "out/{{ inputs.x }}/{{ matrix.v }}"}', "inputs.x"),
        ('outputs: {o: "{{ matrix.v }}"}, when: "{{ matrix.w > 1 }}"', "matrix.w"),
        ('outputs: {o: "{{ run.id }}"}', "run.id"),
    ],
)
def test_a_wrong_name_is_one_problem_of_a_matrix(rest: str, wrong: str) -> None:
    found = problem(
        f"recipe: r@1\nsteps:\n  t: {{matrix: {{v: [1, 2, 3]}}, run: [echo], {rest}}}\n"
    )
    assert f'"{wrong}"' in found.message


def test_an_output_whose_path_is_null_is_said() -> None:
    text = 'recipe: r@1\nsteps:\n  t: {matrix: {v: [a, null]}, run: [echo], outputs: {o: "{{ matrix.v }}"}}\n'
    assert problem(text).message == 'output "o" of "t" is null'


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("{type: string, default: null}", "is null"),
        ("{type: list, default: [x]}", "is a list, not a path"),
        ("{type: object, default: {x: y}}", "is a mapping, not a path"),
    ],
)
@pytest.mark.parametrize(
    ("part", "what"),
    [
        ('outputs: {o: "{{ inputs.d }}"}', 'output "o" of "t" '),
        ('state: {s: {path: "{{ inputs.d }}"}}', 'state "s" of "t" '),
    ],
)
def test_a_path_to_write_is_a_text(kind: str, wrong: str, part: str, what: str) -> None:
    """Never the words `None` or `['x']`, which would be names of directories."""
    found = problem(f"inputs: {{d: {kind}}}\nsteps: {{t: {{run: [echo], {part}}}}}")
    assert found.message == what + wrong and found.code == "path-escape"


@pytest.mark.parametrize(
    ("part", "empty"),
    [
        ('deps: ["{{ inputs.d }}"]', []),
        ('deps: [{glob: "{{ inputs.d }}"}]', []),
        ('deps: [{glob: "*", exclude: [a, "{{ inputs.d }}"]}]', []),
        ('matrix: {f: {glob: "{{ inputs.d }}"}}', [("t", "")]),
        ('matrix: {f: {glob: "*", exclude: [a, "{{ inputs.d }}"]}}', []),
    ],
)
def test_a_pattern_is_a_text_or_null(part: str, empty: list[tuple[str, str]]) -> None:
    text = f"inputs: {{d: KIND}}\nsteps: {{t: {{run: [echo], {part}}}}}"
    for kind, wrong in (
        ("{type: list, default: [x]}", '"{{ inputs.d }}" is a list, not a path'),
        ("{type: object, default: {x: y}}", '"{{ inputs.d }}" is a mapping, not a path'),
    ):
        assert problem(text.replace("KIND", kind)).message == wrong
    optional = text.replace("KIND", "{type: string, default: null}")
    assert plan(optional, globs={"*": ("a", "None")}).empty == empty


def test_null_excludes_nothing() -> None:
    text = """
inputs: {d: {type: string, default: null}}
steps:
  t: {run: [echo], deps: ["{{ inputs.d }}", {glob: "*", exclude: [a, "{{ inputs.d }}"]}]}
  m: {run: [echo], matrix: {f: {glob: "*", exclude: [a, "{{ inputs.d }}"]}}}
"""
    found = plan(text, globs={"*": ("a", "None", "b")})
    assert found.nodes[0].deps == [encode_pattern("*", ["a"])]
    assert [each.id for each in found.nodes[1:]] == ["m[f=None]", "m[f=b]"]


CASES = """
steps:
  x: {matrix: {s: [A, a, "\\u00e9", "e\\u0301"]}, run: 'echo > "{{ outputs.o }}"', outputs: {o: "o/{{ matrix.s }}"}}
"""


def test_names_that_differ_in_case_are_two_files_where_the_disk_tells_them_apart() -> None:
    assert len(plan(CASES).nodes) == 4
    (found,) = problems(CASES, as_disk=lambda path: normalize("NFC", path).casefold())
    assert (
        "differ only in case and are the same file on this disk" in found.message
        and "A" in found.message
    )


def test_deps_take_what_steps_make() -> None:
    made = plan("""
inputs: {n: {type: integer, default: 3}}
steps:
  parts: {matrix: {i: "{{ inputs.n | range }}"}, run: 'echo > "{{ outputs.o }}"', outputs: {o: "p/{{ matrix.i }}"}}
  d: {run: 'echo > "{{ outputs.d }}/x"', outputs: {d: d/}}
  all: {run: 'cat p/*', deps: ["{{ steps.parts.o }}"]}
  one: {run: 'cat d/x', deps: ["{{ steps.d.d }}/x"]}
  some: {run: 'cat d/*', deps: [{glob: "{{ steps.d.d }}/*.txt"}]}
  count: {run: [echo, "{{ steps.parts.o | length }}"], when: "{{ (steps.parts.o | length) == inputs.n }}"}
""")
    names = {node.id: [each.name for each in node.upstream] for node in made.nodes}
    assert names["all"] == ["p/0", "p/1", "p/2"]
    assert names["one"] == names["some"] == ["d"]
    assert not made.nodes[made.index["count"]].flags & SKIP


def test_deps_know_no_metrics() -> None:
    found = problem("""
steps:
  a: {run: [echo], metrics: true, outputs: {o: a}}
  b: {run: [echo], deps: ["{{ steps.a.metrics.loss }}"]}
""")
    assert found.code == "late-name"


def test_an_output_of_a_recipe_whose_step_waits_is_named_rightly() -> None:
    text = """
steps:
  split: {run: 'echo > "{{ outputs.d }}/1"', outputs: {d: parts/}}
  each: {matrix: {f: {glob: "parts/*"}}, run: 'cat "{{ matrix.f }}" > "{{ outputs.o }}"', outputs: {o: "e/{{ matrix.f | name }}"}}
outputs: {x: "{{ steps.each.oo }}"}
"""
    assert problem(text).message == 'unknown name "steps.each.oo"'


@pytest.mark.parametrize("run", ["[7, x]", "[-m, x]", "[[--lr, 1]]"])
def test_a_command_begins_with_a_program(run: str) -> None:
    assert problem(f"steps: {{a: {{run: {run}}}}}").code == "bad-command"
