"""The kind of a lease's failure is a column: no decision reads the words, and a ledger of before keeps what it knew."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from drivers.base import Offer
from runner.failures import LeaseFailure
from runner.hosts.renting.cooldowns import account_digest, failure_of, find_on_cooldown, is_denied
from runner.storage.records.ledger import LEDGER, LeaseRow, Ledger

SETTINGS, ACCOUNT = {"term": 24}, [("credit", "$0.00")]
DIGEST = account_digest(SETTINGS, ACCOUNT)
BEFORE = (
    ("it cannot be had: none left", "taken", "it cannot be had: none left"),
    (
        "it did not come up within 20 minutes",
        "failed",
        "it did not come up within 20 minutes",
    ),
    ("it is less than was sold: 1 GPU", "lacks", "it is less than was sold: 1 GPU"),
    (
        f"the account is refused ({DIGEST}): no credit (0): add some",
        "denied",
        "no credit (0): add some",
    ),
    ("it was taken away: outbid", "taken-away", "it was taken away: outbid"),
    ("the run is over", "", "the run is over"),
)
"""The reasons of version 2, with the kind and the words that they become."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger as version 2 wrote it, with a lease of each reason."""
    path = tmp_path / "ledger.db"
    kind = LEDGER._replace(migrations=LEDGER.migrations[:2])
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA application_id = {kind.mark}")
        for statement in (each for version in kind.migrations for each in version):
            db.execute(statement)
        db.execute("PRAGMA user_version = 2")
        now = time.time()
        for n, (reason, _, _) in enumerate(BEFORE):
            offer = f'{{"id": "o{n}"}}'
            row = (f"k{n}", "gcp", f"r{n}", "/ws", "{}", "me", "GONE", offer, now, 1.0, "{}")
            db.execute(
                "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, now - 60 + n, None, now - 1, reason, "", ""),
            )
    db.close()
    return path


@pytest.mark.parametrize("read_only", [True, False])
def test_a_ledger_of_before_rests_what_it_rested(old: Path, read_only: bool) -> None:
    with Ledger.open(old, read_only=read_only) as ledger:
        rows = [ledger.row(f"k{n}") for n in range(len(BEFORE))]
    assert [(row.failure, row.reason) for row in rows] == [
        (kind, words) for _, kind, words in BEFORE
    ]
    now = time.time()
    assert find_on_cooldown(rows, "gcp", now).offers == {"o0", "o1", "o2"}
    assert is_denied(rows[3], now) and rows[3].account == DIGEST
    assert not any(row.account for row in (*rows[:3], *rows[4:]))


@pytest.mark.parametrize("kind", list(LeaseFailure))
def test_words_decide_nothing(tmp_path: Path, kind: LeaseFailure) -> None:
    lying = "it cannot be had: these words are of another kind"
    row = LeaseRow("k", "gcp", "r", "/ws", {}, "me", "ASKED", {"id": "o"}, 9e9, 1.0)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.ask(row)
        gone = ledger.move(ledger.row("k"), "GONE", reason=lying, failure=kind)
        assert ledger.row("k") == gone and gone.failure == kind
    rests = {LeaseFailure.TAKEN, LeaseFailure.FAILED, LeaseFailure.LACKS}
    assert find_on_cooldown([gone], "gcp", time.time()).covers(Offer("gcp", "o")) == (kind in rests)
    assert is_denied(gone, time.time()) == (kind == LeaseFailure.DENIED)
    without = gone._replace(failure="")
    assert not failure_of(without) and not find_on_cooldown([without], "gcp", time.time()).offers


def test_a_failure_stays_when_the_lease_moves_on(tmp_path: Path) -> None:
    row = LeaseRow("k", "gcp", "r", "/ws", {}, "me", "ASKED", {"id": "o"}, 9e9, 1.0)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.ask(row)
        coming = ledger.move(ledger.row("k"), "COMING", lease={"id": "i"})
        releasing = ledger.move(coming, "RELEASING", reason="no answer", failure="failed")
        assert ledger.move(releasing, "GONE").failure == "failed" == ledger.row("k").failure
