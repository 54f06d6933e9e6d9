"""Which of the combinations of fronts and standings `make test` runs: all fronts share one function, and a run that a worker has takes seconds to make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MAIN_FRONTS = ("command", "rest")
COSTLY = ("stopped", "pausing", "left-run", "paused-run")
"""Standings of which a run needs a process of its own for each request."""


@pytest.fixture(autouse=True)
def own_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb with `--to postgresql://…`, called in this process, names the database for all that follows."""
    monkeypatch.setenv("RECIPE_RUNS", os.environ.get("RECIPE_RUNS", ""))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make proof` the costly standings of the fronts that only pass requests on."""
    for item in items:
        call = getattr(item, "callspec", None)
        if item.path.parent != HERE or call is None or "ask" not in call.params:
            continue
        if call.params["ask"].__name__ in MAIN_FRONTS:
            continue
        standing = call.params.get("standing")
        stops_a_job = item.name.startswith("test_a_run_that_lost_its_worker")
        in_database = call.params.get("made") == "database" and standing in ("active", "left")
        if standing in COSTLY or stops_a_job or in_database:
            item.add_marker(pytest.mark.proof)
