"""Where the stream of all runs was when a server stopped: the next one continues there, so that followers get each move once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class SentMove(NamedTuple):
    """A move that followers may have got."""

    number: int
    place: str
    run: str
    seq: int
    data: Mapping[str, Any]


class Followed(NamedTuple):
    """What a server knew of the stream of all runs."""

    epoch: str
    number: int
    """The number in the stream of the last move that was sent."""
    upcoming: Mapping[str, int]
    """Of each run the number of the event that comes next."""
    sent: Sequence[SentMove]


def write(path: Path, followed: Followed) -> None:
    """Leave it for the next server, in a file of the owner alone.  Raises OSError where the disk does not take it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(followed, file)
    new.replace(path)


def take_up(path: Path) -> Followed | None:
    """What the last server left; None where it left nothing, as it was killed, or nothing that can be read.

    It is deleted: a server that is killed after this has sent moves of which the file knows nothing.
    """
    try:
        text = path.read_text()
        path.unlink()
        epoch, number, upcoming, sent = json.loads(text)
        return Followed(str(epoch), int(number), dict(upcoming), [SentMove(*each) for each in sent])
    except (OSError, ValueError, TypeError):
        return None
