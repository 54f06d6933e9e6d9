"""Garbage collection of a workspace's store.

`find_garbage` keeps

- runs that are queued or running, the last `keep_runs`, and those of the last `keep_days` days;
- traces of the last `keep_days` days, the newest trace of every step, traces of steps in kept
  runs, all traces of a running recipe, and traces of published files;
- objects of kept traces and of published files, and objects stored after the decision or, during
  a run, since its start;
- stored inputs that a step used in the last `keep_days` days.

`collect` deletes traces before objects: no trace ever names a deleted object.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..logs import Log
from .content import inputs
from .content.disk import delete_whole
from .content.files import Content
from .content.listings import forget_listings
from .content.objects import Objects
from .records.index import PublishedFile, Trace
from .records.runs import FINAL, AttemptRow, RunRow
from .records.store import Store

_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """Unneeded entries of a store, to be deleted.

    Objects stored after `before` stay.
    """

    traces: tuple[str, ...]
    objects: tuple[Content, ...]
    # Copies of the caller's own inputs. The next step that uses such an input stores it again.
    inputs: tuple[Content, ...]
    attempts: tuple[str, ...]
    bundles: tuple[str, ...]
    runs: tuple[str, ...]
    before: float
    size: int
    """Total size of `objects` and `inputs` in bytes."""


def find_garbage(store: Store, objects: Objects, *, keep_days: float, keep_runs: int) -> Garbage:
    """Return the unneeded entries of a workspace's store."""
    now = time.time()
    oldest = now - keep_days * _DAY
    runs = store.runs.latest()
    live = [run for run in runs if _is_live(store, run)]
    kept_runs = {run.id for run in (*live, *runs[:keep_runs])}
    kept_runs |= {run.id for run in runs if run.created >= oldest}
    attempts: list[AttemptRow] = []
    for id in kept_runs:
        attempts += store.runs.attempts(id)
    published = store.index.list_published().values()
    traces = list(store.index.every_trace())
    # Traces are listed oldest first, so that the newest key of a step is the one that stays.
    newest = {(trace.recipe, trace.step): trace.key for trace in traces}
    published_files = {(row.recipe, row.path, row.content) for row in published}
    retention = TraceRetention(
        oldest=oldest,
        keys={row.key for row in attempts},
        recipes={run.recipe for run in live},
        newest=newest,
        published=published_files,
    )
    kept_traces = [trace for trace in traces if retention.keeps(trace)]
    before = min([now, *(run.created for run in live)])
    unreachable = _find_unreachable(objects, kept_traces, published, before)
    results, unused_inputs = _split_off_inputs(store.root, unreachable, oldest)
    abandoned = min(before, oldest)
    old_runs = [run.id for run in runs if run.id not in kept_runs]
    needed_folders = {row.dir for row in attempts}
    return Garbage(
        traces=_removed_keys(traces, kept_traces),
        objects=tuple(results),
        inputs=tuple(unused_inputs),
        attempts=_abandoned_attempts(store.root, needed_folders, abandoned),
        bundles=_abandoned_bundles(store.root, abandoned),
        runs=tuple(old_runs),
        before=before,
        size=sum(map(objects.size, (*results, *unused_inputs))),
    )


def _find_unreachable(
    objects: Objects, kept: Iterable[Trace], published: Iterable[PublishedFile], before: float
) -> list[Content]:
    """Return old objects that no kept trace or published file needs.

    The objects were stored before `before`.
    """
    reachable = {row.content for row in published}
    for trace in kept:
        reachable.update(made.content for made in trace.outputs)
    return [content for content in objects.all(before) if content not in reachable]


def _split_off_inputs(
    root: Path, unreachable: Iterable[Content], oldest: float
) -> tuple[list[Content], list[Content]]:
    """Return the results among unreachable objects, and the inputs without use since `oldest`."""
    last_use = dict(inputs.list_inputs(root))
    results = []
    unused_inputs = []
    for content in unreachable:
        if content not in last_use:
            results.append(content)
        elif last_use[content] < oldest:
            unused_inputs.append(content)
    return results, unused_inputs


def _removed_keys(traces: Iterable[Trace], kept: Iterable[Trace]) -> tuple[str, ...]:
    kept_keys = {trace.key for trace in kept}
    return tuple(trace.key for trace in traces if trace.key not in kept_keys)


def _abandoned_attempts(root: Path, needed: Collection[str], before: float) -> tuple[str, ...]:
    """Return old attempt directories that no kept run needs.

    They were last changed before `before`.
    """
    names = []
    for path in _entries(root / "attempts"):
        if f"attempts/{path.name}" not in needed and path.lstat().st_ctime < before:
            names.append(path.name)
    return tuple(names)


def _abandoned_bundles(root: Path, before: float) -> tuple[str, ...]:
    return tuple(path.name for path in _entries(root / "bundles") if path.lstat().st_mtime < before)


def _is_live(store: Store, run: RunRow) -> bool:
    """Return True if a worker executes the run or will execute it.

    A run with a dead worker is not live: its finished results are in traces, and the next run
    resumes from those traces. A queued run is live.
    """
    if store.runs.live(run.id):
        return True
    if run.state == "ACTIVE":
        return run.due is not None
    return run.state not in FINAL


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


@dataclass(frozen=True, slots=True)
class TraceRetention:
    """Reasons to keep a cached result during garbage collection."""

    oldest: float
    """Time from which all traces are kept."""
    keys: Collection[str]
    """Keys of steps in kept runs."""
    recipes: Collection[str]
    """Recipes of active runs."""
    newest: Mapping[tuple[str, str], str]
    """Key of the newest trace, by recipe and step."""
    published: Collection[tuple[str, str, str]]
    """Recipe, path and content of published files."""

    def keeps(self, trace: Trace) -> bool:
        """Return True if any reason to keep the cached result applies."""
        if trace.made_at >= self.oldest or trace.key in self.keys:
            return True
        if trace.recipe in self.recipes or self.newest[trace.recipe, trace.step] == trace.key:
            return True
        outputs = ((trace.recipe, made.path, made.content) for made in trace.outputs)
        return any(output in self.published for output in outputs)


def collect(store: Store, objects: Objects, plan: Garbage, workspace: Path) -> int:
    """Delete the garbage, and return the size of deleted objects in bytes.

    Entries that came into use after `find_garbage` stay.
    """
    store.index.forget(traces=plan.traces)
    store.runs.forget(plan.runs)
    unneeded = (*plan.objects, *plan.inputs)
    sizes = {content: objects.size(content) for content in unneeded}
    removed = objects.tiny.forget(plan.objects, plan.before)
    for content in unneeded:
        if content not in removed and objects.remove(content, before=plan.before):
            removed.add(content)
    freed = sum(sizes[content] for content in removed)
    for content, _ in inputs.list_inputs(store.root):
        if not objects.has(content):
            inputs.forget(store.root, content)
    gone = [content for content in unneeded if not objects.has(content)]
    store.index.forget(objects=gone, files=_vanished_files(store, workspace))
    forget_listings(store.root / "listings", workspace)
    for name in plan.attempts:
        delete_whole(store.root / "attempts" / name)
    for name in plan.bundles:
        delete_whole(store.root / "bundles" / name)
    objects.sweep(before=plan.before)
    Log("storage").info(
        "%d objects and %d traces removed, %d bytes", len(removed), len(plan.traces), freed
    )
    return freed


def _vanished_files(store: Store, workspace: Path) -> list[str]:
    """Return the file paths in the index that no longer exist."""
    return [row[0] for row in store.index.files() if not Path(workspace, row[0]).exists()]
