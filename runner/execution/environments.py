"""A Python environment made from a lock, once per digest.  Knows venv, pip and pylock.toml, not steps.

A hash-pinned requirements file goes to pip as it is; a pylock.toml (PEP 751) is first written as one, since few pips read it.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import CannotRun
from ..storage.artifacts import delete
from .chores import Chores
from .workspace import Workspace


def place_of(ws: Workspace, content: str) -> Path:
    """Where the environment of a lock with this content is, or will be; complete when it has a file of that name."""
    return ws.home / "envs" / content[2:34]


async def python_of(ws: Workspace, chores: Chores, lock: Path, content: str) -> str:
    """The interpreter of the environment that `lock` describes, built if it is not there.  Raises CannotRun with pip's last words."""
    home = place_of(ws, content)
    python = home / "bin" / "python"
    if (home / "complete").exists():
        os.utime(home / "complete")  # `gc` goes by when it was last wanted
        return str(python)
    with ws.locks.hold(f"env-{home.name}"):
        if (home / "complete").exists():
            return str(python)
        text = _requirements(lock).encode() if lock.suffix == ".toml" else lock.read_bytes()
        delete(home)
        home.parent.mkdir(parents=True, exist_ok=True)
        # Our own pip, where we have one, works on the new environment from outside: giving it one of its own takes seconds.
        ours = find_spec("pip") is not None
        await _do(chores, [sys.executable, "-m", "venv", *(["--without-pip"] if ours else []), str(home)], lock)
        wanted = home / "requirements.txt"
        wanted.write_bytes(text)
        pip = [sys.executable, "-m", "pip", "--python", str(python)] if ours else [str(python), "-m", "pip"]
        await _do(chores, [*pip, "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", str(wanted)], lock)
        (home / "complete").touch()
    return str(python)


async def _do(chores: Chores, argv: list[str], lock: Path) -> None:
    # pip finds its index, proxy, certificates and cache by the caller's environment; nothing of that gets into what it installs.
    exit, said = await chores.do("environment", argv, pass_env=list(os.environ))
    if exit.code != 0:
        errors = [line.strip() for line in said.splitlines() if "ERROR" in line]
        words = " ".join(errors or said.split("\n")[-5:])
        raise CannotRun(f"the environment of {lock} cannot be built: {words.strip() or exit.reason}", fix="correct the lock, or use --python current")


def _requirements(lock: Path) -> str:
    """A pylock.toml as a hash-pinned requirements file.  Raises CannotRun when it is damaged or pins what has no version."""
    try:
        packages = tomllib.loads(lock.read_text())["packages"]
        return "".join(_requirement(package) for package in packages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotRun(f"{lock} cannot be read as a pylock.toml: {error}", fix="make it again, as with `uv export --format pylock.toml`") from error


def _requirement(package: Mapping[str, Any]) -> str:
    if "version" not in package or not (package.get("wheels") or package.get("sdist")):
        raise ValueError(f"{package['name']} has no version with wheels or an sdist: a folder or a repository cannot be pinned by hash")
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
    hashes = [f"--hash={kind}:{digest}" for file in files for kind, digest in file["hashes"].items() if kind in ("sha256", "sha384", "sha512")]
    marker = f" ; {package['marker']}" if "marker" in package else ""
    return f"{package['name']}=={package['version']}{marker} {' '.join(dict.fromkeys(hashes))}\n"
