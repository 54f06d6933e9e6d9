"""Accuracy, in all and for each label."""

import json
import os
import sys

predictions, scores = sys.argv[1:]
with open(predictions) as file:
    rows = [json.loads(line) for line in file]


def accuracy(some):
    return sum(row["label"] == row["predicted"] for row in some) / len(some)


labels = sorted({row["label"] for row in rows})
found = {
    "accuracy": accuracy(rows),
    "rows": len(rows),
    "labels": {label: accuracy([r for r in rows if r["label"] == label]) for label in labels},
}
with open(scores, "w") as file:
    json.dump(found, file, indent=1)
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    print(json.dumps({"accuracy": found["accuracy"]}), file=metrics)
