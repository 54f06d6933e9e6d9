"""Handles of runs: what `core` decides is done here, at once by `Run`, by `await` in `AsyncRun`.  Their methods have the same names and meaning."""

from __future__ import annotations

import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, cast

from ...api.outcomes import Outcome
from ...api.values import Line, OutputFile, Point, Status
from ...errors import CannotAsk
from ...storage.records.runs import Event
from . import core
from .core import Ask, Clock, Give, Heard, More, Nap, Talk
from .files import Download
from .transport import AsyncTransport, Listing, Lost, Of, Transport


def clock(timeout: float | None) -> Clock:
    """A clock that runs out after `timeout` seconds."""
    return Clock(time.monotonic, math.inf if timeout is None else time.monotonic() + timeout)


def carry_out(transport: Transport, talk: Talk) -> Iterator[Any]:
    """What a conversation gives, carried out at once."""
    heard: Heard = None
    pieces: Generator[object, None, None] | None = None
    try:
        while True:
            try:
                step = talk.send(heard)
            except StopIteration:
                return
            heard = None
            try:
                match step:
                    case Give(item):
                        yield item
                    case Nap(seconds):
                        time.sleep(seconds)
                    case More():
                        heard = next(pieces, None) if pieces is not None else None
                    case Ask(of, streams=True):
                        if pieces is not None:
                            pieces.close()
                        pieces = cast("Generator[object, None, None]", of(transport))
                    case Ask(of):
                        heard = of(transport)
            except Lost as error:
                heard = error
    finally:
        if pieces is not None:
            pieces.close()


async def given_async(transport: AsyncTransport, talk: Talk) -> AsyncGenerator[Any, None]:
    """The same by `await`: each question is one that the other kind of transport answers, too."""
    from asyncio import sleep

    asked: Any = transport
    heard: Heard = None
    pieces: AsyncGenerator[object, None] | None = None
    try:
        while True:
            try:
                step = talk.send(heard)
            except StopIteration:
                return
            heard = None
            try:
                match step:
                    case Give(item):
                        yield item
                    case Nap(seconds):
                        await sleep(seconds)
                    case More():
                        heard = await anext(pieces, None) if pieces is not None else None
                    case Ask(of, streams=True):
                        if pieces is not None:
                            await pieces.aclose()
                        pieces = cast("AsyncGenerator[object, None]", of(asked))
                    case Ask(of):
                        heard = await cast("Awaitable[object]", of(asked))
            except Lost as error:
                heard = error
    finally:
        if pieces is not None:
            await pieces.aclose()


