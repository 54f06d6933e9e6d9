"""What cancel, pause, resume and retry do to a run, by how it stands: the same from the command line, Python and REST, here and at a server."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import psycopg
import pytest

import runner
from runner.api import requests
from runner.api.submitting import QueueSettings
from runner.errors import HELPS, NotFound
from runner.execution.terms import Choice, Settings
from runner.interface.cli.main import main
from runner.planning.schedule import Move
from runner.storage.records.runs import StepRow
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.contract.api.fronts import FRONTS, PRIORITY, Answer, World
from tests.contract.api.outcomes import STANDINGS, VERBS, Asked, Done, NewRun, Refused, Stays
from tests.servers.postgres import Postgres
from tests.servers.rest import Rest
from tests.support import RECIPE, until

RECIPE_TEXT: Final = """\
recipe: {name}@1
summary: Waits until its gate is gone.
steps:
  wait:
    run: |
      echo $$ >> {root}/{name}.pids
      trap 'exit 143' TERM
      while [ -e {root}/{name}.gate ]; do sleep 0.02; done
      [ ! -e {root}/{name}.bad ]
      echo done > {name}.txt
    outputs: {{o: {name}.txt}}
"""
ELSEWHERE: Final = ("elsewhere", "lost")
"""Standings of a run that a worker of another machine has: only a shared database knows them."""
pytestmark = pytest.mark.slow

WORDS: Final = {
    "final": "already",
    "already": "already",
    "not-paused": "no pause was requested",
    "not-final": "has not finished",
}


class Runs:
    """Makes runs that stand in a given way.  One that a request left as it was serves the next request."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._environ = {**os.environ, **({"RECIPE_RUNS": world.to} if world.to else {})}
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._unspoilt: dict[str, str] = {}
        self._count = 0

    @contextmanager
    def workspace(self) -> Iterator[Workspace]:
        with Workspace.open(self.world.root, environ=self._environ) as ws:
            yield ws

    def standing(self, how: str) -> str:
        """The id of a run that stands so."""
        if how not in self._unspoilt:
            self._unspoilt[how] = getattr(self, f"_{how.replace('-', '_')}")()
        return self._unspoilt[how]

    def spoil(self, how: str) -> None:
        """A request has moved the run that stood so."""
        del self._unspoilt[how]

    def end_queued(self, run: str) -> None:
        """Cancel a run that waits for a worker: one without a label would be taken by the next of any test."""
        with self.workspace() as ws:
            if ws.store.runs.get(run).state == "QUEUED":
                requests.cancel(ws, run)

    def name_of(self, run: str) -> str:
        with self.workspace() as ws:
            return ws.store.runs.get(run).recipe.partition("@")[0]

    def state(self, run: str) -> str:
        with self.workspace() as ws:
            return ws.store.runs.get(run).state

    def priority(self, run: str) -> int:
        with self.workspace() as ws:
            return ws.store.runs.get(run).priority

    def prioritize(self, run: str, priority: int) -> None:
        with self.workspace() as ws:
            requests.prioritize(ws, run, priority)

    def events(self, run: str) -> int:
        with self.workspace() as ws:
            return len(ws.store.runs.events(run))

    def request(self, run: str) -> str:
        with self.workspace() as ws:
            return ws.store.runs.get(run).request

    def pids(self, name: str) -> list[int]:
        path = self.world.root / f"{name}.pids"
        return [int(word) for word in path.read_text().split()] if path.exists() else []

    def open_gate(self, run: str) -> None:
        (self.world.root / f"{self.name_of(run)}.gate").unlink(missing_ok=True)

    def work(self, run: str) -> None:
        """Have a worker carry this run out."""
        self.open_gate(run)
        code = subprocess.run(
            [*RECIPE, "worker", "--once", "-qq", *self._label(self.name_of(run))],
            cwd=self.world.root,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        ).returncode
        assert code == 0

    def wake(self, run: str) -> None:
        """Let a stopped worker continue."""
        if run in self._workers:
            self._workers[run].send_signal(signal.SIGCONT)

    def end(self) -> None:
        for worker in self._workers.values():
            worker.kill()
            worker.wait(60)
        for gate in self.world.root.glob("*.gate"):
            gate.unlink()

    # -- how runs come to stand so

    def _recipe(self, *, gate: bool = True) -> str:
        self._count += 1
        name = f"r{self._count}"
        (self.world.root / f"{name}.yaml").write_text(
            RECIPE_TEXT.format(name=name, root=self.world.root)
        )
        if gate:
            (self.world.root / f"{name}.gate").touch()
        return name

    @staticmethod
    def _label(name: str) -> tuple[str, ...]:
        # Only the worker that is meant takes a run.
        return ("--label", f"of={name}")

    def _submitted(self, name: str) -> str:
        ticket = QueueSettings(
            priority=7,
            labels={"of": name},
            user="ann",
            here=True,
            reports_to={"webhooks": [{"url": "https://hooks.example/x", "events": ["run.failed"]}]},
        )
        with self.workspace() as ws:
            request = Request(f"./{name}.yaml", {})
            return requests.submit(ws, request, Choice(), Settings(), ticket).id

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            [*RECIPE, *words, "-qq"],
            cwd=self.world.root,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self.pids(name))
        return worker

    def _queued(self) -> str:
        return self._submitted(self._recipe())

    def _active(self) -> str:
        name = self._recipe()
        run = self._submitted(name)
        self._workers[run] = self._start(name, "worker", "--once", *self._label(name))
        return run

    def _stopped(self) -> str:
        run = self._active()
        self._stop_between_writes(run)
        return run

    def _stop_between_writes(self, run: str) -> None:
        """Stop the worker of a run while it holds no lock of the database."""

        def is_running() -> bool:
            with self.workspace() as ws:
                step = ws.store.runs.steps(run).get("wait")
                return step is not None and step.state == "RUNNING"

        until(is_running)
        self._workers[run].send_signal(signal.SIGSTOP)

    def _pausing(self) -> str:
        run = self._stopped()
        with self.workspace() as ws:
            assert requests.pause(ws, run) == (run, "ACTIVE", False, ())
        return run

    def _left(self) -> str:
        run = self._stopped()
        self._workers[run].kill()
        self._workers.pop(run).wait(60)
        return run

    def _begun(self) -> tuple[str, subprocess.Popen[bytes]]:
        name = self._recipe()
        worker = self._start(name, "run", f"./{name}.yaml")
        with self.workspace() as ws:
            (run,) = [row.id for row in ws.store.runs.latest() if row.recipe == f"{name}@1"]
        return run, worker

    def _left_run(self) -> str:
        run, worker = self._begun()
        worker.kill()
        worker.wait(60)
        return run

    def _paused(self) -> str:
        run = self._queued()
        with self.workspace() as ws:
            assert requests.pause(ws, run).state == "PAUSED"
        return run

    def _paused_run(self) -> str:
        run, worker = self._begun()
        with self.workspace() as ws:
            assert requests.pause(ws, run, patience=60).state == "PAUSED"
        assert worker.wait(60) == 130
        return run

    def _completed(self) -> str:
        run = self._queued()
        self.work(run)
        assert self.state(run) == "COMPLETED"
        return run

    def _failed(self) -> str:
        run = self._queued()
        (self.world.root / f"{self.name_of(run)}.bad").touch()
        self.work(run)
        assert self.state(run) == "FAILED"
        return run

    def _cancelled(self) -> str:
        run = self._queued()
        with self.workspace() as ws:
            assert requests.cancel(ws, run).state == "CANCELLED"
        return run

    def _held_by_another_machine(self, seconds: int) -> str:
        run = self._queued()
        with self.workspace() as ws:
            fence = ws.store.runs.claim(run, "other process 1")
            assert fence is not None
            moves = [
                Move("run", run, "QUEUED", "ACTIVE", "", {}),
                Move("step", "wait", "QUEUED", "RUNNING", "", {"attempt": 1, "site": "other"}),
            ]
            ws.store.runs.group(
                run,
                fence,
                moves,
                steps=[StepRow(run, "wait", "RUNNING")],
                run_state=("ACTIVE", ""),
            )
            assert self.world.to is not None
            with psycopg.connect(self.world.to, autocommit=True) as db:
                db.execute(
                    "UPDATE runs SET holder = 'other/boot 1 1 x', held_until = now() + %s * interval '1 second' WHERE id = %s",
                    (seconds, run),
                )
        return run

    def _elsewhere(self) -> str:
        return self._held_by_another_machine(3600)

    def _lost(self) -> str:
        return self._held_by_another_machine(-3600)


