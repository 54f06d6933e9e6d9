"""Runs in a PostgreSQL behind PgBouncer, which may give each transaction another connection."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest

from runner.api.submitting import QueueSettings, submit
from runner.execution.terms import Choice, Settings
from runner.storage.records.runs import RunFilter
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Postgres
from tests.support import Space


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_workers_behind_a_pooler_do_every_run(server: Postgres, tmp_path: Path, mode: str) -> None:
    base = server.url().partition("?")[0]
    database = f"pooled_{mode}"
    with psycopg.connect(base, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {database}".encode())
    with PgBouncer(f"{base.rpartition('/')[0]}/{database}", mode) as pooler:
        space = Space(tmp_path / "space")
        space.recipe("inputs: {n: {type: integer}}\nsteps: {s: {run: 'true {{ inputs.n }}'}}\n")
        env = {"RECIPE_RUNS": pooler.url}
        with Workspace.open(space.root, environ={**os.environ, **env}) as ws:
            for n in range(12):
                request = Request("./recipe.yaml", {"n": n})
                submit(ws, request, Choice(), Settings(), QueueSettings(here=True))
        workers = [
            space.start("worker", "--once", "--concurrency", str(count), env=env)
            for count in (3, 2)
        ]
        for worker in workers:
            _, err = worker.communicate(timeout=240)
            assert worker.returncode == 0, err
            assert "prepared statement" not in err
        with Workspace.open(space.root, environ={**os.environ, **env}) as ws:
            rows = ws.store.runs.page(RunFilter(), 20)
            assert [row.state for row in rows] == ["COMPLETED"] * 12, [row.reason for row in rows]
