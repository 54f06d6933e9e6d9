"""Processes of this machine: which there are, how one is ended, whether one was killed for want of memory.  Linux: /proc."""

from __future__ import annotations

import os


def processes() -> dict[int, tuple[int, int, int]]:
    """Living processes: pid -> parent, group, session."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent, group, session = read(f"/proc/{entry}/stat").rpartition(b")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                table[int(entry)] = (int(parent), int(group), int(session))
    return table


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def oom_kills() -> int:
    """How often the kernel has killed for memory: in our memory cgroup where it says so, else on this machine."""
    try:
        groups = read("/proc/self/cgroup").split(b"\n")
    except OSError:
        groups = []
    candidates = []
    for line in groups:
        _, _, rest = line.partition(b":")
        kinds, _, path = rest.partition(b":")
        if kinds == b"memory":
            candidates += [b"/sys/fs/cgroup/memory" + path + b"/memory.oom_control", b"/sys/fs/cgroup/memory/memory.oom_control"]
        elif not kinds and path:
            candidates += [b"/sys/fs/cgroup" + path + b"/memory.events"]
    for file in [*candidates, b"/proc/vmstat"]:
        try:
            for line in read(file).split(b"\n"):
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
        except OSError:
            continue
    return 0


def read(path: str | bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def words(error: OSError) -> bytes:
    return os.fsencode(error.strerror or str(error))
