"""Early stopping (`--stop-early`) of underperforming matrix instances.

Their checkpoints are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ...errors import Invalid
from ...planning.halving import Goal, Stream, explain_stop, stream
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
"""Minimum interval between comparisons of instances, in seconds."""
SHARE: Final = 20.0
"""Minimum interval between comparisons, as a multiple of a comparison's duration.

Long metric streams are therefore read less often.
"""


class EarlyStops:
    """Comparison of a step's matrix instances by the metric of `--stop-early`."""

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
        """Return the reason why a step is stopped early; empty if it is not."""
        return self._reasons.get(id, "")

    def forget(self, id: str) -> None:
        """Remove the stop reason after the stopped attempt has ended."""
        self._reasons.pop(id, None)

    @contextlib.contextmanager
    def monitor(self) -> Iterator[None]:
        """Stop underperforming instances during the block, if `--stop-early` is given."""
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
        """Read the metrics of finished steps, once per step."""
        for id in self._steps.todo - whole - self._running.keys():
            if self._schedule.state(id) is not State.DONE:
                continue
            attempts = self._ws.store.runs.attempts(self._commits.run, id)
            if not attempts:  # the row is stored a moment after the move
                continue
            whole.add(id)
            values: list[tuple[float, float]] = []
            for row in attempts:
                values += stream(read_attempt_points(self._ws, row) or (), goal.metric)
            known[id] = values

    def _stop_if_behind(
        self, id: str, attempt: Attempt, goal: Goal, known: Mapping[str, Stream]
    ) -> None:
        siblings = [other for other in known if other != id and bare(other) == bare(id)]
        others = [known[other] for other in siblings]
        words = explain_stop(known[id], others, goal.least)
        if not words:
            return
        self._reasons[id] = f"{goal.metric} {words}"
        self._commits.say(f"{readable(id)} stopped early: {self._reasons[id]}")
        self._bell.run_in_background(attempt.stop(SAVING, may_save=True))

    def _read(self, attempt: Attempt, metric: str) -> Stream:
        """Read the values of a metric that a running attempt has reported."""
        rule = self._steps.spec(attempt.id).metrics
        if rule is None:
            return ()
        folder = Path(attempt.directory.path)
        with contextlib.suppress(
            Invalid, OSError
        ):  # the pattern takes too long, or the file does not exist yet
            if rule.pattern:
                masker = self._commits.masker
                return stream(
                    list(metrics.matches(Path(attempt.log), rule.pattern, masker)), metric
                )
            file = Path(f"{folder}.metrics") if rule.in_environment else folder / str(rule.file)
            return stream(metrics.points(file), metric)
        return ()