class Run:
    """A run, wherever it is carried out.  The handle may be closed, or forgotten, at any time: the run goes on, also behind a `with`.

    Methods raise the errors of `runner.errors`.  Where the network is lost, `wait` and what follows a run try again until it is there.
    """

    def __init__(self, transport: Transport, id: str) -> None:
        self.transport, self.id = transport, id

    def _one(self, talk: Talk) -> Any:
        return next(carry_out(self.transport, talk))

    def _ask(self, of: Callable[[Transport], Outcome]) -> Outcome:
        """Ask something once.  Raises CannotAsk with a fix for Python."""
        try:
            outcome: Outcome = self._one(core.ask(of, core.ONCE))
        except CannotAsk as error:
            raise core.in_python(error) from None
        return outcome

    def status(self) -> Status:
        """How the run stands now."""
        found: Status = self._one(core.ask(lambda there: there.run(self.id)))
        return found

    def wait(self, timeout: float | None = None) -> Status:
        """How the run stands when it is over: COMPLETED, FAILED or CANCELLED.  Raises TimedOut, a TimeoutError, after `timeout` seconds."""
        found: Status = self._one(core.wait(self.id, clock(timeout)))
        return found

    def events(self, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """What happened, in order, behind the event with the number `after`; with `follow` also what will, until the run is over."""
        return carry_out(self.transport, core.events(self.id, after, follow))

    def logs(self, follow: bool = False, step: str = "", attempt: int = 0) -> Iterator[Line]:
        """The lines that the steps printed, one step after another; with `follow` also those that come, until the run is over."""
        return carry_out(self.transport, core.lines(self.id, step, attempt, follow))

    def metrics(self, step: str = "", attempt: int = 0, of: Of = "step") -> list[Point]:
        """What the steps reported so far; with `of="machine"` what their machines had to do."""
        asked = core.ask(lambda there: there.points(self.id, step, attempt, of))
        found: Sequence[Point] = self._one(asked)
        return list(found)

    def outputs(self) -> list[OutputFile]:
        """What the steps made so far, by STEP.OUTPUT; of a run of another machine its results, when it is COMPLETED."""
        return list(self.status().outputs)

    def download(self, folder: str | Path, *names: str, overwrite: bool = False) -> list[Path]:
        """Put the outputs, or those of these names, into a folder; answers where each file is.  What is there and is another file is an error."""
        with Download(folder, overwrite) as files:
            for item in carry_out(self.transport, core.download(self.id, names)):
                files.take(item)
        return files.paths

    def cancel(self) -> Outcome:
        """End the run for good; its results and checkpoints stay.  Returns when that is asked for: `wait` waits for the end."""
        return self._ask(lambda there: there.request(self.id, "cancel"))

    def pause(self) -> Outcome:
        """Stop the run so that it can be resumed; trainings save a checkpoint first.  Returns when that is asked for."""
        return self._ask(lambda there: there.request(self.id, "pause"))

    def resume(self) -> Outcome:
        """Let a run continue that is paused, or has lost its worker."""
        return self._ask(lambda there: there.request(self.id, "resume"))

    def retry(self, begin: str | None = None) -> Run:
        """Run what an ended run was asked for once more, as a new run; from the step `begin` on, whatever is remembered."""
        outcome = self._ask(lambda there: there.retry(self.id, begin))
        return Run(self.transport, outcome.run)

    def prioritize(self, priority: int) -> Outcome:
        """Have workers take the run earlier (a higher number) or later; of one that they have, it counts when it waits again."""
        return self._ask(lambda there: there.prioritize(self.id, priority))

    def close(self) -> None:
        """Let go of the connection, or of the workspace.  The run goes on."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.id}{f' at {self.transport.name}' if self.transport.name else ''}>"

    def _repr_html_(self) -> str:
        from .notebook import html

        return html(self.status())


class AsyncRun:
    """The same by `await`; `events` and `logs` are read by `async for`."""

    def __init__(self, transport: AsyncTransport, id: str) -> None:
        self.transport, self.id = transport, id

    async def _one(self, talk: Talk) -> Any:
        async with aclosing(given_async(self.transport, talk)) as items:
            return await anext(items)

    async def _ask(self, of: Callable[[Transport], Outcome]) -> Outcome:
        """Ask something once.  Raises CannotAsk with a fix for Python."""
        try:
            outcome: Outcome = await self._one(core.ask(of, core.ONCE))
        except CannotAsk as error:
            raise core.in_python(error) from None
        return outcome

    async def status(self) -> Status:
        """How the run stands now."""
        found: Status = await self._one(core.ask(lambda there: there.run(self.id)))
        return found

    async def wait(self, timeout: float | None = None) -> Status:  # noqa: ASYNC109  (the same as Run's)
        """How the run stands when it is over.  Raises TimedOut, a TimeoutError, after `timeout` seconds."""
        found: Status = await self._one(core.wait(self.id, clock(timeout)))
        return found

    def events(self, after: int = 0, follow: bool = False) -> AsyncIterator[Event]:
        """What happened, in order, behind the event with the number `after`; with `follow` also what will, until the run is over."""
        return given_async(self.transport, core.events(self.id, after, follow))

    def logs(self, follow: bool = False, step: str = "", attempt: int = 0) -> AsyncIterator[Line]:
        """The lines that the steps printed, one step after another; with `follow` also those that come, until the run is over."""
        return given_async(self.transport, core.lines(self.id, step, attempt, follow))

    async def metrics(self, step: str = "", attempt: int = 0, of: Of = "step") -> list[Point]:
        """What the steps reported so far; with `of="machine"` what their machines had to do."""
        asked = core.ask(lambda there: there.points(self.id, step, attempt, of))
        found: Sequence[Point] = await self._one(asked)
        return list(found)

    async def outputs(self) -> list[OutputFile]:
        """What the steps made so far, by STEP.OUTPUT; of a run of another machine its results, when it is COMPLETED."""
        return list((await self.status()).outputs)

    async def download(
        self, folder: str | Path, *names: str, overwrite: bool = False
    ) -> list[Path]:
        """Put the outputs, or those of these names, into a folder; answers where each file is.  What is there and is another file is an error."""
        with Download(folder, overwrite) as files:
            async for item in given_async(self.transport, core.download(self.id, names)):
                files.take(item)
        return files.paths

    async def cancel(self) -> Outcome:
        """End the run for good; its results and checkpoints stay.  Returns when that is asked for."""
        return await self._ask(lambda there: there.request(self.id, "cancel"))

    async def pause(self) -> Outcome:
        """Stop the run so that it can be resumed.  Returns when that is asked for."""
        return await self._ask(lambda there: there.request(self.id, "pause"))

    async def resume(self) -> Outcome:
        """Let a run continue that is paused, or has lost its worker."""
        return await self._ask(lambda there: there.request(self.id, "resume"))

    async def retry(self, begin: str | None = None) -> AsyncRun:
        """Run what an ended run was asked for once more, as a new run; from the step `begin` on, whatever is remembered."""
        outcome = await self._ask(lambda there: there.retry(self.id, begin))
        return AsyncRun(self.transport, outcome.run)

    async def prioritize(self, priority: int) -> Outcome:
        """Have workers take the run earlier (a higher number) or later; of one that they have, it counts when it waits again."""
        return await self._ask(lambda there: there.prioritize(self.id, priority))

    async def close(self) -> None:
        """Let go of the connection, or of the workspace.  The run goes on."""
        await self.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncRun {self.id}{f' at {self.transport.name}' if self.transport.name else ''}>"


def runs_of(transport: Transport, listing: Listing) -> Iterator[Status]:
    """The runs that are kept there, the newest first, asked for page by page."""
    return carry_out(transport, core.runs(listing))
