"""Maximum likelihood: one gradient step on every demonstration, for some epochs."""

import json
import math
import os
import sys

from policy import probabilities, read, write

base, demos, epochs, target = sys.argv[1:]
policy = read(base)
with open(demos) as file:
    rows = [json.loads(line) for line in file]
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    for epoch in range(1, int(epochs) + 1):
        loss = 0.0
        for row in rows:
            scores = policy[row["question"]]
            chances = probabilities(scores)
            loss -= math.log(chances[row["answer"]]) / len(rows)
            for answer in scores:
                scores[answer] += 0.05 * ((answer == row["answer"]) - chances[answer])
        print(json.dumps({"step": epoch, "loss": loss}), file=metrics)
write(target, policy)
