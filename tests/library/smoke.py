"""Runs the smoke preset of a library recipe for real, and once more: everything is fresh.  What a training has learned is each test's own to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import runner


def smoke(
    recipe: str,
    workspace: Path,
    inputs: dict[str, Any] | None = None,
    *,
    source: Path | None = None,
    **settings: Any,
) -> Path:
    """The folder of its results.  Inputs given here go over those of the preset; `source` is the recipe with another place to fetch code from."""
    name = str(source or recipe)
    settings = {"python": "current", "preset": "smoke", "workspace": workspace, **settings}
    planned = runner.plan(name, inputs, **settings)
    assert {verdict.answer for verdict in planned.verdicts} <= {"run", "maybe", "skip"}
    assert set(planned.plan.graph) == {node.id for node in planned.plan.nodes}
    summary = runner.run(name, inputs, **settings)
    assert summary.state == "COMPLETED", [
        (failure.id, failure.tail[-2000:]) for failure in summary.failed
    ]
    for _, path in summary.results:
        assert (Path.cwd() / path).exists()
    results = workspace if source else workspace / "out" / recipe / "latest"
    assert source or (results.is_symlink() and any(results.iterdir()))
    again = runner.run(name, inputs, **settings)
    assert set(again.counts) <= {"FRESH", "SKIPPED"} and again.results == summary.results
    return results
