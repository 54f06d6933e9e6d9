"""A run from its first judgement to its last move."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.errors import CannotRun, Infrastructure
from runner.execution.steps.assembly import Options
from runner.execution.steps.control import Handover
from runner.execution.steps.loop import Loop
from runner.execution.steps.orphans import Orphans
from runner.execution.terms import Choice
from runner.hosts.place.hooks import Hooks
from runner.hosts.place.staging import AttemptDirectory
from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import (
    Program,
    SimulatedRun,
    StartedJob,
    exits,
    runs_for,
    writes,
)
from tests.virtual import virtual

CHAIN = """
steps:
  a: {run: "true", outputs: {o: a.txt}}
  b: {run: "cat {{ steps.a.o }}", outputs: {o: b.txt}}
"""
SIDE_BY_SIDE = """
steps:
  a: {run: "echo a", outputs: {o: a.txt}}
  b: {run: "echo b", outputs: {o: b.txt}}
"""
LONG = runs_for(3000, writes(a="1"))


def test_each_step_runs_after_what_it_needs_and_is_published(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, CHAIN, {"a": writes(a="1"), "b": writes(b="2")})
    report = run.run()
    assert (report.state, report.counts, run.started) == ("COMPLETED", {"DONE": 2}, ["a", "b"])
    assert (tmp_path / "b.txt").read_text() == "2"
    assert not report.failures and not report.abandoned and not report.left
    assert run.pool is not None and run.pool.closed == [False]
    left = [path.name for path in (tmp_path / ".recipe" / "attempts").iterdir()]
    assert not [name for name in left if not name.startswith("spare")]
    assert "seconds" in run.last_of("a").data and "note" not in run.last_of("a").data


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_setup_command_that_the_run_stopped_itself_does_not_fail_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    async def setup(_self: Hooks) -> None:
        if is_stopped:
            run.own.stopper.terminate()
        raise CannotRun("a setup command failed")

    monkeypatch.setattr(Hooks, "setup", setup)
    run = SimulatedRun(tmp_path, CHAIN, {})
    if is_stopped:
        assert run.run().state == "CANCELLED" and not run.started
        return
    with pytest.raises(CannotRun, match="a setup command failed"):
        run.run()


def test_only_the_steps_after_a_change_run_again(tmp_path: Path) -> None:
    programs = {"a": writes(a="1"), "b": writes(b="2")}
    SimulatedRun(tmp_path, CHAIN, programs).run()
    again = SimulatedRun(tmp_path, CHAIN.replace("cat {{", "tac {{"), programs)
    assert (again.run().state, again.started) == ("COMPLETED", ["b"])


def test_a_step_that_fails_blocks_those_that_need_it_and_says_why(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, CHAIN, {"a": exits(3, "reading\nValueError: no rows\n")})
    report = run.run()
    assert report.state == "FAILED" and report.counts == {"FAILED": 1, "BLOCKED": 1}
    (failure,) = report.failures
    assert (failure.id, failure.kind, failure.reason) == ("a", "exit", "exit 3")
    assert failure.error == "ValueError: no rows" and failure.has_begun and not failure.is_unplaced
    assert failure.tail == b"reading\nValueError: no rows\n"
    assert Path(failure.log).read_bytes() == failure.tail
    own = run.last_of("a")
    assert own.data["exit"] == 3 and own.data["tail"] == ["reading", "ValueError: no rows"]
    assert not failure.allowed and not failure.left


def test_files_of_a_failed_attempt_are_kept_to_be_looked_at(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        await writes(c="half")(job)
        return await exits(1)(job)

    run = SimulatedRun(tmp_path, CHAIN, {"a": fails})
    (failure,) = run.run().failures
    assert (Path(failure.left) / "c.txt").read_text() == "half"
    again = SimulatedRun(tmp_path, CHAIN, {"a": writes(a="1"), "b": writes(b="2")})
    assert again.run().state == "COMPLETED" and not Path(failure.left).exists()


def test_a_step_with_retries_is_tried_again_after_a_rest(tmp_path: Path) -> None:
    recipe = 'steps: {a: {run: "true", retries: 1, outputs: {o: a.txt}}}'
    run = SimulatedRun(tmp_path, recipe, {"a": [exits(1), writes(a="1")]})
    assert run.run().state == "COMPLETED"
    starts = [event for event in run.steps if event.after == "RUNNING"]
    assert [event.data["attempt"] for event in starts] == [1, 2]
    assert starts[1].at - starts[0].at >= 0.4
    with Workspace.open(tmp_path) as ws:
        rows = ws.store.runs.attempts(run.run_id)
    assert [(row.outcome, row.reason) for row in rows] == [("failed", "exit"), ("done", "")]


@pytest.mark.parametrize(("keep_going", "ran"), [(False, ["a"]), (True, ["a", "b"])])
def test_keep_going_runs_what_does_not_need_the_failed_step(
    tmp_path: Path, keep_going: bool, ran: list[str]
) -> None:
    options = Options(jobs=1, keep_going=keep_going)
    run = SimulatedRun(tmp_path, SIDE_BY_SIDE, {"a": exits(1), "b": writes(b="2")}, options=options)
    assert (run.run().state, run.started) == ("FAILED", ran)


def test_the_next_step_starts_before_the_outputs_of_an_ended_one_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"a": writes(a="1"), "b": writes(b="2")}
    run = SimulatedRun(tmp_path, SIDE_BY_SIDE, programs, options=Options(jobs=1))
    started: list[list[str]] = []
    collect = AttemptDirectory.collect

    def note(*given: Any) -> dict[str, str]:
        started.append(list(run.agents[""].started))
        return collect(*given)

    monkeypatch.setattr(AttemptDirectory, "collect", note)
    assert run.run().state == "COMPLETED"
    assert started == [["a", "b"], ["a", "b"]]
    moves = [(event.id, event.after) for event in run.steps if event.after in ("RUNNING", "DONE")]
    assert moves == [("a", "RUNNING"), ("b", "RUNNING"), ("a", "DONE"), ("b", "DONE")]


def test_nothing_starts_after_a_step_without_its_outputs(tmp_path: Path) -> None:
    programs = {"a": exits(0), "b": writes(b="2")}
    run = SimulatedRun(tmp_path, SIDE_BY_SIDE, programs, options=Options(jobs=1))
    assert (run.run().state, run.started) == ("FAILED", ["a"])


def test_a_failure_that_is_allowed_lets_the_run_complete(tmp_path: Path) -> None:
    recipe = """
