"""Who holds which runs of a PostgreSQL database: claims that last `CLAIM` seconds by its clock, and are kept by beats.

That of a dead process of this machine counts for nothing at once.
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
"""Seconds between two beats of a claim."""
SURE: Final = CLAIM - BEAT
"""Seconds for which a claim is taken to be ours after the database said so: another worker may have it ten seconds later."""
FREE: Final = (
    "(holder = ANY(%(dead)s) OR ((claim = '' OR held_until < now()) AND (bundle = '' OR driver <> 'local' OR holder = ''"
    f" OR starts_with(holder, %(machine)s) OR held_until < now() - interval '{ELSEWHERE - CLAIM} seconds'"
    " OR NOT EXISTS (SELECT FROM steps WHERE steps.run = runs.id AND steps.state = 'RUNNING'))))"
)
"""A run that may be claimed: of one whose jobs may go on where its worker was, other machines wait until their agent has ended them."""
LATELY: Final = 1.0
"""Seconds for which a look at the holders of claims is believed by who takes runs."""


class Holder:
    """This process, as far as it holds runs."""

    def __init__(self, url: str, database: PostgresDatabase) -> None:
        self._url, self._database = url, database
        self.name = f"{this_process()} {os.urandom(4).hex()}"
        self.claims: dict[str, float] = {}
        """Runs that we claimed, and when we asked the question to which the answer was that they are ours: by `boottime`."""
        self._beats: _Beats | None = None
        self.looked = -LATELY
        """When the holders of claims were looked at last."""
        self._dead: list[str] = []  # and which were processes of this machine, and are no more

    def close(self) -> None:
        """Let go of every claim: another worker may take those runs at once."""
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
        """This claim is ours, as the answer to what was asked at `since` says, and is kept from now on."""
        self.claims[run] = since
        if self._beats is None:
            self._beats = _Beats(self._url, self.name, self.claims)
            self._beats.start()

    def confirm(self, run: str, fence: int) -> None:
        """See to it that a claimed run is ours at this moment.  Asks only when the last answer is old.  Raises Stale."""
        while boottime() - self.claims.get(run, -SURE) >= SURE:
            self.take_request(run, fence)

    def take_request(self, run: str, fence: int) -> str:
        """What was asked of a claimed run, whose claim begins anew.  Raises Stale."""
        since = boottime()
        rows = self._database.all(
            "UPDATE runs SET held_until = now() + %s * interval '1 second' WHERE id = %s AND fence = %s AND claim <> '' AND holder = %s"
            " RETURNING request",
            (CLAIM, run, fence, self.name),
        )
        if not rows:
            raise Stale(f"run {run} is not ours any more")
        self.claims[run] = since
        return str(rows[0][0])

    def find_dead(self) -> dict[str, object]:
        """What this machine can tell of claims: the values of `FREE`."""
        rows = self._database.all(
            "SELECT DISTINCT holder FROM runs WHERE claim <> '' AND starts_with(holder, %s)",
            (f"{machine()} ",),
        )
        self.looked, self._dead = (
            time.monotonic(),
            [holder for (holder,) in rows if not lives(holder)],
        )
        return {"dead": self._dead, "machine": f"{machine()} "}

    def lately(self) -> dict[str, object]:
        """The same, as it was found less than `LATELY` ago: a worker that takes one short run after another does not look each time."""
        return (
            {"dead": self._dead, "machine": f"{machine()} "}
            if time.monotonic() - self.looked < LATELY
            else self.find_dead()
        )


class _Beats(Thread):
    """Keeps the claims of one holder: looking at data, or renting a machine, may take longer than a claim lasts."""

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
            except psycopg.Error:  # the next beat tries anew, and a worker that lost its claim learns it when it writes
                if db is not None:
                    db.close()
        if db is not None:
            db.close()


def boottime() -> float:
    """Seconds of this machine's clock, those included for which it, or this process, stood still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
