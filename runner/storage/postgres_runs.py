"""Runs in a PostgreSQL database, for workers of more than one machine.  What one disk knows stays in that disk's own file.

A claim lasts `CLAIM` seconds by the clock of the database, and is kept by beats; that of a dead process of this machine counts for nothing at once.
A group is one guarded transaction: the disk's index first, which is named by content and may be written twice, then the rows here.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Thread
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection, sql

from ..errors import Infrastructure, NotFound, Unusable
from .crash import crashpoint
from .database import Data, Database, Row, mapping, parsed, text
from .index import NOTHING, Changes, Index
from .outbox import COLUMNS, POSTGRES, Letter, Outbox
from .runs import (
    ELSEWHERE,
    FINAL,
    NO_DATA,
    AttemptRow,
    Chunk,
    Event,
    Moved,
    Offer,
    Output,
    Reporter,
    Requested,
    RunRow,
    Stale,
    StepRow,
    Submitted,
    Wanted,
    is_progress,
    nothing_told,
    of_several_states,
    outputs_of,
    same_request,
    told_of,
)

CLAIM: Final = 30.0
BEAT: Final = 10.0
"""Seconds between two beats of a claim."""
PATIENCE: Final = 60.0
"""Seconds that a database which does not answer is waited for."""
PAUSE: Final = 0.5
_CHANNEL: Final = "recipe_runs"
_CLAIMING: Final = 0x72637066
"""Of the advisory lock under which runs are counted."""
_LOCK: Final = 0x72637065
"""Of the advisory lock under which the schema is migrated."""

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
)
"""One tuple of statements for each version of the schema.  Released ones never change."""

_COLUMNS: Final = (
    "id, recipe, plan, inputs, workspace, state, reason, request, created, ended, claim, fence, next_event, data, priority, due, idempotency,"
    " recoveries, submitter, bundle, store, outputs"
)
_FREE: Final = (
    "(holder = ANY(%(dead)s) OR ((claim = '' OR held_until < now()) AND (bundle = '' OR driver <> 'local' OR holder = ''"
    f" OR starts_with(holder, %(machine)s) OR held_until < now() - interval '{ELSEWHERE - CLAIM} seconds'"
    " OR NOT EXISTS (SELECT FROM steps WHERE steps.run = runs.id AND steps.state = 'RUNNING'))))"
)
"""A run that may be claimed: of one whose jobs may go on where its worker was, other machines wait until their agent has ended them."""
_COUNTED: Final = {"user": "submitter", "recipe": "recipe", "driver": "driver"}
_FINAL: Final = "('COMPLETED', 'FAILED', 'CANCELLED')"
LATELY: Final = 1.0
"""Seconds for which a look at the holders of claims is believed by who takes runs."""
Answer = TypeVar("Answer")


class PostgresRuns:
    """The runs of one workspace in a database that many share."""

    def __init__(self, url: str, workspace: str, database: Database, index: Index, *, read_only: bool = False) -> None:
        """Connect, and bring the schema up to date.  Raises Infrastructure, Unusable."""
        self._url, self._workspace, self._disk, self._index = url, workspace, database, index
        self._me = f"{_machine()} {os.getpid()} {_began(os.getpid())} {os.urandom(4).hex()}"
        self._news, self._beaten = 0, time.monotonic()
        self._claims: set[str] = set()
        self.reporter: Reporter = nothing_told
        self._connection: Connection[Row] | None = None
        self._beats: _Beats | None = None
        self._do(lambda db: _migrate(db, read_only=read_only))

    def close(self) -> None:
        """Let go of every claim: another worker may take those runs at once."""
        if self._beats is not None:
            self._beats.over.set()
            self._beats.join()
            self._beats = None
        if self._connection is not None and not self._connection.closed:
            if self._claims:
                self._all("UPDATE runs SET held_until = now() WHERE holder = %s AND id = ANY(%s) RETURNING id", (self._me, list(self._claims)))
            _idle[self._url] = self._connection
        self._connection = None

    # -- reading

    def get(self, run: str) -> RunRow:
        rows = self._all(f"SELECT {_COLUMNS} FROM runs WHERE id = %s", (run,))  # noqa: S608
        if not rows:
            raise NotFound(f"there is no run {run}", fix="`recipe runs` lists them")
        return _run(rows[0])

    def latest(self, *, recipe: str | None = None, last: int = 1_000_000) -> list[RunRow]:
        rows = self._all(
            f"SELECT {_COLUMNS} FROM runs WHERE (workspace = %s OR (worked_in = %s AND bundle <> '')) AND (%s::text IS NULL OR recipe = %s)"  # noqa: S608
            " ORDER BY created DESC, id DESC LIMIT %s",
            (self._workspace, self._workspace, recipe, recipe, last),
        )
        return [_run(row) for row in rows]

    def page(self, wanted: Wanted, limit: int) -> list[RunRow]:
        if len(wanted.states) > 1:
            return of_several_states(self.page, wanted, limit)
        asked: dict[str, tuple[str, str | list[str]]] = {
            "workspace = %(workspace)s": ("workspace", self._workspace),
            "id < %(before)s": ("before", wanted.before),
            "idempotency = %(key)s": ("key", wanted.key),
            "recipe = %(recipe)s": ("recipe", wanted.recipe),
            "state = %(state)s": ("state", "".join(wanted.states)),
            "submitter = %(user)s": ("user", wanted.user),
            "labels @> %(labels)s::text[]": ("labels", _pairs(dict([wanted.label])) if wanted.label else []),
        }
        conditions = " AND ".join(condition for condition, (_, word) in asked.items() if word)
        query = f"SELECT {_COLUMNS} FROM runs WHERE {conditions} ORDER BY id DESC LIMIT %(limit)s"  # noqa: S608
        return [_run(row) for row in self._all(query, {**dict(asked.values()), "limit": limit})]

    def steps(self, run: str) -> dict[str, StepRow]:
        return {row[1]: StepRow(*row) for row in self._all("SELECT run, step, state, key, reason FROM steps WHERE run = %s", (run,))}

    def tallies(self, runs: Collection[str]) -> dict[str, dict[tuple[str, str], int]]:
        rows = self._all(
            "SELECT run, state, CASE state WHEN 'RUNNING' THEN reason ELSE '' END, count(*) FROM steps WHERE run = ANY(%s) GROUP BY 1, 2, 3",
            (list(runs),),
        )
        answer: dict[str, dict[tuple[str, str], int]] = {run: {} for run in runs}
        for run, state, phase, count in rows:
            answer[run][state, phase] = count
        return answer

    def attempts(self, run: str, step: str | None = None) -> list[AttemptRow]:
        rows = self._all("SELECT * FROM attempts WHERE run = %s AND (%s::text IS NULL OR step = %s) ORDER BY step, n", (run, step, step))
        return [_attempt(row) for row in rows]

    def latest_attempts(self, recipe: str, steps: Collection[str], *, run: str | None = None) -> dict[str, AttemptRow]:
        rows = self._all(
            "SELECT DISTINCT ON (a.step) a.* FROM attempts a JOIN runs r ON r.id = a.run WHERE r.recipe = %s AND r.workspace = %s"
            " AND (%s::text IS NULL OR a.run = %s) AND a.step = ANY(%s) ORDER BY a.step, a.started DESC NULLS LAST",
            (recipe, self._workspace, run, run, list(steps)),
        )
        return {row[2]: _attempt(row) for row in rows}

    def events(self, run: str, after: int = 0, limit: int = 1_000_000) -> list[Event]:
        rows = self._all("SELECT * FROM events WHERE run = %s AND seq > %s ORDER BY seq LIMIT %s", (run, after, limit))
        return [Event._make((*row[:8], mapping(row[8]))) for row in rows]

    def places(self, runs: Collection[str]) -> dict[tuple[str, str], str]:
        rows = self._all(
            "SELECT DISTINCT ON (run, id) run, id, data FROM events WHERE run = ANY(%s) AND subject = 'step' AND after = 'RUNNING'"
            " ORDER BY run, id, seq DESC",
            (list(runs),),
        )
        return {(run, id): str(site) for run, id, data in rows if '"site"' in data and (site := mapping(data).get("site"))}

    def live(self, run: str) -> bool:
        return bool(self._all(f"SELECT 1 FROM runs WHERE id = %(run)s AND NOT {_FREE}", {"run": run} | self._known()))  # noqa: S608

    # -- what a worker is told

    def news(self) -> int:
        db = self._connection
        if db is not None and not db.closed and select.select([db.fileno()], [], [], 0)[0]:
            self._news += len(self._do(lambda db: list(db.notifies(timeout=0))))
        if time.monotonic() - self._beaten > BEAT:
            self._beaten, self._news = time.monotonic(), self._news + 1
        return self._news

    def requested(self, run: str, fence: int) -> str:
        rows = self._all(
            "UPDATE runs SET held_until = now() + %s * interval '1 second' WHERE id = %s AND fence = %s AND claim <> '' AND holder = %s"
            " RETURNING request",
            (CLAIM, run, fence, self._me),
        )
        if not rows:
            raise Stale(f"run {run} is not ours any more")
        self._beaten = time.monotonic()
        return str(rows[0][0])

    # -- writing

    @property
    def shared(self) -> bool:
        return True

    def bundle(self, digest: str) -> bytes | None:
        rows = self._all("SELECT data FROM bundles WHERE digest = %s", (digest,))
        return bytes(rows[0][0]) if rows else None

    def made(self, run: str, fence: int, outputs: Sequence[Output]) -> None:
        ours = "id = %s AND fence = %s AND holder = %s AND claim <> ''"
        if not self._all(f"UPDATE runs SET outputs = %s WHERE {ours} RETURNING 1", (text(list(outputs)), run, fence, self._me)):  # noqa: S608
            raise Stale(f"run {run} is not ours any more")

    def hold_key(self, key: str, run: str) -> bool:
        held = self._all(
            "INSERT INTO keys VALUES (%(key)s, %(run)s) ON CONFLICT (key) DO UPDATE SET run = excluded.run WHERE keys.run = excluded.run"  # noqa: S608
            f" OR NOT EXISTS (SELECT FROM runs WHERE runs.id = keys.run AND NOT {_FREE}) RETURNING 1",
            {"key": key, "run": run} | self._known(),
        )
        return bool(held)

    def release_keys(self, keys: Collection[str], run: str) -> None:
        self._all("DELETE FROM keys WHERE key = ANY(%s) AND run = %s RETURNING 1", (list(keys), run))

    def add_chunks(self, run: str, fence: int, chunks: Sequence[Chunk]) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                self._guard(db, run, fence)
                with db.pipeline(), db.cursor() as many:
                    rows = [(run, each.attempt, each.stream, each.offset, each.data, each.content) for each in chunks]
                    many.executemany("INSERT INTO chunks VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING", rows)

        self._do(store)

    def fold(self, run: str, fence: int, whole: Chunk) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                self._guard(db, run, fence)
                db.execute("DELETE FROM chunks WHERE run = %s AND attempt = %s AND stream = %s", (run, whole.attempt, whole.stream))
                db.execute("INSERT INTO chunks VALUES (%s, %s, %s, 0, %s, %s)", (run, whole.attempt, whole.stream, whole.data, whole.content))

        self._do(store)

    def _guard(self, db: Connection[Row], run: str, fence: int) -> None:
        """In a transaction: nobody else claims the run before its end.  Raises Stale."""
        ours = "SELECT 1 FROM runs WHERE id = %s AND fence = %s AND holder = %s FOR SHARE"
        if db.execute(ours, (run, fence, self._me)).fetchone() is None:
            raise Stale(f"run {run} is not ours any more")

    def chunks(self, run: str, attempt: str, stream: str, offset: int = 0) -> list[Chunk]:
        rows = self._all(
            "SELECT attempt, stream, start, data, content FROM chunks WHERE run = %s AND attempt = %s AND stream = %s"
            " AND (start + length(data) > %s OR content <> '') ORDER BY start LIMIT 16",
            (run, attempt, stream, offset),
        )
        return [Chunk(row[0], row[1], row[2], bytes(row[3]), row[4]) for row in rows]

    def submit(self, run: RunRow, who: str = "", bundle: bytes = b"") -> Submitted:
        settings, labels = run.data.get("settings"), run.data.get("labels")
        driver = str(settings.get("driver", "")) if isinstance(settings, dict) else ""
        held = self._me if who else ""
        asked = (run.id, run.recipe, run.plan, text(run.inputs), self._workspace, run.reason, run.created or time.time(), who, int(bool(who)))
        ticket = (run.priority, run.due, run.idempotency, run.user, run.bundle, run.store)
        new = (*asked, text(run.data), *ticket, driver, _pairs(labels), held, CLAIM if who else -CLAIM)

        def store(db: Connection[Row]) -> Submitted:
            with db.transaction():
                fresh = db.execute(
                    "INSERT INTO runs (id, recipe, plan, inputs, workspace, state, reason, created, claim, fence, data, priority, due, idempotency,"
                    " submitter, bundle, store, driver, labels, holder, held_until) VALUES (%s, %s, %s, %s, %s, 'QUEUED', %s, %s, %s, %s, %s, %s,"
                    " %s, %s, %s, %s, %s, %s, %s, %s,"
                    " now() + %s * interval '1 second') ON CONFLICT DO NOTHING RETURNING fence",
                    new,
                ).fetchone()
                if fresh is None:
                    known = db.execute(
                        "SELECT id, data, fence, holder FROM runs WHERE id = %s OR idempotency = %s", (run.id, run.idempotency or None)
                    )
                    id, data, fence, holder = known.fetchall()[0]
                    if id != run.id:
                        same_request(run, id, mapping(data))
                    return Submitted(id, fence if who and holder == self._me else 0)  # ours: the reply to the first try was lost
                began = Event(run.id, 1, time.time(), "run", run.id, "", "QUEUED", run.reason, {})
                db.execute("INSERT INTO events VALUES (%s, 1, %s, 'run', %s, '', 'QUEUED', %s, '{}')", (run.id, began.at, run.id, run.reason))
                _post(db, run.id, self.reporter([began]))
                if bundle:
                    db.execute("INSERT INTO bundles VALUES (%s, %s) ON CONFLICT DO NOTHING", (run.bundle, bundle))
                db.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, run.id))
            return Submitted(run.id, int(fresh[0]))

        done = self._do(store)
        if done.fence:
            self._keep(done.id)
        return done

    def claim(self, run: str, who: str) -> int | None:
        rows = self._all(
            "UPDATE runs SET claim = %(who)s, fence = fence + 1, recoveries = recoveries + (claim <> '')::int, holder = %(me)s,"  # noqa: S608
            " worked_in = %(workspace)s,"
            f" held_until = now() + %(long)s * interval '1 second' WHERE id = %(run)s AND (holder = %(me)s OR {_FREE}) RETURNING fence",
            {"who": who, "me": self._me, "long": CLAIM, "run": run, "workspace": self._workspace} | self._known(),
        )
        if not rows:
            self.get(run)
            return None
        self._keep(run)
        return int(rows[0][0])

    def claim_next(self, who: str, offer: Offer) -> Submitted | None:
        counted = _FREE.replace("runs.", "busy.")
        below = "".join(
            f" AND (SELECT count(*) FROM runs AS busy WHERE busy.{_COUNTED[kind]} = runs.{_COUNTED[kind]} AND NOT {counted}) < %(most_{kind})s"  # noqa: S608
            for kind in offer.at_most
        )
        statement = (
            "UPDATE runs SET claim = %(who)s, fence = fence + 1, recoveries = recoveries + (claim <> '')::int, holder = %(me)s,"  # noqa: S608
            " worked_in = %(workspace)s,"
            " held_until = now() + %(long)s * interval '1 second' WHERE id = (SELECT id FROM runs"
            " WHERE CASE WHEN bundle = '' THEN %(store)s = '' AND workspace = %(workspace)s ELSE store = %(store)s END"
            " AND due IS NOT NULL AND (due <= extract(epoch FROM now()) OR due <= created) AND state IN ('QUEUED', 'ACTIVE')"
            f" AND %(driver)s IN ('', driver) AND labels <@ %(labels)s AND {_FREE}{below}"
            " ORDER BY priority DESC, due, id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id, fence"
        )
        values = {"who": who, "me": self._me, "long": CLAIM, "workspace": self._workspace, "driver": offer.driver, "store": offer.store}
        values |= {"labels": _pairs(dict(offer.labels)), **self._lately(), **{f"most_{kind}": most for kind, most in offer.at_most.items()}}

        tries = 0

        def claim(db: Connection[Row]) -> list[Row]:
            nonlocal tries
            tries += 1
            if tries > 1:  # the reply to a claim may be what was lost
                ours = "SELECT id, fence FROM runs WHERE holder = %s AND claim <> '' AND id <> ALL(%s) LIMIT 1"
                if found := db.execute(ours, (self._me, list(self._claims))).fetchall():
                    return found
            if not offer.at_most:
                return db.execute(statement.encode(), values).fetchall()
            with db.transaction():  # else two would count at once
                db.execute("SELECT pg_advisory_xact_lock(%s)", (_CLAIMING,))
                return db.execute(statement.encode(), values).fetchall()

        rows = self._do(claim)
        if not rows and values["dead"] != (values := values | self._known())["dead"]:
            rows = self._do(claim)
        if not rows:
            return None
        self._keep(rows[0][0])
        return Submitted(rows[0][0], int(rows[0][1]))

    def opened(self, run: str, address: str) -> None:
        """Another machine may have to fetch it again, so it is kept until the run is over."""

    def release(self, run: str, fence: int) -> None:
        self._claims.discard(run)
        self._all(
            "WITH freed AS (UPDATE runs SET claim = '', held_until = now() WHERE id = %s AND fence = %s AND holder = %s RETURNING id)"
            " SELECT pg_notify(%s, id) FROM freed",
            (run, fence, self._me, _CHANNEL),
        )

    def group(
        self,
        run: str,
        fence: int,
        moves: Sequence[Moved] = (),
        *,
        steps: Iterable[StepRow] = (),
        attempts: Iterable[AttemptRow] = (),
        changes: Changes = NOTHING,
        run_state: tuple[str, str] | None = None,
        answers: str = "",
        landed: Callable[[], None] | None = None,
    ) -> int:
        now = time.time()
        events = [(now, move.subject, move.id, move.before, move.after, move.reason, text(move.data)) for move in moves]
        kept = [tuple(step) for step in steps]
        tried = [(*row[:5], text(row.job), *row[6:11], text(row.exit), text(row.preimage)) for row in attempts]
        fading = int(not any(map(is_progress, moves)))
        if changes != NOTHING:
            if not self._all("SELECT 1 FROM runs WHERE id = %s AND fence = %s AND holder = %s AND claim <> ''", (run, fence, self._me)):
                raise Stale(f"run {run} is not ours any more")
            with self._disk.transaction() as disk:
                self._index.write(disk, changes)
        crashpoint("group-written")
        tries = 0

        def store(db: Connection[Row]) -> int:
            nonlocal tries
            tries += 1
            if tries > 1 and events:  # the reply to a commit may be what was lost
                known = db.execute("SELECT max(seq) FROM events WHERE run = %s AND at = %s", (run, now)).fetchone()
                if known is not None and known[0] is not None:
                    return int(known[0])
            with db.transaction():
                row = db.execute(
                    "UPDATE runs SET next_event = next_event + %s, recoveries = recoveries * %s, held_until = now() + %s * interval '1 second'"
                    " WHERE id = %s AND fence = %s AND holder = %s AND claim <> '' RETURNING next_event, request",
                    (len(events), fading, CLAIM, run, fence, self._me),
                ).fetchone()
                if row is None:
                    raise Stale(f"run {run} is not ours any more")
                last, request = int(row[0]) - 1, str(row[1])
                if run_state is not None and request not in ("", answers):
                    raise Requested(request)
                _write(db, run, last - len(events) + 1, events, kept, tried)
                if run_state is not None:
                    over = run_state[0] in FINAL
                    db.execute(
                        "UPDATE runs SET state = %s, reason = %s, request = '', ended = %s, claim = CASE WHEN %s THEN '' ELSE claim END"
                        " WHERE id = %s",
                        (*run_state, now if over else None, over, run),
                    )
                    if over:
                        db.execute("UPDATE runs SET data = (data::jsonb - 'opens')::text WHERE id = %s AND data LIKE '%%\"opens\":%%'", (run,))
                if told := told_of(run, last - len(events) + 1, now, moves):
                    _post(db, run, self.reporter(told))
            return last

        last = self._do(store)
        crashpoint("group-committed")
        self._beaten = time.monotonic()
        if run_state is not None and run_state[0] in FINAL:
            self._claims.discard(run)
        if landed is not None:
            landed()
        return last

    def land(self) -> None:
        """A group is stored when `group` returns."""

    @cached_property
    def outbox(self) -> Outbox:
        return Outbox(lambda statement, values: self._all(_NAMED.sub(r"%(\1)s", statement), values), POSTGRES)

    def post(self, run: str, letters: Sequence[Letter]) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                _post(db, run, letters)

        self._do(store)

    def request(self, run: str, what: str, data: Data = NO_DATA) -> bool:
        def store(db: Connection[Row]) -> bool:
            with db.transaction():
                row = db.execute(
                    f"UPDATE runs SET request = %s, next_event = next_event + 1 WHERE id = %s AND state NOT IN {_FINAL} RETURNING next_event - 1",  # noqa: S608
                    (what, run),
                ).fetchone()
                if row is None:
                    return False
                event = (run, row[0], time.time(), run, what, text(data))
                db.execute("INSERT INTO events VALUES (%s, %s, %s, 'request', %s, '', %s, '', %s)", event)
                db.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, run))
            return True

        return self._do(store)

    def forget(self, runs: Iterable[str]) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                ours = db.execute("SELECT id FROM runs WHERE id = ANY(%s) AND workspace = %s", (list(runs), self._workspace))
                chosen = [id for (id,) in ours.fetchall()]  # those that we only worked on are their submitters'
                for table in ("chunks", "keys", "outbox", "events", "attempts", "steps", "runs"):
                    column = "id" if table == "runs" else "run"
                    statement = sql.SQL("DELETE FROM {} WHERE {} = ANY(%s)").format(sql.Identifier(table), sql.Identifier(column))
                    db.execute(statement, (chosen,))
                db.execute("DELETE FROM bundles WHERE at < now() - interval '1 day' AND NOT EXISTS (SELECT FROM runs WHERE bundle = digest)")

        self._do(store)

    # -- the connection

    def _all(self, statement: str, values: Any = ()) -> list[Row]:
        return self._do(lambda db: db.execute(statement.encode(), values).fetchall())

    def _do(self, what: Callable[[Connection[Row]], Answer]) -> Answer:
        """Do something in the database; anew where the connection breaks.  Raises Infrastructure when it does not answer for `PATIENCE` seconds."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = _idle.pop(self._url, None) or _connected(self._url)
                    self._news += 1
                return what(self._connection)
            except psycopg.OperationalError as error:
                if self._connection is not None:
                    self._connection.close()
                if time.monotonic() > deadline:
                    raise Infrastructure(f"the database of runs does not answer: {error}", fix="look at RECIPE_RUNS, and whether it runs") from error
                time.sleep(PAUSE)
            except psycopg.Error as error:
                raise Infrastructure(
                    f"the database of runs refused a statement: {error}", fix="look at RECIPE_RUNS, and what it may do there"
                ) from error

    def _keep(self, run: str) -> None:
        """This claim is ours, and is kept from now on."""
        self._claims.add(run)
        if self._beats is None:
            self._beats = _Beats(self._url, self._me)
            self._beats.start()

    def _known(self) -> dict[str, object]:
        """What this machine can tell of claims."""
        return {"dead": self._dead(), "machine": f"{_machine()} "}

    def _dead(self) -> list[str]:
        """Those who hold claims, were processes of this machine and are no more."""
        rows = self._all("SELECT DISTINCT holder FROM runs WHERE claim <> '' AND starts_with(holder, %s)", (f"{_machine()} ",))
        dead = [holder for (holder,) in rows if not _lives(holder)]
        _dead_at[self._url] = time.monotonic(), dead
        return dead

    def _lately(self) -> dict[str, object]:
        """The same, as it was found less than `LATELY` ago: a worker that takes one short run after another does not look each time."""
        at, dead = _dead_at.get(self._url, (-LATELY, []))
        return {"dead": dead, "machine": f"{_machine()} "} if time.monotonic() - at < LATELY else self._known()


