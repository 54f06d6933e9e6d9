"""Remember runs, traces and events in `.recipe/recipe.db`.  Knows rows and who may write them, not what a step does nor when it should run.

Everything that one group of moves implies is one transaction behind one guarded update of the run's row: claim and fence must be ours, and the same
update numbers the events, gap-free.  Whoever is stale writes nothing.  Objects are put away before the group that mentions them, or,
when they are tiny, in it.

One journal mode for everybody, rollback with TRUNCATE and FULL: the write-ahead log of SQLite before 3.51.3 can be corrupted by two writers, and
groups make the difference small.  A `Store` is used by one thread at a time, and never across a fork.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from .. import digest
from ..errors import Busy, Corrupt, Infrastructure, NotFound, Unusable
from ..paths import TAGS
from .crash import crashpoint
from .files import Content, FileRow
from .locks import Lock, Locks
from .objects import Seal

if TYPE_CHECKING:
    from threading import Thread

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Data: TypeAlias = "Mapping[str, object]"
_Row: TypeAlias = "tuple[Any, ...]"

FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
PATIENCE = 30.0  # seconds that a writer waits for another
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
)


class Stale(Busy):
    """This run is not ours any more: another worker has claimed it."""


class Requested(Busy):
    """Somebody has asked for something that this change of the run's state does not answer."""

    def __init__(self, request: str) -> None:
        super().__init__(f"{request} was asked for first")
        self.request = request


class Made(NamedTuple):
    """One output of a trace."""

    name: str
    path: str
    content: Content


class Trace(NamedTuple):
    """This key gave these outputs.  Metrics and facts are parsed when asked for."""

    key: str
    recipe: str
    step: str
    run: str
    made_at: float
    seconds: float
    outputs: tuple[Made, ...] = ()
    metrics_json: str = "{}"
    facts_json: str = "{}"

    @property
    def metrics(self) -> Data:
        return _mapping(self.metrics_json)

    @property
    def facts(self) -> Data:
        return _mapping(self.facts_json)


class RunRow(NamedTuple):
    id: str
    recipe: str
    plan: str
    inputs: Data
    workspace: str
    state: str = "QUEUED"
    reason: str = ""
    request: str = ""
    created: float = 0.0
    ended: float | None = None
    claim: str = ""
    fence: int = 0
    next_event: int = 1
    data: Data = {}  # noqa: RUF012  (never written to)


class StepRow(NamedTuple):
    run: str
    step: str
    state: str
    key: str = ""
    reason: str = ""


class AttemptRow(NamedTuple):
    """One try of one step.  `dir` is relative to the store's root."""

    id: str
    run: str
    step: str
    n: int
    key: str = ""
    job: Data = {}  # noqa: RUF012
    dir: str = ""
    started: float | None = None
    ended: float | None = None
    outcome: str = ""
    reason: str = ""
    exit: Data = {}  # noqa: RUF012
    preimage: Json = None


class Event(NamedTuple):
    run: str
    seq: int
    at: float
    subject: str
    id: str
    before: str
    after: str
    reason: str
    data: Data


class Published(NamedTuple):
    """A file or tree that we have put into the workspace, and what the file system said about it then."""

    path: str
    content: Content
    identity: str
    run: str
    step: str
    recipe: str


