"""Cancel, pause, resume and retry: asked from another terminal, done by the run's worker, or without one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from threading import Thread
from typing import Literal

import pytest

from runner.api.requests import resume
from runner.api.submitting import QueueSettings, submit
from runner.errors import CannotAsk, Infrastructure
from runner.execution import unattended, worker
from runner.execution.queue import serve
from runner.execution.resume import ClaimedRun
from runner.execution.steps.commit import GroupCommit
from runner.execution.steps.control import Handover
from runner.execution.steps.loop import Loop, Report
from runner.execution.terms import Choice, Settings
from runner.execution.unattended import end_unattended
from runner.hosts.link import control_file
from runner.hosts.link.client import Client
from runner.storage.records.runs import ClaimCriteria
from runner.storage.records.store import Store
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.support import Space, until
from tests.system.test_worker import Silent

TRAINER = """
  b:
    run: |
      echo b >> {root}/starts
      n=$(ls b.state | wc -l)
      trap 'echo saved; exit 143' TERM
      while [ $n -lt 3 ] || [ -e {root}/slow ]; do n=$((n+1)); touch b.state/step-$n; sleep 0.02; done
      cat {{{{ steps.a.o }}}} > b.txt
    outputs: {{o: b.txt}}
    state: {{kept: {{path: b.state/, checkpoint: "step-*"}}}}
"""


@pytest.fixture
def trained(space: Space) -> Space:
    """A short step, and one that saves where it is, and goes on for as long as there is a file `slow`."""
    space.recipe(
        f"steps:\n  a: {{run: 'echo a >> {space.root}/starts; echo one > a.txt', outputs: {{o: a.txt}}}}{TRAINER.format(root=space.root)}"
    )
    space.write("slow", "")
    return space


def starts(space: Space) -> list[str]:
    return (space.root / "starts").read_text().split()


def steps_made(space: Space) -> int:
    return len(list((space.root / ".recipe/states").rglob("step-*")))


def runs(space: Space) -> list[tuple[str, str]]:
    with Store.open(space.root / ".recipe") as store:
        return [(row.id, row.state) for row in store.runs.latest()]


def test_a_paused_run_stops_after_saving_and_is_the_one_that_is_asked_for_again(
    trained: Space,
) -> None:
    worker = trained.start("run")
    until(lambda: steps_made(trained) > 3)
    code, told, _ = trained.command("pause")
    _, said = worker.communicate(timeout=30)
    ((id, state),) = runs(trained)
    assert (
        (code, worker.returncode, state) == (0, 130, "PAUSED")
        and f"recipe resume {id}" in told
        and "paused: 2 steps" in said
    )
    made = steps_made(trained)
    assert made > 3 and starts(trained) == ["a", "b"]
    (trained.root / "slow").unlink()
    code, _, said = trained.command("run")
    assert code == 0 and "which was paused" in said, said
    assert (
        runs(trained) == [(id, "COMPLETED")]
        and starts(trained) == ["a", "b", "b"]
        and steps_made(trained) in (0, made)
    )


def test_a_run_under_way_is_neither_resumed_nor_retried_and_a_cancelled_one_is_over_and_what_ran_is_gone(
    trained: Space,
) -> None:
    worker = trained.start("run")
    until(lambda: steps_made(trained) > 0)
    for verb, words in (("resume", "is running"), ("retry", "has not finished")):
        code, _, said = trained.command(verb)
        assert code == 3 and words in said, said
    code, told, _ = trained.command("cancel")
    worker.communicate(timeout=30)
    assert (code, worker.returncode, [state for _, state in runs(trained)]) == (
        0,
        130,
        ["CANCELLED"],
    ) and "is CANCELLED" in told
    made = steps_made(trained)
    (trained.root / "slow").unlink()
    assert trained.command("retry")[0] == 0
    assert [state for _, state in runs(trained)] == ["COMPLETED", "CANCELLED"] and made > 0


LISTENS = """
steps:
  b:
    run: |
      echo b >> {root}/starts
      trap '' TERM
      [ -e b.state/step-1 ] || echo '{{"listens": ["pause"]}}' > "$RECIPE_CONTROL"
      n=$(ls b.state | wc -l)
      until [ $n -ge 3 ] || {{ [ $n -ge 1 ] && grep -q '"ask": "pause"' "$RECIPE_CONTROL"; }}; do
        while [ -e {root}/slow ] && ! grep -q '"ask": "pause"' "$RECIPE_CONTROL"; do sleep 0.02; done
        n=$((n+1)); touch b.state/step-$n
      done
      [ $n -ge 3 ] || {{ trap - TERM; kill -TERM $$; }}
      echo $CHECKPOINT_INTERVAL_STEPS > b.txt
    outputs: {{o: b.txt}}
    state: {{kept: {{path: b.state/, checkpoint: "step-*"}}}}
