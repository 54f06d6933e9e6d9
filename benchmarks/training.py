"""Losses and time for each step of `sft@1` and `flux-lora@1`, beside plain scripts of TRL and diffusers on the same data, weights and order.

    python benchmarks/training.py [sft] [flux-lora] [--seeds 3] [--steps 60] [--pixels 64]

The two programs of a seed run at once, with one thread each, so that what else the machine does slows both: the mean of the last 20 losses, and the
median of the processor time of a step, which others on the machine change less than the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[1]
TRAINERS, FIXTURES = ROOT / "recipes" / "trainers", ROOT / "fixtures"
WARM = 5  # steps whose time is not counted
LAST = 20  # steps whose losses are compared
CLOCK = "import runpy, sys, time; time.perf_counter = time.process_time; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs a program whose times of steps are those of the processor."""
Told = tuple[list[float], list[float]]
"""The loss and the seconds of each step."""


def run(*words: object, **env: str) -> str:
    """What it printed; ends with what it complained about where it failed."""
    more = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(TRAINERS),
    }
    done = subprocess.run(
        [sys.executable, "-c", CLOCK, *map(str, words)],
        env={**os.environ, **more, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def ours(program: str, out: Path, *words: object) -> Told:
    """Our trainer, which also writes a line for each step."""
    metrics = out / "metrics.jsonl"
    run(TRAINERS / program, *words, "--history", out / "history.jsonl", "--checkpoints", out / "checkpoints", "--save-every", 10**6,
        RECIPE_METRICS=str(metrics))  # fmt: skip
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines], [line["time_step"] for line in lines]


def plain(program: str, *words: object) -> Told:
    """A plain script."""
    told = json.loads(run(ROOT / "benchmarks" / program, *words).splitlines()[-1])
    return told["losses"], told["seconds"]


def at_once(mine: Callable[[], Told], other: Callable[[], Told]) -> tuple[Told, Told]:
    """What both told."""
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(mine), pool.submit(other)
        return one.result(), two.result()


def sft(home: Path, _: int) -> Callable[[int, int, Path], tuple[Told, Told]]:
    """Preset `smoke`: a Llama of 2 layers, 16 × 128 tokens of packed text a step."""
    tokens, base = home / "tokens", FIXTURES / "tiny-llama"
    topics = FIXTURES / "python-topics" / "topics.jsonl"
    run(
        TRAINERS / "sft_data.py",
        "--data",
        topics,
        "--base",
        base,
        "--out",
        tokens,
        "--max-length",
        128,
        "--packing",
        "true",
    )

    def pair(seed: int, steps: int, out: Path) -> tuple[Told, Told]:
        same = ["--data", tokens, "--base", base, "--init", "random", "--out", out / "weights", "--max-steps", steps, "--rank", 8, "--alpha", 16,
                "--global-batch", 16, "--micro-batch", 8, "--learning-rate", 0.01, "--train-embeddings", "--seed", seed]  # fmt: skip
        return at_once(
            lambda: ours("text_train.py", out, *same), lambda: plain("plain_sft.py", *same)
        )

    return pair


def flux(home: Path, pixels: int) -> Callable[[int, int, Path], tuple[Told, Told]]:
    """Preset `smoke`: a Flux of 2 blocks, 8 square images a step; noise levels as diffusers' script draws them."""
    data, base, emoji = home / "prepared", FIXTURES / "tiny-flux", FIXTURES / "datasets" / "emoji"
    drawn = ("--init", "random", "--precision", "no")
    run(
        TRAINERS / "image_data.py",
        "--data",
        emoji,
        "--out",
        data,
        "--resolution",
        pixels,
        "--trigger",
        "zxq",
    )
    run(
        TRAINERS / "image_latents.py",
        "--images",
        data / "images",
        "--vae",
        base / "vae",
        "--out",
        home / "latents",
        *drawn,
    )
    text = (
        "--family",
        "flux",
        "--base",
        base,
        "--manifest",
        data / "manifest.jsonl",
        "--out",
        home / "text",
    )
    run(TRAINERS / "image_text.py", *text, *drawn)

    def pair(seed: int, steps: int, out: Path) -> tuple[Told, Told]:
        same = ["--manifest", data / "manifest.jsonl", "--latents", home / "latents", "--text", home / "text", "--base", base, *drawn, "--rank", 16,
                "--alpha", 16, "--global-batch", 8, "--micro-batch", 8, "--max-steps", steps, "--learning-rate", 0.01, "--seed", seed]  # fmt: skip
        more = [
            word
            for name in ("adapter", "snapshots", "report")
            for word in (f"--{name}", out / name)
        ]
        more += ["--family", "flux", "--objective", "logit_normal", "--sample-every", 0]
        return at_once(
            lambda: ours("image_train.py", out, *same, *more), lambda: plain("plain_flux.py", *same)
        )

    return pair


TRAININGS = {"sft": sft, "flux-lora": flux}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trainings", nargs="*", choices=[*TRAININGS, []], help="all, if none is named"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pixels", type=int, default=64, help="a side of an image")
    options = parser.parse_args()
    for name in options.trainings or TRAININGS:
        with tempfile.TemporaryDirectory() as folder:
            pair, speeds = TRAININGS[name](Path(folder), options.pixels), []
            for seed in range(options.seeds):
                out = Path(folder) / str(seed)
                out.mkdir()
                (losses, seconds), (other_losses, other_seconds) = pair(seed, options.steps, out)
                loss, other_loss = fmean(losses[-LAST:]), fmean(other_losses[-LAST:])
                mine, other = median(seconds[WARM:]), median(other_seconds[WARM:])
                speeds.append(other / mine)
                print(
                    f"{name} seed {seed}: loss {losses[0]:.4f} → {loss:.4f}, plain {other_losses[0]:.4f} → {other_loss:.4f}",
                    end=" ",
                )
                print(
                    f"({loss / other_loss - 1:+.2%}); {mine:.4f} s a step, plain {other:.4f}: {other / mine:.2f} × its speed",
                    flush=True,
                )
            print(f"{name}: {median(speeds):.2f} × the speed of the plain script")


if __name__ == "__main__":
    main()
