"""What the attempts of a run reported, also while they run: masked, and nothing of what cannot be masked here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ..errors import CannotRun
from ..planning.ids import names
from ..secrets import Masker
from ..storage import metrics
from ..storage.workspace import Workspace
from ..survey import rows, samples
from ..survey.results import Point, points
from .logs import Part, parts, unmaskable


def reported(ws: Workspace, run: str, step: str, attempt: int, of: Literal["step", "machine"]) -> Iterator[tuple[Part, Sequence[Point]]]:
    """The points of each attempt, in order: of one step or, empty, of all; of one attempt or, 0, of all."""
    ended = {(each.step, each.n): each for each in ws.store.runs.attempts(run)}
    for part in parts(ws.store.runs.events(run)):
        if (step and step not in names(part.step)) or attempt not in (0, part.number):
            continue
        known = ended.get((part.step, part.number))
        if of == "machine":
            seen = samples.beside(part.raw)
            yield part, samples.kept(ws, known) if known is not None else rows.so_far(ws, run, part.step, part.number, seen)
        else:
            yield part, (points(ws, known) or ()) if known is not None else _live(ws, run, part)


def _live(ws: Workspace, run: str, part: Part) -> Sequence[Point]:
    """What an attempt has reported that is under way; nothing where that cannot be masked."""
    if rows.is_elsewhere(ws, run):
        return rows.so_far(ws, run, part.step, part.number, Path(f"{part.raw[:-4]}.metrics"))
    if unmaskable(part, ws.root, ws.environ):
        return ()
    try:
        data = Masker(part.known(ws.root, ws.environ)).mask(Path(f"{part.raw[:-4]}.metrics").read_bytes())
    except (OSError, CannotRun):
        return ()
    return [point for line in data.splitlines() if (point := metrics.parse(line))]
