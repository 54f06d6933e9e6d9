"""Mean reward of both policies, and the divergence between them."""

import math
import sys

from policy import probabilities, read, write

before_path, after_path, reward_path, target = sys.argv[1:]
before, after, rewards = read(before_path), read(after_path), read(reward_path)


def worth(policy):
    return sum(
        p * rewards.get(q, {}).get(a, 0.0)
        for q, scores in policy.items()
        for a, p in probabilities(scores).items()
    ) / len(policy)


apart = 0.0
for question in after:
    old, new = probabilities(before[question]), probabilities(after[question])
    apart += sum(new[answer] * math.log(new[answer] / old[answer]) for answer in new) / len(after)
write(target, {"reward_before": worth(before), "reward_after": worth(after), "divergence": apart})
