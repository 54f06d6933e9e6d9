"""An SQLite file of ours: opened, examined, migrated, written in transactions.  The tables are the migrations of its `Kind`.

One journal mode for everybody, rollback with TRUNCATE and FULL: the write-ahead log of SQLite before 3.51.3 can be corrupted by two writers, and
groups make the difference small.  A `Database` is used by one thread at a time, and never across a fork.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

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

PATIENCE: Final = 30.0  # seconds that a writer waits for another
_MAGIC = b"SQLite format 3\0"


class Kind(NamedTuple):
    """A kind of database file: what is made for it, and what is said when it cannot be used."""

    name: str
    mark: int  # in the file's header
    migrations: tuple[tuple[str, ...], ...]
    """One tuple of statements per format version: the database of version n has had the first n.  Released ones never change."""
    folders: tuple[str, ...]  # beside the file
    tags: Mapping[str, str]  # files beside it -> what they say
    mode: int  # of the file
    variable: str  # names another folder or file
    migrates: str  # the command that migrates an older one; empty: it is small, and a reader migrates a copy in memory
    without: str  # what it means to move a damaged one away


def _copy_to_memory(db: sqlite3.Connection) -> sqlite3.Connection:
    """All of a database in memory; the connection to it is closed."""
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with contextlib.closing(db):
        db.backup(copy)
    return copy


class Database:
    """One connection to the file of a kind in the folder `root`.  Make one with `Database.open`."""

    def __init__(self, root: Path, kind: Kind, connection: sqlite3.Connection) -> None:
        self.root, self.kind = root, kind
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
    def open(cls, root: Path, kind: Kind, *, read_only: bool = False) -> Database:
        """Open the file, making or migrating it as needed.  Read-only: nothing is made, and a file that is not there is empty."""
        path = root / kind.name
        if not read_only:
            _make(path, kind)
        if not path.exists():
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _migrate(db, kind)
            return cls(root, kind, db)
        with _trouble(path, kind):
            try:
                db, version = _examine(path, kind, read_only=read_only)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                    raise
                # A writer was killed in the midst of a group: what it began is undone, which is not for a connection that only reads.
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

    def all(
        self, statement: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> list[Row]:
        """Every row of a query."""
        with _trouble(self.root / self.kind.name, self.kind):
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
        with _trouble(self.root / self.kind.name, self.kind):
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


def damaged_value(stored: object) -> Corrupt:
    """The error of a stored value that cannot be what was written."""
    return Corrupt(
        f"the database holds a damaged value: {str(stored)[:60]!r}",
        fix="check the store with `recipe doctor`",
    )


def parse_stored(stored: object) -> Json:
    """A stored value.  Raises Corrupt."""
    try:
        return cast("Json", parse_json(str(stored)))
    except ValueError as error:
        raise damaged_value(stored) from error


def mapping(stored: object) -> Data:
    """A stored object.  Raises Corrupt."""
    value = {} if stored == "{}" else parse_stored(stored)
    if not isinstance(value, dict):
        raise damaged_value(stored)
    return value


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    from urllib.parse import quote

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
    """A connection and the format version, or a refusal.

    The connection is asked, never the file: with the end of any `open` of it, all locks that this process has on it are gone, those of its other
    connections too, and another process writes at the same time (sqlite.org/howtocorrupt.html, 2.2).
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
    """Make the folder and an empty database, whole or not at all."""
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
            with _trouble(path, kind):
                new.touch(mode=kind.mode)
                db = _connect(new)
                _set(db, read_only=False)
                # It is not used before it is whole: it goes to the disk once, and not with every statement.
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
    """Make the folder of a database, closed to others if the umask would let them write in it.

    One that is there keeps its mode: it may be a folder that others share on purpose.
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
def _trouble(path: Path, kind: Kind) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:  # of a message that quotes a damaged schema
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
        if (
            "no such" in str(error)
            or "not decode" in str(error)
            or "no query solution" in str(error)
        ):
            raise _damage_error(path, kind, str(error)) from error
        raise
