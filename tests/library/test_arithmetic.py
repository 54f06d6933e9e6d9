"""Claims about the arithmetic of every family of trainers: activations that are computed again change nothing, 16 bits change little."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.library import test_image_lora, test_preference_train, test_rlhf_trainer, test_text_train
from tests.library.siblings import TRAINERS
from tests.system.test_sft_trainer import program, run

STEPS = 2
AGAIN, HALF = "--checkpoint-activations", "--precision bf16"

# A trainer's program that counts how often activations are computed again.
COUNTING = """
import importlib, sys
from pathlib import Path
import torch.utils.checkpoint as activations
plain, calls = activations._checkpoint_without_reentrant_generator, []
activations._checkpoint_without_reentrant_generator = lambda *given, **named: calls.append(1) or plain(*given, **named)
report, *sys.argv = sys.argv[1:]
importlib.import_module(sys.argv[0]).main()
Path(report).write_text(str(len(calls)))
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("arithmetic")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the data steps make for each family."""
    home = tmp_path_factory.mktemp("sources")
    made = {name: home / name for name in ("text", "preference", "rlhf", "images")}
    base = test_text_train.BASE
    test_text_train.prepare(test_text_train.TOPICS, made["text"])
    for argv in (
        program(
            "preference_data.py",
            "--data",
            test_preference_train.PAIRS,
            "--base",
            base,
            "--out",
            made["preference"],
            "--max-length",
            64,
        ),
        program(
            "rlhf_data.py",
            "--data",
            test_rlhf_trainer.PROMPTS,
            "--base",
            base,
            "--out",
            made["rlhf"],
            "--max-prompt-length",
            64,
        ),
        program(
            "image_data.py",
            "--data",
            test_image_lora.EMOJI,
            "--out",
            made["images"],
            "--resolution",
            64,
        ),
    ):
        done = run(argv)
        assert done.returncode == 0, done.stderr
    for kind in ("flux", "sdxl"):
        folder = test_image_lora.ROOT / "fixtures" / f"tiny-{kind}"
        same = ("--init", "random", "--precision", "no")
        text = (
            "--family",
            kind,
            "--base",
            folder,
            "--manifest",
            made["images"] / "manifest.jsonl",
            "--out",
            made["images"] / f"{kind}-text",
        )
        latents = (
            "--images",
            made["images"] / "images",
            "--vae",
            folder / "vae",
            "--out",
            made["images"] / f"{kind}-latents",
        )
        for argv in (
            program("image_text.py", *text, *same),
            program("image_latents.py", *latents, *same),
        ):
            done = run(argv)
            assert done.returncode == 0, done.stderr
    return made


def words(kind: str, sources: dict[str, Path], out: Path) -> list[str]:
    """The trainer of a family, and its options."""
    if kind == "text":
        argv = test_text_train.training(sources["text"], out, "--warmup-steps", 0, max_steps=STEPS)
    elif kind == "rlhf":
        argv = test_rlhf_trainer.training(sources["rlhf"], out, "--max-steps", STEPS)
    elif kind in ("flux", "sdxl"):
        images = sources["images"]
        options = test_image_lora.argparse.Namespace(
            family=kind, base=test_image_lora.ROOT / "fixtures" / f"tiny-{kind}", manifest=images / "manifest.jsonl", latents=images / f"{kind}-latents",
            text=images / f"{kind}-text", init="random", objective=test_image_lora.OBJECTIVES[kind], rank=8, alpha=16.0, learning_rate=0.01, seed=0,
            micro_batch=4,
        )  # fmt: skip
        argv = test_image_lora.training(options, out, max_steps=STEPS)
    else:
        argv = test_preference_train.training(
            kind, sources["preference"], out, "--warmup-steps", 0, max_steps=STEPS
        )
    return [Path(argv[1]).stem, *argv[2:]]


@pytest.mark.parametrize(
    "family",
    [
        "text",
        "dpo",
        "reward",
        "flux",
        *(pytest.param(each, marks=pytest.mark.proof) for each in ("rlhf", "sdxl")),
    ],
)
def test_computing_activations_again_changes_nothing_and_16_bits_little(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    variants = {"plain": "", "again": AGAIN, "half": HALF}
    (tmp_path / "counting.py").write_text(COUNTING)
    for name, more in variants.items():
        (tmp_path / name).mkdir()
        argv = [
            sys.executable,
            str(tmp_path / "counting.py"),
            str(tmp_path / name / "calls"),
            *words(family, sources, tmp_path / name),
            *more.split(),
        ]
        done = run(argv, PYTHONPATH=str(TRAINERS))
        assert done.returncode == 0, done.stdout + done.stderr

    def told(name: str) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (tmp_path / name / "history.jsonl").read_text().splitlines()
        ]

    def calls(name: str) -> int:
        return int((tmp_path / name / "calls").read_text())

    assert calls("plain") == calls("half") == 0 and calls("again") >= 2 * STEPS
    plain, again, half = (told(name) for name in variants)
    assert len(plain) == STEPS and plain[0]["grad_norm"] > 0
    for one, other in zip(plain, again, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6) and other[
            "grad_norm"
        ] == pytest.approx(one["grad_norm"], rel=1e-4)
    # At the first step nothing is learned yet: the same weights, with 8 bits of precision in place of 24; the loss of rlhf is about 0 by construction.
    assert (
        half[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.03, abs=0.05)
        and half[0] != plain[0]
    )
    if family != "rlhf":  # 16 bits draw other completions
        assert half[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.2)
