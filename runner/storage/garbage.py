"""Decide what of a store is not needed any more, and delete it.

Kept are: runs that wait or are worked on, the last `keep_runs` and those of the last `keep_days` days; traces of the last `keep_days` days, the
newest of every step, those of steps in kept runs, all of a recipe that is running now, and those of published files; the objects of kept traces, of
published files, and any that was put away after the decision, or while some run lives, since it began; stored inputs that a step
was given in the last `keep_days` days.  Traces go first, then objects: at no instant does a trace name an object that was taken
from under it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ..logs import Log
from .content import inputs
from .content.disk import delete_whole
from .content.files import Content
from .content.listings import forget_listings
from .content.objects import Objects
from .records.index import Trace
from .records.runs import FINAL
from .records.store import Store

_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """What would go.  `before`: objects put away later stay.  `size` is the bytes of `objects` and `inputs`."""

    traces: tuple[str, ...]
    objects: tuple[Content, ...]
    inputs: tuple[Content, ...]
    """Objects, too, but no results: copies of the caller's own inputs.  The next step that needs one stores it again."""
    attempts: tuple[str, ...]
    bundles: tuple[str, ...]
    runs: tuple[str, ...]
    before: float
    size: int


def garbage(store: Store, objects: Objects, *, keep_days: float, keep_runs: int) -> Garbage:
    """What is not needed any more."""
    now = time.time()
    oldest = now - keep_days * _DAY
    runs = store.runs.latest()
    # A run whose worker died keeps nothing from being collected: what it made is in traces, and the next run resumes from those.
    # One that waits for another worker does.
    live = [
        run
        for run in runs
        if store.runs.live(run.id)
        or run.state not in FINAL | ({"ACTIVE"} if run.due is None else set())
    ]
    kept_runs = (
        {run.id for run in live}
        | {run.id for run in runs[:keep_runs]}
        | {run.id for run in runs if run.created >= oldest}
    )
    published = store.index.published()

    needed = {row.key for run in kept_runs for row in store.runs.attempts(run)}
    busy = {run.recipe for run in live}
    shown = {(row.recipe, path, row.content) for path, row in published.items()}
    traces = list(store.index.every_trace())
    newest = {(trace.recipe, trace.step): trace.key for trace in traces}

    def kept(trace: Trace) -> bool:
        if (
            trace.made_at >= oldest
            or trace.key in needed
            or trace.recipe in busy
            or newest[trace.recipe, trace.step] == trace.key
        ):
            return True
        return any((trace.recipe, made.path, made.content) in shown for made in trace.outputs)

    going = [trace for trace in traces if not kept(trace)]
    gone = {trace.key for trace in going}
    roots = {row.content for row in published.values()} | {
        made.content for trace in traces if trace.key not in gone for made in trace.outputs
    }
    before = min([now, *(run.created for run in live)])
    unrooted = [content for content in objects.all(before) if content not in roots]
    given = dict(inputs.noted(store.root))
    doomed = [content for content in unrooted if content not in given]
    unused = [content for content in unrooted if given.get(content, oldest) < oldest]
    dirs = {row.dir for run in kept_runs for row in store.runs.attempts(run)}
    bundles = (
        sorted((store.root / "bundles").iterdir()) if (store.root / "bundles").is_dir() else []
    )
    folder = store.root / "attempts"
    idle = [
        path.name
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if f"attempts/{path.name}" not in dirs and path.lstat().st_ctime < min(before, oldest)
    ]
    return Garbage(
        traces=tuple(trace.key for trace in going),
        objects=tuple(doomed),
        inputs=tuple(unused),
        attempts=tuple(idle),
        bundles=tuple(path.name for path in bundles if path.lstat().st_mtime < min(before, oldest)),
        runs=tuple(run.id for run in runs if run.id not in kept_runs),
        before=before,
        size=sum(objects.size(content) for content in (*doomed, *unused)),
    )


def collect(store: Store, objects: Objects, plan: Garbage, workspace: Path) -> int:
    """Delete what `garbage` found, and answer how many bytes of objects went.  What has come into use since then stays."""
    store.index.forget(traces=plan.traces)
    store.runs.forget(plan.runs)
    going = (*plan.objects, *plan.inputs)
    sizes = {content: objects.size(content) for content in going}
    gone = objects.tiny.forget(plan.objects, plan.before)
    gone |= {
        content
        for content in going
        if content not in gone and objects.remove(content, before=plan.before)
    }
    freed = sum(sizes[content] for content in gone)
    for content, _ in inputs.noted(store.root):
        if not objects.has(content):
            inputs.forget(store.root, content)
    store.index.forget(
        objects=[content for content in going if not objects.has(content)],
        files=_vanished(store, workspace),
    )
    forget_listings(store.root / "listings", workspace)
    for name in plan.attempts:
        delete_whole(store.root / "attempts" / name)
    for name in plan.bundles:
        delete_whole(store.root / "bundles" / name)
    objects.sweep(before=plan.before)
    Log("storage").info(
        "%d objects and %d traces removed, %d bytes", len(gone), len(plan.traces), freed
    )
    return freed


def _vanished(store: Store, workspace: Path) -> list[str]:
    return [row[0] for row in store.index.files() if not Path(workspace, row[0]).exists()]
