"""The store of one workspace, `.recipe/recipe.db`: runs, and the index of this disk.  One file, so that a group of both is one transaction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from .. import digest
from .database import Database
from .index import Index
from .locks import Locks
from .runs import Runs
from .sqlite_runs import SqliteRuns


def home(workspace: Path, environ: Mapping[str, str]) -> Path:
    """Where the store of a workspace is: `.recipe` in it, or a folder of its own below `RECIPE_HOME`."""
    if base := environ.get("RECIPE_HOME"):
        real = os.path.realpath(workspace)
        return Path(base) / f"{os.path.basename(real)}-{digest.of_bytes(os.fsencode(real))[:12]}"
    return workspace / ".recipe"


class Store:
    """The memory of one workspace.  Make one with `Store.open`."""

    def __init__(self, database: Database) -> None:
        self.root, self.database = database.root, database
        self.locks = Locks(database.root / "locks")
        self.index = Index(database)
        self._runs = SqliteRuns(database, self.index, self.locks)
        self.runs: Runs = self._runs

    @classmethod
    def open(cls, root: Path, *, read_only: bool = False) -> Store:
        """Open the store at `root`, making or migrating it as needed.  Read-only: nothing is made, and a store that is not there is empty."""
        return cls(Database.open(root, read_only=read_only))

    def close(self) -> None:
        """Let go of the database and of every claim."""
        self._runs.close()
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
