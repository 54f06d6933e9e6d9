"""Upload of a training's checkpoints to the shared store while it runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ...errors import RecipeError
from ...hosts.place.checkpoint_sync import SETTLE, round_period
from ...planning.fingerprint import World
from ...planning.step import StateSpec, StepSpec
from ...storage import checkpoints
from ...storage.remote import states as remote_states
from ...storage.remote.cache import RemoteCache
from .commit import GroupCommit

FIRST: Final = 1.0
"""Delay before the first upload check of a training, in seconds.

The training may have resumed from a checkpoint that the store lacks.
"""


_Found: TypeAlias = "Mapping[str, tuple[str, tuple[object, ...]]]"
"""Newest checkpoint of each checkpoint directory, with the stat results of its files."""


class CheckpointSender:
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
        # An interval in steps has no known length: such a state is checked often.
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
