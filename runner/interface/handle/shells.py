"""The run handles `Run` (synchronous) and `AsyncRun` (asynchronous), with the same methods.

They execute the generators of `core`.
"""

from __future__ import annotations

import asyncio
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
from .core import Answer, Clock, Give, More, Nap, Operation, TransportRequest
from .files import Download
from .transport import AsyncTransport, Listing, Of, RequestLost, Transport


def clock(timeout: float | None) -> Clock:
    """Return a clock with a deadline in `timeout` seconds; None means no deadline."""
    until = math.inf if timeout is None else time.monotonic() + timeout
    return Clock(time.monotonic, until)


def drive(transport: Transport, talk: Operation) -> Iterator[Any]:
    """Execute a generator of `core` and yield its items."""
    heard: Answer = None
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
                    case TransportRequest(of, streams=True):
                        if pieces is not None:
                            pieces.close()
                        pieces = cast("Generator[object, None, None]", of(transport))
                    case TransportRequest(of):
                        heard = of(transport)
            except RequestLost as error:
                heard = error
    finally:
        if pieces is not None:
            pieces.close()


async def drive_async(transport: AsyncTransport, talk: Operation) -> AsyncGenerator[Any, None]:
    """Execute a generator of `core` asynchronously and yield its items.

    AsyncTransport must have the methods that its questions call.
    """
    asked: Any = transport
    heard: Answer = None
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
                        await asyncio.sleep(seconds)
                    case More():
                        heard = await anext(pieces, None) if pieces is not None else None
                    case TransportRequest(of, streams=True):
                        if pieces is not None:
                            await pieces.aclose()
                        pieces = cast("AsyncGenerator[object, None]", of(asked))
                    case TransportRequest(of):
                        heard = await cast("Awaitable[object]", of(asked))
            except RequestLost as error:
                heard = error
    finally:
        if pieces is not None:
            await pieces.aclose()


