"""Start of steps: choose a host, claim key, GPUs and state, prepare the attempt, and execute it.

Every claim is released on every exit path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from drivers.base import DriverError, HostLost

from ...errors import CannotRun, RecipeError, StoreUnavailable
from ...planning.judge import world_of
from ...planning.schedule import LIMIT
from ...planning.step import StepSpec
from ...secrets import is_tokenlike
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
"""Rest of a step without a free host or with its state in use, in seconds."""


class Starter:
    """Starts the attempts of one run."""

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
        self._names: dict[str, int] = {}  # attempts by key, or by step without a key

    async def start_ready(self) -> bool:
        """Start every step for which there is room; True if a step moved."""
        moved = False
        for id in self._schedule.startable():
            moved |= await self._start(id)
        return moved

    # -- one step

    async def _start(self, id: str) -> bool:
        """Start an attempt of a step; True if the step moved."""
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
        # An earlier worker's attempt with this key may hold the GPUs.
        if _gpus_of(spec) and not self._keys.has_orphan(key):
            has_moved = await self._pick_gpus(attempt)
            if not attempt.devices:
                return has_moved
        if key is not None and not self._keys.claim(id, n, key):
            return True  # another step can use the host
        return await self._open_and_launch(id, attempt)

    async def _pick_gpus(self, attempt: Attempt) -> bool:
        """Reserve free GPUs for an attempt; True if the step failed or its host was lost."""
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
        """Claim the state of an attempt and start it; True if the step moved."""
        try:
            is_open = await self._states.open(attempt)
        except OSError as error:
            self._give_back(attempt)
            full = no_space(error, error.filename or "")
            self._failures.fail_unstarted(id, Cause("disk", str(full)))
            return True
        if not is_open:
            self._schedule.rest(id, NO_ROOM)
        # After an interrupt or at the run's limit, no step starts.
        if not is_open or self._schedule.is_disturbed:
            self._give_back(attempt)
            return False
        await self._launch(id, attempt)
        return True

    def _give_back(self, attempt: Attempt) -> None:
        """Release the key and the state of an attempt that does not start."""
        attempt.release_lock()
        if attempt.key is not None:
            self._commits.release(attempt.key)

    # -- launch

    async def _launch(self, id: str, attempt: Attempt) -> None:
        """Reattach to an earlier worker's attempt, start a new one, or fail the step."""
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
        if self._stopper.is_stopping:  # requested during the preparation
            self._bell.run_in_background(begun.stop())
        return None

    async def _prepare(self, attempt: Attempt) -> None:
        # No GPUs were reserved because of an earlier attempt, which cannot continue.
        if _gpus_of(attempt.spec) and not attempt.devices:
            attempt.devices = await self._placement.pick_gpus(
                attempt.id, attempt.place, _gpus_of(attempt.spec)
            )
            if not attempt.devices:
                raise NotNow
        await self._preparer.prepare(attempt)

    def _fail_to_launch(self, id: str, attempt: Attempt, error: Exception) -> None:
        """Queue the step of an attempt that could not start, or fail it."""
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
            # An install that this worker stopped does not count as failed.
            cause = Cause("stopped", "interrupted")
        return self._failures.fail(id, cause)

    # -- names and facts

    def _name_of(self, attempt: Attempt) -> str:
        """Return the name of a new attempt.

        It begins with the key, so that the next worker finds the attempt. Without a key, it begins
        with the run.
        """
        run, what = self._commits.run, attempt.key or attempt.id
        self._names[what] = number = self._names.get(what, 0) + 1
        # A job is identified by its name, which must differ from those of earlier workers.
        ordinal = f"{self._commits.fence}-{number}"
        if attempt.key is not None:
            return f"{attempt.key[:24]}-{run}-{ordinal}"
        return f"{run}-{attempt.number}-{ordinal}"

    def _note_start(self, id: str, attempt: Attempt) -> None:
        """Record the start of the step's attempt.

        A reattached attempt of this run keeps its attempt number.
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
        """Describe the checkpoint from which a training resumes, and report skipped checkpoints."""
        for found in attempt.restored.values():
            if found.passed and found.name is None:
                self._commits.say(f"{id}: {found.words}")
        if attempt.state is None:
            return {}
        words = [attempt.state.note, *(found.words for found in attempt.restored.values())]
        note = "; ".join(filter(None, words))
        return {"note": note} if note else {}


def _gpus_of(spec: StepSpec) -> int:
    """Return the number of GPUs that a step needs on its host."""
    return int(spec.resources.room.get("gpus", 0))


def _facts_of_log(attempt: Attempt, folder: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Return the facts for readers of the raw log: the source of metrics, and secrets to mask."""
    spec, facts = attempt.spec, dict[str, object]()
    if spec.metrics is not None and spec.metrics.in_environment:
        facts["metrics"] = f"{folder}/{attempt.name}.metrics"
    elif spec.metrics is not None and spec.metrics.pattern:
        facts["pattern"] = spec.metrics.pattern
    hidden = [secret.source for secret in spec.secrets if environ.get(secret.source)]
    hidden += [name for name in spec.pass_env if is_tokenlike(name, environ.get(name, ""))]
    if hidden:
        facts["secrets"] = hidden
    if spec.env_files:
        facts["env_files"] = list(spec.env_files)
    return facts
