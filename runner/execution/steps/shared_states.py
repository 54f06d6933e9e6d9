"""Upload and download of a run's checkpoints in the shared store, for other machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import RecipeError
from ...planning.step import StateSpec, StepSpec
from ...storage.content.objects import Objects
from ...storage.workspace import Workspace
from .attempt import Attempt
from .commit import GroupCommit

if TYPE_CHECKING:
    from ...storage.remote.cache import RemoteCache


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
        from .checkpoint_sender import CheckpointSender

        sender = CheckpointSender(
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
