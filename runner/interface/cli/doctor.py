"""`recipe doctor`: check this machine and the workspace, or a driver's hosts."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from drivers import devices, install_line, machine

from ... import extensions
from ...agent import cgroups
from ...hosts.place.overlays import BREAKS, find_refusal
from ...hosts.probe import ProbeLine, examine
from ...hosts.renting.any_driver import driver_names
from ...hosts.renting.leases import create_driver
from ...language import library
from ...settings import load
from ...storage.content.disk import file_system
from .flags import JSON_HELP, check_driver

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
    if args.driver != "local" or args.host:
        found = _examine_hosts(args)
    else:
        found = [
            *_software(),
            *_machine(),
            *_workspace(args.workspace),
            *_training(),
            *_extensions(),
        ]
    if args.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        _print_findings(found, only_problems=bool(args.quiet))
    if any(finding.state == "missing" for finding in found):
        return 2
    return 0


def _print_findings(found: Sequence[ProbeLine], *, only_problems: bool) -> None:
    """Print a line per finding, below the names of their hosts."""
    width = max(len(finding.what) for finding in found)
    host = ""
    for finding in found:
        if finding.host != host:
            host = finding.host
            print(f"{host}:")
        if finding.state != "ok" or not only_problems:
            advice = f": {finding.advice}" if finding.advice else ""
            print(f"{finding.state:7}  {finding.what:{width}}  {finding.found}{advice}")


def _examine_hosts(args: argparse.Namespace) -> list[ProbeLine]:
    """Examine the hosts or provider accounts of the driver, by default of the driver `ssh`."""
    from ...storage.records.store import home

    name = "ssh" if args.driver == "local" else args.driver
    check_driver(name)
    root = Path(os.path.abspath(args.workspace))
    config, store = load(root, os.environ), str(home(root, os.environ))
    names = driver_names(config, name)
    found: list[ProbeLine] = []
    for each in names:
        driver = create_driver(each, config.driver(each), args.host, store)
        findings = asyncio.run(examine(driver))
        if len(names) > 1:
            findings = [finding._replace(host=finding.host or each) for finding in findings]
        found += findings
    return found


def _software() -> Iterator[ProbeLine]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield ProbeLine(
        "ok", "python", version
    )  # recipe cannot be installed with an unsupported version
    sqlite = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 51, 3):
        # Not an error: the bug is in the write-ahead log, which the store never uses.
        sqlite += " (its write-ahead log can be damaged by two writers before 3.51.3; recipe does not use it)"
    yield ProbeLine("ok", "sqlite", sqlite)
    for program, advice in (
        ("git", "install it for recipes whose `code` comes from a repository"),
        ("bash", "install it for steps with `shell: bash`"),
    ):
        path = shutil.which(program)
        if path:
            yield ProbeLine("ok", program, path)
        else:
            yield ProbeLine("note", program, "not found", advice)


def _sandbox() -> ProbeLine:
    from ...hosts.sandbox import find_local_refusal

    why = find_local_refusal()
    if why:
        return ProbeLine("note", "sandbox", why, "allow user namespaces for steps with `sandbox`")
    return ProbeLine("ok", "sandbox", "user, mount, process and network namespaces")


def _machine() -> Iterator[ProbeLine]:
    cores, cgroup = cgroups.processors()
    limit = f" (limit of this cgroup; the machine has {os.cpu_count()})" if cgroup else ""
    yield ProbeLine("ok", "cores", f"{cores:g}{limit}")
    memory, cgroup = cgroups.memory()
    installed = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    limited = f"{memory / 1e9:.1f} GB (limit of this cgroup; the machine has {installed})"
    usable = limited if cgroup else installed
    yield ProbeLine("ok", "memory", usable)
    yield _sandbox()
    yield _gpus()


def _gpus() -> ProbeLine:
    """Return a finding on the GPUs, with the NVIDIA driver and CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    try:
        found = devices.here(os.environ)
    except devices.Hung:
        return ProbeLine("missing", "gpus", machine.HUNG, machine.WEDGED)
    if not found:
        advice = "for recipes that need a GPU, use another machine or a preset for CPUs (`--preset smoke`)"
        return ProbeLine("note", "gpus", f"none{setting}", advice)
    try:
        driver = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        driver = "driver unknown"
    names = []
    for device in found:
        has_uuid = device.uuid not in ("", device.name)
        name = f"{device.name} is {device.uuid}" if has_uuid else device.name
        names.append(name)
    return ProbeLine("ok", "gpus", f"{len(found)} ({driver}{setting}): {', '.join(names)}")


def _extensions() -> Iterator[ProbeLine]:
    """Yield findings on recipes and drivers from other installed packages, and on faulty packages."""
    for group, what in ((extensions.RECIPES, "recipes"), (extensions.DRIVERS, "driver")):
        for each in extensions.find_extensions(group):
            yield ProbeLine("ok", what, f"{each.name} ({each.target}) from {each.origin}")
    for problem in (*library.faults(), *extensions.driver_faults()):
        yield ProbeLine("note", "packages", problem.message, problem.fix)


def _overlay(folder: Path) -> ProbeLine:
    """Return a finding on overlays in `folder`, which let steps write to their inputs."""
    what = 'inputs = "overlay"'
    try:
        with tempfile.TemporaryDirectory(dir=folder) as trial:
            why = find_refusal(trial, trial)
    except OSError as error:
        why = f"{error.strerror}"
    if why:
        return ProbeLine(
            "note", what, f"not supported: {why}", "steps get read-only inputs instead"
        )
    return ProbeLine("ok", what, f"supported; {BREAKS}")


def _workspace(root: Path) -> Iterator[ProbeLine]:
    from ...storage.records.store import home

    if not root.is_dir():
        advice = "not a directory; select the workspace with `-C`"
        yield ProbeLine("missing", "workspace", str(root), advice)
        return
    folder = home(Path(os.path.abspath(root)), os.environ)
    setting = os.environ.get("RECIPE_HOME", f"not set; results are cached in {folder}")
    yield ProbeLine("ok", "RECIPE_HOME", setting)
    store = _nearest_folder(folder)
    yield _writable("workspace", root, "make it writable to publish results of recipe files here")
    yield _writable("store", store, "make it writable, or set RECIPE_HOME to a writable directory")
    yield _file_system(store)
    yield _overlay(store)
    yield _disk(store)


def _writable(what: str, folder: Path, advice: str) -> ProbeLine:
    trouble = _write_trouble(folder)
    if trouble:
        return ProbeLine("missing", what, f"{folder}: {trouble}", advice)
    return ProbeLine("ok", what, f"{folder}, writable")


def _file_system(folder: Path) -> ProbeLine:
    kind, is_remote = file_system(folder)
    if is_remote:
        advice = "set RECIPE_HOME to a directory on a local disk: locks and the store require one"
        return ProbeLine("missing", "file system", f"{kind}, a network file system", advice)
    if _reflinks(folder):
        return ProbeLine("ok", "file system", f"{kind}, copies share disk blocks (reflinks)")
    return ProbeLine("ok", "file system", f"{kind}, no reflinks: each copy takes disk space")


def _disk(folder: Path) -> ProbeLine:
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free"
    if free < 1e9:
        return ProbeLine("note", "disk", text, "delete unused cached data with `recipe gc`")
    return ProbeLine("ok", "disk", text)


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

    for name in _PACKAGES:
        try:
            yield ProbeLine("ok", name, version(name))
        except PackageNotFoundError:
            yield ProbeLine(
                "note", name, "not installed", f"{install_line('train')} to train on this machine"
            )
