"""The interface to stored runs, with one method per request.

`LocalTransport` reads a local workspace and `HttpTransport` calls a server. Both have an
asynchronous version. Each method tries once. `core` adds retries, and builds the operations of the
handles from these requests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ...api.differences import Differences
from ...api.outcomes import Outcome
from ...api.submitting import QueueSettings
from ...api.values import (
    Artifact,
    Forecast,
    Point,
    QueuedRun,
    RecipeEntry,
    Status,
    WorkerStatus,
)
from ...errors import Infrastructure, RecipeError
from ...execution.terms import Choice, Settings
from ...storage.records.runs import Event
from ...survey.request import Request


class RequestLost(Exception):
    """A request failed because the connection broke or the server is busy, and may be repeated
    after `wait` seconds.

    `failure` is the error for the caller after the last try.
    """

    def __init__(self, words: str, wait: float = 0.0, failure: RecipeError | None = None) -> None:
        super().__init__(words)
        self.wait = wait
        self.failure = failure or Infrastructure(
            f"cannot reach the server: {words}",
            fix="check that the server is running and the URL is correct",
        )


class New(NamedTuple):
    """A request for a new run."""

    request: Request
    choice: Choice = Choice()
    settings: Settings = Settings()
    ticket: QueueSettings = QueueSettings()
    webhooks: Sequence[Mapping[str, object]] = ()


class Listing(NamedTuple):
    """Filters of a list of runs, with the page size `limit`.  An empty filter matches all runs."""

    limit: int
    states: Sequence[str] = ()
    recipe: str = ""
    user: str = ""
    tag: str = ""
    after: str = ""
    """The `next` of the previous page."""


class RunPage(NamedTuple):
    """One page of a list of runs, newest first.

    `next` is the cursor of the next page, empty on the last page.
    """

    runs: Sequence[Status]
    next: str


class LogPart(NamedTuple):
    """A part of the log of an attempt on one node: the bytes from `offset`, and with `follow` new
    bytes until the attempt has finished.
    """

    step: str
    attempt: int
    offset: int
    follow: bool
    node: int = 0


Of: TypeAlias = Literal["step", "machine"]
Verb: TypeAlias = Literal["cancel", "pause", "resume"]
Pieces: TypeAlias = Generator[bytes, None, None]
Events: TypeAlias = Generator[Sequence[Event], None, None]
AsyncPieces: TypeAlias = AsyncGenerator[bytes, None]
AsyncEvents: TypeAlias = AsyncGenerator[Sequence[Event], None]


class Transport(Protocol):
    """Access to stored runs.

    `name` is the server's address, empty for a workspace of this machine.

    Methods raise RecipeError, for example NotFound for an unknown run, and Lost if the request may
    be repeated.
    """

    name: str

    def find(self, word: str) -> str:
        """Return the id of a run, given its name, its id, a unique part of its id, or `last`,
        `last~1`.  Raises NotFound.
        """
        ...

    def recipes(self) -> Sequence[RecipeEntry]:
        """Return the recipes that can be run by name."""
        ...

    def plan(self, new: New) -> Forecast:
        """Return the steps, duration and cost of a run, without storing, executing or renting
        anything.  Raises Invalid with all problems.
        """
        ...

    def list_runs(self, listing: Listing) -> RunPage: ...
    def run(self, run: str) -> Status: ...
    def submit(self, new: New, key: str) -> str:
        """Store a run and return its id.

        Repeating a request with the same key returns the same id.
        """
        ...

    def events(self, run: str, after: int) -> Sequence[Event]:
        """Return the next events with numbers above `after`, or an empty list."""
        ...

    def follow(self, run: str, after: int) -> Events:
        """Yield new events of a run until the run has finished.

        May yield empty lists while no events arrive.
        """
        ...

    def log(self, run: str, part: LogPart) -> Pieces: ...
    def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]: ...
    def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]:
        """Return the outputs of a run, or the output `name`.

        For a named directory, `files` is one page, with paths sorted after `after`.
        """
        ...

    def file(self, run: str, name: str, path: str, begin: int) -> Pieces:
        """Yield the bytes of an output, or of the file `path` in an output directory, from `begin`."""
        ...

    def request(self, run: str, what: Verb, *, keep_hosts: bool = False) -> Outcome:
        """Cancel, pause or resume a run.

        Raises CannotAsk if the state of the run forbids the request.
        """
        ...

    def retry(self, run: str, begin: str | None) -> Outcome: ...
    def prioritize(self, run: str, priority: int) -> Outcome: ...
    def differences(self, a: str, b: str) -> Differences:
        """Return the differences between two runs, from their records."""
        ...

    def workers(self) -> Sequence[WorkerStatus]: ...
    def queue(self) -> Sequence[QueuedRun]: ...
    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """An asynchronous version of `Transport`.  Read streams with `async for`."""

    name: str

    async def recipes(self) -> Sequence[RecipeEntry]: ...
    async def plan(self, new: New) -> Forecast: ...
    async def run(self, run: str) -> Status: ...
    async def submit(self, new: New, key: str) -> str: ...
    async def events(self, run: str, after: int) -> Sequence[Event]: ...
    def follow(self, run: str, after: int) -> AsyncEvents: ...
    def log(self, run: str, part: LogPart) -> AsyncPieces: ...
    async def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]: ...
    async def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]: ...
    def file(self, run: str, name: str, path: str, begin: int) -> AsyncPieces: ...
    async def request(self, run: str, what: Verb) -> Outcome: ...
    async def retry(self, run: str, begin: str | None) -> Outcome: ...
    async def prioritize(self, run: str, priority: int) -> Outcome: ...
    async def close(self) -> None: ...
