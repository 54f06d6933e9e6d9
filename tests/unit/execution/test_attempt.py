"""An attempt: where its files are, how it is stopped, what it leaves."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit, Job, Unreachable
from runner.execution.steps import attempt as attempts
from runner.execution.steps.attempt import Attempt
from runner.hosts.link import control_file
from runner.planning.step import StateSpec, StepSpec
from tests.virtual import virtual


class Host:
    """A host on which one job runs until it is stopped."""

    name = "h1"
    lost = ""

    def __init__(self, *, rented: bool = False, answers: object = None) -> None:
        self.is_rented, self.answers, self.stopped = rented, answers, list[timedelta]()
        self.host = None

    def paths(self, _directory: object) -> Any:
        return Of(cwd="/nowhere")

    async def stop(self, _job: Job, grace: timedelta) -> None:
        self.stopped.append(grace)

    async def wait(self, _job: Job, patience: timedelta) -> Exit | None:
        if isinstance(self.answers, Exception):
            raise self.answers
        await asyncio.sleep(0 if self.answers else patience.total_seconds() + 1)
        return Exit(0) if self.answers else None


def attempt_of(place: Any, *, job: Job | None = None, states: object = ()) -> Attempt:
    spec: Any = StepSpec("", "s", {})
    node: Any = Of(id="a")
    made = Attempt(0, node, spec, None, {}, place)
    made.directory = Of(path="/x/name")  # type: ignore[assignment]
    made.task = Of(job=job, states=states, parts=())  # type: ignore[assignment]
    return made


def test_the_files_of_an_attempt_are_named_after_its_directory() -> None:
    made = attempt_of(Host())
    assert (made.log, made.logs, made.last_log) == ("/x/name.log", ["/x/name.log"], "/x/name.log")
    assert made.metrics_file == "/x/name.metrics" and made.id == "a"
    parts = [Of(attempt=Of(path=f"/x/name.{rank}")) for rank in (0, 1)]
    made.task.parts = parts  # type: ignore[assignment]
    assert made.logs == ["/x/name.0.log", "/x/name.1.log"]
    made.result = Of(node=1)  # type: ignore[assignment]
    assert made.last_log == "/x/name.1.log"


def test_an_attempt_that_has_not_begun_on_its_host_never_does() -> None:
    async def stop() -> None:
        made = attempt_of(host)
        made.execution = asyncio.ensure_future(asyncio.sleep(100))
        await made.stop()
        await asyncio.wait({made.execution})
        assert made.execution.cancelled() and made.stop_asked

    host = Host()
    with virtual() as loop:
        loop.run_until_complete(stop())
    assert not host.stopped


@pytest.mark.parametrize(
    ("listens", "seconds", "stopped"), [(True, 5, 0), (True, 1000, 1), (False, 5, 1)]
)
def test_a_program_that_listens_is_asked_to_save_before_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, listens: bool, seconds: float, stopped: int
) -> None:
    async def asked(_host: object, cwd: str, what: str) -> bool:
        questions.append((cwd, what))
        return listens

    async def stop() -> None:
        made = attempt_of(host, job=Job("k"), states=["s"])
        made.execution = asyncio.ensure_future(asyncio.sleep(seconds))
        await made.stop(attempts.SAVING, may_save=True)
        assert made.save_asked is listens
        made.execution.cancel()

    questions: list[tuple[str, str]] = []
    monkeypatch.setattr(control_file, "ask_trainer", asked)
    host = Host()
    with virtual() as loop:
        loop.run_until_complete(stop())
    assert questions == [("/nowhere", "pause")] and len(host.stopped) == stopped


@pytest.mark.parametrize(
    ("answers", "lost"), [(True, False), (None, True), (Unreachable("no route"), True)]
)
def test_a_job_on_a_rented_machine_is_given_up_when_no_word_of_its_end_comes(
    answers: object, lost: bool
) -> None:
    async def stop() -> None:
        made = attempt_of(host, job=Job("k"))
        made.execution = asyncio.ensure_future(asyncio.sleep(1000))
        await made.stop()
        await asyncio.sleep(0)
        assert bool(host.lost) is lost and bool(made.execution.cancelling()) is lost
        made.execution.cancel()

    host = Host(rented=True, answers=answers)
    with virtual() as loop:
        loop.run_until_complete(stop())
    assert host.stopped == [attempts.GRACE]


@pytest.mark.parametrize(
    ("rented", "before", "after"),
    [
        (False, "", ""),
        (True, "", "cannot reach the host to stop its job"),
        (True, "switched off", "switched off"),
    ],
)
def test_only_a_rented_machine_is_lost_for_a_job_without_an_end_and_keeps_its_reason(
    rented: bool, before: str, after: str
) -> None:
    async def stop() -> None:
        made = attempt_of(host, job=Job("k"))
        made.execution = asyncio.ensure_future(asyncio.sleep(1000))
        await made.stop()
        made.execution.cancel()

    host = Host(rented=rented)
    host.lost = before
    with virtual() as loop:
        loop.run_until_complete(stop())
    assert host.lost == after


def test_a_checkpoint_counts_as_new_if_it_is_not_the_one_resumed_from(tmp_path: Path) -> None:
    made = attempt_of(Host())
    assert not made.left_checkpoint()
    state = StateSpec("ckpt", "ckpt", "step-*", None, 0, False)
    made.spec = made.spec._replace(state=(state,))
    made.state = Of(folder=lambda _name: tmp_path)  # type: ignore[assignment]
    made.task.restored = {}
    assert not made.left_checkpoint()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "weights").write_text("w")
    assert made.left_checkpoint()
    made.resumed_from = {"ckpt": Of(name="step-1")}  # type: ignore[dict-item]
    assert not made.left_checkpoint()


def test_the_attempt_of_an_earlier_worker_has_its_name_and_host_and_holds_the_same() -> None:
    made = attempt_of(Host())
    made.devices, made.lock = ("gpu",), Of(release=lambda: released.append(1))  # type: ignore[assignment]
    released: list[int] = []
    other: Any = Host()
    found = made.begun_by_earlier_worker("older", other)
    assert (found.name, found.place, found.devices) == ("older", other, ())
    assert found.is_reattached and not made.is_reattached and found.lock is made.lock
    found.release_lock()
    assert released == [1]
    attempt_of(Host()).release_lock()
