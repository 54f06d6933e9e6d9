"""Database row that announces a running worker, kept up to date by a thread.

The thread is needed because a run, or the wait for the next run, may take hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final

from ..errors import RecipeError
from ..storage.records.processes import this_process
from ..storage.records.runs import ClaimCriteria
from ..storage.records.store import Store
from ..storage.records.workers import BEAT, WorkerRow

END_WITHIN: Final = 2.0
"""Timeout for the deletion of the worker's row, in seconds."""


class Presence:
    """Thread that writes a worker's database row now and every `BEAT` seconds."""

    def __init__(self, root: Path, home: Path, environ: Mapping[str, str], row: WorkerRow) -> None:
        self._root, self._home = root, home
        self._shared = environ.get("RECIPE_RUNS", "")
        self._row = row
        self._over = Event()
        self._thread = Thread(target=self._work, name="presence", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread and delete the worker's database row."""
        self._over.set()
        self._thread.join(END_WITHIN)

    def _work(self) -> None:
        while True:
            # The worker itself reports a broken store.
            with suppress(RecipeError, OSError), self._open_store() as store:
                store.runs.workers.hear(self._row)
            if self._over.wait(BEAT):
                break
        with suppress(RecipeError, OSError), self._open_store() as store:
            store.runs.workers.forget(self._row.process)

    def _open_store(self) -> Store:
        return Store.open(self._home, shared=self._shared, workspace=str(self._root))


def register(
    root: Path, home: Path, environ: Mapping[str, str], name: str, offer: ClaimCriteria
) -> Presence:
    """Register this process as a worker for the runs that match `offer`.

    `name` is the worker's name in its claims.
    """
    row = WorkerRow(
        this_process(),
        name,
        str(root),
        offer.driver,
        dict(offer.labels),
        dict(offer.at_most),
        offer.store,
    )
    return Presence(root, home, environ, row)
