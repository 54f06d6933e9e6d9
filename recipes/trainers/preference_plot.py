"""Draw a training on pairs from its history: the loss, and how well chosen answers are told from rejected ones.  Knows only names of numbers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from plot_history import _smooth

PANELS = (
    ("loss", "loss"),
    ("accuracy", "pairs told apart"),
    ("margin", "margin, chosen over rejected"),
    ("log_odds", "log odds, chosen over rejected"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    lines = [json.loads(line) for line in options.history.read_text().splitlines()]
    panels = [(name, words) for name, words in PANELS if any(name in line for line in lines)]
    figure, drawn = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False)
    for axes, (name, words) in zip(drawn[0], panels, strict=True):
        steps, values = [line["step"] for line in lines], [line[name] for line in lines]
        axes.plot(steps, values, color="#9bb7d4", linewidth=1, label="each step")
        axes.plot(steps, _smooth(values), color="#1f4e79", linewidth=2, label="smoothed")
        if looked := [line for line in lines if f"eval_{name}" in line]:
            held_out = [line[f"eval_{name}"] for line in looked]
            axes.plot([line["step"] for line in looked], held_out, "o-", color="#c0504d", markersize=4, label="held out")
        axes.set(xlabel="step", title=words)
        axes.grid(alpha=0.3)
    drawn[0][0].legend()
    # Without the name of its maker in it the same history is the same file under the next matplotlib, as far as that is up to us.
    figure.savefig(options.out, dpi=110, metadata={"Software": None})
    print(f"plot: {options.out}, {len(lines)} steps, loss {lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}")


if __name__ == "__main__":
    main()
