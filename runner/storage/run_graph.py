"""The graph of a run as it is kept with it: which steps need which, how many instances each has, and the keys of those whose results were there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..reading import parse_json


class RunGraph(NamedTuple):
    """Steps without instances, in order: what each needs, how many instances it has.  `fresh`: the keys of instances whose results were there."""

    needs: Mapping[str, Sequence[str]]
    instances: Mapping[str, int]
    fresh: Mapping[str, str]
    trains: str = ""
    """The step that trains; empty where none does, or an earlier version kept the graph."""
    reported: str = ""
    """What that reported when its result was made, if that is there: as `StepRow.numbers`."""


def recall(home: Path, run: str) -> RunGraph | None:
    """The graph of a run in the store at `home`; None where it is not kept."""
    try:
        return RunGraph(**parse_json(file_of(home, run).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def file_of(home: Path, run: str) -> Path:
    """Where the graph of a run is kept."""
    return home / "runs" / run / "graph.json"
