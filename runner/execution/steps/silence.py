"""Alerts about machines that do not answer for minutes, and about their recovery."""

from __future__ import annotations

import time
from typing import Final

from ...hosts.link.contact import LOST_AFTER
from ...hosts.place.place import Place
from ...hosts.pool import HostPool
from ...storage.workspace import Workspace
from ..reporting import log_remote
from .alerts import raise_alert
from .commit import GroupCommit

MINUTES: Final = 5.0
"""Default of `silent_minutes` in [alerts]."""
EVERY: Final = 1.0
"""Interval between checks of the machines, in seconds."""


class Silences:
    """Alerts about unresponsive machines of one run."""

    def __init__(self, ws: Workspace, commits: GroupCommit, host_pool: HostPool) -> None:
        self._ws, self._commits, self._pool = ws, commits, host_pool
        self._minutes = ws.config.flags.get("alerts.silent_minutes", MINUTES)
        self._since: dict[str, float] = {}  # start of a machine's silence
        self._told: set[str] = set()  # silent machines with an alert
        self._due = 0.0

    def check(self) -> None:
        """Check the responsiveness of each machine, at most once a second.

        Raises Infrastructure if the database does not answer; the next check then raises the alert.
        """
        now = time.monotonic()
        if not self._pool.is_remote or now < self._due:
            return
        self._due = now + EVERY
        for place in [each for held in self._pool.places for each in held.members]:
            silent = max(place.contact.silent_for, place.host.failing_for)
            if silent:
                self._since.setdefault(place.name, now - silent)
                self._silent(place, now - self._since[place.name])
            elif place.name in self._since:
                self._answers(place, now - self._since.pop(place.name))

    def _silent(self, place: Place, seconds: float) -> None:
        if seconds < 60 * self._minutes or place.name in self._told:
            return
        rest = f"its jobs may still run, and count as lost after {_minutes(LOST_AFTER)}"
        words = f"{place.name} has not answered for {_minutes(seconds)}; {rest}"
        self._alert("machine_silent", words, self._pool.instance_of(place))
        self._told.add(place.name)

    def _answers(self, place: Place, seconds: float) -> None:
        if place.name in self._told:
            words = f"{place.name} answers again, after {_minutes(seconds)}"
            self._alert("machine_answers", words, self._pool.instance_of(place))
            self._told.discard(place.name)

    def _alert(self, name: str, words: str, instance: str) -> None:
        raise_alert(self._ws, self._commits, name, words)
        log_remote(self._ws, self._commits.run, self._pool.name, instance, name)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
