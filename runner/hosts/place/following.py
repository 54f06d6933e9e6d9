"""Follow a running attempt on another disk.

Copies its log, its metrics, and the agent's record of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.base import Exit, Job, Unreachable

from ..link.contact import HostContact
from .host_task import FOREVER, HostTask, Paths, replaced_message

if TYPE_CHECKING:
    from ..link.client import Client
    from ..transfer.host_store import HostStore

FIRST_GLANCE, GLANCE, LONGEST_GLANCE = 0.05, 0.2, 2.0
"""Seconds between checks for new output: first pause, pause after output, longest pause."""
SAMPLED = 5.0
"""Seconds after which the agent records a job's machine, and between its records."""
FAREWELL = 2.0
"""Seconds for these tasks to end after cancellation."""
ROOM = 8 << 20
"""Bytes of a metrics file per request."""


class AttemptFollower:
    """Follows one attempt.  `paths` are on the host; the local copies use the attempt's own paths."""

    def __init__(
        self,
        host: Client,
        host_store: HostStore,
        contact: HostContact,
        task: HostTask,
        job: Job,
        paths: Paths,
    ) -> None:
        self._host, self._host_store, self._contact, self.task, self._job, self._paths = (
            host,
            host_store,
            contact,
            task,
            job,
            paths,
        )
        self._local = Paths.at(task.attempt.path)

    async def wait_for_end(self, beside: Sequence[Coroutine[object, object, object]]) -> Exit:
        """Wait for the end of the job.

        Meanwhile, copy its output and metrics, and run the tasks `beside`.
        """
        # Without an initial pause: the log of a short step is then read only once.
        doing = [
            _poll(self._copy_log, FIRST_GLANCE),
            _poll(
                partial(self._copy_file, self._paths.host, self._local.host),
                SAMPLED,
                SAMPLED,
                SAMPLED,
            ),
            *beside,
        ]
        if self.task.metrics is not None and self.task.metrics.in_environment:
            doing.append(
                _poll(partial(self._copy_file, self._paths.metrics, self._local.metrics), GLANCE)
            )
        futures = [asyncio.ensure_future(each) for each in doing]
        try:
            exit: Exit | None = None
            while exit is None:
                exit = await self._contact.insist(lambda: self._host.wait(self._job, FOREVER))
        finally:
            for future in futures:
                future.cancel()
            # A task that does not end now waits for an unreachable host.
            await asyncio.wait({asyncio.gather(*futures, return_exceptions=True)}, timeout=FAREWELL)
        return exit

    async def copy_rest(self, exit: Exit) -> None:
        """Copy the output and metrics since the last check."""
        task, local, paths = self.task, self._local, self._paths
        await self._copy_log()
        log = self._job.data.get("log")
        if log and self._host.has_no_log(self._job):
            await self._copy_rest_of("its log", log, local.log)
        if exit.ended - exit.started >= SAMPLED:
            await self._copy_rest_of("the record of its machine", paths.host, local.host)
        if task.metrics is None or task.metrics[1]:
            return
        if not task.metrics[0]:
            await self._copy_rest_of("$RECIPE_METRICS", paths.metrics, local.metrics)
            return
        for name in await self._host_store.find_files(paths.cwd, task.metrics[0]):
            target = Path(task.attempt.path, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # an earlier worker may have copied the file
            while data := await self._host_store.read(
                f"{paths.cwd}/{name}", _size(str(target)), limit=ROOM
            ):
                _append(str(target), data)

    async def _copy_rest_of(self, name: str, path: str, target: str) -> None:
        """Copy the rest of a file; warn if the step replaced the file with something else."""
        while (piece := await self._host_store.read_piece(path, _size(target), limit=ROOM)).data:
            _append(target, piece.data)
        if piece.is_replaced:
            self.task.say(replaced_message(name))

    async def _copy_log(self) -> bool:
        """Copy new log output; return whether there was any."""
        grown = False
        while data := await self._host.log(self._job, _size(self._local.log)):
            _append(self._local.log, data)
            grown = True
        return grown

    async def _copy_file(self, path: str, target: str) -> bool:
        """Copy the new bytes of a file; return whether there were any."""
        data = await self._host_store.read(path, _size(target), limit=ROOM)
        _append(target, data)
        return bool(data)


async def _poll(
    look: Callable[[], Awaitable[bool]],
    pause: float,
    least: float = GLANCE,
    most: float = LONGEST_GLANCE,
) -> None:
    """Call `look` repeatedly until cancelled, first after `pause` seconds.

    The pauses grow while there is nothing new.
    """
    while True:
        await asyncio.sleep(pause)
        with contextlib.suppress(Unreachable):  # the wait for the job's end reports this
            pause = least if await look() else min(most, pause * 1.3)


def _append(path: str, data: bytes) -> None:
    if data:
        with open(path, "ab") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
