"""This machine's own driver, and the end of jobs that a run without a worker left here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from drivers import load
from drivers.base import Driver, Job, Offer, Order, Waking

from ..errors import Infrastructure

LATE = timedelta(seconds=10)
"""After the kill: until a job that does not end is given up."""


def driver(home: Path) -> Driver:
    """The driver of this machine, for the workspace whose store is at `home`."""
    made: Driver = load("local")(home / "local")
    return made


def woken(home: Path) -> Driver:
    """The same, whose agent begins to start: that takes as long as the caller's other preparations."""
    made = driver(home)
    if isinstance(made, Waking):
        made.wake()
    return made


async def end(home: Path, run: str, names: Sequence[str], grace: timedelta) -> None:
    """Stop these jobs of a run: each has `grace` to save where it is.  Raises Infrastructure where one does not end."""
    machine = driver(home)
    lease = await machine.acquire(Order(Offer("local", "local"), run, datetime.max))
    for host in await machine.hosts(lease) or ():
        jobs = [Job(name) for name in names]
        for job in jobs:
            await host.stop(job, grace)
        for job in jobs:
            if await host.wait(job, grace + LATE) is None:
                raise Infrastructure(
                    f"{job.key} does not end, although it was killed", fix="a process that waits for a disk ends when that answers: try again"
                )
        await host.aclose()
    await machine.release(lease)
