"""The inventory of a run's remote places and their leases.

It decides which places serve a need, which leases end, and which machines are unused.  Nothing here
calls a provider.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from drivers.base import Need, Offer

from ...storage.records.ledger import LeaseRow
from .money import stop_time
from .needs import covers

if TYPE_CHECKING:
    from ..place.place import Place

IDLE: Final = 120.0
"""Seconds that an idle paid machine is kept."""


@dataclass(slots=True)
class HeldPlace:
    """A place and its leases."""

    place: Place
    offer: Offer
    leases: list[LeaseRow]
    idle_since: float
    """Monotonic time since which no step ran there or waited for the place."""

    @property
    def is_open(self) -> bool:
        """Whether the place accepts new steps."""
        return not self.place.lost and not self.place.leaving

    def serves(self, need: Need) -> bool:
        """Return whether the place fits a need, on any market."""
        return self.place.image == need.image and covers(self.offer, replace(need, market="any"))

    def has_any(self, keys: Collection[str]) -> bool:
        """Return whether one of the place's leases has one of these keys."""
        return any(row.key in keys for row in self.leases)


class Inventory:
    """The remote places of one run.

    An idle place is kept for `idle` seconds.  With `ends`, leases have an end by which outputs must
    be downloaded.
    """

    def __init__(self, idle: float = IDLE, *, ends: bool = False) -> None:
        self.held: list[HeldPlace] = []
        self.coming: list[Need] = []
        """Needs with a requested machine that is not up yet."""
        self._idle, self._ends = idle, ends
        self._replaced: set[str] = set()
        """Keys of ending leases for which a replacement was requested."""

    def __len__(self) -> int:
        return len(self.held) + len(self.coming)

    @property
    def places(self) -> list[Place]:
        return [held.place for held in self.held]

    def add(self, place: Place, offer: Offer, leases: Sequence[LeaseRow]) -> None:
        self.held.append(HeldPlace(place, offer, list(leases), time.monotonic()))

    def drop(self, place: Place) -> tuple[list[LeaseRow], list[Place]]:
        """Remove a place and all other places on its leases; return these leases and the other places."""
        rows = {row.key: row for row in self.leases_of(place)}
        others, remaining = list[HeldPlace](), list[HeldPlace]()
        for held in self.held:
            if held.place is place:
                continue
            if held.has_any(rows):
                others.append(held)
            else:
                remaining.append(held)
        self.held = remaining
        return list(rows.values()), [held.place for held in others]

    def leases_of(self, place: Place) -> Sequence[LeaseRow]:
        """Return the leases of a place; empty if it is not in the inventory."""
        for held in self.held:
            if held.place is place:
                return held.leases
        return ()

    def find_places(self, need: Need) -> list[Place]:
        """Return the places that fit a need and accept new steps."""
        return [held.place for held in self.held if held.serves(need) and held.is_open]

    def count_machines(self, need: Need) -> int:
        """Return the number of machines for a need, running or requested."""
        anywhere = replace(need, market="any")
        coming = sum(replace(each, market="any") == anywhere for each in self.coming)
        return coming + len(self.find_places(need))

    def find_spare(
        self, needs: Mapping[Need, int], awaited: Collection[Place] = ()
    ) -> list[tuple[Place, str]]:
        """Return the rented machines to release, with reasons.

        A machine is released if it leaves anyway, if no unfinished step needs it, or if it was idle
        too long.

        `needs` maps the needs of unfinished steps to the number of QUEUED steps.  On places
        `awaited`, an earlier worker's attempt may still run.
        """
        now, spare = time.monotonic(), []
        for held in self.held:
            queued = [count for need, count in needs.items() if held.serves(need)]
            busy = held.place.capacity.busy or bool(queued and held.place in awaited)
            if held.place.leaving and not busy:
                spare.append((held.place, held.place.leaving))
            elif busy or any(queued):
                held.idle_since = now
            elif not queued:
                spare.append((held.place, "no remaining step needs this machine"))
            elif now - held.idle_since >= self._idle:
                spare.append((held.place, f"the machine was idle for {self._idle:g} s"))
        return spare

    def find_overdue(self) -> list[tuple[Offer, LeaseRow]]:
        """Return the leases whose steps must stop now, so that their outputs are downloaded in
        time.
        """
        now = time.time()
        return [(held.offer, row) for held, row in self._list_leases() if _is_overdue(row, now)]

    def _list_leases(self) -> Iterator[tuple[HeldPlace, LeaseRow]]:
        """Yield each lease of each place; several places may be on one lease."""
        for held in self.held:
            for row in held.leases:
                yield held, row

    def mark_leaving(self) -> list[Place]:
        """Mark the places whose lease or host is about to end; return all leaving places."""
        now = time.time()
        for held in self.held:
            lease_ends = self._ends and any(_is_overdue(row, now) for row in held.leases)
            if not held.place.leaving and (lease_ends or now >= held.place.leave_at):
                held.place.leaving = "its lease ends"
        return [held.place for held in self.held if held.place.leaving]

    def leaving_keys(self) -> set[str]:
        """Return the keys of leases whose machine is about to be released."""
        return {row.key for held, row in self._list_leases() if not held.is_open}

    def take_ending(self) -> list[Place]:
        """Return one place per lease that started to end since the last call.

        From then on, a replacement counts as requested for these leases.
        """
        ending: dict[str, Place] = {}
        for held, row in self._list_leases():
            if held.place.leaving and row.key not in self._replaced:
                ending[row.key] = held.place
        self._replaced |= ending.keys()
        return list(ending.values())

    def has_successor(self, place: Place) -> bool:
        """Return whether a replacement for a place was requested, or the place is no longer in the
        inventory.
        """
        for held in self.held:
            if held.place is place:
                return held.has_any(self._replaced)
        return True

    def find_unused_leases(self) -> list[Place]:
        """Return one place per ending lease without a running step."""
        used: set[str] = set()
        for held, row in self._list_leases():
            if held.place.capacity.busy or not held.place.leaving:
                used.add(row.key)
        unused: dict[str, Place] = {}
        for held, row in self._list_leases():
            if row.key not in used:
                unused[row.key] = held.place
        return list(unused.values())


def find_places_named(places: Collection[Place], names: Sequence[str]) -> list[Place]:
    """Return the places with these names, by rank; empty if a name is missing or its place is lost."""
    known = {place.name: place for place in places if not place.lost}
    if not known.keys() >= set(names):
        return []
    return [known[name] for name in names]


def _is_overdue(row: LeaseRow, now: float) -> bool:
    """Return whether steps on a leased machine must stop, so that their outputs are downloaded in
    time.
    """
    return now >= stop_time(row.asked, row.until)
