"""The scores as a page, with what the model got wrong."""

import json
import sys

scores_path, predictions, page, needed = sys.argv[1:]
with open(scores_path) as file:
    scores = json.load(file)
with open(predictions) as file:
    wrong = [row for row in map(json.loads, file) if row["label"] != row["predicted"]]
lines = [
    f"# {'Passed' if scores['accuracy'] >= float(needed) else 'Not passed'}: "
    f"{scores['accuracy']:.1%} of {scores['rows']} right, {float(needed):.0%} needed",
    "",
    "| label | right |",
    "|---|---|",
    *(f"| {label} | {share:.1%} |" for label, share in scores["labels"].items()),
    "",
    "## Wrong",
    *(f"- {row['text']!r}: {row['predicted']}, should be {row['label']}" for row in wrong),
]
with open(page, "w") as file:
    file.write("\n".join(lines) + "\n")
