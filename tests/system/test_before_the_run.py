"""Promise: what can be known before a run is said before it, and what may work is not refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import CannotRun, Invalid, nearest
from runner.execution.terms import Choice
from runner.language import parse, unread
from runner.survey import validation
from tests.support import Space

ROOT = Path(__file__).parents[2]

INPUTS = """
inputs:
  layers: {type: list, items: integer, default: [1, 2]}
  cfg: {type: object, default: {a: 1}}
  note: {type: string, required: false}
steps:
  train: {run: 'echo 1 > "{{ outputs.o }}"', metrics: true, outputs: {o: model.bin}}
  many: {matrix: {k: [1, 2]}, run: 'echo > "{{ outputs.o }}"', outputs: {o: "m{{ matrix.k }}"}}
"""
NEVER = {
    "run: [echo, '--layers={{ inputs.layers }}', '{{ steps.train.o }}']": "a list cannot",
    "run: [echo, 'x{{ inputs.cfg }}']": "a mapping cannot",
    "run: [echo, '{{ inputs.layers[5] }}']": "has 2 items",
    "run: [echo, '{{ inputs.cfg.zz }}']": "has no `zz`",
    "run: [echo, '{{ 10 // (inputs.layers[0] - 1) }}']": "division by zero",
    "run: [echo, '{{ steps.train.metrics.loss // 0 }}']": "division by zero",
    "run: [echo], env: {X: '{{ inputs.layers }}'}": "a list cannot",
    "run: [echo], files: {c.txt: 'a{{ inputs.layers }}'}": "a list cannot",
    "run: [echo], files: {c.txt: '{{ inputs.layers }}'}": "can be written as .json",
    "run: [echo], files: {c.toml: '{{ inputs.layers }}'}": "holds a mapping",
    "run: 'echo \"x{{ inputs.layers }}\"'": "a list cannot",
    "run: 'echo \"{{ steps.many.o }}/x\"'": "a list cannot",
    "run: 'echo $(( {{ inputs.cfg.a / 2 }} ))'": "only a whole number",
    "run: [echo, 'a{{ inputs.note }}']": "inputs.note is null here: null cannot",
    "run: [echo, 'a{{ inputs.layers }}{{ inputs.note }}']": "a list cannot",
    "run: ['{{ inputs.note }}']": "inputs.note is null here: the command is empty",
    "run: [echo, 'a{{ host.nope }}']": "host.nope",
    "run: [echo], when: '{{ (inputs.layers | size) > 2 }}'": "there is no filter `size`",
    "run: [echo], when: '{{ steps.train.metrics.loss ~ 1 }}'": "`when` is text",
    "accelerate: {script: a.py, processes: '{{ inputs.cfg.a / 2 }}'}": "whole number",
    "accelerate: {script: a.py, args: {x: '{{ inputs.cfg }}'}}": "a mapping cannot",
    "accelerate: {script: '{{ inputs.note }}'}": "inputs.note is null here: the program is null",
    "accelerate: {module: '{{ inputs.note }}'}": "inputs.note is null here: the program is null",
    "accelerate: {script: '{{ inputs.layers }}'}": "a list cannot",
    "accelerate: {script: a.py, config: '{{ inputs.cfg }}'}": "a mapping cannot",
}
SOMETIMES = [
    "run: [echo, '{{ 10 // (steps.train.metrics.loss - 1) }}', 'x{{ steps.train.metrics.name }}']",
    "run: [echo, '{{ inputs.layers }}', '{{ steps.many.o }}', '{{ inputs.note }}']",
    "run: [echo, 'a{{ inputs.layers if inputs.note else 1 }}']",
    "run: [echo, 'a{{ inputs.note }}'], when: '{{ inputs.note is not none }}'",
    "run: [echo, 'a{{ inputs.note | default(1) }}', 'b{{ inputs.cfg.zz | default(2) }}']",
    "run: [echo], env: {X: '{{ inputs.note }}'}, files: {a.json: {n: '{{ inputs.note }}'}}",
    "run: 'echo {{ inputs.layers }} $(( {{ host.gpus }} )) {{ nodes.addresses[0] }}'",
    "run: [echo], when: '{{ steps.train.metrics.loss }}'",
    "accelerate: {script: a.py, processes: '{{ host.gpus }}', args: {x: '{{ inputs.layers }}'}}",
    "accelerate: {script: a.py, config: '{{ inputs.note }}', mixed_precision: '{{ inputs.note }}'}",
    "accelerate: {script: '{{ steps.train.o }}', config: '{{ steps.train.metrics.file }}'}",
]


@pytest.mark.parametrize("step", [*NEVER])
def test_what_no_attempt_can_render_is_refused_before_anything_runs(
    space: Space, step: str
) -> None:
    space.recipe(f"{INPUTS}  last: {{{step}, needs: [train]}}\n")
    for found in (space.problems(), validated(space)):
        assert [NEVER[step] in problem.message for problem in found] == [True], found
        assert found[0].where is not None and found[0].where.line == 11
    with pytest.raises(Invalid):
        space.attempt()
    assert not (space.root / "model.bin").exists()


@pytest.mark.parametrize("step", SOMETIMES)
def test_what_some_values_can_render_is_not_refused(space: Space, step: str) -> None:
    space.recipe(f"{INPUTS}  last: {{{step}}}\n")
    assert space.problems() == [] and validated(space) == []


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path)


def validated(space: Space, **given: str) -> list[validation.Problem]:
    found = validation.check_file(space.root / space.file, space.root, given)
    return [problem for problem in found if problem.severity == "error"]


def test_only_what_may_run_is_tried(space: Space) -> None:
    space.recipe(f"{INPUTS}  last: {{run: [echo, 'x{{{{ inputs.layers }}}}']}}\n")
    assert space.run(choice=Choice(only="train")) == ["train"]
    assert space.run(choice=Choice(until="train")) == []
    with pytest.raises(Invalid, match="a list cannot"):
        space.run(choice=Choice(only="last"))


def test_a_null_variable_of_the_environment_is_not_set(space: Space) -> None:
    space.recipe("""
