"""The ledger of leases: moves are guarded, a lease has one holder, and nothing is lost with a workspace."""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from runner.errors import Unusable
from runner.hosts.renting.budget import Budget
from runner.storage.records import ledger as module
from runner.storage.records.ledger import MOVES, LeaseRow, Ledger, NotOurs, State, of_user

ROW = LeaseRow(
    "k1", "cloud", "run1", "/ws", {"gpus": 1}, "me", "ASKED", {"id": "offer"}, until=9e9, price=3.6
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "share" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as ledger:
        yield ledger


def test_a_lease_is_remembered_with_all_that_its_driver_gave(ledger: Ledger, path: Path) -> None:
    ledger.ask(ROW)
    (row,) = ledger.living_leases()
    assert row == ROW._replace(asked=row.asked) and row.asked > 0
    coming = ledger.move(row, "COMING", lease={"id": "i-1", "data": {"host": "a"}})
    with Ledger.open(path, read_only=True) as other:
        assert other.living_leases("cloud") == [coming] and coming.lease["id"] == "i-1"
        assert (
            other.living_leases("another") == []
            and other.of_run("run1") == [coming]
            and other.of_run("run2") == []
        )


def test_what_waits_in_a_queue_costs_from_when_it_is_up(ledger: Ledger) -> None:
    hour_ago = time.time() - 3600
    ledger.ask(
        ROW._replace(offer={"id": "main", "queued": True}, asked=hour_ago),
        ROW._replace(key="rented", asked=hour_ago),
    )
    for key in ("k1", "rented"):
        ledger.move(ledger.move(ledger.row(key), "COMING", lease={"id": key}), "UP")
        ledger.accrue(ledger.row(key))
    assert ledger.cost_of("k1") < 0.1 and ledger.cost_of("rented") == pytest.approx(3.6, abs=0.1)


def test_of_the_money_for_a_cluster_only_what_was_used_is_gone_and_a_run_stops_before_the_rest_is(
    ledger: Ledger,
) -> None:
    budget = Budget(ledger, "run1")
    ledger.ask(ROW._replace(offer={"id": "main", "queued": True}))
    assert not budget.reaches_limit(180) and budget.likely_funds() > 9e9
    budget.limit = 0.5
    assert not budget.reaches_limit(180) and budget.likely_funds() == 0.5, "it waits"
    up = ledger.move(ledger.move(ledger.row("k1"), "COMING", lease={"id": "1"}), "UP")
    assert (
        budget.likely_funds() == pytest.approx(0.5, abs=0.01)
        and not budget.reaches_limit(180)
        and budget.reaches_limit(600)
    )
    ledger.move(ledger.move(up, "RELEASING"), "GONE")
    assert not budget.reaches_limit(600) and not budget.is_full


def test_only_the_moves_of_the_table_are_made(ledger: Ledger) -> None:
    for before, after in itertools.product(get_args(State), repeat=2):
        row = ROW._replace(key=f"{before}-{after}", state=before)
        if after not in MOVES[before]:
            with pytest.raises(AssertionError, match="BUG"):
                ledger.move(row, after)
    assert ledger.living_leases() == []


def test_a_lease_is_moved_by_its_holder_alone(ledger: Ledger) -> None:
    ledger.ask(ROW)
    (old,) = ledger.living_leases()
    new = ledger.take(old, "another")
    with pytest.raises(NotOurs):
        ledger.move(old, "COMING")
    with pytest.raises(NotOurs):
        ledger.extend(old, 0.0)
    with pytest.raises(NotOurs):
        ledger.take(old, "a third")
    assert ledger.living_leases() == [new] and ledger.move(new, "RELEASING").state == "RELEASING"


def test_a_lease_is_moved_once(ledger: Ledger) -> None:
    ledger.ask(ROW)
    (row,) = ledger.living_leases()
    ledger.move(row, "COMING")
    with pytest.raises(NotOurs):
        ledger.move(row, "COMING")


def test_what_a_lease_cost_is_noted_with_each_move(ledger: Ledger) -> None:
    ledger.ask(ROW._replace(asked=1000.0))
    (row,) = ledger.living_leases()
    row = ledger.move(row, "COMING", lease={"id": "i-1"})
    first = ledger.cost_of("k1")
    assert first > 0
    gone = ledger.move(ledger.move(ledger.move(row, "UP"), "RELEASING", reason="done"), "GONE")
    assert gone.gone is not None and first <= ledger.cost_of("k1") == pytest.approx(
        3.6 * (gone.gone - 1000.0) / 3600
    )
    assert ledger.living_leases() == [] and [row.reason for row in ledger.of_run("run1")] == [
        "done"
    ]


def test_what_was_never_rented_and_what_is_free_costs_nothing(ledger: Ledger) -> None:
    for key, price, lease in (("never", 5.0, None), ("free", 0.0, {"id": "place"})):
        ledger.ask(ROW._replace(key=key, price=price))
        (row,) = [row for row in ledger.living_leases() if row.key == key]
        ledger.move(ledger.move(row, "RELEASING", lease=lease), "GONE")
        assert ledger.cost_of(key) == 0.0


def test_a_newer_ledger_is_refused_with_what_to_do(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = module.LEDGER._replace(
        migrations=(*module.LEDGER.migrations, ("CREATE TABLE later (x)",))
    )
    with monkeypatch.context() as later:
        later.setattr(module, "LEDGER", newer)
        Ledger.open(path).close()
    with pytest.raises(Unusable, match="newer recipe"):
        Ledger.open(path)


def test_a_damaged_ledger_sends_one_to_the_provider_and_a_store_is_no_ledger(
    path: Path, tmp_path: Path
) -> None:
    Ledger.open(path).close()
    path.write_bytes(b"")
    with pytest.raises(Unusable) as caught:
        Ledger.open(path)
    assert "provider's console" in caught.value.fix


def test_the_ledger_is_in_the_home_of_the_user_and_reading_makes_nothing(tmp_path: Path) -> None:
    assert of_user({"HOME": "/h"}) == Path("/h/.local/share/recipe/ledger.db")
    assert of_user({"HOME": "/h", "XDG_DATA_HOME": "/d"}) == Path("/d/recipe/ledger.db")
    assert of_user({"HOME": "/h", "RECIPE_LEDGER": "/l/mine.db"}) == Path("/l/mine.db")
    with Ledger.open(tmp_path / "none" / "mine.db", read_only=True) as ledger:
        assert ledger.living_leases() == []
    assert os.listdir(tmp_path) == []
    Ledger.open(tmp_path / "some" / "mine.db").close()
    assert stat.S_IMODE((tmp_path / "some" / "mine.db").stat().st_mode) & 0o077 == 0


def test_a_ledger_of_the_version_before_is_read_without_being_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "LEDGER", module.LEDGER._replace(migrations=module.LEDGER.migrations[:1])
    )
    with Ledger.open(path) as older:
        older._database.connection.execute(
            "INSERT INTO leases (key, driver, run, need, offer, lease, state) VALUES ('k1', 'cloud', 'r', '{}', '{}', '{}', 'UP')"
        )
    monkeypatch.undo()
    before = path.read_bytes()
    with Ledger.open(path, read_only=True) as ledger:
        assert [row.key for row in ledger.living_leases("cloud")] == [
            "k1"
        ] and ledger.living_leases()[0].stack == ""
    assert path.read_bytes() == before
