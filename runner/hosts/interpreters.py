"""Choose the Python of a step without a lock on this machine.

The interpreter that runs recipe is used only by `--python current`.
"""

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
"""Seconds that a Python may take to print its version."""
_asked: dict[str, subprocess.Popen[str]] = {}
"""Running version queries: interpreter path -> process."""
_answers: dict[str, tuple[float, tuple[str, str]]] = {}
"""Answers of interpreters with their time: a worker executes many runs."""
_HOLDS: Final = 60.0
"""Seconds for which an answer is valid: the target of a shim may change."""


def choose_python(asked: str, root: Path, environ: Mapping[str, str]) -> str:
    """Return the path of an interpreter.

    The order is `asked`, `.venv` in the root, `$VIRTUAL_ENV`, and `python3` in PATH.

    `asked` is a path, the directory of a virtual environment, a program name, or `current`.
    Returns "python3" if none is found.  Raises CannotRun.
    """
    if asked == CURRENT:
        return sys.executable
    if asked:
        python = _find_asked(asked, environ)
        if not python:
            raise CannotRun(
                f"--python {asked}: no such Python interpreter",
                fix="pass the path of an interpreter or of a virtual environment",
            )
        return python
    return (
        _find_in_folder(f"{root}/.venv")
        or _find_in_folder(environ.get("VIRTUAL_ENV", ""))
        or shutil.which("python3", path=environ.get("PATH"))
        or shutil.which("python", path=environ.get("PATH"))
        or "python3"
    )


def _find_asked(asked: str, environ: Mapping[str, str]) -> str:
    """Return the interpreter that the user asked for by path, directory or name; empty if missing."""
    path = os.path.abspath(os.path.expanduser(asked))
    if os.path.isdir(path):
        return _find_in_folder(path)
    program = path if "/" in asked else asked
    return shutil.which(program, path=environ.get("PATH")) or ""


def command_path(python: str, home: Path, environ: Mapping[str, str]) -> str:
    """Return a PATH on which `python` and `python3` are this interpreter.

    If necessary, its directory or one below `home` comes first.
    """
    path = environ.get("PATH") or os.defpath
    if "/" not in python or _resolves_to(path, python):
        return path
    folder = os.path.dirname(python)
    if not _resolves_to(folder, python):
        folder = f"{home}/bin/python-{of_value('python', python)[:12]}"
        _write_shims(python, Path(folder))
    return f"{folder}:{path}"


def describe_python(python: str, may_ask: bool) -> str:
    """Return the path and version of an interpreter for messages.

    If the interpreter must be run for its version, `may_ask` decides; a shim is then named itself.
    """
    path, number = find_version(python) if may_ask else (python, _known_version(python))
    return f"{path} ({number})" if number else path


def ask_version(python: str) -> None:
    """Start a version query in the background, if the interpreter must be run for it.

    A pyenv shim takes 0.2 s.
    """
    if python not in _asked and not _known_version(python) and _recall_answer(python) is None:
        with contextlib.suppress(OSError):
            _asked[python] = subprocess.Popen(
                [python, "-c", _ASK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )


def find_version(python: str) -> tuple[str, str]:
    """Return the real path of an interpreter and its version, empty if unknown.

    Runs the interpreter only if necessary.
    """
    number = _known_version(python)
    if number:
        return python, number
    answer = _recall_answer(python)
    if answer is not None:
        return answer
    ask_version(python)
    asked = _asked.pop(python, None)
    if asked is None:
        return python, ""
    try:
        output, _ = asked.communicate(timeout=_PATIENCE)
        itself, number = output.splitlines()
        _answers[python] = time.monotonic(), (itself, number)
        return itself, number
    except ValueError:
        return python, ""
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return python, ""


def _recall_answer(python: str) -> tuple[str, str] | None:
    """Return a recent answer of an interpreter, or None."""
    at, answer = _answers.get(python, (-_HOLDS, ("", "")))
    return answer if time.monotonic() - at < _HOLDS else None


def _known_version(python: str) -> str:
    """Return the version if it is known without running the interpreter; otherwise empty."""
    match = re.search(
        r"^version(?:_info)?\s*=\s*(\d+\.\d+(?:\.\d+)?)", _read_settings(python), re.MULTILINE
    )
    if not match:
        program = os.path.basename(os.path.realpath(python))
        match = re.fullmatch(r"python(\d+\.\d+)", program)
    return match[1] if match else ""


def _read_settings(python: str) -> str:
    """Return the pyvenv.cfg of an interpreter's virtual environment; empty if it has none."""
    try:
        return (
            Path(python)
            .parent.with_name("pyvenv.cfg")
            .read_text(encoding="utf-8", errors="replace")
        )
    except OSError:
        return ""


def _find_in_folder(folder: str) -> str:
    """Return the interpreter of a virtual environment; empty if there is none."""
    if not folder:
        return ""
    for name in NAMES:
        path = f"{folder}/bin/{name}"
        if os.access(path, os.X_OK):
            return path
    return ""


def _resolves_to(path: str, python: str) -> bool:
    """Return whether `python` and `python3` both resolve to this interpreter on a PATH."""
    for name in NAMES:
        program = shutil.which(name, path=path)
        if not program:
            return False
        if program != python and not _is_same_program(program, python):
            return False
    return True


def _is_same_program(a: str, b: str) -> bool:
    """Return whether two programs in one directory are the same.

    In different directories, they may belong to different virtual environments.
    """
    return os.path.dirname(a) == os.path.dirname(b) and os.path.realpath(a) == os.path.realpath(b)


def _write_shims(python: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        if not os.access(folder / name, os.X_OK):
            new = folder / temporary_name(name)
            new.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
            new.chmod(0o755)
            new.replace(folder / name)
