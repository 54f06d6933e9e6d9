"""Step `plot`: draw a training from its history, a panel for each number that is worth a look.  Knows names of numbers, not what is trained.

A number `NAME` is drawn at each step, with the mean of its neighbours; `eval_NAME`, where a step has it, as what held-out data says; and where a
report says `eval_NAME_before`, a dashed line stands for the model that was begun with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (
    ("reward", "mean reward"),
    ("kl", "KL to the base"),
    ("loss", "loss"),
    ("accuracy", "pairs told apart"),
    ("margin", "margin, chosen over rejected"),
    ("log_odds", "log odds, chosen over rejected"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--report", type=Path, help="JSON that says what held-out data said before")
    parser.add_argument("--recipe", default="", help="what was trained with, for the title")
    parser.add_argument("--key", default="", help="the key of this step, for the title")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    lines = [json.loads(line) for line in options.history.read_text().splitlines()]
    shown = panels(lines)
    headed = heading(options.recipe, len(lines), options.key)
    draw(lines, shown, json.loads(options.report.read_text()) if options.report else {}, options.out, headed)
    name = shown[0][0]
    told = [line[name] for line in lines if name in line]
    print(f"plot: {options.out}, " + (f"{len(lines)} steps, {name} {told[0]:.4g} to {told[-1]:.4g}" if told else "no steps"))


def panels(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The numbers that this history has, each with its title.

    Where there is a reward there is no loss: it is of completions that were just drawn, and goes neither up nor down while the model learns.
    """
    there = {name for line in lines for name in line}
    return [(name, title) for name, title in PANELS if name in there and not (name == "loss" and "reward" in there)] or [("loss", "loss")]


def heading(recipe: str, steps: int, key: str) -> str:
    """What stands above the picture: a picture that is passed on still says where it comes from."""
    return ", ".join(part for part in (recipe, f"{steps} steps", f"key {key[:12]}" if key else "") if part)


def draw(
    lines: Sequence[Mapping[str, Any]], shown: Sequence[tuple[str, str]], report: Mapping[str, Any], out: Path, headed: str = ""
) -> None:  # fmt: skip
    """The picture, as a PNG file.  The same history makes the same file."""
    figure = pictured(lines, shown, report, headed)
    # Without the name of its maker in it the same history is the same file under the next matplotlib, as far as that is up to us.
    figure.savefig(out, dpi=110, metadata={"Software": None})


def pictured(lines: Sequence[Mapping[str, Any]], shown: Sequence[tuple[str, str]], report: Mapping[str, Any], headed: str) -> Figure:
    from matplotlib.figure import Figure

    width = 8 if len(shown) == 1 else 5 * len(shown)
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    drawn = figure.subplots(1, len(shown), squeeze=False)
    for axes, (name, title) in zip(drawn[0], shown, strict=True):
        told = [(line["step"], line[name]) for line in lines if name in line]
        held_out = [(line["step"], line[f"eval_{name}"]) for line in lines if f"eval_{name}" in line]
        steps, values = [step for step, _ in told], [value for _, value in told]
        axes.plot(steps, values, color="#9bb7d4", linewidth=1, label="each step")
        axes.plot(steps, smooth(values), color="#1f4e79", linewidth=2, label="smoothed")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o-", color="#c0504d", markersize=4, label="held out")
        if (before := report.get(f"eval_{name}_before")) is not None:
            axes.axhline(before, color="#c0504d", linewidth=1, linestyle="--", label="held out, untrained")
        axes.set(xlabel="optimizer step", ylabel=title)
        axes.grid(alpha=0.3)
    drawn[0][0].legend()
    figure.suptitle(headed)
    return figure


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of a twentieth of the values around each, three at least: it does not lag behind as a running mean would."""
    reach = max(1, len(values) // 40)
    return [sum(part) / len(part) for at in range(len(values)) if (part := values[max(0, at - reach) : at + reach + 1])]


if __name__ == "__main__":
    main()
