"""What earlier workers left: found, judged, reported and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any, TypeVar

import pytest

from drivers.base import Exit, Job, Unreachable
from runner.errors import NotFound
from runner.execution.steps import orphans
from runner.execution.steps.orphans import Orphans, delete_attempt, find_left_attempts
from runner.hosts.link.local_agents import note_claim
from runner.hosts.place.host_task import Paths
from runner.hosts.place.staging import AttemptDirectory
from runner.storage.workspace import Workspace

HEAD = "0123456789abcdef01234567"
OWN, OTHER = "20260101-000001-aaaaaa", "20260101-000002-bbbbbb"
Result = TypeVar("Result")


def name_of(run: str, fence: int = 1, number: int = 7, head: str = HEAD) -> str:
    return f"{head}-{run}-{fence}-{number}"


@dataclass
class Host:
    """A host whose jobs have known ends; None while a job runs."""

    exits: Mapping[str, Exit | None] = field(default_factory=dict)
    elsewhere: str = ""
    has_outputs: bool = True
    stopped: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    members: tuple[Host, ...] = ()
    answers: bool = True

    def __post_init__(self) -> None:
        self.members = self.members or (self,)
        self.contact = self
        self.folder = Of(root="/there", clear=self._clear)

    __hash__ = object.__hash__

    def paths(self, attempt: AttemptDirectory) -> Paths:
        return Paths.at(attempt.path)

    def may_have_made(self, attempt: AttemptDirectory, outputs: object) -> bool:
        return self.has_outputs

    async def insist(self, ask: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        return await ask()

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        if not self.answers:
            raise Unreachable("no answer")
        return self.exits.get(job.key, Exit(None, reason="lost"))

    async def stop(self, job: Job, grace: timedelta) -> None:
        self.stopped.append(job.key)

    async def _clear(self, paths: Paths) -> None:
        self.cleared.append(paths.cwd.rpartition("/")[2])


class Left:
    """A workspace with attempts of earlier workers, and this run of recipe `t@1`."""

    def __init__(self, root: Path) -> None:
        self.home = root / ".recipe"
        self.attempts = self.home / "attempts"
        self.attempts.mkdir(parents=True)
        self.said: list[str] = []
        self.here = Host()
        self.hosts: dict[str, Host] = {}
        self.runs: dict[str, Any] = {OWN: self.row()}
        self.alive: set[str] = set()

    def row(self, recipe: str = "t@1", due: float | None = None, state: str = "ACTIVE") -> Any:
        return Of(recipe=recipe, due=due, state=state)

    def add(self, name: str, host: str = "", *more: str) -> Path:
        """Leave an attempt, on another host if named."""
        path = self.attempts / name
        path.mkdir()
        (path / "half.txt").write_text("half")
        for suffix in (".log", ".metrics", *more):
            Path(f"{path}{suffix}").write_text("x")
        if host:
            Path(f"{path}.site").write_text(host)
        return path

    def open(self, fence: int = 2) -> Orphans:
        def get(run: str) -> Any:
            if run not in self.runs:
                raise NotFound(f"no run {run}")
            return self.runs[run]

        ws: Any = Of(home=str(self.home), store=Of(runs=Of(get=get, live=self.alive.__contains__)))
        commits: Any = Of(run=OWN, fence=fence, recipe="t@1", say=self.said.append)
        pool: Any = Of(
            local=Of(root=str(self.home / "local")),
            local_place_of=lambda root: self.here,
            find_place=lambda names: self.hosts.get(names[0]),
        )
        return Orphans(ws, commits, pool)


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


NODE: Any = Of(id="a", outputs=[])


def find(left: Left, name: str, always: bool = False) -> tuple[Job, Any] | None:
    return asyncio.run(left.open().find_job(NODE, name, always))


@pytest.mark.parametrize(
    ("exit", "run", "goes_on"),
    [
        (None, OTHER, True),  # it runs
        (Exit(0), OTHER, True),
        (Exit(1), OWN, True),
        (Exit(None, signal=9, reason="signal"), OWN, True),
        (Exit(1), OTHER, False),
        (Exit(None, reason="lost"), OWN, False),
        (Exit(None, reason="stopped"), OWN, False),
    ],
)
def test_a_job_counts_if_it_runs_succeeded_or_failed_in_this_run(
    exit: Exit | None, run: str, goes_on: bool, left: Left
) -> None:
    name = name_of(run)
    path = left.add(name)
    left.here.exits = {name: exit}
    found = find(left, name)
    assert (found is not None) == goes_on == path.exists()
    assert left.here.cleared == ([] if goes_on else [name])
    if found is not None:
        assert found[0].key == name and found[0].data["log"] == f"{path}.log"
        assert found[1] is left.here


def test_a_success_does_not_count_for_a_step_that_always_runs_or_without_its_outputs(
    left: Left,
) -> None:
    name = name_of(OWN)
    left.here.exits = {name: Exit(0)}
    left.add(name)
    assert find(left, name, always=True) is None
    left.add(name)
    left.here.has_outputs = False
    assert find(left, name) is None and not (left.attempts / name).exists()


def test_a_job_on_a_host_outside_this_run_is_reported_and_forgotten(left: Left) -> None:
    name = name_of(OTHER)
    left.add(name, "far")
    assert find(left, name) is None
    assert "a host outside this run" in left.said[0] and [*left.attempts.iterdir()] == []


def test_a_job_with_other_inputs_is_stopped_and_deleted(left: Left) -> None:
    name = name_of(OWN)
    left.add(name)
    left.here.exits = {name: None}
    host: Any = left.here
    asyncio.run(left.open().end(NODE, Job(name), host))
    assert left.said == ["restarting a: an input changed since the earlier run started it"]
    assert left.here.stopped == left.here.cleared == [name]
    assert [*left.attempts.iterdir()] == []


def test_attempts_are_found_by_the_beginning_of_their_key_and_taken_once(left: Left) -> None:
    names = [name_of(OTHER), name_of(OTHER, number=8)]
    for name in names:
        left.add(name)
    left.add(f"failed-{OTHER}-1")
    found = left.open()
    assert HEAD in found and "f" * 24 not in found and found.any_failed
    assert found.take(HEAD) == names and found.take(HEAD) == [] and HEAD not in found
    left.add(name_of(OWN, head="e" * 24))
    assert "e" * 24 not in found
    found.look_again()
    assert "e" * 24 in found and HEAD in found


def test_hosts_of_earlier_attempts_are_all_nodes_of_each(left: Left) -> None:
    nodes = (Host(), Host())
    left.hosts = {"far": Host(members=nodes)}
    left.add(name_of(OTHER), "far\nfarther")
    left.add(name_of(OTHER, number=8), "gone")
    assert left.open().places() == {*nodes}
    left.add(name_of(OTHER, number=9))
    assert left.open().places() == {*nodes, left.here}


def test_an_agent_that_cannot_be_reached_is_said_once(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "is_reachable", lambda root: False)
    left.hosts = {"far": Host()}
    left.add(name_of(OTHER))
    left.add(name_of(OTHER, head="e" * 24), "far")
    found = left.open()
    assert found.has_unreachable(HEAD) and found.has_unreachable(HEAD)
    assert len(left.said) == 1 and f"waiting for run {OTHER}" in left.said[0]
    # The agent of another host is asked, whatever this machine can reach.
    assert not found.has_unreachable("e" * 24) and not found.has_unreachable("f" * 24)
    with pytest.raises(Unreachable):
        asyncio.run(found.is_running(name_of(OTHER)))


def test_files_of_dead_workers_of_this_recipe_are_deleted(left: Left) -> None:
    left.runs |= {
        OTHER: left.row(),
        "20260101-000003-cccccc": left.row(due=5.0),
        "20260101-000004-dddddd": left.row(recipe="u@1"),
        "20260101-000005-eeeeee": left.row(),
        "20260101-000006-ffffff": left.row(due=5.0, state="FAILED"),
    }
    left.alive = {"20260101-000005-eeeeee"}
    names = {run: name_of(run) for run in left.runs} | {
        "unknown": name_of("20260101-000007-abcdef")
    }
    for name in names.values():
        left.add(name)
    mine = name_of(OWN, fence=2)
    left.add(mine)
    (left.attempts / "notes").write_text("of somebody else")
    asyncio.run(left.open().sweep())
    gone = {run for run, name in names.items() if not (left.attempts / name).exists()}
    assert gone == {OWN, OTHER, "20260101-000006-ffffff"}
    assert {*left.here.cleared} == {names[run] for run in gone}
    assert not list(left.attempts.glob(f"{names[OTHER]}*"))
    assert (left.attempts / mine).exists() and (left.attempts / "notes").exists()


def test_jobs_that_run_are_reported_and_silent_hosts_wait(left: Left) -> None:
    left.runs[OTHER] = left.row()
    left.hosts = {"far": Host(elsewhere="far"), "silent": Host(answers=False)}
    runs, silent, over = (name_of(OTHER, number=n) for n in (1, 2, 3))
    left.hosts["far"].exits = {runs: None}
    left.add(runs, "far")
    left.add(silent, "silent")
    left.add(over, "far")
    asyncio.run(left.open().sweep())
    assert left.said == [
        f"far still runs a job of {OTHER}, whose worker exited; this run does not need the job; "
        "to take over the job, start that run again"
    ]
    assert {path.name.partition(".")[0] for path in left.attempts.iterdir()} == {runs, silent}
    assert (left.attempts / f"{silent}.log").exists() and left.hosts["far"].cleared == [over]


def test_a_runs_attempts_are_told_by_agent_and_host(tmp_path: Path) -> None:
    with Workspace.open(tmp_path) as ws:
        home = Path(ws.home)
        left = Left(tmp_path / "other")
        left.attempts = home / "attempts"
        left.attempts.mkdir(exist_ok=True)
        root = home / "local" / "abc"
        root.mkdir(parents=True)
        note_claim(home, OWN, 3, str(root))
        names = [name_of(OWN, fence=3), name_of(OWN, fence=4), name_of(OWN, fence=5)]
        for name in [*names, name_of(OTHER)]:
            left.add(name)
        Path(f"{left.attempts}/{names[2]}.site").write_text("far\nfarther")
        here, elsewhere = find_left_attempts(home, OWN)
    assert here == {root: [names[0]], home / "local": [names[1]]}
    assert elsewhere == {names[2]: "far, farther"}
    assert find_left_attempts(tmp_path / "nowhere", OWN) == ({}, {})


def test_all_files_of_an_attempt_are_deleted_and_no_other(left: Left) -> None:
    name = name_of(OWN)
    path = left.add(name, "far", ".sh", ".host", ".latest", ".taken", ".given")
    for rank in ("1", "2"):
        Path(f"{path}.{rank}").mkdir()
    Path(f"{path}.over").mkdir()
    other = left.add(name_of(OWN, number=77))
    delete_attempt(str(path))
    assert {each.name for each in left.attempts.iterdir()} == {
        other.name,
        f"{other.name}.log",
        f"{other.name}.metrics",
    }
