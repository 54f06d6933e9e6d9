"""Cancel or pause a run that no worker has: end its jobs, and store where it stands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

from drivers.base import Job

from ..errors import Infrastructure
from ..hosts.client import Client
from ..planning.schedule import FINAL, Move, State
from ..storage.runs import RunRow, StepRow
from ..storage.workspace import Workspace
from .control import SAVING

LATE = timedelta(seconds=10)
"""After the kill: until a job that does not end is given up."""
END = Literal["CANCELLED", "PAUSED"]


def claimed(ws: Workspace, row: RunRow) -> int | None:
    """The fence of a run that no worker has, and that is ours from now on; None while one has it."""
    return ws.store.runs.claim(row.id, f"process {os.getpid()}")


async def end(host: Client, names: Sequence[str]) -> None:
    """Stop these jobs: they may save where they are.  Raises Infrastructure where one does not end."""
    jobs = [Job(name) for name in names]
    for job in jobs:
        await host.stop(job, SAVING)
    for job in jobs:
        if await host.wait(job, SAVING + LATE) is None:
            raise Infrastructure(
                f"{job.key} does not end, although it was killed", fix="a process that waits for a disk ends when that answers: try again"
            )


def close(ws: Workspace, row: RunRow, fence: int, state: END) -> None:
    """Give a run without jobs this state: what it had open is CANCELLED, or what was RUNNING is QUEUED again."""
    after = State.CANCELLED if state == "CANCELLED" else State.QUEUED
    open = [step for step in ws.store.runs.steps(row.id).values() if State(step.state) not in FINAL]
    moved = [step for step in open if after is State.CANCELLED or step.state == State.RUNNING]
    reason = state.lower()
    moves = [*(Move("step", step.step, step.state, after, reason) for step in moved), Move("run", row.id, row.state, state, reason)]
    steps = [StepRow(row.id, step.step, after, "", reason) for step in moved]
    ws.store.runs.group(row.id, fence, moves, steps=steps, run_state=(state, reason), answers=row.request)
    if state == "PAUSED":
        ws.store.runs.release(row.id, fence)
