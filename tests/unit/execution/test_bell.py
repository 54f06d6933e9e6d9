"""What wakes the loop, and what goes on beside it."""

from __future__ import annotations

import asyncio

from runner.execution.steps.bell import Bell
from tests.virtual import virtual


def test_a_wait_ends_when_the_bell_is_rung_and_not_before() -> None:
    async def both() -> list[bool]:
        bell = Bell()
        bell.wake()  # nobody waits: it is forgotten
        waiting = asyncio.ensure_future(bell.wait())
        await asyncio.sleep(1)
        before = waiting.done()
        bell.wake()
        bell.wake()  # once more does no harm
        await asyncio.sleep(0)
        return [before, waiting.done()]

    with virtual() as loop:
        assert loop.run_until_complete(both()) == [False, True]


def test_what_goes_on_beside_the_loop_is_waited_for_or_cancelled() -> None:
    async def background() -> list[str]:
        done: list[str] = []
        bell = Bell()

        async def work(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            done.append(name)

        await bell.settle(1)
        bell.run_in_background(work("short", 1))
        bell.run_in_background(work("long", 100))
        await bell.settle(10)
        bell.cancel_background()
        await asyncio.sleep(200)
        return done

    with virtual() as loop:
        assert loop.run_until_complete(background()) == ["short"]


def test_nothing_is_begun_once_the_event_loop_is_over() -> None:
    async def never() -> None:
        raise AssertionError

    Bell().run_in_background(never())
