"""Promise: every recipe of the library is valid, can be planned, and its `smoke` preset finishes here, for real."""

from __future__ import annotations

import json
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
    assert not [step.id for step in loaded.steps.values() if step.deps]  # a library recipe takes what it needs as inputs
    assert loaded.document.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", IDS)
def test_its_smoke_preset_finishes_and_then_everything_is_fresh(recipe: str, tmp_path: Path) -> None:
    planned = runner.plan(recipe, preset="smoke", python="current", workspace=tmp_path)
    assert {verdict.answer for verdict in planned.verdicts} <= {"run", "maybe", "skip"}
    assert set(planned.plan.graph) == {node.id for node in planned.plan.nodes}
    summary = runner.run(recipe, preset="smoke", python="current", workspace=tmp_path)
    assert summary.state == "COMPLETED", [(failure.id, failure.tail[-2000:]) for failure in summary.failed]
    for _, path in summary.results:
        assert (Path.cwd() / path).exists()
    results = tmp_path / "out" / recipe / "latest"
    assert results.is_symlink() and any(results.iterdir())
    again = runner.run(recipe, preset="smoke", python="current", workspace=tmp_path)
    assert set(again.counts) == {"FRESH"} and again.results == summary.results
    if recipe == "sft@1":
        _learned(results)


def _learned(results: Path) -> None:
    """Sixty steps on a tiny model: measured 6.94 -> 4.09 in loss and 1,037 -> 71.5 in perplexity, asserted with room to spare."""
    points = [json.loads(line) for line in (results / "history.jsonl").read_text().splitlines()]
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0] - 1.5
    report = json.loads((results / "report" / "report.json").read_text())
    assert report["perplexity_after"] * 6 < report["perplexity_before"]
    assert (results / "loss.png").read_bytes().startswith(b"\x89PNG")
