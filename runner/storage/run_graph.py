"""Stored graph of a run: step dependencies, instance counts, and the keys of up-to-date steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..reading import parse_json


class RunGraph(NamedTuple):
    """Dependencies and instance count of each step of a run, in order.

    `fresh` has the keys of up-to-date instances.
    """

    needs: Mapping[str, Sequence[str]]
    instances: Mapping[str, int]
    fresh: Mapping[str, str]
    trains: str = ""
    """ID of the training step; empty if there is none, and in graphs from earlier versions."""
    reported: str = ""
    """Metrics of the training step when its existing result was created.

    The form is `StepRow.numbers`.
    """


def recall(home: Path, run: str) -> RunGraph | None:
    """Read the graph of a run from the store at `home`; return None if it is not stored."""
    try:
        return RunGraph(**parse_json(file_of(home, run).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def file_of(home: Path, run: str) -> Path:
    """Return the path of a run's graph file."""
    return home / "runs" / run / "graph.json"