class Moved(Protocol):
    """A change of state, as the planner makes it."""

    @property
    def subject(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def data(self) -> Data: ...


def home(workspace: Path, environ: Mapping[str, str]) -> Path:
    """Where the store of a workspace is: `.recipe` in it, or a folder of its own below `RECIPE_HOME`."""
    if base := environ.get("RECIPE_HOME"):
        real = os.path.realpath(workspace)
        return Path(base) / f"{os.path.basename(real)}-{digest.of_bytes(os.fsencode(real))[:12]}"
    return workspace / ".recipe"


class Store:
    """The memory of one workspace.  Make one with `Store.open`."""

    def __init__(self, root: Path, db: sqlite3.Connection) -> None:
        self.root = root
        self.locks = Locks(root / "locks")
        self._connection = db
        self._claims: dict[str, Lock] = {}
        self._commit: Thread | None = None  # waits for the disk
        self._failed: BaseException | None = None  # what kept it from committing

    @property
    def _db(self) -> sqlite3.Connection:
        """The connection, when no thread is at it."""
        if self._commit is not None:
            self._commit.join()
        return self._connection

    @classmethod
    def open(cls, root: Path, *, read_only: bool = False) -> Store:
        """Open the store at `root`, making or migrating it as needed.  Read-only: nothing is made, and a store that is not there is empty."""
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
        """Let go of the database and of every claim."""
        for lock in self._claims.values():
            lock.release()
        self._claims = {}
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self) -> str:
        """What is wrong with the database after reading all of it; empty when nothing is."""
        try:
            (answer,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            return str(error)
        return "" if answer == "ok" else str(answer)

    # -- reading

    def files(self) -> list[FileRow]:
        """Every remembered digest, for `DigestCache`."""
        return cast("list[FileRow]", self._all("SELECT path, dev, ino, size, mtime_ns, ctime_ns, content FROM files"))

    def seal(self, content: Content) -> Seal | None:
        """The seal of an object, for `Objects`."""
        rows = self._all("SELECT content, mark, boot, size, at FROM objects WHERE content = ?", (content,))
        return Seal(*rows[0]) if rows else None

    def tiny(self, contents: Sequence[Content]) -> dict[Content, bytes]:
        """The bytes of tiny contents, for `Objects`: of those that are here."""
        whole = "coalesce(CAST(data AS BLOB), x'')"  # whatever damage has made of it, these are bytes
        return dict(self._all(f"SELECT content, {whole} FROM tiny WHERE content IN (SELECT value FROM json_each(?))", (json.dumps(contents),)))  # noqa: S608

    def tinies(self) -> dict[Content, float]:
        """Every tiny content, and when it was stored last."""
        return dict(self._all("SELECT content, at FROM tiny"))

    def traces(self, keys: Sequence[str]) -> dict[str, Trace]:
        """The traces of those keys that have one, whole.  A damaged row is no trace."""
        rows = self._all("SELECT * FROM traces WHERE key IN (SELECT value FROM json_each(?))", (json.dumps(keys),))
        return {row[0]: trace for row in rows if (trace := _trace(row)) is not None}

    def trace(self, key: str) -> Trace | None:
        """The trace of one key, if it has one and it is whole."""
        row = self._one("SELECT * FROM traces WHERE key = ?", (key,))
        return _trace(row) if row is not None else None

    def outputs(self, recipe: str) -> dict[str, tuple[list[Made], bool]]:
        """What every key of a recipe gave, and whether its trace has metrics: the fast half of `trace`, for tens of thousands at once.

        Items are bare (name, path, content) triples.
        """
        rows = self._all("SELECT key, outputs, outputs_crc, metrics <> '{}' FROM traces WHERE recipe = ?", (recipe,))
        crc32 = zlib.crc32
        sound = [row for row in rows if crc32(f"{row[0]}{row[1]}".encode()) == row[2]]
        made = json.loads("[" + ",".join([row[1] for row in sound]) + "]")
        return {row[0]: (items, bool(row[3])) for row, items in zip(sound, made, strict=True)}

    def traces_of_others(self, recipe: str) -> bool:
        """Whether there is a trace of any other recipe than this one."""
        parts = "SELECT 1 FROM traces WHERE recipe < ? LIMIT 1", "SELECT 1 FROM traces WHERE recipe > ? LIMIT 1"
        return any(self._all(part, (recipe,)) for part in parts)

    def version(self) -> int:
        """A number that is another one once another process has stored something."""
        ((number,),) = self._all("PRAGMA data_version")
        return int(str(number))

    def expected(self, recipe: str, steps: Iterable[str]) -> dict[str, float]:
        """Seconds that each of `steps` may take, from earlier ones; recent ones weigh more.  Steps never made are absent."""
        wanted = set(steps)
        answer: dict[str, float] = {}
        for step, seconds in self._all("SELECT step, seconds FROM traces WHERE recipe = ? ORDER BY made_at", (recipe,)):
            if step in wanted:
                answer[step] = (answer[step] + seconds) / 2 if step in answer else seconds
        return answer

    def published(self, recipe: str | None = None) -> dict[str, Published]:
        """Everything that we have put into the workspace, by path."""
        rows = self._all("SELECT * FROM published WHERE ? IS NULL OR recipe = ?", (recipe, recipe))
        return {row[0]: Published(*row) for row in rows}

    def run(self, run: str) -> RunRow:
        """One run.  Raises NotFound."""
        rows = self._all("SELECT * FROM runs WHERE id = ?", (run,))
        if not rows:
            raise NotFound(f"there is no run {run}", fix="`recipe runs` lists them")
        return _run(rows[0])

    def runs(self, *, recipe: str | None = None, last: int = 1_000_000) -> list[RunRow]:
        """The latest runs, newest first."""
        order = "ORDER BY created DESC, id DESC LIMIT ?"
        return [_run(row) for row in self._all(f"SELECT * FROM runs WHERE ? IS NULL OR recipe = ? {order}", (recipe, recipe, last))]  # noqa: S608

    def steps(self, run: str) -> dict[str, StepRow]:
        return {row[1]: StepRow(*row) for row in self._all("SELECT * FROM steps WHERE run = ?", (run,))}

    def tallies(self, runs: Collection[str]) -> dict[str, dict[tuple[str, str], int]]:
        """How many steps of each run are in each (state, phase); only a RUNNING step has a phase."""
        rows = self._all(
            "SELECT run, state, CASE state WHEN 'RUNNING' THEN reason ELSE '' END, count(*) FROM steps"
            " WHERE run IN (SELECT value FROM json_each(?)) GROUP BY 1, 2, 3",
            (json.dumps(list(runs)),),
        )
        answer: dict[str, dict[tuple[str, str], int]] = {run: {} for run in runs}
        for run, state, phase, count in rows:
            answer[run][state, phase] = count
        return answer

    def attempts(self, run: str, step: str | None = None) -> list[AttemptRow]:
        """The attempts of a run, or of one step of it, in order."""
        rows = self._all("SELECT * FROM attempts WHERE run = ? AND (? IS NULL OR step = ?) ORDER BY step, n", (run, step, step))
        return [AttemptRow._make((*row[:5], _mapping(row[5]), *row[6:11], _mapping(row[11]), _parsed(row[12]))) for row in rows]

    def latest_attempts(self, recipe: str, steps: Collection[str], *, run: str | None = None) -> dict[str, AttemptRow]:
        """The last attempt of each of `steps` in any run of a recipe, or in one run: whose pre-image says what it was run with."""
        rows = self._all(
            "SELECT a.*, max(a.started) FROM attempts a JOIN runs r ON r.id = a.run WHERE r.recipe = ? AND (? IS NULL OR a.run = ?)"
            " AND a.step IN (SELECT value FROM json_each(?)) GROUP BY a.step",
            (recipe, run, run, json.dumps(list(steps))),
        )
        return {row[2]: AttemptRow._make((*row[:5], _mapping(row[5]), *row[6:11], _mapping(row[11]), _parsed(row[12]))) for row in rows}

    def events(self, run: str, after: int = 0, limit: int = 1_000_000) -> list[Event]:
        """The events of a run with a number above `after`, in order, without gaps."""
        rows = self._all("SELECT * FROM events WHERE run = ? AND seq > ? ORDER BY seq LIMIT ?", (run, after, limit))
        return [Event._make((*row[:8], _mapping(row[8]))) for row in rows]

    def live(self, run: str) -> bool:
        """Whether a worker of this machine is alive and has claimed the run."""
        return self.locks.held(_claim_name(run))

    def requested(self, run: str, fence: int) -> str:
        """What has been asked of the run that we have claimed."""
        rows = self._all("SELECT request FROM runs WHERE id = ? AND fence = ? AND claim <> ''", (run, fence))
        if not rows:
            raise Stale(f"run {run} is not ours any more")
        return str(rows[0][0])

    # -- writing

    def submit(self, run: RunRow) -> None:
        """Store a new run, QUEUED, with its first event.  The same id twice is the same run."""
        with self._transaction():
            cursor = self._db.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?, 'QUEUED', ?, '', ?, NULL, '', 0, 2, ?)",
                (run.id, run.recipe, run.plan, _text(run.inputs), run.workspace, run.reason, run.created or time.time(), _text(run.data)),
            )
            if cursor.rowcount:
                self._db.execute("INSERT INTO events VALUES (?, 1, ?, 'run', ?, '', 'QUEUED', ?, '{}')", (run.id, time.time(), run.id, run.reason))

    def claim(self, run: str, who: str) -> int | None:
        """Become the run's only worker, also after one that died; None while another lives.  Answers the fence, which every write must carry."""
        lock = self._claims.get(run) or self.locks.try_hold(_claim_name(run))
        if lock is None:
            return None
        self._claims[run] = lock
        try:
            with self._transaction():
                row = self._db.execute("UPDATE runs SET claim = ?, fence = fence + 1 WHERE id = ? RETURNING fence", (who, run)).fetchall()
        except BaseException:
            self._claims.pop(run).release()
            raise
        if not row:
            self._claims.pop(run).release()
            raise NotFound(f"there is no run {run}", fix="`recipe runs` lists them")
        return int(row[0][0])

    def release(self, run: str, fence: int) -> None:
        """Give the claim back; the run stays as it is."""
        with self._transaction():
            self._db.execute("UPDATE runs SET claim = '' WHERE id = ? AND fence = ?", (run, fence))
        if lock := self._claims.pop(run, None):
            lock.release()

    def group(
        self,
        run: str,
        fence: int,
        moves: Sequence[Moved] = (),
        *,
        steps: Iterable[StepRow] = (),
        attempts: Iterable[AttemptRow] = (),
        traces: Iterable[Trace] = (),
        files: Iterable[FileRow] = (),
        objects: Iterable[Seal] = (),
        tiny: Mapping[Content, bytes] = MappingProxyType({}),
        published: Iterable[Published] = (),
        unpublished: Iterable[str] = (),
        run_state: tuple[str, str] | None = None,
        answers: str = "",
        landed: Callable[[], None] | None = None,
    ) -> int:
        """Store all this together, or raise and store nothing.  Answers the number of the last event.

        With `landed` a thread waits for the disk, and calls it in the end; `land` then says whether this is stored.  Whoever asks the store for
        something meanwhile waits too.

        `run_state` is the run's next (state, reason); a final one ends the run and its claim.  It must answer the request that is pending, if any:
        otherwise Requested is raised, so that a cancel that came before the end wins.  Stale: another worker has the run.
        """
        now = time.time()
        with self._transaction(landed):
            crashpoint("group-begun")
            rows = self._db.execute(
                "UPDATE runs SET next_event = next_event + ? WHERE id = ? AND fence = ? AND claim <> '' RETURNING next_event, request",
                (len(moves), run, fence),
            ).fetchall()
            if not rows:
                raise Stale(f"run {run} is not ours any more")
            last, request = rows[0][0] - 1, rows[0][1]
            if run_state is not None:
                if request not in ("", answers):
                    raise Requested(request)
                ended = now if run_state[0] in FINAL else None
                self._db.execute(
                    "UPDATE runs SET state = ?, reason = ?, request = '', ended = ?, claim = CASE WHEN ? IS NULL THEN claim ELSE '' END WHERE id = ?",
                    (*run_state, ended, ended, run),
                )
            first = last - len(moves) + 1
            many = self._db.executemany
            many(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(run, n, now, move.subject, move.id, move.before, move.after, move.reason, _text(move.data)) for n, move in enumerate(moves, first)],
            )
            many("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", steps)
            many(
                "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*row[:5], _text(row.job), *row[6:11], _text(row.exit), _text(row.preimage)) for row in attempts],
            )
            many("INSERT OR IGNORE INTO traces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [_trace_row(trace) for trace in traces])
            many("INSERT OR REPLACE INTO tiny VALUES (?, ?, ?)", [(content, data, now) for content, data in tiny.items()])
            self._save(files, objects)
            many("DELETE FROM published WHERE path = ?", [(path,) for path in unpublished])
            many("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?, ?, ?)", published)
            crashpoint("group-written")
        if landed is None:
            crashpoint("group-committed")
        if run_state is not None and run_state[0] in FINAL and (lock := self._claims.pop(run, None)):
            lock.release()
        return int(last)

    def land(self) -> None:
        """Wait until the group that was stored last is on the disk.  Raises what kept it from that; nothing of it is stored then."""
        if self._commit is not None:
            self._commit.join()
            self._commit = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def request(self, run: str, what: str) -> bool:
        """Ask a run for `cancel`, `pause` or `resume`: durable when this returns.  False: it is over."""
        with self._transaction():
            rows = self._db.execute(
                "UPDATE runs SET request = ?, next_event = next_event + 1 WHERE id = ? AND state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED')"
                " RETURNING next_event - 1",
                (what, run),
            ).fetchall()
            if rows:
                event = (run, rows[0][0], time.time(), "request", run, "", what, "", "{}")
                self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", event)
        return bool(rows)

    def remember(self, files: Iterable[FileRow], objects: Iterable[Seal] = ()) -> None:
        """Keep digests and seals that were learned outside a run."""
        with self._transaction():
            self._save(files, objects)

    def adopt(self, trace: Trace, published: Iterable[Published]) -> None:
        """Take files as they are for what a step makes: this trace instead of any other of its key."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO traces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _trace_row(trace))
            self._db.executemany("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?, ?, ?)", published)

    def learn(self, traces: Iterable[Trace]) -> None:
        """Keep traces that were made elsewhere, of keys that have none."""
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO traces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [_trace_row(trace) for trace in traces])

    def unpublish(self, paths: Iterable[str]) -> None:
        """Forget that we have put these paths into the workspace."""
        with self._transaction():
            self._db.executemany("DELETE FROM published WHERE path = ?", [(path,) for path in paths])

    def forget(self, *, traces: Iterable[str] = (), runs: Iterable[str] = (), objects: Iterable[Content] = (), files: Iterable[str] = ()) -> None:
        """Delete rows: what `gc` decided."""
        with self._transaction():
            self._db.executemany("DELETE FROM traces WHERE key = ?", [(key,) for key in traces])
            for table, column in (("events", "run"), ("attempts", "run"), ("steps", "run"), ("runs", "id")):
                self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(run,) for run in runs])  # noqa: S608
            self._db.executemany("DELETE FROM objects WHERE content = ?", [(content,) for content in objects])
            self._db.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in files])

    def forget_tiny(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete those of these tiny contents that were stored last before then, and say which."""
        statement = "DELETE FROM tiny WHERE at < ? AND content IN (SELECT value FROM json_each(?)) RETURNING content"
        with self._transaction():
            return {row[0] for row in self._db.execute(statement, (before, json.dumps(contents))).fetchall()}

    def every_trace(self) -> Iterator[Trace]:
        """All traces, oldest first."""
        keys = [row[0] for row in self._all("SELECT key FROM traces ORDER BY made_at")]
        for start in range(0, len(keys), 10_000):
            part = keys[start : start + 10_000]
            found = self.traces(part)
            yield from (found[key] for key in part if key in found)

    # -- below

    def _save(self, files: Iterable[FileRow], objects: Iterable[Seal]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", files)
        self._db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?)", objects)

    def _one(self, statement: str, values: Sequence[object]) -> _Row | None:
        try:
            row: _Row | None = self._db.execute(statement, values).fetchone()
            return row
        except sqlite3.Error:
            with _trouble(self.root / "recipe.db"):
                raise

    def _all(self, statement: str, values: Sequence[object] = ()) -> list[_Row]:
        with _trouble(self.root / "recipe.db"):
            return self._db.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self, landed: Callable[[], None] | None = None) -> Iterator[None]:
        with self._rolled_back():
            self._db.execute("BEGIN IMMEDIATE")
            yield
            if landed is None:
                self._db.execute("COMMIT")
        if landed is not None:
            from threading import Thread

            self._commit = Thread(target=self._wait_for_disk, args=(landed,), name="commit")
            self._commit.start()

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


