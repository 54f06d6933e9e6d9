"""Python environments from a lock, a Python version, or both.

Each is created once per host by the program `_builder.py`.

The host gets a requirements file with hashes.  A pylock.toml (PEP 751) or a uv.lock is converted
first, because few versions of pip read these files.
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
from ..language.units import about, count_text, duration_text
from ..paths import cache_folder
from ..reading import whole
from ..storage.locks import Lock
from . import uv
from .link.contact import ask_program
from .place.hooks import INSTALL, Hooks
from .place.place import Place

_PROGRAM = Path(__file__).with_name("_builder.py")
_HASHES_OF_PIP: Final = ("sha256", "sha384", "sha512")
LOOK = 0.2
"""Seconds between two checks whether another run has built the environment."""


_MACHINE: Final = "import os; u = os.uname(); print(u.sysname, u.machine)"
_FIND: Final = r"""
for python in "$2" "$(command -v "python$1")" \
    "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$1"[.-]*"/bin/python$1" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*"/bin/python$1" "/opt/python/$1/bin/python$1" "/usr/local/bin/python$1"; do
    [ -x "$python" ] && [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ] && echo "$python" && exit
done; :
"""
"""Script: print the path of a Python with version $1; nothing if none is found.

It prefers $2, then a Python in PATH, of uv or of pyenv.
"""


class EnvironmentSpec(NamedTuple):
    """The lock and the Python version of an environment.

    Without a lock, `lock` is None and `content` is empty.  An empty version stands for any.
    """

    lock: Path | None
    content: str
    version: str

    @property
    def name(self) -> str:
        """The environment's directory below the root of a host."""
        parts = (self.content[2:34], self.version and f"python{self.version}")
        return f"envs/{'-'.join(filter(None, parts))}"

    def __str__(self) -> str:
        parts = (self.version and f"Python {self.version}", str(self.lock or ""))
        return " of ".join(filter(None, parts))


async def find_python(place: Place, version: str) -> str:
    """Find a Python of a version on the machine of a place.  Raises CannotRun."""
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
    python = (await ask_program(place.host.call, find)).decode(errors="replace").strip()
    if not python:
        fix = f"install Python {version}, for example with `uv python install {version}`, or change `version` in the recipe"
        raise CannotRun(
            f"Python {version} is not installed on {place.elsewhere or 'this machine'}", fix=fix
        )
    return python


async def is_built(place: Place, wanted: EnvironmentSpec) -> bool:
    """Return whether the environment exists.  It does not count if its base Python was removed."""
    home = _environment_folder(place, wanted)
    return await place.folder.has_marker(f"{home}/complete") and await place.folder.has_marker(
        f"{home}/bin/python"
    )


async def provide_python(hooks: Hooks, wanted: EnvironmentSpec, say: Callable[[str], None]) -> str:
    """Return the interpreter of an environment, built if necessary.

    `say` receives the progress.  Raises CannotRun.
    """
    place = hooks.place
    home = _environment_folder(place, wanted)
    if wanted.lock is None and await find_python(place, wanted.version) == place.python:
        return place.python
    if not await is_built(place, wanted):
        lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        # On another machine the builder's own lock is enough, because `gc` does not run there.
        if place.folder.root == str(place.ws.home):
            lock = await _wait_for_lock(hooks, os.path.basename(home), say)
        with lock:
            await _build(hooks, wanted, f"{place.folder.root}/{home}", say)
    await place.folder.write_marker(f"{home}/complete")  # `gc` uses the time of the last use
    return f"{place.folder.root}/{home}/bin/python"


def _environment_folder(place: Place, wanted: EnvironmentSpec) -> str:
    """Return the environment's directory below the root.

    On another host, workspaces with the same Python share the directory.
    """
    return (
        wanted.name
        if place.folder.root == str(place.ws.home)
        else f"{wanted.name}-{of_value('python', place.python)[:8]}"
    )


async def _wait_for_lock(hooks: Hooks, name: str, say: Callable[[str], None]) -> Lock:
    """Lock the environment against `gc` and other local runs.

    Raises CannotRun if the installation is stopped while it waits.
    """
    locks = hooks.place.ws.locks
    lock = locks.try_hold(f"env-{name}")
    if lock is None:
        say(f"{locks.holder(f'env-{name}')} is installing the packages; waiting")
    while lock is None and not hooks.is_stopped(INSTALL):
        await asyncio.sleep(LOOK)
        lock = locks.try_hold(f"env-{name}")
    if lock is None:
        raise CannotRun("stopped while it waited for another run to install the same packages")
    return lock


