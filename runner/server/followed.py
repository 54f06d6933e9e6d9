"""Position of the stream of all runs, saved so that the next server process continues there.

Clients then receive each event once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class SentEvent(NamedTuple):
    """An event of the all-runs stream that may have been sent already."""

    number: int
    position: str
    run: str
    seq: int
    data: Mapping[str, Any]


class StreamState(NamedTuple):
    """Saved state of the all-runs stream."""

    epoch: str
    number: int
    """Number of the last event sent in the stream."""
    upcoming: Mapping[str, int]
    """Number of the next event of each run."""
    sent: Sequence[SentEvent]


def save_state(path: Path, followed: StreamState) -> None:
    """Save the stream state for the next server process, readable by its owner only.

    Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(followed, file)
    new.replace(path)


def load_state(path: Path) -> StreamState | None:
    """Load and delete the stream state saved by the previous server process.

    None if no readable state exists, for example because the process was killed. Deletion prevents
    the use of an outdated state after a later kill.
    """
    try:
        text = path.read_text()
        path.unlink()
        epoch, number, upcoming, sent = json.loads(text)
        return StreamState(
            str(epoch), int(number), dict(upcoming), [SentEvent(*each) for each in sent]
        )
    except (OSError, ValueError, TypeError):
        return None
