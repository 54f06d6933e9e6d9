"""The stored graph of a run: step dependencies, instance counts, and the keys of up-to-date steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..reading import parse_json


class RunGraph(NamedTuple):
    """Steps without their instances, in order: the dependencies and the instance count of each.

    `fresh` has the keys of up-to-date instances.
    """

    needs: Mapping[str, Sequence[str]]
    instances: Mapping[str, int]
    fresh: Mapping[str, str]
    trains: str = ""
    """The training step; empty without one, and in graphs from earlier versions."""
    reported: str = ""
    """Metrics that the training step reported when its existing result was created.

    The form is `StepRow.numbers`.
    """


def recall(home: Path, run: str) -> RunGraph | None:
    """Read the graph of a run from the store at `home`; None if it is not stored."""
    try:
        return RunGraph(**parse_json(file_of(home, run).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def file_of(home: Path, run: str) -> Path:
    """Return the path of a run's graph file."""
    return home / "runs" / run / "graph.json"
