"""Collect the outputs of an attempt on another disk.

They are hashed on the host, downloaded, and kept on the host for downstream steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivers.base import DriverError, Exit

from ...errors import RecipeError
from ...planning.step import MISSING, TEMPORARY
from ...storage.workspace import Workspace
from .folder import RemoteFolder
from .host_task import HostTask, Paths, TaskResult
from .outputs import find_output_problem, is_in_state
from .staging import AttemptDirectory

if TYPE_CHECKING:
    from ..transfer.host_store import HashedOutputs, HostStore

REMAINS_EACH, REMAINS_ALL, REMAINS_COUNT = 1 << 20, 16 << 20, 200
"""Download limits for a failed attempt's leftover files: bytes per file, total bytes, files."""


class Collector:
    """Collects the results of one attempt.  `paths` are paths on the host; `folder` lists the contents that the host stores."""

    def __init__(
        self,
        ws: Workspace,
        host_store: HostStore,
        folder: RemoteFolder,
        task: HostTask,
        paths: Paths,
    ) -> None:
        self._ws, self._host_store, self._folder = ws, host_store, folder
        self._task, self._paths = task, paths

    async def collect_outputs(self, exit: Exit) -> TaskResult:
        """Hash the outputs on the host, download them, and keep them in the host's store.

        Temporary outputs are not downloaded.
        """
        task, outputs = self._task, self._task.outputs
        attempt = task.attempt
        has_inputs = attempt.staged or attempt.links or attempt.objects
        if not outputs and not has_inputs and not task.rejoined:
            return TaskResult(exit)
        hashed = await self._host_store.hash_outputs(
            self._paths.cwd, [path for _, path, _ in outputs]
        )
        changed_input = await self._find_changed_input(hashed)
        if changed_input:
            return TaskResult(exit, problem="input", words=changed_input)
        moved = attempt.read_moved_outputs()  # by a host whose worker was killed meanwhile
        contents, problems = self._check_outputs(hashed, moved)
        if problems:
            return TaskResult(exit, problem="output", words="; ".join(problems))
        await self._download_outputs(hashed, contents, moved)
        for name, content in contents.items():
            if name not in moved:
                attempt.record_moved_output(name, content)
        await self._store_outputs(contents, moved)
        return TaskResult(exit, contents)

    async def _find_changed_input(self, hashed: HashedOutputs) -> str:
        """Return a message that names a changed input; empty if none changed."""
        attempt = self._task.attempt
        if hashed.changed:
            self._folder.contents.difference_update(hashed.changed)
            return f"the step changed its input {_input_name(attempt, hashed.changed[0])}"
        if not self._host_store.shared_disk.host_sees_workspace:
            return ""
        # The step may have read an input from the shared disk.
        return await asyncio.to_thread(attempt.find_changed_input, self._ws.cache, self._ws.objects)

    def _check_outputs(
        self, hashed: HashedOutputs, moved: Mapping[str, str]
    ) -> tuple[dict[str, str], list[str]]:
        """Return the contents of the existing outputs by name, and the problems with others.

        `moved` are outputs that the host has already moved into its store.
        """
        contents: dict[str, str] = {}
        problems: list[str] = []
        for declared in self._task.outputs:
            name, path, _ = declared
            output = hashed.outputs[path]
            problem = find_output_problem(declared, output.kind, is_empty=output.is_empty)
            if output.kind == MISSING and name in moved:
                contents[name] = moved[name]
            elif problem or output.problem:
                problems.append(problem or output.problem)
            elif output.content:
                contents[name] = output.content
        return contents, problems

    async def _download_outputs(
        self, hashed: HashedOutputs, contents: Mapping[str, str], moved: Mapping[str, str]
    ) -> None:
        for name, path, flags in self._task.outputs:
            is_new = name in contents and name not in moved
            if is_new and not flags & TEMPORARY:
                output = hashed.outputs[path]
                partial = f"{self._task.name}-{output.content[2:18]}"
                await self._folder.download_output(f"{self._paths.cwd}/{path}", output, partial)

    async def _store_outputs(self, contents: Mapping[str, str], moved: Mapping[str, str]) -> None:
        """Move the outputs into the host's store.  Outputs in a state are copied."""
        new: dict[str, str] = {}
        already_there: set[str] = set()
        for name, path, flags in self._task.outputs:
            if name not in contents:
                continue
            if name not in moved:
                new[path] = contents[name]
            elif flags & TEMPORARY:
                already_there.add(contents[name])
        if new:
            states = [state.path for state in self._task.states]
            in_states = {path for path in new if is_in_state(path, states)}
            self._folder.contents |= await self._host_store.store_outputs(
                self._paths.cwd, new, copy=in_states
            )
        # The host may have deleted a temporary output since, and there is no copy here.
        if already_there:
            await self._folder.look_up(already_there)

    async def download_leftovers(self) -> None:
        """Download small leftover files of a failed attempt for debugging.

        The host's copies are deleted.
        """
        # The step's own failure is more important than an error here.
        with contextlib.suppress(DriverError, RecipeError, OSError):
            leftovers, others = await self._host_store.read_leftovers(
                self._paths.cwd, each=REMAINS_EACH, all=REMAINS_ALL, count=REMAINS_COUNT
            )
            for name, data in leftovers.items():
                _write_leftover(self._task.attempt.path, name, data)
            if others:
                total, host = others + len(leftovers), self._host_store.wire.name
                self._task.say(
                    f"{others} of {total} files left on {host} are not copied: too large, too many, or unreadable"
                )


def _write_leftover(top: str, name: str, data: bytes) -> None:
    """Write a file below `top`, unless a link or another file is in the way."""
    folder = top
    for part in name.split("/")[:-1]:
        folder = f"{folder}/{part}"
        if os.path.islink(folder):
            return
        if os.path.lexists(folder) and not os.path.isdir(folder):
            return
        os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(f"{top}/{name}", "xb") as file:
        file.write(data)


def _input_name(attempt: AttemptDirectory, name: str) -> str:
    """Return the step's name of an input: the host knows some inputs only by content."""
    names = {content: path for path, (_, content) in attempt.links.items()}
    names |= {content: path for path, content in attempt.objects.items()}
    return names.get(name, name)
