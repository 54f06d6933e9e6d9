"""Upkeep of a workspace: adopt files as outputs, remove published files, and find unneeded files.

Only removes files that recipe created and nobody changed since, unless the caller asks otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import Busy, CannotRun, RecipeError
from ..hosts.link.local_agents import find_spent_roots, forget_root
from ..paths import heads
from ..planning.judge import FRESH, MAYBE, SKIPPED, Verdict
from ..planning.plan import SELECT, UNCACHED, Node
from ..planning.step import OPTIONAL, unfit_output
from ..storage.content import disk
from ..storage.content.files import Content
from ..storage.garbage import Garbage
from ..storage.records.index import CachedOutput, PublishedFile, Trace
from ..storage.records.runs import FINAL, RunRow
from ..storage.workspace import Workspace
from .survey import Survey, out_dir

_DAY = 86_400.0


# -- adopt


def adopt_outputs(ws: Workspace, found: Survey, n: int) -> Trace | None:
    """Record the files at a step's published paths as its outputs under the current cache key.

    Returns None if they are its outputs already. Raises CannotRun.
    """
    node, verdict = found.plan.nodes[n], found.verdicts[n]
    key = _adoptable_key(node, verdict)
    if verdict.answer == FRESH:
        return None
    base = out_dir(ws, found.plan, found.library, found.request)
    head = "" if base == ws.root else f"{base}/"
    targets = dict(found.targets.get(n, ()))
    made: list[CachedOutput] = []
    published: list[PublishedFile] = []
    problems: list[str] = []
    for name, path, flags in node.outputs:
        at = targets.get(name, f"{head}{node.prefix}{path}")
        content = ws.cache.content_of(at)
        problem = _unfit_output(ws.root / at, content, flags)
        if problem:
            problems.append(f"{at} {problem}")
        elif content is not None:
            ws.objects.put(Path(os.path.realpath(ws.root / at)), content, move=False)
            made.append(CachedOutput(name, path, content))
            if name in targets:
                published.append(PublishedFile(at, content, "", "", node.id, found.plan.recipe))
    if problems:
        raise CannotRun(
            f"cannot adopt files for {node.id}: {'; '.join(problems)}",
            fix="create the files at these paths, or run the step",
        )
    trace = Trace(
        key,
        found.plan.recipe,
        node.id,
        run="",
        made_at=time.time(),
        seconds=0.0,
        outputs=tuple(made),
        facts_json=json.dumps({"adopted": True}),
    )
    ws.save_cache()
    ws.store.index.adopt(trace, published)
    return trace


def _adoptable_key(node: Node, verdict: Verdict) -> str:
    """Return the cache key for adopted files of a step. Raises CannotRun."""
    if node.flags & SELECT:
        raise CannotRun(
            f"cannot adopt files for {node.id}: it selects among other steps and has no outputs of its own",
            fix="adopt one of the steps under its `select`",
        )
    if node.flags & UNCACHED:
        raise CannotRun(f"cannot adopt files for {node.id}: `cache: false` makes it run every time")
    if verdict.answer == SKIPPED:
        raise CannotRun(
            f"cannot adopt files for {node.id}: it is skipped: {'; '.join(verdict.reasons)}"
        )
    if verdict.key is None:
        fix = ""
        if verdict.answer == MAYBE:
            fix = "run its dependencies first with `recipe run --until`, or adopt files for them"
        raise CannotRun(f"{node.id} has no cache key yet: {'; '.join(verdict.reasons)}", fix=fix)
    return verdict.key


def _unfit_output(target: Path, content: Content | None, flags: int) -> str:
    """Return why a path cannot be an output with these flags, or "" if it can."""
    if content is None:
        return "" if flags & OPTIONAL else "does not exist"
    if content[0] == "t":
        return unfit_output("d", flags, is_empty=not any(target.iterdir()))
    return unfit_output(content[0], flags, is_empty=target.stat().st_size == 0)


# -- published files


class PublishedPath(NamedTuple):
    """State of a published path: `ours` (unchanged), `edited`, or `gone`."""

    row: PublishedFile
    now: str


def examine_published(ws: Workspace, rows: Iterable[PublishedFile]) -> list[PublishedPath]:
    """Return the state of each published path."""
    return [PublishedPath(row, _state_of(ws, row)) for row in rows]


def _state_of(ws: Workspace, row: PublishedFile) -> str:
    path = ws.root / row.path
    if not os.path.lexists(path):
        return "gone"
    if os.path.islink(path):
        return "edited"
    try:
        is_unchanged = ws.cache.content_of(row.path) == row.content
    except RecipeError:  # a pipe, or a link out of the workspace: never published by a run
        return "edited"
    return "ours" if is_unchanged else "edited"


def find_stale(ws: Workspace, found: Survey) -> list[PublishedFile]:
    """Return stale outputs: published by earlier runs, but no longer created by the plan.

    No step has such a path, or its step is skipped, or its step did not create the output this
    time. Library results under other inputs, results with `--out`, adopted files, and outputs of
    steps that have not run yet are never stale. While a matrix waits for its files, only steps in
    the plan count.
    """
    base = out_dir(ws, found.plan, found.library, found.request)
    head = "" if base == ws.root else f"{base}/"
    wanted = _created_paths(found)
    parents: set[str] = set()
    for path in wanted:
        parents.update(heads(path)[1:])
    steps = {_top_step(node.id) for node in found.plan.nodes}
    published = ws.store.index.list_published(found.plan.recipe)
    stale = []
    for path, row in sorted(published.items()):
        if not row.run:  # an adopted file
            continue
        is_inside = path.startswith(head) if head else not path.startswith("/")
        if not is_inside:
            continue
        if found.plan.pending and _top_step(row.step) not in steps:
            continue
        if not _overlaps(path, wanted, parents):
            stale.append(row)
    return stale


def _created_paths(found: Survey) -> set[str]:
    """Return the published paths that the plan's steps create or may create."""
    created: set[str] = set()
    for n, targets in found.targets.items():
        for target in targets:
            if _may_create(found.verdicts[n], target.output):
                created.add(target.path)
    return created


