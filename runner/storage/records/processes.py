"""Processes by names that other machines may store: `HOST/BOOT PID BEGAN`, which no later process has."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """The name of this process."""
    return f"{machine()} {os.getpid()} {began(os.getpid())}"


def machine() -> str:
    """This machine, from one start of it to the next."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def began(pid: int) -> str:
    """When a process began, by the kernel's own count; empty for one that is not there, or is dead and was not waited for."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        )
        return "" if state in "ZX" else fields[18]
    except (OSError, IndexError, ValueError):
        return ""


def lives(process: str) -> bool:
    """Whether a process of this machine is alive, by its name; more words behind it are no part of that."""
    _machine, pid, start, *_ = process.split(" ")
    return began(int(pid)) == start
