"""Location of `temporary` outputs on hosts, and their download for steps on other hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from drivers.base import DriverError, HostLost

from ...errors import RecipeError, StoreUnavailable
from ...hosts.place.place import Place
from ...hosts.pool import HostPool
from ...logs import Log
from ...planning.ids import readable
from ...planning.plan import Node
from ...storage.content.files import Content
from ...storage.content.objects import Objects
from .bell import Bell
from .failing import Cause
from .judging import Judge
from .renting import Machines
from .run_plan import RunPlan

_log: Final = Log("loop")
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class HostOutputs:
    """Outputs of one run that exist only on its hosts."""

    def __init__(
        self,
        objects: Objects,
        steps: RunPlan,
        pool: HostPool,
        machines: Machines,
        judge: Judge,
        bell: Bell,
    ) -> None:
        self._objects, self._steps, self._pool = objects, steps, pool
        self._machines, self._judge, self._bell = machines, judge, bell
        self._coming: set[str] = set()  # contents being downloaded

    def absent(self, node: Node) -> list[str]:
        """Return the digests of a step's inputs from other steps that are not on this machine."""
        if not self._pool.is_remote:
            return []
        absent = []
        for each in node.upstream:
            content = self._steps.made[each.producer].outputs.get(each.output)
            if content is not None and not self._objects.has(Content(content)):
                absent.append(content)
        return absent

    def holders(
        self, contents: Collection[str], wants: Mapping[str, float] = NOTHING
    ) -> list[Place]:
        """Return the hosts that store all these contents and have the capacity `wants`."""
        fitting = [place for place in self._pool.places if place.fits(wants)]
        return [place for place in fitting if all(map(place.folder.holds, contents))]

    def are_coming(self, contents: Collection[str]) -> bool:
        """Return True if one of these contents is being downloaded."""
        return not self._coming.isdisjoint(contents)

    def bring(self, id: str, contents: Sequence[str]) -> None:
        """Start downloading contents for a step in the background, each content once."""
        for content in contents:
            if content in self._coming:
                continue
            places = self.holders([content])
            if places:
                self._coming.add(content)
                self._bell.run_in_background(self._bring(id, content, places[0]))

    async def _bring(self, id: str, content: str, place: Place) -> None:
        try:
            await place.folder.download_content(content)
        except HostLost as error:
            self._machines.lose(place, error)
        except StoreUnavailable as error:  # the step is judged again, and asks again
            _log.warning("%s: %s", readable(id), error)
        except RecipeError as error:
            self._judge.refuse(id, Cause("error", str(error), error.fix))
        except DriverError as error:
            self._judge.refuse(id, Cause("driver", str(error)))
        finally:
            self._coming.discard(content)
            self._bell.wake()
