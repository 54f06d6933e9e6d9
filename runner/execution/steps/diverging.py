"""Tell of a loss that is no number, once an attempt: an event, an alert and, where its recipe says `on_nan: stop`, the end of the attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...planning.ids import readable
from ...planning.schedule import Move, State
from .alerts import raise_alert
from .attempts import Running
from .control import stop

if TYPE_CHECKING:
    from .work import Work

NAN: Final = "nan"
"""The reason of the event, and of a step that ended for it."""
ALERT: Final = "loss_not_finite"


def tell_diverged(work: Work, id: str, running: Running, words: str) -> None:
    """Tell once of a loss of an attempt.  Raises Infrastructure where the database does not answer: then nothing is told."""
    if running.name in work.diverged:
        return
    ends = work.spec(id).ends_on_nan
    then = "the step is stopped (`on_nan: stop`)" if ends else "the step goes on"
    raise_alert(work.ws, work.commits, ALERT, f"{readable(id)}: {words}; {then}", id)
    work.diverged[running.name] = words
    data = {"message": words}
    work.groups.record([Move("step", id, State.RUNNING, State.RUNNING, NAN, data)])
    if ends and id in work.running:
        work.beside(stop(running))