inputs: {note: {type: string, required: false}}
steps: {a: {run: 'echo "${X-unset}" > "{{ outputs.o }}"', env: {X: "{{ inputs.note }}"}, outputs: {o: o}}}
""")
    assert space.run() == ["a"] and space.read("o") == "unset\n"
    assert space.run({"note": "n"}) == ["a"] and space.read("o") == "n\n"


@pytest.mark.parametrize(
    ("declared", "leaf"),
    [
        ("{type: list}", "x{{ inputs.v }}"),
        ("{type: integer}", "{{ inputs.v.k }}"),
        ("{type: integer}", "x{{ inputs.v | stem }}"),
        ("{type: list, required: false}", "x{{ inputs.v if inputs.v is not none else '' }}"),
        ("{type: boolean, default: false}", "{{ [][0] if inputs.v else 1 }}"),
    ],
)
def test_validate_tries_inputs_that_nobody_gave_by_their_types(
    space: Space, declared: str, leaf: str
) -> None:
    space.recipe(f'inputs: {{v: {declared}}}\nsteps: {{a: {{run: [echo, "{leaf}"]}}}}\n')
    found = validated(space)
    assert bool(found) is ("boolean" not in declared), found


def test_validate_tries_a_step_that_is_skipped_by_default(space: Space) -> None:
    space.recipe("""
inputs: {extra: {type: boolean, default: false}, layers: {type: list, default: [1]}}
steps:
  a: {run: 'true'}
  b: {run: [echo, "x{{ inputs.layers }}"], when: "{{ inputs.extra }}"}
""")
    assert ["a list cannot" in problem.message for problem in validated(space)] == [True]
    assert space.problems() == [] and space.run() == ["a"]
    assert space.problems({"extra": True}) != []


def test_commands_around_the_steps_are_tried_too(space: Space) -> None:
    space.recipe("""