_dead_at: dict[str, tuple[float, list[str]]] = {}
"""When the holders of claims were looked at last, by the address of the database, and which were dead."""
_idle: dict[str, Connection[Row]] = {}
"""Connections that were closed, for who opens the same address next: a worker opens its workspace anew for each run."""


class _Beats(Thread):
    """Keeps the claims of one holder: looking at data, or renting a machine, may take longer than a claim lasts."""

    def __init__(self, url: str, holder: str) -> None:
        super().__init__(name="beats", daemon=True)
        self.over = ThreadEvent()
        self._url, self._holder = url, holder

    def run(self) -> None:
        db: Connection[Row] | None = None
        while not self.over.wait(BEAT):
            try:
                db = db if db is not None and not db.closed else _connected(self._url)
                db.execute("UPDATE runs SET held_until = now() + %s * interval '1 second' WHERE holder = %s AND claim <> ''", (CLAIM, self._holder))
            except psycopg.Error:  # the next beat tries anew, and a worker that lost its claim is told when it writes
                if db is not None:
                    db.close()
        if db is not None:
            db.close()


def _connected(url: str) -> Connection[Row]:
    db = psycopg.connect(url, autocommit=True, connect_timeout=10, application_name="recipe")
    db.execute("LISTEN " + _CHANNEL)
    return db


