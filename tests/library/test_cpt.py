"""`cpt@1` reads on: of text it has not seen, a tiny model is at 102 in perplexity after sixty steps and was at 1,033 before; asserted with room to spare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.library.smoke import smoke


@pytest.mark.proof
def test_it_lowers_the_perplexity_of_held_out_text(tmp_path: Path) -> None:
    results = smoke("cpt@1", tmp_path)
    report = json.loads((results / "report" / "report.json").read_text())
    assert report["tokens"] > 5_000 and report["data"]["rows_held_out"] >= 5
    assert report["perplexity_after"] * 5 < report["perplexity_before"]
    history = [json.loads(line) for line in (results / "history.jsonl").read_text().splitlines()]
    assert history[-1]["loss"] < history[0]["loss"] - 1.5
    # Up over ten steps, then down a cosine to a tenth.
    rates = [line["lr"] for line in history]
    assert (
        rates.index(max(rates)) == 9
        and rates[0] == pytest.approx(0.001)
        and rates[-1] == pytest.approx(0.001)
    )
    assert (results / "model" / "adapter_model.safetensors").exists() and list(
        (results / "tensorboard").iterdir()
    )