steps:
  a: {matrix: {n: [1, 2]}, run: "echo {{ matrix.n }}", allow_failure: true}
  b: {run: "true", needs: [a]}
"""
    options = Options(jobs=4, keep_going=True)
    programs = {"a[n=1]": exits(1), "a[n=2]": exits(0)}
    run = SimulatedRun(tmp_path, recipe, programs, options=options)
    report = run.run()
    assert report.state == "COMPLETED" and report.failures[0].allowed
    assert report.counts == {"DONE": 2, "FAILED": 1}


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        (writes(), "output", "(exit 0)"),
        (exits(1, reason="timeout"), "timeout", "ran longer than 9 s and was stopped"),
        (exits(1, reason="idle"), "idle", "had no output for 8 s and was stopped"),
        (exits(1, reason="oom"), "oom", "killed by the kernel: out of memory"),
        (exits(127), "exit", "program not found"),
        (exits(1, signal=11), "signal", "killed by SIGSEGV"),
        (exits(1, "OSError: No space left on device\n"), "disk", "no space left on a disk"),
    ],
)
def test_the_end_of_an_attempt_has_a_kind_and_words(
    tmp_path: Path, program: Program, kind: str, words: str
) -> None:
    recipe = 'steps: {a: {run: "true", timeout: 9s, idle_timeout: 8s, outputs: {o: a.txt}}}'
    (failure,) = SimulatedRun(tmp_path, recipe, {"a": program}).run().failures
    assert failure.kind == kind and words in failure.reason


def test_a_step_that_spoils_an_input_has_failed(tmp_path: Path) -> None:
    async def spoils(job: StartedJob) -> Exit:
        path = next((job.folder).glob("in.txt"))
        path.unlink()
        path.write_text("other")
        return await writes(a="1")(job)

    (tmp_path / "in.txt").write_text("given")
    recipe = 'steps: {a: {run: "true", deps: [in.txt], outputs: {o: a.txt}}}'
    (failure,) = SimulatedRun(tmp_path, recipe, {"a": spoils}).run().failures
    assert failure.kind == "input" and "read-only" in failure.reason


def test_an_error_of_our_own_fails_the_step_with_the_traceback_in_its_log(tmp_path: Path) -> None:
    async def breaks(_job: StartedJob) -> Exit:
        raise RuntimeError("oops")

    (failure,) = SimulatedRun(tmp_path, CHAIN, {"a": breaks}).run().failures
    assert failure.reason == "internal error of recipe: RuntimeError: oops"
    assert "Traceback" in Path(failure.log).read_text()


def test_an_attempt_that_could_not_begin_waits_again_at_no_cost(tmp_path: Path) -> None:
    run = SimulatedRun(
        tmp_path,
        CHAIN,
        {"a": [exits(1, reason="busy"), writes(a="1")], "b": writes(b="2")},
    )
    assert run.run().state == "COMPLETED"
    assert run.states_of("a") == ["READY", "QUEUED", "RUNNING", "QUEUED", "RUNNING", "DONE"]


def test_a_file_that_was_edited_by_hand_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    programs = {"a": writes(a="1"), "b": writes(b="2")}
    first = SimulatedRun(tmp_path, CHAIN, programs)
    (failure,) = first.run().failures
    assert (
        failure.reason.startswith("the step would replace a.txt") and "--overwrite" in failure.hint
    )
    assert not first.agents[""].started and (tmp_path / "a.txt").read_text() == "mine"
    options = Options(jobs=4, overwrite=True)
    assert SimulatedRun(tmp_path, CHAIN, programs, options=options).run().state == "COMPLETED"
    assert (tmp_path / "a.txt").read_text() == "1"


def test_a_file_that_comes_while_the_step_runs_is_left_as_it_is(tmp_path: Path) -> None:
    async def slow(job: StartedJob) -> Exit:
        (tmp_path / "a.txt").write_text("mine")
        return await writes(a="1")(job)

    (failure,) = SimulatedRun(tmp_path, CHAIN, {"a": slow}).run().failures
    assert failure.kind == "publish" and (tmp_path / "a.txt").read_text() == "mine"


def test_a_step_whose_condition_is_false_is_skipped_with_what_needs_it(tmp_path: Path) -> None:
    async def measures(job: StartedJob) -> Exit:
        job.report('{"loss": 3}\n')
        return Exit(0)

    recipe = """
