"""A workspace in which thousands of runs went before: nothing that a person waits for reads all of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest

from runner.storage.database import Database
from tests.support import Space

COPIES = """\
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
INSERT INTO {table} SELECT {columns} FROM (SELECT * FROM {table} WHERE {run} = (SELECT min(id) FROM runs)) CROSS JOIN n
"""
NEW = {
    "steps": {"run": "printf('20250101-000000-%06x', i)"},
    "traces": {"key": "printf('%064x', i * 8 + length(step))", "made_at": "made_at - i"},
    "runs": {"id": "printf('20250101-000000-%06x', i)", "created": "created - i", "idempotency": "''"},
}


def remember_thousands(space: Space) -> None:
    """3,000 copies of the first run."""
    with sqlite3.connect(space.root / ".recipe" / "recipe.db") as db:
        for table, new in NEW.items():
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            db.execute(COPIES.format(table=table, run="id" if table == "runs" else "run", columns=", ".join(new.get(name, name) for name in names)))


def test_a_run_reads_no_more_rows_than_without_them(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
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
    remember_thousands(space)
    later = rows_of(3, ["a", "bb"]), rows_of(3, [])
    assert max(later) < max(first) + 20, (first, later)
