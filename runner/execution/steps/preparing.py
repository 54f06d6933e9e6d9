"""Preparation of an attempt: its directory, its task and its initial checkpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from drivers.base import Command

from ...errors import Infrastructure
from ...hosts.place import launch
from ...hosts.place.host_task import HostTask, Phase, StateFolder
from ...hosts.place.place import Place
from ...hosts.place.spare_dirs import SparePool
from ...hosts.place.staging import AttemptDirectory
from ...hosts.pool import HostPool
from ...planning import judge as judging
from ...planning.schedule import PHASES
from ...planning.step import DIRECTORY, StepSpec
from ...storage.crash import crashpoint
from ...storage.workspace import Workspace
from .. import job_folders
from ..reporting import log_remote
from .attempt import Attempt
from .bucket_inputs import BucketInputs
from .commands import CommandBuilder, Seat
from .commit import GroupCommit
from .environments import StepEnvironments
from .inputs import InputStager
from .run_plan import RunPlan

if TYPE_CHECKING:
    from ...hosts.place.host_task import SyncRound
    from ...storage import checkpoints


CONFIRM_AGAIN_SECONDS: Final = 0.1
"""Interval between attempts to reach the database, in seconds."""


class Preparer:
    """Preparation of the attempts of one run."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        commits: GroupCommit,
        pool: HostPool,
        environments: StepEnvironments,
        stager: InputStager,
        commands: CommandBuilder,
        scrap: SparePool,
    ) -> None:
        self._ws, self._steps, self._commits, self._pool = ws, steps, commits, pool
        self._environments, self._stager, self._commands = environments, stager, commands
        self._scrap = scrap
        self._folder = f"{ws.home}/attempts"
        self._buckets = BucketInputs(ws, steps.survey, commits, pool.name)

    def processes(self, spec: StepSpec, n: int, place: Place) -> int | None:
        """Return the number of processes of an `accelerate` step; None for other commands.

        The checkpoints of other commands do not depend on this number.
        """
        if spec.accelerate is None:
            return None
        scope = judging.scope_of(spec, self._steps.plan, n, self._steps.made)
        scope = scope | {"host": place.capacity.template_host(spec.resources.gpus)}
        return launch.count_processes(spec.accelerate, scope) * len(place.members)

    async def prepare(self, attempt: Attempt) -> None:
        """Prepare a new attempt for execution: environment, directory and task.

        Raises CannotRun, DriverError, OSError.
        """
        node, spec, members = attempt.node, attempt.spec, attempt.place.members
        pythons = [await self._environments.python(node, spec, each) for each in members]
        for each in members:
            await self._environments.make_ready(spec, each)
        self.compose_task(attempt, pythons)
        if attempt.state is not None:
            from ...storage import checkpoints

            checkpoints.hold(attempt.state.path.parent, attempt.name)
        if attempt.place.elsewhere:
            site = Path(f"{attempt.directory.path}.site")
            site.write_text("\n".join(each.name for each in members), encoding="utf-8")

    def compose_task(self, attempt: Attempt, pythons: Sequence[str]) -> None:
        """Choose the directory of an attempt and create its task, on one host or several.

        The place creates the directory when it runs the task. `pythons` are the interpreters on
        the hosts.
        """
        attempt.directory = AttemptDirectory(f"{self._folder}/{attempt.name}")
        attempt.started = time.time()
        members = attempt.place.members
        if len(members) == 1:
            seat = Seat(0, attempt.place, attempt.directory, pythons[0], attempt.name)
            attempt.task = self._task(attempt, seat)
            return
        attempt.directory.called = f"{attempt.name}.0"
        parts = []
        for rank, (place, python) in enumerate(zip(members, pythons, strict=True)):
            name = f"{attempt.name}.{rank}"
            directory = attempt.directory
            if rank:
                directory = AttemptDirectory(f"{self._folder}/{name}")
            part = self._task(attempt, Seat(rank, place, directory, python, name))
            in_image = self._environments.container_image(attempt.spec, place)
            part.python = "" if in_image else python
            parts.append(part)
        attempt.task = dataclasses.replace(parts[0], name=attempt.name, parts=parts)

    def _task(self, attempt: Attempt, seat: Seat) -> HostTask:
        node, spec, place, directory = attempt.node, attempt.spec, seat.place, seat.directory
        states = _state_folders(attempt)
        if not seat.rank:
            shown = {each.name: each.local_path for each in states}
            job_folders.link_folders(self._ws, self._commits.run, node.id, shown, self._commits.say)
        task = HostTask(
            seat.name,
            () if seat.rank else node.outputs,
            directory,
            functools.partial(self._compose, attempt, seat, states),
            self._scrap,
            functools.partial(self._say, node.id),
            self._confirm,
            spec.metrics,
            states,
            attempt.restored,
        )
        task.bring = functools.partial(self._buckets.bring, node, directory, place)
        if place.elsewhere and not seat.rank:
            task.phase = functools.partial(self._enter_phase, node.id, place)
        if states:
            task.processes = self.processes(spec, attempt.number, attempt.place)
            task.round = functools.partial(self._report_round, attempt)
        if spec.sync and not seat.rank:
            from ...hosts.place.output_sync import SyncedOutput

            paths = {name: (path, bool(flags & DIRECTORY)) for name, path, flags in node.outputs}
            task.synced = [SyncedOutput(*paths[name], every) for name, every in spec.sync]
        return task

    def _compose(
        self,
        attempt: Attempt,
        seat: Seat,
        states: Sequence[StateFolder],
        resumed_from: Mapping[str, checkpoints.Newest],
    ) -> tuple[Command, bytes | None]:
        """Create the directory of one node, stage its inputs and build its command, once its
        checkpoints are known.
        """
        directory = seat.directory
        directory.folder.begin(self._scrap)
        crashpoint("attempt-made")
        self._stager.stage(attempt.node, attempt.spec, directory, seat.place)
        directory.record_inputs()
        self._stager.explain(attempt.node, directory)
        seat.place.link_states(directory, states)
        attempt.resumed_from = resumed_from
        reached = [found.step for found in resumed_from.values() if found.step is not None]
        attempt.resumed_step = max(reached, default=None)
        return self._commands.build(attempt, seat, resumed_from)

    def _enter_phase(self, step: str, place: Place, phase: Phase) -> None:
        pool = self._pool
        self._commits.enter_phase(step, PHASES[phase])
        log_remote(self._ws, self._commits.run, pool.name, pool.instance_of(place), phase, step)

    async def _confirm(self) -> None:
        """Check that this worker still holds the claim on the run.

        Raises Stale. Waits while the database does not answer, so that no job starts in the
        meantime.
        """
        while True:
            try:
                return self._commits.confirm()
            except Infrastructure:
                await asyncio.sleep(CONFIRM_AGAIN_SECONDS)

    def _say(self, id: str, words: str) -> None:
        self._commits.say(f"{id}: {words}")

    def _report_round(self, attempt: Attempt, round: SyncRound) -> None:
        """Report the result of a checkpoint download from a host."""
        name = attempt.place.name
        if round.copied:
            attempt.checkpoint_bytes += round.size
        for words in (round.problem, round.warning):
            if words:
                self._commits.say(f"{name}: {words}")
        for checkpoint, why in round.rejected:
            self._commits.say(f"skipped checkpoint {checkpoint} on {name}: {why}")


def find_restored(
    spec: StepSpec, generation: checkpoints.Generation, processes: int | None
) -> dict[str, checkpoints.Newest]:
    """Return the newest local checkpoint in each checkpoint directory of a step."""
    from ...storage import checkpoints

    return {
        each.name: checkpoints.newest(
            generation.folder(each.name), each.checkpoint, processes=processes
        )
        for each in spec.state
    }


def _state_folders(attempt: Attempt) -> list[StateFolder]:
    """Create and return the local checkpoint directories of an attempt."""
    generation = attempt.state
    if generation is None:
        return []
    folders = [
        StateFolder(
            state.name,
            state.path,
            generation.folder(state.name),
            f"states/{generation.id}/{state.name}",
            state.checkpoint,
            state.every,
            state.keep,
            state.every_steps,
        )
        for state in attempt.spec.state
    ]
    for folder in folders:
        folder.local_path.mkdir(parents=True, exist_ok=True)
    return folders
