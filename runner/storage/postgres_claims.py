"""Who holds which runs of a PostgreSQL database: claims that last `CLAIM` seconds by its clock, and are kept by beats.

That of a dead process of this machine counts for nothing at once.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Thread
from typing import Final

import psycopg
from psycopg import Connection

from .database import Row
from .postgres_database import PostgresDatabase, connected
from .runs import ELSEWHERE

CLAIM: Final = 30.0
BEAT: Final = 10.0
"""Seconds between two beats of a claim."""
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
        self.name = f"{_machine()} {os.getpid()} {_began(os.getpid())} {os.urandom(4).hex()}"
        self.claims: set[str] = set()
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
            let = "UPDATE runs SET held_until = now() WHERE holder = %s AND id = ANY(%s) RETURNING id"
            self._database.all(let, (self.name, list(self.claims)))

    def keep(self, run: str) -> None:
        """This claim is ours, and is kept from now on."""
        self.claims.add(run)
        if self._beats is None:
            self._beats = _Beats(self._url, self.name)
            self._beats.start()

    def known(self) -> dict[str, object]:
        """What this machine can tell of claims: the values of `FREE`."""
        rows = self._database.all("SELECT DISTINCT holder FROM runs WHERE claim <> '' AND starts_with(holder, %s)", (f"{_machine()} ",))
        self.looked, self._dead = time.monotonic(), [holder for (holder,) in rows if not _lives(holder)]
        return {"dead": self._dead, "machine": f"{_machine()} "}

    def lately(self) -> dict[str, object]:
        """The same, as it was found less than `LATELY` ago: a worker that takes one short run after another does not look each time."""
        return {"dead": self._dead, "machine": f"{_machine()} "} if time.monotonic() - self.looked < LATELY else self.known()


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
                db = db if db is not None and not db.closed else connected(self._url)
                db.execute("UPDATE runs SET held_until = now() + %s * interval '1 second' WHERE holder = %s AND claim <> ''", (CLAIM, self._holder))
            except psycopg.Error:  # the next beat tries anew, and a worker that lost its claim learns it when it writes
                if db is not None:
                    db.close()
        if db is not None:
            db.close()


def _machine() -> str:
    """This machine, from one start of it to the next."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _began(pid: int) -> str:
    """When a process began, by the kernel's own count; empty for one that is not there, or is dead and was not waited for."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except (OSError, IndexError, ValueError):
        return ""


def _lives(holder: str) -> bool:
    """Whether a process of this machine that holds claims is alive."""
    _machine, pid, began, _token = holder.split(" ")
    return _began(int(pid)) == began
