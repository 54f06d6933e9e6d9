"""What the attempts of a run reported, also while they run: masked, and nothing of what cannot be masked here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, Literal

from ..agent.regular import open_regular
from ..errors import CannotRun
from ..planning.ids import names
from ..secrets import Masker
from ..storage import metrics
from ..storage.records.links import Link, printed, recorded
from ..storage.records.runs import FINAL, AttemptRow, RunRow
from ..storage.workspace import Workspace
from ..survey import rows, samples
from ..survey.results import Point, points
from . import values
from .logs import Part, missing, parts, tail_of, unmaskable

SAMPLE: Final = 8 << 10
"""Bytes in which the last sample of a machine is."""
RECENT: Final = 1000
"""Events of a run that goes on among which an attempt has to have begun to be read while it runs: of many thousands not all are read each time."""


def reported(
    ws: Workspace, run: str, step: str, attempt: int, of: Literal["step", "machine"]
) -> Iterator[values.Point]:
    """The points of each attempt, in order and numbered from 1: of one step or, empty, of all; of one attempt or, 0, of all."""
    ended = {(each.step, each.n): each for each in ws.store.runs.attempts(run)}
    for part in parts(ws.store.runs.events(run)):
        if (step and step not in names(part.step)) or attempt not in (0, part.number):
            continue
        known = ended.get((part.step, part.number))
        if of == "machine":
            seen = samples.beside(part.raw)
            found = (
                samples.kept(ws, known)
                if known is not None
                else rows.so_far(ws, run, part.step, part.number, seen)
            )
        else:
            found = (points(ws, known) or ()) if known is not None else _live(ws, run, part)
        yield from (
            values.Point(part.step, part.number, n, dict(point)) for n, point in enumerate(found, 1)
        )


def links(ws: Workspace, row: RunRow, attempts: Sequence[AttemptRow] | None = None) -> list[Link]:
    """Where else the numbers of a run can be looked at: as stored with its attempts, and of those that run by the beginning of what they printed."""
    found = recorded(ws.store.runs.attempts(row.id) if attempts is None else attempts)
    for part in (
        parts(ws.store.runs.events(row.id, max(0, row.next_event - RECENT)))
        if row.state not in FINAL
        else ()
    ):
        if not part.ended:
            found += printed(part.step, _begun(ws, row.id, part), {})
    return list(dict.fromkeys(found))


def last_samples(ws: Workspace, row: RunRow) -> dict[str, Point]:
    """What the machines of steps that run here had to do, as their agents wrote last, by step."""
    found: dict[str, Point] = {}
    for part in parts(ws.store.runs.events(row.id, max(0, row.next_event - RECENT))):
        if part.ended:
            continue
        with suppress(OSError), open_regular(samples.beside(part.raw)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - SAMPLE))
            lines = file.read().splitlines()
            if point := next(filter(None, map(metrics.parse, reversed(lines))), None):
                found[part.step] = point
    return found


def _begun(ws: Workspace, run: str, part: Part) -> bytes:
    """The beginning of a log that is being written, masked; nothing of one that cannot be masked here."""
    with suppress(CannotRun):
        if not missing(ws, run, part) and (tail := tail_of(ws, run, part)) is not None:
            with closing(tail):
                return tail.read()
    return b""


def _live(ws: Workspace, run: str, part: Part) -> Sequence[Point]:
    """What an attempt has reported that is under way; nothing where that cannot be masked."""
    if rows.is_elsewhere(ws, run):
        return rows.so_far(ws, run, part.step, part.number, Path(f"{part.raw[:-4]}.metrics"))
    if unmaskable(ws, part):
        return ()
    try:
        data = Masker(part.known(ws)).mask(Path(f"{part.raw[:-4]}.metrics").read_bytes())
    except (OSError, CannotRun):
        return ()
    return [point for line in data.splitlines() if (point := metrics.parse(line))]