async def _build(
    hooks: Hooks, wanted: EnvironmentSpec, home: str, say: Callable[[str], None]
) -> None:
    lock, place = wanted.lock, hooks.place
    text = b"" if lock is None else await asyncio.to_thread(_requirements_of, lock)
    installer = place.installer
    if wanted.version:
        installer = await find_python(place, wanted.version)
    is_here = place.folder.root == str(place.ws.home)
    # Index, proxy, certificates and cache come from the user's environment; they do not change the
    # installed packages.
    inherited = list(os.environ) if is_here else []
    files = {"builder.py": _PROGRAM.read_bytes(), "requirements.txt": text}
    last: dict[str, Any] = {}

    def on_line(line: bytes) -> None:
        nonlocal last
        with contextlib.suppress(ValueError):
            parsed = json.loads(line)
            last = parsed if isinstance(parsed, dict) else last
            if last is parsed and "says" in last:
                say(last["says"])

    argv = [installer, "-I", "builder.py", home]
    if lock:
        argv += ["requirements.txt", await _provide_uv(place)]
    else:
        argv.append("")
    exit, output = await hooks.run_command(
        INSTALL, argv, pass_env=inherited, files=files, on_line=on_line
    )
    if exit.code != 0:
        reason = last.get("wrong") or " ".join(output.split()) or exit.reason
        where = "" if is_here else f" on {place.name}"
        raise CannotRun(
            f"cannot create the environment of {wanted}{where}: {reason}",
            fix=last.get("fix", "correct the lock, or use --python current"),
        )
    done = last.get("done")
    if lock and done:
        say(_describe_build(done))


def _describe_build(done: Mapping[str, Any]) -> str:
    packages = count_text(done["packages"], "package")
    duration = duration_text(round(done["seconds"]))
    return f"{packages}, {about(done['bytes'])}, installed in {duration}"


async def _provide_uv(place: Place) -> str:
    """Return a uv for the machine of a place, uploaded if necessary; empty if pip must be used."""
    if not place.elsewhere:
        return uv.find_uv()
    machine = (
        (await ask_program(place.host.call, (place.installer, "-c", _MACHINE)))
        .decode(errors="replace")
        .strip()
    )
    program = await asyncio.to_thread(uv.fetch_uv, machine, Path(cache_folder(os.environ)))
    return await place.folder.provide_program(program) if program else ""


def _read_lock(lock: Path) -> bytes:
    try:
        return whole(lock)
    except OSError as error:
        raise CannotRun(
            f"cannot read {lock}: {error.strerror}",
            fix="create the lock file again",
        ) from error


def _requirements_of(lock: Path) -> bytes:
    """Return a lock as a requirements file with hashes.  Raises CannotRun."""
    if lock.name == "uv.lock":
        return _export_requirements(lock)
    return _requirements(lock).encode() if lock.suffix == ".toml" else _read_lock(lock)


def _export_requirements(lock: Path) -> bytes:
    """Return the dependencies of a uv project without the project and its development group.

    Raises CannotRun.
    """
    words = (
        "--frozen",
        "--no-emit-workspace",
        "--no-dev",
        "--no-annotate",
        "--no-header",
        "--format",
        "requirements.txt",
    )
    argv = [uv.find_uv(), "export", "--quiet", *words, "--project", str(lock.parent)]
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            check=True,
            env={**os.environ, "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never"},
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        message = " ".join(
            (getattr(error, "stderr", b"") or b"").decode(errors="replace").split()
        ) or str(error)
        raise CannotRun(
            f"cannot read {lock}: {message[:1000]}",
            fix="create it again with `uv lock`, next to its pyproject.toml",
        ) from error


def _requirements(lock: Path) -> str:
    """Return a pylock.toml as a requirements file with hashes.

    Raises CannotRun if it is damaged or pins a package without a version.
    """
    try:
        packages = tomllib.loads(_read_lock(lock).decode())["packages"]
        return "".join(_requirement(package) for package in packages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotRun(
            f"{lock} is not a valid pylock.toml: {error}",
            fix="create it again, for example with `uv export --format pylock.toml`",
        ) from error


def _requirement(package: Mapping[str, Any]) -> str:
    if "version" not in package or not (package.get("wheels") or package.get("sdist")):
        raise ValueError(
            f"{package['name']} has no wheels or sdist: a directory or repository cannot be pinned by hash"
        )
    files = [*package.get("wheels", ())]
    if "sdist" in package:
        files.append(package["sdist"])
    hashes: dict[str, None] = {}  # ordered, and without duplicates
    for file in files:
        for kind, digest in file["hashes"].items():
            if kind in _HASHES_OF_PIP:
                hashes[f"--hash={kind}:{digest}"] = None
    marker = f" ; {package['marker']}" if "marker" in package else ""
    return f"{package['name']}=={package['version']}{marker} {' '.join(hashes)}\n"
