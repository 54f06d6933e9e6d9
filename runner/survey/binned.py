"""Curves in bins: of each part of the axis the least and the greatest value, so that thinning hides no peak.  Pure."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..planning.run_view import TOTALS
from .comparison import is_comparable

Axis = Literal["step", "seconds"]
"""`step`: the `step` or `epoch` beside a value, else its number.  `seconds`: of training, as the sum of `time_step`."""
_BESIDE = frozenset({*TOTALS, "step", "epoch", "timestamp", "time"})


class Curve(NamedTuple):
    """The values of one metric by their places on the axis, in its order."""

    x: Sequence[float]
    y: Sequence[float]


def build_curves(points: Iterable[Mapping[str, Any]], axis: Axis) -> dict[str, Curve]:
    """The curve of each metric.  What was reported again at a place counts as reported last; without `time_step` there are no seconds."""
    points = list(points)
    if axis == "step" and (regular := _regular_curves(points)) is not None:
        return regular
    found: dict[str, dict[float, float]] = {}
    passed: set[str] = set()
    seconds = 0.0
    for n, point in enumerate(points):
        if axis == "seconds":
            spent = point.get("time_step")
            if not is_comparable(spent):
                continue
            seconds += spent
            x = seconds
        else:
            at = point.get("step", point.get("epoch", n))
            x = at if is_comparable(at) else n
        for name, value in point.items():
            by_x = found.get(name)
            if by_x is None:
                if name in passed or not _is_curve(name):
                    passed.add(name)
                    continue
                by_x = found[name] = {}
            if type(value) is float or type(value) is int or is_comparable(value):
                by_x[x] = value
    found = {name: by_x for name, by_x in found.items() if by_x}
    answer = {}
    for name, by_x in found.items():
        xs = list(by_x)
        if any(a > b for a, b in itertools.pairwise(xs)):  # a step went back to a checkpoint
            xs.sort()
        answer[name] = Curve(xs, [by_x[x] for x in xs])
    return answer


def _regular_curves(points: Sequence[Mapping[str, Any]]) -> dict[str, Curve] | None:
    """The same, column by column, of points that all have the same numbers at ever greater steps, as most trainers write them; None of others."""
    if not points or "step" not in points[0]:
        return None
    names = points[0].keys()
    if any(point.keys() != names for point in points):
        return None
    columns = {name: [point[name] for point in points] for name in names if _is_curve(name)}
    x = [point["step"] for point in points]
    if any(not set(map(type, each)) <= {int, float} for each in (x, *columns.values())):
        return None
    if any(map(operator.ge, x, x[1:])):
        return None
    return {name: Curve(x, y) for name, y in columns.items()}


def _is_curve(name: str) -> bool:
    return name not in _BESIDE and not name.startswith("time_")


def bin_curve(curve: Curve, bins: int, low: float | None, high: float | None) -> Curve:
    """The least and the greatest of each of so many parts between `low` and `high`, in their order; and the nearest value outside at each end."""
    begin = max(0, bisect_left(curve.x, low) - 1) if low is not None else 0
    end = bisect_right(curve.x, high) + 1 if high is not None else len(curve.x)
    x, y = curve.x[begin:end], curve.y[begin:end]
    if len(x) <= 2 * bins:
        return Curve(x, y)
    kept: list[int] = [0]
    for n in range(bins):
        part = range(len(x) * n // bins, len(x) * (n + 1) // bins)
        kept += sorted({min(part, key=y.__getitem__), max(part, key=y.__getitem__)})
    kept.append(len(x) - 1)
    places = sorted(set(kept))
    return Curve([x[n] for n in places], [y[n] for n in places])
