"""A Python environment from a lock, of a version of Python, or both: made once.  The builder, a program on the host, makes it.

A hash-pinned requirements file goes there as it is; a pylock.toml (PEP 751) and a uv.lock are first written as one, since few pips read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..digest import of_value
from ..errors import CannotRun
from ..language.units import about, duration_text
from ..paths import cache_folder
from ..reading import whole
from ..storage.locks import Lock
from . import uv
from .link.contact import ask_program
from .place.hooks import INSTALL, Hooks
from .place.place import Place

_PROGRAM = Path(__file__).with_name("_builder.py")
LOOK = 0.2
"""Seconds between looks whether another run has built it."""


_MACHINE: Final = "import os; u = os.uname(); print(u.sysname, u.machine)"
_FIND: Final = r"""
for python in "$2" "$(command -v "python$1")" \
    "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$1"[.-]*"/bin/python$1" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*"/bin/python$1" "/opt/python/$1/bin/python$1" "/usr/local/bin/python$1"; do
    [ -x "$python" ] && [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ] && echo "$python" && exit
done; :
"""
"""Prints the path of a Python of version $1: $2 if it is one, else one of PATH or of uv's and pyenv's; nothing where none is."""


class Wanted(NamedTuple):
    """What an environment is of: a lock, where it is and its content (both may be empty), and a version of Python (empty: any)."""

    lock: Path | None
    content: str
    version: str

    @property
    def name(self) -> str:
        """Its folder, below our root on a host."""
        parts = (self.content[2:34], self.version and f"python{self.version}")
        return f"envs/{'-'.join(part for part in parts if part)}"

    def __str__(self) -> str:
        return " of ".join(
            part
            for part in (self.version and f"Python {self.version}", str(self.lock or ""))
            if part
        )


async def python_there(place: Place, version: str) -> str:
    """A Python of that version on that machine.  Raises CannotRun."""
    home = place.login.get("HOME", "")
    find = (
        "/bin/sh",
        "-c",
        f"PATH=$3 HOME=${{4:-$HOME}}{_FIND}",
        "sh",
        version,
        place.python,
        place.path,
        home,
    )
    found = (await ask_program(place.host.call, find)).decode(errors="replace").strip()
    if not found:
        fix = f"install it there, as with `uv python install {version}`, or ask for another version"
        raise CannotRun(f"Python {version} is not on {place.elsewhere or 'this machine'}", fix=fix)
    return found


async def is_built(place: Place, wanted: Wanted) -> bool:
    """Whether it is there already.  Without its interpreter, of a Python that was removed since, it is none."""
    home = _home(place, wanted)
    return await place.folder.noted(f"{home}/complete") and await place.folder.noted(
        f"{home}/bin/python"
    )


async def python_of(hooks: Hooks, wanted: Wanted, say: Callable[[str], None]) -> str:
    """The interpreter of that environment, built if it is not there; `say` hears how far it is.  Raises CannotRun."""
    place = hooks.place
    home = _home(place, wanted)
    if wanted.lock is None and await python_there(place, wanted.version) == place.python:
        return place.python
    if not await is_built(place, wanted):
        # On another machine the builder's own lock is enough: `gc` does not go there.
        with (
            await _turn(hooks, os.path.basename(home), say)
            if place.folder.root == str(place.ws.home)
            else contextlib.nullcontext()
        ):
            await _build(hooks, wanted, f"{place.folder.root}/{home}", say)
    await place.folder.note(f"{home}/complete")  # `gc` goes by when it was last wanted
    return f"{place.folder.root}/{home}/bin/python"


def _home(place: Place, wanted: Wanted) -> str:
    """On a host of several workspaces they share it, as far as they ask for the same Python there."""
    return (
        wanted.name
        if place.folder.root == str(place.ws.home)
        else f"{wanted.name}-{of_value('python', place.python)[:8]}"
    )


async def _turn(hooks: Hooks, name: str, say: Callable[[str], None]) -> Lock:
    """Hold the environment against `gc` and other runs here.  Raises CannotRun when we are stopped meanwhile."""
    locks = hooks.place.ws.locks
    lock = locks.try_hold(f"env-{name}")
    if lock is None:
        say(f"{locks.holder(f'env-{name}')} is installing them; this run waits")
    while lock is None and not hooks.stopped(INSTALL):
        await asyncio.sleep(LOOK)
        lock = locks.try_hold(f"env-{name}")
    if lock is None:
        raise CannotRun("stopped while another run installed what it needs")
    return lock


async def _build(hooks: Hooks, wanted: Wanted, home: str, say: Callable[[str], None]) -> None:
    lock = wanted.lock
    text = b"" if lock is None else await asyncio.to_thread(_text, lock)
    installer = (
        await python_there(hooks.place, wanted.version) if wanted.version else hooks.place.installer
    )
    # Index, proxy, certificates and cache are found by the caller's environment; nothing of that gets into what is installed.
    inherited = list(os.environ) if hooks.place.folder.root == str(hooks.place.ws.home) else []
    files = {"builder.py": _PROGRAM.read_bytes(), "requirements.txt": text}
    last: dict[str, Any] = {}

    def hear(line: bytes) -> None:
        nonlocal last
        with contextlib.suppress(ValueError):
            parsed = json.loads(line)
            last = parsed if isinstance(parsed, dict) else last
            if last is parsed and "says" in last:
                say(last["says"])

    argv = [
        installer,
        "-I",
        "builder.py",
        home,
        *(("requirements.txt", await _uv(hooks.place)) if lock else ("",)),
    ]
    exit, said = await hooks.do(INSTALL, argv, pass_env=inherited, files=files, hear=hear)
    if exit.code != 0:
        words = last.get("wrong") or " ".join(said.split()) or exit.reason
        where = (
            f" on {hooks.place.name}" if hooks.place.folder.root != str(hooks.place.ws.home) else ""
        )
        raise CannotRun(
            f"the environment of {wanted} cannot be built{where}: {words}",
            fix=last.get("fix", "correct the lock, or use --python current"),
        )
    if lock and (done := last.get("done")):
        many = f"{done['packages']} package{'s' if done['packages'] != 1 else ''}"
        say(f"{many}, {about(done['bytes'])}, installed in {duration_text(round(done['seconds']))}")


async def _uv(place: Place) -> str:
    """A uv for that machine, brought there; empty where none can be had, and pip does its work."""
    if not place.elsewhere:
        return uv.here()
    machine = (
        (await ask_program(place.host.call, (place.installer, "-c", _MACHINE)))
        .decode(errors="replace")
        .strip()
    )
    found = await asyncio.to_thread(uv.of, machine, Path(cache_folder(os.environ)))
    return await place.folder.program(found) if found else ""


def _whole(lock: Path) -> bytes:
    try:
        return whole(lock)
    except OSError as error:
        raise CannotRun(
            f"{lock} cannot be read: {error.strerror}",
            fix="make it again with the tool that locks packages",
        ) from error


def _text(lock: Path) -> bytes:
    """A lock as a hash-pinned requirements file.  Raises CannotRun."""
    if lock.name == "uv.lock":
        return _export_requirements(lock)
    return _requirements(lock).encode() if lock.suffix == ".toml" else _whole(lock)


def _export_requirements(lock: Path) -> bytes:
    """What a project of uv needs, without itself and what it is developed with: a step's own code comes by `code`.  Raises CannotRun."""
    words = (
        "--frozen",
        "--no-emit-workspace",
        "--no-dev",
        "--no-annotate",
        "--no-header",
        "--format",
        "requirements.txt",
    )
    argv = [uv.here(), "export", "--quiet", *words, "--project", str(lock.parent)]
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            check=True,
            env={**os.environ, "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never"},
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = " ".join(
            (getattr(error, "stderr", b"") or b"").decode(errors="replace").split()
        ) or str(error)
        raise CannotRun(
            f"{lock} cannot be read: {said[:1000]}",
            fix="make it again with `uv lock`; its pyproject.toml has to lie beside it",
        ) from error


def _requirements(lock: Path) -> str:
    """A pylock.toml as a hash-pinned requirements file.  Raises CannotRun when it is damaged or pins what has no version."""
    try:
        packages = tomllib.loads(_whole(lock).decode())["packages"]
        return "".join(_requirement(package) for package in packages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotRun(
            f"{lock} cannot be read as a pylock.toml: {error}",
            fix="make it again, as with `uv export --format pylock.toml`",
        ) from error


def _requirement(package: Mapping[str, Any]) -> str:
    if "version" not in package or not (package.get("wheels") or package.get("sdist")):
        raise ValueError(
            f"{package['name']} has no version with wheels or an sdist: a folder or a repository cannot be pinned by hash"
        )
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
    hashes = [
        f"--hash={kind}:{digest}"
        for file in files
        for kind, digest in file["hashes"].items()
        if kind in ("sha256", "sha384", "sha512")
    ]
    marker = f" ; {package['marker']}" if "marker" in package else ""
    return f"{package['name']}=={package['version']}{marker} {' '.join(dict.fromkeys(hashes))}\n"
