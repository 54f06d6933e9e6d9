"""Collect the outputs of an attempt on another disk.

They are hashed on the host, downloaded, and kept on the host for downstream steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from drivers.base import DriverError, Exit

from ...errors import RecipeError
from ...planning.step import DIRECTORY, NONEMPTY, OPTIONAL, TEMPORARY
from ...storage.workspace import Workspace
from .folder import RemoteFolder
from .host_task import HostTask, Paths, TaskResult
from .staging import AttemptDirectory

if TYPE_CHECKING:
    from ..transfer.host_store import HostStore

REMAINS_EACH, REMAINS_ALL, REMAINS_COUNT = 1 << 20, 16 << 20, 200
"""Download limits for a failed attempt's leftover files: bytes per file, total bytes, files."""


class Collector:
    """Collects the results of one attempt.  `paths` are on the host; `folder` knows the contents stored there."""

    def __init__(
        self,
        ws: Workspace,
        host_store: HostStore,
        folder: RemoteFolder,
        task: HostTask,
        paths: Paths,
    ) -> None:
        self._ws, self._host_store, self._folder, self._task, self._paths = (
            ws,
            host_store,
            folder,
            task,
            paths,
        )

    async def collect_outputs(self, exit: Exit) -> TaskResult:
        """Hash the outputs on the host, download them, and keep them in the host's store.

        Temporary outputs are not downloaded.
        """
        task, paths, outputs = self._task, self._paths, self._task.outputs
        if (
            not outputs
            and not task.attempt.staged
            and not task.attempt.links
            and not task.attempt.objects
            and not task.rejoined
        ):
            return TaskResult(exit)  # no inputs were staged and no outputs are declared
        harvest = await self._host_store.hash_outputs(
            paths.cwd, [(path, bool(flags & DIRECTORY)) for _, path, flags in outputs]
        )
        if harvest.changed:
            self._folder.contents.difference_update(harvest.changed)
            return TaskResult(
                exit,
                problem="input",
                words=f"the step changed its input {_input_name(task.attempt, harvest.changed[0])}",
            )
        in_place = (
            self._host_store.shared_disk.host_sees_workspace
        )  # the step may have read an input from the shared disk
        if in_place and (
            words := await asyncio.to_thread(
                task.attempt.find_changed_input, self._ws.cache, self._ws.objects
            )
        ):
            return TaskResult(exit, problem="input", words=words)
        noted = (
            task.attempt.read_moved_outputs()
        )  # by a worker that was killed while the host moved them
        found: dict[str, str] = {}
        wrong: list[str] = []
        for name, path, flags in outputs:
            taken = harvest.outputs[path]
            if taken.problem:
                wrong.append(taken.problem)
            elif not taken.content and name in noted:
                found[name] = noted[name]
            elif not taken.content:
                if not flags & OPTIONAL:
                    wrong.append(f"declared output {path} was not created")
            elif flags & NONEMPTY and not (
                taken.entries if taken.content[0] == "t" else taken.size
            ):
                wrong.append(f"declared output {path} is empty, but the recipe requires content")
            else:
                found[name] = taken.content
        if wrong:
            return TaskResult(exit, problem="output", words="; ".join(wrong))
        for name, path, flags in outputs:
            if name in found and name not in noted and not flags & TEMPORARY:
                taken = harvest.outputs[path]
                await self._folder.download_output(
                    f"{paths.cwd}/{path}", taken, f"{task.name}-{taken.content[2:18]}"
                )
        for name, content in found.items():
            if name not in noted:
                task.attempt.record_moved_output(name, content)
        states = [state.path for state in task.states]
        below = {
            path
            for _, path, _ in outputs
            if any(path == state or path.startswith(f"{state}/") for state in states)
        }
        moved = {
            path: found[name] for name, path, _ in outputs if name in found and name not in noted
        }
        if moved:
            self._folder.contents |= await self._host_store.store_outputs(
                paths.cwd, moved, copy=below & moved.keys()
            )
        if stayed := {
            found[name]
            for name, _, flags in outputs
            if flags & TEMPORARY and name in found and name in noted
        }:
            await self._folder.look_up(stayed)
        return TaskResult(exit, found)

    async def download_leftovers(self) -> None:
        """Download small leftover files of a failed attempt for debugging.

        The host's copies are deleted.
        """
        with contextlib.suppress(
            DriverError, RecipeError, OSError
        ):  # the step's own failure is more important
            found, others = await self._host_store.read_leftovers(
                self._paths.cwd, each=REMAINS_EACH, all=REMAINS_ALL, count=REMAINS_COUNT
            )
            for name, data in found.items():
                _write_leftover(self._task.attempt.path, name, data)
            if others:
                of = f"{others} of {others + len(found)} files left on {self._host_store.wire.name}"
                self._task.say(f"{of} are not copied: too large, too many, or unreadable")


def _write_leftover(top: str, name: str, data: bytes) -> None:
    """Write a file below `top`, unless a link or another file is in the way."""
    folder = top
    for part in name.split("/")[:-1]:
        folder = f"{folder}/{part}"
        if os.path.islink(folder) or not (os.path.isdir(folder) or not os.path.lexists(folder)):
            return
        os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(f"{top}/{name}", "xb") as file:
        file.write(data)


def _input_name(attempt: AttemptDirectory, name: str) -> str:
    """Return the step's name of an input: the host knows some inputs only by content."""
    names = {content: path for path, (_, content) in attempt.links.items()} | {
        content: path for path, content in attempt.objects.items()
    }
    return names.get(name, name)