def _claim_name(run: str) -> str:
    return f"run-{run}"


def _text(value: object) -> str:
    return "{}" if value == {} else _encode(value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"BUG: a {type(value).__name__} cannot be stored")


_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_plain).encode


def _parsed(text: object) -> Json:
    try:
        return cast("Json", json.loads(str(text)))
    except ValueError as error:
        raise Corrupt(f"the database holds a damaged value: {str(text)[:60]!r}", fix="`recipe doctor` says more") from error


def _mapping(text: object) -> Data:
    value = {} if text == "{}" else _parsed(text)
    if not isinstance(value, dict):
        raise Corrupt(f"the database holds a damaged value: {str(text)[:60]!r}", fix="`recipe doctor` says more")
    return value


def _run(row: _Row) -> RunRow:
    fields = list(row)
    fields[3], fields[13] = _mapping(row[3]), _mapping(row[13])
    return RunRow._make(fields)


def _trace_row(trace: Trace) -> _Row:
    outputs = json.dumps(trace.outputs, separators=(",", ":"))
    said = (trace.metrics_json, trace.facts_json)
    return (*trace[:6], outputs, _crc(trace.key, outputs), *said, _crc(trace.key, *said))


def _trace(row: _Row) -> Trace | None:
    if _crc(row[0], row[6]) != row[7] or _crc(row[0], row[8], row[9]) != row[10]:
        return None
    return Trace._make((*row[:6], tuple(Made(*item) for item in json.loads(row[6])), row[8], row[9]))


def _crc(*parts: object) -> int:
    return zlib.crc32("".join(map(str, parts)).encode())


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
