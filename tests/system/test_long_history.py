"""A workspace in which thousands of runs went before: nothing that a person waits for reads all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runner.storage.records.database import Database
from runner.storage.records.runs import AttemptRow
from runner.storage.workspace import Workspace
from runner.survey.run_story import changes_of
from tests.history import remember
from tests.support import Space


def test_a_run_reads_no_more_rows_than_without_them(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe(
        "inputs: {n: {type: integer}}\nsteps:\n  a: {run: 'echo {{ inputs.n }} > a', outputs: {o: a}}\n  bb: {run: 'cp {{ steps.a.o }} b', outputs: {o: b}}\n"
    )
    asked, read = Database.all, [0]

    def counted(database: Database, statement: str, *values: Any) -> Sequence[Any]:
        rows = asked(database, statement, *values)
        read[0] += len(rows)
        return rows

    monkeypatch.setattr(Database, "all", counted)

    def rows_of(n: int, ran: list[str]) -> int:
        read[0] = 0
        assert space.run({"n": n}) == ran
        return read[0]

    rows_of(1, ["a", "bb"])
    first = rows_of(2, ["a", "bb"]), rows_of(2, [])
    remember(space.root, 3000)
    later = rows_of(3, ["a", "bb"]), rows_of(3, [])
    assert max(later) < max(first) + 20, (first, later)


def test_what_changed_since_the_last_run_is_read_from_that_run_alone(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe(
        "inputs: {n: {type: integer}}\nsteps:\n  a: {run: 'echo {{ inputs.n }} > a', outputs: {o: a}}\n  bb: {run: 'cp {{ steps.a.o }} b', outputs: {o: b}}\n"
    )
    for n in (1, 2, 3):
        space.run({"n": n})
    remember(space.root, 300)
    with Workspace.open(space.root) as ws:
        last, before, *_ = ws.store.runs.latest()
        read: list[str] = []
        asked = ws.store.runs.attempts

        def noted(run: str, step: str | None = None) -> list[AttemptRow]:
            read.append(run)
            return asked(run, step)

        monkeypatch.setattr(ws.store.runs, "attempts", noted)
        assert changes_of(ws, last).keys() == {"a", "bb"}
        assert read == [last.id, before.id]
