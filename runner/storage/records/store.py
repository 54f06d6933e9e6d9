"""Store of a workspace, `.recipe/recipe.db`: runs and the local index in one file.

Both change in one transaction.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from drivers import install_line

from ... import digest
from ...errors import Unusable
from ...paths import TAGS
from ..locks import Locks
from .database import Database, Kind
from .index import Index
from .runs import Runs
from .sqlite_runs import SqliteRuns

_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE files (path TEXT PRIMARY KEY, dev INTEGER, ino INTEGER, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, content TEXT)"
        " WITHOUT ROWID",
        "CREATE TABLE objects (content TEXT PRIMARY KEY, mark TEXT, boot TEXT, size INTEGER, at REAL) WITHOUT ROWID",
        "CREATE TABLE traces (key TEXT PRIMARY KEY, recipe TEXT, step TEXT, run TEXT, made_at REAL, seconds REAL,"
        " outputs TEXT, outputs_crc INTEGER, metrics TEXT, facts TEXT, facts_crc INTEGER) WITHOUT ROWID",
        "CREATE INDEX traces_by_recipe ON traces (recipe, made_at)",
        "CREATE TABLE runs (id TEXT PRIMARY KEY, recipe TEXT, plan TEXT, inputs TEXT, workspace TEXT, state TEXT, reason TEXT, request TEXT,"
        " created REAL, ended REAL, claim TEXT, fence INTEGER, next_event INTEGER, data TEXT) WITHOUT ROWID",
        "CREATE TABLE steps (run TEXT, step TEXT, state TEXT, key TEXT, reason TEXT, PRIMARY KEY (run, step)) WITHOUT ROWID",
        "CREATE TABLE attempts (id TEXT PRIMARY KEY, run TEXT, step TEXT, n INTEGER, key TEXT, job TEXT, dir TEXT, started REAL, ended REAL,"
        " outcome TEXT, reason TEXT, exit TEXT, preimage TEXT) WITHOUT ROWID",
        "CREATE INDEX attempts_by_run ON attempts (run, step, n)",
        "CREATE TABLE events (run TEXT, seq INTEGER, at REAL, subject TEXT, id TEXT, before TEXT, after TEXT, reason TEXT, data TEXT,"
        " PRIMARY KEY (run, seq)) WITHOUT ROWID",
        "CREATE TABLE published (path TEXT PRIMARY KEY, content TEXT, identity TEXT, run TEXT, step TEXT, recipe TEXT) WITHOUT ROWID",
    ),
    ("CREATE TABLE tiny (content TEXT PRIMARY KEY, data BLOB, at REAL) WITHOUT ROWID",),
    (
        "CREATE TABLE measured (key TEXT, rule TEXT, at REAL, metrics TEXT, crc INTEGER, PRIMARY KEY (key, rule)) WITHOUT ROWID",
    ),
    (
        "ALTER TABLE runs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE runs ADD COLUMN due REAL",
        "ALTER TABLE runs ADD COLUMN idempotency TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE runs ADD COLUMN recoveries INTEGER NOT NULL DEFAULT 0",
        "CREATE UNIQUE INDEX runs_by_idempotency ON runs (idempotency) WHERE idempotency <> ''",
        "CREATE INDEX runs_due ON runs (priority DESC, due, id) WHERE due IS NOT NULL AND state IN ('QUEUED', 'ACTIVE')",
    ),
    ("ALTER TABLE runs ADD COLUMN user TEXT NOT NULL DEFAULT ''",),
    (
        "CREATE TABLE outbox (number INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, receiver TEXT NOT NULL, id TEXT NOT NULL,"
        " type TEXT NOT NULL, body TEXT NOT NULL, points INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'waiting',"
        " tries INTEGER NOT NULL DEFAULT 0, created REAL NOT NULL, due REAL NOT NULL, held_until REAL NOT NULL DEFAULT 0,"
        " reason TEXT NOT NULL DEFAULT '')",
        "CREATE INDEX outbox_in_order ON outbox (run, receiver, number) WHERE state = 'waiting'",
        "CREATE INDEX outbox_due ON outbox (due) WHERE state = 'waiting'",
    ),
    (
        "CREATE INDEX runs_by_state ON runs (state, id)",
        "CREATE INDEX runs_by_user ON runs (user, id)",
    ),
    (
        "DROP INDEX traces_by_recipe",
        "CREATE INDEX traces_by_step ON traces (recipe, step, made_at, seconds)",
        "CREATE INDEX runs_by_age ON runs (created, id)",
        "CREATE INDEX attempts_by_step ON attempts (step, started)",
    ),
    (
        "ALTER TABLE runs ADD COLUMN failure TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE steps ADD COLUMN detail TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE outbox ADD COLUMN failure TEXT NOT NULL DEFAULT ''",
        "UPDATE steps SET detail = coalesce((SELECT json_extract(data, '$.detail') FROM events WHERE events.run = steps.run"
        " AND subject = 'step' AND id = step AND after = 'FAILED' ORDER BY seq DESC LIMIT 1), '') WHERE state = 'FAILED'",
        # Earlier versions stored a kind, a sentence, or an empty text after a failed step.
        "UPDATE runs SET failure = CASE reason WHEN 'its worker is gone' THEN 'worker-gone' WHEN 'poison' THEN 'poison' WHEN 'points' THEN 'points'"
        " WHEN '' THEN coalesce((SELECT CASE reason WHEN 'unplaced' THEN 'provisioning' ELSE reason END FROM steps WHERE run = runs.id"
        " AND state = 'FAILED' ORDER BY step LIMIT 1), 'infrastructure') ELSE 'infrastructure' END WHERE state = 'FAILED'",
        "UPDATE runs SET reason = coalesce((SELECT CASE detail WHEN '' THEN reason ELSE detail END FROM steps WHERE run = runs.id"
        " AND state = 'FAILED' ORDER BY step LIMIT 1), '') WHERE state = 'FAILED' AND reason = ''",
        "UPDATE outbox SET failure = CASE WHEN reason LIKE 'HTTP 410%' THEN 'gone' WHEN reason LIKE 'HTTP 5%' THEN 'server-error'"
        " WHEN reason LIKE 'HTTP %' THEN 'refused' ELSE 'unreachable' END"
        " WHERE reason <> ''",
    ),
    (
        "ALTER TABLE steps ADD COLUMN numbers TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE steps ADD COLUMN began REAL",
    ),
    (
        "CREATE TABLE summaries (attempt TEXT PRIMARY KEY, metrics TEXT, crc INTEGER) WITHOUT ROWID",
        "CREATE INDEX attempts_by_key ON attempts (key) WHERE outcome = 'done'",
    ),
    (
        "CREATE TABLE workers (process TEXT PRIMARY KEY, name TEXT, workspace TEXT, driver TEXT, labels TEXT, at_most TEXT, store TEXT,"
        " began REAL, heard REAL) WITHOUT ROWID",
    ),
    (
        "DROP INDEX runs_by_state",
        "DROP INDEX runs_by_user",
        "CREATE INDEX runs_by_state ON runs (state, created, id)",
        "CREATE INDEX runs_by_user ON runs (user, created, id)",
    ),
)
STORE = Kind(
    "recipe.db",
    0x72637065,  # "rcpe"
    _MIGRATIONS,
    ("objects", "partial", "locks", "attempts"),
    TAGS,
    0o666,
    "RECIPE_HOME",
    "recipe run",
    "then all cached results are lost, and every step runs again",
)


def home(workspace: Path, environ: Mapping[str, str]) -> Path:
    """Return the directory of a workspace's store: its `.recipe`, or one below `RECIPE_HOME`."""
    if base := environ.get("RECIPE_HOME"):
        real = os.path.realpath(workspace)
        return Path(base) / f"{os.path.basename(real)}-{digest.of_bytes(os.fsencode(real))[:12]}"
    return workspace / ".recipe"


