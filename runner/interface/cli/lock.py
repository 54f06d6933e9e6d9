"""`recipe lock`: write a Python lock file with pinned versions and hashes."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from ...errors import CannotRun, NotFound
from ...language.parse_context import other_lock
from ...language.units import count_text
from ...survey import locks

_NAMES = ("requirements.in", "requirements.txt", "pyproject.toml")


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help=f"File to lock (default: the first of these that exists: {', '.join(_NAMES)})",
    )
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="Upgrade all packages; by default, versions already in the lock are kept",
    )
    parser.add_argument(
        "--python",
        default="",
        metavar="VERSION",
        help="Minimum Python version to lock for (default: the version that runs recipe)",
    )
    parser.epilog = "Examples:\n  recipe lock\n  recipe lock requirements.txt --python 3.12\n\nthen, in a recipe: python: {lock: requirements.lock}"


def run(args: argparse.Namespace) -> int:
    here = args.location.here
    name = args.file if args.file is not None else _find_requirements(here)
    path = here / Path(name).expanduser()
    if not path.is_file():
        raise NotFound(
            f"there is no file {name}", fix="pass a requirements.txt or a pyproject.toml"
        )
    fix = other_lock(path.name)
    if fix is not None:
        raise CannotRun(f"recipe lock does not support {name}", fix=fix)
    lock = locks.lock_file(path)
    if lock == path:
        raise CannotRun(
            f"{name} is already a lock file",
            fix=f"write `python: {{lock: {name}}}` in the recipe",
        )
    if lock.name == "uv.lock":
        raise CannotRun(
            f"uv.lock already locks {name}",
            fix="update it with `uv lock`, and write `python: {lock: uv.lock}` in the recipe",
        )
    made = locks.make_lock(path, os.environ, python=args.python, upgrade=args.upgrade)
    pins = re.findall(r"^[A-Za-z0-9][^\n]*==", made.read_text(encoding="utf-8"), re.MULTILINE)
    print(f"{Path(name).with_name(made.name)}: {count_text(len(pins), 'package')}")
    return 0


def _find_requirements(folder: Path) -> str:
    """Return the name of the first file of `_NAMES` in a directory.  Raises NotFound."""
    for name in _NAMES:
        if (folder / name).is_file():
            return name
    raise NotFound(
        f"found none of {', '.join(_NAMES)} in this directory",
        fix="pass the file: recipe lock FILE",
    )