inputs: {layers: {type: list, default: [1]}}
cleanup: ['echo "x{{ inputs.layers }}"']
steps: {a: {run: 'true'}}
""")
    assert ["a list cannot" in problem.message for problem in space.problems()] == [True]
    assert ["a list cannot" in problem.message for problem in validated(space)] == [True]


# -- after a dynamic glob --------------------------------------------------------------------------------------------------------------------------

DYNAMIC = """
steps:
  split: {run: 'mkdir -p parts; echo 1 > parts/a; touch split', outputs: {parts: parts/}}
  each: {matrix: {f: {glob: "parts/*"}}, run: 'cat "{{ matrix.f }}" > "{{ outputs.o }}"', outputs: {o: "proc/{{ matrix.f | stem }}.txt"}}
  join: {run: 'cat {{ steps.each.o }} > "{{ outputs.o }}"', outputs: {o: joined.txt}}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "proc/{{ matrix.f | stem }}.txt",
            "proc/all.txt",
            'several instances of "each" have the same output path',
        ),
        ("matrix.f | stem", "matrix.f.stem", "is text and has no such part"),
        ("matrix.f | stem", "matrix.f | basename", "there is no filter `basename`"),
        ("proc/{{ matrix.f | stem }}.txt", "/proc", "leaves the attempt"),
        ("o: joined.txt", "o: proc", "is inside"),
        ("o: joined.txt", "o: joined.txt, p: ../x", "leaves the attempt"),
        ("o: joined.txt", "o: parts/x", 'is inside "parts"'),
        ("cat {{ steps.each.o }}", 'cat "x{{ steps.each.o }}"', "a list cannot"),
        ("cat {{ steps.each.o }}", "cat {{ steps.each.oo }}", 'unknown name "steps.each.oo"'),
        ("cat {{ steps.each.o }}", "cat {{ inputs.nope }}", 'unknown name "inputs.nope"'),
        ("joined.txt}}", "joined.txt}, when: '{{ 1 }}'}", "not true or false"),
        (
            "joined.txt}}",
            "joined.txt}, nodes: '{{ 0.5 }}'}",
            "must be a whole number, 1 or greater",
        ),
    ],
)
def test_a_step_after_a_dynamic_glob_is_checked_before_the_run(
    space: Space, old: str, new: str, says: str
) -> None:
    assert old in DYNAMIC
    space.recipe(DYNAMIC.replace(old, new))
    for found in (space.problems(), validated(space)):
        assert [says in problem.message for problem in found] == [True], found


@pytest.mark.parametrize(
    "needs", ["code: [nope.py]", "deps: [missing.txt]", "deps: [gone/]", "deps: ['gone/x.txt']"]
)
def test_a_file_that_a_later_step_needs_is_missed_before_the_run(space: Space, needs: str) -> None:
    space.recipe(DYNAMIC.replace("joined.txt}}", f"joined.txt}}, {needs}}}"))
    with pytest.raises(CannotRun, match="join requires"):
        space.attempt()
    assert not (space.root / "parts").exists()


def test_what_another_waiting_step_makes_is_not_missed(space: Space) -> None:
    late = """
  more: {run: 'mkdir -p more; cp "joined.txt" more/j; cp "joined.txt" "more/{{ steps.each.o[0] | stem }}"', deps: [joined.txt], outputs: {d: more/}}
  last: {matrix: {g: {glob: "more/*"}}, run: 'cat "{{ matrix.g }}" proc/a.txt > "{{ outputs.o }}"', deps: [proc/a.txt], outputs: {o: "last/{{ matrix.g | name }}"}}
"""
    space.recipe(DYNAMIC + late)
    assert validated(space) == [] and space.problems() == []
    ran = space.run()
    assert {"last[g=more%2Fj]", "last[g=more%2Fa]"} <= set(ran)
    assert space.run() == []


def test_everything_that_is_shipped_validates() -> None:
    """No alarm on what works: the library, the examples and the recipes of the tests."""
    shelf = [(path, False) for path in sorted((ROOT / "recipes").glob("*@*.yaml"))]
    own = [*(ROOT / "examples").glob("*/*.yaml"), *(ROOT / "fixtures/recipes").glob("*.yaml")]
    shelf += [(path, True) for path in sorted(own) if b"\nsteps:" in path.read_bytes()]
    assert len(shelf) > 25
    for path, is_own in shelf:
        found = validation.check_file(path, path.parent if is_own else ROOT, {}, own=is_own)
        # The programs of a fixture come with the test that runs it.
        wrong = [each for each in found if each.severity == "error" and each.code != "no-such-file"]
        assert wrong == [], path


# -- inputs that nothing reads ---------------------------------------------------------------------------------------------------------------------

IDLE = """
inputs:
  text: {type: string, default: a}
  data: {type: dataset, default: d, secret: token}
  token: {type: secret, env: TOKEN, required: false}
  key: {type: secret, env: KEY, required: false}
  width: {type: integer, default: 2}
  size: {type: integer, default: "{{ inputs.width * 2 }}"}
  named: {type: string, default: n}
presets: {p: {text: b}, q: {size: 3}}
secrets: [key]
steps:
  a: {run: 'echo {{ inputs.size }}', files: {"x.json": {n: "{{ inputs.named }}"}}}
  b: {run: [echo, "{{ inputs.data }}"]}
"""


