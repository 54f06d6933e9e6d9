"""What can be asked of a place that keeps runs, a workspace of this machine or a server: one method for each question.

`Here` answers from a workspace, `There` asks a server; `AsyncHere` and `AsyncThere` do it by `await`.  A method asks once.
`core` decides what is asked again, and makes of these questions what a caller gets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ...api.differences import Differences
from ...api.outcomes import Outcome
from ...api.submitting import Ticket
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


class Lost(Exception):
    """No answer came, or only a part of one, or the server is too busy for one: the same may be asked again, after `wait` seconds.

    `failure` is what a caller is told in the end.
    """

    def __init__(self, words: str, wait: float = 0.0, failure: RecipeError | None = None) -> None:
        super().__init__(words)
        self.wait = wait
        self.failure = failure or Infrastructure(
            f"cannot reach the server: {words}",
            fix="check that the server is running and the URL is correct",
        )


class New(NamedTuple):
    """A run that is asked for."""

    request: Request
    choice: Choice = Choice()
    settings: Settings = Settings()
    ticket: Ticket = Ticket()
    webhooks: Sequence[Mapping[str, object]] = ()


class Listing(NamedTuple):
    """Which runs are listed, of so many at once.  Empty: any."""

    limit: int
    states: Sequence[str] = ()
    recipe: str = ""
    user: str = ""
    tag: str = ""
    after: str = ""
    """The `next` of the page before."""


class Page(NamedTuple):
    """Runs, the newest first; `next`: what to ask for after them, empty at the end."""

    runs: Sequence[Status]
    next: str


class LogPart(NamedTuple):
    """What an attempt printed, on one of its nodes, from a byte on; with `follow` until the attempt is over."""

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
    """Where runs are kept, and asked for.  `name` is its address; empty for a workspace of this machine.

    Methods raise RecipeError, and Lost where they may be asked again: `NotFound` for a run that there is not.
    """

    name: str

    def find(self, word: str) -> str:
        """The run that a word names: its name or id, a part of its id that no other has, `last`, `last~1`.  Raises NotFound."""
        ...

    def recipes(self) -> Sequence[RecipeEntry]:
        """The recipes that may be run by their names."""
        ...

    def plan(self, new: New) -> Forecast:
        """What a run would do, take and cost; nothing is stored, run or rented.  Raises Invalid with every problem."""
        ...

    def list_runs(self, listing: Listing) -> Page: ...
    def run(self, run: str) -> Status: ...
    def submit(self, new: New, key: str) -> str:
        """Store a run, and answer its id.  The same key with the same request is the same run."""
        ...

    def events(self, run: str, after: int) -> Sequence[Event]:
        """The next events with a number above `after`; empty where there are none."""
        ...

    def follow(self, run: str, after: int) -> Events:
        """The events of a run as they happen, until it is over; now and then an empty list, where nothing happens."""
        ...

    def log(self, run: str, part: LogPart) -> Pieces: ...
    def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]: ...
    def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]:
        """The outputs of a run, or the one of that name; of a folder the files whose paths are above `after`, a page of them."""
        ...

    def file(self, run: str, name: str, path: str, begin: int) -> Pieces:
        """The bytes of an output, or of a file in it, from `begin` on."""
        ...

    def request(self, run: str, what: Verb, *, keep_hosts: bool = False) -> Outcome:
        """Cancel, pause or resume a run.  Raises CannotAsk where it stands otherwise."""
        ...

    def retry(self, run: str, begin: str | None) -> Outcome: ...
    def prioritize(self, run: str, priority: int) -> Outcome: ...
    def differences(self, a: str, b: str) -> Differences:
        """What differs between two runs, by what each remembers."""
        ...

    def workers(self) -> Sequence[WorkerStatus]: ...
    def queue(self) -> Sequence[QueuedRun]: ...
    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same by `await`; what comes in pieces is read by `async for`."""

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
