"""A Python environment made from a hash-pinned requirements file, once per digest.  Knows venv and pip, not steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..errors import CannotRun
from ..storage.artifacts import delete
from .workspace import Workspace


def python_of(ws: Workspace, lock: Path, content: str) -> str:
    """The interpreter of the environment that `lock` describes, built if it is not there.  Raises CannotRun with pip's last words."""
    home = ws.home / "envs" / content[2:34]
    python = home / "bin" / "python"
    with ws.locks.hold(f"env-{home.name}"):
        if (home / "complete").exists():
            return str(python)
        delete(home)
        home.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(home)], lock)
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", str(lock)], lock)
        (home / "complete").touch()
    return str(python)


def _run(argv: list[str], lock: Path) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-5:]
        raise CannotRun(f"the environment of {lock} cannot be built: " + " ".join(words), fix="correct the lock, or use --python current")
