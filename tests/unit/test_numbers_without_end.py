"""A number that no float can hold is refused where it is read, with its place, or kept as the words it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import Invalid
from runner.language import inputs, parse
from runner.storage import metrics
from runner.survey.comparison import is_comparable

HUGE = 10**400
RECIPE = """\
recipe: t@1
inputs:
  whole: {type: integer, default: 1}
  any: {type: number, default: 1}
  tree: {type: object, default: {k: 1}}
  many: {type: list, items: number, default: [1]}
steps: {s: {run: "true {{ inputs.whole }} {{ inputs.any }} {{ inputs.tree.k }} {{ inputs.many[0] }}"}}
"""


@pytest.mark.parametrize("place", ["whole", "any", "k", "[1]"])
def test_a_recipe_with_one_is_refused_at_its_place(tmp_path: Path, place: str) -> None:
    old = "[1]" if place == "[1]" else "1"
    line = next(line for line in RECIPE.splitlines() if place in line)
    text = RECIPE.replace(line, line.replace(old, f"[{HUGE}]" if place == "[1]" else str(HUGE)))
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(Invalid) as found:
        parse.load(tmp_path / "r.yaml")
    problem = found.value.problems[0]
    assert problem.message == "a number must be finite and of reasonable length"
    assert problem.where is not None and problem.where.line == RECIPE.splitlines().index(line) + 1


@pytest.mark.parametrize("written", [HUGE, str(HUGE), -HUGE])
@pytest.mark.parametrize("name", ["whole", "any", "tree", "many"])
def test_a_value_that_is_one_is_refused(tmp_path: Path, name: str, written: object) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    value: object = {"tree": {"k": HUGE}, "many": [written]}.get(name, written)
    _, problems = inputs.try_bind(parse.load(tmp_path / "r.yaml"), {name: value})
    assert [problem.severity for problem in problems] == ["error"]
    assert f'"{name}"' in problems[0].message


def test_a_metric_that_is_one_is_kept_as_text_and_compared_with_nothing() -> None:
    point = metrics.parse(b'{"loss": 1.5, "big": %d, "most": %d}' % (HUGE, 10**308))
    assert point == {"loss": 1.5, "big": str(HUGE), "most": 10**308}
    assert [name for name, value in point.items() if is_comparable(value)] == ["loss", "most"]
    assert not is_comparable(HUGE)
