"""Signals, limits and stored requests that stop or pause a run."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Final

from ...hosts.place.hooks import INSTALL
from ...language.units import money_text
from ...planning.schedule import LIMIT
from ...planning.step import StateSpec
from ...storage.records.runs import Stale
from ...storage.workspace import Workspace
from .attempt import GRACE, SAVING, Attempt
from .bell import Bell
from .commit import GroupCommit
from .host_hooks import HostHooks
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts

HANDOVER: Final = timedelta(seconds=20)
"""Timeout for running steps to finish before a stopping worker leaves them to the next worker."""
NAMED: Final = 3
"""Maximum number of running steps named in a message."""


class Handover:
    """Signal handler that counts the stop signals to a worker process."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *_: object) -> None:
        self.asked += 1


class Stopper:
    """Handler that stops or pauses a run after a signal, a stored request or a limit."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        running: RunningAttempts,
        hooks: HostHooks,
        bell: Bell,
        handover: Handover | None,
    ) -> None:
        self._ws, self._steps, self._schedule, self._commits = ws, steps, schedule, commits
        self._running, self._hooks, self._bell, self._handover = running, hooks, bell, handover
        self._interrupts = 0  # 1: start no steps, 2: stop running steps, 3: exit and leave them
        self._request = ""  # the request in progress: `cancel`, `pause` or `resume`
        self._seen = -1  # version of the store at the last check
        self._limit = ""
        self._keeps_hosts = False
        self._is_handing_over = False
        self._is_left = False
        self._is_stopping = False

    # -- state

    @property
    def is_interrupted(self) -> bool:
        """Return True if a signal asked the run to stop."""
        return self._interrupts > 0

    @property
    def limit(self) -> str:
        """Description of the reached limit; empty if none was reached."""
        return self._limit

    @property
    def is_stopping(self) -> bool:
        """Return True if running steps are being stopped.

        A step that is just starting must then stop, too.
        """
        return self._is_stopping

    @property
    def is_abandoned(self) -> bool:
        """Return True if the run exits without stopping its running steps."""
        return self._interrupts > 2 or self._is_left

    @property
    def keeps_hosts(self) -> bool:
        """Return True if the requested pause keeps the rented machines for the resume."""
        return self._keeps_hosts

    def leave_unfinished(self) -> None:
        """Leave unfinished steps to the next worker if this worker is handing over its run."""
        if self._is_handing_over and self._request not in ("pause", "cancel"):
            self._is_left |= not self._schedule.is_finished

    # -- signals and limits

    def interrupt(self) -> None:
        """Handle Ctrl-C: stop starting steps, then stop running steps, then exit at once.

        The third Ctrl-C leaves the steps running.
        """
        self._interrupts += 1
        self._schedule.disturb()
        # Messages come last, because their reader may be gone.
        if self._interrupts == 1:
            self._schedule.drain()
            for hooks in self._hooks:  # stop installs, whose steps do not start
                self._bell.run_in_background(hooks.stop(INSTALL))
            self._commits.say(
                f"finishing {len(self._running)} running step(s); press Ctrl-C again to stop now"
                f"{self._checkpoints_kept()}"
            )
        elif self._interrupts == 2:
            self.terminate()
            self._commits.say("stopping; press Ctrl-C again to quit immediately")
        self._bell.wake()

    def terminate(self) -> None:
        """Stop the running steps and start no more."""
        self._interrupts = max(self._interrupts, 2)
        self._schedule.cancel("interrupted")
        self._stop_all()

    def time_is_up(self, limit: float) -> None:
        """Stop the run because it reached its `limits.time`.

        `limit` is in seconds.
        """
        self._reach_limit(GRACE, "take", f"{limit:g} s (`limits.time`)")

    def money_is_spent(self, limit: float) -> None:
        """Stop the run near its `limits.cost`, with time left to download its results."""
        if not self._limit:
            self._reach_limit(SAVING, "cost", f"{money_text(limit)} (`limits.cost`)")

    def _reach_limit(self, grace: timedelta, verb: str, most: str) -> None:
        """Stop the running steps, which then fail; their checkpoints are kept."""
        self._limit = f"the limit of the whole run is {most}"
        self._schedule.drain(LIMIT)
        self._stop_all(grace)
        self._commits.say(f"stopping: the run reached its limit of {most}")

    def _checkpoints_kept(self) -> str:
        """Describe the checkpoints that running steps would keep if stopped now."""
        words = [self._checkpoints_of(each) for each in list(self._running.values())[:NAMED]]
        return f" ({'; '.join(words)})" if words else ""

    def _checkpoints_of(self, attempt: Attempt) -> str:
        """Describe the checkpoints of one running step.

        Those on another host are unknown.
        """
        states = self._steps.spec(attempt.id).state
        names = [name for each in states for name in _checkpoint_names(attempt, each)]
        if names:
            return f"{attempt.id} keeps {', '.join(names)}"
        if attempt.place.elsewhere and states:
            return f"{attempt.id} keeps its saved checkpoints on the host"
        return f"{attempt.id} starts over next time"

    # -- requests

    def hand_over(self) -> None:
        """Hand the run over to the next worker if this worker's process was asked to stop.

        After the first request, running steps have `HANDOVER` to finish; after the second, the run
        is left immediately.
        """
        times = self._handover.asked if self._handover is not None else 0
        if times and not self._is_handing_over:
            self._is_handing_over = True
            self._schedule.disturb()
            self._schedule.pause()
            asyncio.get_running_loop().call_later(HANDOVER.total_seconds(), self._leave)
            self._commits.say(
                f"handing over: waiting up to {HANDOVER.total_seconds():.0f} s for "
                f"{len(self._running)} running step(s)"
            )
            self._bell.wake()
        if times > 1:
            self._leave()

    def _leave(self) -> None:
        self._is_left = True
        self._bell.wake()

    def poll_requests(self) -> None:
        """Check for a new stored pause or cancel request, and start handling it.

        Without changes in the store, this is one cheap query. Raises Infrastructure if the
        database does not answer.
        """
        runs = self._ws.store.runs
        if self._commits.busy or (version := runs.news()) == self._seen:
            return
        try:
            request = runs.take_request(self._commits.run, self._commits.fence)
        except Stale:  # another worker now owns the run and its jobs
            return self._leave()
        self._seen = version
        if request == self._request or self._request == "cancel":
            return
        before, self._request = self._request, request
        self._schedule.disturb()
        self._commits.answers = request
        if request == "cancel":
            self._cancel()
        elif request == "pause":
            self._pause()
        elif before == "pause":
            self._take_pause_back()
        self._bell.wake()

    def _cancel(self) -> None:
        self._schedule.cancel("cancelled")
        self._commits.say(f"cancelled: stopping {len(self._running)} running step(s)")
        self._stop_all(SAVING)

    def _pause(self) -> None:
        events = self._ws.store.runs.events(self._commits.run)
        requests = [event for event in events if event.subject == "request"]
        self._keeps_hosts = bool(requests and requests[-1].data.get("keep_hosts"))
        self._schedule.pause()
        self._commits.say(f"pausing: stopping {len(self._running)} running step(s)")
        self._stop_all(SAVING, may_save=True)

    def _take_pause_back(self) -> None:
        if not self._is_handing_over:
            self._schedule.resume()
        self._is_stopping = False
        self._commits.say("the pause was cancelled")

    def _stop_all(self, grace: timedelta = GRACE, *, may_save: bool = False) -> None:
        self._is_stopping = True
        self._schedule.disturb()
        for hooks in self._hooks:
            self._bell.run_in_background(hooks.stop())
        for attempt in self._running.values():
            self._bell.run_in_background(attempt.stop(grace, may_save=may_save))
        self._bell.wake()


def _checkpoint_names(attempt: Attempt, state: StateSpec) -> list[str]:
    """Return the newest checkpoint in a local checkpoint directory, as a list.

    A state without a checkpoint pattern has its own name.
    """
    from ...storage import checkpoints

    folder = attempt.state.folder(state.name) if attempt.state is not None else None
    if folder is None or not folder.is_dir():
        return []
    if state.checkpoint is None:
        return [state.name] if os.listdir(folder) else []
    newest = checkpoints.newest(folder, state.checkpoint, thorough=False).name
    return [newest] if newest is not None else []
