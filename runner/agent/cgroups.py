"""Limits and counters of this process's cgroups, versions 1 and 2, including parent groups."""

from __future__ import annotations

import os

from .processes import read

TOP = "/sys/fs/cgroup"
OURS = "/proc/self/cgroup"


def folders(kind: str) -> list[str]:
    """Return the cgroup directories that limit `memory` or `cpu`, innermost first.

    In a container some may not exist, because the container sees its own group as the root.
    """
    found = []
    try:
        lines = os.fsdecode(read(OURS)).splitlines()
    except OSError:
        return []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        mount = f"{TOP}/{kind}" if kinds else TOP
        while path != "/":
            found.append(f"{mount}{path}")
            path = os.path.dirname(path)
        found.append(mount)
    return found


def memory() -> tuple[int, str]:
    """Return the available memory in bytes, and the directory of the limiting cgroup.

    The directory is empty if only the machine's memory is the limit.
    """
    most = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "")
    for folder in folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                most = min(most, (int(read(f"{folder}/{name}")), folder))
            except (OSError, ValueError):
                continue  # another cgroup version, or "max"
    return most


def processors() -> tuple[float, str]:
    """Return the number of usable CPUs, possibly a fraction, and the limiting cgroup or ""."""
    most = (
        float(
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        ),
        "",
    )
    for folder in folders("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = (
                    int(word) for name in names for word in read(f"{folder}/{name}").split()
                )
            except (OSError, ValueError):
                continue  # another cgroup version, or "max"
            if quota > 0:  # -1: unlimited
                most = min(most, (quota / period, folder))
    return most


def oom_kills() -> int:
    """Return the number of out-of-memory kills in this memory cgroup, or on the machine if unknown."""
    for file in [
        *(
            f"{folder}/{name}"
            for folder in folders("memory")
            for name in ("memory.events", "memory.oom_control")
        ),
        "/proc/vmstat",
    ]:
        try:
            for line in read(file).split(b"\n"):
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
        except OSError:
            continue
    return 0
