"""Requests that take longer than their client waits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from runner.api.outcomes import Outcome
from runner.errors import Infrastructure
from runner.server import asking as module
from runner.server.asking import BackgroundRequests
from runner.server.room import Room
from runner.server.tokens import Tokens
from runner.storage.locks import Locks
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace


def test_a_request_that_takes_long_is_answered_first_and_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path, {}, Tokens(tmp_path / "server", Locks(tmp_path)))
    with Workspace.open(tmp_path) as ws:
        ws.store.runs.submit(RunRow("r", "t@1", "p", {}, str(ws.root)))
    go, times = threading.Event(), 0

    def slow(_: Workspace, run: str) -> Outcome:
        nonlocal times
        times += 1
        assert go.wait(10)
        return Outcome(run, "CANCELLED", True)

    async def ask() -> list[Outcome]:
        asking = BackgroundRequests()
        monkeypatch.setattr(module, "WAIT", 0.01)
        early = [await asking.ask(room, "r", "cancel", slow) for _ in range(2)]
        monkeypatch.setattr(module, "WAIT", 10.0)
        go.set()
        return [*early, await asking.ask(room, "r", "cancel", slow)]

    first, second, last = asyncio.run(ask())
    assert first == second == Outcome("r", "QUEUED", False, [module.GOES_ON])
    assert last == Outcome("r", "CANCELLED", True) and times == 1
    room.close()


def test_what_a_request_raises_is_its_answer_and_later_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(tmp_path, {}, Tokens(tmp_path / "server", Locks(tmp_path)))
    with Workspace.open(tmp_path) as ws:
        ws.store.runs.submit(RunRow("r", "t@1", "p", {}, str(ws.root)))
    go = threading.Event()

    def fails(_: Workspace, run: str) -> Outcome:
        assert go.wait(10)
        raise Infrastructure(f"a job of {run} does not end")

    async def ask() -> None:
        asking = BackgroundRequests()
        monkeypatch.setattr(module, "WAIT", 0.01)
        assert not (await asking.ask(room, "r", "cancel", fails)).done
        monkeypatch.setattr(module, "WAIT", 10.0)
        go.set()
        with pytest.raises(Infrastructure, match="does not end"):
            await asking.ask(room, "r", "cancel", fails)

    asyncio.run(ask())
    assert "cancel of run r" in caplog.text and "does not end" in caplog.text
    room.close()
