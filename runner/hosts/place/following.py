"""What an attempt on another disk prints and measures comes here while it runs: its log, its metrics, what the agent sees of its machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.base import Exit, Job, Unreachable

from ..link.contact import Contact
from .host_task import FOREVER, HostTask, Paths, replaced_words

if TYPE_CHECKING:
    from ..link.client import Client
    from ..transfer.host_store import HostStore

FIRST_GLANCE, GLANCE, LONGEST_GLANCE = 0.05, 0.2, 2.0
"""Seconds between looks at what a step prints: while it does, and when it has not for a while."""
SAMPLED = 5.0
"""Seconds that a job takes before the agent there looks at the machine, and between its looks."""
FAREWELL = 2.0
"""Seconds in which these looks end, once they are told to."""
ROOM = 8 << 20
"""Of a metrics file: bytes that are fetched at once."""


class Follower:
    """Of one attempt.  `paths` are those there; here they begin with the attempt's own."""

    def __init__(
        self,
        host: Client,
        host_store: HostStore,
        contact: Contact,
        task: HostTask,
        job: Job,
        paths: Paths,
    ) -> None:
        self._host, self._host_store, self._contact, self.task, self._job, self._there = (
            host,
            host_store,
            contact,
            task,
            job,
            paths,
        )
        self._here = Paths.at(task.attempt.path)

    async def end(self, beside: Sequence[Coroutine[object, object, object]]) -> Exit:
        """The job's end.  Until then what it prints and measures comes here; other work `beside` goes on as long."""
        # What is printed first at once: a step that is over by then is not asked twice.
        doing = [
            _again(self._append, FIRST_GLANCE),
            _again(
                partial(self._file, self._there.host, self._here.host), SAMPLED, SAMPLED, SAMPLED
            ),
            *beside,
        ]
        if self.task.metrics is not None and self.task.metrics.in_environment:
            doing.append(
                _again(partial(self._file, self._there.metrics, self._here.metrics), GLANCE)
            )
        futures = [asyncio.ensure_future(each) for each in doing]
        try:
            exit: Exit | None = None
            while exit is None:
                exit = await self._contact.insist(lambda: self._host.wait(self._job, FOREVER))
        finally:
            for future in futures:
                future.cancel()
            # What does not end in a moment waits for a host that does not answer.
            await asyncio.wait({asyncio.gather(*futures, return_exceptions=True)}, timeout=FAREWELL)
        return exit

    async def rest(self, exit: Exit) -> None:
        """What was printed and measured since the last look."""
        task, here, paths = self.task, self._here, self._there
        await self._append()
        if (log := self._job.data.get("log")) and self._host.has_no_log(self._job):
            await self._rest_of("its log", log, here.log)
        if exit.ended - exit.started >= SAMPLED:
            await self._rest_of("the record of its machine", paths.host, here.host)
        if task.metrics is None or task.metrics[1]:
            return
        if not task.metrics[0]:
            await self._rest_of("$RECIPE_METRICS", paths.metrics, here.metrics)
            return
        for name in await self._host_store.matching(paths.cwd, task.metrics[0]):
            target = Path(task.attempt.path, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # an earlier worker may have brought it
            while data := await self._host_store.read(
                f"{paths.cwd}/{name}", _size(str(target)), limit=ROOM
            ):
                _append(str(target), data)

    async def _rest_of(self, name: str, path: str, target: str) -> None:
        """What a file there has more than ours; it is said if the step replaced it, as nothing can be read then."""
        while (piece := await self._host_store.piece(path, _size(target), limit=ROOM)).data:
            _append(target, piece.data)
        if piece.is_replaced:
            self.task.say(replaced_words(name))

    async def _append(self) -> bool:
        """All that was printed by now; whether there was anything."""
        grown = False
        while data := await self._host.log(self._job, _size(self._here.log)):
            _append(self._here.log, data)
            grown = True
        return grown

    async def _file(self, path: str, target: str) -> bool:
        """What a file there has grown by; whether it has."""
        data = await self._host_store.read(path, _size(target), limit=ROOM)
        _append(target, data)
        return bool(data)


async def _again(
    look: Callable[[], Awaitable[bool]],
    pause: float,
    least: float = GLANCE,
    most: float = LONGEST_GLANCE,
) -> None:
    """Look, first after `pause` seconds, then again and again, less often while there is nothing new, as long as we are not cancelled."""
    while True:
        await asyncio.sleep(pause)
        with contextlib.suppress(Unreachable):  # who waits for the end says so
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
