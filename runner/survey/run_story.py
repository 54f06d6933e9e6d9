"""Data for the report of one run: steps, attempts, metrics, images, logs, and the reason for each
step. Read-only.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..planning import fingerprint
from ..planning.ids import bare
from ..storage.content.files import Content
from ..storage.records.index import Trace
from ..storage.records.links import TrackerLink, stored_links
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.run_graph import RunGraph
from ..storage.workspace import Workspace
from .comparison import Cell, Result, attempt_result, find_result, matrix_values
from .results import Point, attempts_of, group_by_step

_TAIL = 16 << 10  # bytes read from the end of a log
_LOGS, _FILES = 200, 300
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
TEXTS = (".md", ".txt", ".json", ".csv", ".yaml")
_LARGEST = {**dict.fromkeys(IMAGES, 4 << 20), **dict.fromkeys(TEXTS, 16 << 10)}


class StepInstance(NamedTuple):
    """A step of a run, or one matrix instance.

    `attempts` created its result, possibly in an earlier run (`source`).
    """

    id: str
    state: str
    detail: str  # reason of the state: failed, skipped or cancelled
    source: str  # run of the attempts
    attempts: Sequence[AttemptRow]
    result: Result | None
    points: Sequence[Point]
    place: str

    @property
    def step(self) -> str:
        return bare(self.id)

    @property
    def values(self) -> Mapping[str, Cell]:
        # A step ID has only text; the result has the values with their types.
        typed = self.result.values if self.result is not None else {}
        return {name: typed.get(name, text) for name, text in matrix_values(self.id).items()}


class SmallOutput(NamedTuple):
    """A small output file of a step, for the report."""

    id: str
    path: str
    data: bytes


class Story(NamedTuple):
    """Data for the report of a run. `left_out` lists omissions in sentences."""

    row: RunRow
    needs: Mapping[str, Sequence[str]]
    counts: Mapping[str, int]
    instances: Sequence[StepInstance]
    logs: Mapping[str, bytes]
    files: Sequence[SmallOutput]
    why: Mapping[str, Sequence[str]]
    links: Sequence[TrackerLink]
    left_out: Sequence[str]


def tell_story(ws: Workspace, row: RunRow) -> Story:
    """Collect the report data of a run so far."""
    graph = ws.run_views.graph(row)
    view = ws.run_views.view(row, graph)
    fresh = graph.fresh if graph is not None else {}
    states = {id: (step.state, step.detail or step.reason) for id, step in view.steps.items()}
    for id in fresh:
        states.setdefault(id, ("FRESH", ""))
    attempts = ws.store.runs.attempts(row.id)
    by_step = group_by_step(attempts)
    keys: dict[str, str] = {}
    for id in states:
        keys[id] = by_step[id][-1].key if id in by_step else fresh.get(id, "")
    traces = ws.store.index.traces(list(filter(None, {**keys, **fresh}.values())))
    found = []
    for id, (state, detail) in states.items():
        host = view.steps[id].host if id in view.steps else ""
        begun = StepInstance(id, state, detail, row.id, by_step.get(id, []), None, (), host)
        found.append(_with_result(ws, begun, traces.get(keys[id])))
    needs, counts = _shape(graph, found)
    order = {step: n for n, step in enumerate(needs)}
    found.sort(key=lambda each: (order[each.step], _natural_order(each.id)))
    logs = _log_ends(ws, found)
    files, passed = _small_files(ws, found, traces)
    left_out = _describe_omissions(passed, len(found), len(logs), graph)
    why = _find_causes(ws, row, by_step)
    return Story(row, needs, counts, found, logs, files, why, stored_links(attempts), left_out)


def _describe_omissions(
    passed: int, instances: int, logs: int, graph: RunGraph | None
) -> list[str]:
    """Describe in sentences what a report leaves out: files, logs, and the graph."""
    left_out = []
    if passed:
        left_out.append(f"{passed} images and texts are left out: too large or too many")
    if instances > logs >= _LOGS:
        left_out.append(
            f"only the logs of {_LOGS} steps are included, failed steps first; `recipe logs` shows all"
        )
    if graph is None:
        left_out.append("the graph of this run was not stored, so its steps have no arrows")
    return left_out


def _shape(
    graph: RunGraph | None, found: Sequence[StepInstance]
) -> tuple[dict[str, Sequence[str]], dict[str, int]]:
    """Return the dependencies and instance count of each step."""
    known = Counter(each.step for each in found)
    needs: dict[str, Sequence[str]] = dict(graph.needs) if graph is not None else {}
    for step in known:
        needs.setdefault(step, ())
    planned = graph.instances if graph is not None else {}
    return needs, {step: max(planned.get(step, 0), known[step]) for step in needs}


def _natural_order(id: str) -> list[str | float]:
    """Split an ID into text and numbers, as a natural sort key."""
    parts: list[str | float] = [*re.split(r"(\d+(?:\.\d+)?)", id)]
    # `re.split` puts the text between the numbers at even places, and the numbers at odd ones.
    parts[1::2] = map(float, parts[1::2])
    return parts


def _with_result(ws: Workspace, begun: StepInstance, trace: Trace | None) -> StepInstance:
    """Return a step instance with its result, and with the creating attempts if up to date."""
    if begun.attempts:
        result, points = attempt_result(ws, begun.id, begun.attempts, trace, {})
        return begun._replace(result=result, points=points)
    if trace is None:
        return begun
    result, points = find_result(ws, begun.id, trace)
    makers = attempts_of(ws, trace)
    return begun._replace(source=trace.run, attempts=makers, result=result, points=points)


def _log_ends(ws: Workspace, found: Iterable[StepInstance]) -> dict[str, bytes]:
    """Return the last log lines of step instances, failed instances first, at most `_LOGS`."""
    logs: dict[str, bytes] = {}
    for each in sorted(found, key=lambda each: each.state != "FAILED"):
        if not each.attempts or len(logs) >= _LOGS:
            continue
        last = each.attempts[-1]
        with suppress(OSError):
            logs[each.id] = _read_end(ws.kept_path(last.run, last.step, last.n, ".log"))
    return logs


def _read_end(path: Path) -> bytes:
    """Read the last `_TAIL` bytes of a file, from the start of a line. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        data = file.read()
    return data if size <= _TAIL else data.partition(b"\n")[2]


