"""Compute the layout of step graphs, timelines and curves.  Pure functions without I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, ACROSS, DOWN = 196, 66, 56, 22
"""Size of a box (width, height) and gaps between boxes (horizontal, vertical), in pixels."""
POINTS = 600
"""Maximum points of a curve."""


class Box(NamedTuple):
    """The box of a step, with the coordinates of its upper left corner in pixels."""

    step: str
    x: int
    y: int


def layers(needs: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Group steps into layers by their longest path to a root step.

    Within a layer, steps are sorted to stay near their dependencies.

    `needs` maps steps to their dependencies, in topological order.
    """
    depth = _depths(needs)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for step, layer in depth.items():
        rows[layer].append(step)
    for above, row in itertools.pairwise(rows):
        place = {step: n for n, step in enumerate(above)}
        centre = {step: _centre(needs[step], place) for step in row}
        row.sort(key=centre.__getitem__)
    return rows


def _depths(needs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the length of the longest path from a root to each step; 0 for a root."""
    depth: dict[str, int] = {}
    for step, needed in needs.items():
        known = [depth[each] for each in needed if each in depth]
        depth[step] = 1 + max(known, default=-1)
    return depth


def _centre(needed: Sequence[str], place: Mapping[str, int]) -> float:
    """Return the mean place of the dependencies in the layer above; infinite without dependencies."""
    places = [place[each] for each in needed if each in place]
    return sum(places) / len(places) if places else math.inf


def boxes(needs: Mapping[str, Sequence[str]]) -> tuple[list[Box], int, int]:
    """Return a box for each step, with layers from left to right, and the width and height of the
    picture in pixels.
    """
    rows = layers(needs)
    found: list[Box] = []
    for n, row in enumerate(rows):
        for m, step in enumerate(row):
            found.append(Box(step, n * (WIDTH + ACROSS) + 2, m * (HEIGHT + DOWN) + 2))
    most = max(map(len, rows), default=0)
    width = max(len(rows) * (WIDTH + ACROSS) - ACROSS + 4, 0)
    height = max(most * (HEIGHT + DOWN) - DOWN + 4, 0)
    return found, width, height


def critical_path(needs: Mapping[str, Sequence[str]], ended: Mapping[str, float]) -> list[str]:
    """Return the critical path of a run: the last step to end, preceded each time by the
    latest-ending dependency, in order of execution.

    Dependencies that did not run, such as a `select`, are replaced by their own dependencies.
    """
    path: list[str] = []
    step = max(ended, key=ended.__getitem__, default=None)
    while step is not None:
        path.append(step)
        waited = _executed_dependencies(step, needs, ended)
        unvisited = [each for each in waited if each not in path]
        step = max(unvisited, key=ended.__getitem__, default=None)
    return path[::-1]


def _executed_dependencies(
    step: str, needs: Mapping[str, Sequence[str]], ended: Mapping[str, float]
) -> list[str]:
    """Return the dependencies in `ended`; another one is replaced by its own dependencies."""
    waited, seen = list(needs.get(step, ())), {step}
    for each in waited:  # grows while it is read
        if each not in ended and each not in seen:
            seen.add(each)
            waited += needs.get(each, ())
    return [each for each in waited if each in ended]


class TimelineBar(NamedTuple):
    """An attempt in a timeline: its host, step, start and end time, label and state."""

    place: str
    step: str
    begun: float
    ended: float
    name: str
    state: str


def lanes(bars: Iterable[TimelineBar]) -> dict[tuple[str, str], list[list[TimelineBar]]]:
    """Arrange attempts in rows without overlaps, per place and step, with as few rows as possible."""
    found: dict[tuple[str, str], list[list[TimelineBar]]] = {}
    for bar in sorted(bars, key=lambda bar: bar.begun):
        rows = found.setdefault((bar.place, bar.step), [])
        for row in rows:
            if row[-1].ended <= bar.begun:
                row.append(bar)
                break
        else:
            rows.append([bar])
    return found


def ticks(span: float, most: int = 6) -> list[float]:
    """Return round tick values from 0 to `span`, with at most `most` intervals."""
    if span <= 0:
        return [0.0]
    step = _round_step(span, most)
    return [n * step for n in range(int(span / step) + 1)]


def _round_step(span: float, most: int) -> float:
    """Return the smallest of the numbers 1, 2, 5, 10, 20 … that divides `span` into at most `most`
    intervals.
    """
    power = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10):
        if span / (power * factor) <= most:
            return power * factor
    return power * 20  # if rounding makes `power` a hair too small


Curve = Sequence[tuple[float, float]]


def smooth(curve: Curve, weight: float) -> list[tuple[float, float]]:
    """Smooth a curve with a bias-corrected exponential moving average.

    A `weight` of 0 means no smoothing.
    """
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
    """Resample curves to common x values.

    With too many points, keep the minimum and maximum of each interval, so that spikes stay
    visible.
    """
    distinct: set[float] = set()
    for curve in curves:
        distinct.update(x for x, _ in curve)
    xs = sorted(distinct)
    if len(xs) <= most:
        index = {x: n for n, x in enumerate(xs)}
        return xs, [_place_at(index, curve) for curve in curves]
    low = xs[0]
    parts = max(most // 2, 1)
    width = (xs[-1] - low) / parts or 1.0
    rows = [_place(_extremes(curve, low, width, parts), 2 * parts) for curve in curves]
    return _points_of_intervals(low, width, parts), rows


def _points_of_intervals(low: float, width: float, parts: int) -> list[float]:
    """Return two x values per interval, each a quarter of its width from one of its ends."""
    return [low + (n / 2 + 0.25) * width for n in range(2 * parts)]


def _place_at(index: Mapping[float, int], curve: Curve) -> list[float | None]:
    """Return a row with the value of each point at the index of its x value."""
    return _place([(index[x], y) for x, y in curve], len(index))


def _place(points: Iterable[tuple[int, float]], size: int) -> list[float | None]:
    """Return a row with the rounded values at their indices, and None elsewhere."""
    row: list[float | None] = [None] * size
    for n, y in points:
        row[n] = float(f"{y:.4g}")
    return row


def _extremes(curve: Curve, low: float, width: float, parts: int) -> Iterable[tuple[int, float]]:
    """Yield the minimum and maximum of each interval in their order, with indices 2n and 2n + 1."""
    found: dict[int, list[float]] = {}
    for x, y in curve:
        found.setdefault(min(int((x - low) / width), parts - 1), []).append(y)
    for part, ys in found.items():
        least, greatest = ys.index(min(ys)), ys.index(max(ys))
        for half, n in enumerate(sorted((least, greatest))):
            yield 2 * part + half, ys[n]


def frame(curves: Iterable[Curve]) -> tuple[float, float] | None:
    """Return the y range to show: without the top and bottom 0.2 % of the values, but with the
    first value of each curve.  None without values.
    """
    values: list[float] = []
    firsts: list[float] = []
    for curve in curves:
        ys = [y for _, y in curve]
        values += ys
        firsts += ys[:1]
    if not values:
        return None
    values.sort()
    cut = len(values) // 500
    return min(values[cut], *firsts), max(values[len(values) - 1 - cut], *firsts)
