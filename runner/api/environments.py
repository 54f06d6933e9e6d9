"""The environment of a run (code, packages, machines), and its inputs with their defaults.

Read-only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import RecipeError
from ..language import parse
from ..language.recipe import Recipe
from ..planning.ids import bare
from ..storage.records.ledger import Ledger, of_user
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.workspace import Workspace
from ..survey import run_environment
from ..survey.run_environment import packages_of
from .values import Facts, moment, whole

PACKAGES: Final = 2000
NOT_KEPT: Final = (
    "code and packages are unknown: the run was executed elsewhere, or by an earlier version"
)
NO_REPOSITORY: Final = "the commit is unknown: the workspace is not in a git repository"
_PYTHON: Final = re.compile(r"(?P<path>.*) \((?P<version>[^()]*)\)")


def read_environment(ws: Workspace, row: RunRow) -> Facts:
    """Return a run's code version, machine, Python packages, locks and rented machines.

    `words` names the missing parts.
    """
    kept = run_environment.recall(ws.home, row.id) or {}
    attempts = ws.store.runs.attempts(row.id)
    words = [] if kept else [NOT_KEPT]
    code = kept.get("code")
    if kept and not isinstance(code, dict):
        words.append(NO_REPOSITORY)
    found = kept.get("machine")
    machine = found if isinstance(found, dict) else {}
    at = kept.get("at")
    seen_at = moment(at) if isinstance(at, float) else None
    version = _code(code) if isinstance(code, dict) else None
    return {
        "at": seen_at,
        "recipe": str(kept.get("recipe", "")),
        "code": version,
        "machine": {
            "system": str(machine.get("system", "")),
            "cpus": _count(machine.get("cpus")),
            "gpu_driver": str(machine.get("gpu_driver", "")),
            "gpus": _texts(machine.get("gpus")),
        },
        "rented": _list_rented_machines(ws, row.id),
        "pythons": _pythons(ws, attempts, kept.get("python")),
        "locks": _locks(attempts),
        "words": words,
    }


def _code(found: Mapping[str, Any]) -> Facts:
    return {
        "commit": str(found.get("commit", "")),
        "branch": whole(str(found.get("branch", ""))),
        "changed": _texts(found.get("changed")),
        "changed_count": _count(found.get("changed_count")),
        "untracked": _texts(found.get("untracked")),
        "untracked_count": _count(found.get("untracked_count")),
        "diff": whole(str(found.get("diff", ""))),
        "diff_cut": found.get("diff_cut") is True,
    }


def _texts(found: object) -> list[str]:
    if not isinstance(found, list):
        return []
    return [whole(str(each)) for each in found]


def _count(found: object) -> int:
    return found if isinstance(found, int) else 0


def _list_rented_machines(ws: Workspace, run: str) -> list[Facts]:
    """Return the machines rented for a run."""
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        leases = ledger.of_run(run)
    machines: list[Facts] = []
    for lease in leases:
        gpus, gpu = lease.gpus
        machines.append({"provider": lease.driver, "key": lease.key, "gpus": gpus, "gpu": gpu})
    return machines


def _pythons(ws: Workspace, attempts: Sequence[AttemptRow], kept: object) -> list[Facts]:
    """Return each Python interpreter used by the steps, with its installed packages."""
    steps: dict[str, dict[str, None]] = {}
    for each in sorted(attempts, key=lambda each: each.started or 0.0):
        python = each.exit.get("python")
        if python:
            steps.setdefault(str(python), {})[bare(each.step)] = None
    noted = kept if isinstance(kept, dict) else {}
    return [_python(ws, text, list(of), noted) for text, of in steps.items()]


def _python(ws: Workspace, text: str, steps: list[str], noted: Mapping[str, Any]) -> Facts:
    parts = _PYTHON.fullmatch(text)
    path, version = (parts["path"], parts["version"]) if parts else (text, "")
    packages: list[str] = []
    words = "packages not recorded: the Python is on another machine, or is set by the step"
    if path.startswith(f"{ws.home}/envs/"):  # environments of lock files never change
        packages, words = packages_of(path), "created from a lock file"
    elif path == noted.get("path"):
        packages, words = _texts(noted.get("packages")), "as installed when the run started"
    return {
        "path": path,
        "version": version,
        "steps": steps,
        "packages": packages[:PACKAGES],
        "words": words,
    }


def _locks(attempts: Iterable[AttemptRow]) -> list[Facts]:
    """Return lock files and pinned code of a run's steps, from their cache keys, with digests."""
    found: dict[tuple[str, str, str], None] = {}
    for each in attempts:
        image = each.preimage if isinstance(each.preimage, dict) else {}
        world = image.get("world")
        if not isinstance(world, list):
            continue
        for entry in world:
            if not isinstance(entry, list) or len(entry) != 3:
                continue
            kind, name, content = map(str, entry)
            if kind in ("lock", "code"):
                found[kind, whole(name), content] = None
    return [{"kind": kind, "name": name, "content": content} for kind, name, content in found]


# -- inputs ---------------------------------------------------------------------------------------


def read_inputs(ws: Workspace, row: RunRow) -> Facts:
    """Return the inputs of a run, with each default value, and whether the caller or a preset set
    them.

    `words` says if the recipe cannot be read or has changed since the run.
    """
    recipe, words = _recipe(row)
    asked = row.data.get("asked")
    asked = asked if isinstance(asked, dict) else {}
    given = asked.get("inputs")
    given = given if isinstance(given, dict) else {}
    preset = _preset(recipe, asked.get("preset"))
    names = _order(row.inputs, recipe)
    found = [_input(name, row.inputs[name], recipe, given, preset) for name in names]
    return {"inputs": found, "words": words}


def _order(inputs: Mapping[str, object], recipe: Recipe | None) -> list[str]:
    """Sort input names in recipe order, with names unknown to the recipe last."""
    known = recipe.inputs if recipe is not None else {}
    ordered = [name for name in known if name in inputs]
    return list(dict.fromkeys((*ordered, *inputs)))


def _input(
    name: str,
    value: object,
    recipe: Recipe | None,
    given: Collection[str],
    preset: Collection[str],
) -> Facts:
    set_by = ""
    if name in given:
        set_by = "caller"
    elif name in preset:
        set_by = "preset"
    default: object = None
    has_default, doc = False, ""
    spec = recipe.inputs.get(name) if recipe is not None else None
    if spec is not None:
        default, has_default, doc = spec.default, spec.has_default, spec.doc
    return {
        "name": name,
        "value": value,
        "default": default,
        "has_default": has_default,
        "set_by": set_by,
        "doc": doc,
    }


def _recipe(row: RunRow) -> tuple[Recipe | None, str]:
    """Load a run's recipe file, with a note if the file is missing or has changed since the run."""
    path = Path(str(row.data.get("source", "")))
    try:
        recipe = parse.load(path)
        changed = os.stat(path).st_mtime > row.created
    except (RecipeError, OSError):
        return None, "the defaults are unknown: the recipe of the run no longer exists here"
    if recipe.id != row.recipe:
        return None, f"the defaults are unknown: the recipe file now contains {recipe.id}"
    if changed:
        said = "these are the current defaults; the recipe has changed since the run started"
        return recipe, said
    return recipe, ""


def _preset(recipe: Recipe | None, words: object) -> set[str]:
    """Return the names of inputs set by a run's presets. `words` lists presets, comma-separated."""
    if recipe is None or not isinstance(words, str):
        return set()
    names: set[str] = set()
    for word in words.split(","):
        preset = recipe.presets.get(word.strip())
        if preset is not None:
            names.update(preset.inputs)
    return names
