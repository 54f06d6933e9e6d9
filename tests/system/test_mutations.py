"""Single mistakes in the examples are found by `validate`, and nothing is said of recipes without one."""

from __future__ import annotations

from collections import Counter

from benchmarks import mutations

EXAMPLES = [path for path in mutations.recipes() if path.parts[-3] == "examples"]
LEAST = {
    "rename in a template": 1.0,
    "rename a key": 0.9,
    "nest a key too far out": 0.9,
    "nest a key too far in": 0.8,
    "unquote": 0.8,
    "retype a value": 0.7,
    "drop a key": 0.5,
}
"""The share of each kind that is found at least."""


def test_mistakes_are_found_before_a_run() -> None:
    verdicts = [each for path in EXAMPLES for each in mutations.judge_mutants(path, 1, 7)]
    tried = Counter(each.mutant.kind for each in verdicts)
    found = Counter(each.mutant.kind for each in verdicts if each.found)
    missed = [each.mutant for each in verdicts if not each.found]
    assert tried.keys() >= LEAST.keys()
    for kind, least in LEAST.items():
        assert found[kind] >= least * tried[kind], [m.place for m in missed if m.kind == kind]


def test_nothing_is_said_of_a_recipe_that_is_written_anew() -> None:
    for path in EXAMPLES:
        text = path.read_text("utf-8")
        tree = mutations.documents.parse(text, str(path)).value
        assert mutations.problems(path, mutations.yaml_text.block(tree)) == []


def test_the_page_has_every_kind_of_mistake() -> None:
    page = mutations.PAGE.read_text("utf-8").partition("<!-- mutations:begin -->")[2]
    assert all(f"| {kind} |" in page for kind in mutations.WHY)