@pytest.fixture(scope="module", params=["workspace", "database"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: Postgres
) -> Iterator[Runs]:
    root: Path = tmp_path_factory.mktemp("api") / "space"
    root.mkdir()
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RECIPE_LEDGER", str(root.with_name("ledger.db")))
        to = server.url() if request.param == "database" else None
        with pytest.MonkeyPatch.context() as kept:
            if to:
                kept.setenv("RECIPE_RUNS", to)
            rest = Rest(root)
        environ.setenv("RECIPE_TOKEN", rest.token)
        with rest:
            runs = Runs(World(root, rest, to))
            yield runs
            runs.end()


@pytest.fixture(params=FRONTS, ids=lambda front: front.__name__)
def ask(
    request: pytest.FixtureRequest, made: Runs, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], Answer]:
    front: Callable[[str, str], Answer] = request.param(made.world, capsys)
    return front


def _standings() -> list[tuple[str, str]]:
    """Where runs are kept, with how they may stand there."""
    here = [("workspace", standing) for standing in STANDINGS if standing not in ELSEWHERE]
    # In a database claims are kept otherwise: by beats, for workers of many machines.
    return here + [("database", standing) for standing in ("active", "left", *ELSEWHERE)]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("made", "standing"), _standings(), indirect=["made"], scope="module")
