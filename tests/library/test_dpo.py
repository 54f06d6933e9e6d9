"""`dpo@1` leans the right way: on held-out questions the odds of chosen answers over rejected ones rise against those of the untrained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.library.smoke import smoke


@pytest.mark.proof  # in `make test` reward@1 is trained from the same pairs, and the trainer of both: test_preference_train
def test_it_learns(tmp_path: Path) -> None:
    results = smoke("dpo@1", tmp_path)
    report = json.loads((results / "report" / "report.json").read_text())
    # Of 40 pairs about 6 topics that were never seen, when this was written: −44.5 to −35.2 nats, 92.5 % moved the right way, by 0.93 in reward.
    assert report["pairs"] >= 30
    assert report["margin_after"] > report["margin_before"] + 5
    assert report["reward_margin"] > 0.5
    assert report["reward_accuracy"] > 0.8
    assert report["log_odds_after"] > report["log_odds_before"] + 0.08
    history = [json.loads(line) for line in (results / "history.jsonl").read_text().splitlines()]
    assert history[0]["margin"] == 0 and history[-1]["eval_loss"] < 0.6931 - 0.15  # 0.365
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "training.json",
    } <= {file.name for file in (results / "model").iterdir()}
    assert (results / "training.png").read_bytes().startswith(b"\x89PNG")
    assert list((results / "tensorboard").glob("events.*"))
