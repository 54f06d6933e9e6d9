"""Processes that jobs left behind are found by their mark, ended, and never those of running jobs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.agent import remains as module
from runner.agent.job import SIGCONT, SIGKILL, SIGTERM, Job
from runner.agent.remains import HOPELESS, STRAY_GRACE, Remains

ME = os.getpid()


class Machine:
    """A process table, whose processes tests add, and the signals that they get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: dict[int, tuple[int, int, int]] = {}
        self.marks: dict[int, bytes] = {}
        self.sent: list[tuple[int, int]] = []
        self.now, self.watched, self.stirred, self.is_full = 100.0, list[int](), False, False
        self.jobs: dict[bytes, Job] = {}
        self.timed: set[Job] = set()
        loop: Any = self
        self.remains = Remains(loop, self.jobs, self.timed, lambda pid: pid == 99)
        monkeypatch.setattr(self.remains, "name_of", self.marks.get)
        monkeypatch.setattr(module, "processes", lambda: self.table)
        monkeypatch.setattr(module, "kill", lambda pid, sign: self.sent.append((pid, sign)))
        monkeypatch.setattr(module, "time", Of(monotonic=lambda: self.now))

    def watch_process(self, pid: int) -> None:
        self.watched.append(pid)
        if self.is_full:
            raise OSError(24, "Too many open files")

    def job(self, name: bytes, pid: int, *, running: bool = False, **more: Any) -> Job:
        job = Job(name, b"")
        job.session = pid
        for key, value in more.items():
            setattr(job, key, value)
        self.jobs[name] = job
        if running:
            self.remains.running[pid] = job
            self.process(pid, mark=name)
        else:
            self.remains.add_ending(job)
        return job

    def process(
        self, pid: int, parent: int = ME, session: int = 0, mark: bytes | None = None
    ) -> None:
        self.table[pid] = parent, session or pid, session or pid
        if mark is not None:
            self.marks[pid] = mark

    def sweep(self, after: float = 0.0) -> list[bytes]:
        self.now += after
        return [job.name for job in self.remains.sweep()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_mark_of_a_process_names_its_job_in_this_root_only() -> None:
    nobody: Any = None
    remains = Remains(nobody, {}, set(), lambda _pid: False)
    mark = os.fsdecode(remains.cookie(b"job"))
    names = []
    for value in (mark, "job@1-1", "job"):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        with subprocess.Popen(["cat"], env={"RECIPE_JOB": value}, **pipes) as child:
            assert child.stdin and child.stdout
            child.stdin.write(b"ready\n")  # while it is being executed, it has no environment yet
            child.stdout.readline()
            names.append(remains.name_of(child.pid))
    assert names == [b"job", None, None]
    assert remains.name_of(2**22 + 1) is None  # no such process


def test_a_job_that_left_nothing_is_over(machine: Machine) -> None:
    machine.job(b"a", 10)
    assert machine.sweep() == [b"a"] and machine.sent == [] and machine.remains.ending == []


def test_what_a_job_left_is_asked_once_and_then_killed(machine: Machine) -> None:
    job = machine.job(b"a", 10)
    machine.process(11, mark=b"a")
    machine.process(12, parent=11, mark=b"a")
    assert machine.sweep() == []
    asked = [(11, SIGTERM), (11, SIGCONT), (12, SIGTERM), (12, SIGCONT)]
    assert sorted(machine.sent) == sorted(asked) and sorted(machine.watched) == [11, 12]
    assert job in machine.timed
    machine.sent.clear()
    assert machine.sweep(STRAY_GRACE / 2) == [] and machine.sent == []
    assert machine.sweep(STRAY_GRACE) == []
    assert sorted(machine.sent) == [(11, SIGKILL), (12, SIGKILL)]
    machine.table.clear()
    assert machine.sweep() == [b"a"]


def test_a_process_that_cannot_be_killed_is_waited_for_only_so_long(machine: Machine) -> None:
    machine.job(b"a", 10)
    machine.process(11, mark=b"a")
    machine.sweep()
    assert machine.sweep(STRAY_GRACE + 0.1) == []
    assert machine.sweep(HOPELESS - 0.2) == []
    assert machine.sweep(0.3) == [b"a"]


def test_the_group_of_a_job_that_was_terminated_is_not_asked_twice(machine: Machine) -> None:
    machine.job(b"a", 10, termed=True)
    machine.process(11, session=10, mark=b"a")
    machine.process(12, mark=b"a")  # left the group
    machine.sweep()
    assert sorted(machine.sent) == [(12, SIGTERM), (12, SIGCONT)]


def test_processes_below_running_jobs_and_of_the_agent_are_left_alone(machine: Machine) -> None:
    machine.job(b"a", 10)
    machine.job(b"b", 20, running=True)
    machine.process(21, parent=20, mark=b"b")
    machine.process(99)
    machine.process(98, parent=99)
    assert machine.sweep() == [b"a"] and machine.sent == []


def test_processes_of_the_agent_are_left_alone_without_a_running_job_too(machine: Machine) -> None:
    machine.job(b"a", 10)
    machine.process(99)
    machine.process(98, parent=99)
    assert machine.sweep() == [b"a"] and machine.sent == []


def test_a_process_that_cannot_be_watched_is_looked_for_again_soon(machine: Machine) -> None:
    machine.job(b"a", 10)
    machine.process(11, mark=b"a")
    machine.is_full = True
    assert machine.sweep() == [] and machine.stirred and (11, SIGTERM) in machine.sent


def test_a_background_process_of_a_running_job_is_tolerated_until_the_job_ends(
    machine: Machine,
) -> None:
    machine.job(b"a", 10)
    running = machine.job(b"b", 20, running=True)
    machine.process(21, mark=b"b")  # its parent is gone, so that it is a child of the agent
    assert machine.sweep() == [b"a"] and machine.sent == []
    del machine.remains.running[20], machine.table[20]
    machine.remains.add_ending(running)
    assert machine.sweep() == [] and (21, SIGTERM) in machine.sent


def test_a_process_without_a_mark_is_known_by_its_session(machine: Machine) -> None:
    machine.job(b"a", 10)
    machine.job(b"b", 20, running=True)
    machine.process(11, session=10)
    machine.process(21, session=20)
    assert machine.sweep() == []
    assert {pid for pid, _ in machine.sent} == {11}


def test_a_process_of_nobody_is_ended_with_the_last_job_but_not_beside_a_running_one(
    machine: Machine,
) -> None:
    running = machine.job(b"b", 20, running=True)
    machine.job(b"a", 10)
    machine.process(31)
    assert machine.sweep() == [b"a"] and machine.sent == []
    del machine.remains.running[20], machine.table[20]
    machine.remains.add_ending(running)
    assert machine.sweep() == [] and {pid for pid, _ in machine.sent} == {31}


def test_a_process_of_a_job_that_was_over_long_ago_is_killed(machine: Machine) -> None:
    machine.job(b"a", 10)
    machine.process(41, mark=b"old")
    assert machine.sweep() == [b"a"] and machine.sent == [(41, SIGKILL)]


def test_of_a_job_of_a_killed_agent_processes_anywhere_are_ended(machine: Machine) -> None:
    machine.job(b"a", 10, orphaned=True)
    machine.process(11, parent=1, mark=b"a")
    machine.process(12, parent=1, mark=b"other")
    assert machine.sweep() == [] and {pid for pid, _ in machine.sent} == {11}


def test_of_a_job_of_a_killed_agent_no_process_is_ended_twice(machine: Machine) -> None:
    machine.job(b"a", 10, orphaned=True)
    machine.process(11, mark=b"a")
    machine.process(12, parent=11, mark=b"a")
    machine.sweep()
    machine.sent.clear()
    machine.sweep(STRAY_GRACE + 0.1)
    assert sorted(machine.sent) == [(11, SIGKILL), (12, SIGKILL)]


@pytest.mark.parametrize(
    ("children", "is_orphaned", "is_enough"),
    [
        ("20 99", False, True),
        ("20 99 31", False, False),
        ("20 99", True, False),
        (None, False, False),
    ],
)
def test_the_process_table_is_read_only_if_a_child_belongs_to_no_running_job(
    machine: Machine, tmp_path: Path, children: str | None, is_orphaned: bool, is_enough: bool
) -> None:
    assert machine.remains.end_leftovers() == []
    (tmp_path / "children").write_text(children or "")
    handle = os.open(tmp_path / "children", os.O_RDONLY)
    machine.remains._children = handle if children is not None else None
    machine.job(b"b", 20, running=True)
    job = machine.job(b"a", 10, orphaned=is_orphaned)
    machine.process(11, parent=1 if is_orphaned else ME, mark=b"a")
    assert machine.remains.end_leftovers() == ([job] if is_enough else [])
    assert bool(machine.sent) is not is_enough
    os.close(handle)


def test_time_of_processes_that_were_left_counts_for_their_job(machine: Machine) -> None:
    job = machine.job(b"a", 10)
    machine.process(11, mark=b"a")
    machine.sweep()
    machine.remains.record_reaped(11, 2.5)
    machine.remains.record_reaped(77, 9.0)
    assert job.cpu == 2.5
