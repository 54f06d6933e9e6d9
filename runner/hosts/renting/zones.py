"""Choose the zone for machines that are the nodes of one step.  Decisions only, no requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drivers.base import Need, Offer


def zone_of(offer: Offer) -> str:
    """Return the zone of an offer with its machine type, because the nodes of one step must be alike."""
    return " ".join(filter(None, (offer.data.get("zone", offer.region), offer.data.get("shape"))))


class Zones:
    """The chosen zone of each need, and the zones with too few machines."""

    def __init__(self) -> None:
        self._chosen: dict[Need, str] = {}
        self._left: defaultdict[Need, set[str]] = defaultdict(set)

    def zone_for(self, need: Need) -> str:
        """Return the zone of a need on any market; empty before one is chosen."""
        return self._chosen.get(replace(need, market="any"), "")

    def filter_offers(
        self, need: Need, offers: Iterable[Offer], there: Sequence[str]
    ) -> list[Offer]:
        """Return the offers in the zone of a need.

        Before a zone is chosen, these are the offers in all zones that were not given up.

        `there` are the zones of the need's running machines, which an earlier worker may have rented.
        """
        left = self._left[replace(need, market="any")]
        up = [zone for zone in there if zone not in left]
        zone = self.zone_for(need) or (max(up, key=up.count) if up else "")
        fit = [offer for offer in offers if zone_of(offer) not in left]
        return [offer for offer in fit if not zone or zone_of(offer) == zone]

    def choose(self, need: Need, offer: Offer) -> None:
        """Choose the zone of an offer for a need."""
        self._chosen[replace(need, market="any")] = zone_of(offer)

    def give_up(self, need: Need, there: Sequence[str]) -> str:
        """Give up the zone of a need and return it; empty if none was chosen."""
        key = replace(need, market="any")
        zone = self._chosen.pop(key, "") or next(iter(there), "")
        if zone in self._left[key]:
            return ""
        self._left[key].update({zone} - {""})
        return zone
