"""Choice of a host and GPUs for each step, and handling of steps without a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...failures import StepFailure
from ...hosts.place.place import Place
from ...hosts.pool import HostPool
from ...planning.plan import LOCAL, Node
from ...planning.step import StepSpec
from .commit import GroupCommit
from .failing import Cause, Failures
from .host_outputs import HostOutputs
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule

if TYPE_CHECKING:
    from drivers.devices import Device


class Placement:
    """Finder of hosts and GPUs for the steps of one run."""

    def __init__(
        self,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        pool: HostPool,
        host_outputs: HostOutputs,
        machines: Machines,
        failures: Failures,
    ) -> None:
        self._steps, self._schedule, self._commits, self._pool = steps, schedule, commits, pool
        self._host_outputs, self._machines, self._failures = host_outputs, machines, failures
        self._waits_told: set[str] = set()  # hosts with a message about GPUs in use

    def find(self, node: Node, spec: StepSpec) -> Place | None:
        """Return a free host for a step, or a group of hosts for several nodes.

        Prefers hosts that already have the step's inputs. Returns None if no host is free.
        """
        wants, local = spec.resources.room, bool(node.flags & LOCAL)
        places = list(self._pool.places_of(spec, local=local))
        absent = self._host_outputs.absent(node)
        if absent:
            places = [] if local else self._host_outputs.holders(absent, wants)
            if not places:
                self._host_outputs.bring(node.id, absent)
                return None
        elif len(places) == 1 and not places[0].elsewhere and not self._pool.is_priced:
            # The scheduler has checked the room on this machine.
            return places[0]
        fitting = [place for place in places if place.has_room(wants)]
        fitting.sort(key=lambda place: place.contact.silent)
        if spec.node_count > 1:
            from ...hosts.place.group import group_of

            crew = self._pool.head.choose_places(spec, fitting)
            return group_of(crew) if crew else None
        return fitting[0] if fitting else None

    def settle_unplaced(self, node: Node, spec: StepSpec) -> bool:
        """Handle a step without a free host; return True if a step changed its state.

        The step waits, or a lost dependency runs again, or the step fails because no host can come.
        """
        absent = self._host_outputs.absent(node)
        for content in absent:
            if not self._host_outputs.holders([content]):
                self._make_again(node, content)
                return True
        if (
            self._host_outputs.are_coming(absent)
            or self._machines.are_coming
            or self._pool.may_get_place(spec)
        ):
            return False
        self._failures.fail_unstarted(node.id, self._no_host_left())
        return True

    async def pick_gpus(self, id: str, place: Place, count: int) -> tuple[Device, ...]:
        """Reserve free GPUs of a host; return () with a message if the step has to wait.

        The message is shown once per host. Raises DriverError.
        """
        found = await place.capacity.pick(count)
        if found.devices:
            return found.devices
        self._schedule.rest(id, found.again)
        if found.others and place.name not in self._waits_told:
            self._waits_told.add(place.name)
            what = "a GPU" if count == 1 else f"{count} GPUs"
            where = f" on {place.elsewhere}" if place.elsewhere else ""
            verb = "is" if found.others == 1 else "are"
            self._commits.say(
                f"waiting for {what}{where}: {found.others} of "
                f"{len(place.capacity.devices)} {verb} in use by another run"
            )
        return ()

    def _make_again(self, node: Node, content: str) -> None:
        """Run the step that produced a lost output again."""
        producer = next(
            each.producer
            for each in node.upstream
            if self._steps.made[each.producer].outputs.get(each.output) == content
        )
        self._steps.forget_made(producer)
        id = self._steps.plan.nodes[producer].id
        self._schedule.make_again(id, "its output was on a lost host")

    def _no_host_left(self) -> Cause:
        name = self._pool.name
        lost = "; ".join(self._pool.lost) or "none is large enough"
        fix = ""
        if self._pool.is_priced:
            fix = (
                f"list the offers with `recipe offers --driver {name}`, "
                f"and check the account with `recipe doctor --driver {name}`"
            )
        return Cause(StepFailure.UNPLACED, f"no host is left for the step: {lost}", fix)
