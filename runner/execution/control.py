"""Ctrl-C, SIGTERM and the run's own limits: what they do to what waits and to what runs."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Final

from drivers.base import DriverError

from ..hosts.hooks import INSTALL
from ..planning.schedule import LIMIT
from .attempts import Running
from .work import Work

GRACE: Final = timedelta(seconds=10)
"""Between the request to end and the kill."""


def interrupt(work: Work) -> None:
    """First: start nothing new.  Second: stop what runs.  Third: leave it running and go."""
    control = work.control
    control.interrupts += 1
    control.disturbed = True
    # The reader of a message may be gone: messages come last.
    if control.interrupts == 1:
        work.groups.record(work.scheduler.drain())
        for hooks in work.attempts.hooks:
            work.beside(hooks.stop(INSTALL))  # what would be started in it is not
        work.commits.say(f"finishing {len(work.running)} running step(s); press Ctrl-C again to stop them")
    elif control.interrupts == 2:
        terminate(work)
        work.commits.say("stopping; press Ctrl-C again to go without waiting for that")
    work.wake()


def terminate(work: Work) -> None:
    """Stop what runs, and start nothing new."""
    work.control.interrupts = max(work.control.interrupts, 2)
    work.groups.record(work.scheduler.cancel("interrupted"))
    _stop_all(work)


def time_is_up(work: Work, limit: float) -> None:
    """The run reached its `limits.time`, in seconds: what runs is stopped and has failed; its state is kept."""
    work.control.out_of_time = True
    work.groups.record(work.scheduler.drain(LIMIT))
    _stop_all(work)
    work.commits.say(f"the run reached its limit of {limit:g} s (`limits.time`): stopping")


async def stop(running: Running) -> None:
    """End what runs; an attempt that has not begun yet on its host never does."""
    running.stopped = True
    job = running.errand.job
    if job is None:
        if running.task is not None:
            running.task.cancel()
        return
    with contextlib.suppress(DriverError):  # the wait for its end finds that the host is gone, or cannot be reached
        await running.site.host.stop(job, GRACE)


def _stop_all(work: Work) -> None:
    work.control.stopping = work.control.disturbed = True
    for hooks in work.attempts.hooks:
        work.beside(hooks.stop())
    for running in work.running.values():
        work.beside(stop(running))
    work.wake()
