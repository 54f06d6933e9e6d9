"""What is worth an alert about a run that works: rules as data, and a look at what they judge.  Each is sent once a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..storage.records.ledger import LeaseRow, Ledger, of_user
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace

EVERY: Final = 30.0
"""Seconds between two looks."""
LOOKED_AT: Final = 200
"""Runs, the newest, among which those that work are looked for."""


class RunCondition(NamedTuple):
    """What is known of a run at one look."""

    coming: float = 0.0  # minutes since a machine was asked for that is not up
    silent: float = 0.0  # minutes since its worker was seen last
    hours: float = 0.0  # of its time, as a share of its limit
    cost: float = 0.0  # the same of its cost
    full: float = 0.0  # the used share of the disk
    waits: float = 0.0  # minutes that the oldest message has waited


class AlertRule(NamedTuple):
    """An alert where a value of `Seen` is above a limit."""

    name: str
    value: str
    above: float
    words: str  # the value stands for {}


RULES: Final = (
    AlertRule("provisioning", "coming", 10.0, "the machine has been starting for {:.0f} minutes"),
    AlertRule(
        "no_beat", "silent", 5.0, "the worker of the run has not been seen for {:.0f} minutes"
    ),
    AlertRule("timeout_warning", "hours", 0.8, "{:.0%} of the time limit is used"),
    AlertRule("timeout_warning", "cost", 0.8, "{:.0%} of the cost limit is spent"),
    AlertRule("disk_low", "full", 0.9, "the workspace disk is {:.0%} full"),
    AlertRule(
        "outbox_stuck",
        "waits",
        60.0,
        "webhook deliveries have been waiting for {:.0f} minutes; `recipe outbox` lists them",
    ),
)


def find_alerts(seen: RunCondition) -> dict[str, str]:
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
        """Post the alerts of every run that works, each once."""
        runs, letters = self._ws.store.runs, self._ws.letters
        working = [row for row in runs.latest(last=LOOKED_AT) if row.state == "ACTIVE"]
        self._alive = {row.id: self._alive[row.id] for row in working if row.id in self._alive}
        if not working or letters is None:
            return
        for row, condition in self._look_at(working, now):
            for name, words in find_alerts(condition).items():
                id = f"{row.id}-{name}"
                if runs.outbox.knows(row.id, id):
                    continue
                alerts = letters.alert(row, name, id, now, words)
                if alerts:
                    runs.outbox.post(row.id, alerts)

    def _look_at(self, working: list[RunRow], now: float) -> Iterator[tuple[RunRow, RunCondition]]:
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
                yield (
                    row,
                    RunCondition(
                        coming=_minutes_coming(leases, now),
                        silent=(now - self._alive[row.id]) / 60,
                        hours=self._share_of_time(row, now),
                        cost=_share_of_cost(row, ledger, leases),
                        full=full,
                        waits=waits,
                    ),
                )

    def _share_of_time(self, row: RunRow, now: float) -> float:
        """Return how much of its time limit a run has used, 0 without one."""
        limit = _limits(row).get("time")
        return (now - self._began(row)) / float(limit) if limit else 0.0

    def _began(self, row: RunRow) -> float:
        """Return when work on a run began."""
        for event in self._ws.store.runs.events(row.id, 0, 5):
            if event.after == "ACTIVE":
                return event.at
        return row.created


def _limits(row: RunRow) -> Mapping[str, Any]:
    limits = row.data.get("limits")
    return limits if isinstance(limits, dict) else {}


def _minutes_coming(leases: Iterable[LeaseRow], now: float) -> float:
    """Return the longest time since a machine was asked for that is not up yet."""
    asked = [lease.asked for lease in leases if lease.state in ("ASKED", "COMING")]
    return (now - min(asked)) / 60 if asked else 0.0


def _share_of_cost(row: RunRow, ledger: Ledger, leases: Iterable[LeaseRow]) -> float:
    """Return how much of its cost limit a run has spent, 0 without one."""
    limit = _limits(row).get("cost")
    if not limit:
        return 0.0
    costs = ledger.costs([lease.key for lease in leases]).values()
    return sum(spent.usd for spent in costs) / float(limit)
