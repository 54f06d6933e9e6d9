"""Ctrl-C, SIGTERM, limits and requests: what they do to the steps that wait and to those that run."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Final

from ...hosts.place.hooks import INSTALL
from ...language.units import money_text
from ...planning.schedule import LIMIT
from ...storage import checkpoints
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
"""So long a worker that was asked to end waits for what runs, before it leaves that to the next."""
NAMED: Final = 3
"""So many running steps are named in a message."""


class Handover:
    """That the process of a worker was asked to end, and how often.  A handler of signals."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *_: object) -> None:
        self.asked += 1


class Stopper:
    """Ends or pauses one run, when a signal, a request in the store or a limit asks for that."""

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
        self._interrupts = 0  # 1: start nothing new, 2: stop what runs, 3: leave it running and go
        self._request = ""  # which is being done: `cancel`, `pause`, `resume`
        self._seen = -1  # the version of the store at the last look for a request
        self._limit = ""
        self._keeps_hosts = False
        self._is_handing_over = False
        self._is_left = False
        self._is_stopping = False

    # -- what was asked

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal asked the run to end."""
        return self._interrupts > 0

    @property
    def limit(self) -> str:
        """Which of its `limits` the run reached, in words; empty for none."""
        return self._limit

    @property
    def is_stopping(self) -> bool:
        """Whether what runs is being stopped, and what is just being started has to be."""
        return self._is_stopping

    @property
    def is_abandoned(self) -> bool:
        """Whether everything is left as it is."""
        return self._interrupts > 2 or self._is_left

    @property
    def keeps_hosts(self) -> bool:
        """Whether the pause that was asked for keeps the machines, for the resume."""
        return self._keeps_hosts

    def leave_unfinished(self) -> None:
        """The loop ends: a worker that hands over leaves what is not finished to the next one."""
        if self._is_handing_over and self._request not in ("pause", "cancel"):
            self._is_left |= not self._schedule.is_finished

    # -- signals and limits

    def interrupt(self) -> None:
        """First: start nothing new.  Second: stop what runs.  Third: leave it running and go."""
        self._interrupts += 1
        self._schedule.disturb()
        # The reader of a message may be gone: messages come last.
        if self._interrupts == 1:
            self._schedule.drain()
            for hooks in self._hooks:  # what would be started in an environment is not
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
        """Stop what runs, and start nothing new."""
        self._interrupts = max(self._interrupts, 2)
        self._schedule.cancel("interrupted")
        self._stop_all()

    def time_is_up(self, limit: float) -> None:
        """The run reached its `limits.time`, in seconds."""
        self._reach_limit(GRACE, "take", f"{limit:g} s (`limits.time`)")

    def money_is_spent(self, limit: float) -> None:
        """The run's machines have just time left, within its `limits.cost`, to bring home results."""
        if not self._limit:
            self._reach_limit(SAVING, "cost", f"{money_text(limit)} (`limits.cost`)")

    def _reach_limit(self, grace: timedelta, verb: str, most: str) -> None:
        """What runs is stopped and has failed; its state is kept."""
        self._limit = f"the limit of the whole run is {most}"
        self._schedule.drain(LIMIT)
        self._stop_all(grace)
        self._commits.say(f"stopping: the run reached its limit of {most}")

    def _checkpoints_kept(self) -> str:
        """Which checkpoint each running step would keep if it were stopped now, in words."""
        words = [self._checkpoints_of(each) for each in list(self._running.values())[:NAMED]]
        return f" ({'; '.join(words)})" if words else ""

    def _checkpoints_of(self, attempt: Attempt) -> str:
        """The same for one step; of one elsewhere it is not known what is there."""
        states, names = self._steps.spec(attempt.id).state, list[str]()
        for each in states:
            folder = attempt.state.folder(each.name) if attempt.state is not None else None
            if folder is None or not folder.is_dir():
                continue
            if each.checkpoint is None:
                names += [each.name] if os.listdir(folder) else []
                continue
            newest = checkpoints.newest(folder, each.checkpoint, thorough=False).name
            if newest is not None:
                names.append(newest)
        if names:
            return f"{attempt.id} keeps {', '.join(names)}"
        if attempt.place.elsewhere and states:
            return f"{attempt.id} keeps its saved checkpoints on the host"
        return f"{attempt.id} starts over next time"

    # -- requests

    def hand_over(self) -> None:
        """Once asked: wait a while for what runs, and leave the rest to the next worker.

        Asked again: leave it now.
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
        """Look whether something was asked of the run, and begin to do it.

        Costs one look whether there is news. Raises Infrastructure where the database is silent.
        """
        runs = self._ws.store.runs
        if self._commits.busy or (version := runs.news()) == self._seen:
            return
        try:
            request = runs.take_request(self._commits.run, self._commits.fence)
        except Stale:  # the run is another worker's by now, and so is what runs
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
