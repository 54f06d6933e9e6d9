"""A driver that connects while a run is prepared: on the loop that the run goes on with, or let go of."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest

from drivers.base import Driver, Traits
from runner.hosts.ahead import connect_ahead


class Slow(Driver):
    """A driver that has connected once it is let."""

    traits = Traits()

    def __init__(self, interrupts: bool = False) -> None:
        self.interrupts = interrupts
        self.began, self.awaited, self.closed = threading.Event(), threading.Event(), False
        self.let: Callable[[], object] = bool
        self.loop: asyncio.AbstractEventLoop | None = None

    async def connect(self) -> None:
        let, loop = asyncio.Event(), asyncio.get_running_loop()
        self.let = lambda: loop.call_soon_threadsafe(let.set)
        self.began.set()
        if self.interrupts:
            await asyncio.to_thread(self.awaited.wait)
            os.kill(os.getpid(), signal.SIGINT)
        await let.wait()
        self.loop = asyncio.get_running_loop()

    async def aclose(self) -> None:
        self.closed = True


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_a_run_goes_on_with_the_loop_on_which_its_driver_has_connected_meanwhile() -> None:
    driver = Slow()
    with connect_ahead(driver) as asked:
        assert driver.began.wait(60)
        driver.let()
        with asyncio.Runner(loop_factory=asked.wait_for_loop) as runner:
            assert runner.run(_loop()) is driver.loop
    assert not driver.closed


def test_a_run_that_is_refused_lets_go_of_a_driver_that_still_connects() -> None:
    driver = Slow()
    with pytest.raises(KeyboardInterrupt), connect_ahead(driver):
        assert driver.began.wait(60)
        raise KeyboardInterrupt
    assert driver.loop is None and driver.closed


def test_ctrl_c_while_it_connects_ends_the_wait() -> None:
    driver = Slow(interrupts=True)
    with pytest.raises(KeyboardInterrupt), connect_ahead(driver) as asked:
        driver.awaited.set()
        asked.wait_for_loop()
    assert driver.loop is None and driver.closed
