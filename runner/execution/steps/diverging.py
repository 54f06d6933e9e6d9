"""Reports of a NaN or infinite training loss, once for each attempt.

A report is an event and an alert. With `on_nan: stop` it also stops the attempt.
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
"""Reason of the event for a NaN or infinite loss, and of a step that was stopped."""
ALERT: Final = "loss_not_finite"


class DivergedLosses:
    """Reporter of a run's attempts whose loss is NaN or infinite."""

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
        self._told: dict[str, str] = {}  # description of the loss, by attempt name

    def words_of(self, attempt: Attempt) -> str:
        """Return the reported description of an attempt's NaN or infinite loss, or ""."""
        return self._told.get(attempt.name, "")

    def tell(self, id: str, attempt: Attempt, words: str) -> None:
        """Report the NaN or infinite loss of an attempt, once.

        Raises Infrastructure if the database does not answer; then nothing was reported.
        """
        if attempt.name in self._told:
            return
        ends = attempt.spec.options.ends_on_nan
        then = "the step is stopped (`on_nan: stop`)" if ends else "the step continues"
        raise_alert(self._ws, self._commits, ALERT, f"{readable(id)}: {words}; {then}", id)
        self._told[attempt.name] = words
        move = Move("step", id, State.RUNNING, State.RUNNING, NAN, {"message": words})
        self._journal.record([move])
        if ends and id in self._running:
            self._bell.run_in_background(attempt.stop())
