"""What runs do, given to all who follow them: one thread reads the store, for one follower or a thousand."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from starlette.concurrency import run_in_threadpool

from ..api.logs import Part, parts
from ..api.values import moment
from ..errors import NotFound, RecipeError
from ..storage.records.runs import FINAL, RunRow
from ..storage.workspace import Workspace
from .answers import NoSuchRun, Refused, plain
from .followed import Followed, SentMove, take_up, write
from .messages import OVER, STOPS, TOKEN_GONE, TOO_SLOW, End, Form, Message
from .room import Room, run_of
from .run_reader import PAGE, PIECE, RunReader, move
from .tokens import Token

LOOK: Final = 0.2
"""Seconds between two looks at the store."""
CHECK: Final = 1.0
"""Seconds after which the streams of a token that was removed, or has expired, end."""
STREAMS: Final = 20
"""Streams that one token may have open."""
QUIET: Final = 15.0
"""Seconds of silence after which a stream says that it is alive."""
BUFFER: Final = 1 << 20
"""Bytes that wait for one reader at most: one that is slower is dropped."""
GRACE: Final = 10.0
"""Seconds in which a stream that ends has to have been read; then its connection is cut."""
RECENT: Final = 500
"""Moves of a followed run that are kept for those who follow it next."""
KEPT: Final = 10_000
"""Moves of all runs that are kept for those who connect again."""
LINGER: Final = 60.0
"""Seconds for which all runs are read on after the last who followed them has gone."""
SPAN: Final = 60.0
"""Seconds before the end of a stream of all runs from which moves are sent again, if the server has not kept them."""
BUDGET: Final = 0.1
"""Seconds of one look for numbers and logs: of many runs they come less often."""
LAST_WORDS: Final = 0.5
"""Seconds in which followers are told that the server stops."""
WAKE: Final = 20
"""Followers that are woken at once: others are served in between."""

_AGAIN: Final = "a move is told apart by its `run` and `seq`"
GAP: Final = {
    "message": "the server was killed, or has sent too much since: moves of the last minute may come again, and log lines, metrics"
    " and progress from before this connection do not",
    "fix": _AGAIN,
}
CUT: Final = {
    "message": f"more than {KEPT} moves were missed, and only the first of them come now",
    "fix": "GET /v1/runs/{run}/events?after= has the rest of each run",
}

_log = logging.getLogger("uvicorn.error")


class Beat(NamedTuple):
    """A run as it stood a moment ago, and the attempts that it had begun."""

    row: RunRow
    parts: Sequence[Part]

    @property
    def over(self) -> bool:
        return self.row.state in FINAL


class Look(NamedTuple):
    """What is to be looked at: runs with the kinds that are wanted of each, and of all others, if anybody follows all."""

    runs: Mapping[str, frozenset[str]]
    every: frozenset[str] | None
    first: frozenset[str]
    """Runs of which nothing is known to who follows them."""


class News(NamedTuple):
    """What is new of one run."""

    beat: Beat
    seen: int
    messages: Sequence[Message]
    over: bool
    recent: Sequence[Message]
    """Moves that it made before it was followed."""
    last: Sequence[Message]
    """The last of its progress and metrics, and its warnings."""


class Reader:
    """Looks at the store.  Used by one thread."""

    def __init__(self, room: Room, upcoming: Mapping[str, int] | None) -> None:
        self._room = room
        self._ws: Workspace | None = None
        self._readers: dict[str, RunReader] = {}
        self._next: dict[str, int] | None = None if upcoming is None else dict(upcoming)
        """Of each run the number of the event that comes next, while all runs are followed."""
        self._version, self._looked = -1, 0.0
        self.behind = False
        """Whether there is more to read at once."""

    @property
    def upcoming(self) -> Mapping[str, int] | None:
        """Of each run the number of the event that comes next, while all runs are followed."""
        return self._next

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._next = None
        if self._ws is not None:
            self._ws.close()
            self._ws = None

    def look(self, look: Look) -> dict[str, News | None]:
        """What is new since the last look; None of a run that is not there.  Raises RecipeError."""
        ws = self._ws = self._ws or self._room.working()
        found: dict[str, News | None] = {}
        recent: dict[str, Sequence[Message]] = {}
        for run in look.runs.keys() - self._readers.keys():
            try:
                recent[run] = self._begin(ws, run)
            except NoSuchRun:
                found[run] = None
        messages: dict[str, list[Message]] = {run: [] for run in look.first if run not in found}
        self._read_moves(ws, look, messages, found)
        self._read_live(ws, look, messages)
        for run, some in messages.items():
            reader = self._readers[run]
            if some or run in look.first or reader.over:
                beat = Beat(reader.row, reader.parts)
                before = recent.get(run, ())
                found[run] = News(beat, reader.seen, some, reader.over, before, reader.last)
        self._drop(look)
        return found

    def _begin(self, ws: Workspace, run: str) -> Sequence[Message]:
        row = run_of(ws, run)
        reader = self._readers[run] = RunReader(row, row.next_event - 1)
        return reader.begin(ws, RECENT)

    def _read_moves(
        self,
        ws: Workspace,
        look: Look,
        messages: dict[str, list[Message]],
        found: dict[str, News | None],
    ) -> None:
        moved = self._moved(ws, look)
        total, self.behind = 0, False
        for run in moved:
            if total > PIECE:
                self.behind = True
                break
            try:
                reader = self._readers.get(run) or self._begin_at(ws, run)
                messages[run] = reader.moves(ws)
            except NotFound:  # it was deleted
                found[run] = None
                if run in self._readers:
                    self._readers.pop(run).close()
                continue
            total += sum(len(each.json) for each in messages[run])
            self.behind = self.behind or reader.behind

    def _begin_at(self, ws: Workspace, run: str) -> RunReader:
        """Read a run from where the stream of all runs is."""
        assert self._next is not None
        reader = RunReader(ws.store.runs.get(run), self._next[run] - 1)
        reader.begin(ws, 0)
        self._readers[run] = reader
        return reader

    def _moved(self, ws: Workspace, look: Look) -> list[str]:
        """The runs that have moves which were not read, or are worked on and were not followed."""
        runs = ws.store.runs
        version, now = runs.news(), time.time()
        is_same = not runs.shared and version == self._version and not self.behind
        is_same = is_same and (look.every is None) == (self._next is None)
        if is_same and now - self._looked < CHECK:
            return []
        self._version, self._looked = version, now
        standing = runs.states_of(list(self._readers))
        gone = [run for run in self._readers if run not in standing]
        if look.every is None:
            self._next = None
        else:
            standing |= self._all(ws, now)
        moved = []
        for run, (state, number) in standing.items():
            reader = self._readers.get(run)
            if reader is not None:
                is_new = number - 1 > reader.seen
            else:
                assert self._next is not None
                is_new = state == "ACTIVE" or number > self._next[run]
            if is_new:
                moved.append(run)
        return [*gone, *moved]

    def _all(self, ws: Workspace, now: float) -> dict[str, tuple[str, int]]:
        """How all runs stand that may have moved."""
        runs = ws.store.runs
        standing = runs.states_since(now - SPAN)
        if self._next is None:
            self._next = {run: number for run, (_, number) in standing.items()}
            return standing
        ended = runs.states_of([run for run in self._next if run not in standing])
        for run in self._next.keys() - standing.keys():
            state, number = ended.get(run, ("", 0))
            if run not in self._readers and (not state or self._next[run] >= number):
                del self._next[run]
        for run in standing:
            # A run that was not there at the last look is new: its first move has number 1.
            self._next.setdefault(run, 1)
        return {run: stands for run, stands in (standing | ended).items() if run in self._next}

    def _read_live(self, ws: Workspace, look: Look, messages: dict[str, list[Message]]) -> None:
        """As many runs as there is time for; the next look begins with others."""
        deadline, total = time.monotonic() + BUDGET, 0
        for run in list(self._readers):
            reader = self._readers.pop(run)
            self._readers[run] = reader
            kinds = look.runs.get(run, frozenset()) | (look.every or frozenset())
            some = reader.live(ws, kinds)
            messages.setdefault(run, []).extend(some)
            total += sum(len(each.json) for each in some)
            if total > PIECE or time.monotonic() > deadline:
                return

    def _drop(self, look: Look) -> None:
        """Forget runs that have no follower any more."""
        for run, reader in list(self._readers.items()):
            if self._next is not None:
                self._next[run] = reader.seen + 1
            is_wanted = look.every is not None and not reader.over
            if run not in look.runs and not (is_wanted and (reader.works or reader.behind)):
                reader.close()
                del self._readers[run]


class Follower:
    """One who follows, and what waits for him."""

    def __init__(
        self, caller: Token, form: Form, kinds: frozenset[str], cut: Callable[[], None]
    ) -> None:
        self.caller, self.form, self.kinds = caller, form, kinds
        self.ended = False
        self.why: End | None = None
        """Why the stream ended, unless he left."""
        self.known: dict[str, int] = {}
        """Of a run: the number up to which its moves are not sent."""
        self._cut = cut
        self._waiting: list[bytes] = []
        self.size = 0
        """Bytes that wait."""
        self._sleeping: asyncio.Future[None] | None = None
        self._cutting: asyncio.TimerHandle | None = None
        self._last = time.monotonic()

    def texts(self, messages: Iterable[Message]) -> list[bytes]:
        """Those of these moves that are for him, as they are sent."""
        only = self.caller.run
        return [
            each.text(self.form)
            for each in messages
            if each.kind in self.kinds
            and only in ("", each.run)
            and each.seq > self.known.get(each.run, 0)
        ]

    def put(self, messages: Iterable[Message]) -> None:
        """Let these wait for him; he is woken by `wake`.  If too much waits he is dropped."""
        for message in messages:
            if message.kind not in self.kinds or self.ended:
                continue
            if message.seq and message.seq <= self.known.get(message.run, 0):
                continue
            self._add(message)
            if self.size > BUFFER:
                self._waiting, self.size = [], 0
                self.end(TOO_SLOW)

    def tell(self, kind: str, **data: object) -> None:
        """A message of the server's own, whatever kinds are followed."""
        if not self.ended:
            self._add(Message(kind, "", data))
            self.wake()

    def _add(self, message: Message) -> None:
        text = message.text(self.form)
        if text:
            self._waiting.append(text)
            self.size += len(text)

    def wake(self) -> None:
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    def end(self, end: End) -> None:
        """Send why, and nothing after it."""
        if self.ended:
            return
        self.tell("end", **end._asdict())
        self.ended, self.why = True, end
        self._cutting = asyncio.get_running_loop().call_later(GRACE, self._cut)
        self.wake()

    def leave(self) -> None:
        """He is gone."""
        self.ended = True
        self._waiting.clear()
        if self._cutting is not None:
            self._cutting.cancel()
        self.wake()

    def stay(self, now: float) -> None:
        """Say that the stream is alive, if nothing was sent for long."""
        if not self._waiting and now - self._last >= QUIET:
            self.tell("alive", at=moment(time.time()))

    async def take(self) -> list[bytes]:
        """What waits for him, as soon as there is something; nothing where the stream is over."""
        while not self._waiting and not self.ended:
            self._sleeping = asyncio.get_running_loop().create_future()
            await self._sleeping
        found, self._waiting, self.size = self._waiting, [], 0
        self._last = time.monotonic()
        return found

    async def rest(self, seconds: float) -> None:
        """Wait, but no longer than the stream is open."""
        if not self.ended:
            self._sleeping = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sleeping, seconds)


