"""Ledger of machine leases and their costs.

A state change is committed before its effect, and only by the lease's holder. A process that
resumes a run takes over its leases, and the earlier process can no longer change them. Paid
machines of a user are in one ledger for all workspaces, so that a machine is known even after its
workspace is deleted. Free slots are in their workspace's own ledger.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeAlias

from ...errors import Busy
from ...paths import data_folder
from .database import Data, Database, Kind, Row, mapping, text

State: TypeAlias = Literal["ASKED", "COMING", "UP", "RELEASING", "GONE"]

MOVES: Final[Mapping[State, frozenset[State]]] = {
    "ASKED": frozenset(
        {"COMING", "RELEASING", "GONE"}
    ),  # GONE: it was never rented. RELEASING: no longer wanted, rented or not.
    "COMING": frozenset({"UP", "RELEASING"}),
    "UP": frozenset({"RELEASING"}),
    "RELEASING": frozenset({"GONE"}),
    "GONE": frozenset(),
}

LEDGER: Final = Kind(
    "ledger.db",
    0x7263706C,  # "rcpl"
    (
        (
            "CREATE TABLE leases (key TEXT PRIMARY KEY, driver TEXT, run TEXT, workspace TEXT, need TEXT, holder TEXT, state TEXT, offer TEXT,"
            " until REAL, price REAL, lease TEXT, asked REAL, up REAL, gone REAL, reason TEXT) WITHOUT ROWID",
            "CREATE INDEX leases_by_state ON leases (state)",
            "CREATE TABLE spending (lease TEXT, since REAL, till REAL, usd REAL, source TEXT, settled INTEGER, PRIMARY KEY (lease, source))"
            " WITHOUT ROWID",
        ),
        (
            "ALTER TABLE leases ADD COLUMN stack TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE leases ADD COLUMN machine TEXT NOT NULL DEFAULT ''",
        ),
        (
            "ALTER TABLE leases ADD COLUMN failure TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE leases ADD COLUMN account TEXT NOT NULL DEFAULT ''",
            # Earlier versions stored the kind of failure as the beginning of the reason.
            "UPDATE leases SET failure = CASE WHEN reason LIKE 'it cannot be had%' THEN 'taken'"
            " WHEN reason LIKE 'it did not come up%' THEN 'failed'"
            " WHEN reason LIKE 'it is less than was sold%' THEN 'lacks'"
            " WHEN reason LIKE 'the account is refused%' THEN 'denied'"
            " WHEN reason LIKE 'it was taken away%' THEN 'taken-away' ELSE '' END",
            # "the account is refused (" is 24 long, the digest 8, and "): " 3.
            "UPDATE leases SET account = substr(reason, 25, 8), reason = substr(reason, 36)"
            " WHERE reason LIKE 'the account is refused (________): %'",
        ),
    ),
    (),
    {},
    0o600,
    "RECIPE_LEDGER",
    "",
    "then check your provider's console for unused machines and terminate them",
)


class LeaseRow(NamedTuple):
    """Lease of a machine or slot.

    Times are in seconds since the epoch, `price` in US dollars per hour. `offer` and `lease` are
    data of the driver.
    """

    key: str
    driver: str
    run: str
    workspace: str
    need: Data
    holder: str
    state: State
    offer: Data
    until: float
    price: float = 0.0
    lease: Data = {}  # noqa: RUF012  (never written to)
    asked: float = 0.0
    up: float | None = None
    gone: float | None = None
    reason: str = ""
    stack: str = ""  # stack of the machine
    # its own key for a persistent machine; for a use of a persistent machine, that machine's key
    machine: str = ""
    failure: str = ""
    """Failure kind, a `LeaseFailure`; empty without a failure. `reason` has the message."""
    account: str = ""
    """For a denied lease, the digest of the settings and account that the provider rejected."""

    @property
    def kept(self) -> bool:
        """Whether the lease is for a persistent machine.

        Its price is that of the disk; the leases of its uses have the remaining cost.
        """
        return self.machine == self.key

    @property
    def gpus(self) -> tuple[int, str]:
        """Number and model of the GPUs, or 0 and "" if unknown."""
        # A driver may have stored anything: an offer is its own data.
        have = self.offer.get("resources")
        if not isinstance(have, dict):
            return 0, ""
        count = have.get("gpus")
        if not isinstance(count, int):
            count = 0
        return count, str(have.get("gpu") or "")

    @property
    def counts(self) -> bool:
        """Whether the lease counts against the limit on concurrent machines.

        Disks of persistent machines and cluster allocations do not.
        """
        if self.kept or self.offer.get("queued"):
            return False
        return self.price > 0 and self.state != "GONE"

    @property
    def paid_from(self) -> float | None:
        """Start time of the costs, or None if not started.

        This is the request, or for a queued lease its start.
        """
        return self.up if self.offer.get("queued") else self.asked


class LeaseCost(NamedTuple):
    """Cost of a lease in US dollars, `accrued` by the price or `charged` by the provider."""

    usd: float
    source: str


class Full(Busy):
    """The limit on concurrent machines is reached."""


class NotOurs(Busy):
    """Another process holds the lease, or the lease's state has changed."""


