"""Machines of a run: rented for queued steps, replaced, and released."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Collection, Iterator, Sequence
from typing import Final

from drivers.base import DriverError, HostLost, Need

from ...errors import RecipeError, StoreUnavailable
from ...hosts.connect import check_same_packages
from ...hosts.place.place import Place
from ...hosts.pool import HostPool
from ...planning.schedule import Move, State
from ...planning.step import TEMPORARY
from ...storage.records.ledger import LeaseRow
from ...storage.workspace import Workspace
from ..reporting import log_remote
from .bell import Bell
from .commit import GroupCommit
from .control import Stopper
from .host_hooks import HostHooks
from .orphans import Orphans
from .run_plan import RunPlan
from .run_schedule import Journal, RunSchedule
from .running_attempts import RunningAttempts

SIZES: Final = ("cpus", "memory", "gpus")
"""Names of the capacities that steps on a host share."""
LOOK: Final = 0.2
"""Interval between checks for required machines, in seconds."""


class Machines:
    """Manager that rents machines for queued steps in the background and releases unused ones."""

    def __init__(
        self,
        ws: Workspace,
        pool: HostPool,
        steps: RunPlan,
        schedule: RunSchedule,
        journal: Journal,
        commits: GroupCommit,
        running: RunningAttempts,
        hooks: HostHooks,
        orphans: Orphans,
        stopper: Stopper,
        bell: Bell,
        *,
        most_for_a_need: int,
        fixed_pools: Collection[str] = (),
    ) -> None:
        self._ws, self._pool, self._steps, self._schedule = ws, pool, steps, schedule
        self._journal, self._commits, self._running = journal, commits, running
        self._hooks, self._orphans, self._stopper, self._bell = hooks, orphans, stopper, bell
        self._most, self._fixed_pools = most_for_a_need, fixed_pools
        self._coming = 0
        self._looked = 0.0
        self._unavailable: StoreUnavailable | None = None

    @property
    def are_coming(self) -> bool:
        """Return True while a machine is being rented or replaced."""
        return self._coming > 0

    def stays_here(self, id: str) -> bool:
        """Return True if a step always runs on this machine."""
        return self._steps.is_local(id) or self._pool.runs_locally(self._steps.spec(id))

    def rent(self) -> None:
        """Rent machines for QUEUED steps, and release unused machines.

        Raises StoreUnavailable after the ledger did not answer: another attempt to rent in this run
        might rent a second machine.
        """
        if self._unavailable is not None:
            raise self._unavailable
        pool = self._pool
        if pool.moves:
            self.note_moves()
        now = time.monotonic()
        if not pool.is_remote or self._looked + LOOK > now:
            return
        self._looked = now
        if pool.limit is not None and pool.leases is not None and pool.money_is_over():
            self._stopper.money_is_spent(pool.limit)
        self._save_in_time()
        if not pool.is_priced:
            return self._succeed_in_time()
        self._rent_what_is_needed()

    def join_late(self) -> None:
        """Add hosts that have not answered yet as soon as they answer."""
        if self._pool.has_late:
            self._coming += 1
            self._bell.run_in_background(self._join())

    def lose(self, place: Place, error: HostLost) -> None:
        """Mark a host, or the lost hosts of a group, as lost and request replacements."""
        for gone, why in (place.lost_members or {place: str(error)}).items():
            if gone.lost:
                continue
            gone.lost = why
            self._commits.say(f"lost host {gone.name}: {why}")
            self._take_instead(gone, self._pool.replace(gone))

    def note_moves(self) -> None:
        """Record the state changes of machine leases as events of the run."""
        moves, self._pool.moves = self._pool.moves, []
        for _before, row in moves:
            instance = str(row.lease.get("id", ""))
            log_remote(self._ws, self._commits.run, row.driver, instance, row.state)
        self._journal.record(
            [
                Move("lease", row.key, before, row.state, row.reason, self._facts_of(row))
                for before, row in moves
            ]
        )

    # -- machines with a price

    def _rent_what_is_needed(self) -> None:
        pool, specs = self._pool, [self._steps.spec(id) for id in self._open_steps()]
        pool.together = {pool.need(spec) for spec in specs if pool.needs_one_zone(spec)}
        queued, crews = self._needs()
        for need, count in queued.items():
            wanted = min(count, max(crews[need], self._most))
            while (
                not self._schedule.starts_nothing
                and need not in pool.refused
                and not pool.is_full
                and pool.inventory.count_machines(need) < wanted
            ):
                pool.inventory.coming.append(need)
                self._coming += 1
                self._bell.run_in_background(self._get(need))
        for place, reason in pool.inventory.find_spare(queued, self._orphans.places()):
            self._bell.run_in_background(self._give_back(place, reason))

    def _needs(self) -> tuple[Counter[Need], dict[Need, int]]:
        """Return the number of machines that QUEUED steps request, in total and for one step.

        Both are counted per resource request. Requests of steps that are not QUEUED have a count
        of 0, so that their machines are kept.
        """
        queued: Counter[Need] = Counter()
        crews: dict[Need, int] = {}
        for id in self._open_steps():
            crew = 0
            if self._schedule.state(id) is State.QUEUED:
                crew = self._pool.head.count_workers(self._steps.spec(id))
            for need in self._needs_of(id):
                queued[need] += crew
                crews[need] = max(crews.get(need, 1), crew)
        return queued, crews

    def _needs_of(self, id: str) -> Iterator[Need]:
        """Yield the machine requests of a step: for its own machine, and for its inputs."""
        if not self.stays_here(id):
            yield self._pool.need(self._steps.spec(id))
        for each in self._steps.node(id).upstream:
            node = self._steps.plan.nodes[each.producer]
            is_left_there = any(
                name == each.output and flags & TEMPORARY for name, _, flags in node.outputs
            )
            if is_left_there and not self.stays_here(node.id):
                yield self._pool.need(self._steps.spec(node.id))

    def _open_steps(self) -> list[str]:
        """Return the unfinished steps of this run."""
        open_steps = self._schedule.open_steps()
        return [id for id in self._steps.todo if id in open_steps]

    async def _get(self, need: Need) -> None:
        pool = self._pool
        try:
            await pool.rent(need, self._make_ready)
        except StoreUnavailable as error:
            self._unavailable = error
        except (RecipeError, DriverError) as error:
            pool.refuse(need, str(error))
        except Exception as error:  # a retry would rent another machine
            pool.refuse(need, f"internal error of recipe: {type(error).__name__}: {error}")
        finally:
            pool.inventory.coming.remove(need)
            self._coming -= 1
            self._bell.wake()

    async def _make_ready(self, place: Place) -> None:
        await self._hooks.of(place).setup()
        if self._steps.survey.request.current_python:
            await check_same_packages([place])
        left = self._steps.left_on_hosts(self._ws.objects)
        if left:
            await place.folder.look_up(left)

    async def _give_back(self, place: Place, reason: str) -> None:
        try:
            if not await self._pool.release(place, reason):
                self._commits.say(
                    f"{place.name} is not released yet; trying again at the end of the run"
                )
        except (RecipeError, DriverError) as error:
            self._commits.say(f"cannot release {place.name}: {error}; try again with `recipe reap`")

    # -- preempted machines and expiring allocations

    def _save_in_time(self) -> None:
        """Stop attempts on machines with a preemption notice, so that they save a checkpoint.

        The next attempt resumes from the checkpoint.
        """
        for place in self._pool.inventory.mark_leaving():
            for attempt in self._running.values():
                if place not in attempt.place.members or attempt.stop_asked:
                    continue
                self._commits.say(
                    f"preemption notice for {place.name}: {attempt.id} is saving a checkpoint "
                    "and will resume on another host"
                )
                self._bell.run_in_background(attempt.stop(place.notice))

    def _succeed_in_time(self) -> None:
        """Replace allocations that are about to expire, and release unused allocations."""
        inventory = self._pool.inventory
        if not inventory.mark_leaving():
            return
        if self._needs_hosts():
            for place in inventory.take_ending():
                self._take_instead(place, self._pool.allocate())
        for place in inventory.find_unused_leases():
            self._bell.run_in_background(self._give_back(place, place.leaving))

    def _needs_hosts(self) -> bool:
        """Return True if an unfinished step has to run on another machine."""
        if self._schedule.starts_nothing or self._stopper.is_stopping:
            return False
        return any(not self.stays_here(id) for id in self._open_steps())

    async def _join(self) -> None:
        try:
            for place in await self._pool.add_late_hosts(self._make_ready):
                sizes = {name: place.capacity.total_of(name) for name in SIZES}
                for name in self._fixed_pools:
                    sizes.pop(name, None)
                slots = 0 if self._most else place.capacity.slots or 1
                self._schedule.grow(slots, sizes)
                self._commits.say(f"{place.name} answers now, and the run uses it, too")
        except (RecipeError, DriverError) as error:
            self._commits.say(str(error))
        finally:
            self._coming -= 1
            self._bell.wake()

    def _take_instead(self, place: Place, asking: Awaitable[Sequence[Place]]) -> None:
        self._coming += 1
        self._bell.run_in_background(self._replace(place, asking))

    async def _replace(self, place: Place, asking: Awaitable[Sequence[Place]]) -> None:
        """Add the requested hosts in place of a lost or expiring host."""
        try:
            for found in await asking:
                await self._hooks.of(found).setup()
                self._commits.say(f"{found.name} replaces {place.name}")
        except (RecipeError, DriverError) as error:
            self._commits.say(str(error))
        finally:
            self._coming -= 1
            self._bell.wake()

    def _facts_of(self, row: LeaseRow) -> dict[str, object]:
        """Return the facts about a machine lease that are stored with its event.

        For leases without a price, they include the data with which a worker on another machine
        takes over.
        """
        facts: dict[str, object] = {
            "driver": row.driver,
            "offer": row.offer.get("id", ""),
            "price": row.price,
        }
        if self._ws.delivers and not self._pool.is_priced:
            facts |= {"offered": dict(row.offer), "need": dict(row.need), "until": row.until}
        return facts
