"""Learn the odds of the next letter by gradient descent.  A checkpoint holds all that the next step depends on: resumed equals uninterrupted."""

from __future__ import annotations

import argparse
import json
import os
import random
from math import exp, log
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("pairs", type=Path)
parser.add_argument("weights", type=Path)
parser.add_argument("--max-steps", type=int, required=True)
parser.add_argument("--learning-rate", type=float, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--checkpoints", type=Path, required=True)
parser.add_argument("--save-every", type=int, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()


def chances(row: list[float]) -> list[float]:
    """The softmax of a row of logits."""
    powers = [exp(value - max(row)) for value in row]
    total = sum(powers)
    return [power / total for power in powers]


data = json.loads(args.pairs.read_text())
pairs, letters = data["train"], data["letters"]
first, weights = 0, [[0.0] * len(letters) for _ in letters]
if args.resume:
    kept = json.loads(args.resume.read_text())
    first, weights = kept["step"], kept["weights"]
    print(f"resuming from step {first}")

with open(os.environ.get("RECIPE_METRICS", os.devnull), "a") as metrics:
    for step in range(first + 1, args.max_steps + 1):
        loss = 0.0
        gradient = [[0.0] * len(letters) for _ in letters]
        # The batch depends on the seed and the step alone, not on how often the training was interrupted.
        for before, after in random.Random(f"{args.seed}/{step}").choices(pairs, k=args.batch):
            odds = chances(weights[before])
            loss -= log(odds[after]) / args.batch
            for letter, chance in enumerate(odds):
                gradient[before][letter] += (chance - (letter == after)) / args.batch
        weights = [[w - args.learning_rate * g for w, g in zip(*rows, strict=True)] for rows in zip(weights, gradient, strict=True)]
        print(json.dumps({"step": step, "loss": loss, "lr": args.learning_rate}), file=metrics, flush=True)
        if step % args.save_every == 0 or step == args.max_steps:
            # Under another name first: what is called step-* is complete.
            half = args.checkpoints / "half.json"
            half.write_text(json.dumps({"step": step, "weights": weights}))
            half.replace(args.checkpoints / f"step-{step}.json")
            print(f"step {step}: loss {loss:.3f}")

args.weights.write_text(json.dumps(weights))