def test_an_input_that_nothing_reads_is_a_warning_with_its_place(space: Space) -> None:
    space.recipe(IDLE)
    found = validation.check_file(space.root / space.file, space.root, {})
    said = [each for each in found if each.severity == "warning"]
    assert [(each.code, space.pointed(each)) for each in said] == [("unread-input", "text")]
    code, _, errors = space.command("plan")
    assert (
        code == 0
        and 'the input "text" of t@1 is never used' in errors
        and "recipe.yaml:5:3" in errors
    )


@pytest.mark.parametrize("words", [["text=b"], ["--preset", "p"], ["text=a"]])
def test_a_value_for_an_input_that_nothing_reads_is_refused(space: Space, words: list[str]) -> None:
    space.recipe(IDLE)
    for verb in ("run", "plan", "submit", "check"):
        code, _, errors = space.command(verb, *words)
        assert code == 3 and 'the input "text" of t@1 is never used' in errors, (verb, errors)


def test_a_sweep_over_an_input_that_nothing_reads_is_refused(space: Space) -> None:
    space.recipe(IDLE)
    code, _, errors = space.command("sweep", "./recipe.yaml", "text=b,c")
    assert code == 3 and 'the input "text" of t@1 is never used' in errors


def test_the_inputs_of_everything_that_is_shipped_are_read() -> None:
    shelf = [*(ROOT / "recipes").glob("*@*.yaml"), *(ROOT / "examples").glob("*/*.yaml")]
    read = [parse.load(path) for path in shelf if b"\nsteps:" in path.read_bytes()]
    assert len(read) > 20
    assert {
        recipe.id: unread.find_unread(recipe) for recipe in read if unread.find_unread(recipe)
    } == {}


# -- globs that nothing matches --------------------------------------------------------------------------------------------------------------------

GLOBS = """
steps:
  each: {matrix: {f: {glob: "data/*.txt"%s}}, run: 'cat "{{ matrix.f }}" > "{{ outputs.o }}"', outputs: {o: "out/{{ matrix.f | stem }}"}}
  all: {run: 'echo {{ steps.each.o }} > "{{ outputs.o }}"', deps: [{glob: "data/*.md"%s}], outputs: {o: all}}
"""


def test_a_glob_that_nothing_matches_is_a_warning_of_plan_and_summary(space: Space) -> None:
    space.recipe(GLOBS % ("", ""))
    space.write("data/x.csv", "")
    code, out, errors = space.command("plan")
    assert code == 0, errors
    assert 'warning: each: nothing matches "data/*.txt", so the step has no instances' in out
    assert 'warning: all: nothing matches "data/*.md" (' in out and "allow_empty: true" in out
    for _ in ("runs", "is fresh"):
        code, _, errors = space.command("run")
        assert code == 0 and errors.count("warning: ") == 2 and '"data/*.txt"' in errors
    assert space.summary is None and space.run() == []
    space.write("data/x.txt", "")
    space.write("data/x.md", "")
    code, _, errors = space.command("run")
    assert code == 0 and "warning" not in errors


def test_a_glob_says_that_it_may_match_nothing(space: Space) -> None:
    space.recipe(GLOBS % (", allow_empty: true", ", allow_empty: true"))
    for folder in ("", "data/x.csv"):
        if folder:
            space.write(folder, "")
        for verb in ("plan", "run"):
            code, out, errors = space.command(verb)
            assert code == 0 and "warning" not in out + errors, (out, errors)


@pytest.mark.parametrize("says", [(", allow_empty: false", ""), ("", ", allow_empty: false")])
def test_a_glob_says_that_it_must_match_something(space: Space, says: tuple[str, str]) -> None:
    space.recipe(GLOBS % says)
    space.write("data/x.csv", "")
    code, _, errors = space.command("run")
    assert code in (2, 3) and "match" in errors and not (space.root / "all").exists()
    space.write("data/x.txt", "")
    space.write("data/x.md", "")
    assert space.command("run")[0] == 0


def test_a_folder_of_a_glob_that_is_not_there_is_refused_at_once(space: Space) -> None:
    space.recipe("""
steps:
  first: {run: 'echo > "{{ outputs.o }}"', outputs: {o: first/x.txt}}
  later: {run: 'true', needs: [first], deps: ["first/**", "nope/**"]}
  each: {matrix: {f: {glob: "gone/*"}}, run: 'true', outputs: {o: "out/{{ matrix.f | stem }}"}}
""")
    code, _, errors = space.command("run")
    assert code == 2 and "nope does not exist" in errors and "gone does not exist" in errors
    assert not (space.root / "first").exists()


