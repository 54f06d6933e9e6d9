"""`recipe lock`: write a Python lock file with pinned versions and hashes."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from ...errors import CannotRun, NotFound
from ...language.source import other_lock
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
    names = (
        [args.file]
        if args.file is not None
        else [name for name in _NAMES if (here / name).is_file()][:1]
    )
    if not names:
        raise NotFound(
            f"found none of {', '.join(_NAMES)} in this directory",
            fix="pass the file: recipe lock FILE",
        )
    path = here / Path(names[0]).expanduser()
    if not path.is_file():
        raise NotFound(
            f"there is no file {names[0]}", fix="pass a requirements.txt or a pyproject.toml"
        )
    if (fix := other_lock(path.name)) is not None:
        raise CannotRun(f"recipe lock does not support {names[0]}", fix=fix)
    lock = locks.lock_file(path)
    if lock == path:
        raise CannotRun(
            f"{names[0]} is already a lock file",
            fix=f"write `python: {{lock: {names[0]}}}` in the recipe",
        )
    if lock.name == "uv.lock":
        raise CannotRun(
            f"uv.lock already locks {names[0]}",
            fix="update it with `uv lock`, and write `python: {lock: uv.lock}` in the recipe",
        )
    made = locks.make_lock(path, os.environ, python=args.python, upgrade=args.upgrade)
    many = len(re.findall(r"^[A-Za-z0-9][^\n]*==", made.read_text(encoding="utf-8"), re.MULTILINE))
    print(f"{Path(names[0]).with_name(made.name)}: {many} package{'' if many == 1 else 's'}")
    return 0
