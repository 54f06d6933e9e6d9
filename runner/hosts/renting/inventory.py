"""The places that a run holds, by their leases: which serve a need, which are about to end, which are not needed.  Decides, and does nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from drivers.base import Need, Offer

from ...storage.records.ledger import LeaseRow
from .money import leave_at
from .needs import covers

if TYPE_CHECKING:
    from ..place.place import Place

IDLE: Final = 120.0
"""Seconds that a machine that costs money is kept with nothing to do."""


@dataclass(slots=True)
class Held:
    """A place, and the leases that it stands on."""

    place: Place
    offer: Offer
    leases: list[LeaseRow]
    idle_since: float

    def serves(self, need: Need) -> bool:
        """Whether it does for a need, on whichever market it was rented."""
        return self.place.image == need.image and covers(self.offer, replace(need, market="any"))


class Inventory:
    """What one run holds.  `ends`: leases have an end at which what runs has to be home, because they cost money."""

    def __init__(self, idle: float = IDLE, *, ends: bool = False) -> None:
        self.held: list[Held] = []
        self.coming: list[Need] = []
        """Needs for which a machine was asked that is not up yet."""
        self._idle, self._ends = idle, ends
        self._succeeded: set[str] = set()
        """Keys of leases about to end, in whose place another was asked for."""

    def __len__(self) -> int:
        return len(self.held) + len(self.coming)

    @property
    def places(self) -> list[Place]:
        return [held.place for held in self.held]

    def add(self, place: Place, offer: Offer, leases: Sequence[LeaseRow]) -> None:
        self.held.append(Held(place, offer, list(leases), time.monotonic()))

    def drop(self, place: Place) -> tuple[list[LeaseRow], list[Place]]:
        """Hold a place no more, nor the others on its leases: these leases, and those others."""
        rows = {row.key: row for held in self.held if held.place is place for row in held.leases}
        with_it = [
            held.place
            for held in self.held
            if held.place is not place and any(row.key in rows for row in held.leases)
        ]
        self.held = [
            held for held in self.held if held.place is not place and held.place not in with_it
        ]
        return list(rows.values()), with_it

    def serving(self, need: Need) -> list[Place]:
        """Places that do for a need, and on which something may begin."""
        return [
            held.place
            for held in self.held
            if held.serves(need) and not held.place.lost and not held.place.leaving
        ]

    def machines(self, need: Need) -> int:
        """How many machines that do for this need are up, or were asked for."""
        anywhere = replace(need, market="any")
        coming = sum(replace(each, market="any") == anywhere for each in self.coming)
        return coming + len(self.serving(need))

    def spare(
        self, needs: Mapping[Need, int], awaited: Collection[Place] = ()
    ) -> list[tuple[Place, str]]:
        """Rented machines that are to be given back, and why: no step has such a need any more, or there was nothing to do for a while.

        `needs` are those of unfinished steps, with how many of these are QUEUED.  On those `awaited` an earlier worker's attempt may still run.
        """
        now, found = time.monotonic(), []
        for held in self.held:
            served = [count for need, count in needs.items() if held.serves(need)]
            busy = held.place.capacity.busy or bool(served and held.place in awaited)
            if held.place.leaving and not busy:
                found.append((held.place, held.place.leaving))
            elif busy or any(served):
                held.idle_since = now
            elif not served:
                found.append((held.place, "no unfinished step needs it"))
            elif now - held.idle_since >= self._idle:
                found.append((held.place, f"it had nothing to do for {self._idle:g} s"))
        return found

    def overdue(self) -> list[tuple[Offer, LeaseRow]]:
        """The leases on which what runs has to stop now, to be brought home before they end."""
        now = time.time()
        return [
            (held.offer, row)
            for held in self.held
            for row in held.leases
            if now >= leave_at(row.asked, row.until)
        ]

    def leaving(self) -> list[Place]:
        """Places that are about to be taken away, or whose time is over."""
        now = time.time()
        for held in self.held:
            spent = self._ends and any(now >= leave_at(row.asked, row.until) for row in held.leases)
            if not held.place.leaving and (spent or now >= held.place.leave_at):
                held.place.leaving = "its time is over"
        return [held.place for held in self.held if held.place.leaving]

    def leaving_keys(self) -> set[str]:
        """Keys of the leases whose machine is about to be given back."""
        return {
            row.key
            for held in self.held
            if held.place.leaving or held.place.lost
            for row in held.leases
        }

    def ending(self) -> list[Place]:
        """One place of each lease that has begun to end since the last look."""
        found = {
            row.key: held.place
            for held in self.held
            if held.place.leaving
            for row in held.leases
            if row.key not in self._succeeded
        }
        self._succeeded |= found.keys()
        return list(found.values())

    def succeeded(self, place: Place) -> bool:
        """Whether another place was asked for in the place of this one, or it is not held any more."""
        return not any(
            held.place is place and self._succeeded.isdisjoint(row.key for row in held.leases)
            for held in self.held
        )

    def unused_leases(self) -> list[Place]:
        """One place of each lease that is about to end and on which nothing runs any more."""
        found: dict[str, Place] = {}
        busy = {
            row.key
            for held in self.held
            if held.place.capacity.busy or not held.place.leaving
            for row in held.leases
        }
        for held in self.held:
            found |= {row.key: held.place for row in held.leases if row.key not in busy}
        return list(found.values())


def places_named(places: Collection[Place], names: Sequence[str]) -> list[Place]:
    """The places with these names, by rank; empty where one of them is not there."""
    known = {place.name: place for place in places if not place.lost}
    return [known[name] for name in names] if known.keys() >= set(names) else []
