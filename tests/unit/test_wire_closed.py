"""A wire that is closed leaves no stream, whatever was on its way just then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

import psutil  # type: ignore[import-untyped]
import pytest

from drivers import calls
from drivers.base import NOTHING, Argv, Unreachable
from runner.agent.frames import frame
from runner.hosts.link.wire import Wire
from tests.support import until


class Greeting:
    """A host whose agent greets, after `steps` of the loop, and says nothing more."""

    root, python = "/there", ""
    deadman: float | None = None

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.calls: list[AsyncGenerator[bytes, None]] = []

    def call(
        self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
    ) -> AsyncGenerator[bytes, None]:
        self.calls.append(self._answer(argv[5]))
        return self.calls[-1]

    async def _answer(self, mark: str) -> AsyncGenerator[bytes, None]:
        for _ in range(self._steps * len(self.calls)):
            await asyncio.sleep(0)
        yield f"\n{mark} here\n".encode() + frame(b"r", self.root.encode())

    async def aclose(self) -> None:
        """There is no connection."""


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("begins", ["open", "ask"])
def test_no_stream_outlives_its_wire_at_whatever_moment_that_is_closed(
    steps: int, begins: str
) -> None:
    async def closed_after(moment: int) -> list[bool]:
        host = Greeting(steps)
        wire = Wire(host, host.root)
        asking = asyncio.create_task(wire.open() if begins == "open" else wire.ask("any", read=str))
        for _ in range(moment):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, wire.aclose(), return_exceptions=True)
        with pytest.raises(Unreachable, match="closed from here"):
            await wire.ask_once("any", read=str)
        return [getattr(call, "ag_frame", None) is None for call in host.calls]

    for moment in range(40):
        assert all(asyncio.run(closed_after(moment))), (
            f"one is there that nobody holds, after {moment} steps"
        )


def test_all_that_wait_for_a_stream_are_answered_when_their_wire_is_closed() -> None:
    async def closed() -> list[str | BaseException]:
        wire = Wire(Greeting(1_000_000), "/there")
        asking = [asyncio.create_task(wire.ask_once("any", read=str)) for _ in range(20)]
        await asyncio.sleep(0)
        await wire.aclose()
        async with asyncio.timeout(20):
            return await asyncio.gather(*asking, return_exceptions=True)

    assert all(isinstance(each, Unreachable) for each in asyncio.run(closed()))


async def _silent() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def test_a_program_that_is_given_up_at_any_moment_of_its_beginning_is_ended() -> None:
    async def given_up(moment: int) -> None:
        others = {each.pid for each in psutil.Process().children(recursive=True)}  # of other tests

        def ours() -> list[psutil.Process]:
            return [
                each for each in psutil.Process().children(recursive=True) if each.pid not in others
            ]

        call = calls.call(("sh", "-c", "sleep 1000 <&0 & wait"), _silent(), {"PATH": os.defpath})
        reading = asyncio.create_task(anext(call))
        for _ in range(moment):
            await asyncio.sleep(0)
        until(
            lambda: len(ours()) != 1
        )  # nothing, or the program and its child; the loop stands still
        begun = ours()
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=10)
        assert done
        until(
            lambda: (
                not any(
                    each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in begun
                )
            ),
            seconds=10,
        )

    for moment in range(1, 10):
        asyncio.run(given_up(moment))
