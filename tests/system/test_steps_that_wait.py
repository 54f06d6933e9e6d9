"""Steps that are not known before another one has run: a matrix over the files that it makes, and what needs that.  They can be asked for by name."""

from __future__ import annotations

import pytest

from runner.errors import CannotRun, NotFound
from runner.execution.terms import Choice, Settings
from tests.support import Space

LATE = """
steps:
  split: {run: "echo 1 > {{ outputs.parts }}/1; echo 2 > {{ outputs.parts }}/2", outputs: {parts: parts/}}
  other: {run: "echo 3 > {{ outputs.o }}", outputs: {o: other}}
  each:
    matrix: {f: {glob: "parts/*"}}
    run: cat {{ matrix.f }} > {{ outputs.o }}
    deps: ["{{ matrix.f }}"]
    outputs: {o: "out/{{ matrix.f | name }}"}
  merge: {run: "cat {{ steps.each.o }} other > {{ outputs.all }}", deps: [other], outputs: {all: all}}
  last: {run: "cat out/1 > {{ outputs.o }}", deps: [out/1], outputs: {o: last}}
"""
EACH = {"each[f=parts%2F1]", "each[f=parts%2F2]"}
ALL = {"split", "other", *EACH, "merge", "last"}


@pytest.fixture
def late(space: Space) -> Space:
    space.recipe(LATE)
    return space


@pytest.mark.parametrize("how", ["only", "until"])
def test_what_waits_for_a_step_does_not_run_with_it_unless_it_is_asked_for(
    late: Space, how: str
) -> None:
    assert late.run(choice=Choice(**{how: "split"})) == ["split"]
    assert set(late.run()) == ALL - {"split"}


@pytest.mark.parametrize(
    ("until", "runs"),
    [
        ("each", {"split", *EACH}),
        ("merge", {"split", "other", *EACH, "merge"}),
        ("last", {"split", *EACH, "last"}),
    ],
)
def test_a_step_that_waits_can_be_the_last_that_is_asked_for(
    late: Space, until: str, runs: set[str]
) -> None:
    lines = late.command("plan", "--until", until)[1].splitlines()
    shown = {line.split()[1] for line in lines if line.startswith(("run ", "maybe "))}
    assert shown == {"each[…]" if step in EACH else step for step in runs} | (
        {"each[…]"} if until == "last" else set()
    )
    assert set(late.run(choice=Choice(until=until))) == runs - (
        EACH - {"each[f=parts%2F1]"} if until == "last" else set()
    )
    assert late.run(choice=Choice(until=until)) == []


def test_from_a_step_all_that_waits_for_it_runs_again(late: Space) -> None:
    late.run()
    assert set(late.run(choice=Choice(begin="split"))) == ALL - {"other"}
    assert set(late.run(choice=Choice(begin="each"))) == {*EACH, "merge", "last"}


def test_a_step_that_waits_can_be_run_again_in_the_first_run(late: Space) -> None:
    assert set(late.run(choice=Choice(again=("merge",)))) == ALL


def test_a_step_that_waits_is_no_unknown_one(late: Space) -> None:
    with pytest.raises(CannotRun, match="split, a dependency of merge, is out of date"):
        late.run(choice=Choice(only="merge"))
    with pytest.raises(CannotRun, match=r"the step each\[f=parts%2F1\] is not known yet"):
        late.run(choice=Choice(until="each[f=parts%2F1]"))
    with pytest.raises(NotFound, match="has no step"):
        late.run(choice=Choice(until="nothing"))
    assert "it depends on the outputs of each" in late.command("why", "merge")[2]


def test_every_step_that_waits_is_shown(late: Space) -> None:
    plan = late.command("plan")[1]
    assert all(f"maybe    {step}\n" in plan for step in ("each[…]", "merge", "last"))
    graph = late.command("graph")[1]
    assert (
        "merge  depends on the outputs of each" in graph
        and "each[…]  one for each * from split" in graph
    )
    late.run(choice=Choice(until="split"))
    assert {
        line.split()[1] for line in late.command("plan")[1].splitlines() if line.startswith("run ")
    } == {
        "other",
        "each[f=parts/1]",
        "each[f=parts/2]",
    }


