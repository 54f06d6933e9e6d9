"""Outbox of webhook deliveries, stored in the transaction of the event that they report.

Deliveries of a run to a receiver are ordered: only the oldest may be taken, by one process at a
time, for at most `HOLD` seconds. Delivered messages are deleted, except alerts. Abandoned
deliveries become `dead` and do not block others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from .database import Row

HOLD: Final = 60.0
"""Time for which a delivery is reserved for its process, in seconds."""
POINTS: Final = 10_000
"""Maximum number of pending metric points of one run for one endpoint."""


class Letter(NamedTuple):
    """Message about a run to one webhook endpoint."""

    receiver: str
    """Kind, method and URL: `webhook POST https://hooks.example/runs`."""
    id: str
    """Message id, constant over retries, so that endpoints can detect duplicates."""
    type: str
    body: str
    """Message body as JSON."""
    points: int = 0
    """Number of metric points in the body."""


def rows(run: str, letters: Sequence[Letter]) -> list[Row]:
    """Return new deliveries as database rows with the columns `COLUMNS`."""
    now = time.time()
    return [
        (run, each.receiver, each.id, each.type, each.body, each.points, now, now)
        for each in letters
    ]


class PendingDelivery(NamedTuple):
    """Webhook delivery in the outbox.

    Times are in seconds since the epoch.
    """

    number: int
    run: str
    receiver: str
    id: str
    type: str
    body: str
    state: str  # `waiting`, `dead`, or `told` (a delivered alert)
    tries: int
    created: float
    due: float
    reason: str  # message of the last failure
    failure: str  # kind of the last failure, a `DeliveryFailure`


class Dialect(NamedTuple):
    """SQL differences between SQLite and PostgreSQL."""

    now: str
    known: str  # table `known(value)` of the texts in the JSON list :known
    numbers: str  # table of the numbers in :numbers
    skip: str
    later: str  # later of two times


SQLITE: Final = Dialect(
    "((julianday('now') - 2440587.5) * 86400.0)",
    "json_each(:known) AS known",
    "json_each(:numbers)",
    "",
    "max(due, held_until)",
)
POSTGRES: Final = Dialect(
    "extract(epoch FROM clock_timestamp())::float8",
    "jsonb_array_elements_text(:known::jsonb) AS known(value)",
    "(SELECT value::bigint AS value FROM jsonb_array_elements_text(:numbers::jsonb) AS given(value)) AS given",
    " FOR UPDATE SKIP LOCKED",
    "greatest(due, held_until)",
)
Ask: TypeAlias = Callable[[str, Mapping[str, object]], Sequence[Row]]
"""Function that runs a statement in its own transaction; `:name` stands for a value."""

COLUMNS: Final = "run, receiver, id, type, body, points, created, due"
_SHOWN: Final = "number, run, receiver, id, type, body, state, tries, created, due, reason, failure"


class Outbox:
    """Outbox of webhook deliveries in one database."""

    def __init__(self, ask: Ask, dialect: Dialect) -> None:
        self._ask, self._with = ask, dialect

    def post(self, run: str, letters: Sequence[Letter]) -> None:
        """Store deliveries that do not belong to a state change."""
        if not letters:
            return
        rows = [
            f"(:run, :receiver{n}, :id{n}, :type{n}, :body{n}, :points{n}, :now, :now)"
            for n in range(len(letters))
        ]
        values: dict[str, object] = {"run": run, "now": time.time()}
        for n, letter in enumerate(letters):
            values |= {f"{name}{n}": value for name, value in letter._asdict().items()}
        self._ask(f"INSERT INTO outbox ({COLUMNS}) VALUES {', '.join(rows)} RETURNING 1", values)  # noqa: S608

    def due(self, known: Collection[str], busy: Collection[str] = ()) -> float | None:
        """Return the seconds until `take` has a delivery; None if no delivery waits."""
        rows = self._ask(
            f"SELECT min({self._with.later}) - {self._with.now} FROM outbox AS head WHERE {self._first}",  # noqa: S608
            _match_values(known, busy),
        )
        return None if rows[0][0] is None else float(rows[0][0])

    def take(
        self, known: Collection[str], busy: Collection[str] = (), limit: int = 16
    ) -> list[PendingDelivery]:
        """Reserve due deliveries for this process, the oldest per run and endpoint.

        The text of a receiver, followed by a space, must start with an entry of `known`.

        Receivers in `busy` are skipped.
        """
        words = self._with
        rows = self._ask(
            f"UPDATE outbox SET held_until = {words.now} + {HOLD} WHERE held_until <= {words.now} AND number IN"  # noqa: S608
            f" (SELECT number FROM outbox AS head WHERE {self._first} AND due <= {words.now} AND held_until <= {words.now}"
            f" ORDER BY due, number LIMIT :limit{words.skip}) RETURNING {_SHOWN}",
            _match_values(known, busy) | {"limit": limit},
        )
        return sorted(map(PendingDelivery._make, rows), key=lambda letter: letter.number)

    @property
    def _first(self) -> str:
        """SQL condition for the oldest delivery of its run and endpoint.

        The receiver must be known and not busy.
        """
        known = self._with.known
        return (
            f"state = 'waiting' AND EXISTS (SELECT 1 FROM {known} WHERE substr(head.receiver || ' ', 1, length(known.value)) = known.value)"  # noqa: S608
            f" AND NOT EXISTS (SELECT 1 FROM {known.replace('known', 'busy')} WHERE busy.value = head.receiver)"
            " AND NOT EXISTS (SELECT 1 FROM outbox AS earlier WHERE earlier.run = head.run AND earlier.receiver = head.receiver"
            " AND earlier.state = 'waiting' AND earlier.number < head.number)"
        )

    def mark_delivered(self, letter: PendingDelivery) -> None:
        """Delete a successful delivery.

        An alert is kept as sent, because its rule may trigger again.
        """
        what = "DELETE FROM outbox"
        if letter.type.startswith("alert."):
            what = "UPDATE outbox SET state = 'told', body = '', held_until = 0"
        self._ask(f"{what} WHERE number = :number RETURNING 1", {"number": letter.number})

    def knows(self, run: str, id: str) -> bool:
        """Return True if the run has a delivery with this id."""
        return bool(
            self._ask(
                "SELECT 1 FROM outbox WHERE run = :run AND id = :id AND state <> '' LIMIT 1",
                {"run": run, "id": id},
            )
        )

    def of(self, run: str, type: str) -> PendingDelivery | None:
        """Return the run's delivery of this event type, or None."""
        return next(iter(self._select("run = :run AND type = :type", 1, run=run, type=type)), None)

    def hold(self, letter: PendingDelivery) -> bool:
        """Reserve one delivery for this process.

        Returns False if another process has it or if it is no longer pending.
        """
        now = self._with.now
        rows = self._ask(
            f"UPDATE outbox SET held_until = {now} + {HOLD} WHERE number = :number AND state = 'waiting' AND held_until <= {now} RETURNING 1",  # noqa: S608
            {"number": letter.number},
        )
        return bool(rows)

    def oldest(self) -> PendingDelivery | None:
        """Return the oldest pending delivery, or None."""
        return next(iter(self._select("state = 'waiting'", 1)), None)

    def put_off(
        self,
        letter: PendingDelivery,
        wait: float,
        reason: str,
        failure: str = "",
        *,
        counts: bool = True,
    ) -> None:
        """Schedule a retry of a delivery after `wait` seconds.

        `counts` adds the attempt to the limit.
        """
        self._ask(
            f"UPDATE outbox SET due = {self._with.now} + :wait, held_until = 0, tries = tries + :tries, reason = :reason, failure = :failure"  # noqa: S608
            " WHERE number = :number RETURNING 1",
            {
                "wait": wait,
                "tries": int(counts),
                "reason": reason,
                "failure": failure,
                "number": letter.number,
            },
        )

    def give_up(self, letter: PendingDelivery, reason: str, failure: str = "") -> None:
        """Mark a delivery as dead, so that it is not retried."""
        values = {"reason": reason, "failure": failure, "number": letter.number}
        self._ask(
            "UPDATE outbox SET state = 'dead', held_until = 0, tries = tries + 1, reason = :reason, failure = :failure"
            " WHERE number = :number RETURNING 1",
            values,
        )

    def stop(self, receiver: str, reason: str, failure: str = "") -> int:
        """Mark all deliveries to an endpoint as dead, and return their number."""
        values = {"reason": reason, "failure": failure, "receiver": receiver}
        return len(
            self._ask(
                "UPDATE outbox SET state = 'dead', reason = :reason, failure = :failure WHERE receiver = :receiver AND state = 'waiting' RETURNING 1",
                values,
            )
        )

    def retry(self, numbers: Collection[int]) -> int:
        """Retry dead deliveries now (all if `numbers` is empty), and return their number."""
        rows = self._ask(
            f"UPDATE outbox SET state = 'waiting', tries = 0, due = {self._with.now}, held_until = 0 WHERE state = 'dead'"  # noqa: S608
            f" AND (:all OR number IN (SELECT value FROM {self._with.numbers})) RETURNING 1",
            {"all": not numbers, "numbers": json.dumps(list(numbers))},
        )
        return len(rows)

    def list_letters(self, limit: int = 1000) -> list[PendingDelivery]:
        """Return pending and dead deliveries, oldest first."""
        return self._select("state <> 'told'", limit)

    def _select(self, where: str, limit: int, **values: str) -> list[PendingDelivery]:
        rows = self._ask(
            f"SELECT {_SHOWN} FROM outbox WHERE {where} ORDER BY number LIMIT :limit",  # noqa: S608
            {**values, "limit": limit},
        )
        return [PendingDelivery._make(row) for row in rows]

    def thin(self, run: str, receiver: str) -> int:
        """Drop every second pending metric point until at most `POINTS` remain.

        The newest delivery keeps its points. Returns the dropped number.
        """
        values: dict[str, object] = {"run": run, "receiver": receiver}
        of = "run = :run AND receiver = :receiver AND state = 'waiting'"
        dropped = 0
        while True:
            rows = list(
                self._ask(
                    f"SELECT number, body, points FROM outbox WHERE {of} AND points > 0 ORDER BY number",  # noqa: S608
                    values,
                )
            )
            if sum(points for _number, _body, points in rows) <= POINTS:
                return dropped
            before = dropped
            for number, body, points in rows[:-1]:
                parsed = json.loads(body)
                parsed["metrics"] = parsed["metrics"][points > 1 :: 2]
                dropped += points - len(parsed["metrics"])
                left = {
                    "body": json.dumps(parsed),
                    "points": len(parsed["metrics"]),
                    "number": number,
                }
                self._ask(
                    "UPDATE outbox SET body = :body, points = :points WHERE number = :number AND held_until = 0 RETURNING 1",
                    left,
                )
            if dropped == before:
                return dropped


def _match_values(known: Collection[str], busy: Collection[str]) -> dict[str, object]:
    return {"known": json.dumps(sorted(known)), "busy": json.dumps(sorted(busy))}
