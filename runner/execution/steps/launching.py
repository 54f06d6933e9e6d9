"""Launch of an attempt that holds its claims: reattach to an earlier attempt, or start anew."""

from __future__ import annotations

from drivers.base import DriverError, HostLost

from ...errors import CannotRun, RecipeError, StoreUnavailable
from ...planning.schedule import LIMIT
from ...storage.content.files import no_space
from .attempt import Attempt
from .attempt_executor import AttemptExecutor
from .bell import Bell
from .commit import GroupCommit
from .control import Stopper
from .failing import Cause, Failures
from .placement import Placement
from .preparing import Preparer
from .publisher import Publisher
from .reattaching import NotNow, Reattacher
from .renting import Machines
from .start_records import StartRecords


class Launcher:
    """Launcher of one run's attempts, which releases the claims of an attempt that cannot start."""

    def __init__(
        self,
        commits: GroupCommit,
        starts: StartRecords,
        placement: Placement,
        publisher: Publisher,
        reattacher: Reattacher,
        preparer: Preparer,
        executor: AttemptExecutor,
        failures: Failures,
        machines: Machines,
        stopper: Stopper,
        bell: Bell,
    ) -> None:
        self._commits, self._starts, self._placement = commits, starts, placement
        self._publisher, self._reattacher, self._preparer = publisher, reattacher, preparer
        self._executor, self._failures, self._machines = executor, failures, machines
        self._stopper, self._bell = stopper, bell

    async def launch(self, id: str, attempt: Attempt) -> None:
        """Reattach to an earlier worker's attempt, start a new attempt, or fail the step."""
        attempt.name = self._starts.name_of(attempt)
        found: Attempt | None = None
        trouble: Exception | None = None
        try:
            self._publisher.check_targets(attempt.number)
            found = await self._reattacher.find(attempt)
        except (NotNow, RecipeError, OSError, DriverError) as error:
            trouble = error
        self._starts.record(id, found or attempt)
        try:
            if trouble is not None:
                raise trouble
            if found is None:
                await self._prepare(attempt)
        except (NotNow, RecipeError, OSError, DriverError) as error:
            return self._fail_to_launch(id, attempt, error)
        begun = found or attempt
        self._executor.begin(id, begun)
        if self._stopper.is_stopping:  # requested during the preparation
            self._bell.run_in_background(begun.stop())
        return None

    async def _prepare(self, attempt: Attempt) -> None:
        # No GPUs were reserved because of an earlier attempt, which cannot continue.
        if attempt.gpus and not attempt.devices:
            attempt.devices = await self._placement.pick_gpus(
                attempt.id, attempt.place, attempt.gpus
            )
            if not attempt.devices:
                raise NotNow
        await self._preparer.prepare(attempt)

    def _fail_to_launch(self, id: str, attempt: Attempt, error: Exception) -> None:
        """Queue the step of an attempt that could not start, or fail the step."""
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
