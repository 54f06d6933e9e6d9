"""Ctrl-C, SIGTERM, the run's own limits and what is asked of it in the store: what they do to what waits and to what runs."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Final

from drivers.base import DriverError

from ..errors import Busy
from ..hosts.hooks import INSTALL
from ..planning.schedule import LIMIT
from ..storage import checkpoints
from .attempts import Running
from .work import Work

GRACE: Final = timedelta(seconds=10)
"""Between the request to end and the kill."""
SAVING: Final = timedelta(seconds=30)
"""The same for a step that is to save where it is: of a run that is paused or cancelled."""
NAMED: Final = 3
"""So many running steps are named in a message."""


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
        work.commits.say(f"finishing {len(work.running)} running step(s); press Ctrl-C again to stop now{_kept(work)}")
    elif control.interrupts == 2:
        terminate(work)
        work.commits.say("stopping; press Ctrl-C again to go without waiting for that")
    work.wake()


def _kept(work: Work) -> str:
    """Which checkpoint each running step would keep if it were stopped now."""
    words = []
    for running in list(work.running.values())[:NAMED]:
        names = []
        if running.state is not None:
            newest = (
                checkpoints.newest(running.state.folder(each.name), each.checkpoint, thorough=False) for each in work.spec(running.node.id).state
            )
            names = [each.name for each in newest if each.name is not None]
        words.append(f"{running.node.id} " + (f"keeps {', '.join(names)}" if names else "starts over next time"))
    return f" ({'; '.join(words)})" if words else ""


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


def heed(work: Work) -> None:
    """Look whether something was asked of the run, and begin to do it.  Costs one read of the file's change counter."""
    control, store = work.control, work.ws.store
    if work.commits.busy or (version := store.database.version()) == control.looked:
        return
    control.looked = version
    try:
        request = store.runs.requested(work.commits.run, work.commits.fence)
    except Busy:
        return  # the run is another worker's by now: the next group says so
    if request == control.request or control.request == "cancel":
        return
    before, control.request = control.request, request
    control.disturbed = True
    work.commits.answers = request
    if request == "cancel":
        work.groups.record(work.scheduler.cancel("cancelled"))
        work.commits.say(f"cancelled: stopping {len(work.running)} running step(s)")
        _stop_all(work, SAVING)
    elif request == "pause":
        work.scheduler.pause()
        work.commits.say(f"pausing: stopping {len(work.running)} running step(s)")
        _stop_all(work, SAVING)
    elif before == "pause":
        work.scheduler.resume()
        control.stopping = False
        work.commits.say("the pause was taken back")
    work.wake()


async def stop(running: Running, grace: timedelta = GRACE) -> None:
    """End what runs; an attempt that has not begun yet on its host never does."""
    running.stopped = True
    job = running.errand.job
    if job is None:
        if running.task is not None:
            running.task.cancel()
        return
    with contextlib.suppress(DriverError):  # the wait for its end finds that the host is gone, or cannot be reached
        await running.site.stop(job, grace)


def _stop_all(work: Work, grace: timedelta = GRACE) -> None:
    work.control.stopping = work.control.disturbed = True
    for hooks in work.attempts.hooks:
        work.beside(hooks.stop())
    for running in work.running.values():
        work.beside(stop(running, grace))
    work.wake()
