"""`temporary` outputs that stayed on their hosts: which a step takes, who has them, and how they come here when it cannot run where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from drivers.base import DriverError, HostLost

from ...errors import RecipeError
from ...hosts.place.place import Place
from ...planning.plan import Node
from ...storage.content.files import Content
from .failing import Cause
from .work import Work

NOTHING: Mapping[str, float] = {}


def absent(work: Work, node: Node) -> list[str]:
    """What a step takes of earlier ones and that is not here."""
    if not work.host_pool.away:
        return []
    found = [work.steps.made[each.producer].outputs.get(each.output) for each in node.upstream]
    return [
        content
        for content in found
        if content is not None and not work.ws.objects.has(Content(content))
    ]


def holders(
    work: Work, contents: Collection[str], wants: Mapping[str, float] = NOTHING
) -> list[Place]:
    """The places that have all of these, and on which a step that takes so much could run."""
    return [
        place
        for place in work.host_pool.places
        if place.could(wants) and all(place.folder.holds(content) for content in contents)
    ]


def send_for(work: Work, id: str, contents: Sequence[str]) -> None:
    """Have these come here for a step, each once, while other steps run."""
    for content in contents:
        if content not in work.coming and (places := holders(work, [content])):
            work.coming.add(content)
            work.bell.run_in_background(_come(work, id, content, places[0]))


async def _come(work: Work, id: str, content: str, place: Place) -> None:
    try:
        await place.folder.bring(content)
    except HostLost as error:
        work.machines.lose(place, error)
    except RecipeError as error:
        work.refused[id] = Cause("error", str(error), error.fix)
    except DriverError as error:
        work.refused[id] = Cause("driver", str(error))
    finally:
        work.coming.discard(content)
        work.bell.wake()