class Channel:
    """One run that is followed."""

    def __init__(self) -> None:
        self.ready = _future()
        self.followers: set[Follower] = set()
        self.seen = 0
        """The number of the last move that followers have got."""
        self.recent: deque[Message] = deque(maxlen=RECENT)
        self.last: Sequence[Message] = ()
        """What who follows next is told first: progress, the last metrics, warnings."""
        self.beat: Beat | None = None
        self.over = False
        self.wanted_until = 0.0
        self._asked: frozenset[str] = frozenset()
        self._followed: Counter[str] = Counter()

    def behind(self, number: int) -> list[Message]:
        """The moves behind this number, up to a piece of them; none that have to be read from the store."""
        if not self.recent or number < self.recent[0].seq - 1:
            return []
        return _piece(islice(self.recent, number + 1 - self.recent[0].seq, None))

    @property
    def kinds(self) -> frozenset[str]:
        """What is read: what its followers want, and those who are about to come."""
        asked = self._asked if time.monotonic() < self.wanted_until else frozenset()
        return asked | {"move"} | self._followed.keys()

    def join(self, follower: Follower) -> None:
        """Give a follower everything that comes."""
        self.followers.add(follower)
        self._followed.update(follower.kinds)

    def leave(self, follower: Follower) -> None:
        """Give it nothing more, if it joined."""
        if follower in self.followers:
            self.followers.remove(follower)
            self._followed -= Counter(follower.kinds)  # kinds with no follower are left out

    def want(self, kinds: frozenset[str]) -> None:
        """Read these, too: `ready` is done when they are."""
        if self.ready.done() and not kinds <= self.kinds:
            self.ready = _future()
        self._asked = self.kinds | kinds
        self.wanted_until = time.monotonic() + GRACE

    def take(self, news: News, kinds: frozenset[str]) -> None:
        """Take note of what is new of these kinds, before followers get it."""
        self.beat, self.over, self.seen = news.beat, news.over, news.seen
        self.recent.extend(news.recent)
        self.last = news.last
        self.recent.extend(each for each in news.messages if each.kind == "move")
        if not self.ready.done() and self._asked <= kinds:
            self.ready.set_result(None)


