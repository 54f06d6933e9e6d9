"""Why a run failed is a kind and words: what an earlier version stored is given both."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from runner.storage.records import postgres_database
from runner.storage.records.runs import RunRow
from runner.storage.records.store import STORE, Store

BEFORE = (
    ("its worker is gone", (), "worker-gone", "its worker is gone"),
    ("poison", (), "poison", "poison"),
    ("", (("train", "FAILED", "oom", "exit 1"),), "oom", "exit 1"),
    (
        "",
        (("a", "DONE", "", ""), ("b", "FAILED", "unplaced", "none left")),
        "provisioning",
        "none left",
    ),
    ("the disk is full", (), "infrastructure", "the disk is full"),
)
"""Reasons of failed runs as the version before stored them, with (step, state, kind, words), and the kind and words that they become."""


def _is_migrated(store: Store) -> None:
    for n, (_, steps, kind, words) in enumerate(BEFORE):
        row = store.runs.get(f"r{n}")
        assert (row.failure, row.reason) == (kind, words)
        found = store.runs.steps(row.id)
        assert [(each.reason, each.detail) for each in found.values()] == [
            step[2:] for step in steps
        ]
    assert not store.runs.get("well").failure
    failures = {each.reason: each.failure for each in store.runs.outbox.list_letters()}
    assert failures == {
        "": "",
        "HTTP 410 Gone": "gone",
        "HTTP 404": "refused",
        "HTTP 503": "server-error",
        "it cannot be reached": "unreachable",
    }


ADDED = (
    ("runs", "failure"),
    ("steps", "detail"),
    ("outbox", "failure"),
    ("steps", "numbers"),
    ("steps", "began"),
)
"""Columns that were added since, by their tables."""


def _store_before(write: Callable[[str, tuple[object, ...]], object]) -> None:
    """Turn runs without steps into what the version before had stored of them."""
    for n, (reason, steps, _, _) in enumerate(BEFORE):
        write("UPDATE runs SET state = 'FAILED', reason = ? WHERE id = ?", (reason, f"r{n}"))
        for m, (step, state, kind, words) in enumerate(steps):
            write("INSERT INTO steps VALUES (?, ?, ?, '', ?)", (f"r{n}", step, state, kind))
            data = json.dumps({"detail": words} if words else {})
            event = (f"r{n}", m + 2, 1.0, "step", step, "RUNNING", state, kind, data)
            write("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", event)
    for reason in ("", "HTTP 410 Gone", "HTTP 404", "HTTP 503", "it cannot be reached"):
        write(
            "INSERT INTO outbox (run, receiver, id, type, body, created, due, reason)"
            " VALUES ('r0', 'webhook POST http://x', 'i', 't', '{}', 1.0, 1.0, ?)",
            (reason,),
        )


def test_a_store_of_before_is_given_kinds_and_words(tmp_path: Path) -> None:
    root = tmp_path / ".recipe"
    with Store.open(root) as store:
        for n in (*(f"r{n}" for n in range(len(BEFORE))), "well"):
            store.runs.submit(RunRow(n, "tool@1", "plan", {}, "here"))
    with sqlite3.connect(root / "recipe.db") as db:
        for table, column in ADDED:
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        _store_before(db.execute)
        db.execute("DROP TABLE workers")
        db.execute("DROP TABLE summaries")
        db.execute("DROP INDEX attempts_by_key")
        db.execute(f"PRAGMA user_version = {len(STORE.migrations) - 5}")
    db.close()
    with Store.open(root) as store:
        _is_migrated(store)


def test_a_database_of_before_is_given_kinds_and_words(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(tmp_path / ".recipe", shared=url, workspace="here") as store:
        for n in (*(f"r{n}" for n in range(len(BEFORE))), "well"):
            store.runs.submit(RunRow(n, "tool@1", "plan", {}, "here"))
    with psycopg.connect(url, autocommit=True) as db:
        for table, column in ADDED:
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}".encode())
        _store_before(lambda text, values: db.execute(text.replace("?", "%s").encode(), values))
        db.execute("DROP TABLE workers")
        db.execute("DROP INDEX attempts_by_key")
        version = len(postgres_database._MIGRATIONS) - 4
        db.execute("DELETE FROM recipe_schema WHERE version >= %s", (version,))
    with Store.open(tmp_path / ".recipe", shared=url, workspace="here") as store:
        _is_migrated(store)
