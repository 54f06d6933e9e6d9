"""Claims on runs in a PostgreSQL database.

A claim lasts `CLAIM` seconds by the database's clock and is renewed by heartbeats.

Claims of dead processes on this machine are void at once.
"""

from __future__ import annotations

import os
import time
from threading import Event as ThreadEvent
from threading import Thread
from typing import Final

import psycopg
from psycopg import Connection

from .database import Row
from .postgres_database import PostgresDatabase, connect
from .processes import lives, machine, this_process
from .runs import ELSEWHERE, Stale

CLAIM: Final = 30.0
BEAT: Final = 10.0
"""Interval between two heartbeats, in seconds."""
SURE: Final = CLAIM - BEAT
"""Time for which a confirmed claim is trusted, in seconds.

Another worker may take the run ten seconds later.
"""
FREE: Final = (
    "(holder = ANY(%(dead)s) OR ((claim = '' OR held_until < now()) AND (bundle = '' OR driver <> 'local' OR holder = ''"
    f" OR starts_with(holder, %(machine)s) OR held_until < now() - interval '{ELSEWHERE - CLAIM} seconds'"
    " OR NOT EXISTS (SELECT FROM steps WHERE steps.run = runs.id AND steps.state = 'RUNNING'))))"
)
"""SQL condition for a run that can be claimed.

If the run's jobs may continue on its worker's machine, other machines wait until that machine's
agent has ended them.
"""
LATELY: Final = 1.0
"""Time for which the list of dead holders is reused when claiming runs, in seconds."""


class Holder:
    """Claims of this process on runs in a PostgreSQL database."""

    def __init__(self, url: str, database: PostgresDatabase) -> None:
        self._url, self._database = url, database
        self.name = f"{this_process()} {os.urandom(4).hex()}"
        self.claims: dict[str, float] = {}
        """Claimed runs, and the `boottime` of the last query that confirmed each claim."""
        self._beats: _Beats | None = None
        self.looked = -LATELY
        """Time of the last check for dead holders."""
        self._dead: list[str] = []  # holders on this machine that no longer run

    def close(self) -> None:
        """Release all claims, so that other workers can claim the runs at once."""
        if self._beats is not None:
            self._beats.over.set()
            self._beats.join()
            self._beats = None
        if self._database.open and self.claims:
            let = (
                "UPDATE runs SET held_until = now() WHERE holder = %s AND id = ANY(%s) RETURNING id"
            )
            self._database.all(let, (self.name, list(self.claims)))

    def keep(self, run: str, since: float) -> None:
        """Add a claim confirmed by a query at time `since`, and renew it from now on."""
        self.claims[run] = since
        if self._beats is None:
            self._beats = _Beats(self._url, self.name, self.claims)
            self._beats.start()

    def confirm(self, run: str, fence: int) -> None:
        """Check that a claim is valid now, with a query only if the last check is old.

        Raises Stale.
        """
        while boottime() - self.claims.get(run, -SURE) >= SURE:
            self.take_request(run, fence)

    def take_request(self, run: str, fence: int) -> str:
        """Return the pending request of a claimed run, and renew the claim.

        Raises Stale.
        """
        since = boottime()
        rows = self._database.all(
            "UPDATE runs SET held_until = now() + %s * interval '1 second' WHERE id = %s AND fence = %s AND claim <> '' AND holder = %s"
            " RETURNING request",
            (CLAIM, run, fence, self.name),
        )
        if not rows:
            raise Stale(run)
        self.claims[run] = since
        return str(rows[0][0])

    def find_dead(self) -> dict[str, object]:
        """Find dead holders of claims on this machine, as parameters of the condition `FREE`."""
        rows = self._database.all(
            "SELECT DISTINCT holder FROM runs WHERE claim <> '' AND starts_with(holder, %s)",
            (f"{machine()} ",),
        )
        looked = time.monotonic()
        self._dead = [holder for (holder,) in rows if not lives(holder)]
        self.looked = looked
        return {"dead": self._dead, "machine": f"{machine()} "}

    def lately(self) -> dict[str, object]:
        """Return the parameters of the condition `FREE`, reusing a result younger than `LATELY`.

        This helps workers that execute many short runs.
        """
        if time.monotonic() - self.looked < LATELY:
            return {"dead": self._dead, "machine": f"{machine()} "}
        return self.find_dead()


class _Beats(Thread):
    """Heartbeat thread that renews claims on runs during long operations.

    Examples are hashing data and renting a machine.
    """

    def __init__(self, url: str, holder: str, claims: dict[str, float]) -> None:
        super().__init__(name="beats", daemon=True)
        self.over = ThreadEvent()
        self._url, self._holder, self._claims = url, holder, claims

    def run(self) -> None:
        db: Connection[Row] | None = None
        while not self.over.wait(BEAT):
            try:
                db = db if db is not None and not db.closed else connect(self._url)
                since = boottime()
                query = "UPDATE runs SET held_until = now() + %s * interval '1 second' WHERE holder = %s AND claim <> '' RETURNING id"
                for (run,) in db.execute(query, (CLAIM, self._holder)).fetchall():
                    if run in self._claims:
                        self._claims[run] = since
            # the next heartbeat retries; a worker without its claim gets an error on its next write
            except psycopg.Error:
                if db is not None:
                    db.close()
        if db is not None:
            db.close()


def boottime() -> float:
    """Return the seconds since this machine's boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