class AllRuns:
    """All runs, while somebody follows them: the moves that were sent last are kept for those who connect again."""

    def __init__(self, before: Followed | None) -> None:
        self.followers: set[Follower] = set()
        self.number = 0
        self._coming: set[Follower] = set()
        self._until = 0.0
        self._begin_anew()
        if before is not None:
            self._go_on(before)

    def _go_on(self, before: Followed) -> None:
        """Continue where the server before this one was."""
        self._epoch, self.number = before.epoch, before.number
        for each in before.sent:
            message = Message("move", each.run, each.data, seq=each.seq)
            message.place = each.place
            self._kept.append((each.number, message))
        # Its followers have as long to come back as those who leave.
        self._until, self._is_read = time.monotonic() + LINGER, True

    def noted(self, upcoming: Mapping[str, int]) -> Followed:
        """What the next server has to know."""
        sent = [
            SentMove(number, each.place, each.run, each.seq, each.data)
            for number, each in self._kept
        ]
        return Followed(self._epoch, self.number, upcoming, sent)

    def _begin_anew(self) -> None:
        self._ready: asyncio.Future[None] | None = None
        self._epoch = os.urandom(4).hex()
        self._kept: deque[tuple[int, Message]] = deque(maxlen=KEPT)
        self._progress: dict[str, Message] = {}
        self._is_read = False

    @property
    def ready(self) -> asyncio.Future[None]:
        """Done when the first look is."""
        if self._ready is None:
            self._ready = _future()
        return self._ready

    def place(self, number: int, at: float) -> str:
        """Where the stream is behind the move of this number, which was read at that time."""
        return f"{self._epoch}-{number}-{int(at * 1000)}"

    def number_of(self, place: str) -> int:
        return int(place.split("-")[1])

    def has(self, place: str) -> bool:
        """Whether everything behind a place is kept."""
        oldest = self._kept[0][0] if self._kept else self.number + 1
        number = self.number_of(place)
        return place.startswith(self._epoch) and oldest - 1 <= number <= self.number

    def want(self, follower: Follower) -> None:
        """Somebody is about to follow."""
        self._coming.add(follower)
        self._until = time.monotonic() + LINGER

    def behind(self, number: int) -> list[Message]:
        """The moves behind this number, up to a piece of them."""
        first = self._kept[0][0] if self._kept else 0
        return _piece(each for _, each in islice(self._kept, max(0, number + 1 - first), None))

    def join(self, follower: Follower) -> None:
        """Send how far runs are, and everything that comes."""
        self.followers.add(follower)
        self.give(follower, self._progress.values())

    def give(self, follower: Follower, messages: Iterable[Message]) -> None:
        """Send what the follower's token may see."""
        only = follower.caller.run
        follower.put(each for each in messages if only in ("", each.run))

    def leave(self, follower: Follower) -> None:
        if follower in self._coming:
            self._until = time.monotonic() + LINGER
        self._coming.discard(follower)
        self.followers.discard(follower)

    def kinds(self, now: float) -> frozenset[str] | None:
        """The kinds that are wanted of all runs; None: they have no follower any more."""
        if not self._coming and now > self._until:
            if self._is_read:
                self._begin_anew()
            return None
        self._is_read = True
        return frozenset({"move"}).union(*(each.kinds for each in self._coming))

    def take(self, run: str, messages: Sequence[Message], over: bool, at: float) -> None:
        """Take note of what is new of a run, before followers get it."""
        for message in messages:
            if message.kind == "move":
                self.number += 1
                message.place = self.place(self.number, at)
                self._kept.append((self.number, message))
            elif message.kind == "progress":
                self._progress[run] = message
        if over:
            self._progress.pop(run, None)

    def fail(self, error: Exception) -> None:
        """Nothing can be read."""
        if not self.ready.done():
            self.ready.set_exception(error)
        self._begin_anew()


