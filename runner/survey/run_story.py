"""Everything that a report of one run shows: its steps, attempts, numbers, pictures, logs, and why each step ran.  Reads what is stored."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..planning import fingerprint
from ..planning.ids import bare
from ..storage.content.files import Content
from ..storage.records.index import Trace
from ..storage.records.links import Link, recorded
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.workspace import Workspace
from .comparison import Cell, Result, attempt_result, found_result, matrix_values
from .results import Point, attempts_of

_TAIL = 16 << 10  # bytes of a log's end that are looked at
_LOGS, _FILES = 200, 300
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
TEXTS = (".md", ".txt", ".json", ".csv", ".yaml")
_LARGEST = {**dict.fromkeys(IMAGES, 4 << 20), **dict.fromkeys(TEXTS, 16 << 10)}


class StepInstance(NamedTuple):
    """A step of a run, or one instance of it.  `attempts` are those that made its result, perhaps in an earlier run (`source`)."""

    id: str
    state: str
    detail: str  # why it failed, was skipped or cancelled
    source: str  # the run of its attempts
    attempts: Sequence[AttemptRow]
    result: Result | None
    points: Sequence[Point]
    place: str

    @property
    def step(self) -> str:
        return bare(self.id)

    @property
    def values(self) -> Mapping[str, Cell]:
        return {
            name: (self.result.values if self.result is not None else {}).get(name, value)
            for name, value in matrix_values(self.id).items()
        }


class OutputFile(NamedTuple):
    """A small file that a step made."""

    id: str
    path: str
    data: bytes


class Story(NamedTuple):
    """A run.  `left_out` says in sentences what is not in it."""

    row: RunRow
    needs: Mapping[str, Sequence[str]]
    counts: Mapping[str, int]
    instances: Sequence[StepInstance]
    logs: Mapping[str, bytes]
    files: Sequence[OutputFile]
    why: Mapping[str, Sequence[str]]
    links: Sequence[Link]
    left_out: Sequence[str]


def tell_story(ws: Workspace, row: RunRow) -> Story:
    """The story of a run so far."""
    graph = ws.run_views.graph(row)
    view = ws.run_views.view(row, graph)
    states = {id: (step.state, step.detail or step.reason) for id, step in view.steps.items()}
    fresh = graph.fresh if graph is not None else {}
    states |= {id: ("FRESH", "") for id in fresh if id not in states}
    by_step: dict[str, list[AttemptRow]] = {}
    attempts = ws.store.runs.attempts(row.id)
    for attempt in attempts:
        by_step.setdefault(attempt.step, []).append(attempt)
    traces = ws.store.index.traces(
        [*fresh.values(), *(many[-1].key for many in by_step.values() if many[-1].key)]
    )
    found = []
    for id, (state, detail) in states.items():
        tries = by_step.get(id, [])
        key = tries[-1].key if tries else fresh.get(id, "")
        found.append(
            _instance(
                ws,
                StepInstance(
                    id,
                    state,
                    detail,
                    row.id,
                    tries,
                    None,
                    (),
                    view.steps[id].host if id in view.steps else "",
                ),
                traces.get(key),
            )
        )
    known = Counter(each.step for each in found)
    needs = {
        **(graph.needs if graph is not None else {}),
        **{step: () for step in known if graph is None or step not in graph.needs},
    }
    planned = graph.instances if graph is not None else {}
    counts = {step: max(planned.get(step, 0), known[step]) for step in needs}
    order = {step: n for n, step in enumerate(needs)}
    found.sort(key=lambda each: (order[each.step], _natural(each.id)))
    logs = _logs(ws, found)
    files, left = _files(ws, found, traces)
    if len(found) > len(logs) >= _LOGS:
        left.append(f"the logs of {_LOGS} steps are here, failed ones first; `recipe logs` has all")
    if graph is None:
        left.append("the graph of this run is not kept: its steps stand without arrows")
    return Story(
        row, needs, counts, found, logs, files, _why(ws, row, by_step), recorded(attempts), left
    )


def _natural(id: str) -> list[str | float]:
    """For sorting: text and the numbers in it."""
    return [
        float(part) if n % 2 else part for n, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", id))
    ]


def _instance(ws: Workspace, begun: StepInstance, trace: Trace | None) -> StepInstance:
    """An instance with its result, and where that was found with the attempts that made it."""
    if begun.attempts:
        result, points = attempt_result(ws, begun.id, begun.attempts, trace, {})
        return begun._replace(result=result, points=points)
    if trace is None:
        return begun
    result, points = found_result(ws, begun.id, trace)
    return begun._replace(
        source=trace.run, attempts=attempts_of(ws, trace), result=result, points=points
    )


def _logs(ws: Workspace, found: Iterable[StepInstance]) -> dict[str, bytes]:
    """The end of the kept log of each instance, failed ones first."""
    logs: dict[str, bytes] = {}
    for each in sorted(found, key=lambda each: each.state != "FAILED"):
        if not each.attempts or len(logs) >= _LOGS:
            continue
        last = each.attempts[-1]
        try:
            with ws.kept(last.run, last.step, last.n, ".log").open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _TAIL))
                data = file.read()
                logs[each.id] = data if size <= _TAIL else data.partition(b"\n")[2]
        except OSError:
            continue
    return logs


def _files(
    ws: Workspace, found: Iterable[StepInstance], traces: Mapping[str, Trace]
) -> tuple[list[OutputFile], list[str]]:
    """The pictures and small texts among the outputs; and what was left out."""
    files: list[OutputFile] = []
    passed = 0
    for each in found:
        trace = traces.get(each.attempts[-1].key) if each.attempts else None
        for _, path, content in trace.outputs if trace is not None else ():
            for inner, place in _inside(ws, path, content):
                largest = _LARGEST.get(os.path.splitext(inner)[1].lower())
                if largest is None:
                    continue
                try:
                    if len(files) >= _FILES or os.stat(place).st_size > largest:
                        passed += 1
                    else:
                        with open(place, "rb") as file:
                            files.append(OutputFile(each.id, inner, file.read()))
                except OSError:
                    passed += 1
    return files, [
        f"{passed} pictures and texts are too large or too many to be here"
    ] if passed else []


def _inside(ws: Workspace, path: str, content: Content) -> Iterable[tuple[str, str]]:
    """The files of an output: their paths in an attempt, and where they lie."""
    if not ws.objects.has(content):
        return
    place = str(ws.objects.path(content))
    if content[0] != "t":
        yield path, place
        return
    for entry in ws.objects.manifests.entries(content):
        if entry.kind in "fx":
            yield f"{path}/{entry.path}", f"{place}/{entry.path}"


def _why(
    ws: Workspace, row: RunRow, by_step: Mapping[str, Sequence[AttemptRow]]
) -> dict[str, list[str]]:
    """What had changed for each step that ran, since it ran last before this run."""
    earlier: dict[str, AttemptRow] = {}
    for run in ws.store.runs.latest(recipe=row.recipe, last=200):
        if run.created < row.created:
            for step, attempt in ws.store.runs.latest_attempts(
                row.recipe, [step for step in by_step if step not in earlier], run=run.id
            ).items():
                earlier[step] = attempt
    answer: dict[str, list[str]] = {}
    for step, tries in by_step.items():
        before, now = earlier.get(step), tries[0].preimage
        if before is None:
            answer[step] = ["it had not run here before"]
        elif (
            isinstance(before.preimage, dict)
            and isinstance(now, dict)
            and "author" in before.preimage
            and "author" in now
        ):
            changes = [str(change) for change in fingerprint.explain(before.preimage, now)]
            answer[step] = changes or [
                "nothing had changed: it was asked for again, or had not been done"
            ]
    return answer
