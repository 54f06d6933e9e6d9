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
from socket import gethostname
from typing import Any

from ..digest import of_value
from ..errors import CannotRun
from .chores import NO_FILES, Chores
from .sites import Site


def name_of(content: str) -> str:
    """The folder, below our root on a host, of the environment of a lock with this content."""
    return f"envs/{content[2:34]}"


async def built(site: Site, content: str) -> bool:
    """Whether it is there already."""
    return await site.noted(f"{_home(site, content)}/complete")


async def python_of(chores: Chores, lock: Path, content: str) -> str:
    """The interpreter of the environment that `lock` describes, built if it is not there.  Raises CannotRun with pip's last words."""
    site = chores.site
    home = _home(site, content)
    python = f"{site.root}/{home}/bin/python"
    if await built(site, content):
        await site.note(f"{home}/complete")  # `gc` goes by when it was last wanted
        return python
    with site.ws.locks.hold(f"env-{os.path.basename(home)}"):
        if await built(site, content):
            return python
        text = _requirements(lock).encode() if lock.suffix == ".toml" else lock.read_bytes()
        # Our own pip, where we have one, works on the new environment from outside: giving it one of its own takes seconds.
        ours = site.python == sys.executable and find_spec("pip") is not None
        await _do(chores, [site.python, "-m", "venv", "--clear", *(["--without-pip"] if ours else []), f"{site.root}/{home}"], lock)
        pip = [site.python, "-m", "pip", "--python", python] if ours else [python, "-m", "pip"]
        wanted = {"requirements.txt": text}
        await _do(chores, [*pip, "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", "requirements.txt"], lock, wanted)
        await site.note(f"{home}/complete")
    return python


def _home(site: Site, content: str) -> str:
    """Two workspaces that use one host build there at the same time, and do not see each other's locks: each has its own."""
    home = str(site.ws.home)
    return name_of(content) if site.root == home else f"{name_of(content)}-{of_value('workspace', [gethostname(), home])[:8]}"


async def _do(chores: Chores, argv: list[str], lock: Path, files: Mapping[str, bytes] = NO_FILES) -> None:
    # pip finds its index, proxy, certificates and cache by the caller's environment; nothing of that gets into what it installs.
    inherited = list(os.environ) if chores.site.root == str(chores.site.ws.home) else []
    exit, said = await chores.do("environment", argv, pass_env=inherited, files=files)
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