@pytest.mark.parametrize("matrix", [{}, {"matrix": {"n": [1, 2]}}], ids=["once", "matrix"])
def test_a_used_recipe_may_list_an_output_of_a_step_that_waits(
    late: Space, matrix: dict[str, object]
) -> None:
    late.write(
        "inner.yaml",
        f'recipe: inner@1\n{LATE}outputs: {{all: "{{{{ steps.merge.all }}}}", one: "{{{{ steps.split.parts }}}}"}}',
    )
    late.recipe(
        {
            "steps": {
                "s": {"uses": "./inner.yaml", **matrix},
                "end": {"run": "cat {{ steps.s.all }} > {{ outputs.o }}", "outputs": {"o": "o"}},
            }
        }
    )
    assert late.command("validate", "recipe.yaml")[0] == 0
    assert late.run()[-1] == "end" and late.read("o") == "1\n2\n3\n" * (2 if matrix else 1)
    assert late.run() == []


def test_a_step_that_runs_while_another_matrix_is_expanded_keeps_what_it_made(space: Space) -> None:
    wait = f"until [ -e {space.root}/%s ]; do sleep 0.01; done"
    space.recipe(
        {
            "steps": {
                "two": {
                    "run": f"{wait % 'x-began'}; echo 2 > {{{{ outputs.o }}}}/2",
                    "outputs": {"o": "two/"},
                },
                "y": {
                    "matrix": {"f": {"glob": "two/*"}},
                    "deps": ["{{ matrix.f }}"],
                    "run": f"touch {space.root}/y-began; cat {{{{ matrix.f }}}} > {{{{ outputs.o }}}}",
                    "outputs": {"o": "y/{{ matrix.f | name }}"},
                },
                "one": {"run": "echo 1 > {{ outputs.o }}/1", "outputs": {"o": "one/"}},
                "x": {
                    "matrix": {"f": {"glob": "one/*"}},
                    "run": f"touch {space.root}/x-began; {wait % 'y-began'}; cat {{{{ matrix.f }}}} > {{{{ outputs.o }}}}",
                    "outputs": {"o": "x/{{ matrix.f | name }}"},
                },
                "both": {
                    "run": "cat {{ steps.x.o }} {{ steps.y.o }} > {{ outputs.o }}",
                    "outputs": {"o": "both"},
                },
            }
        }
    )
    space.run(settings=Settings(jobs=3))
    assert (
        space.read("both") == "1\n2\n" and space.read("x/1") == "1\n" and space.read("y/2") == "2\n"
    )
    assert space.run() == []


def test_results_that_are_listed_are_there_though_another_instance_was_still_awaited(
    late: Space,
) -> None:
    inner = LATE.replace("steps:", "inputs: {n: {type: integer}}\nsteps:").replace(
        "echo 1 >", "echo {{ inputs.n }} >"
    )
    late.write(
        "inner.yaml", f'recipe: inner@1\n{inner}outputs: {{all: "{{{{ steps.merge.all }}}}"}}'
    )
    late.recipe(
        'inputs: {ns: {type: list, items: integer}}\nsteps: {s: {matrix: {n: "{{ inputs.ns }}"}, uses: ./inner.yaml, with: {n: "{{ matrix.n }}"}}}\n'
        'outputs: {all: "{{ steps.s.all }}"}'
    )
    late.run({"ns": [1]})
    (late.root / "s[n=1]/all").unlink()
    late.run({"ns": [1, 2]})
    assert [late.read(f"s[n={n}]/all") for n in (1, 2)] == ["1\n2\n3\n", "2\n2\n3\n"]
    assert late.summary is not None and sum(late.summary.counts.values()) == len(
        late.answers({"ns": [1, 2]})
    )
    assert late.run({"ns": [1, 2]}) == []
