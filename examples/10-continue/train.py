"""Fit y = a x + b by gradient descent, saving every ten steps, resuming from a checkpoint if there is one.

Continued training ends in the same numbers as unbroken training, because a checkpoint holds everything that the next step depends on.  A learning
rate that falls over `--steps` would break that: the first twenty of forty steps would not be the twenty that were made.
"""

import argparse
import csv
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("points")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--checkpoints", type=Path, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()

with open(args.points, newline="") as file:
    rows = [(float(row["x"]), float(row["y"])) for row in csv.DictReader(file)]

now = {"step": 0, "a": 0.0, "b": 0.0, "began_at": 0}
if args.resume:
    now = json.loads(args.resume.read_text())
    now["began_at"] = now["step"]
    print(f"continued from step {now['step']}")

with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    while now["step"] < args.steps:
        errors = [(x, now["a"] * x + now["b"] - y) for x, y in rows]
        now["a"] -= args.lr * 2 * sum(error * x for x, error in errors) / len(rows)
        now["b"] -= args.lr * 2 * sum(error for _, error in errors) / len(rows)
        now["step"] += 1
        print(
            json.dumps(
                {"step": now["step"], "loss": sum(error**2 for _, error in errors) / len(rows)}
            ),
            file=metrics,
            flush=True,
        )
        if now["step"] % 10 == 0 or now["step"] == args.steps:
            # Under another name first: what is called step-* is complete.
            half = args.checkpoints / "half.json"
            half.write_text(json.dumps(now))
            half.rename(args.checkpoints / f"step-{now['step']}.json")

args.model.write_text(json.dumps(now))
