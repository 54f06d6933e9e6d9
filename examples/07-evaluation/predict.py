"""Ask the model: the label whose words weigh most.  A model is a folder with weights.json, {label: {word: weight}}."""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("questions", type=Path)
parser.add_argument("predictions", type=Path)
parser.add_argument("--limit", type=int)
args = parser.parse_args()

weights = json.loads((args.model / "weights.json").read_text())
rows = [
    json.loads(line)
    for path in sorted(args.questions.rglob("*.jsonl"))
    for line in path.read_text().splitlines()
]
with args.predictions.open("w") as file:
    for row in rows[: args.limit]:
        words = row["text"].lower().split()
        answer = max(
            sorted(weights), key=lambda label: sum(weights[label].get(word, 0.0) for word in words)
        )
        print(json.dumps({**row, "predicted": answer}), file=file)