def _overlaps(path: str, wanted: Collection[str], parents: Collection[str]) -> bool:
    """Return True if a path is, contains, or lies below a wanted path.

    `parents` are the directories above wanted paths.
    """
    if path in parents:
        return True
    return any(each in wanted for each in heads(path))


def _top_step(id: str) -> str:
    """Return the top-level step name in an instance ID."""
    return id.partition("[")[0]


def _may_create(verdict: Verdict, output: str) -> bool:
    """Return True if a step creates or may create this output."""
    return verdict.made is None or output in verdict.made.outputs


def demand_quiet(ws: Workspace, recipe: str) -> None:
    """Raise Busy if a run of this recipe is executing here."""
    for row in ws.store.runs.latest(recipe=recipe, last=100):
        if row.state == "ACTIVE" and ws.store.runs.live(row.id):
            raise Busy(f"run {row.id} of {recipe} is running", fix="wait for the run, or stop it")


def unpublish(ws: Workspace, rows: Iterable[PublishedFile]) -> None:
    """Delete published paths, and parent directories left empty."""
    paths = []
    for row in rows:
        target = ws.root / row.path
        disk.delete(target)
        paths.append(row.path)
        _remove_empty(ws.root, target)
    ws.store.index.unpublish(paths)


def _remove_empty(root: Path, target: Path) -> None:
    """Delete empty parent directories inside the workspace, and a dangling `latest` link."""
    for parent in target.parents:
        if parent == root or root not in parent.parents:
            return
        try:
            parent.rmdir()
        except OSError:
            return
        latest = parent.parent / "latest"
        if latest.is_symlink() and not latest.exists():
            with contextlib.suppress(OSError):
                latest.unlink()


# -- runs


def demand_over(ws: Workspace, row: RunRow) -> None:
    """Raise Busy if a run is executing, or if its jobs may still run after its worker died."""
    if ws.store.runs.live(row.id):
        raise Busy(f"run {row.id} is running", fix="wait for the run, or stop it")
    if row.state in FINAL:
        return
    steps = ws.store.runs.steps(row.id).values()
    if any(step.state == "RUNNING" for step in steps):
        raise Busy(
            f"the worker of run {row.id} died, but its steps may still be running",
            fix=f"cancel the run with `recipe cancel {row.id}`, then remove it",
        )


def find_leftovers_of(ws: Workspace, run: str) -> list[Leftover]:
    """Return a run's leftover files: logs, metrics and failed attempt directories."""
    dirs = sorted({row.dir for row in ws.store.runs.attempts(run)} - {""})
    attempts = filter(Path.is_dir, (ws.home / name for name in dirs))
    logs = filter(Path.is_dir, [ws.home / "runs" / run])
    return [*_measure("attempt", attempts), *_measure("logs", logs)]


def remove_runs(ws: Workspace, runs: Sequence[str], beside: Iterable[Leftover]) -> int:
    """Delete the records and leftover files of runs, but not their results.

    Returns the freed bytes.
    """
    ws.store.runs.forget(runs)
    return delete_leftovers(ws, beside)


