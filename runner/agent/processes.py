"""Processes of this machine, from /proc, and signals to them."""

from __future__ import annotations

import os


def processes() -> dict[int, tuple[int, int, int]]:
    """Return the parent, process group and session of each living process, by PID."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent, group, session = (
                    read(f"/proc/{entry}/stat").rpartition(b")")[2].split()[:4]
                )
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


def read(path: str | bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def words(error: OSError) -> bytes:
    return os.fsencode(error.strerror or str(error))
