"""Wrapped trainers tell how far they are: by a callback, by what they print, by files of their own.  transformers' trainer is the real one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"
# axolotl's trainer, and that of unsloth, are classes below this one.  It is given what axolotl adds to its own.
TRAINING = """
import sys, torch
from transformers import Trainer, TrainingArguments
from axolotl_points import PointsPlugin

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
    def forward(self, x, y):
        return {"loss": ((self.w * x - y) ** 2).mean()}

rows = [{"x": torch.ones(1), "y": torch.ones(1)} for _ in range(8)]
how = TrainingArguments("out", max_steps=4, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", per_device_train_batch_size=2, label_names=["y"])
trainer = Trainer(Line(), how, train_dataset=rows, eval_dataset=rows)
for each in PointsPlugin().add_callbacks_post_trainer(None, trainer):
    trainer.add_callback(each)
trainer.train()
trainer.evaluate()
"""


class Trained:
    """What a training of four steps told by the callback, and what it printed."""

    def __init__(self, folder: Path) -> None:
        base = folder / "site" / "axolotl" / "integrations" / "base.py"
        base.parent.mkdir(parents=True)
        base.write_text("class BasePlugin: pass\n")
        told = folder / "metrics.jsonl"
        path = f"{TRAINERS}:{folder / 'site'}"
        env = {**os.environ, "PYTHONPATH": path, "RECIPE_METRICS": str(told)}
        command = [sys.executable, "-u", "-c", TRAINING]
        ran = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )  # fmt: skip
        self.printed = ran.stdout.decode()
        assert ran.returncode == 0, self.printed
        self.told = points(told)


def points(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def tool_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TRAINERS))
    monkeypatch.setenv("RECIPE_METRICS", str(tmp_path / "told.jsonl"))
    yield importlib.import_module("tool_points")
    for name in ("tool_points", "loop"):
        sys.modules.pop(name, None)


def test_axolotls_plugin_tells_each_step_of_transformers_trainer(trained: Trained) -> None:
    steps = [each for each in trained.told if "loss" in each]
    assert [(each["step"], each["max_steps"]) for each in steps] == [(n, 4) for n in (1, 2, 3, 4)]
    assert all({"lr", "grad_norm", "epoch"} <= each.keys() for each in steps)
    (evaluated,) = [each for each in trained.told if "eval_loss" in each]
    assert evaluated["step"] == 4
    assert not any("train_runtime" in each for each in trained.told)


def test_the_same_points_are_read_from_what_the_trainer_prints(
    trained: Trained, tool_points: ModuleType, tmp_path: Path
) -> None:
    printed = tool_points.Printed(tool_points.Points(4), 4)
    for line in trained.printed.replace("\r", "\n").split("\n"):
        printed.on_line(line)
    printed.end()
    found = points(tmp_path / "told.jsonl")
    steps = [each for each in trained.told if "loss" in each]
    assert [each["step"] for each in found] == [each["step"] for each in steps]
    assert [each["loss"] for each in found] == pytest.approx(
        [each["loss"] for each in steps], rel=1e-3
    )


def test_a_loss_that_is_no_number_is_left_out(tool_points: ModuleType, tmp_path: Path) -> None:
    printed = tool_points.Printed(tool_points.Points(9), 9)
    for line in (
        "{'loss': nan, 'epoch': 0.1}",
        " 11%|# | 1/9 [00:00<00:01]",
        "{'loss': '0.5', 'grad_norm': 'nan'}",
        " 50%|#| 2/4 [00:00<00:01]",  # a bar of something else
        " 22%|##| 2/9 [00:00<00:01]",
    ):
        printed.on_line(line)
    printed.end()
    assert points(tmp_path / "told.jsonl") == [{"step": 2, "max_steps": 9, "loss": 0.5}]


def test_lines_of_a_trainers_own_files_are_told_once_and_whole(
    tool_points: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "run" / "trainer" / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    files = tool_points.Files(tool_points.Points(3), tmp_path / "run", "**/metrics.jsonl")
    file.write_text('{"step": 1, "loss/mean": 0.5, "time/step": 2.0}\n{"step": 2, "loss/me')
    files.look()
    with file.open("a") as more:
        more.write('an": 0.25}\nnot json\n')
    files.look()
    files.look()
    assert points(tmp_path / "told.jsonl") == [
        {"step": 1, "max_steps": 3, "loss": 0.5, "time/step": 2.0},
        {"step": 2, "max_steps": 3, "loss": 0.25},
    ]
