"""Entry points of other packages that provide recipes and drivers. Imports none of them.

A package declares its directory of recipes, or the class of a driver:

    [project.entry-points."recipe.recipes"]
    acme = "acme_recipes.library"

    [project.entry-points."recipe.drivers"]
    acme = "acme_recipes.driver:Acme"

`importlib.metadata` takes longer than a whole no-op run, so it is imported only if an
`entry_points.txt` has one of these groups.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from .errors import Invalid, Problem

RECIPES: Final = "recipe.recipes"
DRIVERS: Final = "recipe.drivers"


class Extension(NamedTuple):
    """An entry point: its name, its target, and its package."""

    name: str
    target: str
    package: str
    version: str

    @property
    def origin(self) -> str:
        """The package's name and version."""
        return f"{self.package} {self.version}"


def find_extensions(group: str) -> tuple[Extension, ...]:
    """Return all entry points of installed packages in `group`, by name and package."""
    return _find_by_path(group, tuple(sys.path))


def find_folder(extension: Extension) -> Path | None:
    """Return the directory of a dotted package name; None if it does not exist.

    The package is not imported.
    """
    from importlib.util import find_spec

    head, *rest = extension.target.split(".")
    try:
        spec = find_spec(head)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for base in spec.submodule_search_locations or ():
        folder = Path(base, *rest)
        if folder.is_dir():
            return folder
    return None


def drivers(wanted: str) -> dict[str, tuple[str, str]]:
    """Return the table for looking up a driver, name -> (module:class, fix for a failed import):
    the built-in table for built-in drivers, else all.

    Installed packages cannot replace a built-in driver. Raises Invalid if two packages provide the
    wanted driver.
    """
    from drivers import DRIVERS as OURS

    if wanted in OURS:
        return OURS
    brought = find_extensions(DRIVERS)
    problems = [problem for problem in driver_faults() if f'"{wanted}"' in problem.message]
    if problems:
        raise Invalid(problems)
    return {
        each.name: (each.target, f"reinstall {each.origin}, which provides the driver")
        for each in brought
    } | OURS


def driver_faults() -> list[Problem]:
    """Return a problem for each driver name that several packages provide."""
    from drivers import DRIVERS as OURS

    owners = {name: ["recipe itself"] for name in OURS}
    for each in find_extensions(DRIVERS):
        owners.setdefault(each.name, []).append(f"{each.origin} ({each.target})")
    return [
        name_clash("driver", name, origins) for name, origins in owners.items() if len(origins) > 1
    ]


def name_clash(kind: str, name: str, origins: list[str]) -> Problem:
    """Return the problem for a driver or recipe name that several packages provide."""
    return Problem(
        "name-clash",
        f'the {kind} "{name}" comes from {" and from ".join(origins)}',
        None,
        "uninstall one of these packages",
    )


@cache
def _find_by_path(group: str, path: tuple[str, ...]) -> tuple[Extension, ...]:
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
    """Return True if a package in this directory of `sys.path` has entry points of the group."""
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
    """Return the interpreter's version and sorted name==version lines, for `--python current`."""
    import platform
    from importlib.metadata import distributions

    lines = sorted({f"{dist.name}=={dist.version}" for dist in distributions()})
    return platform.python_version(), lines
