"""Part a table in good rows and rejected ones, and report the share of the good."""

import csv
import json
import os
import sys

rows, good_path, rejected_path = sys.argv[1:]
with open(rows, newline="") as file:
    reader = csv.DictReader(file)
    good, rejected = [], []
    for row in reader:
        (good if row["name"] and row["amount"].isdigit() else rejected).append(row)
for path, some in [(good_path, good), (rejected_path, rejected)]:
    if some or path == good_path:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames)
            writer.writeheader()
            writer.writerows(some)
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    print(json.dumps({"share": len(good) / max(1, len(good) + len(rejected))}), file=metrics)
