"""What is to be started: a recipe with inputs, another run with changes, or a sweep; as a request, and as the words of a command line."""

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
from .sweeps import Sweep, drafted, in_words

FOLDER: Final = "sweeps"
"""Where recipes of sweeps lie in a workspace's own folder; results of sweeps are published below a folder of this name, too."""
Axes: TypeAlias = Mapping[str, Sequence[object]]
"""The values of each input that differs."""


class Search(NamedTuple):
    """A search over axes, of which a number may be the text of a range: how many trials, and which metric is to be least or greatest."""

    trials: int
    metric: str
    least: bool


class Start(NamedTuple):
    """What is to be started.  With `axes` it is a sweep: one instance for each combination of their values, or the trials of a search."""

    request: Request
    axes: Mapping[str, Sequence[object]] = {}
    search: Search | None = None

    @property
    def instances(self) -> int:
        """How many runs of the recipe it is: combinations, or trials."""
        return self.search.trials if self.search else math.prod(map(len, self.axes.values()))


def read_start(root: Path, row: RunRow) -> Start:
    """Return what a run was asked for; of one that `recipe sweep` wrote, the recipe that it tries and its axes.

    Raises CannotAsk for a run without its request, and for a search, whose trials no request says.
    """
    request = request_of_run(row)
    if request is None:
        raise has_no_request(row.id)
    path = Path(request.recipe)
    if path.parent.name != FOLDER or path.parent.parent.name != ".recipe":
        return Start(request)
    try:
        found = sweeps.read(document.read(root / path).value)
    except (Invalid, NotFound, OSError):
        return Start(request)
    if found is None:
        return Start(request)
    uses = found.uses
    if is_path(uses):
        uses = f"./{os.path.relpath(root / path.parent / uses, root)}"
    return Start(replace(request, recipe=uses), found.axes)


def change(start: Start, given: Mapping[str, object], axes: Axes | None) -> Start:
    """The same with other values of some inputs.  `axes` stand instead of those before; None: what is given no single value keeps its axis."""
    kept = start.axes if axes is None else axes
    kept = {name: values for name, values in kept.items() if axes is not None or name not in given}
    # A part of an object, `a.b`, was set in the `a` that is given now.
    before = {
        name: value
        for name, value in start.request.inputs.items()
        if name not in kept and name.partition(".")[0] not in given
    }
    return Start(replace(start.request, inputs={**before, **given}), kept)


def draft(root: Path, start: Start) -> Sweep:
    """The sweep that is asked for.  Raises Invalid with every problem."""
    source = library.find(start.request.recipe, root)
    uses = start.request.recipe
    if is_path(uses):
        uses = os.path.relpath(os.path.abspath(source), os.path.abspath(root / ".recipe" / FOLDER))
    return drafted(
        parse.load(source),
        uses,
        start.request.inputs,
        several=start.axes,
        preset=start.request.preset,
    )


def first_trial(root: Path, start: Start, search: Search) -> Request:
    """A request for one trial of a search: the least of each range and the first of other axes.  Raises Invalid with every problem."""
    request = start.request
    ranges = {name: text for name, values in start.axes.items() if (text := range_of(values))}
    recipe = parse.load(library.find(request.recipe, root))
    where = sweeps.space(
        recipe,
        request.inputs,
        several={**start.axes, **ranges},
        preset=request.preset,
        metric=search.metric,
    )
    one = {
        name: sweeps.lowest(axis) if isinstance(axis, sweeps.Range) else axis[0]
        for name, axis in where.axes.items()
    }
    return replace(request, inputs={**where.fixed, **one})


def range_of(values: Sequence[object]) -> str:
    """The text of the range that an axis is; empty for one that has values."""
    only = values[0] if len(values) == 1 else None
    return only if isinstance(only, str) and ".." in only else ""


def write(ws: Workspace, start: Start) -> Request:
    """The request of what is to be started; the recipe of a sweep is written for it.  Raises Invalid."""
    if not start.axes:
        return start.request
    swept = draft(ws.root, start)
    path = ws.home / FOLDER / f"{swept.stem}.yaml"
    if not path.exists():
        ws.write(path, swept.text.encode())
    return _of_sweep(start, swept, path.name)


@contextmanager
def tried(ws: Workspace, start: Start) -> Iterator[Request]:
    """The same for a plan alone: the recipe of a sweep is taken away again.  Raises Invalid."""
    if start.search is not None:
        yield first_trial(ws.root, start, start.search)
        return
    if not start.axes:
        yield start.request
        return
    swept = draft(ws.root, start)
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
    """What starts the same from a terminal in the workspace, quoted for a shell; None where no words say it.

    `cost`: the limit in US dollars.
    """
    request = start.request
    words = [_said(recipe, name, value) for name, value in request.inputs.items()]
    words += [
        f"{name}={text}" if (text := range_of(values)) else _listed(recipe, name, values)
        for name, values in start.axes.items()
    ]
    if None in words or request.resources:
        return None
    flags = [
        ("--preset", request.preset),
        ("--driver", driver if driver != "local" else None),
        ("--max-cost", f"{cost:.15g}" if cost is not None else None),
        ("--out", str(request.out) if request.out is not None else None),
        ("--python", "current" if request.current_python else None),
        ("--nodes", str(request.nodes) if request.nodes else None),
    ]
    if search := start.search:
        flags += [
            ("--tpe", str(search.trials)),
            ("--min" if search.least else "--max", search.metric),
        ]
    said = [f"{name}={value}" for name, value in flags if value]
    verb = "sweep" if start.axes else "run"
    return shlex.join(["recipe", verb, request.recipe, *filter(None, words), *said])


def _said(recipe: Recipe, name: str, value: object) -> str | None:
    """NAME=VALUE for one value; None where a command line would take it for something else."""
    spec = recipe.inputs.get(name.partition(".")[0])
    if spec is None:
        return None
    text = _typed(value)
    if "." in name:
        return f"{name}={text}"
    means_one = name not in in_words(recipe, {name: text})
    return f"{name}={text}" if means_one and _same(spec, text, value) else None


def _listed(recipe: Recipe, name: str, values: Sequence[object]) -> str | None:
    """NAME=VALUE,VALUE for the values of an axis."""
    spec = recipe.inputs[name]
    wanted = [inputs.convert(spec, value) for value in values]
    for text in (",".join(map(_typed, values)), json.dumps(list(values), ensure_ascii=False)):
        read = in_words(recipe, {name: text}).get(name)
        if read is None or isinstance(read, str):
            continue
        try:
            if [inputs.convert(spec, each) for each in read] == wanted:
                return f"{name}={text}"
        except inputs.BadValue:
            continue
    return None


def _typed(value: object) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _same(spec: Input, text: str, value: object) -> bool:
    """Whether a text means a value."""
    try:
        return inputs.convert(spec, text) == inputs.convert(spec, value)
    except inputs.BadValue:
        return False
