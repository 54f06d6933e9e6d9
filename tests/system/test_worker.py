"""Runs that are submitted, and workers that carry them out, die, hand over and end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import threading
import weakref
from typing import Any

import pytest

from runner.api.submitting import QueueSettings, submit
from runner.errors import Invalid, StoreBusy, StoreUnavailable
from runner.execution import queue, worker
from runner.execution.queue import serve
from runner.execution.resume import POISON
from runner.execution.steps import judging, preparing, publisher, reattaching
from runner.execution.steps.control import Handover
from runner.execution.steps.launching import Launcher
from runner.execution.terms import Choice, Listener, Settings
from runner.execution.unattended import end_unattended
from runner.hosts.place.place import Place
from runner.storage.records import database
from runner.storage.records.runs import ClaimCriteria, RunRow
from runner.storage.records.store import Store
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.support import Space, until

TWO = """
steps:
  a:
    run: |
      echo begun >> {root}/starts
      while [ -e {root}/slow ]; do sleep 0.02; done
      echo one > a.txt
    outputs: {{o: a.txt}}
  b: {{run: 'cat {{{{ steps.a.o }}}} > b.txt', outputs: {{o: b.txt}}}}
"""


class Silent(Listener):
    def begin(self, overview: object) -> None: ...
    def events(self, batch: object) -> None: ...
    def tick(self) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self, summary: object) -> None: ...


@pytest.fixture
def slow(space: Space) -> Space:
    """Two steps; the first goes on for as long as there is a file `slow`."""
    space.recipe(TWO.format(root=space.root))
    space.write("slow", "")
    return space


def submitted(space: Space, ticket: QueueSettings = QueueSettings(), **inputs: object) -> str:  # noqa: B008
    with Workspace.open(space.root) as ws:
        return submit(ws, Request("./recipe.yaml", inputs), Choice(), Settings(), ticket).id


def writing(said: list[str]) -> type[Silent]:
    class Told(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    return Told


def work(space: Space, listener: type[Silent] = Silent) -> None:
    serve(space.root, ClaimCriteria(), listener, Handover(), os.environ, once=True)


def working(space: Space, handover: Handover, said: list[str]) -> threading.Thread:
    """A worker in this process, for what is not about its death."""
    worker = threading.Thread(
        target=serve,
        args=(space.root, ClaimCriteria(), writing(said), handover, os.environ),
        kwargs={"once": False},
    )
    worker.start()
    return worker


def row(space: Space, run: str) -> RunRow:
    with Store.open(space.root / ".recipe") as store:
        return store.runs.get(run)


def begun(space: Space) -> int:
    starts = space.root / "starts"
    return len(starts.read_text().split()) if starts.exists() else 0


def test_what_a_run_at_work_has_stays_where_a_run_that_is_over_has_an_id_that_ends_alike(
    space: Space,
) -> None:
    space.recipe("steps: {s: {run: 'echo x'}}")
    over, at_work = "20250101-000000-abcdef", "20260101-000000-abcdef"
    with Workspace.open(space.root) as ws:
        for id in (over, at_work):
            ws.store.runs.submit(RunRow(id, "t@1", "", {}, ""))
            fence = ws.store.runs.claim(id, "another")
            assert fence == 1
        ws.store.runs.group(over, 1, run_state=("COMPLETED", ""))
        left = {id: ws.home / "attempts" / f"{'0' * 24}-{id}-1-1" for id in (over, at_work)}
        for path in left.values():
            path.mkdir(parents=True)
        space.run()
        assert not left[over].exists() and left[at_work].exists()


def test_a_submitted_run_waits_for_a_worker_that_takes_what_is_due(space: Space) -> None:
    space.recipe("inputs: {n: {type: integer}}\nsteps: {a: {run: 'echo {{ inputs.n }} >> {root}/ran; touch a.txt', outputs: {o: a.txt}}}".replace("{root}", str(space.root)))  # fmt: skip
    assert space.command("submit", "n=1", "-R", "b")[0] == 3
    code, first, told = space.command("submit", "n=1")
    assert (
        code == 0
        and "execute it with `recipe worker`" in told
        and row(space, first.strip()).state == "QUEUED"
    )
    urgent, late = (
        submitted(space, QueueSettings(priority=5), n=2),
        submitted(space, QueueSettings(not_before=4e9), n=3),
    )
    work(space)
    assert space.read("ran").split() == ["2", "1"]
    assert [row(space, run).state for run in (first.strip(), urgent, late)] == [
        "COMPLETED",
        "COMPLETED",
        "QUEUED",
    ]
    with Workspace.open(space.root) as ws:
        assert (
            end_unattended(ws, late, "CANCELLED", print)
            and ws.store.runs.get(late).state == "CANCELLED"
        )


def test_a_run_in_which_all_is_fresh_completes(space: Space) -> None:
    space.recipe("steps: {a: {run: echo one > a.txt, outputs: {o: a.txt}}}")
    space.run()
    run = submitted(space)
    work(space)
    assert row(space, run).state == "COMPLETED"


def test_a_run_that_cannot_work_fails_with_the_reason_and_the_next_is_carried_out(
    space: Space,
) -> None:
    space.recipe(
        "inputs: {n: {type: integer}}\nsteps: {a: {run: 'echo {{ inputs.n }} > a.txt', deps: ['in{{ inputs.n }}'], outputs: {o: a.txt}}}"
    )
    space.write("in2", "")
    bad, good = submitted(space, n=1), submitted(space, n=2)
    said: list[str] = []
    work(space, writing(said))
    assert not any("\n" in line for line in said) and any(
        line.startswith("  fix: ") for line in said
    )
    assert (
        row(space, bad).state == "FAILED"
        and "in1" in row(space, bad).reason
        and row(space, good).state == "COMPLETED"
    )


def test_what_is_asked_with_a_key_again_is_the_same_run(space: Space) -> None:
    space.recipe("inputs: {n: {type: integer}}\nsteps: {a: {run: 'echo {{ inputs.n }}'}}")
    run = submitted(space, QueueSettings(idempotency="k"), n=1)
    assert submitted(space, QueueSettings(idempotency="k"), n=1) == run
    with pytest.raises(Invalid, match=run) as caught:
        submitted(space, QueueSettings(idempotency="k"), n=2)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "words",
    [("--user", b"Andr\xe9"), ("--key", b"caf\xe9"), ("--priority", b"99999999999999999999")],
)
def test_what_no_database_has_a_place_for_is_refused_with_a_submit(
    space: Space, words: tuple[str, bytes]
) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    code, _, said = space.command("submit", "./recipe.yaml", words[0], os.fsdecode(words[1]))
    assert code == 3 and "of a run must be" in said, said


def test_what_a_killed_worker_began_is_begun_once(slow: Space) -> None:
    run = submitted(slow)
    worker = slow.start("worker", "-q")
    until(lambda: begun(slow))
    worker.kill()
    worker.communicate(timeout=30)
    (slow.root / "slow").unlink()
    work(slow)
    found = row(slow, run)
    assert (found.state, found.fence, found.recoveries, begun(slow)) == (
        "COMPLETED",
        2,
        0,
        1,
    ) and slow.read("b.txt") == "one\n"


def test_a_worker_that_is_asked_to_end_finishes_the_step_and_hands_the_run_over(
    slow: Space,
) -> None:
    run = submitted(slow)
    handover, said = Handover(), list[str]()
    worker = working(slow, handover, said)
    until(lambda: begun(slow))
    handover()
    until(lambda: any("handing over" in words for words in said))
    (slow.root / "slow").unlink()
    worker.join(30)
    found = row(slow, run)
    assert (worker.is_alive(), found.state, found.claim) == (False, "ACTIVE", "") and not (
        slow.root / "b.txt"
    ).exists()
    work(slow)
    found = row(slow, run)
    assert (found.state, found.fence, found.recoveries, begun(slow)) == ("COMPLETED", 2, 0, 1)


def test_a_worker_that_is_asked_twice_ends_at_once_and_its_step_goes_on(slow: Space) -> None:
    run = submitted(slow)
    worker = slow.start("worker", "-q")
    until(lambda: begun(slow))
    worker.terminate()
    worker.terminate()
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=15)
    assert row(slow, run).state == "ACTIVE" and row(slow, run).claim == ""
    (slow.root / "slow").unlink()
    work(slow)
    assert row(slow, run).state == "COMPLETED" and begun(slow) == 1


def test_a_worker_without_a_run_ends_when_it_is_asked_to(space: Space) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    worker = space.start("worker", "--concurrency", "2")
    assert worker.stderr is not None
    lines = [worker.stderr.readline(), worker.stderr.readline()]
    assert all("waits for runs" in line for line in lines)
    worker.terminate()
    worker.communicate(timeout=15)
    assert worker.returncode == 0


def test_the_processes_of_a_worker_end_when_it_is_killed_and_take_no_more_runs(
    space: Space,
) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    worker = space.start("worker", "--concurrency", "2")
    assert worker.stderr is not None
    lines = [worker.stderr.readline(), worker.stderr.readline()]
    assert all("waits for runs" in line for line in lines)
    worker.kill()
    # Its standard error is open in each process, and ends with the last of them.
    _, err = worker.communicate(timeout=30)
    assert "Traceback" not in err
    run = submitted(space)
    assert row(space, run).state == "QUEUED"


def test_a_run_whose_workers_die_before_any_step_moves_is_poison(space: Space) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    run = submitted(space)
    for _ in range(POISON + 1):
        with Store.open(space.root / ".recipe") as store:
            assert store.runs.claim_next("one that dies", ClaimCriteria()) is not None
    work(space)
    found = row(space, run)
    assert (found.state, found.failure, found.recoveries) == ("FAILED", "poison", POISON + 1)
    assert f"{POISON + 1} workers died before any step finished" in found.reason


def test_an_error_of_ours_leaves_a_run_to_the_next_worker_as_a_death_would(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("steps: {a: {run: echo one > a.txt, outputs: {o: a.txt}}}")
    run, worked, recoveries = submitted(space), queue._execute, list[int]()

    def fails_at_first(ws: Workspace, found: RunRow, *rest: Any) -> bool:
        recoveries.append(found.recoveries)
        if len(recoveries) == 1:
            raise ZeroDivisionError
        return worked(ws, found, *rest)

    monkeypatch.setattr(queue, "_execute", fails_at_first)
    monkeypatch.setattr(queue, "LOOK", 0.01)
    work(space)
    assert row(space, run).state == "COMPLETED" and recoveries == [0, 1]


def test_a_run_that_meets_an_error_of_ours_each_time_is_poison(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    run = submitted(space)

    def fails(*_given: object) -> Workspace:
        raise ZeroDivisionError

    monkeypatch.setattr(queue, "_open_workspace", fails)
    monkeypatch.setattr(queue, "LOOK", 0.01)
    work(space)
    found = row(space, run)
    assert (found.state, found.failure) == ("FAILED", "poison"), found


def test_a_worker_whose_store_was_deleted_goes_on_with_a_new_one(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SAFETY", 0.1)
    space.recipe("steps: {a: {run: 'true'}}")
    handover, done = Handover(), lambda run: until(lambda: row(space, run).state == "COMPLETED")
    worker = working(space, handover, [])
    done(submitted(space))
    shutil.rmtree(space.root / ".recipe")
    done(submitted(space))
    handover(signal.SIGTERM, None)
    worker.join(20)
    assert not worker.is_alive()


def test_what_a_worker_learned_for_one_run_is_forgotten_in_the_next(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("inputs: {n: {type: integer}}\nsteps: {a: {run: 'true {{ inputs.n }}'}}")
    known, worked = list[weakref.ref[Workspace]](), queue._execute

    def noted(ws: Workspace, *rest: Any) -> bool:
        known.append(weakref.ref(ws))
        return worked(ws, *rest)

    monkeypatch.setattr(queue, "_execute", noted)
    monkeypatch.setattr(queue, "COLLECT", 0.0)
    for n in range(4):
        submitted(space, n=n)
    work(space)
    assert len(known) == 4 and not any(each() for each in known[:2]), "a worker of many runs grows"


def test_a_store_that_another_process_writes_to_for_too_long_fails_no_run(
    slow: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.2)
    run, said, handover = submitted(slow), list[str](), Handover()
    worker = working(slow, handover, said)
    until(lambda: begun(slow))
    with contextlib.closing(
        sqlite3.connect(slow.root / ".recipe/recipe.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        (slow.root / "slow").unlink()
        until(lambda: any("is back in the queue" in each for each in said))
    until(lambda: row(slow, run).state == "COMPLETED")
    handover(signal.SIGTERM, None)
    worker.join(20)
    assert begun(slow) == 1 and not any("failed" in each for each in said)


TOUCHES = {
    "judged": (judging, "judge"),
    "begun": (preparing.Preparer, "prepare"),
    "found again": (reattaching.Reattacher, "find"),
    "carried out": (Place, "run_attempt"),
    "published": (publisher.Publisher, "publish"),
}
"""By what is done for a step, where it reads or writes the store."""


@pytest.mark.parametrize("fault", [StoreBusy, StoreUnavailable])
@pytest.mark.parametrize("moment", TOUCHES)
def test_a_step_whose_store_does_not_answer_runs_later_and_has_not_failed(
    space: Space, monkeypatch: pytest.MonkeyPatch, moment: str, fault: type[StoreUnavailable]
) -> None:
    space.recipe(TWO.format(root=space.root))
    owner, name = TOUCHES[moment]
    run, whole, touched = submitted(space), getattr(owner, name), list[str]()

    def busy(*given: Any, **named: Any) -> Any:
        touched.append(name)
        if len(touched) == 2:
            raise fault("the database does not answer")
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, busy)
    work(space)
    assert row(space, run).state == "COMPLETED" and begun(space) == 1 and len(touched) > 1
    with Workspace.open(space.root) as ws:
        failed = [each for each in ws.store.runs.events(run) if each.after == "FAILED"]
    assert not failed


def test_a_run_whose_worker_is_gone_after_a_step_failed_ends_with_that_failure(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("steps: {a: {run: 'echo RuntimeError: no data; exit 7'}}")
    run = submitted(space)
    asked, whole = list[str](), worker._store_end

    def once_away(*given: Any) -> str:
        asked.append(run)
        if len(asked) == 1:
            raise StoreUnavailable("the database does not answer")
        return whole(*given)

    monkeypatch.setattr(worker, "_store_end", once_away)
    work(space)
    ended = row(space, run)
    assert ended.state == "FAILED" and ended.failure == "exit" and "no data" in ended.reason


def test_a_run_whose_worker_is_gone_after_an_allowed_failure_goes_on(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe(
        "steps:\n"
        "  a: {matrix: {n: [0, 7]}, run: 'echo {{ matrix.n }} > a{{ matrix.n }}.txt; exit {{ matrix.n }}',"
        " outputs: {o: 'a{{ matrix.n }}.txt'}, allow_failure: true}\n"
        "  b: {run: 'cat {{ steps.a.o }} > b.txt', outputs: {o: b.txt}}\n"
    )
    run = submitted(space)
    asked, whole = list[str](), Launcher.launch

    async def second_is_away(launcher: Launcher, id: str, attempt: Any) -> None:
        asked.append(id)
        if asked[2:] == ["b"]:
            launcher._commits.flush()
            raise StoreUnavailable("the database does not answer")
        await whole(launcher, id, attempt)

    monkeypatch.setattr(Launcher, "launch", second_is_away)
    work(space)
    assert row(space, run).state == "COMPLETED" and asked[2:] == ["b", "b"]


def test_a_cancelled_run_is_over_for_every_worker(slow: Space) -> None:
    run = submitted(slow)
    handover = Handover()
    worker = working(slow, handover, [])
    until(lambda: begun(slow))
    code, told, _ = slow.command("cancel", run)
    assert code == 0 and "is CANCELLED" in told
    handover()
    worker.join(15)
    assert not worker.is_alive()


def test_status_names_what_waits_for_a_worker(slow: Space) -> None:
    run = submitted(slow)
    code, told, _ = slow.command("status")
    assert code == 1 and f"queued: {run}" in told


def test_a_secret_is_what_the_workers_environment_says(space: Space) -> None:
    space.recipe(
        "inputs: {token: {type: secret, env: A_TOKEN, required: false}}\n"
        "steps: {a: {run: 'echo ${#A_TOKEN} > a.txt', secrets: [token], outputs: {o: a.txt}}}"
    )
    run = submitted(space)
    serve(
        space.root,
        ClaimCriteria(),
        Silent,
        Handover(),
        {**os.environ, "A_TOKEN": "sixteen letters!"},
        once=True,
    )
    assert row(space, run).state == "COMPLETED" and space.read("a.txt") == "16\n"


def test_what_a_killed_worker_left_is_not_swept_away_by_another_run_of_the_recipe(
    space: Space,
) -> None:
    step = f"echo begun >> {space.root}/starts; while [ -e {space.root}/slow{{{{ inputs.n }}}} ]; do sleep 0.02; done; echo one > a{{{{ inputs.n }}}}.txt"
    space.recipe(
        {
            "inputs": {"n": {"type": "integer"}},
            "steps": {"a": {"run": step, "outputs": {"o": "a{{ inputs.n }}.txt"}}},
        }
    )
    space.write("slow1", "")
    run = submitted(space, n=1)
    worker = space.start("worker", "-q")
    until(lambda: begun(space))
    worker.kill()
    worker.communicate(timeout=30)
    (space.root / "slow1").unlink()
    until(lambda: '"ended"' in space.of_agents("journal"))
    space.run({"n": 2})
    work(space)
    assert row(space, run).state == "COMPLETED" and begun(space) == 2


def test_a_path_that_was_typed_in_a_folder_is_the_same_file_for_the_worker(space: Space) -> None:
    space.recipe(
        "inputs: {data: {type: file}}\nsteps: {a: {run: 'cat {{ inputs.data }} > a.txt', outputs: {o: a.txt}}}"
    )
    space.write("recipe.toml", "")
    space.write("sub/d.txt", "here\n")
    code, run, said = Space(space.root / "sub").command(
        "submit", "-q", "-f", "../recipe.yaml", "data=d.txt"
    )
    assert code == 0, said
    work(space)
    assert row(space, run.strip()).state == "COMPLETED" and space.read("a.txt") == "here\n"
