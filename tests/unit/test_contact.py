"""What is asked of a host is asked again where its connection broke, and only there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from drivers.base import Argv, DriverError, Rejected, Unreachable
from runner.hosts.link import contact


def asked(monkeypatch: pytest.MonkeyPatch, *faults: DriverError) -> tuple[bytes | DriverError, int]:
    """What `said` answers, or raises, of a program whose first calls break after half of its output; and how often it was called."""
    monkeypatch.setattr(contact, "pause", lambda *_: 0.0)
    left, calls = list(faults), list[Argv]()

    async def call(argv: Argv) -> AsyncIterator[bytes]:
        calls.append(argv)
        yield b"one "
        if left:
            raise left.pop(0)
        yield b"two"

    try:
        return asyncio.run(contact.ask_program(call, ("question",))), len(calls)
    except DriverError as error:
        return error, len(calls)


def test_a_question_whose_connection_breaks_is_asked_again_and_answered_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(monkeypatch, Unreachable("cut"), Unreachable("/bin/sh was ended by SIGKILL")) == (
        b"one two",
        3,
    )


def test_a_host_that_stays_out_of_reach_is_asked_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = Unreachable("gone")
    assert asked(monkeypatch, *[error] * 9) == (error, contact.SOON)


def test_a_question_that_failed_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    error = Rejected("it ended with 2")
    assert asked(monkeypatch, error) == (error, 1)
