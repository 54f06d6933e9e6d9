"""Checkpoints of a plan's steps on this machine: find, export, and roll back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..agent.trees import copy_with_mode
from ..errors import Busy, CannotRun, NotFound
from ..paths import temporary_name
from ..storage import checkpoints
from ..storage.content.disk import delete, total
from ..storage.workspace import Workspace
from .explain import preimage_of
from .survey import Survey

_ASIDE = ".aside"
"""Directory next to a generation's states, for checkpoints set aside by a rollback."""


class Checkpoint(NamedTuple):
    """A checkpoint of a step. `why` tells why it cannot be resumed from, or is "" if it can."""

    path: Path
    number: int  # last number in its name, -1 without one
    step: int | None
    why: str
    size: int
    made: float
    aside: bool = False


class StepState(NamedTuple):
    """One checkpoint directory of a step, with its checkpoints, newest first."""

    step: str
    state: str
    folder: Path
    pattern: str | None
    lock: str
    note: str  # reason for ignoring earlier checkpoints, or empty
    checkpoints: Sequence[Checkpoint]

    def newest(self) -> Checkpoint | None:
        """The checkpoint from which a run would resume, or None."""
        for each in self.checkpoints:
            if not each.why and not each.aside:
                return each
        return None

    def best(self) -> Checkpoint | None:
        """The best checkpoint according to the trainer, or None if unknown or deleted."""
        # The newest checkpoint that names a best one: each knows only those before it.
        for each in self.checkpoints:
            name = "" if each.aside else checkpoints.best(each.path)
            if name:
                return self._find_named(name)
        return None

    def _find_named(self, name: str) -> Checkpoint | None:
        for each in self.checkpoints:
            if each.path.name == name:
                return each
        return None

    def find_numbered(self, number: int | None) -> Checkpoint:
        """Return the checkpoint with this number, or else the newest valid one. Raises NotFound."""
        if number is None:
            which = "complete checkpoint"
            found = self.newest()
        else:
            which = f"checkpoint {number}"
            found = next((each for each in self.checkpoints if each.number == number), None)
        if found is None:
            fix = "create checkpoints with `recipe run`"
            available = [str(each.number) for each in self.checkpoints if each.number >= 0]
            if available:
                fix = f"available checkpoints: {', '.join(available)}"
            raise NotFound(f"{self.step} has no {which} here", fix=fix)
        return found


def find_states(ws: Workspace, found: Survey, numbers: Iterable[int]) -> list[StepState]:
    """Return the checkpoint directories of these steps under the survey's inputs.

    Raises CannotRun if a dependency has not run.
    """
    answer = []
    for n in numbers:
        node, spec = found.plan.nodes[n], found.plan.specs()[n]
        if not spec.state:
            continue
        image = preimage_of(found, n)
        if image is None:
            raise CannotRun(
                f"cannot locate checkpoints of {node.id}: its dependencies have not run yet",
                fix=f"run them with `recipe run --until {node.id}`",
            )
        key = checkpoints.key(spec, image["world"], node.id)
        generation, note = checkpoints.choose_folder(ws.home / "states" / key, spec.continues)
        for state in spec.state:
            folder = generation / state.name
            there = _checkpoints(folder, state.checkpoint)
            aside = _checkpoints(generation / _ASIDE / state.name, state.checkpoint)
            there += [each._replace(aside=True) for each in aside]
            there.sort(key=lambda each: (each.number, not each.aside, each.made), reverse=True)
            answer.append(
                StepState(
                    node.id, state.name, folder, state.checkpoint, f"state-{key}", note, there
                )
            )
    return answer


def _checkpoints(folder: Path, pattern: str | None) -> list[Checkpoint]:
    found = []
    for name, verdict in checkpoints.judge_checkpoints(folder, pattern):
        path = folder / name
        made = path.stat().st_mtime if path.exists() else 0.0
        found.append(
            Checkpoint(path, checkpoints.number(name), verdict.step, verdict.why, total(path), made)
        )
    return found


def export(checkpoint: Checkpoint, target: Path) -> Path:
    """Copy a checkpoint to `target` without overwriting, and return its path. Raises CannotRun."""
    place = target / checkpoint.path.name if target.is_dir() else target
    if os.path.lexists(place):
        raise CannotRun(
            f"{place} already exists", fix="choose another path, or move the existing file away"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(temporary_name(place.name))
    if checkpoint.path.is_dir():
        shutil.copytree(checkpoint.path, new, symlinks=True, copy_function=copy_with_mode)
    else:
        copy_with_mode(str(checkpoint.path), str(new))
    new.rename(place)
    return place


def go_back(ws: Workspace, state: StepState, number: int) -> Checkpoint:
    """Roll back to a checkpoint, from which the next run then resumes.

    Newer checkpoints are set aside, and older ones that were set aside are restored. Raises Busy
    during a run that uses them, NotFound, and CannotRun for an invalid checkpoint.
    """
    lock = ws.locks.try_hold(state.lock)
    if lock is None:
        raise Busy(
            f"{state.step} is running and uses these checkpoints",
            fix="stop that run first with Ctrl-C or `recipe cancel`",
        )
    with lock:
        chosen = state.find_numbered(number)
        if chosen.why:
            raise CannotRun(
                f"cannot resume from {chosen.path.name}: {chosen.why}",
                fix="choose another checkpoint; `recipe checkpoints` lists them",
            )
        aside = state.folder.parent / _ASIDE / state.state
        for each in state.checkpoints:
            belongs_aside = each.number > number
            if each.aside == belongs_aside:
                continue
            folder = aside if belongs_aside else state.folder
            to = folder / each.path.name
            if each.aside and os.path.lexists(to):
                continue  # a newer checkpoint with this name exists
            delete(to)
            to.parent.mkdir(parents=True, exist_ok=True)
            each.path.rename(to)
    return chosen
