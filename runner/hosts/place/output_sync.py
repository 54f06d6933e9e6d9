"""Copy outputs with `sync` while their step still runs, for inspection.

A copy may contain a half-written file.  No step reads it: the output itself is collected when the
step finishes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from drivers.base import DriverError

from ...errors import Corrupt, RecipeError
from ...storage.content.disk import delete
from ...storage.content.files import Entry

if TYPE_CHECKING:
    from ..transfer.host_store import HostStore


class SyncedOutput(NamedTuple):
    """One output: its path in the attempt, whether it is a directory, and the seconds between two
    copies.
    """

    path: str
    folder: bool
    every: float


async def follow(
    host_store: HostStore,
    attempt: str,
    folder: str,
    partial: str,
    outputs: Sequence[SyncedOutput],
    say: Callable[[str], None],
) -> None:
    """Copy `outputs` from the directory `attempt` on the host to the local `folder`, until
    cancelled.

    `partial` is a path on the same disk as `folder`.

    The first copy of each output is reported.  After a connection error or a change during the
    copy, the next interval tries again.
    """
    copied: dict[str, str] = {}
    due = {output: time.monotonic() + output.every for output in outputs}
    try:
        while True:
            await asyncio.sleep(max(0.0, min(due.values()) - time.monotonic()))
            now = time.monotonic()
            ready = [output for output, at in due.items() if at <= now]
            for output in ready:
                try:
                    content = await _bring(
                        host_store, attempt, folder, partial, output, copied.get(output.path, "")
                    )
                    if content and output.path not in copied:
                        say(
                            f"partial copy of {output.path}: {os.path.relpath(folder)}/{output.path}"
                        )
                    copied[output.path] = content or copied.get(output.path, "")
                except (DriverError, Corrupt):
                    pass  # the wait for the step's end reports an unreachable host
                except RecipeError as error:  # the local disk is full: do not disturb the step
                    say(f"cannot copy {output.path} before the step finishes: {error}")
                    return
                due[output] = time.monotonic() + output.every
    finally:
        _clear(partial)


async def _bring(
    host_store: HostStore,
    attempt: str,
    folder: str,
    partial: str,
    output: SyncedOutput,
    copied: str,
) -> str:
    """Copy an output if its content has changed.  Returns the content; empty if there is no output yet."""
    hashed = (await host_store.hash_outputs(attempt, [output.path])).outputs[output.path]
    if output.folder and hashed.kind != "d":
        return ""
    if not hashed.content or hashed.content == copied:
        return hashed.content
    target = Path(folder, output.path)
    await asyncio.to_thread(_seed, target, f"{partial}.coming", hashed.entries)
    await host_store.fetch(f"{attempt}/{output.path}", hashed, partial)
    await asyncio.to_thread(_swap, Path(partial), target)
    return hashed.content


def _seed(last: Path, coming: str, entries: Sequence[Entry]) -> None:
    """Link unchanged files of the previous copy into the new one.

    The transfer keeps correct files and extends grown ones.
    """
    _clear(coming.removesuffix(".coming"))
    if not last.is_dir():
        return
    for entry in entries:
        old = last / entry.path
        if entry.kind in "fx" and _may_be_unchanged(old, entry.size):
            new = Path(coming, entry.path)
            new.parent.mkdir(parents=True, exist_ok=True)
            os.link(old, new)


def _may_be_unchanged(path: Path, size: int) -> bool:
    """Return whether a path is a regular file that may be the whole or the start of `size` bytes."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= size


def _swap(new: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        delete(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(new, target)


def _clear(partial: str) -> None:
    for path in (partial, f"{partial}.coming"):
        delete(Path(path))
