"""`orpo@1` learns both its lessons on held-out questions: chosen answers get likelier, and their odds over rejected ones rise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.library.smoke import smoke


@pytest.mark.proof
def test_it_learns(tmp_path: Path) -> None:
    results = smoke("orpo@1", tmp_path)
    report = json.loads((results / "report" / "report.json").read_text())
    # Of 40 pairs about 6 topics that were never seen, when this was written: loss of chosen answers 6.94 to 5.63, log odds 0.02 to 1.43, 97.5 % the right way.
    assert report["pairs"] >= 30
    assert report["loss_chosen_after"] < report["loss_chosen_before"] - 0.7
    assert report["log_odds_after"] > report["log_odds_before"] + 0.7
    assert report["reward_accuracy"] > 0.8
    history = [json.loads(line) for line in (results / "history.jsonl").read_text().splitlines()]
    assert history[-1]["eval_loss"] < history[0]["loss"] - 0.9
    assert "model.safetensors" in {file.name for file in (results / "model").iterdir()}
    assert (results / "training.png").read_bytes().startswith(b"\x89PNG")