def of_user(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's lease ledger."""
    return Path(environ.get("RECIPE_LEDGER") or f"{data_folder(environ)}/{LEDGER.name}")


def of_workspace(home: Path) -> Path:
    """Return the path of a workspace's own lease ledger, for free slots."""
    return home / LEDGER.name


class Ledger:
    """Connection to a lease ledger, opened with `Ledger.open`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Ledger:
        """Open the lease ledger, creating or migrating it if necessary.

        Read-only access creates nothing, and treats a missing file as empty.
        """
        path = Path(os.path.abspath(path))
        return cls(Database.open(path.parent, LEDGER._replace(name=path.name), read_only=read_only))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, *rows: LeaseRow) -> None:
        """Record requested leases, all or none."""
        with self._database.transaction() as db:
            for row in rows:
                _ask(db, row)

    def ask_within(self, most: float, *rows: LeaseRow) -> None:
        """Record requested leases if the user's concurrent machines stay within `most`.

        All processes of the user count.

        Raises Full without recording anything.
        """
        with self._database.transaction() as db:
            living = db.execute("SELECT * FROM leases WHERE state <> 'GONE'").fetchall()
            if sum(_row(each).counts for each in living) >= most:
                raise Full(
                    f"{most:g} machines are already rented, the maximum of `[limits] machines`",
                    fix="wait until a machine is released, or raise the limit",
                )
            for row in rows:
                _ask(db, row)

    def move(
        self,
        row: LeaseRow,
        after: State,
        *,
        lease: Data | None = None,
        reason: str = "",
        failure: str = "",
        account: str = "",
    ) -> LeaseRow:
        """Change the state of a lease, and record its cost so far.

        Raises NotOurs if the stored lease no longer equals `row`.
        """
        if after not in MOVES[row.state]:
            raise AssertionError(f"BUG: the lease {row.key} cannot go from {row.state} to {after}")
        with self._database.transaction() as db:
            failed = row._replace(failure=failure or row.failure, account=account or row.account)
            new_lease = row.lease if lease is None else lease
            return self._store_move(db, failed, after, new_lease, reason)

    def succeed(self, row: LeaseRow, key: str, holder: str, run: str, workspace: str) -> LeaseRow:
        """End the current use of a running machine and start the next.

        Raises NotOurs if the stored lease no longer equals `row`.
        """
        now = time.time()
        after = row._replace(
            key=key,
            holder=holder,
            run=run,
            workspace=workspace,
            asked=now,
            up=now,
            reason="",
            failure="",
        )
        with self._database.transaction() as db:
            releasing = self._store_move(
                db, row, "RELEASING", row.lease, "the machine keeps running"
            )
            self._store_move(db, releasing, "GONE", row.lease, "")
            _insert(db, after)
        return after

    def _store_move(
        self, db: sqlite3.Connection, row: LeaseRow, after: State, lease: Data, reason: str
    ) -> LeaseRow:
        now = time.time()
        moved = row._replace(state=after, lease=lease, reason=reason or row.reason)
        if after == "UP":
            moved = moved._replace(up=now)
        elif after == "GONE":
            moved = moved._replace(gone=now)
        cursor = db.execute(
            "UPDATE leases SET state = ?, lease = ?, reason = ?, up = ?, gone = ?, failure = ?, account = ?"
            " WHERE key = ? AND holder = ? AND state = ?",
            (
                after,
                text(moved.lease),
                moved.reason,
                moved.up,
                moved.gone,
                moved.failure,
                moved.account,
                row.key,
                row.holder,
                row.state,
            ),
        )
        _demand(cursor, row)
        if row.price and moved.lease:
            self._note_accrued(db, row, now, after == "GONE")
        elif row.price and after == "GONE" and now >= row.until:
            # The machine may have run until its end time and terminated itself.
            self._note_accrued(db, row, row.until, True)
        return moved

    def accrue(self, row: LeaseRow) -> None:
        """Record the cost of a running lease so far, calculated from its price."""
        now = time.time()
        with self._database.transaction() as db:
            self._note_accrued(db, row, now, False)

    def charge(self, row: LeaseRow, usd: float) -> None:
        """Record the provider's charge for a lease in US dollars.

        The charge takes precedence over the accrued cost.
        """
        with self._database.transaction() as db:
            self._note_spent(db, row, time.time(), usd, "charged", row.state == "GONE")

    def _note_accrued(
        self, db: sqlite3.Connection, row: LeaseRow, now: float, settled: bool
    ) -> None:
        hours = max(0.0, now - row.paid_from) / 3600 if row.paid_from is not None else 0.0
        self._note_spent(db, row, now, row.price * hours, "accrued", settled)

    def _note_spent(
        self,
        db: sqlite3.Connection,
        row: LeaseRow,
        now: float,
        usd: float,
        source: str,
        settled: bool,
    ) -> None:
        db.execute(
            "INSERT OR REPLACE INTO spending VALUES (?, ?, ?, ?, ?, ?)",
            (row.key, row.asked, now, usd, source, settled),
        )

    def take(self, row: LeaseRow, holder: str) -> LeaseRow:
        """Take over a lease from another process.

        Raises NotOurs if the stored lease no longer equals `row`.
        """
        return self._replace_row(row, row._replace(holder=holder))

    def extend(self, row: LeaseRow, until: float) -> LeaseRow:
        """Extend a lease to a later end.

        Raises NotOurs if the stored lease no longer equals `row`.
        """
        return self._replace_row(row, row._replace(until=until))

    def reprice(self, row: LeaseRow, price: float, until: float) -> LeaseRow:
        """Change the hourly price and the end of a lease.

        Raises NotOurs if the stored lease no longer equals `row`.
        """
        after = row._replace(price=price, until=until)
        with self._database.transaction() as db:
            cursor = db.execute(
                "UPDATE leases SET price = ?, until = ? WHERE key = ? AND holder = ? AND state = ?",
                (price, until, row.key, row.holder, row.state),
            )
            _demand(cursor, row)
        return after

    def _replace_row(self, row: LeaseRow, after: LeaseRow) -> LeaseRow:
        with self._database.transaction() as db:
            cursor = db.execute(
                "UPDATE leases SET holder = ?, until = ? WHERE key = ? AND holder = ? AND state = ?",
                (after.holder, after.until, row.key, row.holder, row.state),
            )
            _demand(cursor, row)
        return after

    def living_leases(self, driver: str | None = None) -> list[LeaseRow]:
        """Return the unreleased leases, oldest first."""
        return _rows(
            self._database,
            "state <> 'GONE' AND (? IS NULL OR driver = ?) ORDER BY asked, key",
            driver,
            driver,
        )

    def row(self, key: str) -> LeaseRow:
        """Return an existing lease by its key."""
        (found,) = _rows(self._database, "key = ?", key)
        return found

    def states(self, driver: str) -> dict[str, State]:
        """Return the state of every lease of a driver, by key."""
        rows = self._database.all("SELECT key, state FROM leases WHERE driver = ?", (driver,))
        return {str(key): state for key, state in rows}

    def of_run(self, run: str) -> list[LeaseRow]:
        """Return all leases of a run, oldest first."""
        return _rows(self._database, "run = ? ORDER BY asked, key", run)

    def cost_of(self, key: str) -> float:
        """Return the recorded cost of a lease in US dollars.

        This is the provider's charge, otherwise the accrued cost.
        """
        found = self.costs([key]).get(key)
        return found.usd if found is not None else 0.0

    def costs(self, keys: Sequence[str]) -> dict[str, LeaseCost]:
        """Return the recorded costs of leases.

        Leases without a recorded cost are left out.
        """
        marks = ", ".join("?" * len(keys))
        rows = self._database.all(
            f"SELECT lease, usd, source FROM spending WHERE lease IN ({marks}) ORDER BY source",  # noqa: S608
            tuple(keys),
        )
        return {
            str(key): LeaseCost(float(usd), str(source)) for key, usd, source in rows
        }  # "charged" sorts after "accrued" and wins

    def last(self, driver: str) -> LeaseRow | None:
        """Return the newest lease of a driver, or None."""
        return next(
            iter(_rows(self._database, "driver = ? ORDER BY asked DESC LIMIT 1", driver)), None
        )

    def since(self, moment: float) -> list[LeaseRow]:
        """Return the leases requested since a time, oldest first."""
        return _rows(self._database, "asked >= ? ORDER BY asked, key", moment)

    def there_since(self, moment: float) -> list[LeaseRow]:
        """Return the leases that existed at any point since a time, oldest first."""
        return _rows(self._database, "state <> 'GONE' OR gone > ? ORDER BY asked, key", moment)


def _demand(cursor: sqlite3.Cursor, row: LeaseRow) -> None:
    if not cursor.rowcount:
        raise NotOurs(
            f"the lease {row.key} is held by another process",
            fix="list the machines with `recipe reap -n`",
        )


def _ask(db: sqlite3.Connection, row: LeaseRow) -> None:
    asked = row.asked or time.time()
    intent = row._replace(
        state="ASKED",
        lease={},
        asked=asked,
        up=None,
        gone=None,
        reason="",
        failure="",
        account="",
    )
    _insert(db, intent)


def _insert(db: sqlite3.Connection, row: LeaseRow) -> None:
    values = (
        *row[:4],
        text(row.need),
        *row[5:7],
        text(row.offer),
        *row[8:10],
        text(row.lease),
        *row[11:],
    )
    db.execute(f"INSERT INTO leases VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608


def _rows(database: Database, where: str, *values: object) -> list[LeaseRow]:
    return [_row(row) for row in database.all(f"SELECT * FROM leases WHERE {where}", values)]  # noqa: S608


def _row(row: Row) -> LeaseRow:
    fields = list(row)
    fields[4], fields[7], fields[10] = mapping(row[4]), mapping(row[7]), mapping(row[10])
    return LeaseRow._make(fields)
