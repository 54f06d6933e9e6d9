"""Write the model with a sample of its text, and what it learned: its loss on held-out pairs, beside that of knowing nothing."""

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
parser.add_argument("model", type=Path)
parser.add_argument("--seed", type=int, required=True)
args = parser.parse_args()

data, weights = json.loads(args.pairs.read_text()), json.loads(args.weights.read_text())
letters = data["letters"]
powers = [[exp(value - max(row)) for value in row] for row in weights]
odds = [[power / sum(row) for power in row] for row in powers]
loss = -sum(log(odds[before][after]) for before, after in data["held_out"]) / len(data["held_out"])
report = {"eval_loss": loss, "eval_loss_untrained": log(len(letters))}

draw = random.Random(args.seed)
letter, sample = 0, ""
for _ in range(200):
    letter = draw.choices(range(len(letters)), odds[letter])[0]
    sample += letters[letter]

(args.model / "model.json").write_text(json.dumps({"letters": letters, "odds": odds}))
(args.model / "report.json").write_text(json.dumps(report, indent=2) + "\n")
(args.model / "sample.txt").write_text(sample.strip() + "\n")
with open(os.environ.get("RECIPE_METRICS", os.devnull), "a") as metrics:
    print(json.dumps(report), file=metrics)
print(f"loss on held-out pairs: {loss:.3f}, of knowing nothing: {report['eval_loss_untrained']:.3f}")
