"""Draw reward and KL over the steps of a training from its history, one JSON object a line.  Knows only `step`, `reward` and `kl`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    lines = [json.loads(line) for line in options.history.read_text().splitlines()]
    rated = [line for line in lines if "reward" in line]
    far = [line for line in lines if "kl" in line]
    figure, above = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps, rewards = [line["step"] for line in rated], [line["reward"] for line in rated]
    above.plot(steps, rewards, color="#9bb7d4", linewidth=1, label="reward, each step")
    above.plot(steps, _smooth(rewards), color="#1f4e79", linewidth=2, label="reward, smoothed")
    above.set(xlabel="step", ylabel="mean reward", title=f"reward, {len(lines)} steps")
    above.grid(alpha=0.3)
    if far:
        # A reward is bought with distance from the base: the one is read against the other.
        beside = above.twinx()
        beside.plot([line["step"] for line in far], [line["kl"] for line in far], color="#c0504d", linewidth=1, label="KL to the base")
        beside.set_ylabel("KL to the base")
        beside.legend(loc="lower right")
    above.legend(loc="upper left")
    figure.savefig(options.out, dpi=110, metadata={"Software": None})
    print(f"plot: {options.out}, {len(lines)} steps" + (f", reward {rewards[0]:.4g} to {rewards[-1]:.4g}" if rewards else ""))


def _smooth(values: list[float]) -> list[float]:
    """The mean of a twentieth of the values around each: it does not lag behind as a running mean would."""
    reach = len(values) // 40
    return [sum(part) / len(part) for at in range(len(values)) if (part := values[max(0, at - reach) : at + reach + 1])]


if __name__ == "__main__":
    main()
