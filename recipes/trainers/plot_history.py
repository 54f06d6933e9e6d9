"""Draw the loss over the steps of a training from its history, one JSON object a line.  Knows only `step`, `loss` and `eval_loss`."""

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
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    axes.plot(steps, _smooth(losses), color="#1f4e79", linewidth=2, label="smoothed")
    if looked := [line for line in lines if "eval_loss" in line]:
        axes.plot([line["step"] for line in looked], [line["eval_loss"] for line in looked], "o-", color="#c0504d", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss per token", title=f"loss, {len(lines)} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    # Without the name of its maker in it the same history is the same file under the next matplotlib, as far as that is up to us.
    figure.savefig(options.out, dpi=110, metadata={"Software": None})
    print(f"plot: {options.out}, {len(lines)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}" if lines else f"plot: {options.out}, no steps")


def _smooth(values: list[float]) -> list[float]:
    """The mean of a twentieth of the values around each: it does not lag behind as a running mean would."""
    reach = len(values) // 40
    return [sum(part) / len(part) for at in range(len(values)) if (part := values[max(0, at - reach) : at + reach + 1])]


if __name__ == "__main__":
    main()
