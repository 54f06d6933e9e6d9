"""A worker that is killed leaves its machines to who resumes its run; to any other run they are named, and `recipe reap` ends them."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from runner.execution.terms import Settings
from runner.storage.records.runs import RunRow, is_over
from tests.cloud import cloud, provider
from tests.support import Space, until


def gated(space: Space) -> None:
    """A step that says that it began, and waits."""
    space.recipe(
        f"steps:\n  s: {{run: 'echo s >> {space.root}/starts; read go < {space.root}/gate; echo 1 > o', outputs: {{o: o}}}}\n"
    )
    os.mkfifo(space.root / "gate")


def starts(space: Space) -> int:
    path = space.root / "starts"
    return len(path.read_text().split()) if path.exists() else 0


def killed(space: Space) -> None:
    """A run whose worker dies while its step is on a rented machine."""
    worker = space.start("run", "--driver", "loopback", "--everything-there")
    until(lambda: starts(space) == 1 or worker.poll() is not None)
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=30)


def go(space: Space) -> tuple[int, str]:
    worker = space.start("run", "--driver", "loopback", "--everything-there")
    with (space.root / "gate").open("w") as gate:
        gate.write("go\n")
    _, said = worker.communicate(timeout=60)
    return worker.returncode, said


@pytest.mark.parametrize("idle", [120, 0], ids=["kept for a while", "kept for no moment"])
def test_the_same_run_again_takes_over_the_machine_of_a_killed_worker_and_the_step_on_it(
    space: Space, idle: int
) -> None:
    """Also where the machine has nothing to do, as far as the run knows before it has looked what the earlier one left there."""
    cloud(space, idle=idle)
    gated(space)
    killed(space)
    assert provider(space) == ["created"]
    code, said = go(space)
    assert code == 0, said
    assert provider(space) == ["created", "destroyed"] and starts(space) == 1
    assert space.command("reap")[:2] == (0, "no leases\n")


@pytest.mark.parametrize(("flags", "machines"), [(["--keep-host"], 1), ([], 2)])
def test_a_pause_keeps_the_machine_for_the_resume_if_that_is_asked_for(
    space: Space, flags: list[str], machines: int
) -> None:
    cloud(space)
    gated(space)
    worker = space.start("run", "--driver", "loopback", "--everything-there")
    until(lambda: starts(space) == 1 or worker.poll() is not None)
    code, _, said = space.command("pause", *flags)
    assert code == 0, said
    worker.communicate(timeout=30)
    assert provider(space).count("destroyed") == machines - 1
    (space.root / "gate").unlink()
    (space.root / "gate").write_text("go\n")
    code, _, said = space.command("resume")
    assert code == 0, said
    assert (
        provider(space).count("created") == provider(space).count("destroyed") == machines
        and starts(space) == 2
    )


@pytest.fixture
def dead(space: Space) -> Space:
    """A workspace whose worker was killed with a machine rented."""
    cloud(space)
    gated(space)
    killed(space)
    return space


def test_a_machine_of_another_workspace_is_left_alone_and_reported_with_its_price(
    dead: Space,
) -> None:
    other = Space(dead.root.parent / "other")
    cloud(other)
    gated(other)
    code, said = go(other)
    assert code == 0, said
    assert (
        f"in {dead.root}, $1.20 an hour" in said
        and "the worker of its run is gone; it is left alone, and `recipe reap " in said
    )
    assert provider(dead) == ["created", "created", "destroyed"]
    assert go(dead)[0] == 0
    assert (
        starts(dead) == 1
        and provider(dead).count("created") == provider(dead).count("destroyed") == 2
    )


def test_reap_ends_a_dead_run_s_machine_by_name_or_when_asked_for_all_and_never_by_itself(
    dead: Space,
) -> None:
    code, out, _ = dead.command("reap")
    assert (
        code == 0
        and out.startswith("kept ")
        and "the worker of its run is gone" in out
        and provider(dead) == ["created"]
    )
    (told,) = json.loads(dead.command("reap", "-n", "--json", "--dead")[1])
    assert told["done"] == "would end" and told["state"] == "UP" and provider(dead) == ["created"]
    code, _, said = dead.command("reap", "--dead")
    assert code == 3 and "add --yes" in said
    assert dead.command("reap", "nonsense")[0] == 3
    shutil.rmtree(dead.root / ".recipe")  # a deleted workspace loses no machine
    code, out, said = dead.command("reap", told["key"])
    assert code == 0 and out.startswith("ended "), out + said
    assert provider(dead) == ["created", "destroyed"]


def test_what_was_being_given_back_when_the_worker_died_is_ended_by_reap_itself(
    space: Space,
) -> None:
    cloud(space)
    space.recipe("steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n")
    code, _, said = space.command(
        "run", "--driver", "loopback", env={"RECIPE_CRASH_AT": "release-intended"}
    )
    assert code == -signal.SIGKILL and provider(space) == ["created"], said
    code, out, _ = space.command("reap")
    assert (
        code == 0
        and "it was being given back" in out
        and provider(space) == ["created", "destroyed"]
    )


def test_a_machine_whose_worker_died_after_the_last_step_is_ended_by_the_next_run(
    space: Space,
) -> None:
    """It would be fresh, and the machine would have gone on to cost money."""
    cloud(space)
    space.recipe("steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n")
    code, _, said = space.command(
        "run", "--driver", "loopback", env={"RECIPE_CRASH_AT": "release-intended"}
    )
    assert code == -signal.SIGKILL and provider(space) == ["created"], said
    assert space.run(settings=Settings(driver="loopback")) == [] and provider(space) == [
        "created",
        "destroyed",
    ]


@pytest.mark.parametrize(
    ("tally", "over"),
    [
        ({("DONE", ""): 2}, True),
        ({("DONE", ""): 1, ("RUNNING", ""): 1}, False),
        ({("DONE", ""): 1}, False),
    ],
)
def test_a_run_without_a_worker_is_over_when_every_step_is(
    tally: dict[tuple[str, str], int], over: bool
) -> None:
    row = RunRow("r", "t@1", "p", {}, "/ws", "ACTIVE", data={"total": 3, "fresh": 1})
    assert is_over(row, tally) is over
    assert is_over(row._replace(state="FAILED", failure="exit"), tally) and not is_over(
        row._replace(state="FAILED", failure="worker-gone"), tally
    )