def _migrate(db: Connection[Row], *, read_only: bool) -> None:
    """Bring the schema to the version of this program, in one transaction under a lock.  Raises Unusable."""
    try:
        version = int((db.execute("SELECT coalesce(max(version), 0) FROM recipe_schema").fetchone() or (0,))[0])
    except psycopg.errors.UndefinedTable:
        version = 0
    if version > len(_MIGRATIONS):
        raise Unusable(f"the database of runs has format {version}; this recipe knows {len(_MIGRATIONS)}", fix="update recipe on this machine")
    if version == len(_MIGRATIONS):
        return
    if read_only:
        raise Unusable(f"the database of runs has format {version}, older than this program's", fix="`recipe run` migrates it")
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        db.execute("CREATE TABLE IF NOT EXISTS recipe_schema (version integer PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())")
        version = int((db.execute("SELECT coalesce(max(version), 0) FROM recipe_schema").fetchone() or (0,))[0])
        for number, statements in enumerate(_MIGRATIONS[version:], version + 1):
            for statement in statements:
                db.execute(statement.encode())
            db.execute("INSERT INTO recipe_schema VALUES (%s)", (number,))


def _write(db: Connection[Row], run: str, first: int, events: Sequence[Row], steps: Sequence[Row], attempts: Sequence[Row]) -> None:
    with db.pipeline(), db.cursor() as many:
        if events:
            rows = [(run, number, *event) for number, event in enumerate(events, first)]
            many.executemany("INSERT INTO events VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)", rows)
        if steps:
            many.executemany(
                "INSERT INTO steps VALUES (%s, %s, %s, %s, %s) ON CONFLICT (run, step) DO UPDATE SET state = excluded.state, key = excluded.key,"
                " reason = excluded.reason",
                steps,
            )
        if attempts:
            many.executemany(
                "INSERT INTO attempts VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET"
                " key = excluded.key, job = excluded.job, dir = excluded.dir, started = excluded.started, ended = excluded.ended,"
                " outcome = excluded.outcome, reason = excluded.reason, exit = excluded.exit, preimage = excluded.preimage",
                attempts,
            )


