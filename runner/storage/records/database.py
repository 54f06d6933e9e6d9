"""SQLite databases: open, validate, migrate, and write in transactions.

The tables are defined by the migrations of a `Kind`.

All connections use one journal mode, rollback with TRUNCATE and FULL: SQLite's write-ahead log
before 3.51.3 can be corrupted by two writers, and grouped writes make the cost small. A `Database`
is used by one thread at a time, and never across a fork.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast
from urllib.parse import quote

from ...errors import Corrupt, Infrastructure, StoreBusy, Unusable
from ...reading import parse_json
from ..content.disk import file_system
from ..content.files import no_space
from ..crash import crashpoint
from ..locks import Locks

if TYPE_CHECKING:
    from threading import Thread

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Data: TypeAlias = "Mapping[str, object]"
Row: TypeAlias = "tuple[Any, ...]"

PATIENCE: Final = 30.0  # seconds that a writer waits for another writer
_MAGIC = b"SQLite format 3\0"


class Kind(NamedTuple):
    """Type of database file: its schema, its side files, and its error messages."""

    name: str
    mark: int  # application id in the file's header
    migrations: tuple[tuple[str, ...], ...]
    """SQL statements per format version: a database of version n has had the first n.

    Released versions never change.
    """
    folders: tuple[str, ...]  # directories next to the file
    tags: Mapping[str, str]  # text files next to the database, by name
    mode: int  # file mode
    variable: str  # environment variable for another location
    # command that migrates an older database; if empty, readers migrate a copy in memory
    migrates: str
    without: str  # consequence of moving a damaged database away


def _copy_to_memory(db: sqlite3.Connection) -> sqlite3.Connection:
    """Copy a database to memory, and close the original connection."""
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with contextlib.closing(db):
        db.backup(copy)
    return copy


class Database:
    """Connection to an SQLite database file, opened with `Database.open`."""

    def __init__(self, root: Path, kind: Kind, connection: sqlite3.Connection) -> None:
        self.root, self.kind = root, kind
        self._connection = connection
        self._commit: Thread | None = None  # thread that waits for the disk
        self._failed: BaseException | None = None  # error of the last commit

    @property
    def connection(self) -> sqlite3.Connection:
        """SQLite connection, available after a pending commit has finished."""
        if self._commit is not None:
            self._commit.join()
        return self._connection

    @classmethod
    def open(cls, root: Path, kind: Kind, *, read_only: bool = False) -> Database:
        """Open the database file, creating or migrating it if necessary.

        Read-only access creates nothing, and treats a missing file as empty.
        """
        path = root / kind.name
        if not read_only:
            _make(path, kind)
        if not path.exists():
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _migrate(db, kind)
            return cls(root, kind, db)
        with _convert_errors(path, kind):
            try:
                db, version = _examine(path, kind, read_only=read_only)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                    raise
                # A killed writer left a partial transaction. Only a writable connection can roll it
                # back.
                _examine(path, kind, read_only=False)[0].close()
                db, version = _examine(path, kind, read_only=True)
            try:
                _set(db, read_only=read_only)
                if version < len(kind.migrations):
                    if read_only and kind.migrates:
                        raise Unusable(
                            f"{path}: format {version} is older than this program's",
                            fix=f"migrate the store with `{kind.migrates}`",
                        )
                    db = _copy_to_memory(db) if read_only else db
                    _migrate(db, kind)
                db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            except BaseException:
                db.close()
                raise
        return cls(root, kind, db)

    def close(self) -> None:
        self.connection.close()

    def check(self) -> str:
        """Return the first integrity fault of the database, or ""."""
        try:
            (answer,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            return str(error)
        return "" if answer == "ok" else str(answer)

    def version(self) -> int:
        """Return a number that changes when another process writes to the database."""
        ((number,),) = self.all("PRAGMA data_version")
        return int(str(number))

    def all(
        self, statement: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> list[Row]:
        """Return all rows of a query."""
        with _convert_errors(self.root / self.kind.name, self.kind):
            return self.connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def transaction(self, landed: Callable[[], None] | None = None) -> Iterator[sqlite3.Connection]:
        """Run a transaction in which all changes are stored, or none.

        With `landed`, a thread waits for the disk and then calls it. `land` then raises any error.
        """
        with self._rolled_back():
            self.connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            if landed is None:
                self.connection.execute("COMMIT")
        if landed is not None:
            self._commit = Thread(target=self._wait_for_disk, args=(landed,), name="commit")
            self._commit.start()

    def land(self) -> None:
        """Wait until the last transaction is on disk.

        Raises its error, in which case nothing was stored.
        """
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
        """Roll back the transaction on an error, and convert database errors."""
        with _convert_errors(self.root / self.kind.name, self.kind):
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise


def text(value: object) -> str:
    """Encode a value as JSON text for the database."""
    return "{}" if value == {} else _encode(value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"BUG: a {type(value).__name__} cannot be stored")


_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_plain).encode


def damaged_value(stored: object) -> Corrupt:
    """Return the error for an invalid value in the database."""
    return Corrupt(
        f"the database holds a damaged value: {str(stored)[:60]!r}",
        fix="check the store with `recipe doctor`",
    )


def parse_stored(stored: object) -> Json:
    """Decode a JSON value from the database.

    Raises Corrupt.
    """
    try:
        return cast("Json", parse_json(str(stored)))
    except ValueError as error:
        raise damaged_value(stored) from error


def mapping(stored: object) -> Data:
    """Decode a JSON mapping from the database.

    Raises Corrupt.
    """
    value = {} if stored == "{}" else parse_stored(stored)
    if not isinstance(value, dict):
        raise damaged_value(stored)
    return value


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    mode = "ro" if read_only else "rw"
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=PATIENCE,
        check_same_thread=False,
    )


def _set(db: sqlite3.Connection, *, read_only: bool) -> None:
    if not read_only:
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -16000")


def _examine(path: Path, kind: Kind, *, read_only: bool) -> tuple[sqlite3.Connection, int]:
    """Open a database file, and return the connection and its format version.

    Raises Unusable.

    Never open the file directly: closing any descriptor of the file drops all locks of this process
    on it, including those of its other connections, and another process could write at the same
    time (sqlite.org/howtocorrupt.html, 2.2).
    """
    db = _connect(path, read_only=read_only)
    try:
        db.execute("BEGIN")
        names = ("application_id", "user_version", "page_count", "page_size")
        mark, version, pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        short = not pages or pages * size > path.stat().st_size
        db.execute("COMMIT")
        if short:
            raise _damage_error(path, kind, "the file is truncated")
        if mark != kind.mark:
            raise _damage_error(path, kind, "the file is not a recipe store")
        if version > len(kind.migrations):
            raise Unusable(
                f"{path}: format {version} was written by a newer recipe; this version supports {len(kind.migrations)}",
                fix="install the newer version of recipe",
            )
        if version < 1:
            raise _damage_error(path, kind, "the file has no format version")
    except BaseException as error:
        db.close()
        if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ):
            raise _damage_error(path, kind, "the file is truncated or not a database") from error
        raise
    return db, version


def _damage_error(path: Path, kind: Kind, why: str) -> Unusable:
    return Unusable(
        f"{path} is damaged: {why}",
        fix=f"restore the file from a backup, or move it away: {kind.without}",
    )


def _make(path: Path, kind: Kind) -> None:
    """Create the directory and an empty database file, atomically."""
    root = path.parent
    try:
        _make_root(root)
        for folder in kind.folders:
            (root / folder).mkdir(exist_ok=True)
        mounted, remote = file_system(root)
        if remote:
            why = f"{root} is on a network file system ({mounted}), where locks and SQLite are not safe"
            raise Unusable(why, fix=f"set {kind.variable} to a path on a local disk")
        if path.exists():
            return
        with Locks(root / "locks").hold("store"):
            if path.exists():
                return
            for name, text in kind.tags.items():
                (root / name).write_text(text)
            new = root / f"{kind.name}-new"
            for left in (new, root / f"{kind.name}-new-journal"):
                left.unlink(missing_ok=True)
            with _convert_errors(path, kind):
                new.touch(mode=kind.mode)
                db = _connect(new)
                _set(db, read_only=False)
                # The file is not used before it is complete, so one sync at the end is enough.
                db.execute("PRAGMA journal_mode = MEMORY")
                db.execute("PRAGMA synchronous = OFF")
                db.execute(f"PRAGMA application_id = {kind.mark}")
                _migrate(db, kind)
                db.close()
            with new.open("rb") as made:
                os.fsync(made.fileno())
            crashpoint("store-made")
            new.rename(path)
    except OSError as error:
        raise Unusable(
            f"{error.filename or root}: {error.strerror}",
            fix=f"make it writable, or set {kind.variable} to a writable path",
        ) from error


def _make_root(root: Path) -> None:
    """Create the directory of a database, closed to others if the umask would let them write.

    An existing directory keeps its mode, since it may be shared on purpose.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir()
    except FileExistsError:
        return
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & stat.S_IWOTH:
        root.chmod(mode & ~stat.S_IRWXO)


def _migrate(db: sqlite3.Connection, kind: Kind) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        for number in range(version, len(kind.migrations)):
            for statement in kind.migrations[number]:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {max(version, len(kind.migrations))}")
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _convert_errors(path: Path, kind: Kind) -> Iterator[None]:
    """Convert errors of SQLite to errors with a fix: busy, damaged, not writable or disk full."""
    try:
        yield
    except UnicodeDecodeError as error:  # an error message that quotes a damaged schema
        raise _damage_error(path, kind, "cannot read the schema") from error
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreBusy(
                f"{path}: another process has been writing for {PATIENCE:.0f} s",
                fix="wait until that process ends, then try again",
            ) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _damage_error(path, kind, str(error)) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise Unusable(
                f"{path}: {error}",
                fix=f"make it writable, or set {kind.variable} to a writable path",
            ) from error
        if code == sqlite3.SQLITE_FULL:
            raise no_space(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), str(path)) from error
        if code == sqlite3.SQLITE_IOERR:
            raise Infrastructure(f"{path}: {error}") from error
        if any(words in str(error) for words in ("no such", "not decode", "no query solution")):
            raise _damage_error(path, kind, str(error)) from error
        raise