"""


def listens(space: Space) -> bool:
    return any(
        "listens" in path.read_text() for path in (space.root / ".recipe").rglob(".recipe-control")
    )


def test_a_training_that_listens_is_asked_to_save_and_gets_no_signal(space: Space) -> None:
    space.recipe(LISTENS.format(root=space.root))
    space.write("slow", "")
    worker = space.start("run", env={"CHECKPOINT_INTERVAL_STEPS": "7"})
    until(lambda: listens(space))
    code, _, said = space.command("pause")
    worker.communicate(timeout=30)
    ((id, state),) = runs(space)
    assert (code, state) == (0, "PAUSED") and steps_made(space) == 1, said
    (space.root / "slow").unlink()
    code, _, said = space.command("resume", env={"CHECKPOINT_INTERVAL_STEPS": "7"})
    assert code == 0, said
    assert (
        runs(space) == [(id, "COMPLETED")]
        and starts(space) == ["b", "b"]
        and space.read("b.txt") == "7\n"
    )


def test_a_training_that_has_saved_and_ended_before_its_worker_knows_that_it_was_asked_is_paused(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe(LISTENS.format(root=space.root))
    space.write("slow", "")

    whole = control_file.ask_trainer

    async def answered_late(
        host: Client, cwd: str, what: Literal["pause", "stop", "checkpoint"]
    ) -> bool:
        answer = await whole(host, cwd, what)
        await asyncio.wait(
            [task for task in asyncio.all_tasks() if "AttemptExecutor._execute" in repr(task)]
        )
        return answer

    def ask() -> None:
        until(lambda: listens(space))
        with Store.open(Path(space.root, ".recipe")) as other:
            assert other.runs.request(runs(space)[0][0], "pause")

    monkeypatch.setattr(control_file, "ask_trainer", answered_late)
    asking_thread = Thread(target=ask)
    asking_thread.start()
    space.attempt()
    asking_thread.join()
    assert [state for _, state in runs(space)] == ["PAUSED"] and steps_made(space) == 1


@pytest.mark.parametrize(("verb", "state"), [("cancel", "CANCELLED"), ("pause", "PAUSED")])
def test_a_run_without_a_worker_is_ended_or_paused_and_its_job_stops(
    trained: Space, verb: str, state: str
) -> None:
    worker = trained.start("run")
    until(lambda: steps_made(trained) > 0)
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate(timeout=30)
    code, told, said = trained.command(verb)
    assert code == 0 and f"is {state}" in told, said
    made = steps_made(trained)
    until(lambda: "stopped" in trained.of_agents("journal"))
    assert steps_made(trained) == made
    (trained.root / "slow").unlink()
    code, _, said = trained.command("resume" if verb == "pause" else "retry")
    assert code == 0, said
    assert [each for _, each in runs(trained)] == (
        ["COMPLETED"] if verb == "pause" else ["COMPLETED", "CANCELLED"]
    )


def test_a_cancel_that_its_worker_never_read_is_honoured_by_the_next_run(trained: Space) -> None:
    worker = trained.start("run")
    until(lambda: steps_made(trained) > 0)
    ((id, _),) = runs(trained)
    with Store.open(trained.root / ".recipe") as store:
        until(lambda: "b" in store.runs.steps(id) and store.runs.steps(id)["b"].state == "RUNNING")
    worker.send_signal(signal.SIGSTOP)  # not while it writes
    with Store.open(trained.root / ".recipe") as store:
        assert store.runs.request(id, "cancel")
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate(timeout=30)
    (trained.root / "slow").unlink()
    assert trained.command("run")[0] == 0
    assert [state for _, state in runs(trained)] == ["COMPLETED", "CANCELLED"]


@pytest.mark.parametrize(
    ("what", "state"), [("cancel", "CANCELLED"), ("pause", "COMPLETED"), ("resume", "COMPLETED")]
)
def test_what_is_asked_in_the_last_moment_is_answered_by_the_end(
    space: Space, monkeypatch: pytest.MonkeyPatch, what: str, state: str
) -> None:
    space.recipe("steps: {a: {run: echo one > a.txt, outputs: {o: a.txt}}}")
    whole = Loop.run

    async def asked(loop: Loop) -> Report:
        report = await whole(loop)
        with Store.open(Path(space.root, ".recipe")) as other:
            assert other.runs.request(loop.commits.run, what)
        return report

    monkeypatch.setattr(Loop, "run", asked)
    space.attempt()
    assert space.summary is not None and space.summary.state == state
    assert [found for _, found in runs(space)] == [state]


def test_a_resume_that_comes_when_all_has_stopped_is_not_lost(
    trained: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, turns = Loop.run, [0]

    async def asked(loop: Loop) -> Report:
        turns[0] += 1
        if turns[0] == 1:
            loop.owners.schedule.pause()
            loop.commits.answers = "pause"
        report = await whole(loop)
        if turns[0] == 1:
            (trained.root / "slow").unlink()
            with Store.open(Path(trained.root, ".recipe")) as other:
                assert other.runs.request(loop.commits.run, "resume")
        return report

    monkeypatch.setattr(Loop, "run", asked)
    trained.attempt()
    assert (
        turns == [2]
        and [state for _, state in runs(trained)] == ["COMPLETED"]
        and starts(trained) == ["a", "b"]
    )


def test_an_error_of_the_run_is_reported_though_something_was_asked_for_meanwhile(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("steps: {a: {run: 'true'}}")

    async def broken(loop: Loop) -> Report:
        with Store.open(Path(space.root, ".recipe")) as other:
            assert other.runs.request(loop.commits.run, "cancel")
        raise Infrastructure("the host went away")

    monkeypatch.setattr(Loop, "run", broken)
    with pytest.raises(Infrastructure, match="the host went away"):
        space.attempt()
    assert [state for _, state in runs(space)] == ["CANCELLED"]


@pytest.mark.parametrize(
    ("first", "then", "state"),
    [
        ("pause", "pause", "PAUSED"),
        ("pause", "cancel", "CANCELLED"),
        ("cancel", "pause", "CANCELLED"),
    ],
)
def test_a_run_of_which_two_things_are_asked_while_a_worker_takes_it_does_not_fail(
    space: Space, monkeypatch: pytest.MonkeyPatch, first: str, then: str, state: str
) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    with Workspace.open(space.root) as ws:
        run = submit(ws, Request("./recipe.yaml", {}), Choice(), Settings(), QueueSettings()).id
        assert ws.store.runs.request(run, first)
        looked = unattended.find_left_attempts

        def asked(folder: str, id: str) -> object:
            assert ws.store.runs.request(run, then)
            return looked(folder, id)

        monkeypatch.setattr(unattended, "find_left_attempts", asked)
        serve(space.root, ClaimCriteria(), Silent, Handover(), os.environ, once=True)
        assert (ws.store.runs.get(run).state, ws.store.runs.get(run).request) == (state, "")


@pytest.mark.parametrize(("what", "state"), [("cancel", "CANCELLED"), ("pause", "PAUSED")])
@pytest.mark.parametrize("verb", ["run", "worker"])
def test_what_is_asked_of_a_run_that_begins_just_then_is_done(
    space: Space, monkeypatch: pytest.MonkeyPatch, verb: str, what: str, state: str
) -> None:
    space.recipe("steps: {a: {run: 'while :; do sleep 0.02; done'}}")
    begun = worker._start

    def asked(ours: worker.Assignment, begins: ClaimedRun, jobs: int) -> GroupCommit:
        with Store.open(Path(space.root, ".recipe")) as other:
            assert other.runs.request(begins.id, what)
        return begun(ours, begins, jobs)

    monkeypatch.setattr(worker, "_start", asked)
    if verb == "run":
        space.attempt()
    else:
        with Workspace.open(space.root) as ws:
            submit(ws, Request("./recipe.yaml", {}), Choice(), Settings(), QueueSettings())
        serve(space.root, ClaimCriteria(), Silent, Handover(), os.environ, once=True)
    assert [found for _, found in runs(space)] == [state]


def test_a_cancel_that_comes_while_a_paused_run_is_paused_once_more_is_done(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    with Workspace.open(space.root) as ws:
        run = submit(ws, Request("./recipe.yaml", {}), Choice(), Settings(), QueueSettings()).id
        assert end_unattended(ws, run, "PAUSED", print) and end_unattended(ws, run, "PAUSED", print)
        assert [event.after for event in ws.store.runs.events(run)] == ["QUEUED", "PAUSED"]
        looked = unattended.find_left_attempts

        def asked(folder: str, id: str) -> object:
            assert ws.store.runs.request(run, "cancel")
            return looked(folder, id)

        monkeypatch.setattr(unattended, "find_left_attempts", asked)
        assert (
            end_unattended(ws, run, "PAUSED", print) and ws.store.runs.get(run).state == "CANCELLED"
        )


def test_a_run_that_ended_while_it_was_asked_stays_as_it_ended(space: Space) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    space.run()
    ((run, _),) = runs(space)
    with Workspace.open(space.root) as ws:
        assert not end_unattended(ws, run, "CANCELLED", print)
        with pytest.raises(CannotAsk, match="is already COMPLETED"):
            resume(ws, run)
        assert [event.after for event in ws.store.runs.events(run) if event.subject == "run"][
            -1
        ] == "COMPLETED"


def test_a_run_that_is_over_is_left_alone(space: Space) -> None:
    space.recipe("steps: {a: {run: 'true'}}")
    space.run()
    for verb in ("cancel", "pause", "resume"):
        code, _, said = space.command(verb)
        assert code == 3 and "is already COMPLETED" in said
