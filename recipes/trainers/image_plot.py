"""Step `plot`: draw the loss over the steps of a training, and how far the held-out images are from the model without its adapter."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("history", "report", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()

    lines = [json.loads(line) for line in options.history.read_text().splitlines()]
    report = json.loads(options.report.read_text())
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    axes.plot(steps, _smooth(losses), color="#1f4e79", linewidth=2, label="smoothed")
    if report["held_out"]:
        looked = [line for line in lines if "eval_loss" in line]
        axes.plot([line["step"] for line in looked], [line["eval_loss"] for line in looked], "o-", color="#c0504d", markersize=4, label="held out")
        axes.axhline(report["eval_loss_before"], color="#c0504d", linewidth=1, linestyle="--", label="held out, without the adapter")
    axes.set(xlabel="step", ylabel="mean squared error", title=f"loss, {len(lines)} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    # Without the name of its maker in it the same history is the same file under the next matplotlib, as far as that is up to us.
    figure.savefig(options.out, dpi=110, metadata={"Software": None})
    print(f"plot: {options.out}, {len(lines)} steps")


def _smooth(values: list[float]) -> list[float]:
    """The mean of a twentieth of the values around each, three at least: the noise level of a step says more of its loss than what was learned."""
    reach = max(1, len(values) // 40)
    return [sum(part) / len(part) for at in range(len(values)) if (part := values[max(0, at - reach) : at + reach + 1])]


if __name__ == "__main__":
    main()
