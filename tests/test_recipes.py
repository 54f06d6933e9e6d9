"""Promise: every recipe of the library is valid, can be planned, and has a test of its own that runs its `smoke` preset for real."""

from __future__ import annotations

from pathlib import Path

import pytest

import runner
from runner.language.library import entries

IDS = [entry.id for entry in entries()]


def test_there_are_recipes() -> None:
    assert "sft@1" in IDS


@pytest.mark.parametrize("recipe", IDS)
def test_a_library_recipe_is_valid_and_has_a_smoke_preset(recipe: str) -> None:
    loaded = runner.load(recipe)
    assert loaded.id == recipe and loaded.summary
    assert "smoke" in loaded.presets
    assert not [
        step.id for step in loaded.steps.values() if step.deps
    ]  # a library recipe takes what it needs as inputs
    assert loaded.document.warnings == ()


@pytest.mark.parametrize("recipe", IDS)
def test_a_library_recipe_is_proved_by_a_test_of_its_own(recipe: str) -> None:
    tests = [file.read_text() for file in (Path(__file__).parent / "library").glob("test_*.py")]
    assert any(f'smoke("{recipe}"' in text for text in tests), (
        f'no test below tests/library calls smoke("{recipe}", …)'
    )
