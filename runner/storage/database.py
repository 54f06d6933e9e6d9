"""The SQLite file of one workspace: opened, examined, migrated, written in transactions.  Knows no table but through its statements.

One journal mode for everybody, rollback with TRUNCATE and FULL: the write-ahead log of SQLite before 3.51.3 can be corrupted by two writers, and
groups make the difference small.  A `Database` is used by one thread at a time, and never across a fork.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ..errors import Busy, Corrupt, Infrastructure, Unusable
from ..paths import TAGS
from .crash import crashpoint
from .locks import Locks

if TYPE_CHECKING:
    from threading import Thread

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Data: TypeAlias = "Mapping[str, object]"
Row: TypeAlias = "tuple[Any, ...]"

PATIENCE: Final = 30.0  # seconds that a writer waits for another
_APPLICATION = 0x72637065  # "rcpe", in the file's header
_MAGIC = b"SQLite format 3\0"
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs"}
    | {"afs", "9p", "orangefs", "pvfs2"}
)

# One tuple of statements per format version: the database of version n has had the first n.  Released ones never change.
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
    ("CREATE TABLE measured (key TEXT, rule TEXT, at REAL, metrics TEXT, crc INTEGER, PRIMARY KEY (key, rule)) WITHOUT ROWID",),
)


class Database:
    """One connection to the file at `root`/recipe.db.  Make one with `Database.open`."""

    def __init__(self, root: Path, connection: sqlite3.Connection) -> None:
        self.root = root
        self._connection = connection
        self._commit: Thread | None = None  # waits for the disk
        self._failed: BaseException | None = None  # what kept it from committing

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, when no thread is at it."""
        if self._commit is not None:
            self._commit.join()
        return self._connection

    @classmethod
    def open(cls, root: Path, *, read_only: bool = False) -> Database:
        """Open the file, making or migrating it as needed.  Read-only: nothing is made, and a file that is not there is empty."""
        path = root / "recipe.db"
        if not read_only:
            _make(root, path)
        if not path.exists():
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _migrate(db)
            return cls(root, db)
        with _trouble(path):
            version = _examine(path)
            try:
                db = _connect(path, read_only=read_only)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                    raise
                # A writer was killed in the midst of a group: what it began is undone, which is not for a connection that only reads.
                _connect(path).close()
                db = _connect(path, read_only=True)
            try:
                if version < len(_MIGRATIONS):
                    if read_only:
                        raise Unusable(f"{path}: format {version} is older than this program's", fix="`recipe run` migrates it")
                    _migrate(db)
                db.execute("SELECT count(*) FROM meta").fetchone()
            except BaseException:
                db.close()
                raise
        return cls(root, db)

    def close(self) -> None:
        self.connection.close()

    def check(self) -> str:
        """What is wrong with the database after reading all of it; empty when nothing is."""
        try:
            (answer,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            return str(error)
        return "" if answer == "ok" else str(answer)

    def version(self) -> int:
        """A number that is another one once another process has stored something."""
        ((number,),) = self.all("PRAGMA data_version")
        return int(str(number))

    def one(self, statement: str, values: Sequence[object]) -> Row | None:
        """The first row of a query, if it has any."""
        try:
            row: Row | None = self.connection.execute(statement, values).fetchone()
            return row
        except sqlite3.Error:
            with _trouble(self.root / "recipe.db"):
                raise

    def all(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Every row of a query."""
        with _trouble(self.root / "recipe.db"):
            return self.connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def transaction(self, landed: Callable[[], None] | None = None) -> Iterator[sqlite3.Connection]:
        """Store all that is done in it, or nothing.

        With `landed` a thread waits for the disk, and calls it in the end; `land` then says how it went.
        """
        with self._rolled_back():
            self.connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            if landed is None:
                self.connection.execute("COMMIT")
        if landed is not None:
            from threading import Thread

            self._commit = Thread(target=self._wait_for_disk, args=(landed,), name="commit")
            self._commit.start()

    def land(self) -> None:
        """Wait until the last transaction is on the disk.  Raises what kept it from that; nothing of it is stored then."""
        if self._commit is not None:
            self._commit.join()
            self._commit = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _wait_for_disk(self, landed: Callable[[], None]) -> None:
        try:
            with self._rolled_back():
                self._connection.execute("COMMIT")
            crashpoint("group-committed")
        except BaseException as error:
            self._failed = error
        landed()

    @contextlib.contextmanager
    def _rolled_back(self) -> Iterator[None]:
        """All of a transaction, or nothing of it."""
        with _trouble(self.root / "recipe.db"):
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise


def text(value: object) -> str:
    """A value as it is stored."""
    return "{}" if value == {} else _encode(value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"BUG: a {type(value).__name__} cannot be stored")


_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_plain).encode


def parsed(stored: object) -> Json:
    """A stored value.  Raises Corrupt."""
    try:
        return cast("Json", json.loads(str(stored)))
    except ValueError as error:
        raise Corrupt(f"the database holds a damaged value: {str(stored)[:60]!r}", fix="`recipe doctor` says more") from error


def mapping(stored: object) -> Data:
    """A stored object.  Raises Corrupt."""
    value = {} if stored == "{}" else parsed(stored)
    if not isinstance(value, dict):
        raise Corrupt(f"the database holds a damaged value: {str(stored)[:60]!r}", fix="`recipe doctor` says more")
    return value


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    from urllib.parse import quote

    mode = "ro" if read_only else "rw"
    db = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, isolation_level=None, timeout=PATIENCE, check_same_thread=False)
    if not read_only:
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -16000")
    return db


def _examine(path: Path) -> int:
    """The format version, or a refusal, from the first 100 bytes and the length."""
    with open(path, "rb") as file:
        header = file.read(100)
        length = os.fstat(file.fileno()).st_size
    journal = path.with_name("recipe.db-journal")
    interrupted = journal.exists() and journal.stat().st_size > 0
    if interrupted and len(header) == 100:
        return int.from_bytes(header[60:64], "big") or 1  # SQLite rolls back first; what it finds then is checked again
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    if len(header) < 100 or header[:16] != _MAGIC or page < 512 or int.from_bytes(header[28:32], "big") * page > length:
        raise _damaged(path, "it is cut short or is not a database")
    if int.from_bytes(header[68:72], "big") != _APPLICATION:
        raise _damaged(path, "it is not a store of recipe's")
    version = int.from_bytes(header[60:64], "big")
    if version > len(_MIGRATIONS):
        raise Unusable(f"{path}: format {version} was written by a newer recipe, this one knows {len(_MIGRATIONS)}", fix="use the newer version")
    if version < 1:
        raise _damaged(path, "it has no format version")
    return version


def _damaged(path: Path, why: str) -> Unusable:
    return Unusable(f"{path} is damaged: {why}", fix="restore it, or move it away: then nothing is remembered, and every step runs again")


def _make(root: Path, path: Path) -> None:
    """Make the folder and an empty database, whole or not at all."""
    try:
        for folder in ("objects", "partial", "locks", "attempts"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        _refuse_network(root)
        if path.exists():
            return
        with Locks(root / "locks").hold("store"):
            if path.exists():
                return
            for name, text in TAGS.items():
                (root / name).write_text(text)
            new = root / "recipe.db-new"
            for left in (new, root / "recipe.db-new-journal"):
                left.unlink(missing_ok=True)
            with _trouble(path):
                new.touch()
                db = _connect(new)
                # Nobody uses it before it is whole: it goes to the disk once, and not with every statement.
                db.execute("PRAGMA journal_mode = MEMORY")
                db.execute("PRAGMA synchronous = OFF")
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                _migrate(db)
                db.close()
            with new.open("rb") as made:
                os.fsync(made.fileno())
            crashpoint("store-made")
            new.rename(path)
    except OSError as error:
        raise Unusable(f"{error.filename or root}: {error.strerror}", fix="make it writable, or set RECIPE_HOME to a folder that is") from error


def _migrate(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        for number in range(version, len(_MIGRATIONS)):
            for statement in _MIGRATIONS[number]:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {max(version, len(_MIGRATIONS))}")
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _refuse_network(root: Path) -> None:
    device = root.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 6 and fields[2] == wanted and "-" in fields:
            kind = fields[fields.index("-") + 1]
            if kind in _NETWORK:
                why = f"{root} is on a network file system ({kind}), where locks and SQLite are not safe"
                raise Unusable(why, fix="set RECIPE_HOME to a folder on a local disk")


@contextlib.contextmanager
def _trouble(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Busy(f"{path}: another process has been writing for {PATIENCE:.0f} s", fix="wait for it to end, and try again") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _damaged(path, str(error)) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise Unusable(f"{path}: {error}", fix="make it writable, or set RECIPE_HOME to a folder that is") from error
        if code == sqlite3.SQLITE_FULL:
            found = os.statvfs(path.parent)
            message = f"{path}: {os.strerror(errno.ENOSPC)}, {found.f_bavail * found.f_frsize} bytes are free"
            raise Infrastructure(message, fix="free some space (`recipe gc` helps), and run again") from error
        if code == sqlite3.SQLITE_IOERR:
            raise Infrastructure(f"{path}: {error}") from error
        if "no such" in str(error) or "not decode" in str(error) or "no query solution" in str(error):
            raise _damaged(path, str(error)) from error
        raise
