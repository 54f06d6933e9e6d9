"""Choose the zone for machines that are the nodes of one step.  Decisions only, no requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drivers.base import Need, Offer


def zone_of(offer: Offer) -> str:
    """Return the zone of an offer with its machine type, because the nodes of one step must be
    alike.
    """
    return " ".join(filter(None, (offer.data.get("zone", offer.region), offer.data.get("shape"))))


class Zones:
    """The chosen zone of each need, and the zones with too few machines."""

    def __init__(self) -> None:
        self._chosen: dict[Need, str] = {}
        self._given_up: defaultdict[Need, set[str]] = defaultdict(set)

    def zone_for(self, need: Need) -> str:
        """Return the chosen zone of a need on any market; empty before the choice."""
        return self._chosen.get(replace(need, market="any"), "")

    def filter_offers(
        self, need: Need, offers: Iterable[Offer], there: Sequence[str]
    ) -> list[Offer]:
        """Return the offers in the zone of a need, before the choice in all zones that were not
        given up.

        `there` are the zones of the need's running machines.  An earlier worker may have rented
        them, so the most frequent zone counts as chosen.
        """
        given_up = self._given_up[replace(need, market="any")]
        zone = self.zone_for(need)
        running = [each for each in there if each not in given_up]
        if not zone and running:
            zone = max(running, key=running.count)
        remaining = [offer for offer in offers if zone_of(offer) not in given_up]
        if not zone:
            return remaining
        return [offer for offer in remaining if zone_of(offer) == zone]

    def choose(self, need: Need, offer: Offer) -> None:
        """Choose the zone of an offer for a need."""
        self._chosen[replace(need, market="any")] = zone_of(offer)

    def give_up(self, need: Need, there: Sequence[str]) -> str:
        """Give up the zone of a need and return the zone; empty without a zone to give up.

        Without a chosen zone, this is the first zone in `there`.
        """
        key = replace(need, market="any")
        zone = self._chosen.pop(key, "") or next(iter(there), "")
        if not zone or zone in self._given_up[key]:
            return ""
        self._given_up[key].add(zone)
        return zone
