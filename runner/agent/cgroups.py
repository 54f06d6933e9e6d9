"""What the kernel lets this process have of its machine: the bounds of its cgroups, of version 2 and 1, and of those above them."""

from __future__ import annotations

import os

from .processes import read

TOP = "/sys/fs/cgroup"
OURS = "/proc/self/cgroup"


def folders(kind: str) -> list[str]:
    """Folders of the groups that bound us in `memory` or `cpu`, ours first.  In a container some may not be there: it sees its own as the topmost."""
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
    """Bytes that we may have, and the folder of the group that says so; empty where it is all that the machine has."""
    most = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "")
    for folder in folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                most = min(most, (int(read(f"{folder}/{name}")), folder))
            except (OSError, ValueError):
                continue  # not of this version, or "max"
    return most


def processors() -> tuple[float, str]:
    """Processors that we may use, maybe a part of one, and the folder of the group that says so; empty where none does."""
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
                continue  # not of this version, or "max"
            if quota > 0:  # -1: all
                most = min(most, (quota / period, folder))
    return most


def oom_kills() -> int:
    """How often the kernel has killed for memory: in our memory cgroup where it says so, else on this machine."""
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
