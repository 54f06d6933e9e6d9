"""Promise: a loss that is NaN or infinite is an event, an alert and a warning, and by `on_nan: stop` the end of its step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.errors import Invalid
from runner.storage import metrics
from runner.storage.workspace import Workspace
from tests.servers.receiver import Receiver
from tests.support import Space, until

GOES_ON = """\
import json, os, pathlib, sys, time
with open(os.environ["RECIPE_METRICS"], "a") as out:
    for step, loss in enumerate([2.0, 2.0, float("nan"), 2.0], 1):
        print(json.dumps({"step": step, "train/loss": loss}), file=out, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


@pytest.fixture
def trains(space: Space) -> Space:
    space.write("train.py", GOES_ON)
    return space


def steps(space: Space, more: str) -> Path:
    gate = space.root.parent / "gate"
    space.recipe(
        f"steps:\n  train: {{run: 'python3 train.py {gate}', code: [train.py], metrics: true{more}}}\n"
    )
    return gate


def test_a_loss_that_is_no_number_is_told_once_and_the_step_goes_on(
    trains: Space,
) -> None:
    gate = steps(trains, "")
    words = "train/loss is nan at step 3"
    with Receiver() as receiver:
        hook = f'[[webhooks]]\nurl = "{receiver.url}"\nevents = ["alert.*"]\n'
        trains.write("recipe.toml", hook)
        run = trains.start("run")
        (alert,) = receiver.wait(1)
        until(lambda: words in trains.command("show", "last", "--json")[1])
        gate.touch()
        _, said = run.communicate(timeout=60)
    assert run.returncode == 0 and said.count(words) >= 1, said
    assert alert.json["type"] == "alert.loss_not_finite" and len(receiver.got) == 1
    shown = json.loads(trains.command("show", "last", "--json")[1])
    assert shown["warnings"] == [f"train: {words}"]
    with Workspace.open(trains.root) as ws:
        (run_row,) = ws.store.runs.latest()
        told = [each for each in ws.store.runs.events(run_row.id) if each.reason == "nan"]
    assert [each.data["message"] for each in told] == [words]


def test_on_nan_stop_ends_the_attempt_with_what_to_do(trains: Space) -> None:
    steps(trains, ", on_nan: stop")
    code, _, said = trains.command("run")
    assert code == 1, said
    assert "train/loss is nan at step 3" in said and "lower learning rate" in said
    shown = json.loads(trains.command("show", "last", "--json")[1])
    assert shown["failed"]["kind"] == "nan"


def test_a_training_that_ends_before_the_next_look_has_failed_too(trains: Space) -> None:
    steps(trains, ", on_nan: stop").touch()
    code, _, said = trains.command("run")
    assert code == 1 and "train/loss is nan at step 3" in said, said


def test_on_nan_without_metrics_is_refused(space: Space) -> None:
    space.recipe("steps:\n  train: {run: 'true', on_nan: stop}\n")
    with pytest.raises(Invalid, match="`on_nan` checks the losses"):
        space.plan()


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"loss": "nan"}, "loss is nan"),
        ({"step": 7, "eval_loss": "-Infinity"}, "eval_loss is -Infinity at step 7"),
        ({"losses/policy": "inf", "step": 1}, "losses/policy is inf at step 1"),
        ({"loss": 2.0, "reward": "nan", "loss_scale": "inf", "note": "nan"}, ""),
        ({"loss": "unknown", "glossary": "nan"}, ""),
    ],
)
def test_what_counts_as_a_loss_that_is_no_number(point: dict[str, object], words: str) -> None:
    assert metrics.find_divergence(point) == words
