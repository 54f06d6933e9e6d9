"""Runs in a PostgreSQL database, for workers on several machines.

The local index stays in the local SQLite file.

A group is one guarded transaction: first the local index, whose rows are named by content and can
be written twice, then the rows in the database.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Final

from psycopg import Connection, sql

from ..crash import crashpoint
from .database import Data, Database, Row, mapping, text
from .exchange import Exchange
from .index import NOTHING, Changes, Index
from .outbox import COLUMNS, POSTGRES, Letter, Outbox, rows
from .postgres_claims import BEAT, CLAIM, FREE, Holder, boottime
from .postgres_database import CHANNEL, PostgresDatabase
from .postgres_exchange import PostgresExchange
from .runs import (
    DESCRIBED,
    FINAL,
    LET_GO,
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
    run_of,
    same_request,
)
from .workers import Workers

if TYPE_CHECKING:
    from ...planning.schedule import Move

_NAMED: Final = re.compile(r"(?<!:):([a-z_]+[0-9]*)\b")
"""Pattern for a named value in a statement for both databases."""
_CLAIMING: Final = 0x72637066
"""Id of the advisory lock for counting runs."""
_COLUMNS: Final = f"{RUN_COLUMNS}, submitter, bundle, store, outputs"
_COUNTED: Final = {"user": "submitter", "recipe": "recipe", "driver": "driver"}
_FINAL: Final = "('COMPLETED', 'FAILED', 'CANCELLED')"
_WORDS: Final = Words(
    _COLUMNS,
    "workspace = :workspace",
    # submitted here, or executed here
    "(workspace = :workspace OR (worked_in = :workspace AND bundle <> ''))",
    "= ANY(:{})",
    "SELECT a.* FROM unnest(:steps::text[]) AS wanted(step) CROSS JOIN LATERAL (SELECT a.* FROM attempts a JOIN runs r ON r.id = a.run"
    " WHERE a.step = wanted.step AND r.recipe = :recipe AND r.workspace = :workspace ORDER BY a.started DESC NULLS LAST LIMIT 1) a",
    {
        "yes": "data::json ->> 'archived' = 'true'",
        "no": "coalesce(data::json ->> 'archived', '') <> 'true'",
    },
    {
        "user": "submitter = :user",
        "tag": "data::jsonb -> 'tags' @> to_jsonb(CAST(:tag AS text))",
        "name": "data::json ->> 'name' = :name",
        "part": "position(:part in id) > 0",
        "label": ":label = ANY(labels)",
    },
)
_SUBMIT: Final = """
WITH new AS (
    INSERT INTO runs (id, recipe, plan, inputs, workspace, state, reason, created, claim, fence, data, priority, due, idempotency, submitter, bundle,
        store, driver, labels, holder, held_until)
    VALUES (%(id)s, %(recipe)s, %(plan)s, %(inputs)s, %(workspace)s, 'QUEUED', %(reason)s, %(created)s, %(claim)s, %(fence)s, %(data)s, %(priority)s,
        %(due)s, %(idempotency)s, %(user)s, %(bundle)s, %(store)s, %(driver)s, %(labels)s, %(holder)s, now() + %(long)s * interval '1 second')
    ON CONFLICT DO NOTHING RETURNING id, fence
), began AS (
    INSERT INTO events SELECT id, 1, %(now)s, 'run', id, '', 'QUEUED', %(reason)s, '{}' FROM new
), brought AS (
    INSERT INTO bundles SELECT %(bundle)s, %(packed)s::bytea FROM new WHERE %(packed)s::bytea IS NOT NULL ON CONFLICT DO NOTHING
)
SELECT fence, pg_notify(%(channel)s, id) FROM new
"""
"""SQL statement that submits a run. No row: the run id or idempotency key already exists."""
_GROUP: Final = """
WITH ours AS (
    UPDATE runs SET
        next_event = next_event + %(count)s::int,
        recoveries = recoveries * %(fading)s,
        held_until = now() + %(long)s * interval '1 second',
        state = coalesce(%(state)s::text, state),
        reason = coalesce(%(why)s::text, reason),
        failure = coalesce(%(failure)s::text, failure),
        request = CASE WHEN %(state)s::text IS NOT NULL AND request = %(answers)s::text THEN '' ELSE request END,
        ended = CASE WHEN %(state)s::text IS NULL THEN ended WHEN %(over)s::bool THEN %(now)s::float8 END,
        claim = CASE WHEN %(let_go)s::bool THEN '' ELSE claim END,
        data = CASE WHEN %(over)s::bool AND data LIKE '%%"opens":%%' THEN (data::jsonb - 'opens')::text ELSE data END
    WHERE id = %(run)s AND fence = %(fence)s AND holder = %(me)s AND claim <> ''
        AND (NOT %(let_go)s::bool OR request IN ('', %(answers)s::text))
    RETURNING id, next_event
), noted AS (
    INSERT INTO events SELECT ours.id, next_event - %(count)s::int + n - 1, %(now)s, e0, e1, e2, e3, e4, e5
    FROM ours, unnest(%(e0)s::text[], %(e1)s::text[], %(e2)s::text[], %(e3)s::text[], %(e4)s::text[], %(e5)s::text[])
        WITH ORDINALITY AS e (e0, e1, e2, e3, e4, e5, n)
), kept AS (
    INSERT INTO steps SELECT ours.id, s.* FROM ours, unnest(%(s0)s::text[], %(s1)s::text[], %(s2)s::text[], %(s3)s::text[], %(s4)s::text[],
        %(s5)s::text[], %(s6)s::float8[]) AS s
    ON CONFLICT (run, step) DO UPDATE SET state = excluded.state, key = excluded.key, reason = excluded.reason, detail = excluded.detail,
        numbers = excluded.numbers, began = excluded.began
), tried AS (
    INSERT INTO attempts SELECT a.* FROM ours, unnest(%(a0)s::text[], %(a1)s::text[], %(a2)s::text[], %(a3)s::int[], %(a4)s::text[], %(a5)s::text[],
        %(a6)s::text[], %(a7)s::float8[], %(a8)s::float8[], %(a9)s::text[], %(a10)s::text[], %(a11)s::text[], %(a12)s::text[]) AS a
    ON CONFLICT (id) DO UPDATE SET key = excluded.key, job = excluded.job, dir = excluded.dir, started = excluded.started, ended = excluded.ended,
        outcome = excluded.outcome, reason = excluded.reason, exit = excluded.exit, preimage = excluded.preimage
)
SELECT next_event FROM ours
"""
"""SQL statement that stores a group of changes: one transaction and one round trip.

