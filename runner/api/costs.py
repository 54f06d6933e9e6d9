"""Costs of rented machines, for one run or for the current month."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

from ..hosts.renting.money import committed_cost
from ..storage.records.ledger import LeaseRow, Ledger, of_user


class Cost(TypedDict):
    """Cost of one machine.

    `usd` is the provider's charge, or an estimate by price until it is known.
    """

    key: str
    run: str
    driver: str
    offer: str
    state: str
    hours: float
    usd: float
    source: str
    place: str  # name of the machine in events


class Costs(NamedTuple):
    """Rented machines and their total cost in US dollars."""

    leases: list[Cost]
    usd: float


def of_runs(environ: Mapping[str, str], runs: Iterable[str]) -> dict[str, float]:
    """Return the cost of each run in US dollars, from the user's ledger."""
    with Ledger.open(of_user(environ), read_only=True) as ledger:
        return {run: _costs(ledger, ledger.of_run(run)).usd for run in runs}


def of_run(run: str) -> Costs:
    """Return the cost of the machines rented for a run."""
    with Ledger.open(of_user(os.environ), read_only=True) as ledger:
        return _costs(ledger, ledger.of_run(run))


def of_month() -> Costs:
    """Return the cost of all rented machines since the first of this month, in local time.

    A lease that began earlier counts in proportion to its time in this month.
    """
    now = time.localtime()
    began = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    with Ledger.open(of_user(os.environ), read_only=True) as ledger:
        return _costs(ledger, ledger.there_since(began), began)


def by_step(costs: Iterable[Cost], times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the cost of each step in US dollars.

    The cost of a machine is divided among its steps in proportion to their seconds on the machine.
    `times` holds these seconds by machine and step.
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
    """Return the cost of these leases since `since`, in seconds since the epoch."""
    noted, now = ledger.costs([row.key for row in rows]), time.time()

    def usd(row: LeaseRow) -> float:
        if row.kept and row.gone is None:  # the ledger has no disk cost of a stopped machine
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
