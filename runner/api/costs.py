"""Costs of rented machines, for one run or for the current month."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

from ..hosts.renting.money import committed_cost
from ..storage.records.ledger import LeaseCost, LeaseRow, Ledger, of_user


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
            share = cost["usd"] / len(there)
            if total:
                share = cost["usd"] * seconds / total
            found[step] = found.get(step, 0.0) + share
    return found


def _costs(ledger: Ledger, rows: list[LeaseRow], since: float = 0.0) -> Costs:
    """Return the cost of these leases since `since`, in seconds since the epoch."""
    noted, now = ledger.costs([row.key for row in rows]), time.time()
    found: list[Cost] = []
    for row in rows:
        if row.key in noted:
            found.append(_cost(row, noted[row.key], since, now))
    return Costs(found, sum((cost["usd"] for cost in found), 0.0))


def _cost(row: LeaseRow, noted: LeaseCost, since: float, now: float) -> Cost:
    """Return the cost of a lease from `since` until now, or until its end."""
    end = row.gone or now
    began = end if row.paid_from is None else row.paid_from
    share = 1.0
    if began < since < end:
        share = (end - since) / (end - began)
    usd = noted.usd * share
    if row.kept and row.gone is None:  # the ledger has no disk cost of a stopped machine
        usd = committed_cost(row.price, max(row.asked, since), now)
    return {
        "key": row.key,
        "run": row.run,
        "driver": row.driver,
        "offer": str(row.offer.get("id", "")),
        "state": row.state,
        "hours": (end - max(began, since)) / 3600,
        "usd": usd,
        "source": noted.source,
        "place": f"{row.driver} {row.lease.get('id', '')}",
    }
