"""Fit y = a x² + b x + c by stochastic gradient descent.  Small enough to read, real enough to diverge."""

import argparse
import csv
import json
import math
import os
import random
import sys

parser = argparse.ArgumentParser()
parser.add_argument("points")
parser.add_argument("--model", required=True)
parser.add_argument("--report", required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
args = parser.parse_args()

with open(args.points, newline="") as file:
    rows = [(float(row["x"]), float(row["y"])) for row in csv.DictReader(file)]
held_out, rows = rows[::5], [row for n, row in enumerate(rows) if n % 5]

rng = random.Random(args.seed)
weights = [rng.gauss(0, 1) for _ in range(3)]


def loss(points):
    return sum(
        (weights[0] * x * x + weights[1] * x + weights[2] - y) ** 2 for x, y in points
    ) / len(points)


with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    for epoch in range(1, args.epochs + 1):
        rng.shuffle(rows)
        for x, y in rows:
            error = weights[0] * x * x + weights[1] * x + weights[2] - y
            weights = [
                w - args.lr * 2 * error * feature
                for w, feature in zip(weights, (x * x, x, 1.0), strict=True)
            ]
            if not math.isfinite(error) or abs(error) > 1e9:
                sys.exit(f"diverged in epoch {epoch}: lr {args.lr} is too high")
        print(
            json.dumps({"step": epoch, "loss": loss(rows), "eval_loss": loss(held_out)}),
            file=metrics,
            flush=True,
        )

with open(args.model, "w") as file:
    json.dump(dict(zip("abc", weights, strict=True)), file)
with open(args.report, "w") as file:
    json.dump({"lr": args.lr, "seed": args.seed, "eval_loss": loss(held_out)}, file)