def _small_files(
    ws: Workspace, found: Iterable[StepInstance], traces: Mapping[str, Trace]
) -> tuple[list[SmallOutput], int]:
    """Return small images and texts among the outputs, and the number of omitted files."""
    files: list[SmallOutput] = []
    passed = 0
    for each in found:
        trace = traces.get(each.attempts[-1].key) if each.attempts else None
        if trace is None:
            continue
        for _, path, content in trace.outputs:
            for inner, place in _files_of_output(ws, path, content):
                largest = _LARGEST.get(os.path.splitext(inner)[1].lower())
                if largest is None:
                    continue
                data = _read_small(place, largest) if len(files) < _FILES else None
                if data is None:
                    passed += 1
                else:
                    files.append(SmallOutput(each.id, inner, data))
    return files, passed


def _read_small(place: str, largest: int) -> bytes | None:
    """Read a file, or return None if it is too large or unreadable."""
    try:
        if os.stat(place).st_size > largest:
            return None
        with open(place, "rb") as file:
            return file.read()
    except OSError:
        return None


def _files_of_output(ws: Workspace, path: str, content: Content) -> Iterable[tuple[str, str]]:
    """Yield the files of an output: path in the attempt, and stored path."""
    if not ws.objects.has(content):
        return
    place = str(ws.objects.path(content))
    if content[0] != "t":
        yield path, place
        return
    for entry in ws.objects.manifests.entries(content):
        if entry.kind in "fx":
            yield f"{path}/{entry.path}", f"{place}/{entry.path}"


def changes_of(ws: Workspace, row: RunRow) -> dict[str, list[str]]:
    """Return the changes of each executed step since its previous attempt."""
    return _find_causes(ws, row, group_by_step(ws.store.runs.attempts(row.id)))


def _find_causes(
    ws: Workspace, row: RunRow, by_step: Mapping[str, Sequence[AttemptRow]]
) -> dict[str, list[str]]:
    """Return the changes of each executed step since its previous attempt."""
    earlier = _attempts_before(ws, row, by_step)
    found: dict[str, list[str]] = {}
    for step, tries in by_step.items():
        causes = _causes(earlier.get(step), tries[0])
        if causes:
            found[step] = causes
    return found


def _attempts_before(ws: Workspace, row: RunRow, steps: Iterable[str]) -> dict[str, AttemptRow]:
    """Return the last attempt of each step before a run, among the latest 200 runs."""
    earlier: dict[str, AttemptRow] = {}
    missing = set(steps)
    for run in ws.store.runs.latest(recipe=row.recipe, last=200):
        if not missing:
            break
        if run.created < row.created:
            earlier |= ws.store.runs.latest_attempts(row.recipe, missing, run=run.id)
            missing -= earlier.keys()
    return earlier


def _causes(before: AttemptRow | None, now: AttemptRow) -> list[str]:
    """Describe the changes between two attempts. Empty if not stored."""
    if before is None:
        return ["no earlier run in this workspace"]
    old, new = before.preimage, now.preimage
    if not isinstance(old, dict) or not isinstance(new, dict):
        return []
    if "author" not in old or "author" not in new:
        return []
    changes = [str(change) for change in fingerprint.explain(old, new)]
    return changes or ["nothing had changed: the step was requested again, or had not finished"]
