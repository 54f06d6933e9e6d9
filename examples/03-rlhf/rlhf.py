"""Expected reward minus strength × KL(policy ‖ first policy), climbed by its exact gradient: a table needs no sampling."""

import json
import math
import os
import sys

from policy import probabilities, read, write

policy_path, reward_path, strength, rounds, target = sys.argv[1:]
policy, rewards = read(policy_path), read(reward_path)
first = {question: probabilities(scores) for question, scores in policy.items()}
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    for step in range(1, int(rounds) + 1):
        gained = 0.0
        for question, scores in policy.items():
            chances = probabilities(scores)
            worth = {
                answer: rewards.get(question, {}).get(answer, 0.0)
                - float(strength) * math.log(chance / first[question][answer])
                for answer, chance in chances.items()
            }
            mean = sum(chances[answer] * worth[answer] for answer in scores)
            gained += mean / len(policy)
            for answer in scores:
                scores[answer] += 0.2 * chances[answer] * (worth[answer] - mean)
        print(json.dumps({"step": step, "objective": gained}), file=metrics)
write(target, policy)