@contextlib.contextmanager
def hold_inode(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that checks whether `folder` is still the same directory.

    Its inode number is not reused meanwhile.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def there() -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(folder))
        except FileNotFoundError:
            return False

    try:
        yield there
    finally:
        os.close(handle)


class Store:
    """Open store of a workspace, opened with `Store.open`."""

    def __init__(self, database: Database, runs: Runs | None = None) -> None:
        self.root, self.database = database.root, database
        self.locks = Locks(database.root / "locks")
        self.index = Index(database)
        self.runs: Runs = runs if runs is not None else SqliteRuns(database, self.index, self.locks)

    @classmethod
    def open(
        cls, root: Path, *, read_only: bool = False, shared: str = "", workspace: str = ""
    ) -> Store:
        """Open the store at `root`, creating or migrating it if necessary.

        Read-only access creates nothing, and treats a missing store as empty.

        `shared` is the URL of a database with the runs of `workspace`, used instead of this file's
        runs. Raises Unusable, Infrastructure.
        """
        database = Database.open(root, STORE, read_only=read_only)
        if not shared:
            return cls(database)
        return cls(database, _open_shared(shared, workspace, database, read_only=read_only))

    def close(self) -> None:
        """Release all claims on runs and close the database."""
        self.runs.close()
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_shared(address: str, workspace: str, database: Database, *, read_only: bool) -> Runs:
    if not address.startswith(("postgresql://", "postgres://")):
        raise Unusable(
            "RECIPE_RUNS is not a PostgreSQL URL",
            fix="use the form postgresql://user@host/database",
        )
    try:
        from .postgres_runs import PostgresRuns
    except ImportError as error:
        raise Unusable(
            f"RECIPE_RUNS with PostgreSQL requires psycopg: {error}", fix=install_line("postgres")
        ) from error
    return PostgresRuns(address, workspace, database, Index(database), read_only=read_only)
