"""How steps `evaluate` hand in what they found: numbers, a page for people, metrics of the run.  Does not know what was judged."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from loop import Metrics


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every such step takes."""
    made = argparse.ArgumentParser(description=about)
    for name in ("data", "base", "model", "report"):
        made.add_argument(f"--{name}", type=Path, required=True)
    made.add_argument("--micro-batch", type=int, required=True)
    return made


def write(folder: Path, report: Mapping[str, object], page: str, metrics: Mapping[str, float]) -> None:
    """`report.json` and `report.md`, and the metrics at $RECIPE_METRICS."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(page, encoding="utf-8")
    if told := os.environ.get("RECIPE_METRICS"):
        Metrics(Path(told)).tell(1, **metrics)
