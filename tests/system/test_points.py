"""`[hooks] spend`: a program of the user's is asked before a run costs anything, and told what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace
from tests.support import Space

PROGRAM = f"""\
#!{sys.executable}
import json, os, sys
told = json.load(sys.stdin)
with open("points.log", "a") as log:
    print(json.dumps(told), file=log)
if os.path.exists("refuse-" + told["event"]):
    print("the account of", told["run"][:2], "is empty")
    sys.exit(1)
"""
RECIPE = """\
recipe: paid@1
limits: {cost: 5 USD}
inputs: {ends: {type: integer, default: 0}}
steps: {a: {run: 'touch ran; echo x > {{ outputs.o }}; exit {{ inputs.ends }}', outputs: {o: a.txt}}}
"""


@pytest.fixture
def space(tmp_path: Path) -> Space:
    (tmp_path / "recipe.toml").write_text('[hooks]\nspend = ["./points"]\n')
    (tmp_path / "points").write_text(PROGRAM)
    (tmp_path / "points").chmod(0o755)
    (tmp_path / "paid.yaml").write_text(RECIPE)
    return Space(tmp_path)


def told(root: Path) -> list[Any]:
    return [json.loads(line) for line in (root / "points.log").read_text().splitlines()]


def last(root: Path) -> RunRow:
    with Workspace.open(root, read_only=True) as ws:
        return ws.store.runs.latest(last=1)[0]


def test_a_run_reserves_what_it_may_cost_and_is_charged_what_it_cost(
    space: Space, tmp_path: Path
) -> None:
    assert space.command("run", "./paid.yaml", "-q")[0] == 0
    run = last(tmp_path).id
    common = {"run": run, "lease": None}
    assert told(tmp_path) == [
        {"event": "reserve", "id": f"{run}-reserve", "usd": 5.0, **common},
        {"event": "charge", "id": f"{run}-charge", "usd": 0.0, **common},
    ]


@pytest.mark.parametrize(("asked", "usd"), [(2.0, 2.0), (50.0, 5.0)])
def test_a_run_reserves_the_lower_limit_of_its_recipe_and_its_request(
    space: Space, tmp_path: Path, asked: float, usd: float
) -> None:
    runner.submit("./paid.yaml", workspace=tmp_path, limits={"cost": asked}).close()
    (tmp_path / "recipe.toml").write_text(
        (tmp_path / "recipe.toml").read_text()
        + f'[stacks.s]\ndriver = "loopback"\nlimits = {{cost = "{asked} USD"}}\n'
    )
    assert space.command("submit", "./paid.yaml", "--stack", "s", "-q")[0] == 0
    assert space.command("run", "./paid.yaml", "--stack", "s", "-q")[0] == 0
    assert [each["usd"] for each in told(tmp_path) if each["event"] == "reserve"] == [usd] * 3


def test_a_run_that_fails_gives_back_what_it_did_not_use(space: Space, tmp_path: Path) -> None:
    assert space.command("run", "./paid.yaml", "ends=1", "-q")[0] == 1
    assert [(each["event"], each["usd"]) for each in told(tmp_path)] == [
        ("reserve", 5.0),
        ("refund", 5.0),
    ]


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_refusal_is_a_failed_run_that_began_nothing(
    space: Space, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "refuse-reserve").touch()
    code, _, said = space.command(verb, "./paid.yaml", "-q")
    row = last(tmp_path)
    assert code == 3 and "the account of 20 is empty" in said
    assert (row.state, row.failure) == ("FAILED", "points") and not (tmp_path / "a.txt").exists()
    assert "the account of 20 is empty" in row.reason
    assert [each["event"] for each in told(tmp_path)] == ["reserve"] and space.command("outbox")[
        1
    ] == ""


def test_a_program_that_cannot_be_started_pays_for_nothing(space: Space, tmp_path: Path) -> None:
    (tmp_path / "points").chmod(0o644)
    code, _, said = space.command("run", "./paid.yaml", "-q")
    assert code == 3 and "cannot start ./points" in said and last(tmp_path).state == "FAILED"


def test_a_worker_asks_where_the_submitter_died_before_it_could(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        space.command("submit", "./paid.yaml", "-q", env={"RECIPE_CRASH_AT": "points-due"})[0] != 0
    )
    assert not (tmp_path / "points.log").exists() and last(tmp_path).state == "QUEUED"
    (tmp_path / "refuse-reserve").touch()
    assert space.command("worker", "--once", "-q")[0] == 0
    assert (last(tmp_path).state, last(tmp_path).failure) == ("FAILED", "points") and [
        each["event"] for each in told(tmp_path)
    ] == ["reserve"]


def test_a_charge_that_was_not_taken_is_sent_again_under_its_id(
    space: Space, tmp_path: Path
) -> None:
    (tmp_path / "refuse-charge").touch()
    assert space.command("run", "./paid.yaml", "-q")[0] == 0
    code, listed, _ = space.command("outbox", "--json")
    (waits,) = json.loads(listed)
    assert (
        code == 0
        and (waits["type"], waits["tries"]) == ("points.charge", 1)
        and "is empty" in waits["reason"]
    )
    (tmp_path / "refuse-charge").unlink()
    with Workspace.open(tmp_path) as ws:  # as if its time had come
        ws.store.runs.outbox.put_off(ws.store.runs.outbox.list_letters()[0], 0.0, "")
    assert space.command("outbox", "deliver")[0] == 0
    charges = [each for each in told(tmp_path) if each["event"] == "charge"]
    assert len(charges) == 2 and charges[0] == charges[1] and space.command("outbox")[1] == ""
