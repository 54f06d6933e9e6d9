"""Runs in a workspace's SQLite file.

A claim is a local file lock, so a dead worker's run is free at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ..crash import crashpoint
from ..locks import Lock, Locks
from .database import Data, Database, Row, mapping, text
from .exchange import Exchange
from .index import NOTHING, Changes, Index
from .runs import (
    DESCRIBED,
    FINAL,
    LET_GO,
    LIMITED,
    NO_DATA,
    PRIORITIZED,
    RUN_COLUMNS,
    SILENT,
    AttemptRow,
    ClaimCriteria,
    Event,
    Reporter,
    Requested,
    RunRow,
    Runs,
    RunState,
    Stale,
    StepRow,
    Submission,
    Words,
    attempt_row,
    events_of,
    is_progress,
    same_request,
)

if TYPE_CHECKING:
    import sqlite3

    from ...planning.schedule import Move
    from .outbox import Letter, Outbox
    from .workers import Workers

_GLANCE = 50
"""Number of queued runs per query. Usually the first one is claimed."""


_WORDS: Final = Words(
    f"{RUN_COLUMNS}, user",
    "true",
    "true",
    "IN (SELECT value FROM json_each(:{}))",
    "SELECT a.* FROM json_each(:steps) AS wanted JOIN attempts a ON a.id = (SELECT b.id FROM attempts b JOIN runs r ON r.id = b.run"
    " WHERE b.step = wanted.value AND r.recipe = :recipe ORDER BY b.started DESC LIMIT 1)",
    {
        "yes": "json_extract(data, '$.archived') IS TRUE",
        "no": "json_extract(data, '$.archived') IS NOT TRUE",
    },
    {
        "user": "user = :user",
        "tag": "EXISTS (SELECT 1 FROM json_each(data, '$.tags') AS has WHERE has.value = :tag)",
        "name": "json_extract(data, '$.name') = :name",
        "part": "instr(id, :part)",
        "label": "EXISTS (SELECT 1 FROM json_each(data, '$.labels') AS has WHERE has.key || '=' || has.value = :label)",
    },
)


class SqliteRuns(Runs):
    """Runs in a workspace's SQLite database.

    The index is written in the same transactions.
    """

    shared = False
    words = _WORDS
    workspace = ""

    def __init__(self, database: Database, index: Index, locks: Locks) -> None:
        self._database, self._index, self._locks = database, index, locks
        self._claims: dict[str, Lock] = {}
        self.reporter: Reporter = SILENT
        self.exchange: Exchange = Exchange()

    def close(self) -> None:
        """Release all claims on runs."""
        for lock in self._claims.values():
            lock.release()
        self._claims = {}

    def all(self, statement: str, values: Mapping[str, object]) -> list[Row]:
        # SQLite has no list parameters: `json_each` of the statement reads them from JSON.
        parameters = dict(values)
        for name, value in values.items():
            if isinstance(value, list):
                parameters[name] = json.dumps(value)
        return self._database.all(statement, parameters)

    def live(self, run: str) -> bool:
        return self._locks.is_held(_claim_name(run))

    def news(self) -> int:
        return self._database.version()

    def take_request(self, run: str, fence: int) -> str:
        rows = self._database.all(
            "SELECT request FROM runs WHERE id = ? AND fence = ? AND claim <> ''", (run, fence)
        )
        if not rows:
            raise Stale(run)
        return str(rows[0][0])

    def prepare(self, run: str) -> None:
        self._claims[run] = self._locks.hold(_claim_name(run))

    def submit(self, run: RunRow, who: str = "", bundle: bytes = b"") -> Submission:
        lock: Lock | None = None
        if who:
            lock = self._claims.pop(run.id, None) or self._locks.try_hold(_claim_name(run.id))
        fence = int(lock is not None)
        now = time.time()
        try:
            with self._database.transaction() as db:
                known = _find_submitted(db, run)
                if known is not None:
                    return Submission(known)
                if not _insert_run(db, run, who if fence else "", fence, now):
                    return Submission(run.id)
                if self.reporter.listened_to(run.id, run.data):
                    queued = Event(run.id, 1, now, "run", run.id, "", "QUEUED", run.reason, {})
                    _post(db, run.id, self.reporter.letters([queued]))
            if lock is not None:
                self._claims[run.id], lock = lock, None
            return Submission(run.id, fence)
        finally:
            if lock is not None:
                lock.release()

    def claim(self, run: str, who: str) -> int | None:
        lock = self._claims.get(run) or self._locks.try_hold(_claim_name(run))
        if lock is None:
            return None
        self._claims[run] = lock
        try:
            with self._database.transaction() as db:
                row = db.execute(
                    "UPDATE runs SET claim = ?, fence = fence + 1, recoveries = recoveries + (claim <> '')"
                    " WHERE id = ? AND state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED') RETURNING fence",
                    (who, run),
                ).fetchall()
        except BaseException:
            self._claims.pop(run).release()
            raise
        if not row:
            self._claims.pop(run).release()
            self.get(run)
            return None
        return int(row[0][0])

    def claim_next(self, who: str, offer: ClaimCriteria) -> RunRow | None:
        if not offer.at_most:
            return self._claim_first(who, offer, Counter())
        with self._locks.hold("claiming"):  # otherwise two workers could count at the same time
            return self._claim_first(who, offer, self._count_busy())

    def _count_busy(self) -> Counter[tuple[str, str]]:
        """Count the runs that workers execute, by each field that can limit them."""
        rows = self._database.all(
            "SELECT id, user, recipe, json_extract(data, '$.settings.driver') FROM runs WHERE claim <> '' AND state IN ('QUEUED', 'ACTIVE')"
        )
        busy: Counter[tuple[str, str]] = Counter()
        for run, *values in rows:
            if self.live(run):
                busy.update(zip(LIMITED, values, strict=True))
        return busy

    def _claim_first(
        self, who: str, offer: ClaimCriteria, busy: Counter[tuple[str, str]]
    ) -> RunRow | None:
        """Claim the first due run below the limits; return None if there is none."""
        for run, *values in _due_runs(self._database, offer):
            if any(
                busy[kind, value] >= offer.at_most.get(kind, sys.maxsize)
                for kind, value in zip(LIMITED, values, strict=True)
            ):
                continue
            lock = None if run in self._claims else self._locks.try_hold(_claim_name(run))
            if lock is None:
                continue
            # Its worker may have ended it in the meantime.
            if self.get(run).state not in ("QUEUED", "ACTIVE"):
                lock.release()
                continue
            self._claims[run] = lock
            self.claim(run, who)
            return self.get(run)
        return None

    def forget_opener(self, run: str, address: str) -> None:
        without = json.dumps({"opens": {address: None}})
        with self._database.transaction() as db:
            db.execute(
                "UPDATE runs SET data = json_patch(data, ?) WHERE id = ? AND data LIKE '%\"opens\":%'",
                (without, run),
            )

    def release(self, run: str, fence: int, *, due: float | None = None) -> None:
        with self._database.transaction() as db:
            db.execute(
                "UPDATE runs SET claim = '', due = coalesce(due, ?) WHERE id = ? AND fence = ?",
                (due, run, fence),
            )
        self._release_lock(run)

    def _release_lock(self, run: str) -> None:
        lock = self._claims.pop(run, None)
        if lock is not None:
            lock.release()

    def group(
        self,
        run: str,
        fence: int,
        moves: Sequence[Move] = (),
        *,
        steps: Iterable[StepRow] = (),
        attempts: Iterable[AttemptRow] = (),
        changes: Changes = NOTHING,
        run_state: RunState | tuple[str, str] | None = None,
        answers: str = "",
        landed: Callable[[], None] | None = None,
    ) -> int:
        now = time.time()
        with self._database.transaction(landed) as db:
            crashpoint("group-begun")
            # Reserve the numbers of the events, if the claim is still ours.  Progress clears the
            # count of recoveries.
            rows = db.execute(
                "UPDATE runs SET next_event = next_event + ?, recoveries = recoveries * ? WHERE id = ? AND fence = ? AND claim <> ''"
                " RETURNING next_event, request",
                (len(moves), not any(map(is_progress, moves)), run, fence),
            ).fetchall()
            if not rows:
                raise Stale(run)
            last, request = rows[0][0] - 1, rows[0][1]
            if run_state is not None:
                if request not in ("", answers):
                    if run_state[0] in LET_GO:
                        raise Requested(request)
                    answers = ""
                _store_run_state(db, run, RunState(*run_state), answers, now)
            first = last - len(moves) + 1
            _insert_events(db, run, first, now, moves)
            db.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)", steps)
            db.executemany(
                "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                map(attempt_row, attempts),
            )
            # What the events send to webhooks and platforms, and the local index.
            events = events_of(run, first, now, moves)
            if events and self.reporter.listened_to(run, None):
                _post(db, run, self.reporter.letters(events))
            self._index.write(db, changes)
            crashpoint("group-written")
        if landed is None:
            crashpoint("group-committed")
        if run_state is not None and run_state[0] in LET_GO:
            self._release_lock(run)
        return int(last)

    def land(self) -> None:
        self._database.land()

    @cached_property
    def outbox(self) -> Outbox:
        from .outbox import SQLITE, Outbox

        return Outbox(self._ask, SQLITE)

    @cached_property
    def workers(self) -> Workers:
        from .outbox import SQLITE
        from .workers import Workers

        return Workers(self._ask, SQLITE.now)

    def _ask(self, statement: str, values: Mapping[str, object]) -> Sequence[Row]:
        if statement.startswith("SELECT"):
            return self._database.all(statement, values)
        with self._database.transaction() as db:
            return db.execute(statement, values).fetchall()

    def request(self, run: str, what: str, data: Data = NO_DATA) -> bool:
        with self._database.transaction() as db:
            rows = db.execute(
                "UPDATE runs SET request = ?, next_event = next_event + 1 WHERE id = ? AND state NOT IN ('COMPLETED', 'FAILED', 'CANCELLED')"
                " AND NOT (state = 'PAUSED' AND claim = '') RETURNING next_event - 1",
                (what, run),
            ).fetchall()
            if rows:
                event = (run, rows[0][0], time.time(), "request", run, "", what, "", text(data))
                db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", event)
        return bool(rows)

    def prioritize(self, run: str, priority: int) -> None:
        with self._database.transaction() as db:
            rows = db.execute(
                "UPDATE runs SET priority = ?, next_event = next_event + 1 WHERE id = ? RETURNING next_event - 1, state",
                (priority, run),
            ).fetchall()
            for seq, state in rows:
                data = text({"priority": priority})
                event = (run, seq, time.time(), "run", run, state, state, PRIORITIZED, data)
                db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", event)

    def describe(self, run: str, changes: Data) -> None:
        with self._database.transaction() as db:
            rows = db.execute(
                "UPDATE runs SET data = json_patch(data, ?), next_event = next_event + 1 WHERE id = ? RETURNING next_event - 1, state",
                (text(changes), run),
            ).fetchall()
            for seq, state in rows:
                event = (run, seq, time.time(), "run", run, state, state, DESCRIBED, "{}")
                db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", event)

    def forget(self, runs: Iterable[str]) -> None:
        with self._database.transaction() as db:
            runs = list(runs)
            db.execute(
                "DELETE FROM summaries WHERE attempt IN (SELECT id FROM attempts WHERE run IN (SELECT value FROM json_each(?)))",
                (json.dumps(runs),),
            )
            for table, column in (
                ("outbox", "run"),
                ("events", "run"),
                ("attempts", "run"),
                ("steps", "run"),
                ("runs", "id"),
            ):
                db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(run,) for run in runs])  # noqa: S608


def _due_runs(database: Database, offer: ClaimCriteria) -> Iterator[Row]:
    """Yield due unfinished runs that a worker may claim, in order.

    Labels and driver must match. A row has the id, user, recipe and driver.
    """
    values = (time.time(), offer.driver, json.dumps(dict(offer.labels)))
    skipped = 0
    while True:
        rows = database.all(
            "SELECT id, user, recipe, json_extract(data, '$.settings.driver') FROM runs"
            " WHERE due IS NOT NULL AND state IN ('QUEUED', 'ACTIVE') AND (due <= ? OR due <= created)"
            " AND ? IN ('', json_extract(data, '$.settings.driver')) AND NOT EXISTS (SELECT 1 FROM json_each(data, '$.labels') AS wanted"
            " WHERE NOT EXISTS (SELECT 1 FROM json_each(?) AS has WHERE has.key = wanted.key AND has.value = wanted.value))"
            " ORDER BY priority DESC, due, id LIMIT ? OFFSET ?",
            (*values, _GLANCE, skipped),
        )
        yield from rows
        if len(rows) < _GLANCE:
            return
        skipped += _GLANCE


def _find_submitted(db: sqlite3.Connection, run: RunRow) -> str | None:
    """Return the id of the run that an earlier submission with the same idempotency key made.

    Raises Invalid if that submission was a different request.
    """
    if not run.idempotency:
        return None
    query = "SELECT id, data FROM runs WHERE idempotency = ?"
    found = db.execute(query, (run.idempotency,)).fetchone()
    if found is None:
        return None
    id, data = found
    same_request(run, id, mapping(data))
    return str(id)


def _insert_run(db: sqlite3.Connection, run: RunRow, who: str, fence: int, now: float) -> bool:
    """Insert a queued run and its first event; return False if its id exists already."""
    asked = (
        run.id,
        run.recipe,
        run.plan,
        text(run.inputs),
        run.workspace,
        run.reason,
        run.created or now,
    )
    held = (who, fence, text(run.data), run.priority, run.due, run.idempotency, run.user)
    cursor = db.execute(
        "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?, 'QUEUED', ?, '', ?, NULL, ?, ?, 2, ?, ?, ?, ?, 0, ?, '')",
        (*asked, *held),
    )
    if not cursor.rowcount:
        return False
    db.execute(
        "INSERT INTO events VALUES (?, 1, ?, 'run', ?, '', 'QUEUED', ?, '{}')",
        (run.id, now, run.id, run.reason),
    )
    return True


def _store_run_state(
    db: sqlite3.Connection, run: str, state: RunState, answers: str, now: float
) -> None:
    """Store the state of a run, and with it the answer to the request `answers`."""
    ended = now if state.state in FINAL else None
    db.execute(
        "UPDATE runs SET state = ?, reason = ?, failure = ?, request = CASE request WHEN ? THEN '' ELSE request END, ended = ?,"
        " claim = CASE WHEN ? THEN '' ELSE claim END WHERE id = ?",
        (*state, answers, ended, state.state in LET_GO, run),
    )
    if ended is not None:
        db.execute(
            "UPDATE runs SET data = json_remove(data, '$.opens') WHERE id = ? AND data LIKE '%\"opens\":%'",
            (run,),
        )


def _insert_events(
    db: sqlite3.Connection, run: str, first: int, now: float, moves: Sequence[Move]
) -> None:
    """Insert the state changes as events, numbered from `first`."""
    db.executemany(
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                run,
                n,
                now,
                move.subject,
                move.id,
                move.before,
                move.after,
                move.reason,
                text(move.data),
            )
            for n, move in enumerate(moves, first)
        ],
    )


def _post(db: sqlite3.Connection, run: str, letters: Sequence[Letter]) -> None:
    if letters:
        from .outbox import COLUMNS, rows

        db.executemany(
            f"INSERT INTO outbox ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
            rows(run, letters),
        )


def _claim_name(run: str) -> str:
    return f"run-{run}"
