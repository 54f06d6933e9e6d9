"""Start steps: find a host, hold the key, the GPUs and the state, make the attempt ready, begin it.

Every hold is given back on every way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from drivers.base import DriverError, HostLost

from ...errors import CannotRun, RecipeError, StoreUnavailable
from ...planning.judge import world_of
from ...planning.schedule import LIMIT
from ...planning.step import StepSpec
from ...secrets import tokenlike
from ...storage.content.files import no_space
from .attempt import Attempt
from .bell import Bell
from .carrying import Carrier
from .claims import KeyClaims, StateClaims
from .commit import GroupCommit
from .control import Stopper
from .failing import Cause, Failures
from .judging import Judge
from .placement import Placement
from .preparing import Preparer
from .publisher import Publisher
from .reattaching import NotNow, Reattacher
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule

NO_ROOM: Final = 0.2
"""Seconds until a step that found no host, or its state in use, is tried again."""


class Starter:
    """Begins the attempts of one run."""

    def __init__(
        self,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        judge: Judge,
        placement: Placement,
        keys: KeyClaims,
        states: StateClaims,
        reattacher: Reattacher,
        preparer: Preparer,
        publisher: Publisher,
        carrier: Carrier,
        failures: Failures,
        machines: Machines,
        stopper: Stopper,
        bell: Bell,
        environ: Mapping[str, str],
        folder: str,
    ) -> None:
        """`environ` is the caller's environment, `folder` that of all attempts."""
        self._steps, self._schedule, self._commits, self._judge = steps, schedule, commits, judge
        self._placement, self._keys, self._states = placement, keys, states
        self._reattacher, self._preparer, self._publisher = reattacher, preparer, publisher
        self._carrier, self._failures, self._machines = carrier, failures, machines
        self._stopper, self._bell, self._environ, self._folder = stopper, bell, environ, folder
        self._names: dict[str, int] = {}  # attempts that were named, by key or by step without one

    async def start_ready(self) -> bool:
        """Start every step that there is room for; True when something moved."""
        moved = False
        for id in self._schedule.startable():
            moved |= await self._start(id)
        return moved

    # -- one step

    async def _start(self, id: str) -> bool:
        """Begin an attempt of a step; True when something moved."""
        refusal = self._judge.refusal_of(id)
        if refusal is not None:
            self._failures.fail_unstarted(id, refusal)
            return True
        steps, n = self._steps, self._steps.number(id)
        node, spec, key = steps.node(id), steps.spec(id), steps.verdicts[id].key
        if key is not None and self._keys.is_out_of_reach(id, key):
            return False
        place = self._placement.find(node, spec)
        if place is None:
            self._schedule.rest(id, NO_ROOM)
            return self._placement.settle_unplaced(node, spec)
        world, _ = world_of(node, steps.facts, steps.made)
        attempt = Attempt(n, node, spec, key, world, place)
        # One that an earlier worker left may hold its GPUs.
        if _gpus_of(spec) and not self._keys.has_orphan(key):
            has_moved = await self._pick_gpus(attempt)
            if not attempt.devices:
                return has_moved
        if key is not None and not self._keys.claim(id, n, key):
            return True  # its place is free for others
        return await self._open_and_launch(id, attempt)

    async def _pick_gpus(self, attempt: Attempt) -> bool:
        """Take free GPUs of the host.  Where there are none: whether something moved."""
        try:
            attempt.devices = await self._placement.pick_gpus(
                attempt.id, attempt.place, _gpus_of(attempt.spec)
            )
        except HostLost as error:
            self._machines.lose(attempt.place, error)
            return True
        except DriverError as error:
            self._failures.fail_unstarted(attempt.id, Cause("error", str(error)))
            return True
        return False

    async def _open_and_launch(self, id: str, attempt: Attempt) -> bool:
        """Begin an attempt that holds its key, if it can have its state; True when it moved."""
        try:
            is_open = await self._states.open(attempt)
        except OSError as error:
            self._give_back(attempt)
            full = no_space(error, error.filename or "")
            self._failures.fail_unstarted(id, Cause("disk", str(full)))
            return True
        if not is_open:
            self._schedule.rest(id, NO_ROOM)
        # An interrupt or the run's limit came meanwhile: nothing new starts.
        if not is_open or self._schedule.is_disturbed:
            self._give_back(attempt)
            return False
        await self._launch(id, attempt)
        return True

    def _give_back(self, attempt: Attempt) -> None:
        """A step does not begin after all."""
        attempt.release_lock()
        if attempt.key is not None:
            self._commits.release(attempt.key)

    # -- an attempt that holds all it needs

    async def _launch(self, id: str, attempt: Attempt) -> None:
        """Begin an attempt, or one that an earlier worker began with its key, or fail the step."""
        attempt.name = self._name_of(attempt)
        found: Attempt | None = None
        trouble: Exception | None = None
        try:
            self._publisher.check_targets(attempt.number)
            found = await self._reattacher.find(attempt)
        except (NotNow, RecipeError, OSError, DriverError) as error:
            trouble = error
        self._note_start(id, found or attempt)
        try:
            if trouble is not None:
                raise trouble
            if found is None:
                await self._prepare(attempt)
        except (NotNow, RecipeError, OSError, DriverError) as error:
            return self._fail_to_launch(id, attempt, error)
        begun = found or attempt
        self._carrier.begin(id, begun)
        if self._stopper.is_stopping:  # asked for while this attempt was being prepared
            self._bell.run_in_background(begun.stop())
        return None

    async def _prepare(self, attempt: Attempt) -> None:
        # An earlier worker left an attempt that is of no use, and GPUs were not picked for it.
        if _gpus_of(attempt.spec) and not attempt.devices:
            attempt.devices = await self._placement.pick_gpus(
                attempt.id, attempt.place, _gpus_of(attempt.spec)
            )
            if not attempt.devices:
                raise NotNow
        await self._preparer.prepare(attempt)

    def _fail_to_launch(self, id: str, attempt: Attempt, error: Exception) -> None:
        """An attempt does not begin: its step waits for another one, or fails."""
        attempt.release_lock()
        if isinstance(error, HostLost):
            self._machines.lose(attempt.place, error)
        if isinstance(error, NotNow | HostLost | StoreUnavailable):
            return self._failures.queue_again(id, attempt.key)
        if attempt.key is not None:
            self._commits.release_after_flush(attempt.key)
        if isinstance(error, OSError):
            error = no_space(error, error.filename or attempt.name)
        cause = Cause("error", str(error), getattr(error, "fix", ""))
        if self._stopper.limit:
            cause = Cause(LIMIT, f"stopped: {self._stopper.limit}")
        elif self._stopper.is_interrupted and isinstance(error, CannotRun):
            # An install that we ended ourselves has not failed.
            cause = Cause("stopped", "interrupted")
        return self._failures.fail(id, cause)

    # -- names and notes

    def _name_of(self, attempt: Attempt) -> str:
        """Its key's name, so that the next worker finds it; without a key, the run's."""
        run, what = self._commits.run, attempt.key or attempt.id
        self._names[what] = number = self._names.get(what, 0) + 1
        # A job is known by its name: none of this worker's is one of an earlier worker of the run.
        ordinal = f"{self._commits.fence}-{number}"
        if attempt.key is not None:
            return f"{attempt.key[:24]}-{run}-{ordinal}"
        return f"{run}-{attempt.number}-{ordinal}"

    def _note_start(self, id: str, attempt: Attempt) -> None:
        """Note that the step's next attempt begins.

        One that this run began under an earlier worker is still the same.
        """
        if not attempt.is_reattached or not self._commits.tries(id):
            self._commits.next_attempt(id)
        data: dict[str, object] = {
            "log": f"{self._folder}/{attempt.name}.log",
            "attempt": self._commits.tries(id),
            **_facts_of_log(attempt, self._folder, self._environ),
        }
        if attempt.is_reattached:
            data["taken_up"] = True
        else:
            data |= self._notes_of_state(id, attempt)
        if attempt.place.elsewhere:
            data["site"] = attempt.place.elsewhere
            if attempt.state is not None:
                data["generation"] = attempt.state.id
        self._schedule.start(id, data)

    def _notes_of_state(self, id: str, attempt: Attempt) -> dict[str, object]:
        """Where a training resumes, in words, and what was passed over."""
        for found in attempt.restored.values():
            if found.passed and found.name is None:
                self._commits.say(f"{id}: {found.words}")
        if attempt.state is None:
            return {}
        words = [attempt.state.note, *(found.words for found in attempt.restored.values())]
        note = "; ".join(filter(None, words))
        return {"note": note} if note else {}


def _gpus_of(spec: StepSpec) -> int:
    """How many GPUs of its host a step takes."""
    return int(spec.resources.room.get("gpus", 0))


def _facts_of_log(attempt: Attempt, folder: str, environ: Mapping[str, str]) -> dict[str, object]:
    """What a reader of the raw log has to know: where numbers are, and which secrets to mask."""
    spec, facts = attempt.spec, dict[str, object]()
    if spec.metrics is not None and spec.metrics.in_environment:
        facts["metrics"] = f"{folder}/{attempt.name}.metrics"
    elif spec.metrics is not None and spec.metrics.pattern:
        facts["pattern"] = spec.metrics.pattern
    hidden = [secret.source for secret in spec.secrets if environ.get(secret.source)]
    hidden += [name for name in spec.pass_env if tokenlike(name, environ.get(name, ""))]
    if hidden:
        facts["secrets"] = hidden
    if spec.env_files:
        facts["env_files"] = list(spec.env_files)
    return facts