def _future() -> asyncio.Future[None]:
    """A future whose error need not be looked at."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class Feed:
    """All who follow runs of one server.  Used by its event loop alone."""

    def __init__(self, room: Room, followed: Path | None = None) -> None:
        """`followed` is the file in which the place of the stream of all runs outlives the server."""
        self._room, self._path = room, followed
        before = None if followed is None else take_up(followed)
        self._upcoming = None if before is None else before.upcoming
        self._followers: set[Follower] = set()
        self._streams: Counter[str] = Counter()
        self._channels: dict[str, Channel] = {}
        self._all = AllRuns(before)
        self._woken, self._left = asyncio.Event(), asyncio.Event()
        self._left.set()
        self._reading: asyncio.Task[None] | None = None
        self._checked = 0.0
        self._is_stopping = False

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return len(self._followers)

    # -- who follows

    @contextmanager
    def following(
        self,
        caller: Token,
        form: Form,
        kinds: frozenset[str],
        cut: Callable[[], None] = lambda: None,
    ) -> Iterator[Follower]:
        """Count another stream of a token, until it is left.  Raises Refused where it would be one too many.

        `cut` ends the connection of a client that does not read why its stream ends.
        """
        if self._is_stopping:
            raise Refused(503, STOPS.code, STOPS.message, "reconnect in a few seconds")
        if self._streams[caller.id] >= STREAMS:
            words = f"a token may open at most {STREAMS} streams at once"
            raise Refused(429, "too-many-streams", words, "close one of the streams")
        follower = Follower(caller, form, kinds, cut)
        self._streams[caller.id] += 1
        self._followers.add(follower)
        self._left.clear()
        try:
            yield follower
        finally:
            follower.leave()
            self._followers.discard(follower)
            if not self._followers:
                self._left.set()
            self._all.leave(follower)
            for channel in self._channels.values():
                channel.leave(follower)
            self._streams[caller.id] -= 1
            if not self._streams[caller.id]:
                del self._streams[caller.id]

    async def channel(self, run: str, kinds: frozenset[str] = frozenset()) -> Channel:
        """A run of which somebody is about to follow these kinds: they are read from now on.

        Raises Refused where there is no such run, RecipeError where it cannot be read.
        """
        channel = self._channels.get(run)
        if channel is None:
            channel = self._channels[run] = Channel()
        channel.want(kinds)
        self._read_now()
        await asyncio.shield(channel.ready)
        return channel

    async def now(self, run: str) -> Beat:
        """The run as it is: what an event of it says is already true."""

        def looked() -> Beat:
            with self._room.reading() as ws:
                row = run_of(ws, run)
                return Beat(row, parts(ws.store.runs.events(run)))

        return await run_in_threadpool(looked)

    async def run(self, run: str, after: int, follower: Follower) -> AsyncIterator[list[bytes]]:
        """What one run did behind move `after`, and what it does, until it is over.  Raises Refused."""
        channel = await self.channel(run, follower.kinds)
        number = after
        while not follower.ended and number < channel.seen:
            page: Sequence[Message] = channel.behind(number)
            if not page:
                page = await run_in_threadpool(self._page, run, number)
            number = page[-1].seq if page else channel.seen
            if texts := follower.texts(page):
                yield texts
            if (
                run not in self._channels
            ):  # it was not followed for as long as the client took to read
                channel = await self.channel(run, follower.kinds)
        # Nothing is awaited from here to the first that comes, so nothing is lost and nothing is sent twice.
        follower.known[run] = number
        channel.join(follower)
        follower.put(channel.last)
        if channel.over:
            follower.end(OVER)
        while found := await follower.take():
            yield found

    async def every(self, after: str, follower: Follower) -> AsyncIterator[list[bytes]]:
        """What all runs do that the token may see: behind the place `after`, or from now on."""
        channels = self._all
        channels.want(follower)
        self._read_now()
        await asyncio.shield(channels.ready)
        number = channels.number
        begin = Message("begin", "", {"at": moment(time.time())})
        begin.place = channels.place(number, time.time())
        if after and channels.has(after):
            number = channels.number_of(after)
        elif after:
            missed = await run_in_threadpool(self._missed, after, follower.caller.run)
            for message in missed:
                message.place = after
                follower.known[message.run] = message.seq
            gap = Message("gap", "", GAP if len(missed) < KEPT else CUT)
            messages = [gap, *(each for each in missed if each.kind in follower.kinds), begin]
            yield [each.text(follower.form) for each in messages]
        else:
            yield [begin.text(follower.form)]
        while not follower.ended and (page := channels.behind(number)):
            number += len(page)
            if texts := follower.texts(page):
                yield texts
        # Nothing is awaited from here to the first that comes.
        channels.join(follower)
        while found := await follower.take():
            yield found

    def _page(self, run: str, number: int) -> list[Message]:
        with self._room.reading() as ws:
            return [move(ws, each) for each in ws.store.runs.events(run, number, PAGE)]

    def _missed(self, after: str, only: str) -> list[Message]:
        since = int(after.rpartition("-")[2]) / 1000 - SPAN
        with self._room.reading() as ws:
            events = ws.store.runs.moves_since(since, KEPT)
            return [move(ws, each) for each in events if only in ("", each.run)]

    # -- reading

    def _read_now(self) -> None:
        self._woken.set()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._wanted():
            self._read_now()

    def _wanted(self) -> Look | None:
        """What is to be read; None: there is no follower."""
        now = time.monotonic()
        for run, channel in list(self._channels.items()):
            if not channel.followers and channel.wanted_until < now:
                del self._channels[run]
        every = self._all.kinds(now)
        if every is None and not self._channels and not self._followers:
            return None
        runs = {run: channel.kinds for run, channel in self._channels.items()}
        first = (run for run, channel in self._channels.items() if not channel.ready.done())
        return Look(runs, every, frozenset(first))

    async def _read(self) -> None:
        loop, reader = asyncio.get_running_loop(), Reader(self._room, self._upcoming)
        self._upcoming = None
        with ThreadPoolExecutor(1, "feed") as thread:
            try:
                while (look := self._wanted()) is not None and not self._is_stopping:
                    self._woken.clear()
                    at = time.time()
                    try:
                        found = await loop.run_in_executor(thread, reader.look, look)
                    except (
                        Exception
                    ) as error:  # of whatever kind: no client waits for what will not come
                        self._fail(error)
                        await asyncio.sleep(CHECK)
                        continue
                    await self._give(look, found, at)
                    # Who begins now gets nothing of what came while no server ran.
                    if look.every is not None and not reader.behind and not self._all.ready.done():
                        self._all.ready.set_result(None)
                    await self._check(thread)
                    if reader.behind:
                        await self._drained()
                    else:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._woken.wait(), LOOK)
            finally:
                if self._is_stopping:
                    self._upcoming = reader.upcoming
                await loop.run_in_executor(thread, reader.close)

    async def _drained(self) -> None:
        """Wait until followers have taken most of what they were given, but no longer than a look takes else."""
        deadline = time.monotonic() + LOOK
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK / 20)
            if all(each.size < BUFFER // 4 for each in self._followers):
                return

    async def _give(self, look: Look, found: Mapping[str, News | None], at: float) -> None:
        for run, news in found.items():
            channel = self._channels.get(run)
            if news is None:
                self._gone(run)
                continue
            if look.every is not None:
                self._all.take(run, news.messages, news.over, at)
            if channel is not None and run in look.runs:
                channel.take(news, look.runs[run])
            # Who joins from here on has these already.
            every = list(self._all.followers) if look.every is not None else []
            of_run = list(channel.followers) if channel is not None else []
            await _in_turn(every, partial(self._all.give, messages=news.messages))
            await _in_turn(of_run, partial(_give_run, news=news))

    def _gone(self, run: str) -> None:
        """There is no such run, or it was deleted."""
        channel = self._channels.pop(run, None)
        if channel is None:
            return
        if not channel.ready.done():
            channel.ready.set_exception(NoSuchRun())
        for follower in list(channel.followers):
            follower.end(End("failed", "the run was deleted", "list the runs with GET /v1/runs"))

    def _fail(self, error: Exception) -> None:
        """The store cannot be read."""
        if isinstance(error, RecipeError):
            words = plain(str(error), self._room.root)
        else:
            _log.error("the runs cannot be read", exc_info=error)
            words = "an internal error ended the stream"
        for channel in self._channels.values():
            if not channel.ready.done():
                channel.ready.set_exception(error)
        self._channels.clear()
        self._all.fail(error)
        for follower in list(self._followers):
            follower.end(End("failed", words, "reconnect; check the server with GET /health"))

    async def _check(self, thread: ThreadPoolExecutor) -> None:
        """End the streams of tokens that are none any more, and let the others be seen to be alive."""
        now = time.monotonic()
        if now - self._checked < CHECK:
            return
        self._checked = now
        loop = asyncio.get_running_loop()
        try:
            tokens = await loop.run_in_executor(thread, self._room.tokens.all)
        except RecipeError:
            return  # every request says so
        known = {token.id for token in tokens if not token.expired}
        for number, follower in enumerate(list(self._followers), 1):
            if follower.caller.id not in known:
                follower.end(TOKEN_GONE)
            follower.stay(now)
            if number % WAKE == 0:
                await asyncio.sleep(0)

    # -- the end

    async def stop(self) -> None:
        """End every stream, with a word to those who follow."""
        self._is_stopping = True
        self._woken.set()
        for follower in list(self._followers):
            follower.end(STOPS)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), LAST_WORDS)

    async def close(self) -> None:
        """Read nothing more."""
        self._is_stopping = True
        self._woken.set()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self._path is not None and self._upcoming is not None:
            try:
                write(self._path, self._all.noted(self._upcoming))
            except OSError as error:
                _log.warning("the next server sends moves of the last minute again: %s", error)


def _piece(messages: Iterable[Message]) -> list[Message]:
    """The first of these, with some bytes together."""
    found, size = [], 0
    for message in messages:
        found.append(message)
        size += len(message.json)
        if size > PIECE:
            break
    return found


async def _in_turn(followers: Sequence[Follower], what: Callable[[Follower], None]) -> None:
    """Serve followers, a few at once: others are served in between."""
    for number, follower in enumerate(followers, 1):
        what(follower)
        follower.wake()
        if number % WAKE == 0:
            await asyncio.sleep(0)


def _give_run(follower: Follower, news: News) -> None:
    follower.put(news.messages)
    if news.over:
        follower.end(OVER)
