"""Claims about step `plot` of the library: what a history shows, and that the same history is the same picture."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.library.siblings import siblings

SFT = [
    {
        "step": step,
        "loss": 4 - step / 10,
        "lr": 0.1,
        **({"eval_loss": 4.0} if step % 5 == 0 else {}),
    }
    for step in range(1, 21)
]
RLHF = [{"step": step, "loss": 0.0, "reward": step / 10, "kl": step / 5} for step in range(1, 21)]
DPO = [{"step": step, "loss": 0.6, "accuracy": 0.5, "margin": step / 5} for step in range(1, 21)]


@pytest.fixture
def plot() -> Iterator[Any]:
    with siblings():
        yield importlib.import_module("plot")


@pytest.mark.parametrize(
    ("history", "names"),
    [
        (SFT, ["loss"]),
        (RLHF, ["reward", "kl"]),
        (DPO, ["loss", "accuracy", "margin"]),
        ([], ["loss"]),
    ],
)
def test_a_history_shows_what_it_has_and_no_loss_where_there_is_a_reward(
    history: list[dict[str, float]], names: list[str], plot: Any
) -> None:
    assert [name for name, _ in plot.panels(history)] == names


@pytest.mark.parametrize("history", [SFT, RLHF, []], ids=["sft", "rlhf", "nothing"])
def test_the_same_history_is_the_same_picture(
    history: list[dict[str, float]],
    plot: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    for name in ("one", "other"):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "plot.py",
                "--history",
                str(tmp_path / "history.jsonl"),
                "--out",
                str(tmp_path / f"{name}.png"),
            ],
        )
        plot.main()
    picture = (tmp_path / "one.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and picture == (tmp_path / "other.png").read_bytes()
    first = {"loss": "20 steps, loss 3.9 to 2", "reward": "20 steps, reward 0.1 to 2"}
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith(first["reward" if history is RLHF else "loss"] if history else "no steps")
    )


def test_what_held_out_data_said_before_is_in_the_picture(plot: Any, tmp_path: Path) -> None:
    plot.draw(SFT, plot.panels(SFT), {}, tmp_path / "without.png")
    plot.draw(SFT, plot.panels(SFT), {"eval_loss_before": 5.0}, tmp_path / "with.png")
    assert (tmp_path / "without.png").read_bytes() != (tmp_path / "with.png").read_bytes()


@pytest.mark.parametrize(
    ("history", "labels"), [(SFT, ["loss"]), (RLHF, ["mean reward", "KL to the base"])]
)
def test_the_picture_says_what_is_drawn_and_where_it_comes_from(
    history: list[dict[str, float]], labels: list[str], plot: Any
) -> None:
    figure = plot.pictured(
        history, plot.panels(history), {}, plot.heading("sft@1", 20, "0123456789abcdef")
    )
    assert figure.get_suptitle() == "sft@1, 20 steps, key 0123456789ab"
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] == [
        ("optimizer step", label) for label in labels
    ]
    assert plot.heading("", 20, "") == "20 steps"


def test_smoothing_follows_and_does_not_lag(plot: Any) -> None:
    assert plot.smooth([1.0, 4.0, 1.0]) == [2.5, 2.0, 2.5]
    assert plot.smooth([float(value) for value in range(100)])[50] == 50
    assert plot.smooth([]) == []
