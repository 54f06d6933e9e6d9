"""Find the uv that installs packages: the local one, or a download for another kind of machine."""

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
"""Output of `uname -sm` -> the platform name of uv."""
_ALONE: Final = threading.Lock()
_PATIENCE: Final = 120.0
"""Seconds that the download may take."""


def find_uv() -> str:
    """Return the path of the local uv; empty if it is not installed."""
    try:
        import uv

        with _ALONE:  # concurrent first calls of sysconfig return incomplete data
            return str(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv") or ""


def fetch_uv(machine: str, cache: Path) -> str:
    """Return a uv for a machine with this `uname -sm`, stored below `cache`; empty if there is none."""
    local_uv = find_uv()
    if not local_uv or machine == f"{platform.system()} {platform.machine()}":
        return local_uv
    if machine not in PLATFORMS:
        return ""
    version = _version(local_uv)
    kept = cache / f"uv-{version}-{PLATFORMS[machine]}"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=cache) as folder,
            contextlib.suppress(OSError, subprocess.SubprocessError),
        ):
            made = f"{folder}/made"
            argv = [
                local_uv,
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
    words = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    ).stdout.split()
    return words[1] if len(words) > 1 else ""