def _post(db: Connection[Row], run: str, letters: Sequence[Letter]) -> None:
    if letters:
        now = time.time()
        rows = [(run, each.receiver, each.id, each.type, each.body, each.points, now, now) for each in letters]
        with db.cursor() as many:
            many.executemany(f"INSERT INTO outbox ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)".encode(), rows)  # noqa: S608


_NAMED: Final = re.compile(r"(?<!:):([a-z_]+)\b")
"""A value in a statement of the outbox."""


def _pairs(labels: object) -> list[str]:
    return sorted(f"{name}={value}" for name, value in labels.items()) if isinstance(labels, dict) else []


def _machine() -> str:
    """This machine, from one start of it to the next."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _began(pid: int) -> str:
    """When a process began, by the kernel's own count; empty for one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _lives(holder: str) -> bool:
    """Whether a process of this machine that holds claims is alive."""
    _machine, pid, began, _token = holder.split(" ")
    return _began(int(pid)) == began


def _run(row: Row) -> RunRow:
    fields = list(row)
    fields[3], fields[13], fields[21] = mapping(row[3]), mapping(row[13]), outputs_of(row[21])
    return RunRow._make(fields)


def _attempt(row: Row) -> AttemptRow:
    return AttemptRow._make((*row[:5], mapping(row[5]), *row[6:11], mapping(row[11]), parsed(row[12])))
