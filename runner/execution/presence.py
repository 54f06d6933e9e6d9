"""A worker's word that it is there: a thread keeps its row true, since a run may take hours and the wait for one, too."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final

from ..errors import RecipeError
from ..storage.records.processes import this_process
from ..storage.records.runs import Offer
from ..storage.records.store import Store
from ..storage.records.workers import BEAT, WorkerRow

END_WITHIN: Final = 2.0
"""Seconds for which the end of a worker waits until its row is deleted."""


class Presence:
    """Notes at once, and every `BEAT` seconds, that this process takes runs.  `end` deletes that."""

    def __init__(self, root: Path, home: Path, environ: Mapping[str, str], row: WorkerRow) -> None:
        self._root, self._home = root, home
        self._shared = environ.get("RECIPE_RUNS", "")
        self._row = row
        self._over = Event()
        self._thread = Thread(target=self._work, name="presence", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(END_WITHIN)

    def _work(self) -> None:
        while True:
            # It only says that a worker is there: what is wrong with the store, the worker itself meets.
            with suppress(RecipeError, OSError), self._opened() as store:
                store.runs.workers.hear(self._row)
            if self._over.wait(BEAT):
                break
        with suppress(RecipeError, OSError), self._opened() as store:
            store.runs.workers.forget(self._row.process)

    def _opened(self) -> Store:
        return Store.open(self._home, shared=self._shared, workspace=str(self._root))


def begin(root: Path, home: Path, environ: Mapping[str, str], name: str, offer: Offer) -> Presence:
    """Have it known that this process takes the runs of an offer, under the name that its claims have."""
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
