"""Whatever is killed, wherever: the next run ends as an undisturbed one would, runs no finished step again, and leaves nothing lying about."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sqlite3
from pathlib import Path

import pytest

import runner
from runner.errors import Infrastructure
from runner.execution.terms import Choice
from runner.storage.content.files import Content, no_space
from runner.storage.content.objects import Objects
from runner.storage.locks import Locks
from tests.support import Space, until
from tests.tools import small_disk

POINTS = {
    # name: which passing of it; what had been started by then is counted below
    "store-made": 1,
    "run-claimed": 1,
    "attempt-made": 2,
    "attempt-staged": 2,
    "job-started": 2,
    "job-over": 2,
    "object-put": 2,
    "outputs-stored": 2,
    "copy-written": 2,
    "published": 2,
    "group-begun": 2,
    "group-written": 2,
    "group-committed": 2,
}


def test_every_point_is_tried() -> None:
    package = Path(runner.__file__).parent
    found = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r'crashpoint\("([^"]+)"\)', path.read_text())
    }
    # Tried with hosts, with shared stores, with rented machines, and with receivers of reports.
    elsewhere = {
        "attempt-carried",
        "points-due",
        "letter-sent",
        *(name for name in found if name.startswith(("remote-", "lease-", "release-"))),
    }
    assert found - elsewhere == set(POINTS)


def chain(space: Space, *, slow: str = "") -> None:
    """Three steps, one after the other, which count their starts: a file, a tree, a file."""
    count = f"echo $RECIPE_STEP >> {space.root}/starts"
    space.recipe(
        f"steps:\n  a: {{run: '{count}; echo one > a.txt', outputs: {{o: a.txt}}}}\n"
        f"  b: {{run: '{count}; {slow} cp {{{{ steps.a.o }}}} b/x; head -c 200000 /dev/zero > b/y', outputs: {{o: b/}}}}\n"
        f"  c: {{run: '{count}; cat {{{{ steps.b.o }}}}/x > c.txt', outputs: {{o: c.txt}}}}\n"
    )


def starts(space: Space, step: str) -> int:
    path = space.root / "starts"
    return path.read_text().split().count(step) if path.exists() else 0


def recorded(space: Space) -> set[str]:
    """Steps whose ends are stored: what may never run again."""
    with contextlib.closing(sqlite3.connect(space.root / ".recipe" / "recipe.db")) as db:
        return {step for (step,) in db.execute("SELECT step FROM traces")}


def left(space: Space) -> list[str]:
    return sorted(os.listdir(space.root / ".recipe" / "attempts"))


def is_whole(space: Space) -> bool:
    return (
        space.read("a.txt") == space.read("b/x") == space.read("c.txt") == "one\n"
        and (space.root / "b/y").stat().st_size == 200_000
    )


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_anywhere_is_taken_up_by_the_next(space: Space, point: str) -> None:
    chain(space)
    code, _, _ = space.command("run", env={"RECIPE_CRASH_AT": f"{point}:{POINTS[point]}"})
    assert code == -signal.SIGKILL
    space.run()
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]
    assert space.run() == []
    space.run(choice=Choice(again=("c",)))  # a run that does something looks around
    assert left(space) == []


def test_a_worker_killed_again_and_again_gets_on(space: Space) -> None:
    chain(space)
    for count in range(1, 4):
        space.command("run", env={"RECIPE_CRASH_AT": f"job-started:{count}"})
    space.run()
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]
    assert left(space) == []


def killed_while_b_waits(space: Space) -> Path:
    """A chain whose worker is dead, while its second step goes on waiting at the gate."""
    gate = space.root / "gate"
    os.mkfifo(gate)
    chain(space, slow=f"read go < {gate};")
    worker = space.start("run")
    until(lambda: starts(space, "b") == 1 and "a" in recorded(space))
    worker.kill()
    worker.communicate()
    return gate


def test_a_step_whose_worker_was_killed_goes_on_and_is_not_started_twice(space: Space) -> None:
    gate = killed_while_b_waits(space)
    after = space.start("run")
    opened = os.open(gate, os.O_WRONLY)
    os.write(opened, b"go\n")
    os.close(opened)
    _, said = after.communicate(timeout=60)
    assert after.returncode == 0, said
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]
    assert left(space) == []


def test_a_step_that_ended_without_a_worker_is_collected(space: Space) -> None:
    gate = killed_while_b_waits(space)
    gate.write_text("go\n")
    until(lambda: '"code": 0' in space.of_agents("journal").splitlines()[-1])
    space.run()
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]


def agent_of(space: Space) -> int:
    root = str(space.root / ".recipe/local").encode() + b"/"
    entries = [entry for entry in os.listdir("/proc") if entry.isdigit()]
    for entry in entries:
        with contextlib.suppress(OSError):
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(root) for word in words):
                return int(entry)
    raise AssertionError("there is no agent")


def test_a_step_whose_agent_is_killed_is_waited_for(space: Space) -> None:
    os.mkfifo(space.root / "gate")
    chain(space, slow=f"read line < {space.root}/gate;")
    worker = space.start("run")
    until(lambda: starts(space, "b") == 1)
    os.kill(agent_of(space), signal.SIGKILL)
    (space.root / "gate").write_text("go\n")
    _, said = worker.communicate(timeout=30)
    assert worker.returncode == 0, said
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]


def test_a_step_that_was_always_short_is_tried_again_when_its_agent_is_killed(space: Space) -> None:
    chain(space)
    space.run()
    chain(
        space,
        slow=f"echo $PPID > {space.root}/parent; test $(grep -c b {space.root}/starts) = 3 || sleep 60;",
    )
    worker = space.start("run")
    parent = space.root / "parent"
    until(lambda: parent.exists() and parent.read_text().strip())
    os.kill(int(parent.read_text()), signal.SIGKILL)
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said
    assert is_whole(space)
    assert starts(space, "b") == 3


def test_a_short_step_that_kills_its_agent_fails_and_that_is_reported(space: Space) -> None:
    space.recipe("steps:\n  one: {run: 'true'}\n")
    space.run()
    space.recipe(
        f"steps:\n  one: {{run: 'echo >> {space.root}/starts; kill -9 $PPID; sleep 60'}}\n"
    )
    code, _, said = space.command("run")
    assert code == 1 and "the agent on this machine was killed 3 times during the step" in said, (
        said
    )
    assert "fix: in the step, kill only processes that it started" in said
    assert len(space.read("starts").splitlines()) == 3


def test_a_killed_agent_is_named_when_no_try_is_left(space: Space) -> None:
    space.recipe("steps:\n  one: {run: 'true'}\n")
    space.run()
    space.recipe(
        f"steps:\n  one: {{run: 'echo $PPID > {space.root}/parent; sleep 60', retries: {{preemption: 0}}}}\n"
    )
    worker = space.start("run")
    parent = space.root / "parent"
    until(lambda: parent.exists() and parent.read_text().strip())
    os.kill(int(parent.read_text()), signal.SIGKILL)
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "the agent was killed" in said


def test_a_run_whose_worker_died_is_closed_by_the_next(space: Space) -> None:
    chain(space)
    space.command("run", env={"RECIPE_CRASH_AT": "job-started:2"})
    assert "NEEDS_RECOVERY" in space.command("runs")[1]
    space.run()
    said = space.command("runs")[1]
    assert "NEEDS_RECOVERY" not in said and "FAILED" in said and "COMPLETED" in said


def one_step(space: Space, size: int) -> Path:
    """A step that has ended while nobody saw it, and what its worker put before it."""
    space.write("in.txt", "x" * size)
    space.recipe(
        f"steps: {{s: {{run: 'echo $RECIPE_STEP >> {space.root}/starts; wc -c < in.txt > o', deps: [in.txt], outputs: {{o: o}}}}}}"
    )
    code, _, _ = space.command("run", env={"RECIPE_CRASH_AT": "job-over:1"})
    assert code == -signal.SIGKILL
    return (
        space.root
        / ".recipe/attempts"
        / next(name for name in left(space) if "." not in name)
        / "in.txt"
    )


def test_a_step_that_deleted_what_it_was_given_is_taken_up(space: Space) -> None:
    """The worker wrote down what it gave, and does not have to guess from what is left."""
    space.write("ds/a", "a")
    space.write("ds/sub/b", "b" * 100_000)
    space.recipe(
        f"steps: {{s: {{run: 'echo $RECIPE_STEP >> {space.root}/starts; cat ds/a > o; rm -rf ds/sub; mv ds gone', deps: [ds/], outputs: {{o: o}}}}}}"
    )
    assert space.command("run", env={"RECIPE_CRASH_AT": "job-over:1"})[0] == -signal.SIGKILL
    space.run()
    assert starts(space, "s") == 1 and space.read("o") == "a" and left(space) == []


def test_an_attempt_of_a_dead_run_that_was_given_something_else_is_started_anew(
    space: Space,
) -> None:
    one_step(space, 10).write_text("another")
    space.run()
    assert starts(space, "s") == 2 and space.read("o") == "10\n" and left(space) == []


@pytest.mark.parametrize("size, runs", [(10, 2), (200_000, 1)], ids=["a copy", "an object"])
def test_an_input_that_changes_while_a_step_is_taken_up_is_seen_unless_the_step_has_an_object(
    space: Space, size: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_step(space, size)

    def edited(point: str) -> None:
        if point == "job-over" and starts(space, "s") == 1:
            space.write("in.txt", "y" * (size + 1))

    monkeypatch.setattr("runner.hosts.place.place.crashpoint", edited)
    space.attempt()
    assert starts(space, "s") == 1
    space.write("in.txt", "x" * size)
    space.run()
    assert starts(space, "s") == runs and space.run() == []


@pytest.mark.parametrize("size", [10, 200_000], ids=["a copy", "an object"])
def test_an_attempt_of_a_dead_run_whose_inputs_are_the_same_is_taken_up(
    space: Space, size: int
) -> None:
    one_step(space, size)
    space.run()
    assert starts(space, "s") == 1 and space.read("o") == f"{size}\n" and left(space) == []


@pytest.mark.parametrize("kind", ["of the file system", "in our words"])
def test_a_step_that_ended_well_on_a_full_disk_is_collected_when_there_is_room(
    space: Space, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    chain(space)
    whole = Objects.take

    def full(self: Objects, path: str, *words: object) -> Content:
        if str(path).endswith("/b"):
            error = OSError(errno.ENOSPC, "No space left on device", path)
            if kind == "in our words":
                raise no_space(error, str(path)) from error
            raise error
        return whole(self, path, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(Objects, "take", full)
    space.attempt()
    assert space.summary is not None and space.summary.state == "FAILED"
    (failure,) = space.summary.failed
    assert (
        "the disk is full" in failure.reason
        and "are kept in the attempt directory" in failure.reason
    )
    assert "recipe gc" in failure.hint
    monkeypatch.setattr(Objects, "take", whole)
    space.run()
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]
    assert left(space) == []


@pytest.mark.parametrize("full", ["here", "all of it here", "there"])
def test_a_step_of_a_host_that_ended_well_on_a_full_disk_is_collected_when_there_is_room(
    tmp_path: Path, full: str
) -> None:
    with small_disk(tmp_path / "here", "30m") as here, small_disk(tmp_path / "there", "40m") as far:
        space = Space(here / "space")
        space.write("recipe.toml", f'[drivers.loopback]\nroot = "{far}/root"\n')
        filler = (far if full == "there" else here) / "filler"
        size = 26_000_000 if full == "here" else 50_000_000
        run = f"echo >> {tmp_path}/starts; head -c 8000000 /dev/urandom > {{{{ outputs.o }}}}"
        run += f"; head -c {size} /dev/zero > {filler} || true"
        space.recipe({"steps": {"s": {"run": run, "outputs": {"o": "o"}}}})
        code, _, said = space.command("run", "--driver", "loopback")
        if full == "all of it here":  # not even the failure could be stored
            assert code == 5 and "the disk is full" in said, said
        else:
            assert (
                code == 1 and "kept in the attempt directory until there is disk space" in said
            ), said
        filler.unlink()
        code, _, said = space.command("run", "--driver", "loopback")
        assert code == 0 and (space.root / "o").stat().st_size == 8_000_000, said
        assert (tmp_path / "starts").read_text() == "\n", "it was begun once"


def test_a_lock_that_a_full_disk_has_no_room_for_is_no_matter_of_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(Infrastructure, match="the disk is full") as raised:
        Locks(tmp_path / "locks").try_hold("one")
    assert "free disk space" in raised.value.fix
