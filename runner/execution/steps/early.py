"""`--stop-early`: look at what the instances of a step report while they run, and stop those that fall behind.  Their states are kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ...errors import Invalid
from ...planning.halving import Goal, Stream, behind, stream
from ...planning.ids import bare, readable
from ...planning.schedule import State
from ...storage import metrics
from ...storage.workspace import Workspace
from ...survey import stopped
from ...survey.results import read_attempt_points
from .attempt import SAVING, Attempt
from .bell import Bell
from .commit import GroupCommit
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts

EVERY: Final = 0.5
"""Seconds between two looks."""
SHARE: Final = 20.0
"""Times that a look may take before the next: long streams are read less often."""


class EarlyStops:
    """Compares the instances of a step in one run, where `--stop-early` names a goal."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        running: RunningAttempts,
        bell: Bell,
        goal: Goal | None,
    ) -> None:
        self._ws, self._steps, self._schedule, self._commits = ws, steps, schedule, commits
        self._running, self._bell, self._goal = running, bell, goal
        self._reasons: dict[str, str] = {}

    def reason_for(self, id: str) -> str:
        """Why a step is being stopped early, in words; empty: it is not."""
        return self._reasons.get(id, "")

    def forget(self, id: str) -> None:
        """The attempt that was stopped is over."""
        self._reasons.pop(id, None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Stop what falls behind, where the caller asked for that."""
        if self._goal is None:
            yield
            return
        task = asyncio.get_running_loop().create_task(self._watch(self._goal))
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self, goal: Goal) -> None:
        known = stopped.metric_streams(self._ws, self._steps.survey, goal.metric)
        whole = set(known)
        while True:
            began = time.monotonic()
            self._read_finished(goal, known, whole)
            for id, attempt in self._running.items():
                known[id] = self._read(attempt, goal.metric)
            for id, attempt in list(self._running.items()):
                if not attempt.stop_asked:
                    self._stop_if_behind(id, attempt, goal, known)
            await asyncio.sleep(max(EVERY, SHARE * (time.monotonic() - began)))

    def _read_finished(self, goal: Goal, known: dict[str, Stream], whole: set[str]) -> None:
        """Read once the numbers of steps that are done."""
        for id in self._steps.todo - whole - self._running.keys():
            if self._schedule.state(id) is not State.DONE:
                continue
            attempts = self._ws.store.runs.attempts(self._commits.run, id)
            if not attempts:  # stored in groups: a moment after it is done
                continue
            whole.add(id)
            known[id] = [
                each
                for row in attempts
                for each in stream(read_attempt_points(self._ws, row) or (), goal.metric)
            ]

    def _stop_if_behind(
        self, id: str, attempt: Attempt, goal: Goal, known: Mapping[str, Stream]
    ) -> None:
        others = [each for other, each in known.items() if other != id and bare(other) == bare(id)]
        words = behind(known[id], others, goal.least)
        if not words:
            return
        self._reasons[id] = f"{goal.metric} {words}"
        self._commits.say(f"{readable(id)} stopped early: {self._reasons[id]}")
        self._bell.run_in_background(attempt.stop(SAVING, may_save=True))

    def _read(self, attempt: Attempt, metric: str) -> Stream:
        """What an attempt has reported so far."""
        rule = self._steps.spec(attempt.id).metrics
        if rule is None:
            return ()
        folder = Path(attempt.directory.path)
        with contextlib.suppress(Invalid, OSError):  # a pattern that takes too long, or nothing yet
            if rule.pattern:
                masker = self._commits.masker
                return stream(
                    list(metrics.matches(Path(attempt.log), rule.pattern, masker)), metric
                )
            file = Path(f"{folder}.metrics") if rule.in_environment else folder / str(rule.file)
            return stream(metrics.points(file), metric)
        return ()
