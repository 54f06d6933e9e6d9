"""What rented machines cost: of one run, or of all since the beginning of the month."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

from ..hosts.renting.money import committed_cost
from ..storage.records.ledger import LeaseRow, Ledger, of_user


class Cost(TypedDict):
    """One machine.  `usd` is what the provider charged, or, where it has not said so yet, what was accrued by the price."""

    key: str
    run: str
    driver: str
    offer: str
    state: str
    hours: float
    usd: float
    source: str
    place: str  # what events call the machine


class Costs(NamedTuple):
    """Machines and what they cost together, in US dollars."""

    leases: list[Cost]
    usd: float


def of_runs(environ: Mapping[str, str], runs: Iterable[str]) -> dict[str, float]:
    """What each of these runs cost, in US dollars, by the ledger of an environment."""
    with Ledger.open(of_user(environ), read_only=True) as ledger:
        return {run: _costs(ledger, ledger.of_run(run)).usd for run in runs}


def of_run(run: str) -> Costs:
    """What the machines of a run cost."""
    with Ledger.open(of_user(os.environ), read_only=True) as ledger:
        return _costs(ledger, ledger.of_run(run))


def of_month() -> Costs:
    """What all machines cost this month, by this machine's time zone; of one that was there before, its share of the time."""
    now = time.localtime()
    began = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    with Ledger.open(of_user(os.environ), read_only=True) as ledger:
        return _costs(ledger, ledger.there_since(began), began)


def by_step(costs: Iterable[Cost], times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What each step cost, in US dollars: a machine's cost is shared among its steps, as long as each was there.

    `times`: by place and step, in seconds.
    """
    found: dict[str, float] = {}
    for cost in costs:
        there = times.get(cost["place"], {})
        total = sum(there.values())
        for step, seconds in there.items():
            found[step] = found.get(step, 0.0) + (
                cost["usd"] * seconds / total if total else cost["usd"] / len(there)
            )
    return found


def _costs(ledger: Ledger, rows: list[LeaseRow], since: float = 0.0) -> Costs:
    """What these leases have cost since a moment, in seconds since the epoch."""
    noted, now = ledger.costs([row.key for row in rows]), time.time()

    def usd(row: LeaseRow) -> float:
        if row.kept and row.gone is None:  # nothing notes what its disk costs while it stands still
            return committed_cost(row.price, max(row.asked, since), now)
        begun, end = began(row), row.gone or now
        return noted[row.key].usd * ((end - since) / (end - begun) if begun < since < end else 1.0)

    def began(row: LeaseRow) -> float:
        return (row.gone or now) if row.paid_from is None else row.paid_from

    found: list[Cost] = [
        {
            "key": row.key,
            "run": row.run,
            "driver": row.driver,
            "offer": str(row.offer.get("id", "")),
            "state": row.state,
            "hours": ((row.gone or now) - max(began(row), since)) / 3600,
            "usd": usd(row),
            "source": noted[row.key].source,
            "place": f"{row.driver} {row.lease.get('id', '')}",
        }
        for row in rows
        if row.key in noted
    ]
    return Costs(found, sum((cost["usd"] for cost in found), 0.0))
