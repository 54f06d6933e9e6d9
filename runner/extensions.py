"""What other packages bring: recipes and drivers, by entry points.  Reads the lists that installed packages lie beside; imports nothing of theirs.

A package names its folder of recipes, or the class of a driver:

    [project.entry-points."recipe.recipes"]
    acme = "acme_recipes.library"

    [project.entry-points."recipe.drivers"]
    acme = "acme_recipes.driver:Acme"

`importlib.metadata` knows the same and costs more than a whole run in which nothing is to be done: it is asked only once one of our words was seen.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from .errors import Invalid, Problem

RECIPES: Final = "recipe.recipes"
DRIVERS: Final = "recipe.drivers"


@dataclass(frozen=True, slots=True)
class Extension:
    """One entry point: what it calls itself, what it names, and the package that brings it."""

    name: str
    target: str
    package: str
    version: str

    @property
    def origin(self) -> str:
        """The package, as people name it."""
        return f"{self.package} {self.version}"


def found(group: str) -> tuple[Extension, ...]:
    """Everything that installed packages bring of `group`, by name and package."""
    return _found(group, tuple(sys.path))


def folder(extension: Extension) -> Path | None:
    """The folder of a package that is named in dots; None where there is no such folder.  Nothing of the package is imported."""
    from importlib.util import find_spec

    head, *rest = extension.target.split(".")
    try:
        spec = find_spec(head)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((place for base in places if (place := Path(base, *rest)).is_dir()), None)


def drivers(wanted: str) -> dict[str, tuple[str, str]]:
    """The table in which to look for a driver, name -> (module:class, what to do when it cannot be imported): ours, where it is ours; else all.

    Others are not asked for a name of ours, and so cannot take it.  Raises Invalid where two packages bring the one that is wanted.
    """
    from drivers import DRIVERS as OURS

    if wanted in OURS:
        return OURS
    brought = found(DRIVERS)
    problems = [problem for problem in driver_faults() if f'"{wanted}"' in problem.message]
    if problems:
        raise Invalid(problems)
    return {
        each.name: (each.target, f"reinstall {each.origin}, which brings the driver")
        for each in brought
    } | OURS


def driver_faults() -> list[Problem]:
    """Every name of a driver that several bear."""
    from drivers import DRIVERS as OURS

    owners = {name: ["recipe itself"] for name in OURS}
    for each in found(DRIVERS):
        owners.setdefault(each.name, []).append(f"{each.origin} ({each.target})")
    return [clash("driver", name, origins) for name, origins in owners.items() if len(origins) > 1]


def clash(kind: str, name: str, origins: list[str]) -> Problem:
    """That a thing of one name comes from several places."""
    return Problem(
        "name-clash",
        f'the {kind} "{name}" comes from {" and from ".join(origins)}',
        None,
        "uninstall one of these packages",
    )


@cache
def _found(group: str, path: tuple[str, ...]) -> tuple[Extension, ...]:
    if not any(_mentioned(group, folder) for folder in dict.fromkeys(path)):
        return ()
    from importlib.metadata import distributions

    brought: dict[tuple[str, str, str], Extension] = {}
    for package in distributions(path=list(path)):
        for point in package.entry_points:
            if point.group == group:
                brought.setdefault(
                    (point.name, point.value, package.name),
                    Extension(point.name, point.value, package.name, package.version),
                )
    return tuple(sorted(brought.values(), key=lambda each: (each.name, each.package)))


def _mentioned(group: str, folder: str) -> bool:
    """Whether a package of this folder of `sys.path` has entry points of that group."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return False
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            try:
                with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if f"[{group}]".encode() in file.read():
                        return True
            except OSError:
                continue
    return False


def packages() -> tuple[str, list[str]]:
    """The caller's packages, for `--python current`: the interpreter's version and sorted name==version lines."""
    import platform
    from importlib.metadata import distributions

    lines = sorted({f"{dist.name}=={dist.version}" for dist in distributions()})
    return platform.python_version(), lines
