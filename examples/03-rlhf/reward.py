"""Bradley-Terry: the chance that one answer is preferred is the logistic function of the difference of their rewards."""

import json
import math
import os
import sys

preferences, epochs, target = sys.argv[1:]
with open(preferences) as file:
    rows = [json.loads(line) for line in file]
rewards = {}
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    for epoch in range(1, int(epochs) + 1):
        loss = 0.0
        for row in rows:
            known = rewards.setdefault(row["question"], {})
            better, worse = known.get(row["better"], 0.0), known.get(row["worse"], 0.0)
            chance = 1 / (1 + math.exp(worse - better))
            loss -= math.log(chance) / len(rows)
            known[row["better"]] = better + 0.1 * (1 - chance)
            known[row["worse"]] = worse - 0.1 * (1 - chance)
        print(json.dumps({"step": epoch, "loss": loss}), file=metrics)
with open(target, "w") as file:
    json.dump(rewards, file, indent=1)
