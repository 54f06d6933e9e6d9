"""Cancellation or pause of a run without a worker: stop its jobs and store its state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from drivers.base import Job

from ..errors import Infrastructure
from ..hosts.link import client
from ..hosts.link.local_agents import is_reachable
from ..planning.schedule import FINAL, Move, State
from ..storage.records.runs import LET_GO, Beside, StepRow, settle
from ..storage.workspace import Workspace
from .steps.attempt import SAVING
from .steps.orphans import find_left_attempts

END = Literal["CANCELLED", "PAUSED"]
LATE = timedelta(seconds=10)
"""Timeout for a job's end after its kill."""


def end_unattended(ws: Workspace, run: str, state: END, say: Callable[[str], None]) -> bool:
    """Cancel or pause a run without a worker.

    Return False if a worker has it, or if it has ended. Stops the run's jobs on this machine.
    Names its jobs on other hosts, which a run with the same driver can resume or stop.
    """
    fence = ws.store.runs.claim(run, f"process {os.getpid()}")
    if fence is None:
        return False
    end_claimed(ws, run, fence, state, say)
    return True


def end_claimed(
    ws: Workspace, run: str, fence: int, state: END, say: Callable[[str], None]
) -> None:
    """Cancel or pause a run that this process has claimed but is not executing."""
    try:
        here, elsewhere = find_left_attempts(ws.home, run)
        for name, place in elsewhere.items():
            say(
                f"{place} may still run {name}, a job of {run}: to take over or stop the job, use `recipe run` with the same driver"
            )
        for root, names in here.items():
            asyncio.run(_stop_jobs(root, names))
        settled = settle(
            ws.store.runs, run, fence, state, state.lower(), partial(_close_steps, ws, run)
        )
    except BaseException:
        ws.store.runs.release(run, fence)
        raise
    if settled not in LET_GO:
        ws.store.runs.release(run, fence)


async def _stop_jobs(root: Path, names: Sequence[str]) -> None:
    """Stop the jobs of an agent on this machine, with time to save a checkpoint.

    Raises Infrastructure if a job does not exit.
    """
    if not is_reachable(root):
        raise Infrastructure(
            f"cannot reach the agent that runs {', '.join(names)}: it is in another container or on another machine",
            fix="run the same command in that container or on that machine",
        )
    local = client.connect_local(root)
    jobs = [Job(name) for name in names]
    for job in jobs:
        await local.stop(job, SAVING)
    for job in jobs:
        if await local.wait(job, SAVING + LATE) is None:
            raise Infrastructure(
                f"{job.key} was killed but does not exit",
                fix="try again: a process waiting for a disk exits when the disk responds; for a process in another container, stop the container",
            )
    await local.aclose()


def _close_steps(ws: Workspace, run: str, state: str) -> Beside:
    """Return events and database rows that close the open steps of a run without jobs.

    For CANCELLED, all open steps are CANCELLED; for PAUSED, RUNNING steps are QUEUED again.
    """
    steps = ws.store.runs.steps(run).values()
    if state == "CANCELLED":
        after = State.CANCELLED
        moved = [step for step in steps if State(step.state) not in FINAL]
    else:
        after = State.QUEUED
        moved = [step for step in steps if step.state == State.RUNNING]
    reason = state.lower()
    moves = [Move("step", step.step, step.state, after, reason) for step in moved]
    rows = [StepRow(run, step.step, after, "", reason) for step in moved]
    return moves, rows
