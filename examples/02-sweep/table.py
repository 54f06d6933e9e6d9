"""One line for each trained model, the best first."""

import csv
import json
import sys

target, *reports = sys.argv[1:]
rows = []
for report in reports:
    with open(report) as file:
        rows.append(json.load(file))
with open(target, "w", newline="") as file:
    writer = csv.DictWriter(file, ["lr", "seed", "eval_loss"])
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: row["eval_loss"]))
