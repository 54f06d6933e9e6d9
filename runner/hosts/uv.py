"""The uv that installs packages: the one of this installation, and one for another kind of machine, fetched by it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PLATFORMS: Final[Mapping[str, str]] = {
    "Linux x86_64": "x86_64-manylinux2014",
    "Linux aarch64": "aarch64-manylinux2014",
}
"""What uv calls the machines that `uname -sm` names so."""
_ALONE: Final = threading.Lock()
_PATIENCE: Final = 120.0
"""Seconds that fetching it may take."""


def here() -> str:
    """The path of ours; empty where it was not installed with us."""
    try:
        import uv

        with _ALONE:  # the first two threads that ask sysconfig at once are answered half
            return str(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv") or ""


def of(machine: str, cache: Path) -> str:
    """The path, on this machine, of a uv that runs on a machine of that `uname -sm`; empty when it cannot be had here.  It is kept below `cache`."""
    ours = here()
    if not ours or machine == f"{platform.system()} {platform.machine()}":
        return ours
    if machine not in PLATFORMS:
        return ""
    version = _version(ours)
    kept = cache / f"uv-{version}-{PLATFORMS[machine]}"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=cache) as folder,
            contextlib.suppress(OSError, subprocess.SubprocessError),
        ):
            made = f"{folder}/made"
            argv = [
                ours,
                "pip",
                "install",
                "--no-config",
                "--target",
                made,
                "--python-platform",
                PLATFORMS[machine],
                "--no-deps",
                f"uv=={version}",
            ]
            subprocess.run(argv, capture_output=True, check=True, timeout=_PATIENCE)
            os.rename(f"{made}/bin/uv", kept)
    return str(kept) if kept.exists() else ""


def _version(program: str) -> str:
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    ).stdout.split()
    return said[1] if len(said) > 1 else ""
