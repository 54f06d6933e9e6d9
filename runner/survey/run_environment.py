"""The environment of a run on its worker: git commit and diff, packages, system and GPUs.

Stored with the run for people.

The environment is not part of any key. Keys have the content that a step reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..paths import VERSION
from ..reading import parse_json
from ..storage.git_checkout import environment
from ..storage.workspace import Workspace

LONGEST_DIFF: Final = 256 << 10
"""Maximum bytes of a stored diff."""
FILES: Final = 100
"""Maximum listed changed files."""
PATIENCE: Final = 20.0
"""Timeout of a git command in seconds."""
_LARGEST: Final = 4 << 20
_PACKAGE: Final = re.compile(r"(.+?)-(\d[^-]*)(?:-.+)?\.(?:dist|egg)-info")
Found: TypeAlias = dict[str, Any]
"""JSON data."""


def begin(
    ws: Workspace, run: str, python: Callable[[], str], masked: Callable[[str], str]
) -> threading.Thread:
    """Start a thread that records the run's environment. The caller joins the thread.

    `python` returns the interpreter for steps without a lock, `masked` masks secrets in a text.
    """

    def look() -> None:
        # An unreadable detail must never fail a run.
        with contextlib.suppress(Exception):
            found = looked_at(ws.root, python(), masked)
            ws.write(_file(ws.home, run), json.dumps(found).encode())

    thread = threading.Thread(target=look, name="environment", daemon=True)
    thread.start()
    return thread


def recall(home: Path, run: str) -> Found | None:
    """Load the stored environment of a run, or return None if not stored."""
    try:
        with open(_file(home, run), "rb") as file:
            found = parse_json(file.read(_LARGEST))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _file(home: Path, run: str) -> Path:
    return home / "runs" / run / "environment.json"


def looked_at(root: Path, python: str, masked: Callable[[str], str]) -> Found:
    """Collect the current environment of the workspace at `root`."""
    return {
        "at": time.time(),
        "recipe": VERSION,
        "machine": _machine(),
        "python": {"path": python, "packages": packages_of(python)},
        "code": _code(root, masked),
    }


# -- machine


def _machine() -> Found:
    nvidia = Path("/proc/driver/nvidia")
    driver, gpus = "", []
    with contextlib.suppress(OSError):
        version = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", (nvidia / "version").read_text())
        driver = version[0] if version else ""
        for each in sorted((nvidia / "gpus").glob("*/information")):
            model = re.search(r"^Model:\s*(.+)$", each.read_text(), re.M)
            if model:
                gpus.append(model[1].strip())
    system = os.uname()
    return {
        "system": f"{system.sysname} {system.release} {system.machine}",
        "cpus": os.cpu_count() or 0,
        "gpu_driver": driver,
        "gpus": gpus,
    }


# -- packages


def packages_of(python: str) -> list[str]:
    """List a local interpreter's installed packages as sorted NAME==VERSION, or none if unknown."""
    found: dict[str, str] = {}
    for folder in _sites(python):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if package := _PACKAGE.fullmatch(name):
                    found.setdefault(package[1].replace("_", "-").lower(), package[2])
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _sites(python: str) -> Iterator[Path]:
    """Yield the package directories of an interpreter's virtual environment or installation."""
    home = Path(python).absolute().parent.parent
    if not (home / "pyvenv.cfg").exists():
        real = Path(os.path.realpath(python))
        home = real.parent.parent
        yield from (home / "local" / "lib").glob("python3*/dist-packages")
        yield home / "lib" / "python3" / "dist-packages"
    yield from sorted((home / "lib").glob("python3*/site-packages"))


# -- code


def _code(root: Path, masked: Callable[[str], str]) -> Found | None:
    """Return the git commit of the workspace and later changes, or None without a commit."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    heads = _git(root, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").decode(errors="replace")
    commit, _, branch = heads.strip().partition("\n")
    if not commit:
        return None
    status = _git(root, "status", "--porcelain", "-z", "--no-renames", "--", ".").split(b"\0")
    untracked: list[str] = []
    changed: list[str] = []
    for line in filter(None, status):
        # Each line has two letters of state, a space and the name.
        name = masked(line[3:].decode(errors="replace"))
        if line[:2] == b"??":
            untracked.append(name)
        else:
            changed.append(name)
    diff = b""
    if changed:
        diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
    return {
        "commit": commit,
        "branch": branch,
        "changed": changed[:FILES],
        "changed_count": len(changed),
        "untracked": untracked[:FILES],
        "untracked_count": len(untracked),
        "diff": masked(diff[:LONGEST_DIFF].decode(errors="replace")),
        "diff_cut": len(diff) > LONGEST_DIFF,
    }


def _git(root: Path, *words: str) -> bytes:
    """Run a git command and return the first bytes of its output, or nothing on failure.

    Writes nothing, and runs no program of the repository.
    """
    quiet = ("-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(root))
    try:
        process = subprocess.Popen(
            ("git", *quiet, *words),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return b""
    late = threading.Timer(PATIENCE, process.kill)
    late.start()
    assert process.stdout is not None
    with process.stdout:
        data = process.stdout.read(LONGEST_DIFF + 1)
    cut = len(data) > LONGEST_DIFF
    if cut:
        process.kill()  # the rest is not needed
    failed = process.wait() != 0 and not cut
    late.cancel()
    return b"" if failed else data
