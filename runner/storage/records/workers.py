"""The workers of one database: rows beside the runs, which each worker keeps true while it lives, also when it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from .database import Data, Row, mapping, text
from .processes import lives, machine

BEAT: Final = 15.0
"""Seconds between two words of a worker."""
SILENT: Final = 4 * BEAT
"""Seconds after its last word from which a worker of another machine counts as gone."""
KEPT: Final = 86_400.0
"""Seconds after its last word from which a worker is forgotten."""
Ask: TypeAlias = Callable[[str, Mapping[str, object]], Sequence[Row]]
"""Runs one statement as one transaction; `:name` stands for a value."""


class WorkerRow(NamedTuple):
    """One process that takes runs, one after the other."""

    process: str
    """See `processes`."""
    name: str
    """As the claims of its runs have it."""
    workspace: str
    driver: str = ""
    """The only driver whose runs it takes; empty: any."""
    labels: Data = {}  # noqa: RUF012  (never written to)
    at_most: Data = {}  # noqa: RUF012
    """Of `user`, `recipe` or `driver`: how many runs with the same one all workers may have before it takes another."""
    store: str = ""
    """The URL of the shared store whose runs it takes, of any workspace; empty: those of its own."""
    age: float = 0.0
    """For how many seconds it has been there."""
    silent: float = 0.0
    """How many seconds ago it was heard of."""

    @property
    def alive(self) -> bool:
        """Whether it still is: by its process where that was on this machine, else by what it says."""
        if self.process.startswith(f"{machine()} "):
            return lives(self.process)
        return self.silent < SILENT


class Workers:
    """The workers of one database; `now` is its clock."""

    def __init__(self, ask: Ask, now: str) -> None:
        self._ask, self._now = ask, now

    def hear(self, worker: WorkerRow) -> None:
        """Note that a worker is there, and forget those of which nothing was heard for a day."""
        values = {
            "process": worker.process,
            "name": worker.name,
            "workspace": worker.workspace,
            "driver": worker.driver,
            "labels": text(worker.labels),
            "at_most": text(worker.at_most),
            "store": worker.store,
        }
        self._ask(
            "INSERT INTO workers VALUES (:process, :name, :workspace, :driver, :labels, :at_most, :store,"  # noqa: S608
            f" {self._now}, {self._now}) ON CONFLICT (process) DO UPDATE SET heard = excluded.heard RETURNING 1",
            values,
        )
        self._ask(
            f"DELETE FROM workers WHERE heard < {self._now} - :kept RETURNING 1",  # noqa: S608
            {"kept": KEPT},
        )

    def forget(self, process: str) -> None:
        """A worker has ended in order."""
        self._ask("DELETE FROM workers WHERE process = :process RETURNING 1", {"process": process})

    def all(self, workspace: str) -> list[WorkerRow]:
        """The workers of a workspace, and those of any, the oldest first; also such as died and were not forgotten yet."""
        columns = "process, name, workspace, driver, labels, at_most, store"
        rows = self._ask(
            f"SELECT {columns}, {self._now} - began, {self._now} - heard FROM workers"  # noqa: S608
            " WHERE workspace = :workspace OR store <> '' ORDER BY began, process",
            {"workspace": workspace},
        )
        return [_worker(row) for row in rows]


def _worker(row: Row) -> WorkerRow:
    process, name, workspace, driver, labels, at_most, store, age, silent = row
    return WorkerRow(
        process,
        name,
        workspace,
        driver,
        mapping(labels),
        mapping(at_most),
        store,
        max(0.0, float(age)),
        max(0.0, float(silent)),
    )
