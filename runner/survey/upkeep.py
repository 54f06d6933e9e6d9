"""Take files for results, remove what was published, find what a workspace keeps beside its store.

Nothing is removed that we did not put there, and nothing that was changed since, unless that is what was asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import Busy, CannotRun, RecipeError
from ..hosts.link.local_agents import forget_root, spent_roots
from ..paths import heads
from ..planning.judge import FRESH, MAYBE, SKIPPED, Verdict
from ..planning.plan import SELECT, UNCACHED
from ..planning.step import DIRECTORY, NONEMPTY, OPTIONAL
from ..storage.content import disk
from ..storage.garbage import Garbage
from ..storage.records.index import Made, Published, Trace
from ..storage.records.runs import FINAL, RunRow
from ..storage.workspace import Workspace
from .survey import Survey, out_dir

_DAY = 86_400.0


# -- adopt -------------------------------------------------------------------------------------------------------------------------------------------


def adopt_outputs(ws: Workspace, found: Survey, n: int) -> Trace | None:
    """Take the files that lie where step `n` publishes for its result under its present key.  None: they are that already.  Raises CannotRun."""
    node, verdict = found.plan.nodes[n], found.verdicts[n]
    if node.flags & SELECT:
        raise CannotRun(
            f"{node.id} selects, it makes nothing",
            fix="adopt one of the steps that it selects from",
        )
    if node.flags & UNCACHED:
        raise CannotRun(f"{node.id} says `cache: false`: it runs every time, whatever is there")
    if verdict.answer == SKIPPED:
        raise CannotRun(f"{node.id} is skipped: {'; '.join(verdict.reasons)}")
    if verdict.key is None:
        fix = (
            "run what it needs first (`recipe run --until`), or adopt that"
            if verdict.answer == MAYBE
            else ""
        )
        raise CannotRun(f"{node.id} has no key yet: {'; '.join(verdict.reasons)}", fix=fix)
    if verdict.answer == FRESH:
        return None
    base = out_dir(ws, found.plan, found.library, found.request)
    head = "" if base == ws.root else f"{base}/"
    targets = dict(found.targets.get(n, ()))
    made, rows, wrong = [], [], []
    for name, path, flags in node.outputs:
        at = targets.get(name, f"{head}{node.prefix}{path}")
        content = ws.cache.content_of(at)
        target = ws.root / at
        if content is None:
            if not flags & OPTIONAL:
                wrong.append(f"{at} is not there")
        elif flags & DIRECTORY and content[0] != "t":
            wrong.append(f"{at} is not a directory")
        elif flags & NONEMPTY and (
            not any(target.iterdir()) if content[0] == "t" else target.stat().st_size == 0
        ):
            wrong.append(f"{at} is empty, which the recipe forbids")
        else:
            ws.objects.put(Path(os.path.realpath(target)), content, move=False)
            made.append(Made(name, path, content))
            if name in targets:
                rows.append(Published(at, content, "", "", node.id, found.plan.recipe))
    if wrong:
        raise CannotRun(
            f"{node.id} cannot be adopted: {'; '.join(wrong)}",
            fix="put the files there, or run the step",
        )
    trace = Trace(
        verdict.key,
        found.plan.recipe,
        node.id,
        "",
        time.time(),
        0.0,
        tuple(made),
        "{}",
        json.dumps({"adopted": True}),
    )
    ws.save_cache()
    ws.store.index.adopt(trace, rows)
    return trace


# -- published files ---------------------------------------------------------------------------------------------------------------------------------


class PublishedPath(NamedTuple):
    """A published path as it is now: `ours` (as we put it there), `edited`, or `gone`."""

    row: Published
    now: str


def examine_published(ws: Workspace, rows: Iterable[Published]) -> list[PublishedPath]:
    """What became of what we published."""
    answer = []
    for row in rows:
        if not os.path.lexists(ws.root / row.path):
            now = "gone"
        elif os.path.islink(ws.root / row.path):
            now = "edited"
        else:
            try:
                now = "ours" if ws.cache.content_of(row.path) == row.content else "edited"
            except (
                RecipeError
            ):  # a pipe, or a link that leads out: nothing that we would have put there
                now = "edited"
        answer.append(PublishedPath(row, now))
    return answer


def find_stale(ws: Workspace, found: Survey) -> list[Published]:
    """What earlier runs of this recipe left and its plan does not make: no step has that path, or its step is skipped, or did not make it this time.

    Results of a library recipe under other inputs have folders of their own, those of `--out` are where they were asked for, what was adopted is the
    caller's: none is stale.  Nor is what a step may make that has not run yet.  While a matrix waits for its files, only steps in the plan count.
    """
    base = out_dir(ws, found.plan, found.library, found.request)
    head = "" if base == ws.root else f"{base}/"
    wanted = {
        target.path
        for n, targets in found.targets.items()
        for target in targets
        if _makes(found.verdicts[n], target.output)
    }
    around = {parent for path in wanted for parent in heads(path)[1:]}
    known = {node.id.partition("[")[0] for node in found.plan.nodes}
    rows = []
    for path, row in sorted(ws.store.index.published(found.plan.recipe).items()):
        here = path.startswith(head) if head else not path.startswith("/")
        certain = row.run and (not found.plan.pending or row.step.partition("[")[0] in known)
        if (
            here
            and certain
            and path not in wanted
            and path not in around
            and not any(parent in wanted for parent in heads(path)[1:])
        ):
            rows.append(row)
    return rows


def _makes(verdict: Verdict, output: str) -> bool:
    """Whether a step leaves this output, as far as that is known."""
    return verdict.made is None or output in verdict.made.outputs


def demand_quiet(ws: Workspace, recipe: str) -> None:
    """Raise Busy while a run of this recipe is under way here."""
    for row in ws.store.runs.latest(recipe=recipe, last=100):
        if row.state == "ACTIVE" and ws.store.runs.live(row.id):
            raise Busy(f"run {row.id} of {recipe} is under way", fix="wait for it, or stop it")


def unpublish(ws: Workspace, rows: Iterable[Published]) -> None:
    """Remove published paths, and the directories that are empty then."""
    paths = []
    for row in rows:
        target = ws.root / row.path
        disk.delete(target)
        paths.append(row.path)
        _remove_empty(ws.root, target)
    ws.store.index.unpublish(paths)


def _remove_empty(root: Path, target: Path) -> None:
    """Remove the empty directories above `target`, inside the workspace; and `latest`, when it leads nowhere any more."""
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


# -- runs --------------------------------------------------------------------------------------------------------------------------------------------


def demand_over(ws: Workspace, row: RunRow) -> None:
    """Raise Busy where a run is under way, or its worker died with steps begun: their jobs may live, and `recipe cancel` ends them."""
    if ws.store.runs.live(row.id):
        raise Busy(f"run {row.id} is under way", fix="wait for it, or stop it")
    if row.state not in FINAL and any(
        step.state == "RUNNING" for step in ws.store.runs.steps(row.id).values()
    ):
        raise Busy(
            f"the worker of run {row.id} died, and its steps may be running",
            fix=f"`recipe cancel {row.id}` ends it; then remove it",
        )


def find_leftovers_of(ws: Workspace, run: str) -> list[Leftover]:
    """Logs and metrics of a run, and what its failed attempts left."""
    dirs = sorted({row.dir for row in ws.store.runs.attempts(run)} - {""})
    found = [
        Leftover("attempt", ws.home / name, disk.total(ws.home / name))
        for name in dirs
        if (ws.home / name).is_dir()
    ]
    logs = ws.home / "runs" / run
    return [*found, *([Leftover("logs", logs, disk.total(logs))] if logs.is_dir() else [])]


def remove_runs(ws: Workspace, runs: Sequence[str], beside: Iterable[Leftover]) -> int:
    """Delete runs and what they left; their results stay.  Answers how many bytes went."""
    ws.store.runs.forget(runs)
    return delete_leftovers(ws, beside)


# -- what is beside the store ----------------------------------------------------------------------------------------------------------------------


class Leftover(NamedTuple):
    """A file or folder that is not needed any more, and what it was."""

    kind: str
    path: Path
    size: int


_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_LOCKED = {
    "state": ("states", "state"),
    "environment": ("envs", "env"),
    "repository": ("git", "git"),
}
"""Kinds of folders that a run holds a lock on while it works in them: where they are, and what their locks are called."""


def find_leftovers(ws: Workspace, garbage: Garbage, *, keep_days: float) -> list[Leftover]:
    """Logs of runs that go; plans, manifests, downloads, states, environments, repositories, and what a worker published, not touched for so long."""
    oldest = time.time() - keep_days * _DAY
    rows = ws.store.runs.latest()
    known = {row.id for row in rows} - set(garbage.runs)
    found = [
        Leftover("attempt", path, disk.total(path))
        for path in (ws.home / "attempts" / name for name in garbage.attempts)
    ]
    for folder in _entries(ws.home / "runs"):
        if folder.name not in known and _last_write(folder) < garbage.before:
            found.append(Leftover("logs", folder, disk.total(folder)))
    for kind, name in (("plan", "plans"), ("manifest", "manifests"), ("download", "cache")):
        found += [
            Leftover(kind, path, disk.total(path))
            for path in _entries(ws.home / name)
            if _last_write(path) < oldest
        ]
    if (
        ws.home / "bundles"
    ).is_dir():  # a worker's folder: what it published is its submitters', and is in the store
        open_runs = {row.id for row in rows if row.state not in FINAL}
        for folder in _entries(ws.root / "out"):
            if (
                _RUN.fullmatch(folder.name)
                and folder.name not in open_runs
                and _last_write(folder) < oldest
            ):
                found.append(Leftover("result", folder, disk.total(folder)))
    going = {f"attempts/{name}" for name in garbage.attempts}
    left = " ".join(
        name
        for name in (path.name for path in _entries(ws.home / "attempts"))
        if f"attempts/{name}" not in going
    )
    needed = {row.id for row in rows if row.state not in FINAL} | set(_RUN.findall(left))
    for path in spent_roots(ws.home, needed):
        found.append(Leftover("agent", path, disk.total(path)))
    for kind, (name, lock) in _LOCKED.items():
        for folder in _entries(ws.home / name):
            if _last_write(folder) < oldest and not ws.locks.held(f"{lock}-{folder.name}"):
                found.append(Leftover(kind, folder, disk.total(folder)))
    return found


def delete_leftovers(ws: Workspace, found: Iterable[Leftover]) -> int:
    """Delete leftovers; what came into use meanwhile stays.  Answers how many bytes went."""
    freed = 0
    for leftover in found:
        lock = None
        if leftover.kind in _LOCKED:
            lock = ws.locks.try_hold(f"{_LOCKED[leftover.kind][1]}-{leftover.path.name}")
            if lock is None:
                continue
        if leftover.kind != "agent":
            disk.delete(leftover.path)
        elif not forget_root(leftover.path):
            continue
        freed += leftover.size
        if lock is not None:
            lock.release()
    return freed


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _last_write(path: Path) -> float:
    """When anything in it was last written."""
    try:
        return max(found.st_mtime for _, found in disk.below(str(path)))
    except FileNotFoundError:
        return time.time()  # it is being worked on
