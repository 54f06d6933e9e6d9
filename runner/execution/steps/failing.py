"""An attempt failed or never began: the step waits for another try, or has failed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Final

from drivers.base import DriverError, Exit, HostLost

from ...digest import Digest
from ...errors import RecipeError
from ...hosts.place.capacity import SOONEST_LOOK
from ...hosts.place.place import Place
from ...planning.judge import NOTHING
from ...planning.plan import ALLOW_FAILURE
from ...planning.schedule import BUSY, Outcome, State
from .adjusting import smaller
from .groups import with_data
from .work import Failure, Work

LINES: Final = 10
"""Lines of its log that are stored with the failure of a step."""
LONGEST_LINE: Final = 200


def fail(
    work: Work,
    id: str,
    reason: str,
    words: str,
    hint: str = "",
    tail: bytes = b"",
    log: str = "",
    left: str = "",
    error: str = "",
    *,
    saved: bool = False,
    exit: Exit | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """End a RUNNING step's attempt badly.

    `words` say how it ended, and `error` why, if its log shows that.
    `tail` and `log` are what it printed, `left` the directory of what it wrote; `saved`: it left a new checkpoint.
    """
    work.control.disturbed = True
    adjusted = smaller(work, id) if reason == "oom" else ""
    moves = work.scheduler.end(id, Outcome(False, reason, words, saved, bool(adjusted)))
    own = next(move for move in moves if move.id == id)
    facts: dict[str, object] = {"error": error, "fix": hint, "warnings": list(warnings)}
    if exit is not None:
        facts |= {"exit": exit.code, "signal": exit.signal}
    if own.after == State.FAILED:
        facts["tail"] = last_lines(tail)
    known = {name: value for name, value in facts.items() if value or value == 0}
    work.groups.record(with_data(moves, id, known))
    if own.after == State.QUEUED and adjusted:
        work.commits.say(f"{id} ran out of memory: it is tried with {adjusted}")
        work.groups.record(
            work.scheduler.adopt(id, f"it ran out of memory, and is tried with {adjusted}")
        )
    elif own.after == State.QUEUED:
        wait = own.data.get("wait", 0.0)
        work.resting[id] = time.monotonic() + (
            float(wait) if isinstance(wait, (int, float)) else 0.0
        )
    elif own.after == State.FAILED:
        work.made[work.plan.index[id]] = NOTHING
        text = work.commits.masker.text
        work.failures.append(
            Failure(
                id,
                text(words or reason),
                tail,
                log,
                text(hint),
                left,
                reason,
                text(error or words or reason),
                bool(work.plan.nodes[work.plan.index[id]].flags & ALLOW_FAILURE),
            )
        )


def last_lines(tail: bytes) -> list[str]:
    """The last lines of what a step printed, as they are stored with its failure."""
    lines = [line.rstrip() for line in tail.decode(errors="replace").splitlines()]
    return [line[:LONGEST_LINE] for line in lines if line][-LINES:]


def fail_unstarted(work: Work, id: str, reason: str, words: str, hint: str = "") -> None:
    """Fail a QUEUED step that could not be started."""
    work.groups.record([work.scheduler.start(id)])
    fail(work, id, reason, words, hint)


def wait_again(work: Work, id: str, key: Digest | None = None) -> None:
    """It did not begin, for a GPU was taken in the moment before or its host is gone: the step waits again, at no cost to its retries."""
    if key is not None:
        work.commits.release_after_flush(key)
    work.groups.record(work.scheduler.end(id, Outcome(False, BUSY)))
    work.resting[id] = time.monotonic() + SOONEST_LOOK


def lose(work: Work, place: Place, error: HostLost) -> None:
    """A host is gone, or some of a place with several: nothing starts there any more, and others take their place if there are any."""
    for gone, why in (place.gone or {place: str(error)}).items():
        if not gone.lost:
            gone.lost = why
            work.commits.say(f"{gone.name} is lost: {why}")
            work.replacing += 1
            work.beside(replaced(work, gone, work.host_pool.replace(gone)))


async def replaced(work: Work, place: Place, asking: Awaitable[Sequence[Place]]) -> None:
    """Take the places that are being asked for instead of one that is lost or about to end."""
    try:
        for found in await asking:
            await work.attempts.hooks_of(found).setup()
            work.commits.say(
                f"{found.name} takes {'its place' if place.lost else f'the place of {place.name}'}"
            )
    except (RecipeError, DriverError) as error:
        work.commits.say(str(error))
    finally:
        work.replacing -= 1
        work.wake()
