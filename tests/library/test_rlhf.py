"""`rlhf@1` trains: thirty steps of RLOO on a tiny model, measured 0.27 -> 1.00 in reward on held-out prompts, asserted with room to spare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.library.smoke import smoke


@pytest.mark.proof  # that its trainer learns, and resumes to the same bits: test_rlhf_trainer
def test_completions_of_held_out_prompts_become_worth_more(tmp_path: Path) -> None:
    results = smoke("rlhf@1", tmp_path)
    report = json.loads((results / "report" / "report.json").read_text())
    assert (
        0.2 < report["reward_before"] < 0.35
    )  # the part of vowels in what a model without training writes
    assert report["reward_after"] > report["reward_before"] + 0.35
    assert report["rewards"]["share"]["after"] == report["reward_after"]
    assert (
        0.1 < report["kl_per_token"] < 7
    )  # bought with distance, which 1024 tokens bound by ln 1024 for a model that was level
    assert f"{report['kl_per_token']:.4f}" in (results / "report" / "report.md").read_text()
    samples = [
        json.loads(line) for line in (results / "report" / "samples.jsonl").read_text().splitlines()
    ]
    assert len(samples) == report["samples"] and all(
        {"prompt", "before", "after"} == set(sample) for sample in samples
    )

    points = [json.loads(line) for line in (results / "history.jsonl").read_text().splitlines()]
    rewards = [point["reward"] for point in points]
    assert len(rewards) == 30 and sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert points[0]["kl"] == 0 and points[-1]["kl"] > 0
    assert (results / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert any((results / "tensorboard").iterdir())
