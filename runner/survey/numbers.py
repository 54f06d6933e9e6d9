"""Metrics by a rule newer than the attempt, read from its stored log or outputs. Runs nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import Invalid
from ..paths import glob
from ..planning.plan import Plan
from ..planning.secret_values import all_given
from ..planning.step import MetricsSpec
from ..secrets import Masker
from ..storage import metrics
from ..storage.content.files import Content
from ..storage.records.index import Trace
from ..storage.workspace import Workspace


def read_metrics(
    ws: Workspace, plan: Plan, key: str, rule: MetricsSpec
) -> Mapping[str, Any] | None:
    """Read and store a cached result's metrics, or return None if its log or files are gone.

    Raises Invalid, naming the step, for a slow pattern.
    """
    trace = ws.traces.whole(key)
    if trace is None:
        return None
    if rule.pattern:
        found = _match_log(ws, trace, rule.pattern)
    else:
        found = _read_files(ws, trace, str(rule.file))
    if found is None:
        return None
    numbers: Mapping[str, Any] = Masker(all_given(plan, ws.environ)).value(found)
    ws.traces.measure(key, rule.rule, numbers)
    return numbers


def _match_log(ws: Workspace, trace: Trace, pattern: str) -> dict[str, metrics.Value] | None:
    """Return the metrics in the stored log of a result, or None if the log is gone."""
    log = _log(ws, trace)
    if not log.exists():
        return None
    try:
        return metrics.match(log, pattern, metrics.NOTHING)  # the stored log is already masked
    except Invalid as error:
        prefix = f"{trace.step}: "
        raise Invalid(
            [each._replace(message=prefix + each.message) for each in error.problems]
        ) from None


def _read_files(ws: Workspace, trace: Trace, pattern: str) -> dict[str, metrics.Value] | None:
    """Return the metrics in the stored files of a result, or None if there are none."""
    files = sorted(stored_files(ws, trace, pattern))
    if not files:
        return None
    found: dict[str, metrics.Value] = {}
    for _, path in files:
        found |= metrics.read(path)
    return found


def _log(ws: Workspace, trace: Trace) -> Path:
    """Return the path of the stored log of a result's attempt."""
    number = 1
    for attempt in ws.store.runs.attempts(trace.run, trace.step):
        if attempt.outcome == "done":
            number = attempt.n
    return ws.kept_path(trace.run, trace.step, number, ".log")


def stored_files(ws: Workspace, trace: Trace, pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield stored output files whose path in the attempt matches a glob pattern.

    Directories are not downloaded.
    """
    fits = glob(os.path.normpath(pattern))
    for _, path, content in trace.outputs:
        if content[0] != "t":
            if fits(path) and _here(ws, content):
                yield path, ws.objects.path(content)
        elif ws.objects.has(content):
            for entry in ws.objects.manifests.entries(content):
                inner = f"{path}/{entry.path}"
                if entry.kind in "fx" and fits(inner):
                    yield inner, ws.objects.path(content) / entry.path


def _here(ws: Workspace, content: Content) -> bool:
    """Return True if a file is stored locally. Downloads it from the shared store if needed."""
    if ws.objects.has(content):
        return True
    cache = ws.remote_cache
    if cache is None or not cache.holds(content):
        return False
    return not cache.bring([content])
