"""Names of processes that are unique across machines and time: `HOST/BOOT PID STARTTIME`."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """Return the name of this process."""
    return f"{machine()} {os.getpid()} {began(os.getpid())}"


def machine() -> str:
    """Return the name of this machine and its current boot."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def began(pid: int) -> str:
    """Return a process's start time in kernel ticks; empty for a missing or dead process."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        )
        return "" if state in "ZX" else fields[18]
    except (OSError, IndexError, ValueError):
        return ""


def lives(process: str) -> bool:
    """Return True if a process of this machine, given by its unique name, is alive.

    Additional words in the name are ignored.
    """
    _machine, pid, start, *_ = process.split(" ")
    return began(int(pid)) == start