def test_a_request_has_one_outcome_on_every_front(
    made: Runs, ask: Callable[[str, str], Answer], standing: str, verb: str
) -> None:
    run = made.standing(standing)
    before = made.events(run)
    answer = ask(run, verb)
    match STANDINGS[standing].outcomes[verb]:
        case Refused(code):
            assert WORDS[code] in answer.refusal and run in answer.refusal, answer
            assert HELPS[code] in answer.fix, answer
            assert made.events(run) == before
        case NewRun():
            assert answer.run != run and answer.state == made.state(answer.run) == "QUEUED"
            assert made.events(run) == before
        case Stays():
            assert answer == Answer(run, made.state(run))
            assert made.priority(run) == PRIORITY
            made.prioritize(run, 7)
        case Done(state):
            assert answer == Answer(run, state)
            assert made.state(run) == state and not made.request(run)
            made.spoil(standing)
            made.end_queued(run)
        case Asked(state):
            assert answer == Answer(run, "ACTIVE", done=False)
            made.spoil(standing)
            if standing == "elsewhere":
                assert made.request(run) == verb
                return
            made.wake(run)
            if verb == "resume":
                made.open_gate(run)
                state = "COMPLETED"
            until(lambda: (made.state(run), made.request(run)) == (state, ""), seconds=60)


@pytest.mark.parametrize("standing", ["left", "left-run"])
@pytest.mark.parametrize("verb", ["cancel", "pause"])
def test_a_run_that_lost_its_worker_is_stopped_with_its_job(
    made: Runs, ask: Callable[[str, str], Answer], standing: str, verb: Literal["cancel", "pause"]
) -> None:
    run = made.standing(standing)
    (pid,) = made.pids(made.name_of(run))
    ask(run, verb)
    made.spoil(standing)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("standing", ["left", "left-run"])
def test_a_run_that_lost_its_worker_is_resumed_with_its_job(
    made: Runs, ask: Callable[[str, str], Answer], standing: str
) -> None:
    run = made.standing(standing)
    assert ask(run, "resume") == Answer(run, "QUEUED")
    made.spoil(standing)
    made.work(run)
    assert made.state(run) == "COMPLETED" and len(made.pids(made.name_of(run))) == 1


def test_a_retry_keeps_user_priority_labels_and_webhooks(
    made: Runs, ask: Callable[[str, str], Answer]
) -> None:
    run = made.standing("cancelled")
    again = ask(run, "retry").run
    with made.workspace() as ws:
        old, new = ws.store.runs.get(run), ws.store.runs.get(again)
    assert (new.user, new.priority) == (old.user, old.priority) == ("ann", 7)
    for name in ("labels", "webhooks", "asked", "settings"):
        assert new.data[name] == old.data[name]


def test_a_run_that_there_is_not_is_not_found(
    made: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    none = "20260101-000000-abcdef"
    assert made.world.rest.ask("POST", f"/v1/runs/{none}/cancel").status_code == 404
    for to in (made.world.to, made.world.rest.url):
        with pytest.raises(NotFound):
            runner.run_of(none, to=to, workspace=made.world.root)
    for verb in VERBS:
        more = [str(PRIORITY)] if verb == "prioritize" else []
        where = ["--to", made.world.to or "here"]
        assert main(["-C", str(made.world.root), verb, none, *more, *where]) == 3
        assert "no run " in capsys.readouterr().err
