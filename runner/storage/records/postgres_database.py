"""PostgreSQL database: a reconnecting connection, its schema, and its notifications."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection

from ...errors import Infrastructure, StoreUnavailable, Unusable
from .database import Row

PATIENCE: Final = 60.0
"""Timeout for an unresponsive database, in seconds."""
PAUSE: Final = 0.5
CHANNEL: Final = "recipe_runs"
_LOCK: Final = 0x72637065
"""Id of the advisory lock for migrations."""
Answer = TypeVar("Answer")

_MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        "CREATE TABLE runs (id text PRIMARY KEY, recipe text NOT NULL, plan text NOT NULL, inputs text NOT NULL, workspace text NOT NULL,"
        " state text NOT NULL, reason text NOT NULL, request text NOT NULL DEFAULT '', created float8 NOT NULL, ended float8,"
        " claim text NOT NULL DEFAULT '', fence bigint NOT NULL DEFAULT 0, next_event bigint NOT NULL DEFAULT 2, data text NOT NULL,"
        " priority integer NOT NULL DEFAULT 0, due float8, idempotency text NOT NULL DEFAULT '', recoveries integer NOT NULL DEFAULT 0,"
        " driver text NOT NULL, labels text[] NOT NULL, holder text NOT NULL DEFAULT '', held_until timestamptz NOT NULL DEFAULT '-infinity')",
        "CREATE UNIQUE INDEX runs_by_idempotency ON runs (idempotency) WHERE idempotency <> ''",
        "CREATE INDEX runs_due ON runs (priority DESC, due, id) WHERE due IS NOT NULL AND state IN ('QUEUED', 'ACTIVE')",
        "CREATE INDEX runs_by_age ON runs (created DESC, id DESC)",
        "CREATE TABLE steps (run text, step text, state text NOT NULL, key text NOT NULL, reason text NOT NULL, PRIMARY KEY (run, step))",
        "CREATE TABLE attempts (id text PRIMARY KEY, run text NOT NULL, step text NOT NULL, n integer NOT NULL, key text NOT NULL, job text NOT NULL,"
        " dir text NOT NULL, started float8, ended float8, outcome text NOT NULL, reason text NOT NULL, exit text NOT NULL, preimage text NOT NULL)",
        "CREATE INDEX attempts_by_run ON attempts (run, step, n)",
        "CREATE TABLE events (run text, seq bigint, at float8 NOT NULL, subject text NOT NULL, id text NOT NULL, before text NOT NULL,"
        " after text NOT NULL, reason text NOT NULL, data text NOT NULL, PRIMARY KEY (run, seq))",
    ),
    (
        "ALTER TABLE runs ADD COLUMN submitter text NOT NULL DEFAULT '', ADD COLUMN bundle text NOT NULL DEFAULT '',"
        " ADD COLUMN store text NOT NULL DEFAULT '', ADD COLUMN outputs text NOT NULL DEFAULT '[]', ADD COLUMN worked_in text NOT NULL DEFAULT ''",
        "CREATE INDEX runs_worked_in ON runs (worked_in) WHERE worked_in <> ''",
        "CREATE TABLE bundles (digest text PRIMARY KEY, data bytea NOT NULL, at timestamptz NOT NULL DEFAULT now())",
        "CREATE TABLE chunks (run text, attempt text, stream text, start bigint, data bytea NOT NULL, content text NOT NULL DEFAULT '',"
        " PRIMARY KEY (run, attempt, stream, start))",
        "CREATE TABLE keys (key text PRIMARY KEY, run text NOT NULL)",
    ),
    (
        "CREATE TABLE outbox (number bigserial PRIMARY KEY, run text NOT NULL, receiver text NOT NULL, id text NOT NULL, type text NOT NULL,"
        " body text NOT NULL, points integer NOT NULL DEFAULT 0, state text NOT NULL DEFAULT 'waiting', tries integer NOT NULL DEFAULT 0,"
        " created float8 NOT NULL, due float8 NOT NULL, held_until float8 NOT NULL DEFAULT 0, reason text NOT NULL DEFAULT '')",
        "CREATE INDEX outbox_in_order ON outbox (run, receiver, number) WHERE state = 'waiting'",
        "CREATE INDEX outbox_due ON outbox (due) WHERE state = 'waiting'",
    ),
    (
        "CREATE INDEX runs_by_state ON runs (workspace, state, id DESC)",
        "CREATE INDEX runs_by_user ON runs (workspace, submitter, id DESC)",
    ),
    (
        "CREATE INDEX runs_busy ON runs (holder) WHERE claim <> '' OR state = 'ACTIVE'",
        "CREATE INDEX attempts_by_step ON attempts (step, started DESC NULLS LAST)",
    ),
    (
        "ALTER TABLE runs ADD COLUMN failure text NOT NULL DEFAULT ''",
        "ALTER TABLE steps ADD COLUMN detail text NOT NULL DEFAULT ''",
        "ALTER TABLE outbox ADD COLUMN failure text NOT NULL DEFAULT ''",
        "UPDATE steps SET detail = coalesce((SELECT data::json ->> 'detail' FROM events WHERE events.run = steps.run AND subject = 'step'"
        " AND id = step AND after = 'FAILED' ORDER BY seq DESC LIMIT 1), '') WHERE state = 'FAILED'",
        "UPDATE runs SET failure = CASE reason WHEN 'its worker is gone' THEN 'worker-gone' WHEN 'poison' THEN 'poison' WHEN 'points' THEN 'points'"
        " WHEN '' THEN coalesce((SELECT CASE steps.reason WHEN 'unplaced' THEN 'provisioning' ELSE steps.reason END FROM steps WHERE run = runs.id"
        " AND steps.state = 'FAILED' ORDER BY step LIMIT 1), 'infrastructure') ELSE 'infrastructure' END WHERE state = 'FAILED'",
        "UPDATE runs SET reason = coalesce((SELECT CASE detail WHEN '' THEN steps.reason ELSE detail END FROM steps WHERE run = runs.id"
        " AND steps.state = 'FAILED' ORDER BY step LIMIT 1), '') WHERE state = 'FAILED' AND reason = ''",
        "UPDATE outbox SET failure = CASE WHEN reason LIKE 'HTTP 410%' THEN 'gone' WHEN reason LIKE 'HTTP 5%' THEN 'server-error'"
        " WHEN reason LIKE 'HTTP %' THEN 'refused' ELSE 'unreachable' END"
        " WHERE reason <> ''",
    ),
    ("ALTER TABLE steps ADD COLUMN numbers text NOT NULL DEFAULT '', ADD COLUMN began float8",),
    ("CREATE INDEX attempts_by_key ON attempts (key) WHERE outcome = 'done'",),
    (
        "CREATE TABLE workers (process text PRIMARY KEY, name text NOT NULL, workspace text NOT NULL, driver text NOT NULL,"
        " labels text NOT NULL, at_most text NOT NULL, store text NOT NULL, began float8 NOT NULL, heard float8 NOT NULL)",
    ),
    (
        "DROP INDEX runs_by_state",
        "DROP INDEX runs_by_user",
        "CREATE INDEX runs_by_state ON runs (workspace, state, created DESC, id DESC)",
        "CREATE INDEX runs_by_user ON runs (workspace, submitter, created DESC, id DESC)",
    ),
)
"""SQL statements per schema version. Released versions never change."""


class PostgresDatabase:
    """Connection to the PostgreSQL database at one URL.

    Raises Infrastructure if it does not respond or rejects a statement.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        """Connect to the database and migrate its schema.

        Raises Infrastructure, Unusable.
        """
        self._url = url
        self._connection: Connection[Row] | None = None
        self._news = 0
        self.do(lambda db: _migrate(db, read_only=read_only))

    def close(self) -> None:
        if self._connection is not None and not self._connection.closed:
            _idle[self._url] = self._connection
        self._connection = None

    @property
    def open(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def news(self) -> int:
        """Return a number that changes on a notification or a reconnect."""
        db = self._connection
        if db is not None and not db.closed and select.select([db.fileno()], [], [], 0)[0]:
            self._news += len(self.do(lambda db: list(db.notifies(timeout=0))))
        return self._news

    def all(self, statement: str, values: Any = ()) -> list[Row]:
        return self.do(lambda db: db.execute(statement.encode(), values).fetchall())

    def do(self, what: Callable[[Connection[Row]], Answer]) -> Answer:
        """Call a function with the connection, and repeat the call after a lost connection.

        Raises Infrastructure after `PATIENCE` seconds.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = _idle.pop(self._url, None) or connect(self._url)
                    self._news += 1
                return what(self._connection)
            except psycopg.OperationalError as error:
                if self._connection is not None:
                    self._connection.close()
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"cannot reach the run database: {error}",
                        fix="check RECIPE_RUNS, and that the database is running",
                    ) from error
                time.sleep(PAUSE)
            except psycopg.Error as error:
                raise Infrastructure(
                    f"the run database rejected a statement: {error}",
                    fix="check RECIPE_RUNS and the permissions of its user",
                ) from error


_idle: dict[str, Connection[Row]] = {}
"""Idle connections for reuse by URL: a Python program opens its workspace for each call."""


def connect(url: str) -> Connection[Row]:
    """Connect to the database and listen for notifications.

    Behind a transaction pooler, notifications only arrive with the next heartbeat.
    """
    db = psycopg.connect(url, autocommit=True, connect_timeout=10, application_name="recipe")
    if _is_pooled(db):
        # The next statement may use another connection, without these prepared statements.
        db.prepare_threshold = None
    db.execute("LISTEN " + CHANNEL)
    return db


def _is_pooled(db: Connection[Row]) -> bool:
    """Return True if the database is behind a connection pooler.

    PgBouncer, for example, has its own backend ids.
    """
    found = db.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    return found is not None and found[0] != db.info.backend_pid


def _migrate(db: Connection[Row], *, read_only: bool) -> None:
    """Migrate the schema to the current version, in one transaction under a lock.

    Raises Unusable.
    """
    try:
        version = int(
            (db.execute("SELECT coalesce(max(version), 0) FROM recipe_schema").fetchone() or (0,))[
                0
            ]
        )
    except psycopg.errors.UndefinedTable:
        version = 0
    if version > len(_MIGRATIONS):
        raise Unusable(
            f"the run database has format {version}; this version of recipe supports {len(_MIGRATIONS)}",
            fix="update recipe on this machine",
        )
    if version == len(_MIGRATIONS):
        return
    if read_only:
        raise Unusable(
            f"the run database has format {version}, older than this version of recipe",
            fix="start `recipe run` once, which migrates the database",
        )
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        db.execute(
            "CREATE TABLE IF NOT EXISTS recipe_schema (version integer PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())"
        )
        version = int(
            (db.execute("SELECT coalesce(max(version), 0) FROM recipe_schema").fetchone() or (0,))[
                0
            ]
        )
        for number, statements in enumerate(_MIGRATIONS[version:], version + 1):
            for statement in statements:
                db.execute(statement.encode())
            db.execute("INSERT INTO recipe_schema VALUES (%s)", (number,))
