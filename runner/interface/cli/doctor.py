"""`recipe doctor`: check this machine and the workspace, or a driver's hosts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from drivers import devices, machine

from ...agent import cgroups
from ...hosts.probe import ProbeLine
from .flags import JSON_HELP

_PACKAGES: Final = ("torch", "accelerate", "transformers", "peft")
_FICLONE: Final = 0x40049409  # ioctl that shares the data of one file with another (linux/fs.h)


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "--driver",
        default="local",
        metavar="NAME",
        help="Driver whose hosts to check (default: local, this machine)",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="USER@NAME",
        help="Host to check instead of the hosts in recipe.toml. Repeatable",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(args: argparse.Namespace) -> int:
    found = (
        _away(args)
        if args.driver != "local" or args.host
        else [*_software(), *_machine(), *_workspace(args.workspace), *_training(), *_extensions()]
    )
    if args.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        width = max(len(finding.what) for finding in found)
        host = ""
        for finding in found:
            if finding.host != host:
                host = finding.host
                print(f"{host}:")
            if finding.state != "ok" or not args.quiet:
                print(
                    f"{finding.state:7}  {finding.what:{width}}  {finding.found}"
                    + (f": {finding.advice}" if finding.advice else "")
                )
    return 2 if any(finding.state == "missing" for finding in found) else 0


def _away(args: argparse.Namespace) -> list[ProbeLine]:
    import asyncio

    from ...hosts.probe import examine
    from ...hosts.renting.leases import create_driver
    from ...hosts.renting.several import driver_names
    from ...settings import load
    from ...storage.records.store import home
    from .flags import check_driver

    name = "ssh" if args.driver == "local" else args.driver  # `--host` alone means the driver ssh
    check_driver(name)
    root = Path(os.path.abspath(args.workspace))
    config, at = load(root, os.environ), str(home(root, os.environ))
    names = driver_names(config, name)
    found: list[ProbeLine] = []
    for each in names:
        seen = asyncio.run(examine(create_driver(each, config.driver(each), args.host, at)))
        if len(names) > 1:
            seen = [finding._replace(host=finding.host or each) for finding in seen]
        found += seen
    return found


def _software() -> Iterator[ProbeLine]:
    import sqlite3

    version = ".".join(map(str, sys.version_info[:3]))
    yield ProbeLine(
        "ok", "python", version
    )  # recipe cannot be installed with an unsupported version
    if sqlite3.sqlite_version_info >= (3, 51, 3):
        yield ProbeLine("ok", "sqlite", sqlite3.sqlite_version)
    else:
        # Not an error: the bug is in the write-ahead log, which the store never uses.
        yield ProbeLine(
            "ok",
            "sqlite",
            f"{sqlite3.sqlite_version} (its write-ahead log can be damaged by two writers before 3.51.3; recipe does not use it)",
        )
    git = shutil.which("git")
    yield (
        ProbeLine("ok", "git", git)
        if git
        else ProbeLine(
            "note",
            "git",
            "not found",
            "install it for recipes whose `code` comes from a repository",
        )
    )
    bash = shutil.which("bash")
    yield (
        ProbeLine("ok", "bash", bash)
        if bash
        else ProbeLine("note", "bash", "not found", "install it for steps with `shell: bash`")
    )


def _sandbox() -> ProbeLine:
    from ...hosts.sandbox import find_local_refusal

    if why := find_local_refusal():
        return ProbeLine("note", "sandbox", why, "allow user namespaces for steps with `sandbox`")
    return ProbeLine("ok", "sandbox", "user, mount, process and network namespaces")


def _machine() -> Iterator[ProbeLine]:
    cores, group = cgroups.processors()
    yield ProbeLine(
        "ok",
        "cores",
        f"{cores:g} (limit of this cgroup; the machine has {os.cpu_count()})"
        if group
        else f"{cores:g}",
    )
    memory, group = cgroups.memory()
    text = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    yield ProbeLine(
        "ok",
        "memory",
        f"{memory / 1e9:.1f} GB (limit of this cgroup; the machine has {text})" if group else text,
    )
    yield _sandbox()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    try:
        found = devices.here(os.environ)
    except devices.Hung:
        yield ProbeLine("missing", "gpus", machine.HUNG, machine.WEDGED)
        return
    if not found:
        yield ProbeLine(
            "note",
            "gpus",
            f"none{setting}",
            "for recipes that need a GPU, use another machine or a preset for CPUs (`--preset smoke`)",
        )
        return
    try:
        driver = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        driver = "driver unknown"
    names = ", ".join(
        f"{device.name} is {device.uuid}" if device.uuid not in ("", device.name) else device.name
        for device in found
    )
    yield ProbeLine("ok", "gpus", f"{len(found)} ({driver}{setting}): {names}")


def _extensions() -> Iterator[ProbeLine]:
    """Yield findings on recipes and drivers from other installed packages, and on faulty packages."""
    from ... import extensions
    from ...language import library

    for group, what in ((extensions.RECIPES, "recipes"), (extensions.DRIVERS, "driver")):
        for each in extensions.find_extensions(group):
            yield ProbeLine("ok", what, f"{each.name} ({each.target}) from {each.origin}")
    for problem in (*library.faults(), *extensions.driver_faults()):
        yield ProbeLine("note", "packages", problem.message, problem.fix)


def _overlay(folder: Path) -> ProbeLine:
    """Return a finding on overlays in `folder`, which let steps write to their inputs."""
    from ...hosts.place.overlays import BREAKS, find_refusal

    what = 'inputs = "overlay"'
    try:
        with tempfile.TemporaryDirectory(dir=folder) as trial:
            why = find_refusal(trial, trial)
    except OSError as error:
        why = f"{error.strerror}"
    if why:
        return ProbeLine("note", what, f"not supported: {why}", "steps get read-only inputs instead")
    return ProbeLine("ok", what, f"supported; {BREAKS}")


def _workspace(root: Path) -> Iterator[ProbeLine]:
    from ...storage.content.disk import file_system
    from ...storage.records.store import home

    if not root.is_dir():
        yield ProbeLine(
            "missing", "workspace", str(root), "not a directory; select the workspace with `-C`"
        )
        return
    folder = home(Path(os.path.abspath(root)), os.environ)
    if "RECIPE_HOME" in os.environ:
        yield ProbeLine("ok", "RECIPE_HOME", os.environ["RECIPE_HOME"])
    else:
        yield ProbeLine("ok", "RECIPE_HOME", f"not set; results are cached in {folder}")
    for what, place, advice in (
        ("workspace", root, "make it writable to publish results of recipe files here"),
        (
            "store",
            _nearest_folder(folder),
            "make it writable, or set RECIPE_HOME to a writable directory",
        ),
    ):
        trouble = _write_trouble(place)
        yield (
            ProbeLine("ok", what, f"{place}, writable")
            if not trouble
            else ProbeLine("missing", what, f"{place}: {trouble}", advice)
        )
    place = _nearest_folder(folder)
    kind, remote = file_system(place)
    if remote:
        yield ProbeLine(
            "missing",
            "file system",
            f"{kind}, a network file system",
            "set RECIPE_HOME to a directory on a local disk: locks and the store require one",
        )
    else:
        yield ProbeLine(
            "ok",
            "file system",
            f"{kind}, {'copies share disk blocks (reflinks)' if _reflinks(place) else 'no reflinks: each copy takes disk space'}",
        )
    yield _overlay(place)
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free"
    yield (
        ProbeLine("ok", "disk", text)
        if free >= 1e9
        else ProbeLine("note", "disk", text, "delete unused cached data with `recipe gc`")
    )


def _nearest_folder(folder: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _write_trouble(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _reflinks(folder: Path) -> bool:
    import fcntl

    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder) as one,
            tempfile.NamedTemporaryFile(dir=folder) as other,
        ):
            one.write(b"x" * 4096)
            one.flush()
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
    except OSError:
        return False
    return True


def _training() -> Iterator[ProbeLine]:
    """Yield findings on training packages; versions are read from metadata, as imports take seconds."""
    from importlib.metadata import PackageNotFoundError, version

    from drivers import install_line

    for name in _PACKAGES:
        try:
            yield ProbeLine("ok", name, version(name))
        except PackageNotFoundError:
            yield ProbeLine(
                "note", name, "not installed", f"{install_line('train')} to train on this machine"
            )
