"""What is worth an alert about a run that works: rules as data, and a look at what they judge.  Each is sent once a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from ..storage.records.ledger import Ledger, of_user
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace

EVERY: Final = 30.0
"""Seconds between two looks."""
LOOKED_AT: Final = 200
"""Runs, the newest, among which those that work are looked for."""


class Seen(NamedTuple):
    """What is known of a run at one look."""

    coming: float = 0.0  # minutes since a machine was asked for that is not up
    silent: float = 0.0  # minutes since its worker was seen last
    hours: float = 0.0  # of its time, as a share of its limit
    cost: float = 0.0  # the same of its cost
    full: float = 0.0  # the used share of the disk
    waits: float = 0.0  # minutes that the oldest message has waited


class Rule(NamedTuple):
    """An alert where a value of `Seen` is above a limit."""

    name: str
    value: str
    above: float
    words: str  # the value stands for {}


RULES: Final = (
    Rule("provisioning", "coming", 10.0, "its machine has been coming up for {:.0f} minutes"),
    Rule("no_beat", "silent", 5.0, "no worker has been seen on it for {:.0f} minutes"),
    Rule("timeout_warning", "hours", 0.8, "{:.0%} of its time is used"),
    Rule("timeout_warning", "cost", 0.8, "{:.0%} of what it may cost is spent"),
    Rule("disk_low", "full", 0.9, "the disk of its workspace is {:.0%} full"),
    Rule(
        "outbox_stuck",
        "waits",
        60.0,
        "reports have waited for {:.0f} minutes; `recipe outbox` shows them",
    ),
)


def noticed(seen: Seen) -> dict[str, str]:
    """The alerts that a look gives, by name, with words."""
    found: dict[str, str] = {}
    for rule in RULES:
        value = getattr(seen, rule.value)
        if value > rule.above:
            found.setdefault(rule.name, rule.words.format(value))
    return found


class Watch:
    """Looks at the runs of one workspace, and puts the alerts into the outbox."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._due = time.monotonic() + EVERY
        self._alive: dict[str, float] = {}  # when a run's worker was seen last, by our own clock

    def look(self) -> None:
        """Look, if it is time."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY
            self.judge(time.time())

    def judge(self, now: float) -> None:
        """Judge every run that works."""
        runs, letters = self._ws.store.runs, self._ws.letters
        working = [row for row in runs.latest(last=LOOKED_AT) if row.state == "ACTIVE"]
        self._alive = {row.id: self._alive[row.id] for row in working if row.id in self._alive}
        if not working or letters is None:
            return
        for row, seen in self._seen(working, now):
            for name, words in noticed(seen).items():
                id = f"{row.id}-{name}"
                if not runs.outbox.knows(row.id, id) and (
                    alerts := letters.alert(row, name, id, now, words)
                ):
                    runs.outbox.post(row.id, alerts)

    def _seen(self, working: list[RunRow], now: float) -> Iterator[tuple[RunRow, Seen]]:
        runs = self._ws.store.runs
        disk = os.statvfs(self._ws.home)
        full = 1 - disk.f_bavail / disk.f_blocks if disk.f_blocks else 0.0
        oldest = runs.outbox.oldest()
        waits = (now - oldest.created) / 60 if oldest is not None else 0.0
        with Ledger.open(of_user(self._ws.environ), read_only=True) as ledger:
            for row in working:
                if row.id not in self._alive or runs.live(row.id):
                    self._alive[row.id] = now
                leases = ledger.of_run(row.id)
                coming = max(
                    (
                        (now - lease.asked) / 60
                        for lease in leases
                        if lease.state in ("ASKED", "COMING")
                    ),
                    default=0.0,
                )
                found = row.data.get("limits")
                limits = found if isinstance(found, dict) else {}
                cost = (
                    sum(
                        spent.usd
                        for spent in ledger.costs([lease.key for lease in leases]).values()
                    )
                    if limits.get("cost")
                    else 0.0
                )
                hours = (now - self._began(row)) / limits["time"] if limits.get("time") else 0.0
                share = cost / limits["cost"] if limits.get("cost") else 0.0
                yield row, Seen(coming, (now - self._alive[row.id]) / 60, hours, share, full, waits)

    def _began(self, row: RunRow) -> float:
        """When work on a run began."""
        return next(
            (
                each.at
                for each in self._ws.store.runs.events(row.id, 0, 5)
                if each.after == "ACTIVE"
            ),
            row.created,
        )
