"""`--stop-early`: look at what the instances of a step report while they run, and stop those that fall behind.  Their states are kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...errors import Invalid
from ...planning.halving import Goal, Stream, behind, stream
from ...planning.ids import bare, readable
from ...planning.schedule import State
from ...storage import metrics
from ...survey import stopped
from ...survey.results import points
from .attempts import Running
from .control import SAVING, stop
from .work import Work

EVERY: Final = 0.5
"""Seconds between two looks."""
SHARE: Final = 20.0
"""Times that a look may take before the next: long streams are read less often."""


@contextlib.contextmanager
def watched(work: Work) -> Iterator[None]:
    """Stop what falls behind, where the caller asked for that."""
    goal = work.options.stop_early
    task = asyncio.get_running_loop().create_task(_watch(work, goal)) if goal is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _watch(work: Work, goal: Goal) -> None:
    known = stopped.streams(work.ws, work.survey, goal.metric)
    whole = set(known)
    while True:
        began = time.monotonic()
        for id in work.steps.todo - whole - work.running.keys():
            # Stored in groups: a moment after it is done.
            if work.schedule.state(id) is State.DONE and (
                tries := work.ws.store.runs.attempts(work.commits.run, id)
            ):
                whole.add(id)
                known[id] = [
                    each
                    for row in tries
                    for each in stream(points(work.ws, row) or (), goal.metric)
                ]
        for id, running in work.running.items():
            known[id] = _read(work, running, goal.metric)
        for id, running in list(work.running.items()):
            others = [
                said for other, said in known.items() if other != id and bare(other) == bare(id)
            ]
            if not running.stopped and (words := behind(known[id], others, goal.least)):
                work.early[id] = f"{goal.metric} {words}"
                work.commits.say(f"{readable(id)} is stopped early: {work.early[id]}")
                work.bell.run_in_background(stop(running, SAVING, may_save=True))
        await asyncio.sleep(max(EVERY, SHARE * (time.monotonic() - began)))


def _read(work: Work, running: Running, metric: str) -> Stream:
    """What an attempt has reported so far."""
    rule = work.steps.spec(running.node.id).metrics
    if rule is None:
        return ()
    with contextlib.suppress(Invalid, OSError):  # a pattern that takes too long, or nothing yet
        if rule.pattern:
            return stream(
                list(metrics.matches(Path(running.log), rule.pattern, work.commits.masker)), metric
            )
        folder = Path(running.attempt.path)
        return stream(
            metrics.points(
                Path(f"{folder}.metrics") if rule.in_environment else folder / str(rule.file)
            ),
            metric,
        )
    return ()
