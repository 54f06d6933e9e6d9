"""What machines cost in a month is their share of it, also of those that were there before it and of disks that are kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.api import costs
from runner.storage.records.ledger import LeaseRow, Ledger

HOUR, DAY = 3600.0, 86_400.0
TENTH = time.mktime((2026, 3, 10, 12, 0, 0, 0, 0, -1))
FIRST = time.mktime((2026, 3, 1, 0, 0, 0, 0, 0, -1))


def leased(
    ledger: Ledger,
    key: str,
    asked: float,
    gone: float | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kept: bool = False,
) -> None:
    """A machine at a dollar an hour that came up as soon as it was asked for."""
    monkeypatch.setattr(time, "time", lambda: asked)
    row = LeaseRow(
        key,
        "gcp",
        "",
        "/w",
        {},
        "me",
        "ASKED",
        {"id": "L4"},
        asked,
        1.0,
        asked=asked,
        machine=key if kept else "",
    )
    ledger.ask(row)
    row = ledger.move(ledger.move(row, "COMING", lease={"id": key}), "UP")
    if gone is not None:
        monkeypatch.setattr(time, "time", lambda: gone)
        ledger.move(ledger.move(row, "RELEASING"), "GONE")


def test_each_month_has_its_share_of_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPE_LEDGER", str(tmp_path / "ledger.db"))
    localtime = time.localtime
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        leased(ledger, "kept", FIRST - 40 * DAY, None, monkeypatch, kept=True)
        leased(
            ledger, "kept-till-the-third", FIRST - 40 * DAY, FIRST + 2 * DAY, monkeypatch, kept=True
        )
        leased(ledger, "over-the-first", FIRST - 3 * HOUR, FIRST + HOUR, monkeypatch)
        leased(ledger, "of-last-month", FIRST - 9 * HOUR, FIRST - 8 * HOUR, monkeypatch)
        leased(ledger, "of-this-month", FIRST + DAY, FIRST + DAY + 5 * HOUR, monkeypatch)
        monkeypatch.setattr(time, "time", lambda: TENTH)
        monkeypatch.setattr(time, "localtime", lambda: localtime(TENTH))
        found = {each["key"]: (each["usd"], each["hours"]) for each in costs.of_month().leases}
    hours = {
        "kept": (TENTH - FIRST) / HOUR,
        "kept-till-the-third": 48.0,
        "over-the-first": 1.0,
        "of-this-month": 5.0,
    }
    assert found == {key: (pytest.approx(each), pytest.approx(each)) for key, each in hours.items()}
