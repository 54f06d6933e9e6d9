"""Requests for a run, a rerun with changes or a sweep, and their equivalent command lines."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from ..errors import Invalid, NotFound
from ..execution.terms import request_of_run
from ..language import document, inputs, library, parse
from ..language.recipe import Input, Recipe
from ..paths import is_path
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from ..survey.request import Request
from . import sweeps
from .requests import has_no_request
from .sweeps import Sweep, draft, find_varied_inputs

FOLDER: Final = "sweeps"
"""Directory of generated sweep recipes in `.recipe`, and of sweep results in the workspace."""
Axes: TypeAlias = Mapping[str, Sequence[object]]
"""The values of each swept input."""


class Search(NamedTuple):
    """A hyperparameter search: number of trials, metric, and whether to minimize the metric.

    An axis of a search may be the text of a range.
    """

    trials: int
    metric: str
    least: bool


class Start(NamedTuple):
    """A request for a run. With `axes`, it is a sweep; with `search`, a hyperparameter search."""

    request: Request
    axes: Mapping[str, Sequence[object]] = {}
    search: Search | None = None

    @property
    def instances(self) -> int:
        """Number of recipe instances: sweep combinations or search trials."""
        return self.search.trials if self.search else math.prod(map(len, self.axes.values()))


def read_start(root: Path, row: RunRow) -> Start:
    """Return the request that started a run.

    For a run of `recipe sweep`, return the swept recipe and its axes.

    Raises CannotAsk for a run stored without a request, and for a search, whose trials are not part
    of the request.
    """
    request = request_of_run(row)
    if request is None:
        raise has_no_request(row.id)
    path = Path(request.recipe)
    if path.parent.name != FOLDER or path.parent.parent.name != ".recipe":
        return Start(request)
    try:
        found = sweeps.read_sweep(document.read(root / path).value)
    except (Invalid, NotFound, OSError):
        return Start(request)
    if found is None:
        return Start(request)
    uses = found.uses
    if is_path(uses):
        uses = f"./{os.path.relpath(root / path.parent / uses, root)}"
    return Start(replace(request, recipe=uses), found.axes)


def change_inputs(start: Start, given: Mapping[str, object], axes: Axes | None) -> Start:
    """Return a copy of a request with new input values.

    `axes` replaces the existing axes. If None, inputs without a new value keep their axes.
    """
    if axes is not None:
        kept = dict(axes)
    else:
        kept = {name: values for name, values in start.axes.items() if name not in given}
    before: dict[str, object] = {}
    for name, value in start.request.inputs.items():
        # A new value for object `a` replaces an earlier value for its part `a.b`.
        is_replaced = name.partition(".")[0] in given
        if name not in kept and not is_replaced:
            before[name] = value
    return Start(replace(start.request, inputs={**before, **given}), kept)


def draft_sweep(root: Path, start: Start) -> Sweep:
    """Draft the sweep recipe of a request. Raises Invalid with all problems."""
    source = library.find(start.request.recipe, root)
    uses = start.request.recipe
    if is_path(uses):
        uses = os.path.relpath(os.path.abspath(source), os.path.abspath(root / ".recipe" / FOLDER))
    return draft(
        parse.load(source),
        uses,
        start.request.inputs,
        several=start.axes,
        preset=start.request.preset,
    )


def first_trial(root: Path, start: Start, search: Search) -> Request:
    """Return a request for one search trial, for planning: the lowest value of each range.

    Other axes use their first value. Raises Invalid with all problems.
    """
    request = start.request
    ranges: dict[str, str] = {}
    for name, values in start.axes.items():
        text = range_of(values)
        if text:
            ranges[name] = text
    recipe = parse.load(library.find(request.recipe, root))
    where = sweeps.search_space(
        recipe,
        request.inputs,
        several={**start.axes, **ranges},
        preset=request.preset,
        metric=search.metric,
    )
    one = {name: sweeps.first_value(axis) for name, axis in where.axes.items()}
    return replace(request, inputs={**where.fixed, **one})


def range_of(values: Sequence[object]) -> str:
    """Return the range text of an axis, or "" for an axis with explicit values."""
    only = values[0] if len(values) == 1 else None
    return only if isinstance(only, str) and ".." in only else ""


def request_to_run(ws: Workspace, start: Start) -> Request:
    """Return the request to submit. For a sweep, write its recipe file first. Raises Invalid."""
    if not start.axes:
        return start.request
    swept = draft_sweep(ws.root, start)
    path = ws.home / FOLDER / f"{swept.stem}.yaml"
    if not path.exists():
        ws.write(path, swept.text.encode())
    return _of_sweep(start, swept, path.name)


@contextmanager
def request_to_plan(ws: Workspace, start: Start) -> Iterator[Request]:
    """Provide a request for planning only, and delete a sweep's recipe file afterwards.

    Raises Invalid.
    """
    if start.search is not None:
        yield first_trial(ws.root, start, start.search)
        return
    if not start.axes:
        yield start.request
        return
    swept = draft_sweep(ws.root, start)
    path = ws.home / FOLDER / f"{swept.stem}.{os.getpid()}.yaml"
    ws.write(path, swept.text.encode())
    try:
        yield _of_sweep(start, swept, path.name)
    finally:
        path.unlink(missing_ok=True)


def _of_sweep(start: Start, swept: Sweep, file: str) -> Request:
    out = start.request.out or Path(FOLDER)
    recipe = f"./.recipe/{FOLDER}/{file}"
    return replace(start.request, recipe=recipe, inputs=swept.fixed, out=out)


def command_line(
    recipe: Recipe, start: Start, driver: str = "local", cost: float | None = None
) -> str | None:
    """Return the equivalent shell command, quoted, or None if no command line can express the
    request.

    `cost` is the cost limit in US dollars.
    """
    request = start.request
    words = [_input_argument(recipe, name, value) for name, value in request.inputs.items()]
    for name, values in start.axes.items():
        text = range_of(values)
        word = f"{name}={text}" if text else _axis_argument(recipe, name, values)
        words.append(word)
    if None in words or request.resources:
        return None
    flags = _flags(start, driver, cost)
    verb = "sweep" if start.axes else "run"
    return shlex.join(["recipe", verb, request.recipe, *filter(None, words), *flags])


def _flags(start: Start, driver: str, cost: float | None) -> list[str]:
    """Return the flags of the equivalent command line. Defaults are left out."""
    request, search = start.request, start.search
    flags: list[tuple[str, str | None]] = [("--preset", request.preset)]
    if driver != "local":
        flags.append(("--driver", driver))
    if cost is not None:
        flags.append(("--max-cost", f"{cost:.15g}"))
    if request.out is not None:
        flags.append(("--out", str(request.out)))
    if request.current_python:
        flags.append(("--python", "current"))
    if request.nodes:
        flags.append(("--nodes", str(request.nodes)))
    if search is not None:
        flags.append(("--tpe", str(search.trials)))
        goal = "--min" if search.least else "--max"
        flags.append((goal, search.metric))
    return [f"{name}={value}" for name, value in flags if value]


def _input_argument(recipe: Recipe, name: str, value: object) -> str | None:
    """Return NAME=VALUE for an input, or None if the command line would parse another value."""
    spec = recipe.inputs.get(name.partition(".")[0])
    if spec is None:
        return None
    text = _typed_value(value)
    if "." in name:
        return f"{name}={text}"
    if name in find_varied_inputs(recipe, {name: text}):
        return None  # the command line would read several values of a sweep
    return f"{name}={text}" if _is_same_value(spec, text, value) else None


def _axis_argument(recipe: Recipe, name: str, values: Sequence[object]) -> str | None:
    """Return NAME=VALUE,VALUE for the values of an axis, or None if no text expresses them."""
    spec = recipe.inputs[name]
    wanted = [inputs.convert(spec, value) for value in values]
    short = ",".join(map(_typed_value, values))
    # Texts with a comma or quotes need the form of JSON.
    exact = json.dumps(list(values), ensure_ascii=False)
    for text in (short, exact):
        read = find_varied_inputs(recipe, {name: text}).get(name)
        if read is None or isinstance(read, str):
            continue
        try:
            if [inputs.convert(spec, each) for each in read] == wanted:
                return f"{name}={text}"
        except inputs.BadValue:
            continue
    return None


def _typed_value(value: object) -> str:
    """Format a value as typed on a command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_same_value(spec: Input, text: str, value: object) -> bool:
    """Return True if a text converts to the same input value."""
    try:
        return inputs.convert(spec, text) == inputs.convert(spec, value)
    except inputs.BadValue:
        return False
