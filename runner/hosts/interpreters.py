"""Which Python a step on this machine runs, when no lock says so: the caller's, and never the one of `recipe` only because that is at hand."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..digest import of_value
from ..errors import CannotRun
from ..paths import temporary_name

CURRENT: Final = "current"
NAMES: Final = ("python", "python3")
_ASK: Final = "import platform, sys; print(sys.executable); print(platform.python_version())"
_PATIENCE: Final = 2.0
"""Seconds that a Python may take to say which it is."""
_asked: dict[str, subprocess.Popen[str]] = {}
"""Those that were asked, and whose answer was not read yet."""
_said: dict[str, tuple[float, tuple[str, str]]] = {}
"""What interpreters answered, and when: a worker has many runs."""
_HOLDS: Final = 60.0
"""Seconds for which such an answer is believed: what a shim leads to may be set to another."""


def choose_python(asked: str, root: Path, environ: Mapping[str, str]) -> str:
    """The path of the interpreter: the one `asked` for, else that of `.venv` in the root, of `$VIRTUAL_ENV`, or `python3` of PATH.

    `asked` is a path, a virtual environment's folder, the name of a program, or `current`.  Where there is none, it is "python3".  Raises CannotRun.
    """
    if asked == CURRENT:
        return sys.executable
    if asked:
        path = os.path.abspath(os.path.expanduser(asked))
        found = (
            _of_folder(path)
            if os.path.isdir(path)
            else shutil.which(path if "/" in asked else asked, path=environ.get("PATH"))
        )
        if not found:
            raise CannotRun(
                f"--python {asked}: there is no such Python",
                fix="give the path of an interpreter or of a virtual environment",
            )
        return found
    return (
        _of_folder(f"{root}/.venv")
        or _of_folder(environ.get("VIRTUAL_ENV", ""))
        or shutil.which("python3", path=environ.get("PATH"))
        or shutil.which("python", path=environ.get("PATH"))
        or "python3"
    )


def command_path(python: str, home: Path, environ: Mapping[str, str]) -> str:
    """PATH with that interpreter as both `python` and `python3`: as it is if so, else with its folder first, or one below `home`."""
    path = environ.get("PATH") or os.defpath
    if "/" not in python or _leads(path, python):
        return path
    folder = os.path.dirname(python)
    if not _leads(folder, python):
        folder = f"{home}/bin/python-{of_value('python', python)[:12]}"
        _call(python, Path(folder))
    return f"{folder}:{path}"


def describe_python(python: str) -> str:
    """An interpreter of this machine as people read it: its path, and its version."""
    path, number = version(python)
    return f"{path} ({number})" if number else path


def ask(python: str) -> None:
    """Have an interpreter that must be run for that say which it is, while other things are done: a shim of pyenv takes 0.2 s."""
    if python not in _asked and not _known_version(python) and _recall_answer(python) is None:
        with contextlib.suppress(OSError):
            _asked[python] = subprocess.Popen(
                [python, "-c", _ASK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )


def version(python: str) -> tuple[str, str]:
    """The interpreter behind a path, and its version as far as that is known without running it; one that only leads to another is asked."""
    if number := _known_version(python):
        return python, number
    if (known := _recall_answer(python)) is not None:
        return known
    ask(python)
    asked = _asked.pop(python, None)
    if asked is None:
        return python, ""
    try:
        said, _ = asked.communicate(timeout=_PATIENCE)
        itself, number = said.splitlines()
        _said[python] = time.monotonic(), (itself, number)
        return itself, number
    except ValueError:
        return python, ""
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return python, ""


def _recall_answer(python: str) -> tuple[str, str] | None:
    """What an interpreter answered a moment ago."""
    at, said = _said.get(python, (-_HOLDS, ("", "")))
    return said if time.monotonic() - at < _HOLDS else None


def _known_version(python: str) -> str:
    """The version of an interpreter as far as it is known without running it."""
    found = re.search(
        r"^version(?:_info)?\s*=\s*(\d+\.\d+(?:\.\d+)?)", _settings(python), re.MULTILINE
    )
    found = found or re.fullmatch(r"python(\d+\.\d+)", os.path.basename(os.path.realpath(python)))
    return found[1] if found else ""


def _settings(python: str) -> str:
    """What a virtual environment says of itself; empty for an interpreter that is in none."""
    try:
        return (
            Path(python)
            .parent.with_name("pyvenv.cfg")
            .read_text(encoding="utf-8", errors="replace")
        )
    except OSError:
        return ""


def _of_folder(folder: str) -> str:
    return next(
        (path for name in NAMES if folder and os.access(path := f"{folder}/bin/{name}", os.X_OK)),
        "",
    )


def _leads(path: str, python: str) -> bool:
    """Whether both names mean that interpreter on a command path."""
    return all(
        (found := shutil.which(name, path=path)) and (found == python or _same(found, python))
        for name in NAMES
    )


def _same(a: str, b: str) -> bool:
    """Whether two programs of one folder are one; in different folders they may belong to different virtual environments."""
    return os.path.dirname(a) == os.path.dirname(b) and os.path.realpath(a) == os.path.realpath(b)


def _call(python: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        if not os.access(folder / name, os.X_OK):
            new = folder / temporary_name(name)
            new.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
            new.chmod(0o755)
            new.replace(folder / name)
