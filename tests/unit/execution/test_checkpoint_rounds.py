"""When checkpoints go to the shared store: as often as `every` says, however often a trainer saves."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.execution.steps import checkpoint_sender
from runner.hosts.place.checkpoint_sync import EVERY, SETTLE, round_period
from runner.language import units
from runner.planning.step import StateSpec
from runner.storage.checkpoints import is_due


class Sender(checkpoint_sender.CheckpointSender):
    """One whose store is a list."""

    def __init__(self, folder: Path, state: StateSpec) -> None:
        self._states, self._sent, self.put = [state], {}, []
        self._generation = cast("Any", SimpleNamespace(folder=lambda name: folder / name))

    async def _put(self, found: Any) -> None:
        self._sent = found
        self.put.append(found["ckpt"][0])


def save(folder: Path, number: int) -> None:
    new = folder / "ckpt" / f".new-{number}"
    new.mkdir(parents=True)
    (new / "value").write_text(str(number))
    new.rename(folder / "ckpt" / f"step-{number}")


@pytest.mark.parametrize(("every", "steps", "sent"), [(3.0, None, 6), (None, 2, 3)])
def test_a_trainer_that_saves_between_two_looks_keeps_no_checkpoint_from_the_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: float | None,
    steps: int | None,
    sent: int,
) -> None:
    sender = Sender(tmp_path, StateSpec("ckpt", "ckpt", "step-*", every, None, True, steps))
    saved: list[int] = []

    async def pause(_seconds: float) -> None:
        if len(saved) == 12:
            raise asyncio.CancelledError
        saved.append(len(saved))
        save(tmp_path, saved[-1])

    monkeypatch.setattr(checkpoint_sender.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sender.run())
    assert len(sender.put) >= sent, sender.put
    if steps:
        numbers = [int(name[5:]) for name in sender.put]
        assert all(b - a >= steps for a, b in itertools.pairwise(numbers)), numbers


def test_one_that_is_still_written_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(tmp_path, StateSpec("ckpt", "ckpt", "step-*", 1.0, None, True))
    save(tmp_path, 1)
    pauses = 0

    async def pause(_seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses < 4:
            (tmp_path / "ckpt/step-1/value").write_text("x" * pauses)
            assert sender.put == []

    monkeypatch.setattr(checkpoint_sender.asyncio, "sleep", pause)
    asyncio.run(sender._send_new(1.0))
    assert sender.put == ["step-1"]


def test_steps_are_counted_by_the_numbers_in_names() -> None:
    assert units.interval("500 steps") == (None, 500)
    assert units.interval("5m") == (300.0, None)
    with pytest.raises(ValueError, match="is not a duration"):
        units.interval("5 stepz")
    assert is_due("checkpoint-1000", ["checkpoint-500"], 500)
    assert not is_due("checkpoint-900", ["checkpoint-500"], 500)
    assert is_due("checkpoint-900", [], 500) and is_due("last", ["last"], 500)
    assert (round_period(None, None), round_period(7.0, None), round_period(None, 500)) == (
        EVERY,
        7.0,
        SETTLE,
    )
