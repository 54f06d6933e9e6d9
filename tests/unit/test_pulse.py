"""What followers of a run share: one look for all of them, and a look of one's own where another would be too old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.server import pulse as module
from runner.server.answers import Refused
from runner.server.pulse import CountedStream, Pulse
from runner.server.room import Room
from runner.server.tokens import Tokens
from runner.storage.locks import Locks
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace


def test_a_look_that_is_asked_for_now_knows_what_a_shared_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After reading that a run is over, a client asks for a log of it, and must not be answered that its step has not begun."""
    monkeypatch.setattr(module, "LOOK", 3600.0)
    with Workspace.open(tmp_path) as ws:
        runs = ws.store.runs
        runs.submit(RunRow("r", "t@1", "p", {}, str(ws.root)))
        room = Room(tmp_path, {}, Tokens(tmp_path / "server", Locks(tmp_path)))

        async def looks() -> list[bool]:
            pulse = Pulse(room)
            found = [(await pulse.beat("r")).over]
            fence = runs.claim("r", "w")
            assert fence is not None
            runs.group("r", fence, run_state=("COMPLETED", ""))
            return [*found, (await pulse.beat("r")).over, (await pulse.now("r")).over]

        assert asyncio.run(looks()) == [False, False, True]
        room.close()


def test_streams_are_counted_also_of_many_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAMS", 3)
    room = Room(tmp_path, {}, Tokens(tmp_path / "server", Locks(tmp_path)))
    token, _ = room.tokens.make("read", "test")
    started: list[str] = []
    full = asyncio.Event()

    async def follow(pulse: Pulse, over: asyncio.Event) -> None:
        async def lines() -> AsyncIterator[bytes]:
            await over.wait()
            yield b"over\n"

        async def receive() -> dict[str, Any]:
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                started.append("")
            if len(started) == 3:
                full.set()

        stream = CountedStream(pulse, token, lines(), "text/plain", {})
        await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    async def sixty() -> list[object]:
        pulse, over = Pulse(room), asyncio.Event()
        tasks = [asyncio.create_task(follow(pulse, over)) for _ in range(60)]
        await full.wait()
        over.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert pulse.streams == 0, "a stream that is closed does not count any more"
        return list(found)

    refused = [each for each in asyncio.run(sixty()) if isinstance(each, Refused)]
    assert len(refused) == 57 and len(started) == 3
    room.close()