class Run:
    """A handle of a run in a workspace, in a database or on a server.

    The run continues after the handle is closed, also at the end of a `with`.

    Methods raise the errors of `runner.errors`.  After a network failure, `wait` and methods with
    `follow` retry until the server answers.
    """

    def __init__(self, transport: Transport, id: str) -> None:
        self.transport, self.id = transport, id

    def _perform(self, talk: Operation) -> Any:
        """Carry out an operation with one result, and return the result."""
        return next(drive(self.transport, talk))

    def _ask(self, of: Callable[[Transport], Outcome]) -> Outcome:
        """Send a request without retries.  Raises CannotAsk with a fix for Python callers."""
        try:
            outcome: Outcome = self._perform(core.ask(of, core.ONCE))
        except CannotAsk as error:
            raise core.with_python_fix(error) from None
        return outcome

    def status(self) -> Status:
        """Return the current status of the run."""
        found: Status = self._perform(core.ask(lambda there: there.run(self.id)))
        return found

    def wait(self, timeout: float | None = None) -> Status:
        """Wait until the run is COMPLETED, FAILED or CANCELLED and return its status.

        Raises TimedOut, a TimeoutError, after `timeout` seconds.
        """
        found: Status = self._perform(core.wait(self.id, clock(timeout)))
        return found

    def events(self, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """Yield the events with numbers above `after`, in order.

        If `follow`, also yield new events until the run has finished.
        """
        return drive(self.transport, core.events(self.id, after, follow))

    def logs(self, follow: bool = False, step: str = "", attempt: int = 0) -> Iterator[Line]:
        """Yield the log lines, one attempt after another.

        If `follow`, also yield new lines until the run has finished.
        """
        return drive(self.transport, core.lines(self.id, step, attempt, follow))

    def metrics(self, step: str = "", attempt: int = 0, of: Of = "step") -> list[Point]:
        """Return the metrics of the steps so far, or with `of="machine"` the utilization of their
        machines.
        """
        asked = core.ask(lambda there: there.points(self.id, step, attempt, of))
        found: Sequence[Point] = self._perform(asked)
        return list(found)

    def outputs(self) -> list[OutputFile]:
        """Return the outputs of the finished steps, named STEP.OUTPUT.  For a run on another
        machine, return its results once it is COMPLETED.
        """
        return list(self.status().outputs)

    def download(self, folder: str | Path, *names: str, overwrite: bool = False) -> list[Path]:
        """Download all outputs, or the outputs `names`, into a directory and return the file paths.

        Raises CannotRun if a file exists with other content, unless `overwrite`.
        """
        with Download(folder, overwrite) as files:
            for item in drive(self.transport, core.download(self.id, names)):
                files.take(item)
        return files.paths

    def cancel(self) -> Outcome:
        """Cancel the run; its results and checkpoints are kept.  Returns once the request is stored.  Call `wait` to wait for the end."""
        return self._ask(lambda there: there.request(self.id, "cancel"))

    def pause(self) -> Outcome:
        """Pause the run, so that it can be resumed; training jobs save a checkpoint first.  Returns once the request is stored."""
        return self._ask(lambda there: there.request(self.id, "pause"))

    def resume(self) -> Outcome:
        """Resume a run that is paused or has lost its worker."""
        return self._ask(lambda there: there.request(self.id, "resume"))

    def retry(self, begin: str | None = None) -> Run:
        """Rerun a finished run as a new run and return its handle.

        `begin` is the first step to rerun regardless of the cache.
        """
        outcome = self._ask(lambda there: there.retry(self.id, begin))
        return Run(self.transport, outcome.run)

    def prioritize(self, priority: int) -> Outcome:
        """Set the queue priority; runs with higher numbers start earlier.  In a running run, the priority applies when the run is queued again."""
        return self._ask(lambda there: there.prioritize(self.id, priority))

    def close(self) -> None:
        """Close the connection or the workspace.  The run continues."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {_describe(self)}>"

    def _repr_html_(self) -> str:
        from .notebook import html

        return html(self.status())


class AsyncRun:
    """An asynchronous version of `Run`.  Read `events` and `logs` with `async for`."""

    def __init__(self, transport: AsyncTransport, id: str) -> None:
        self.transport, self.id = transport, id

    async def _perform(self, talk: Operation) -> Any:
        async with aclosing(drive_async(self.transport, talk)) as items:
            return await anext(items)

    async def _ask(self, of: Callable[[Transport], Outcome]) -> Outcome:
        """Send a request without retries.  Raises CannotAsk with a fix for Python callers."""
        try:
            outcome: Outcome = await self._perform(core.ask(of, core.ONCE))
        except CannotAsk as error:
            raise core.with_python_fix(error) from None
        return outcome

    async def status(self) -> Status:
        """Return the current status of the run."""
        found: Status = await self._perform(core.ask(lambda there: there.run(self.id)))
        return found

    async def wait(self, timeout: float | None = None) -> Status:  # noqa: ASYNC109  (the same as Run's)
        """Wait until the run has finished and return its status.

        Raises TimedOut, a TimeoutError, after `timeout` seconds.
        """
        found: Status = await self._perform(core.wait(self.id, clock(timeout)))
        return found

    def events(self, after: int = 0, follow: bool = False) -> AsyncIterator[Event]:
        """Yield the events with numbers above `after`, in order.

        If `follow`, also yield new events until the run has finished.
        """
        return drive_async(self.transport, core.events(self.id, after, follow))

    def logs(self, follow: bool = False, step: str = "", attempt: int = 0) -> AsyncIterator[Line]:
        """Yield the log lines, one attempt after another.

        If `follow`, also yield new lines until the run has finished.
        """
        return drive_async(self.transport, core.lines(self.id, step, attempt, follow))

    async def metrics(self, step: str = "", attempt: int = 0, of: Of = "step") -> list[Point]:
        """Return the metrics of the steps so far, or with `of="machine"` the utilization of their
        machines.
        """
        asked = core.ask(lambda there: there.points(self.id, step, attempt, of))
        found: Sequence[Point] = await self._perform(asked)
        return list(found)

    async def outputs(self) -> list[OutputFile]:
        """Return the outputs of the finished steps, named STEP.OUTPUT.  For a run on another
        machine, return its results once it is COMPLETED.
        """
        return list((await self.status()).outputs)

    async def download(
        self, folder: str | Path, *names: str, overwrite: bool = False
    ) -> list[Path]:
        """Download all outputs, or the outputs `names`, into a directory and return the file paths.

        Raises CannotRun if a file exists with other content, unless `overwrite`.
        """
        with Download(folder, overwrite) as files:
            async for item in drive_async(self.transport, core.download(self.id, names)):
                files.take(item)
        return files.paths

    async def cancel(self) -> Outcome:
        """Cancel the run; its results and checkpoints are kept.  Returns once the request is stored."""
        return await self._ask(lambda there: there.request(self.id, "cancel"))

    async def pause(self) -> Outcome:
        """Pause the run, so that it can be resumed.  Returns once the request is stored."""
        return await self._ask(lambda there: there.request(self.id, "pause"))

    async def resume(self) -> Outcome:
        """Resume a run that is paused or has lost its worker."""
        return await self._ask(lambda there: there.request(self.id, "resume"))

    async def retry(self, begin: str | None = None) -> AsyncRun:
        """Rerun a finished run as a new run and return its handle.

        `begin` is the first step to rerun regardless of the cache.
        """
        outcome = await self._ask(lambda there: there.retry(self.id, begin))
        return AsyncRun(self.transport, outcome.run)

    async def prioritize(self, priority: int) -> Outcome:
        """Set the queue priority; runs with higher numbers start earlier.  In a running run, the priority applies when the run is queued again."""
        return await self._ask(lambda there: there.prioritize(self.id, priority))

    async def close(self) -> None:
        """Close the connection or the workspace.  The run continues."""
        await self.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncRun {_describe(self)}>"


def _describe(run: Run | AsyncRun) -> str:
    """Return the id of a run, and the address of a server or shared database."""
    name = run.transport.name
    return f"{run.id} at {name}" if name else run.id


def runs_of(transport: Transport, listing: Listing) -> Iterator[Status]:
    """Yield the runs of a list, newest first, requested page by page."""
    return drive(transport, core.runs(listing))
