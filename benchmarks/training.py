"""Time for each step of `sft@1` beside a plain script of TRL on the same rows: rounds in turn, medians of steps.

python benchmarks/training.py [--rounds 3] [--steps 40]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
TRAINERS, BASE = ROOT / "recipes" / "trainers", ROOT / "fixtures" / "tiny-llama"
TOPICS = ROOT / "fixtures" / "python-topics" / "topics.jsonl"
WARM = 5  # steps that are not counted


def run(*words: object, **env: str) -> str:
    """What it printed; ends with what it complained about where it failed."""
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TRAINERS)}
    done = subprocess.run([sys.executable, *map(str, words)], env={**os.environ, **more, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def ours(tokens: Path, out: Path, steps: int) -> float:
    """Seconds of a step of our trainer, which also writes a line for each."""
    metrics = out / "metrics.jsonl"
    run(
        TRAINERS / "text_train.py", "--data", tokens, "--base", BASE, "--init", "random", "--out", out / "weights", "--history",
        out / "history.jsonl",
        "--checkpoints", out / "checkpoints", "--max-steps", steps, "--rank", 8, "--alpha", 16, "--global-batch", 16, "--micro-batch", 8,
        "--save-every", 10 * steps, "--learning-rate", 0.01, "--train-embeddings", RECIPE_METRICS=str(metrics),
    )  # fmt: skip
    return median(json.loads(line)["time_step"] for line in metrics.read_text().splitlines()[WARM:])


def theirs(tokens: Path, out: Path, steps: int) -> float:
    """Seconds of a step of the plain script."""
    said = run(ROOT / "benchmarks" / "plain_sft.py", tokens, BASE, out / "plain", 0, steps)
    return median(json.loads(said.splitlines()[-1])["seconds"][WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        run(TRAINERS / "sft_data.py", "--data", TOPICS, "--base", BASE, "--out", tokens, "--max-length", 128, "--packing", "true")
        ratios = []
        for number in range(options.rounds):
            out = Path(folder) / str(number)
            out.mkdir()
            mine, plain = ours(tokens, out, options.steps), theirs(tokens, out, options.steps)
            ratios.append(plain / mine)
            print(f"round {number + 1}: sft@1 {mine:.4f} s a step, plain TRL {plain:.4f} s: {plain / mine:.2f} × its speed", flush=True)
        print(f"median: {median(ratios):.2f}")


if __name__ == "__main__":
    main()
