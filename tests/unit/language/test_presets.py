"""Several presets as one."""

from __future__ import annotations

import pytest

from runner.language import document, parse, presets
from runner.language.recipe import Recipe

TEXT = """\
recipe: t@1
summary: A test
inputs:
  lr: {type: number, default: 1}
  n: {type: integer, default: 1}
presets:
  a: {lr: 2, n: 2, image: one, resources: {gpus: 1, memory: 1GB}, env: {A: x}}
  b: {lr: 3, resources: {gpus: 2}, env: {B: y}}
steps:
  s: {run: "echo {{ inputs.lr }} {{ inputs.n }}"}
"""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return parse.recipe(document.parse(TEXT, "t.yaml"))


def test_a_later_preset_wins_and_the_earlier_fills_in(recipe: Recipe) -> None:
    both = presets.combine(recipe, "a, b")
    assert both is not None and both.resources is not None
    assert both.name == "a,b"
    assert dict(both.inputs) == {"lr": 3, "n": 2}
    assert (both.resources.gpus, both.resources.memory) == (2, 10**9)
    assert (both.image, both.env) == ("one", {"A": "x", "B": "y"})


def test_the_preset_that_gives_an_input_is_the_last_that_names_it(recipe: Recipe) -> None:
    assert [presets.of_input(recipe, "a,b", name) for name in ("lr", "n", "gone")] == ["b", "a", ""]


def test_unknown_presets_are_left_out(recipe: Recipe) -> None:
    assert presets.filter_known(recipe, "gone,b") == "b"
    assert presets.filter_known(recipe, "gone") is None
    assert presets.combine(recipe, None) is None
