"""Where the parts of a picture go: steps in layers, attempts in lanes, numbers in curves.  Pure: numbers in, coordinates out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, ACROSS, DOWN = 196, 66, 56, 22
"""Of a box, and between boxes, in pixels."""
POINTS = 600
"""Of one curve."""


class Box(NamedTuple):
    """The corner of a step's box."""

    step: str
    x: int
    y: int


def layers(needs: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Steps by the longest way to what needs nothing; in each layer those near what they need.  `needs` has what is needed before what needs it."""
    depth: dict[str, int] = {}
    for step, needed in needs.items():
        depth[step] = 1 + max((depth[each] for each in needed if each in depth), default=-1)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for step, layer in depth.items():
        rows[layer].append(step)
    for above, row in itertools.pairwise(rows):
        place = {step: n for n, step in enumerate(above)}
        centre = {step: [place[each] for each in needs[step] if each in place] for step in row}
        row.sort(
            key=lambda step: sum(centre[step]) / len(centre[step]) if centre[step] else math.inf
        )
    return rows


def boxes(needs: Mapping[str, Sequence[str]]) -> tuple[list[Box], int, int]:
    """A box for each step, from left to right; and the size of the picture."""
    rows = layers(needs)
    found = [
        Box(step, n * (WIDTH + ACROSS) + 2, m * (HEIGHT + DOWN) + 2)
        for n, row in enumerate(rows)
        for m, step in enumerate(row)
    ]
    most = max(map(len, rows), default=0)
    return (
        found,
        max(len(rows) * (WIDTH + ACROSS) - ACROSS + 4, 0),
        max(most * (HEIGHT + DOWN) - DOWN + 4, 0),
    )


def critical(needs: Mapping[str, Sequence[str]], ended: Mapping[str, float]) -> list[str]:
    """The chain of steps that decided when the run ended, the first first: from the last that ended back to what it waited for longest.

    A step that ran nothing, a `select` say, is looked through.
    """
    path: list[str] = []
    step = max(ended, key=ended.__getitem__, default=None)
    while step is not None:
        path.append(step)
        waited, seen = list(needs.get(step, ())), {step}
        for each in waited:
            if each not in ended and each not in seen:
                seen.add(each)
                waited += needs.get(each, ())
        step = max(
            (each for each in waited if each in ended and each not in path),
            key=ended.__getitem__,
            default=None,
        )
    return path[::-1]


class Bar(NamedTuple):
    """An attempt in a timeline: its place and step, when it began and ended, what it is called, its state."""

    place: str
    step: str
    begun: float
    ended: float
    name: str
    state: str


def lanes(bars: Iterable[Bar]) -> dict[tuple[str, str], list[list[Bar]]]:
    """The attempts of each step at each place in as few rows as there were at once."""
    found: dict[tuple[str, str], list[list[Bar]]] = {}
    for bar in sorted(bars, key=lambda bar: bar.begun):
        rows = found.setdefault((bar.place, bar.step), [])
        row = next((row for row in rows if row[-1].ended <= bar.begun), None)
        if row is None:
            rows.append([bar])
        else:
            row.append(bar)
    return found


def ticks(span: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to `span`."""
    if span <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * each for each in (1, 2, 5, 10, 20) if span / (step * each) <= most)
    return [n * step for n in range(int(span / step) + 1)]


Curve = Sequence[tuple[float, float]]


def smooth(curve: Curve, weight: float) -> list[tuple[float, float]]:
    """An exponential mean of what was before, without its bias towards the first values."""
    if not weight:
        return list(curve)
    found, mean, share = [], 0.0, 1.0
    for x, y in curve:
        mean = weight * mean + (1 - weight) * y
        share *= weight
        found.append((x, mean / (1 - share)))
    return found


def align_curves(
    curves: Sequence[Curve], most: int = POINTS
) -> tuple[list[float], list[list[float | None]]]:
    """Curves over one common x; of many points the least and the greatest of each part, in their order, so that no spike is lost."""
    every = sorted({x for curve in curves for x, _ in curve})
    if len(every) <= most:
        place = {x: n for n, x in enumerate(every)}
        return every, [_place(((place[x], y) for x, y in curve), len(every)) for curve in curves]
    low, parts = every[0], max(most // 2, 1)
    width = (every[-1] - low) / parts or 1.0
    xs = [low + (n / 2 + 0.25) * width for n in range(2 * parts)]
    return xs, [_place(_extremes(curve, low, width, parts), 2 * parts) for curve in curves]


def _place(points: Iterable[tuple[int, float]], size: int) -> list[float | None]:
    row: list[float | None] = [None] * size
    for n, y in points:
        row[n] = float(f"{y:.4g}")
    return row


def _extremes(curve: Curve, low: float, width: float, parts: int) -> Iterable[tuple[int, float]]:
    found: dict[int, list[float]] = {}
    for x, y in curve:
        found.setdefault(min(int((x - low) / width), parts - 1), []).append(y)
    for part, ys in found.items():
        least, greatest = ys.index(min(ys)), ys.index(max(ys))
        for half, n in enumerate(sorted((least, greatest))):
            yield 2 * part + half, ys[n]


def frame(curves: Iterable[Curve]) -> tuple[float, float] | None:
    """The values to show: without the two thousandth parts at both ends, and with where every curve begins."""
    every = list(curves)
    values = sorted(y for curve in every for _, y in curve)
    if not values:
        return None
    cut = len(values) // 500
    firsts = [curve[0][1] for curve in every if curve]
    return min(values[cut], *firsts), max(values[len(values) - 1 - cut], *firsts)