steps:
  a: {run: "true", metrics: true}
  b: {run: "true", when: "{{ steps.a.metrics.loss < 2 }}", outputs: {o: b.txt}}
  c: {run: "cat {{ steps.b.o }}"}
"""
    run = SimulatedRun(tmp_path, recipe, {"a": measures})
    report = run.run()
    assert (report.state, report.counts) == ("COMPLETED", {"DONE": 1, "SKIPPED": 2})


def test_a_matrix_over_files_of_another_step_becomes_its_instances(tmp_path: Path) -> None:
    async def parts(job: StartedJob) -> Exit:
        folder = job.folder / "parts"
        folder.mkdir(exist_ok=True)
        for name in "xy":
            (folder / f"{name}.txt").write_text(name)
        return await exits(0)(job)

    recipe = """
steps:
  split: {run: "true", outputs: {parts: parts/}}
  each:
    matrix: {part: {glob: "{{ steps.split.parts }}/*.txt"}}
    run: "cat {{ matrix.part }}"
  all: {run: "true", needs: [each]}
"""
    run = SimulatedRun(tmp_path, recipe, {"split": parts})
    assert run.run().state == "COMPLETED"
    assert sorted(run.started)[:1] == ["all"] and len(run.started) == 4
    assert run.started[0] == "split" and run.started[-1] == "all"


def test_numbers_and_warnings_of_a_step_are_stored_with_its_end(tmp_path: Path) -> None:
    async def trains(job: StartedJob) -> Exit:
        job.report('{"step": 1, "loss": 0.5}\n{"warning": "few rows"}\n')
        return await writes(a="1")(job)

    recipe = 'steps: {a: {run: "true", metrics: true, outputs: {o: a.txt}}}'
    run = SimulatedRun(tmp_path, recipe, {"a": trains})
    assert run.run().state == "COMPLETED"
    data = run.last_of("a").data
    assert data["metrics"] == {"step": 1, "loss": 0.5}
    start = next(event for event in run.steps if event.after == "RUNNING")
    assert str(start.data["metrics"]).endswith(".metrics")
    with Workspace.open(tmp_path) as ws:
        assert "loss" in ws.store.runs.steps(run.run_id)["a"].numbers


def test_secrets_are_masked_in_all_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    recipe = """
inputs: {token: {type: secret, env: TOKEN}}
steps: {a: {run: "true", secrets: [token]}}
"""
    run = SimulatedRun(tmp_path, recipe, {"a": exits(1, "Error: hunter2-hunter2 is wrong\n")})
    (failure,) = run.run().failures
    assert "hunter2" not in str(failure) and "hunter2" not in Path(failure.log).read_text()
    start = next(event for event in run.steps if event.after == "RUNNING")
    assert start.data["secrets"] == ["TOKEN"]


# -- what is asked of a run


def test_a_cancelled_run_stops_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    async def cancel(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents[""].started)
        assert run.own.judge._ws.store.runs.request(run.run_id, "cancel")

    run = SimulatedRun(tmp_path, CHAIN, {"a": LONG}, then=cancel)
    report = run.run()
    assert report.state == "CANCELLED" and run.agents[""].stopped == ["a"]
    assert run.started == ["a"] and "cancelled: stopping 1 running step(s)" in run.heard.words


def test_a_paused_run_queues_what_it_stopped_and_a_pause_can_be_taken_back(tmp_path: Path) -> None:
    async def pause(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents[""].started)
        assert run.own.judge._ws.store.runs.request(run.run_id, "pause", {"keep_hosts": True})

    run = SimulatedRun(tmp_path, CHAIN, {"a": LONG}, then=pause)
    assert run.run().state == "PAUSED" and run.last_of("a").after == "QUEUED"
    assert run.pool is not None and run.pool.closed == [True]


def test_the_first_interrupt_finishes_what_runs(tmp_path: Path) -> None:
    async def interrupt(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents[""].started)
        run.own.stopper.interrupt()

    slow = runs_for(5, writes(a="1"))
    run = SimulatedRun(tmp_path, CHAIN, {"a": slow}, then=interrupt)
    report = run.run()
    assert report.state == "CANCELLED" and report.counts == {"DONE": 1, "CANCELLED": 1}
    assert run.heard.words[0] == (
        "finishing 1 running step(s); press Ctrl-C again to stop now (a starts over next time)"
    )


def test_the_second_interrupt_stops_and_the_third_leaves(tmp_path: Path) -> None:
    async def interrupt(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents[""].started)
        for _ in range(times):
            run.own.stopper.interrupt()

    times = 2
    run = SimulatedRun(tmp_path, CHAIN, {"a": LONG}, then=interrupt)
    assert run.run().state == "CANCELLED" and run.agents[""].stopped == ["a"]
    times = 3
    run = SimulatedRun(tmp_path, CHAIN, {"a": LONG}, then=interrupt)
    report = run.run()
    assert report.left and report.abandoned == ["a"] and report.state == "ACTIVE"
    assert run.pool is not None and run.pool.closed == [True]


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_that_is_asked_to_end_leaves_what_runs_to_the_next(
    tmp_path: Path, times: int
) -> None:
    handover = Handover()

    async def ask(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents[""].started)
        for _ in range(times):
            handover()

    run = SimulatedRun(tmp_path, CHAIN, {"a": LONG}, then=ask, handover=handover)
    report = run.run()
    assert report.left and report.abandoned == ["a"] and not run.agents[""].stopped
    assert "handing over: waiting up to 20 s for 1 running step(s)" in run.heard.words


def test_a_run_that_reaches_its_time_limit_has_failed(tmp_path: Path) -> None:
    recipe = "limits: {time: 60s}" + CHAIN
    run = SimulatedRun(tmp_path, recipe, {"a": LONG})
    report = run.run()
    assert report.state == "FAILED" and run.last_of("a").reason == "limit"
    assert (
        report.failures[0].reason == "stopped: the limit of the whole run is 60 s (`limits.time`)"
    )


def test_a_forced_step_runs_though_it_is_made(tmp_path: Path) -> None:
    programs = {"a": writes(a="1"), "b": writes(b="2")}
    SimulatedRun(tmp_path, CHAIN, programs).run()
    again = SimulatedRun(tmp_path, CHAIN, programs, choice=Choice(again=("a",)))
    assert again.run().state == "COMPLETED" and again.started == ["a"]


# -- the end of a run


@pytest.mark.parametrize(("code", "swept"), [(0, 1), (1, 0)])
def test_attempts_of_other_runs_are_swept_after_a_success_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, swept: int
) -> None:
    async def sweep(_self: Orphans) -> None:
        sweeps.append("")

    sweeps: list[str] = []
    monkeypatch.setattr(Orphans, "sweep", sweep)
    SimulatedRun(tmp_path, "steps: {a: {run: 'true'}}", {"a": exits(code)}).run()
    assert len(sweeps) == swept


@pytest.mark.parametrize(("seconds", "reached"), [(1.0, []), (10.0, [5.0])])
def test_the_limit_of_a_run_ends_with_it(seconds: float, reached: list[float]) -> None:
    limits: list[float] = []
    settings = Of(limits=Of(time=5.0))
    owners: Any = Of(steps=Of(plan=Of(settings=settings)), stopper=Of(time_is_up=limits.append))
    nobody: Any = None
    run = Loop(nobody, nobody, nobody, owners, None, handles_signals=False)

    async def work() -> None:
        with run._time_limit():
            await asyncio.sleep(seconds)
        await asyncio.sleep(10.0)

    with virtual() as loop:
        loop.run_until_complete(work())
    assert limits == reached


# -- timers


@pytest.mark.parametrize("answers", [True, False])
def test_each_beat_looks_after_all_that_changes_by_itself(answers: bool) -> None:
    def note(*names: str) -> Any:
        return Of(**{name: lambda *_words, name=name: calls.append(name) for name in names})

    def refuse() -> None:
        raise Infrastructure("the database does not answer")

    calls: list[str] = []
    stopper = note("hand_over", "poll_requests")
    if not answers:
        stopper.poll_requests = refuse
    owners: Any = Of(
        bell=note("wake"),
        stopper=stopper,
        chunks=note("tick"),
        numbers=Of(tick=lambda: {"a": "loss is nan"}),
        diverged=note("tell"),
        running={"a": None},
        silences=note("check"),
    )
    commits: Any = note("release_uploaded")
    nobody: Any = None
    Loop(
        nobody, commits, nobody, owners, lambda: calls.append("own"), handles_signals=False
    )._beat()
    stored = ["poll_requests", "release_uploaded", "tick", "tell", "check"] if answers else []
    assert calls == ["wake", "hand_over", *stored, "own"]


# -- hosts


def test_a_host_that_is_lost_is_not_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def clean_up(self: Hooks) -> list[str]:
        cleaned.append(self.place.name)
        return []

    async def switch_off(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents["h1"].started)
        run.agents["h1"].lost.set()

    cleaned: list[str] = []
    monkeypatch.setattr(Hooks, "cleanup", clean_up)
    programs = {"a": [runs_for(100, writes(a="1")), writes(a="1")], "b": writes(b="2")}
    run = SimulatedRun(tmp_path, CHAIN, programs, hosts=["h1"], spares=["h2"], then=switch_off)
    assert run.run().state == "COMPLETED"
    assert "h2" in cleaned and "h1" not in cleaned


def test_a_step_on_a_host_that_is_lost_runs_again_on_another(tmp_path: Path) -> None:
    async def switch_off(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents["h1"].started)
        run.agents["h1"].lost.set()

    programs = {"a": [runs_for(100, writes(a="1"))], "b": writes(b="2")}
    run = SimulatedRun(tmp_path, CHAIN, programs, hosts=["h1"], spares=["h2"], then=switch_off)
    report = run.run()
    assert report.state == "COMPLETED" and run.agents["h2"].started == ["a", "b"]
    assert "lost host h1: h1 is switched off" in run.heard.words
    assert "h2 replaces h1" in run.heard.words
    assert run.states_of("a").count("RUNNING") == 2
    assert run.last_of("a").after == "DONE"
    starts = [event.data["site"] for event in run.steps if event.after == "RUNNING"]
    assert starts == ["h1", "h2", "h2"]


def test_without_a_host_that_is_left_a_step_fails(tmp_path: Path) -> None:
    async def switch_off(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents["h1"].started)
        run.agents["h1"].lost.set()

    programs = {"a": [runs_for(100, writes(a="1"))]}
    run = SimulatedRun(tmp_path, CHAIN, programs, hosts=["h1"], then=switch_off)
    (failure,) = run.run().failures
    assert failure.is_unplaced and not failure.has_begun
    assert failure.reason == "no host is left for the step: h1: h1 is switched off"
