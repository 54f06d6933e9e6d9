"""The head of a stack: a server that is there already, and node 0 of every step of several nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from drivers.base import DriverError, Lease, Offer, Traits

from ..errors import CannotRun, Infrastructure, Invalid, Problem
from ..storage.workspace import Workspace
from .connect import Connector
from .place import rendezvous
from .place.capacity import others
from .place.rendezvous import Node
from .renting.leases import driver_of

if TYPE_CHECKING:
    from drivers.devices import Device

    from ..planning.step import StepSpec
    from ..settings import Head
    from .place.place import Place


class Heading:
    """What leads the steps of several nodes of one run.  It takes no lease, runs one step at a time, and none of one node.

    `named`: the Python that was named for steps without a lock.
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
        """The place on the head; nothing where the stack has none."""

    def leads(self, spec: StepSpec) -> bool:
        """Whether a step has the head as its node 0."""
        return bool(self.places) and spec.node_count > 1

    def workers(self, spec: StepSpec) -> int:
        """On how many places of the driver a step runs: one for each node that is not the head."""
        return spec.node_count - int(self.leads(spec))

    def roomy(self, spec: StepSpec, places: Sequence[Place]) -> Sequence[Place]:
        """Those of these places where a step could run, or a node of one, each with GPUs that no other has."""
        could = [place for place in places if place.could(spec.resources.room)]
        return apart(could, spec.resources.gpus or 0) if spec.node_count > 1 else could

    def crew(self, spec: StepSpec, places: Sequence[Place]) -> Sequence[Place]:
        """The places of a step by rank: the head, where it takes one, and the first of these; none as long as they do not suffice."""
        heads = self.places if self.leads(spec) else ()
        if not all(head.has_room({}) for head in heads):
            return []
        zones = [""] if heads else list(dict.fromkeys(place.zone for place in places))
        for zone in zones:
            there = [place for place in places if heads or place.zone == zone]
            found = [*heads, *apart(there, spec.resources.gpus or 0)[: self.workers(spec)]]
            if len(found) == spec.node_count:
                return found
        return []

    async def open(self, traits: Traits, *, unused: bool) -> None:
        """Open the place on the head, for workers of a driver with these traits.  `unused`: nothing of ours can be at its port yet.

        Raises Infrastructure when it cannot be used, or somebody listens at its port; Invalid, CannotRun.
        """
        head, ws = self._head, self._ws
        if head is None or ws is None:
            return
        if traits.allocates:
            words = "the stack has a head, but its driver allocates all nodes of a step together"
            raise Invalid(
                [
                    Problem(
                        "clash", words, fix="remove `head` from the stack, or choose another driver"
                    )
                ]
            )
        settings = ws.config.driver(head.driver)
        others: Sequence[str | Mapping[str, object]] = settings.get("hosts", ())
        own = next(
            (
                dict(each)
                for each in others
                if isinstance(each, Mapping) and each.get("host") == head.host
            ),
            {},
        )
        driver = driver_of(
            head.driver,
            {**settings, "hosts": [{**own, "host": head.host, "address": head.address}]},
            (),
            str(ws.home),
        )
        # The schema of the settings names the drivers that may be a head: their hosts can be visited.
        fix = f"run `recipe doctor --driver {head.driver} --host {head.host}` to test the connection step by step"
        async for name, found in driver.visit():
            try:
                if isinstance(found, DriverError):
                    raise found
                found.deadman = settings.get(
                    "deadman"
                )  # of a host that is only looked at there is none
                lease = Lease(head.driver, name, "head", {"python": found.python})
                place = await Connector(ws, head.driver, self._named, self._say).place(
                    Offer(head.driver, name), lease, found, driver.traits, slots=1
                )
                place.port, self.places = head.port, [place]
                if unused:
                    await rendezvous.free(
                        Node(place.name, place.host, place.address, place.python, compared=False),
                        head.port,
                    )
            except (CannotRun, DriverError) as error:
                raise Infrastructure(
                    f"cannot use the head {head.host}: {error}",
                    fix=getattr(error, "fix", "") or fix,
                ) from error


def apart(places: Sequence[Place], gpus: int) -> Sequence[Place]:
    """Those of these places that have so many GPUs beside what the ones before them take: hosts on one machine have the same cards."""
    if not gpus:
        return places
    found, taken = list["Place"](), list["Device"]()
    for place in places:
        own = others(place.capacity.devices, taken)[:gpus]
        if len(own) == gpus:
            found.append(place)
            taken += own
    return found
