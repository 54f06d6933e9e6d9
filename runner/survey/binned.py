"""Curves in bins: each bin keeps its minimum and maximum, so that downsampling hides no peak.

No I/O.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from ..planning.run_view import TOTALS
from .comparison import is_comparable

Axis = Literal["step", "seconds", "elapsed", "at"]
"""`step`: the `step` or `epoch` of a point, else its index.

`seconds`: training time, the sum of `time_step`. `at`: time of the report in seconds since the
epoch. `elapsed`: seconds since the start of the first attempt.
"""
TIMES: Final[tuple[Axis, ...]] = ("elapsed", "at")
_BESIDE = frozenset({*TOTALS, "step", "epoch", "timestamp", "time"})


class Curve(NamedTuple):
    """The values of one metric, sorted by position on the axis."""

    x: Sequence[float]
    y: Sequence[float]


def build_curves(points: Iterable[Mapping[str, Any]], axis: Axis) -> dict[str, Curve]:
    """Build the curve of each metric from its points.

    For several values at one position, the last value counts. The `seconds` axis requires
    `time_step`.
    """
    points = list(points)
    if axis == "step":
        regular = _build_regular_curves(points)
        if regular is not None:
            return regular
    own = TIMES if axis in TIMES else ()
    curves: dict[str, Curve] = {}
    for name, by_x in _collect_values(_place_points(points, axis)).items():
        if by_x and name not in own:
            curves[name] = _sort_curve(by_x)
    return curves


def _collect_values(
    placed: Iterable[tuple[float, Mapping[str, Any]]],
) -> dict[str, dict[float, float]]:
    """Return the last value of each metric at each position on the axis."""
    by_name: dict[str, dict[float, float]] = {}
    passed: set[str] = set()
    for x, point in placed:
        for name, value in point.items():
            by_x = by_name.get(name)
            if by_x is None:
                if name in passed or not _is_curve(name):
                    passed.add(name)
                    continue
                by_x = by_name[name] = {}
            # Type checks first: `is_comparable` is slow, and points are many.
            if type(value) is float or type(value) is int or is_comparable(value):
                by_x[x] = value
    return by_name


class Span(NamedTuple):
    """Start and end of an attempt in seconds since the epoch. None means unknown."""

    started: float | None = None
    ended: float | None = None


def time_points(
    points: Sequence[Mapping[str, Any]], samples: Iterable[Mapping[str, Any]], span: Span
) -> list[dict[str, Any]]:
    """Add estimated times `at` to the metric points of an attempt, or return [] without any time.

    Points have no time of their own. The host samples record the current step every 5 seconds.
    Times between two samples, or to the attempt's start and end, are interpolated.
    """
    places = [x for x, _ in _place_points(points, "step")]
    known = _find_step_times(places, samples, span) if places else []
    if not known:
        return []
    steps = [step for step, _ in known]
    return [
        {**point, "at": _interpolate(known, bisect_right(steps, x), x)}
        for x, point in zip(places, points, strict=True)
    ]


def _find_step_times(
    places: Sequence[float], samples: Iterable[Mapping[str, Any]], span: Span
) -> list[tuple[float, float]]:
    """Return training steps with the time of their first observation, both strictly increasing."""
    timed = [sample for sample in samples if is_comparable(sample.get("at"))]
    found = _first_observations(filter(_has_step, timed))
    loaded = _end_of_loading(timed, span)
    first, last = min(places), max(places)
    if loaded is not None:
        starts_before = not found or first < found[0][0]
        if starts_before:
            found.insert(0, (first, loaded))
    if span.ended is not None:
        ends_after = not found or last > found[-1][0]
        if ends_after:
            found.append((last, span.ended))
    return found


def _end_of_loading(timed: Iterable[Mapping[str, Any]], span: Span) -> float | None:
    """Return the time of the last sample before the first training step, or the attempt's start."""
    loaded = span.started
    for sample in timed:
        if _has_step(sample):
            break
        loaded = sample["at"]
    return loaded


def _has_step(sample: Mapping[str, Any]) -> bool:
    return is_comparable(sample.get("step"))


def _first_observations(samples: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return steps and times of samples, without samples that are not later in both."""
    found: list[tuple[float, float]] = []
    for sample in samples:
        step, at = sample["step"], sample["at"]
        is_later = not found or (step > found[-1][0] and at > found[-1][1])
        if is_later:
            found.append((step, at))
    return found


def _interpolate(known: Sequence[tuple[float, float]], n: int, x: float) -> float:
    """Interpolate the time of a training step. `n` is the number of known steps up to it."""
    if n == 0:
        return known[0][1]
    if n == len(known):
        return known[-1][1]
    (a, begin), (b, end) = known[n - 1 : n + 1]
    return begin + (end - begin) * (x - a) / (b - a)


def _place_points(
    points: Iterable[Mapping[str, Any]], axis: Axis
) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield the axis position of each metric point. Points without a position are skipped."""
    seconds = 0.0
    for n, point in enumerate(points):
        if axis == "seconds":
            spent = point.get("time_step")
            if is_comparable(spent):
                seconds += spent
                yield seconds, point
        elif axis in TIMES:
            at = point.get(axis)
            if is_comparable(at):
                yield at, point
        else:
            step = point.get("step", point.get("epoch", n))
            if not is_comparable(step):
                step = n
            yield step, point


def _sort_curve(by_x: Mapping[float, float]) -> Curve:
    xs = list(by_x)
    # A training run that resumed from a checkpoint reports earlier steps again.
    if any(a > b for a, b in itertools.pairwise(xs)):
        xs.sort()
    return Curve(xs, [by_x[x] for x in xs])


def _build_regular_curves(points: Sequence[Mapping[str, Any]]) -> dict[str, Curve] | None:
    """Build curves column by column, a fast path for regular points.

    Returns None unless all points have the same metrics at increasing steps, as most trainers
    write.
    """
    if not points or "step" not in points[0]:
        return None
    names = points[0].keys()
    if any(point.keys() != names for point in points):
        return None
    columns: dict[str, list[Any]] = {}
    for name in ("step", *filter(_is_curve, names)):
        columns[name] = [point[name] for point in points]
    if not all(map(_are_numbers, columns.values())):
        return None
    x = columns.pop("step")
    if not _is_increasing(x):
        return None
    return {name: Curve(x, y) for name, y in columns.items()}


def _are_numbers(column: Iterable[object]) -> bool:
    return set(map(type, column)) <= {int, float}


def _is_increasing(column: Sequence[float]) -> bool:
    return not any(map(operator.ge, column, column[1:]))


def _is_curve(name: str) -> bool:
    return name not in _BESIDE and not name.startswith("time_")


def bin_curve(curve: Curve, bins: int, low: float | None, high: float | None) -> Curve:
    """Downsample a curve to the minimum and maximum of each of `bins` bins.

    The bins divide the range from `low` to `high`. The nearest outside values are kept, so that a
    line extends to the border.
    """
    begin, end = 0, len(curve.x)
    if low is not None:
        begin = max(0, bisect_left(curve.x, low) - 1)
    if high is not None:
        end = bisect_right(curve.x, high) + 1
    x, y = curve.x[begin:end], curve.y[begin:end]
    if len(x) <= 2 * bins:
        return Curve(x, y)
    kept = {0, len(x) - 1}
    for n in range(bins):
        part = range(len(x) * n // bins, len(x) * (n + 1) // bins)
        kept |= {min(part, key=y.__getitem__), max(part, key=y.__getitem__)}
    places = sorted(kept)
    return Curve([x[n] for n in places], [y[n] for n in places])
