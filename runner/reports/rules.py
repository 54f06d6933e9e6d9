"""Alert rules for running runs, and their evaluation. Each alert is sent once per run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..storage.records.ledger import LeaseRow, Ledger, of_user
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace

EVERY: Final = 30.0
"""Seconds between two evaluations."""
LOOKED_AT: Final = 200
"""Number of newest runs to search for running ones."""


class RunCondition(NamedTuple):
    """Measurements of a run at one evaluation."""

    coming: float = 0.0  # minutes since the request of a machine that is not up yet
    silent: float = 0.0  # minutes since the last sign of its worker
    hours: float = 0.0  # used fraction of the time limit
    cost: float = 0.0  # used fraction of the cost limit
    full: float = 0.0  # used fraction of the disk
    waits: float = 0.0  # waiting minutes of the oldest delivery


class AlertRule(NamedTuple):
    """An alert if a field of `RunCondition` exceeds a limit."""

    name: str
    value: str
    above: float
    words: str  # {} is replaced by the value


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
    """Return the alerts of an evaluation: messages by name."""
    found: dict[str, str] = {}
    for rule in RULES:
        value = getattr(seen, rule.value)
        if value > rule.above:
            found.setdefault(rule.name, rule.words.format(value))
    return found


class Watch:
    """Evaluates the rules for a workspace's runs, and adds alerts to the outbox."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._due = time.monotonic() + EVERY
        self._alive: dict[str, float] = {}  # last sign of each run's worker, by the local clock

    def look(self) -> None:
        """Evaluate the rules if the interval has passed."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY
            self.judge(time.time())

    def judge(self, now: float) -> None:
        """Add the alerts of every running run, each once."""
        runs, letters = self._ws.store.runs, self._ws.letters
        active = [row for row in runs.latest(last=LOOKED_AT) if row.state == "ACTIVE"]
        self._forget_all_but(active)
        if not active or letters is None:
            return
        for row, condition in self._look_at(active, now):
            for name, words in find_alerts(condition).items():
                id = f"{row.id}-{name}"
                if not runs.outbox.knows(row.id, id):
                    runs.outbox.post(row.id, letters.alert(row, name, id, now, words))

    def _forget_all_but(self, active: Sequence[RunRow]) -> None:
        """Forget what is known of runs that are no longer active."""
        ids = {row.id for row in active}
        self._alive = {run: known for run, known in self._alive.items() if run in ids}

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
        """Return the used fraction of a run's time limit, 0 without a limit."""
        limit = _limits(row).get("time")
        return (now - self._began(row)) / float(limit) if limit else 0.0

    def _began(self, row: RunRow) -> float:
        """Return the start time of a run."""
        for event in self._ws.store.runs.events(row.id, 0, 5):
            if event.after == "ACTIVE":
                return event.at
        return row.created


def _limits(row: RunRow) -> Mapping[str, Any]:
    limits = row.data.get("limits")
    return limits if isinstance(limits, dict) else {}


def _minutes_coming(leases: Iterable[LeaseRow], now: float) -> float:
    """Return the longest wait for a machine that is not up yet, in minutes."""
    asked = [lease.asked for lease in leases if lease.state in ("ASKED", "COMING")]
    return (now - min(asked)) / 60 if asked else 0.0


def _share_of_cost(row: RunRow, ledger: Ledger, leases: Iterable[LeaseRow]) -> float:
    """Return the used fraction of a run's cost limit, 0 without a limit."""
    limit = _limits(row).get("cost")
    if not limit:
        return 0.0
    costs = ledger.costs([lease.key for lease in leases]).values()
    return sum(spent.usd for spent in costs) / float(limit)
