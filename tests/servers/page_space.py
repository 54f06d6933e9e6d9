"""A workspace of runs such as people have: trainings that differ, one that failed, a sweep, and names that want to break out of a page."""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path

from runner.interface.cli.main import main

EVIL = '</script><img src=x onerror="window.__xss=1">\u202e=1+1'
FIT = """\
recipe: fit@1
summary: Fit a line, as fast as its rate allows.
inputs:
  rate: {type: number, default: 0.1}
  kind: {type: choice, choices: [adam, sgd, "<b>lion</b>"], default: adam}
  count: {type: integer, default: 40}
steps:
  fit:
    run: |
      python3 -c "
      import json, math, os
      rate, out = {{ inputs.rate }}, open(os.environ['RECIPE_METRICS'], 'w')
      for n in range({{ inputs.count }}):
          loss = 3 * math.exp(-rate * n / 4) + rate
          print(json.dumps({'step': n, 'val_loss': loss, 'score': 1 - loss / 4, '<img src=x onerror=window.__xss=2>': n % 7}), file=out)
      "
      echo {{ inputs.kind }} > {{ outputs.o }}
      test {{ inputs.rate }} != 9
    metrics: true
    outputs: {o: fit.txt}
"""
PICK = """\
recipe: pick@1
summary: Take the rate of which most is left, whatever its name says.
steps:
  try:
    matrix: {rate: [0.1, 0.2]}
    run: |
      for n in 1 2 3; do echo "{\\"err\\": $n, \\"step\\": $n}"; done >> $RECIPE_METRICS; echo {{ matrix.rate }} > {{ outputs.o }}
    metrics: true
    outputs: {o: "try{{ matrix.rate }}.txt"}
  best: {select: try, max: err}
"""


def seeded(root: Path) -> None:
    """Make the workspace and its runs."""
    root.mkdir()
    (root / "fit.yaml").write_text(FIT)
    (root / "pick.yaml").write_text(PICK)
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./fit.yaml", "./pick.yaml"]\n')
    here = ["-C", str(root)]
    for words in (
        ["rate=0.3", "kind=adam"],
        ["rate=0.1", "kind=sgd", "--name", EVIL, "--note", EVIL, "--tag", "base"],
        ["rate=0.5", "kind=<b>lion</b>"],
        ["rate=0.3", "kind=adam"],
    ):
        assert main(["run", *here, "./fit.yaml", *words]) == 0
    assert main(["run", *here, "./fit.yaml", "rate=9"]) == 1
    assert main(["run", *here, "./pick.yaml"]) == 0
    assert main(["sweep", *here, "./fit.yaml", "rate=0.2,0.4,0.8"]) == 0


def many(database: Path, count: int) -> None:
    """Copy the runs of a workspace so often, as rows of its database: what a table of thousands costs is measured on them."""
    with sqlite3.connect(database, timeout=30) as db:
        db.row_factory = sqlite3.Row
        runs = db.execute("SELECT * FROM runs WHERE recipe = 'fit@1'").fetchall()
        tries = {row["run"]: row for row in db.execute("SELECT * FROM attempts WHERE step = 'fit'")}
        for n in range(count):
            run = dict(runs[n % len(runs)])
            attempt = tries.get(run["id"])
            inputs = json.loads(run["inputs"]) | {"rate": (n + 1) / 1000}
            run |= {"id": f"20200101-{n:06d}-{n:06x}", "inputs": json.dumps(inputs)}
            run |= {"created": 1577836800.0 + n, "ended": 1577836900.0 + n, "idempotency": ""}
            _insert(db, "runs", run)
            if attempt is not None:
                own = {"id": f"{run['id']}/fit/1", "run": run["id"]}
                _insert(db, "attempts", dict(attempt) | own)
                _insert(db, "summaries", _of(db, attempt["id"], own["id"]))
    db.close()


def _of(db: sqlite3.Connection, known: str, attempt: str) -> dict[str, object]:
    """The summary of an attempt as that of another."""
    (metrics,) = db.execute("SELECT metrics FROM summaries WHERE attempt = ?", (known,)).fetchone()
    return {
        "attempt": attempt,
        "metrics": metrics,
        "crc": zlib.crc32(f"{attempt}{metrics}".encode()),
    }


def _insert(db: sqlite3.Connection, table: str, row: dict[str, object]) -> None:
    db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", list(row.values()))
