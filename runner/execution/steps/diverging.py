"""Tell of a loss that is no number, once an attempt.

It is an event, an alert and, where the recipe says `on_nan: stop`, the end of the attempt.
"""

from __future__ import annotations

from typing import Final

from ...planning.ids import readable
from ...planning.schedule import Move, State
from ...storage.workspace import Workspace
from .alerts import raise_alert
from .attempt import Attempt
from .bell import Bell
from .commit import GroupCommit
from .run_schedule import Journal
from .running_attempts import RunningAttempts

NAN: Final = "nan"
"""The reason of the event, and of a step that ended for it."""
ALERT: Final = "loss_not_finite"


class DivergedLosses:
    """The attempts of one run with a loss that is no number."""

    def __init__(
        self,
        ws: Workspace,
        commits: GroupCommit,
        journal: Journal,
        running: RunningAttempts,
        bell: Bell,
    ) -> None:
        self._ws, self._commits, self._journal = ws, commits, journal
        self._running, self._bell = running, bell
        self._told: dict[str, str] = {}  # words about the loss, by the attempt's name

    def words_of(self, attempt: Attempt) -> str:
        """What was told of an attempt's loss; empty for nothing."""
        return self._told.get(attempt.name, "")

    def tell(self, id: str, attempt: Attempt, words: str) -> None:
        """Tell once of a loss of an attempt.

        Raises Infrastructure where the database does not answer: then nothing is told.
        """
        if attempt.name in self._told:
            return
        ends = attempt.spec.options.ends_on_nan
        then = "the step is stopped (`on_nan: stop`)" if ends else "the step goes on"
        raise_alert(self._ws, self._commits, ALERT, f"{readable(id)}: {words}; {then}", id)
        self._told[attempt.name] = words
        move = Move("step", id, State.RUNNING, State.RUNNING, NAN, {"message": words})
        self._journal.record([move])
        if ends and id in self._running:
            self._bell.run_in_background(attempt.stop())
