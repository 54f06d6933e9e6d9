"""Python lock files: find the lock for `python: {lock: …}`, and create one from unpinned
requirements.

Requirements with hashes, pylock.toml and uv.lock are locks. requirements.txt without hashes becomes
requirements.lock. pyproject.toml uses its uv.lock, else becomes pyproject.lock. A lock by recipe
records its source and is recreated after a change. Other locks are used as they are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..digest import of_bytes
from ..errors import CannotRun
from ..paths import temporary_name
from ..reading import whole

_HEAD = re.compile(rb"# Made by recipe lock from [^\n]* \(([0-9a-f]{16})\)")


def lock_file(path: Path) -> Path:
    """Return the path of the lock file for a recipe's `lock`, which may not exist yet."""
    if path.name == "pyproject.toml":
        uv_lock = path.with_name("uv.lock")
        return uv_lock if uv_lock.exists() else path.with_suffix(".lock")
    if path.suffix not in (".txt", ".in"):
        return path
    try:
        pinned = b"--hash=" in whole(path)
    except OSError:
        return path
    return path if pinned else path.with_suffix(".lock")


def is_current(path: Path) -> bool:
    """Return True if the lock file is current and need not be created again."""
    lock = lock_file(path)
    if lock == path or lock.name == "uv.lock":
        return True
    try:
        made = _HEAD.match(whole(lock))
        return made is None or made[1] == _digest(path)
    except OSError:
        return not path.exists()


def make_lock(
    path: Path, environ: Mapping[str, str], *, python: str = "", upgrade: bool = False
) -> Path:
    """Create the lock file for requirements or a pyproject.toml, preserving existing pins.

    Raises CannotRun.

    `environ` is uv's environment. `python` is the lowest supported version (default: this
    interpreter's), and `upgrade` ignores existing pins.
    """
    from ..hosts import uv

    lock = lock_file(path)
    version = python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    program = uv.find_uv()
    if not program:
        raise CannotRun(f"cannot lock {path}: uv is not installed", fix="run `pip install uv`")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.lock")
        # uv keeps the pins of an output file that exists already.
        if lock.exists() and not upgrade:
            shutil.copy(lock, made)
        _compile_pins(program, path, made, version, environ)
        head = f"# Made by recipe lock from {path.name} ({_digest(path).decode()}): Python {version} and newer.\n"
        new = lock.with_name(temporary_name(lock.name))
        try:
            new.write_text(head + made.read_text(encoding="utf-8"), encoding="utf-8")
            new.replace(lock)
        except OSError as error:
            raise CannotRun(
                f"cannot write {lock}: {error.strerror}",
                fix="free disk space, or allow writing to this directory",
            ) from error
    return lock


def _compile_pins(
    program: str, path: Path, made: Path, version: str, environ: Mapping[str, str]
) -> None:
    """Write the pinned requirements of `path` to `made` with `uv pip compile`. Raises CannotRun."""
    from ..hosts._builder import no_index_option, translate_pip_settings

    words = (
        "--universal",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--python-version",
        version,
        *no_index_option(environ),
    )
    argv = [program, "pip", "compile", "--quiet", *words, "--output-file", str(made), path.name]
    env = {
        **translate_pip_settings(environ),
        **environ,
        "NO_COLOR": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    done = subprocess.run(
        argv,
        cwd=path.parent,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("error: ")
        raise CannotRun(
            f"cannot lock {path}: {said[:1000]}",
            fix="correct the file, or check the network and the package index",
        )


def _digest(path: Path) -> bytes:
    return of_bytes(whole(path))[:16].encode()
