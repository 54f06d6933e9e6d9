"""A long history for a workspace, made in its database in a moment."""

from __future__ import annotations

import sqlite3
from pathlib import Path

_COPIES = """\
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
INSERT INTO {table} SELECT {columns} FROM (SELECT * FROM {table} WHERE {run} = (SELECT min(id) FROM runs)) CROSS JOIN n
"""
_ID = "printf('20250101-000000-%06x', i)"
_NEW = {
    "steps": {"run": _ID},
    "attempts": {"run": _ID, "id": "id || i"},
    "events": {"run": _ID},
    "traces": {
        "key": "printf('%064x', i * 1000 + length(step))",
        "run": _ID,
        "made_at": "made_at - i",
    },
    "runs": {"id": _ID, "created": "created - i", "idempotency": "''"},
}
"""What is new in each copy of a row.  Steps are told apart by the lengths of their ids."""


def remember(root: Path, count: int) -> None:
    """So many copies of the first run of the workspace at `root`, as runs before it."""
    with sqlite3.connect(root / ".recipe" / "recipe.db") as db:
        for table, new in _NEW.items():
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            columns = ", ".join(new.get(name, name) for name in names)
            db.execute(
                _COPIES.format(
                    count=count,
                    table=table,
                    run="id" if table == "runs" else "run",
                    columns=columns,
                )
            )
