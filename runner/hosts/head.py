"""The head of a stack: an existing server that is node 0 of every multi-node step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivers.base import DriverError, Lease, Offer, Traits

from ..errors import CannotRun, Infrastructure, Invalid, Problem
from ..storage.workspace import Workspace
from .connect import Connector
from .place import rendezvous
from .place.capacity import remove_taken
from .place.rendezvous import RendezvousNode
from .renting.leases import create_driver

if TYPE_CHECKING:
    from drivers.devices import Device

    from ..planning.step import StepSpec
    from ..settings import Head
    from .place.place import Place


class StackHead:
    """The head of one run.

    It needs no lease, runs one step at a time, and runs no single-node steps.

    `named` is the Python for steps without a lock.
    """

    def __init__(
        self,
        ws: Workspace | None = None,
        head: Head | None = None,
        named: str = "",
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._ws, self._head, self._named, self._say = ws, head, named, say
        self.places: Sequence[Place] = ()
        """The head's place; empty if the stack has no head."""

    def leads(self, spec: StepSpec) -> bool:
        """Return whether the head is node 0 of a step."""
        return bool(self.places) and spec.node_count > 1

    def count_workers(self, spec: StepSpec) -> int:
        """Return the number of driver places that a step needs: its nodes without the head."""
        return spec.node_count - int(self.leads(spec))

    def find_fitting(self, spec: StepSpec, places: Sequence[Place]) -> Sequence[Place]:
        """Return the places that could run the step, or one node of the step with GPUs of its own."""
        fitting = [place for place in places if place.fits(spec.resources.room)]
        if spec.node_count > 1:
            return select_disjoint(fitting, spec.resources.gpus or 0)
        return fitting

    def choose_places(self, spec: StepSpec, places: Sequence[Place]) -> Sequence[Place]:
        """Return the places of a step by rank: the head, if the step uses it, then workers.

        Empty if there are too few.

        Without a head, all nodes are in one zone.
        """
        gpus, count = spec.resources.gpus or 0, self.count_workers(spec)
        if not self.leads(spec):
            return _choose_in_one_zone(places, gpus, count)
        if not all(head.has_room({}) for head in self.places):
            return []
        workers = select_disjoint(places, gpus)[:count]
        return [*self.places, *workers] if len(workers) == count else []

    async def open(self, traits: Traits, *, unused: bool) -> None:
        """Connect to the head, for workers of a driver with these traits.

        If `unused`, check that its port is free.

        Raises Infrastructure if the head cannot be used or its port is taken; Invalid, CannotRun.
        """
        head, ws = self._head, self._ws
        if head is None or ws is None:
            return
        if traits.allocates:
            clash = "the stack has a head, but its driver allocates all nodes of a step together"
            fix = "remove `head` from the stack, or choose another driver"
            raise Invalid([Problem("clash", clash, fix=fix)])
        settings = ws.config.driver(head.driver)
        host_settings = _find_host_settings(settings, head)
        driver = create_driver(
            head.driver, {**settings, "hosts": [host_settings]}, (), str(ws.home)
        )
        # The settings schema allows only drivers with visitable hosts as head.
        fix = f"run `recipe doctor --driver {head.driver} --host {head.host}` to test the connection step by step"
        async for name, host in driver.visit():
            try:
                if isinstance(host, DriverError):
                    raise host
                host.deadman = settings.get("deadman")  # `visit` sets no deadman
                lease = Lease(head.driver, name, "head", {"python": host.python})
                place = await Connector(ws, head.driver, self._named, self._say).create_place(
                    Offer(head.driver, name), lease, host, driver.traits, slots=1
                )
                place.port, self.places = head.port, [place]
                if unused:
                    node = RendezvousNode(
                        place.name, place.host, place.address, place.python, compared=False
                    )
                    await rendezvous.check_port_free(node, head.port)
            except (CannotRun, DriverError) as error:
                raise Infrastructure(
                    f"cannot use the head {head.host}: {error}",
                    fix=getattr(error, "fix", "") or fix,
                ) from error


def _find_host_settings(settings: Mapping[str, Any], head: Head) -> dict[str, object]:
    """Return the driver's settings of the head's host, with the host and address of the head."""
    own: dict[str, object] = {}
    for entry in settings.get("hosts", ()):
        if isinstance(entry, Mapping) and entry.get("host") == head.host:
            own = dict(entry)
            break
    return {**own, "host": head.host, "address": head.address}


def _choose_in_one_zone(places: Sequence[Place], gpus: int, count: int) -> Sequence[Place]:
    """Return `count` disjoint places of one zone; empty if no zone has that many."""
    for zone in dict.fromkeys(place.zone for place in places):
        in_zone = [place for place in places if place.zone == zone]
        chosen = select_disjoint(in_zone, gpus)
        if len(chosen) >= count:
            return chosen[:count]
    return []


def select_disjoint(places: Sequence[Place], gpus: int) -> Sequence[Place]:
    """Return the places with enough GPUs that no earlier place uses.

    Hosts on one machine see the same GPUs.
    """
    if not gpus:
        return places
    disjoint, taken = list["Place"](), list["Device"]()
    for place in places:
        own = remove_taken(place.capacity.devices, taken)[:gpus]
        if len(own) == gpus:
            disjoint.append(place)
            taken += own
    return disjoint