# -- files next to the store


class Leftover(NamedTuple):
    """An unneeded file or directory, with its kind."""

    kind: str
    path: Path
    size: int


_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_LOCKED = {
    "state": ("states", "state"),
    "environment": ("envs", "env"),
    "repository": ("git", "git"),
}
"""Directories that a run locks during use: their parent directory, and the prefix of their locks.
"""


def find_leftovers(ws: Workspace, garbage: Garbage, *, keep_days: float) -> list[Leftover]:
    """Return leftover files: those in `garbage`, and files not written for `keep_days`.

    The former are logs and attempts of deleted runs. The latter are plans, manifests, downloads,
    states, environments, repositories, and results published by workers.
    """
    oldest = time.time() - keep_days * _DAY
    rows = ws.store.runs.latest()
    active = {row.id for row in rows if row.state not in FINAL}
    kept_runs = {row.id for row in rows} - set(garbage.runs)
    return [
        *_measure("attempt", (ws.home / "attempts" / name for name in garbage.attempts)),
        *_measure("logs", _logs_of_gone_runs(ws, kept_runs, garbage.before)),
        *_measure("plan", _not_written_since(ws.home / "plans", oldest)),
        *_measure("manifest", _not_written_since(ws.home / "manifests", oldest)),
        *_measure("download", _not_written_since(ws.home / "cache", oldest)),
        *_measure("result", _results_of_worker(ws, active, oldest)),
        *_measure("agent", _spent_agents(ws, active, set(garbage.attempts))),
        *_unlocked_folders(ws, oldest),
    ]


def _measure(kind: str, paths: Iterable[Path]) -> list[Leftover]:
    return [Leftover(kind, path, disk.total(path)) for path in paths]


def _logs_of_gone_runs(ws: Workspace, kept: Collection[str], before: float) -> list[Path]:
    found = []
    for folder in _entries(ws.home / "runs"):
        # A run may have started since the rows were read.
        if folder.name not in kept and _last_write(folder) < before:
            found.append(folder)
    return found


def _not_written_since(folder: Path, oldest: float) -> list[Path]:
    return [path for path in _entries(folder) if _last_write(path) < oldest]


def _results_of_worker(ws: Workspace, active: Collection[str], oldest: float) -> list[Path]:
    """Return old results published by workers for submitters.

    Submitters download results from the shared store.
    """
    if not (ws.home / "bundles").is_dir():  # no worker's directory
        return []
    found = []
    for folder in _not_written_since(ws.root / "out", oldest):
        if _RUN.fullmatch(folder.name) and folder.name not in active:
            found.append(folder)
    return found


def _spent_agents(
    ws: Workspace, active: Collection[str], gone_attempts: Collection[str]
) -> Iterable[Path]:
    """Return the directories of local agents without an active run or a kept attempt."""
    names = {path.name for path in _entries(ws.home / "attempts")}
    kept = names.difference(gone_attempts)
    # The name of an attempt's directory contains the ID of its run.
    return find_spent_roots(ws.home, {*active, *_RUN.findall(" ".join(kept))})


def _unlocked_folders(ws: Workspace, oldest: float) -> list[Leftover]:
    found = []
    for kind, (name, lock) in _LOCKED.items():
        for folder in _not_written_since(ws.home / name, oldest):
            if not ws.locks.is_held(f"{lock}-{folder.name}"):
                found.append(Leftover(kind, folder, disk.total(folder)))
    return found


def delete_leftovers(ws: Workspace, found: Iterable[Leftover]) -> int:
    """Delete leftover files, except those used in the meantime. Returns the freed bytes."""
    return sum(leftover.size for leftover in found if _delete_unused(ws, leftover))


def _delete_unused(ws: Workspace, leftover: Leftover) -> bool:
    """Delete a leftover file, or return False if it is in use again."""
    if leftover.kind == "agent":
        return forget_root(leftover.path)
    if leftover.kind not in _LOCKED:
        disk.delete(leftover.path)
        return True
    _, prefix = _LOCKED[leftover.kind]
    lock = ws.locks.try_hold(f"{prefix}-{leftover.path.name}")
    if lock is None:
        return False
    with lock:
        disk.delete(leftover.path)
    return True


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _last_write(path: Path) -> float:
    """Return the latest write time in a directory."""
    try:
        return max(found.st_mtime for _, found in disk.below(str(path)))
    except FileNotFoundError:
        return time.time()  # in use right now