No row: another worker has the run, or a request is pending.
"""


class PostgresRuns(Runs):
    """Runs of one workspace in a shared PostgreSQL database."""

    shared = True
    words = _WORDS

    def __init__(
        self, url: str, workspace: str, database: Database, index: Index, *, read_only: bool = False
    ) -> None:
        """Connect to the database and migrate its schema.

        Raises Infrastructure, Unusable.
        """
        self.workspace, self._disk, self._index = workspace, database, index
        self._database = PostgresDatabase(url, read_only=read_only)
        self._holder = Holder(url, self._database)
        self.exchange: Exchange = PostgresExchange(self._database, self._holder)
        self._beats, self._beaten = 0, time.monotonic()
        self.reporter: Reporter = SILENT

    def close(self) -> None:
        """Release all claims, so that other workers can claim the runs at once."""
        self._holder.close()
        self._database.close()

    # -- queries

    def all(self, statement: str, values: Mapping[str, object]) -> list[Row]:
        return self._database.all(_NAMED.sub(r"%(\1)s", statement), values)

    def live(self, run: str) -> bool:
        return bool(
            self._database.all(
                f"SELECT 1 FROM runs WHERE id = %(run)s AND NOT {FREE}",  # noqa: S608
                {"run": run} | self._holder.find_dead(),
            )
        )

    # -- notifications of workers

    def news(self) -> int:
        if time.monotonic() - self._beaten > BEAT:
            self._beaten, self._beats = time.monotonic(), self._beats + 1
        return self._database.news() + self._beats

    def take_request(self, run: str, fence: int) -> str:
        request = self._holder.take_request(run, fence)
        self._beaten = time.monotonic()
        return request

    # -- changes

    def prepare(self, run: str) -> None:
        """Do nothing, because leases of a worker that dies before its submission expire."""

    def submit(self, run: RunRow, who: str = "", bundle: bytes = b"") -> Submission:
        settings = run.data.get("settings")
        now = time.time()
        values = run._asdict() | {
            "inputs": text(run.inputs),
            "data": text(run.data),
            "created": run.created or now,
            "workspace": self.workspace,
        }
        values |= {
            "claim": who,
            "fence": int(bool(who)),
            "driver": str(settings.get("driver", "")) if isinstance(settings, dict) else "",
            "labels": _pairs(run.data.get("labels")),
        }
        # An unclaimed run has a claim that ended long ago, so that any worker may take it.
        values |= {"holder": "", "long": -CLAIM}
        if who:
            values |= {"holder": self._holder.name, "long": CLAIM}
        values |= {"now": now, "packed": bundle or None, "channel": CHANNEL}
        listened = self.reporter.listened_to(run.id, run.data)

        def store(db: Connection[Row]) -> Submission:
            # a single statement is its own transaction
            with db.transaction() if listened else nullcontext():
                fresh = db.execute(_SUBMIT.encode(), values).fetchone()
                if fresh is None:
                    found = db.execute(
                        "SELECT id, data, fence, holder FROM runs WHERE id = %s OR idempotency = %s",
                        (run.id, run.idempotency or None),
                    )
                    id, data, fence, holder = found.fetchall()[0]
                    if id != run.id:
                        same_request(run, id, mapping(data))
                    if not who or holder != self._holder.name:
                        return Submission(id, 0)
                    # The claim is ours: the response to the first attempt was lost.
                    return Submission(id, fence)
                if listened:
                    queued = Event(run.id, 1, now, "run", run.id, "", "QUEUED", run.reason, {})
                    _post(db, run.id, self.reporter.letters([queued]))
            return Submission(run.id, int(fresh[0]))

        since = boottime()
        done = self._database.do(store)
        if done.fence:
            self._holder.keep(done.id, since)
        return done

    def claim(self, run: str, who: str) -> int | None:
        since = boottime()
        rows = self._database.all(
            "UPDATE runs SET claim = %(who)s, fence = fence + 1, recoveries = recoveries + (claim <> '')::int, holder = %(me)s,"  # noqa: S608
            " worked_in = %(workspace)s,"
            f" held_until = now() + %(long)s * interval '1 second' WHERE id = %(run)s AND state NOT IN {_FINAL} AND (holder = %(me)s OR {FREE})"
            " RETURNING fence",
            {
                "who": who,
                "me": self._holder.name,
                "long": CLAIM,
                "run": run,
                "workspace": self.workspace,
            }
            | self._holder.find_dead(),
        )
        if not rows:
            self.get(run)
            return None
        self._holder.keep(run, since)
        return int(rows[0][0])

    def claim_next(self, who: str, offer: ClaimCriteria) -> RunRow | None:
        began, since = time.monotonic(), boottime()
        values = {
            "who": who,
            "me": self._holder.name,
            "long": CLAIM,
            "workspace": self.workspace,
            "driver": offer.driver,
            "store": offer.store,
            "labels": _pairs(dict(offer.labels)),
            **self._holder.lately(),
            **{f"most_{kind}": most for kind, most in offer.at_most.items()},
        }
        claim = _NextClaim(self._holder, offer.at_most, values)
        rows = self._database.do(claim)
        if not rows and self._holder.looked < began:
            # The reused list of dead holders may be too old: look again before giving up.
            known_dead = values["dead"]
            values |= self._holder.find_dead()
            if values["dead"] != known_dead:
                rows = self._database.do(claim)
        if not rows:
            return None
        self._holder.keep(rows[0][0], since)
        return run_of(rows[0])

    def forget_opener(self, run: str, address: str) -> None:
        """Do nothing, because another machine may have to download the input again."""

    def release(self, run: str, fence: int, *, due: float | None = None) -> None:
        self._holder.claims.pop(run, None)
        self._database.all(
            "WITH freed AS (UPDATE runs SET claim = '', held_until = now(), due = coalesce(due, %s) WHERE id = %s AND fence = %s AND holder = %s"
            " RETURNING id) SELECT pg_notify(%s, id) FROM freed",
            (due, run, fence, self._holder.name, CHANNEL),
        )

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
        if any(changes):
            self._write_index(run, fence, changes)
        crashpoint("group-written")
        # The events are sent to webhooks and platforms in the same transaction.
        events = events_of(run, 0, now, moves)
        if events and not self.reporter.listened_to(run, None):
            events = []
        state = run_state[0] if run_state else None
        values: dict[str, object] = {
            "run": run,
            "fence": fence,
            "me": self._holder.name,
            "long": CLAIM,
            "now": now,
            "fading": int(not any(map(is_progress, moves))),
            "answers": answers,
            **_state_values(run_state),
            **_row_values(moves, steps, attempts),
        }
        commit = _GroupCommit(self, run, fence, now, moves, events, values, state, answers)
        # The statement also renewed the claim.
        since = boottime()
        last = self._database.do(commit)
        crashpoint("group-committed")
        self._holder.claims[run] = since
        self._beaten = time.monotonic()
        if state in LET_GO:
            self._holder.claims.pop(run, None)
        if landed is not None:
            landed()
        return last

    def _write_index(self, run: str, fence: int, changes: Changes) -> None:
        """Write the local index, which is in another database, if the claim is still ours.

        Raises Stale.
        """
        ours = "SELECT 1 FROM runs WHERE id = %s AND fence = %s AND holder = %s AND claim <> ''"
        if not self._database.all(ours, (run, fence, self._holder.name)):
            raise Stale(run)
        with self._disk.transaction() as disk:
            self._index.write(disk, changes)

    def land(self) -> None:
        """Do nothing, because `group` returns after the commit."""

    @cached_property
    def outbox(self) -> Outbox:
        return Outbox(self.all, POSTGRES)

    @cached_property
    def workers(self) -> Workers:
        return Workers(self.all, POSTGRES.now)

    def request(self, run: str, what: str, data: Data = NO_DATA) -> bool:
        def store(db: Connection[Row]) -> bool:
            with db.transaction():
                row = db.execute(
                    f"UPDATE runs SET request = %s, next_event = next_event + 1 WHERE id = %s AND state NOT IN {_FINAL}"  # noqa: S608
                    " AND NOT (state = 'PAUSED' AND claim = '') RETURNING next_event - 1",
                    (what, run),
                ).fetchone()
                if row is None:
                    return False
                event = (run, row[0], time.time(), run, what, text(data))
                db.execute(
                    "INSERT INTO events VALUES (%s, %s, %s, 'request', %s, '', %s, '', %s)", event
                )
                db.execute("SELECT pg_notify(%s, %s)", (CHANNEL, run))
            return True

        return self._database.do(store)

    def prioritize(self, run: str, priority: int) -> None:
        self._change("priority = %s", [priority], run, PRIORITIZED, {"priority": priority})

    def describe(self, run: str, changes: Data) -> None:
        kept = {name: value for name, value in changes.items() if value is not None}
        gone = [name for name, value in changes.items() if value is None]
        change = "data = ((data::jsonb || %s::jsonb) - %s::text[])::text"
        self._change(change, [text(kept), gone], run, DESCRIBED, NO_DATA)

    def _change(
        self, change: str, values: Sequence[object], run: str, reason: str, data: Data
    ) -> None:
        """Change columns of a run other than its state, and record an event."""
        update = (
            f"UPDATE runs SET {change}, next_event = next_event + 1"  # noqa: S608
            " WHERE id = %s RETURNING next_event - 1, state"
        )

        def store(db: Connection[Row]) -> None:
            with db.transaction():
                rows = db.execute(update.encode(), (*values, run)).fetchall()
                for seq, state in rows:
                    event = (run, seq, time.time(), run, state, state, reason, text(data))
                    db.execute(
                        "INSERT INTO events VALUES (%s, %s, %s, 'run', %s, %s, %s, %s, %s)", event
                    )
                db.execute("SELECT pg_notify(%s, %s)", (CHANNEL, run))

        self._database.do(store)

    def forget(self, runs: Iterable[str]) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                ours = db.execute(
                    "SELECT id FROM runs WHERE id = ANY(%s) AND workspace = %s",
                    (list(runs), self.workspace),
                )
                chosen = [
                    id for (id,) in ours.fetchall()
                ]  # runs submitted by other workspaces belong to those
                for table in ("chunks", "keys", "outbox", "events", "attempts", "steps", "runs"):
                    column = "id" if table == "runs" else "run"
                    statement = sql.SQL("DELETE FROM {} WHERE {} = ANY(%s)").format(
                        sql.Identifier(table), sql.Identifier(column)
                    )
                    db.execute(statement, (chosen,))
                db.execute(
                    "DELETE FROM bundles WHERE at < now() - interval '1 day' AND NOT EXISTS (SELECT FROM runs WHERE bundle = digest)"
                )

        self._database.do(store)


class _NextClaim:
    """Transaction that claims a run, and returns its row.

    Called again after a lost connection, it first looks for a claim whose response was lost.
    """

    def __init__(
        self, holder: Holder, at_most: Mapping[str, int], values: Mapping[str, object]
    ) -> None:
        self._holder, self._values = holder, values
        self._statement = _claim_statement(at_most).encode()
        self._has_limits = bool(at_most)
        self._is_repeated = False

    def __call__(self, db: Connection[Row]) -> list[Row]:
        if self._is_repeated:
            claimed = self._find_lost(db)
            if claimed:
                return claimed
        self._is_repeated = True
        if not self._has_limits:
            return db.execute(self._statement, self._values).fetchall()
        with db.transaction():  # otherwise two workers could count at the same time
            db.execute("SELECT pg_advisory_xact_lock(%s)", (_CLAIMING,))
            return db.execute(self._statement, self._values).fetchall()

    def _find_lost(self, db: Connection[Row]) -> list[Row]:
        ours = f"SELECT {_COLUMNS} FROM runs WHERE holder = %s AND claim <> '' AND id <> ALL(%s) LIMIT 1"  # noqa: S608
        known = (self._holder.name, list(self._holder.claims))
        return db.execute(ours.encode(), known).fetchall()


class _GroupCommit:
    """Transaction that stores a group, and returns the number of its last event.

    Called again after a lost connection, it first looks for a commit whose response was lost.
    """

    def __init__(
        self,
        runs: PostgresRuns,
        run: str,
        fence: int,
        now: float,
        moves: Sequence[Move],
        events: Sequence[Event],
        values: Mapping[str, object],
        state: str | None,
        answers: str,
    ) -> None:
        self._runs, self._run, self._fence, self._now = runs, run, fence, now
        self._moves, self._events, self._values = moves, events, values
        self._state, self._answers = state, answers
        self._is_repeated = False

    def __call__(self, db: Connection[Row]) -> int:
        if self._is_repeated and self._moves:
            last = self._find_lost(db)
            if last is not None:
                return last
        self._is_repeated = True
        # a single statement is its own transaction
        with db.transaction() if self._events else nullcontext():
            last = self._store(db)
            if self._events:
                self._post(db, last)
        return last

    def _find_lost(self, db: Connection[Row]) -> int | None:
        known = db.execute(
            "SELECT max(seq) FROM events WHERE run = %s AND at = %s", (self._run, self._now)
        ).fetchone()
        if known is None or known[0] is None:
            return None
        return int(known[0])

    def _store(self, db: Connection[Row]) -> int:
        """Store the rows; raises Stale, or Requested for a request that the group ignores."""
        while True:
            row = db.execute(_GROUP.encode(), self._values).fetchone()
            if row is not None:
                return int(row[0]) - 1
            # The claim is lost, or there is a request.
            request = self._runs.take_request(self._run, self._fence)  # raises Stale
            if self._state in LET_GO and request not in ("", self._answers):
                raise Requested(request)

    def _post(self, db: Connection[Row], last: int) -> None:
        """Add the webhook deliveries of the events, the last of which has the number `last`."""
        first = last - len(self._moves) + 1
        numbered = [event._replace(seq=first + event.seq) for event in self._events]
        _post(db, self._run, self._runs.reporter.letters(numbered))


def _claim_statement(limited: Iterable[str]) -> str:
    """Return the SQL statement that claims the first due run, below the limits on these fields."""
    counted = FREE.replace("runs.", "busy.")
    busy = f"SELECT count(*) FROM runs AS busy WHERE (busy.claim <> '' OR busy.state = 'ACTIVE') AND NOT {counted}"  # noqa: S608
    below = "".join(
        f" AND ({busy} AND busy.{_COUNTED[kind]} = runs.{_COUNTED[kind]}) < %(most_{kind})s"
        for kind in limited
    )
    return (
        "UPDATE runs SET claim = %(who)s, fence = fence + 1, recoveries = recoveries + (claim <> '')::int, holder = %(me)s,"  # noqa: S608
        " worked_in = %(workspace)s,"
        " held_until = now() + %(long)s * interval '1 second' WHERE id = (SELECT id FROM runs"
        " WHERE CASE WHEN bundle = '' THEN %(store)s = '' AND workspace = %(workspace)s ELSE store = %(store)s END"
        " AND due IS NOT NULL AND (due <= extract(epoch FROM now()) OR due <= created) AND state IN ('QUEUED', 'ACTIVE')"
        f" AND %(driver)s IN ('', driver) AND labels <@ %(labels)s AND {FREE}{below}"
        f" ORDER BY priority DESC, due, id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING {_COLUMNS}"
    )


def _state_values(run_state: RunState | tuple[str, str] | None) -> dict[str, object]:
    """Return the parameters of `_GROUP` for the next state of the run; None keeps its state."""
    state, why, failure = RunState(*run_state) if run_state else (None, None, None)
    return {
        "state": state,
        "why": why,
        "failure": failure,
        "over": state in FINAL,
        "let_go": state in LET_GO,
    }


def _row_values(
    moves: Sequence[Move], steps: Iterable[StepRow], attempts: Iterable[AttemptRow]
) -> dict[str, object]:
    """Return the parameters of `_GROUP` for the rows of events, steps and attempts."""
    events = []
    for move in moves:
        before, after = str(move.before), str(move.after)
        events.append((move.subject, move.id, before, after, move.reason, text(move.data)))
    changed = [tuple(step)[1:] for step in steps]
    # A statement cannot update a row twice: of two rows of an attempt, the last one counts.
    tried = {row.id: attempt_row(row) for row in attempts}
    return {
        "count": len(moves),
        **_arrays("e", events, 6),
        **_arrays("s", changed, 7),
        **_arrays("a", list(tried.values()), 13),
    }


def _arrays(name: str, rows: Sequence[Sequence[object]], width: int) -> dict[str, object]:
    """Return the columns of rows as array parameters of `_GROUP`."""
    arrays: dict[str, object] = {}
    for n in range(width):
        arrays[f"{name}{n}"] = [row[n] for row in rows]
    return arrays


def _post(db: Connection[Row], run: str, letters: Sequence[Letter]) -> None:
    if letters:
        with db.cursor() as many:
            many.executemany(
                f"INSERT INTO outbox ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)".encode(),  # noqa: S608
                rows(run, letters),
            )


def _pairs(labels: object) -> list[str]:
    if not isinstance(labels, dict):
        return []
    return sorted(f"{name}={value}" for name, value in labels.items())
