"""What followers of a run share: one look for all of them, and a look of one's own where another would be too old."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runner.server import pulse as module
from runner.server.pulse import Pulse
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
