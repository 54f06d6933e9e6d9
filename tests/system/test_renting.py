"""Machines that cost money, on the loopback that plays a provider: rented for the step that needs one, and given back when none does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.execution.terms import Settings
from runner.hosts.place.collecting import Collector
from runner.hosts.place.remote import RemotePlace
from runner.storage.records.ledger import LeaseRow, Ledger
from runner.storage.records.runs import RunRow, StepRow
from runner.storage.workspace import Workspace
from tests.cloud import cloud, provider
from tests.support import Space

RENTED = Settings(driver="loopback")


def test_a_machine_is_rented_for_the_step_that_needs_it_while_the_others_run_here(
    space: Space,
) -> None:
    cloud(space, boots=0.5)
    space.recipe(
        "steps:\n  data: {run: 'pwd > a.txt', outputs: {o: a.txt}}\n"
        "  train: {run: 'pwd > b.txt', resources: {gpus: 1}, outputs: {o: b.txt}}\n"
        "  card: {run: 'cat {{ steps.train.o }} > c.txt; pwd >> c.txt', outputs: {o: c.txt}}\n"
    )
    space.run(settings=RENTED)
    there, near = space.read("c.txt").split()
    assert (
        "/cloud/host-1/" in there
        and near.startswith(str(space.root))
        and space.read("a.txt").startswith(str(space.root))
    )
    assert provider(space) == ["created", "destroyed"]
    told = [
        (event.id if event.subject == "step" else "lease", event.after)
        for event in space.events
        if event.subject in ("step", "lease")
    ]
    assert [after for what, after in told if what == "lease"] == [
        "ASKED",
        "COMING",
        "UP",
        "RELEASING",
        "GONE",
    ]
    assert (
        told.index(("data", "DONE"))
        < told.index(("lease", "UP"))
        < told.index(("train", "RUNNING"))
    )


def test_nothing_is_rented_for_steps_that_need_no_gpu_unless_it_is_asked_for(space: Space) -> None:
    cloud(space)
    space.recipe(
        "steps:\n  s: {run: 'pwd > o', outputs: {o: o}}\n  t: {run: 'pwd > p', outputs: {o: p}, where: local}\n"
    )
    space.run(settings=RENTED)
    assert provider(space) == [] and space.read("o").startswith(str(space.root))
    shutil.rmtree(space.root / ".recipe")
    space.run(settings=Settings(driver="loopback", everything_there=True, overwrite=True))
    assert (
        "/cloud/" in space.read("o")
        and space.read("p").startswith(str(space.root))
        and provider(space) == ["created", "destroyed"]
    )


def test_a_machine_with_nothing_to_do_is_given_back_and_another_asked_for(space: Space) -> None:
    cloud(space, idle=0.1)
    space.recipe(
        "steps:\n  a: {run: 'echo 1 > a', resources: {gpus: 1}, outputs: {o: a}}\n"
        "  b: {run: 'sleep 1.5; cat {{ steps.a.o }} > b', outputs: {o: b}}\n"
        "  c: {run: 'cat {{ steps.b.o }} > c', resources: {gpus: 1}, outputs: {o: c}}\n"
    )
    space.run(settings=RENTED)
    assert provider(space) == ["created", "destroyed"] * 2 and space.read("c") == "1\n"


def test_a_need_that_nothing_satisfies_is_refused_and_nothing_is_rented(space: Space) -> None:
    cloud(space)
    space.recipe("steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 8}, outputs: {o: o}}\n")
    code, _, said = space.command("run", "--driver", "loopback")
    assert (
        code == 5
        and "s requires gpus 8, but loopback has no matching machine now" in said
        and provider(space) == []
    )


def test_a_limit_that_does_not_pay_for_two_checkpoints_rents_nothing(space: Space) -> None:
    cloud(space)
    space.recipe(
        "limits: {cost: 0.5 USD}\n"
        "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, state: {st: {path: saved, every: 10m}}, outputs: {o: o}}\n"
    )  # fmt: skip
    code, _, said = space.command("run", "--driver", "loopback")
    assert (
        code == 3
        and "at least 2100 s (900 s to start, and 2 checkpoints, 600 s apart), $0.70" in said
        and provider(space) == []
    ), said


def test_a_step_whose_machines_are_all_gone_fails_with_the_reason(space: Space) -> None:
    cloud(space, faults={"no_capacity": 3})
    space.recipe("steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n")
    space.attempt(settings=RENTED)
    assert space.summary is not None and space.summary.state == "FAILED"
    assert (
        "loopback has no other matching machine; last request: " in space.summary.failed[0].reason
    )
    assert provider(space) == []


def test_checkpoints_that_came_home_count_among_the_bytes_of_the_next_run(space: Space) -> None:
    cloud(space)
    recipe = (
        "steps:\n  s: {{run: 'head -c 100000 /dev/zero > ckpt/step-1; echo {} > o', resources: {{gpus: 1}}, outputs: {{o: o}},\n"
        "      state: {{ckpt: {{path: ckpt, checkpoint: 'step-*', keep: 2}}}}}}\n"
    )
    space.recipe(recipe.format(1))
    space.run(settings=RENTED)
    assert "100 kB of checkpoints copied here" in space.command("why", "s")[1]
    space.recipe(recipe.format(2))
    code, out, said = space.command("offers", "recipe.yaml", "--driver", "loopback", "--json")
    assert code == 0 and json.loads(out)[0]["bytes_home"] == 2 + 100_000, said


@pytest.mark.parametrize(
    "call", [2, 3, 4]
)  # while it is asked what it has, and its agent and files are reached
def test_a_step_whose_machine_is_lost_runs_on_another(space: Space, call: int) -> None:
    cloud(space, faults={"lost_on_call": call})
    space.recipe(
        "steps:\n  s: {run: 'sleep 0.5; echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    space.run(settings=RENTED)
    assert provider(space) == ["created", "destroyed"] * 2


# While it is measured, while it is asked what it has, and in its setup.
@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("lost_on_call", 1),
        ("unreachable_on_call", 1),
        ("unreachable_on_call", 3),
        ("lost_on_call", 5),
    ],
)
def test_a_machine_that_is_of_no_use_before_a_step_runs_there_costs_an_offer(
    space: Space, fault: str, call: int
) -> None:
    cloud(space, faults={fault: call, "dark": int(fault != "lost_on_call")})
    space.recipe(
        "setup: ['sleep 0.2']\nsteps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    space.run(settings=RENTED)
    assert provider(space) == ["created", "destroyed"] * 2


def test_a_machine_that_cannot_be_set_up_is_given_back_and_no_other_is_rented(space: Space) -> None:
    cloud(space)
    space.recipe(
        "setup: ['case $PWD in */cloud/*) echo no such disk; exit 3; esac']\nsteps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    space.attempt(settings=RENTED)
    assert space.summary is not None and space.summary.state == "FAILED"
    assert "no such disk" in space.summary.failed[0].reason and provider(space) == [
        "created",
        "destroyed",
    ]


def test_a_run_that_waits_for_its_machine_is_provisioning(space: Space) -> None:
    row = LeaseRow(
        "k", "loopback", "r", str(space.root), {}, "me", "ASKED", {}, until=9e9, price=1.2
    )
    with Workspace.open(space.root) as ws, Ledger.open(Path(os.environ["RECIPE_LEDGER"])) as ledger:
        ws.store.runs.submit(RunRow("r", "t@1", "p", {}, str(space.root)))
        fence = ws.store.runs.claim("r", "w")
        assert fence is not None
        ws.store.runs.group(
            "r", fence, steps=[StepRow("r", "s", "QUEUED")], run_state=("ACTIVE", "")
        )
        words = [ws.run_views.summaries([ws.store.runs.get("r")])[0].word]
        ledger.ask(row)
        words.append(ws.run_views.summaries([ws.store.runs.get("r")])[0].word)
    assert words == ["EXECUTING", "PROVISIONING"]


def test_a_run_says_when_its_data_travel(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud(space)
    space.recipe("steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n")
    seen: list[str] = []

    def word() -> str:
        with Workspace.open(space.root) as ws:
            rows = ws.store.runs.latest(last=1)
            return ws.run_views.summaries(rows)[0].word

    def waits_for(state: str, of: type, name: str) -> None:
        """Have a method wait until the run is in this state."""
        method = getattr(of, name)

        async def slow(*given: Any) -> Any:
            deadline = time.monotonic() + 10
            while word() != state and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            seen.append(word())
            return await method(*given)

        monkeypatch.setattr(of, name, slow)

    waits_for("TRANSFERRING_DATA", RemotePlace, "_upload")
    waits_for("FETCHING_RESULTS", Collector, "collect_outputs")
    space.attempt(settings=RENTED)
    assert space.summary is not None and space.summary.state == "COMPLETED"
    assert seen == ["TRANSFERRING_DATA", "FETCHING_RESULTS"]


def test_a_local_run_writes_no_ledger(space: Space) -> None:
    space.recipe("steps:\n  s: {run: 'echo 1 > o', outputs: {o: o}}\n")
    space.run()
    assert (
        not Path(os.environ["RECIPE_LEDGER"]).exists()
        and not (space.root / ".recipe/ledger.db").exists()
    )
    assert (
        "runner.storage.records.ledger" in sys.modules
    )  # it is imported with what knows leases, and opened by nobody


def test_a_python_that_is_not_there_is_reported_and_nothing_is_rented(space: Space) -> None:
    """What had not been opened yet has not to be closed."""
    space.recipe("steps:\n  s: {run: 'true'}\n")
    code, _, said = space.command("run", "--python", "/no/such")
    assert code == 2 and "no such Python interpreter" in said and "Traceback" not in said, said


def test_no_more_machines_are_there_at_once_than_the_user_may_have(space: Space) -> None:
    cloud(space, boots=0.3)
    path = space.root / "recipe.toml"
    path.write_text(path.read_text() + "[limits]\nmachines = 1\n")
    space.recipe(
        "steps:\n  train:\n    matrix: {n: [1, 2, 3]}\n"
        "    run: 'echo {{ matrix.n }} > {{ matrix.n }}.txt'\n"
        "    resources: {gpus: 1}\n    outputs: {o: '{{ matrix.n }}.txt'}\n"
    )
    code, _, said = space.command("run", "--driver", "loopback", "-j", "3")
    assert code == 0 and "3 ran" in said, said
    told = provider(space)
    at_once = [
        told[:n].count("created") - told[:n].count("destroyed") for n in range(len(told) + 1)
    ]
    assert max(at_once) == 1
