"""Ctrl-C, SIGTERM, the run's own limits and what is asked of it in the store: what they do to what waits and to what runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import timedelta
from typing import Final

from drivers.base import DriverError, Job, Unreachable

from ...errors import Busy
from ...hosts.link.control_file import asked
from ...hosts.place.hooks import INSTALL
from ...language.units import money_text
from ...planning.schedule import LIMIT
from ...storage import checkpoints
from .attempts import Running
from .work import Work

GRACE: Final = timedelta(seconds=10)
"""Between the request to end and the kill."""
SAVING: Final = timedelta(seconds=30)
"""The same for a step that may save where it is: of a run that is paused or cancelled."""
STEP: Final = timedelta(minutes=5)
"""So long a training that was asked to save has until the end of its step and of its checkpoint.  Then it gets SIGTERM."""
HANDOVER: Final = timedelta(seconds=20)
"""So long a worker that was asked to end waits for what runs, before it leaves that to the next worker."""
AGAIN: Final = 1.0
"""Seconds until a machine that cannot be reached is asked again whether what it was to end has ended."""
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
        work.commits.say(
            f"finishing {len(work.running)} running step(s); press Ctrl-C again to stop now{_kept(work)}"
        )
    elif control.interrupts == 2:
        terminate(work)
        work.commits.say("stopping; press Ctrl-C again to go without waiting for that")
    work.wake()


def _kept(work: Work) -> str:
    """Which checkpoint each running step would keep if it were stopped now; of one elsewhere it is not known what is there."""
    words = []
    for running in list(work.running.values())[:NAMED]:
        names = []
        for each in work.spec(running.node.id).state:
            folder = running.state.folder(each.name) if running.state is not None else None
            if folder is None or not folder.is_dir():
                continue
            if each.checkpoint is None:
                names += [each.name] if os.listdir(folder) else []
            elif (
                newest := checkpoints.newest(folder, each.checkpoint, thorough=False).name
            ) is not None:
                names.append(newest)
        nothing = (
            "keeps what it saved there"
            if running.place.elsewhere and work.spec(running.node.id).state
            else "starts over next time"
        )
        words.append(f"{running.node.id} " + (f"keeps {', '.join(names)}" if names else nothing))
    return f" ({'; '.join(words)})" if words else ""


def terminate(work: Work) -> None:
    """Stop what runs, and start nothing new."""
    work.control.interrupts = max(work.control.interrupts, 2)
    work.groups.record(work.scheduler.cancel("interrupted"))
    _stop_all(work)


def time_is_up(work: Work, limit: float) -> None:
    """The run reached its `limits.time`, in seconds."""
    _limited(work, GRACE, "take", f"{limit:g} s (`limits.time`)")


def money_is_spent(work: Work, limit: float) -> None:
    """What the run rents has just time left, within its `limits.cost`, to bring home what was made."""
    if not work.control.limit:
        _limited(work, SAVING, "cost", f"{money_text(limit)} (`limits.cost`)")


def _limited(work: Work, grace: timedelta, verb: str, most: str) -> None:
    """The run reached a limit: what runs is stopped and has failed; its state is kept."""
    work.control.limit = f"the whole run may {verb} {most}"
    work.groups.record(work.scheduler.drain(LIMIT))
    _stop_all(work, grace)
    work.commits.say(f"the run reached its limit of {most}: stopping")


def hand_over(work: Work) -> None:
    """Once asked: start nothing new, wait a while for what runs, and leave the rest to the next worker.  Asked again: leave it now."""
    control, asked = work.control, work.handover.asked if work.handover is not None else 0
    if asked and not control.handing_over:
        control.handing_over = control.disturbed = True
        work.scheduler.pause()
        asyncio.get_running_loop().call_later(HANDOVER.total_seconds(), _leave, work)
        work.commits.say(
            f"handing over: waiting up to {HANDOVER.total_seconds():.0f} s for {len(work.running)} running step(s)"
        )
        work.wake()
    if asked > 1:
        _leave(work)


def _leave(work: Work) -> None:
    work.control.left = True
    work.wake()


def heed(work: Work) -> None:
    """Look whether something was asked of the run, and begin to do it.  Costs one look whether there is news."""
    control, store = work.control, work.ws.store
    if work.commits.busy or (version := store.runs.news()) == control.looked:
        return
    try:
        request = store.runs.requested(work.commits.run, work.commits.fence)
    except Busy:  # the run is another worker's by now, and so is what runs
        return _leave(work)
    control.looked = version
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
        asked_for = [
            event for event in store.runs.events(work.commits.run) if event.subject == "request"
        ]
        control.keep_hosts = bool(asked_for and asked_for[-1].data.get("keep_hosts"))
        work.scheduler.pause()
        work.commits.say(f"pausing: stopping {len(work.running)} running step(s)")
        _stop_all(work, SAVING, may_save=True)
    elif before == "pause":
        if not control.handing_over:
            work.scheduler.resume()
        control.stopping = False
        work.commits.say("the pause was taken back")
    work.wake()


async def stop(running: Running, grace: timedelta = GRACE, *, may_save: bool = False) -> None:
    """End what runs; an attempt that has not begun yet on its host never does.

    `may_save`: a program that listens is asked to save at the end of the step that it is in, and has time for that.
    """
    running.stopped = True
    job = running.task.job
    if job is None:
        if running.carried is not None:
            running.carried.cancel()
        return
    with contextlib.suppress(
        DriverError
    ):  # the wait for its end finds that the host is gone, or cannot be reached
        cwd = running.place.paths(running.attempt).cwd
        if may_save and running.task.states and running.carried is not None:
            running.asked = True  # before the question: a quick trainer has saved and ended before the answer is here
            running.asked = await asked(running.place.host, cwd, "pause")
            if (
                running.asked
                and (await asyncio.wait({running.carried}, timeout=STEP.total_seconds()))[0]
            ):
                return
        await running.place.stop(job, grace)
        if running.place.is_rented:
            await _await_end(running, job, grace + GRACE)


async def _await_end(running: Running, job: Job, patience: timedelta) -> None:
    """Wait for the end of a job that was asked to end on a rented machine, and give it up where no word of that comes."""
    try:
        async with asyncio.timeout(patience.total_seconds()):
            while True:
                try:
                    if await running.place.wait(job, patience) is not None:
                        return
                except Unreachable:
                    await asyncio.sleep(AGAIN)
    except TimeoutError:
        _give_up(running)


def _give_up(running: Running) -> None:
    """Wait no longer for what runs on a rented machine that cannot be reached: it ends with its machine, which is given back."""
    if running.place.is_rented and running.carried is not None:
        running.place.lost = running.place.lost or "it could not be reached to end what runs there"
        running.carried.cancel()


def _stop_all(work: Work, grace: timedelta = GRACE, *, may_save: bool = False) -> None:
    work.control.stopping = work.control.disturbed = True
    for hooks in work.attempts.hooks:
        work.beside(hooks.stop())
    for running in work.running.values():
        work.beside(stop(running, grace, may_save=may_save))
    work.wake()
