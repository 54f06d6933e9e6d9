"""In which zone machines are rented that are the nodes of one step.  Decides, and does nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drivers.base import Need, Offer


def zone_of(offer: Offer) -> str:
    """The zone in which a machine would be, and its kind: nodes of one step are alike."""
    return " ".join(filter(None, (offer.data.get("zone", offer.region), offer.data.get("shape"))))


class Zones:
    """The zone of each need, once a first machine of it was asked for, and those that have too few."""

    def __init__(self) -> None:
        self._chosen: dict[Need, str] = {}
        self._left: defaultdict[Need, set[str]] = defaultdict(set)

    def of(self, need: Need) -> str:
        """The zone of a need on any market; empty before one is chosen."""
        return self._chosen.get(replace(need, market="any"), "")

    def among(self, need: Need, offers: Iterable[Offer], there: Sequence[str]) -> list[Offer]:
        """The offers in the zone of a need; in all zones that were not left before one is chosen.

        `there`: the zones of the machines of this need that are up, which an earlier worker may have rented.
        """
        left = self._left[replace(need, market="any")]
        up = [zone for zone in there if zone not in left]
        zone = self.of(need) or (max(up, key=up.count) if up else "")
        fit = [offer for offer in offers if zone_of(offer) not in left]
        return [offer for offer in fit if not zone or zone_of(offer) == zone]

    def choose(self, need: Need, offer: Offer) -> None:
        """Rent the machines of a need where this offer is."""
        self._chosen[replace(need, market="any")] = zone_of(offer)

    def leave(self, need: Need, there: Sequence[str]) -> str:
        """Rent no more in the zone of a need, which has too few machines: which that was, empty where none was chosen."""
        key = replace(need, market="any")
        zone = self._chosen.pop(key, "") or next(iter(there), "")
        if zone in self._left[key]:
            return ""
        self._left[key].update({zone} - {""})
        return zone
