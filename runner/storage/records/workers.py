"""Workers of one database: rows that each worker refreshes while it lives, even when idle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from .database import Data, Row, mapping, text
from .processes import lives, machine

BEAT: Final = 15.0
"""Interval between two refreshes of a worker's row, in seconds."""
SILENT: Final = 4 * BEAT
"""Time without a refresh after which a worker on another machine counts as dead, in seconds."""
KEPT: Final = 86_400.0
"""Time without a refresh after which a worker's row is deleted, in seconds."""
Ask: TypeAlias = Callable[[str, Mapping[str, object]], Sequence[Row]]
"""Function that runs a statement in its own transaction; `:name` stands for a value."""


class WorkerRow(NamedTuple):
    """Worker process that executes runs one by one."""

    process: str
    """Unique process name, see `processes`."""
    name: str
    """Name of the worker in the claims of its runs."""
    workspace: str
    driver: str = ""
    """Driver whose runs the worker accepts; empty for any driver."""
    labels: Data = {}  # noqa: RUF012  (never written to)
    at_most: Data = {}  # noqa: RUF012
    """Maximum concurrent runs over all workers with the same `user`, `recipe` or `driver`."""
    store: str = ""
    """URL of the shared store whose runs the worker accepts, of any workspace.

    Empty for its own workspace.
    """
    age: float = 0.0
    """Seconds since the worker's start."""
    silent: float = 0.0
    """Seconds since the last refresh."""

    @property
    def alive(self) -> bool:
        """Return True if the worker is alive.

        This is decided by its process on this machine, and by its last refresh on others.
        """
        if self.process.startswith(f"{machine()} "):
            return lives(self.process)
        return self.silent < SILENT


class Workers:
    """Workers of one database.

    `now` is the SQL of the database's clock.
    """

    def __init__(self, ask: Ask, now: str) -> None:
        self._ask, self._now = ask, now

    def hear(self, worker: WorkerRow) -> None:
        """Refresh a worker's row, and delete rows without a refresh for a day."""
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
        """Delete the row of a worker that has stopped."""
        self._ask("DELETE FROM workers WHERE process = :process RETURNING 1", {"process": process})

    def all(self, workspace: str) -> list[WorkerRow]:
        """Return the workers of a workspace and those of any workspace, oldest first.

        The list includes dead workers.
        """
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
