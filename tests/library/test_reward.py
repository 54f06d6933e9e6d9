"""`reward@1` tells the better of two answers to questions that it never saw, far more often than chance or the answers' length would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.library.smoke import smoke


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smoke("reward@1", tmp_path_factory.mktemp("reward"))


@pytest.mark.slow
def test_it_beats_chance_and_length(results: Path) -> None:
    report = json.loads((results / "report" / "report.json").read_text())
    # Of 40 pairs about 6 topics that were never seen, when this was written: 97.5 %, loss 0.039; by length alone 55 %.
    assert report["pairs"] >= 30
    assert report["accuracy"] > 0.85  # a head without training is right in 65 %
    assert report["accuracy"] > report["accuracy_of_length"] + 0.15
    assert report["loss"] < 0.6931 - 0.25
    assert report["mean_chosen"] > report["mean_rejected"] + 1


@pytest.mark.slow
def test_what_comes_out_loads_as_a_classifier_and_judges_text_as_the_report_says(
    results: Path,
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(results / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(results / "model")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    asked = "What is this in Python: The print statement?\n"
    answers = [
        "The statement writes its arguments to the standard output, and adds a line end unless it was told to do otherwise.",
        'print_stmt ::= "print" ([expression ("," expression)* [","]]\n               | ">>" expression [("," expression)+ [","]])',
    ]
    with torch.no_grad():
        read = tokenizer(
            [asked + answer + tokenizer.eos_token for answer in answers],
            return_tensors="pt",
            padding=True,
        )
        both = model(**read).logits[:, 0]
        alone = [
            model(**tokenizer(asked + answer + tokenizer.eos_token, return_tensors="pt")).logits[
                0, 0
            ]
            for answer in answers
        ]
    assert both[0] > both[1]
    assert torch.allclose(both, torch.stack(alone), atol=1e-4)  # what fills up changes no judgement
