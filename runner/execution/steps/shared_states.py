"""Upload and download of a run's checkpoints in the shared store, for other machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ...errors import RecipeError
from ...hosts.place.checkpoint_sync import SETTLE, round_period
from ...planning.fingerprint import World
from ...planning.step import StateSpec, StepSpec
from ...storage import checkpoints
from ...storage.content.objects import Objects
from ...storage.remote.cache import RemoteCache
from ...storage.workspace import Workspace
from .attempt import Attempt
from .commit import GroupCommit

FIRST: Final = 1.0
"""Delay before the first upload check of a training, in seconds.

The training may have resumed from a checkpoint that the store lacks.
"""


_Found: TypeAlias = "Mapping[str, tuple[str, tuple[object, ...]]]"
"""Newest checkpoint of each checkpoint directory, with the stat results of its files."""


class SharedStates:
    """Checkpoints of one run in the shared store, if the run has a shared store."""

    def __init__(self, ws: Workspace, commits: GroupCommit) -> None:
        self._ws, self._commits = ws, commits

    def _states_of(self, spec: StepSpec) -> Sequence[StateSpec]:
        """Return a step's checkpoint directories that are stored in the shared store.

        These are all states, for a run on another machine or if the store's settings say so;
        otherwise the states with `to: store`.
        """
        cache = self._ws.remote_cache
        if cache is None:
            return ()
        if self._ws.delivers or cache.checkpoints:
            return spec.state
        return [state for state in spec.state if state.shared]

    async def restore(self, id: str, spec: StepSpec, key: str, root: Path) -> None:
        """Download the checkpoints of a step from the shared store.

        If the download fails, shows a message; the training resumes from local checkpoints or
        starts over.
        """
        cache = self._ws.remote_cache
        self._say_if_none_is_put(id, spec)
        if cache is None or not self._states_of(spec):
            return
        try:
            brought = await asyncio.to_thread(self._fetch, cache, key, root)
        except RecipeError as error:
            self._commits.say(
                f"{id}: cannot download its checkpoint from the shared store {cache.name}: {error}"
            )
            return
        if brought:
            self._commits.say(
                f"{id}: {', '.join(brought)} downloaded from the shared store {cache.name}"
            )

    def _say_if_none_is_put(self, id: str, spec: StepSpec) -> None:
        cache = self._ws.remote_cache
        if not any(state.shared for state in spec.state):
            return
        if cache is None:
            why = "no shared store is set"
        elif not cache.pushes:
            why = f"the shared store {cache.name} is read-only (set `push = true` in its settings)"
        else:
            return
        self._commits.say(
            f"{id}: its checkpoints stay on this machine in spite of `to: store`: {why}"
        )

    def _fetch(self, cache: RemoteCache, key: str, root: Path) -> list[str]:
        from ...storage.remote import states as remote_states

        note = remote_states.load(cache.remote, key)
        if note is None:
            return []
        return remote_states.restore(cache.remote, note, root, Objects(self._ws.home))

    @contextlib.asynccontextmanager
    async def upload_during(self, attempt: Attempt, spec: StepSpec) -> AsyncIterator[None]:
        """Upload new checkpoints during the block, and the last checkpoint at its end."""
        states, cache = self._states_of(spec), self._ws.remote_cache
        if not states or attempt.state is None or cache is None or not cache.pushes:
            yield
            return
        sender = _CheckpointSender(
            cache, self._commits, attempt.id, attempt.state, states, attempt.world, spec
        )
        task = asyncio.get_running_loop().create_task(sender.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await sender.finish()


class _CheckpointSender:
    """Uploader of the checkpoints of one attempt."""

    def __init__(
        self,
        cache: RemoteCache,
        commits: GroupCommit,
        id: str,
        generation: checkpoints.Generation,
        states: Sequence[StateSpec],
        world: World,
        spec: StepSpec,
    ) -> None:
        self._cache, self._commits, self._id = cache, commits, id
        self._generation, self._states = generation, states
        self._sent: _Found = {}
        self._key = checkpoints.key(spec, world, id)

    async def run(self) -> None:
        """Upload new checkpoints at the recipe's interval.

        A checkpoint counts as complete if two checks see the same files.
        """
        every = min(round_period(state.every, state.every_steps) for state in self._states)
        await asyncio.sleep(min(FIRST, every))
        while True:
            began = time.monotonic()
            await self._send_new(min(SETTLE, every))
            await asyncio.sleep(max(0.0, began + every - time.monotonic()))

    async def _send_new(self, settle: float) -> None:
        """Upload new checkpoints, even if the trainer writes newer ones in the meantime."""
        while True:
            found = await asyncio.to_thread(self._look)
            if not self._is_due(found):
                return
            await asyncio.sleep(settle)
            if await asyncio.to_thread(self._is_unchanged, found):
                return await self._put(found)

    def _is_due(self, found: _Found) -> bool:
        """Return True if a checkpoint is not uploaded yet and its step interval has passed."""
        steps = {state.name: state.every_steps for state in self._states}
        return any(
            self._sent.get(state) != (name, files)
            and checkpoints.is_due(name, self._names(state), steps[state])
            for state, (name, files) in found.items()
        )

    def _names(self, state: str) -> Sequence[str]:
        """Return the name of a directory's last uploaded checkpoint, as a list."""
        return [self._sent[state][0]] if state in self._sent else []

    def _is_unchanged(self, found: _Found) -> bool:
        return all(
            _stat_files(self._folder(state) / name) == files
            for state, (name, files) in found.items()
        )

    async def finish(self) -> None:
        """Upload the last checkpoint, after the trainer has stopped writing."""
        found = await asyncio.to_thread(self._look)
        if found != self._sent:
            await self._put(found)

    async def _put(self, found: _Found) -> None:
        from ...storage.remote import states as remote_states

        names = {state: name for state, (name, _) in found.items()}
        try:
            if not self._sent:
                await asyncio.to_thread(self._cache.remote.mark)
            await asyncio.to_thread(
                remote_states.save, self._cache.remote, self._key, self._generation.path, names
            )
            self._sent = found
        except (RecipeError, OSError) as error:
            self._commits.say(
                f"{self._id}: cannot upload its checkpoint to the shared store {self._cache.name}: {error}"
            )

    def _look(self) -> dict[str, tuple[str, tuple[object, ...]]]:
        """Return the newest complete checkpoint of each directory, with its files' stat results."""
        found = {}
        for state in self._states:
            folder = self._folder(state.name)
            name = (
                checkpoints.newest(folder, state.checkpoint, thorough=False).name
                if state.checkpoint is not None
                else ""
            )
            if name is not None and (seen := _stat_files(folder / name)):
                found[state.name] = (name, seen)
        return found

    def _folder(self, state: str) -> Path:
        return self._generation.folder(state)


def _stat_files(path: Path) -> tuple[object, ...]:
    try:
        names = [path] if path.is_file() else [path / name for name in checkpoints.files(path)]
        stats = [(str(each), os.lstat(each)) for each in names]
    except OSError:  # deleted in the meantime
        return ()
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in stats)