@pytest.mark.parametrize("says", ["", ", allow_empty: true", ", allow_empty: false"])
def test_a_dynamic_glob_that_finds_nothing_is_said_at_the_end(space: Space, says: str) -> None:
    space.recipe(
        """
steps:
  split: {run: 'mkdir -p parts', outputs: {parts: parts/}}
  each: {matrix: {f: {glob: "parts/*", SAYS}}, run: 'true', outputs: {o: "out/{{ matrix.f | stem }}"}}
""".replace(", SAYS", says)
    )
    code, _, errors = space.command("run")
    assert (code == 0) is ("false" not in says), errors
    assert ("nothing matches" in errors) is ("true" not in says), errors


# -- files and names -------------------------------------------------------------------------------------------------------------------------------


def test_validate_finds_files_of_code_and_deps_that_are_not_there(space: Space) -> None:
    space.recipe("""
code: [nope.py]
inputs: {data: {type: string, default: d.txt}, run_it: {type: boolean, default: false}}
steps:
  a: {run: [echo], deps: [missing.txt, "nope/**", "*.yaml", "b/**/x", recipe.yaml, {glob: "q/*", allow_empty: true}, "{{ inputs.data }}"]}
  b: {run: [echo], outputs: {o: b/}}
  c: {run: [echo], code: ["*.rs"], deps: [b/x]}
  d: {run: [echo], deps: [perhaps.txt], when: "{{ inputs.run_it }}"}
""")
    found = {space.pointed(each).strip('"') for each in validated(space)}
    assert found == {"nope.py", "missing.txt", "nope/**", "*.rs"}
    for name in ("nope.py", "missing.txt", "nope/x", "x.rs"):
        space.write(name, "")
    assert validated(space) == []


def test_a_mistake_of_shape_hides_no_mistake_of_a_template_elsewhere(space: Space) -> None:
    space.recipe("""
inputs: {layers: {type: list, default: [1]}, lr: {type: number, default: x}, bad: {tpye: string}}
steps:
  a: {run: [echo, "x{{ inputs.layers }}", "{{ inputs.lr }}", "{{ inputs.bad }}"], timeout: 300, outputs: {p: p}}
  b: {run: [echo, "{{ steps.trian.o }}", "{{ steps.a.p }}"], outputs: {o: {pat: x}}}
  e: {run: [echo, "{{ steps.b.o }}", "{{ inputs.layer }}"], depends_on: [a], outputs: {o: o}}
""")
    found = validated(space)
    assert {space.pointed(each) for each in found} == {
        *("x", "tpye", "300", "pat", "depends_on"),
        *("{{ inputs.layers }}", "steps.trian.o", "inputs.layer"),
    }


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("steps.trian", ["steps.e", "steps.data"], ""),
        ("steps.trian", ["steps.e", "steps.train"], "steps.train"),
        ("./nope.yaml", ["./p2.yaml"], ""),
        ("nope.yaml", ["p2.yaml"], ""),
        ("stf@1", ["sft@1", "cpt@1"], "sft@1"),
        ("inputs.epoch", ["inputs.epochs"], "inputs.epochs"),
        ("aa", ["a"], "a"),
        ("max_step", ["max_steps"], "max_steps"),
        ("train[lr=1]", ["train[lr=2]"], "train[lr=2]"),
    ],
)
def test_a_guess_never_bridges_unrelated_words(word: str, known: list[str], meant: str) -> None:
    assert nearest(word, known) == meant


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("run: [t.py, x], code: [t.py]", "a program without a slash is searched on PATH"),
        ("run: [python, nope.py, x]", "starts nope.py, which does not exist"),
        ("run: [python, made.py, x]", ""),
        ("run: [python, dir/x.py], files: {dir/x.py: 'print(1)'}", ""),
        ("run: [python, t.py, --out, new.py], code: [t.py]", ""),
        ("run: [echo, nope.py]", ""),
        ("run: [./t.py], code: [t.py]", ""),
        ("run: [python, nope.py], image: a/b:1", ""),
    ],
)
def test_a_script_that_is_not_there_is_a_warning(tmp_path: Path, step: str, words: str) -> None:
    space = Space(tmp_path)
    space.write("t.py", "print(1)")
    text = "steps:\n  g: {run: 'echo > \"{{ outputs.o }}\"', outputs: {o: made.py}}\n"
    space.recipe(f"{text}  s: {{{step}}}\n")
    said = space.command("validate")
    assert words in said[1] and (words or "warning" not in said[1]), said
