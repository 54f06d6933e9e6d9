"""Live updates of runs. One thread reads the store, for any number of clients."""

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

from ..api.logs import AttemptLog, list_attempt_logs
from ..api.values import moment
from ..errors import NotFound, RecipeError
from ..storage.records.runs import FINAL, RunRow
from ..storage.workspace import Workspace
from .answers import NoSuchRun, Refused, hide_local_paths
from .followed import SentEvent, StreamState, load_state, save_state
from .messages import OVER, STOPS, TOKEN_GONE, TOO_SLOW, End, Form, Message
from .room import Room, run_of
from .run_reader import PAGE, PIECE, RunReader, event_message
from .tokens import Token

LOOK: Final = 0.2
"""Seconds between two reads of the store."""
CHECK: Final = 1.0
"""Seconds after which streams of a removed or expired token end."""
STREAMS: Final = 20
"""Maximum number of open streams per token."""
QUIET: Final = 15.0
"""Seconds without messages after which an `alive` event is sent."""
BUFFER: Final = 1 << 20
"""Maximum number of unsent bytes per client. Slower clients are disconnected."""
GRACE: Final = 10.0
"""Seconds that a client has to read the end of a stream before its connection is closed."""
RECENT: Final = 500
"""Number of events kept of a followed run, for new followers."""
KEPT: Final = 10_000
"""Number of events kept of all runs, for clients that reconnect."""
LINGER: Final = 60.0
"""Seconds for which all runs are still read after their last follower has left."""
SPAN: Final = 60.0
"""Seconds of earlier events that are repeated to a reconnecting client if its position is unknown.
"""
BUDGET: Final = 0.1
"""Maximum number of seconds per read for metrics and logs.

With many runs, each is read less often.
"""
LAST_WORDS: Final = 0.5
"""Seconds in which followers receive the message that the server stops."""
WAKE: Final = 20
"""Number of followers that are woken before other requests get a turn."""

_AGAIN: Final = "to recognize repeated moves, compare `run` and `seq`"
GAP: Final = {
    "message": "the server was killed, or the interruption was too long: the server may repeat moves of the last minute, and does not"
    " repeat log lines, metrics and progress",
    "fix": _AGAIN,
}
CUT: Final = {
    "message": f"this client missed more than {KEPT} moves, and the stream repeats only the first {KEPT}",
    "fix": "GET /v1/runs/{run}/events?after= has the rest of each run",
}

_log = logging.getLogger("uvicorn.error")


class RunSnapshot(NamedTuple):
    """The latest known state of a run, with its started attempts."""

    row: RunRow
    parts: Sequence[AttemptLog]

    @property
    def over(self) -> bool:
        return self.row.state in FINAL


class ReadRequest(NamedTuple):
    """The runs to read next, with the wanted kinds of messages.

    `every` are the kinds wanted of all other runs, or None if no client follows all runs.
    """

    runs: Mapping[str, frozenset[str]]
    every: frozenset[str] | None
    first: frozenset[str]
    """Runs that are read for the first time for a follower."""


class RunUpdate(NamedTuple):
    """New messages of one run."""

    beat: RunSnapshot
    seen: int
    messages: Sequence[Message]
    over: bool
    recent: Sequence[Message]
    """Events from before the run was followed."""
    last: Sequence[Message]
    """The latest progress and metrics, and all warnings."""


class FeedReader:
    """Reader of run updates from the store, for all followers. Use in one thread."""

    def __init__(self, room: Room, upcoming: Mapping[str, int] | None) -> None:
        self._room = room
        self._ws: Workspace | None = None
        self._readers: dict[str, RunReader] = {}
        self._next: dict[str, int] | None = None if upcoming is None else dict(upcoming)
        """Number of the next event of each run, while all runs are followed."""
        self._version, self._looked = -1, 0.0
        self.behind = False
        """True if more events can be read immediately."""

    @property
    def next_events(self) -> Mapping[str, int] | None:
        """Number of the next event of each run, or None if no client follows all runs."""
        return self._next

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._next = None
        if self._ws is not None:
            self._ws.close()
            self._ws = None

    def look(self, look: ReadRequest) -> dict[str, RunUpdate | None]:
        """Read the new messages of each run. None stands for a run that does not exist.

        Raises RecipeError.
        """
        ws = self._ws = self._ws or self._room.open_workspace()
        found: dict[str, RunUpdate | None] = {}
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
                beat = RunSnapshot(reader.row, reader.parts)
                before = recent.get(run, ())
                found[run] = RunUpdate(beat, reader.seen, some, reader.over, before, reader.last)
        self._drop(look)
        return found

    def _begin(self, ws: Workspace, run: str) -> Sequence[Message]:
        row = run_of(ws, run)
        reader = self._readers[run] = RunReader(row, row.next_event - 1)
        return reader.begin(ws, RECENT)

    def _read_moves(
        self,
        ws: Workspace,
        look: ReadRequest,
        messages: dict[str, list[Message]],
        found: dict[str, RunUpdate | None],
    ) -> None:
        moved = self._find_changed_runs(ws, look)
        total, self.behind = 0, False
        for run in moved:
            if total > PIECE:
                self.behind = True
                break
            try:
                reader = self._readers.get(run) or self._begin_at(ws, run)
                messages[run] = reader.read_events(ws)
            except NotFound:  # the run was deleted
                found[run] = None
                if run in self._readers:
                    self._readers.pop(run).close()
                continue
            total += sum(len(each.json) for each in messages[run])
            self.behind = self.behind or reader.behind

    def _begin_at(self, ws: Workspace, run: str) -> RunReader:
        """Start reading a run at the position of the all-runs stream."""
        assert self._next is not None
        reader = RunReader(ws.store.runs.get(run), self._next[run] - 1)
        reader.begin(ws, 0)
        self._readers[run] = reader
        return reader

    def _find_changed_runs(self, ws: Workspace, look: ReadRequest) -> list[str]:
        """Return the runs with unread events, and active runs without a reader."""
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
            standing |= self._find_all_positions(ws, now)
        moved = []
        for run, (state, number) in standing.items():
            if self._has_moved(run, state, number):
                moved.append(run)
        return [*gone, *moved]

    def _has_moved(self, run: str, state: str, number: int) -> bool:
        """Return True for a run with unread events, and for an active run without a reader."""
        reader = self._readers.get(run)
        if reader is not None:
            return number - 1 > reader.seen
        assert self._next is not None
        return state == "ACTIVE" or number > self._next[run]

    def _find_all_positions(self, ws: Workspace, now: float) -> dict[str, tuple[str, int]]:
        """Return the state and next event number of all runs that may have changed."""
        runs = ws.store.runs
        recent = runs.states_since(now - SPAN)
        if self._next is None:
            self._next = {run: number for run, (_, number) in recent.items()}
            return recent
        quiet = [run for run in self._next if run not in recent]
        earlier = runs.states_of(quiet)
        for run in quiet:
            if run not in self._readers and not self._has_news(run, earlier.get(run, ("", 0))):
                del self._next[run]
        for run in recent:
            # A run that was missing at the last read is new. Its first event has number 1.
            self._next.setdefault(run, 1)
        positions = recent | earlier
        return {run: position for run, position in positions.items() if run in self._next}

    def _has_news(self, run: str, position: tuple[str, int]) -> bool:
        """Return True if a run has unread events. A deleted run has no state."""
        assert self._next is not None
        state, number = position
        return state != "" and self._next[run] < number

    def _read_live(
        self, ws: Workspace, look: ReadRequest, messages: dict[str, list[Message]]
    ) -> None:
        """Read metrics and logs of followed runs within the time budget.

        The next call starts with other runs.
        """
        deadline, total = time.monotonic() + BUDGET, 0
        for run in list(self._readers):
            reader = self._readers.pop(run)
            self._readers[run] = reader
            kinds = look.runs.get(run, frozenset()) | (look.every or frozenset())
            some = reader.read_live(ws, kinds)
            messages.setdefault(run, []).extend(some)
            total += sum(len(each.json) for each in some)
            if total > PIECE or time.monotonic() > deadline:
                return

    def _drop(self, look: ReadRequest) -> None:
        """Close the readers of runs that no client follows."""
        for run, reader in list(self._readers.items()):
            if self._next is not None:
                self._next[run] = reader.seen + 1
            is_wanted = look.every is not None and not reader.over
            if run not in look.runs and not (is_wanted and (reader.works or reader.behind)):
                reader.close()
                del self._readers[run]


class Follower:
    """A client connected to a live stream, with its unsent messages."""

    def __init__(
        self, caller: Token, form: Form, kinds: frozenset[str], cut: Callable[[], None]
    ) -> None:
        self.caller, self.form, self.kinds = caller, form, kinds
        self.ended = False
        self.why: End | None = None
        """Reason for the end of the stream, unless the client left."""
        self.known: dict[str, int] = {}
        """Number of the last event already sent, by run."""
        self._cut = cut
        self._waiting: list[bytes] = []
        self.size = 0
        """Number of unsent bytes."""
        self._sleeping: asyncio.Future[None] | None = None
        self._cutting: asyncio.TimerHandle | None = None
        self._last = time.monotonic()

    def texts(self, messages: Iterable[Message]) -> list[bytes]:
        """Encode the events that this client may see and has not received."""
        only = self.caller.run
        texts = []
        for each in messages:
            if each.kind not in self.kinds or only not in ("", each.run):
                continue
            if each.seq > self.known.get(each.run, 0):
                texts.append(each.text(self.form))
        return texts

    def put(self, messages: Iterable[Message]) -> None:
        """Queue messages for this client, to be sent by `wake`.

        A client with too many unsent bytes is dropped.
        """
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
        """Queue a server message, regardless of the followed kinds."""
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
        """Send the reason for the end of the stream, and no further messages."""
        if self.ended:
            return
        self.tell("end", **end._asdict())
        self.ended, self.why = True, end
        self._cutting = asyncio.get_running_loop().call_later(GRACE, self._cut)
        self.wake()

    def leave(self) -> None:
        """Clean up after the client has disconnected."""
        self.ended = True
        self._waiting.clear()
        if self._cutting is not None:
            self._cutting.cancel()
        self.wake()

    def send_alive(self, now: float) -> None:
        """Send an `alive` event if no message was sent for a long time."""
        if not self._waiting and now - self._last >= QUIET:
            self.tell("alive", at=moment(time.time()))

    async def take(self) -> list[bytes]:
        """Wait for queued messages and return them.

        Return an empty list after the end of the stream.
        """
        while not self._waiting and not self.ended:
            self._sleeping = asyncio.get_running_loop().create_future()
            await self._sleeping
        found, self._waiting, self.size = self._waiting, [], 0
        self._last = time.monotonic()
        return found

    async def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the stream ends."""
        if not self.ended:
            self._sleeping = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sleeping, seconds)


class Channel:
    """The live updates of one run, with the followers of the run."""

    def __init__(self) -> None:
        self.ready = _future()
        self.followers: set[Follower] = set()
        self.seen = 0
        """Number of the last event sent to followers."""
        self.recent: deque[Message] = deque(maxlen=RECENT)
        self.last: Sequence[Message] = ()
        """First messages for a new follower: progress, latest metrics, warnings."""
        self.beat: RunSnapshot | None = None
        self.over = False
        self.wanted_until = 0.0
        self._asked: frozenset[str] = frozenset()
        self._followed: Counter[str] = Counter()

    def behind(self, number: int) -> list[Message]:
        """Return the next batch of recent events above `number`, or [] if only the store has them."""
        if not self.recent or number < self.recent[0].seq - 1:
            return []
        return _first_batch(islice(self.recent, number + 1 - self.recent[0].seq, None))

    @property
    def kinds(self) -> frozenset[str]:
        """The message kinds wanted by current and expected followers."""
        asked = self._asked if time.monotonic() < self.wanted_until else frozenset()
        return asked | {"move"} | self._followed.keys()

    def join(self, follower: Follower) -> None:
        """Add a follower, which receives all further messages."""
        self.followers.add(follower)
        self._followed.update(follower.kinds)

    def leave(self, follower: Follower) -> None:
        """Remove a follower."""
        if follower in self.followers:
            self.followers.remove(follower)
            self._followed -= Counter(follower.kinds)  # drop kinds without followers

    def want(self, kinds: frozenset[str]) -> None:
        """Start reading these message kinds. `ready` completes after the first read."""
        if self.ready.done() and not kinds <= self.kinds:
            self.ready = _future()
        self._asked = self.kinds | kinds
        self.wanted_until = time.monotonic() + GRACE

    def take(self, news: RunUpdate, kinds: frozenset[str]) -> None:
        """Record new messages of the run before they are sent to followers.

        `kinds` are the kinds that were read.
        """
        self.beat, self.over, self.seen = news.beat, news.over, news.seen
        self.recent.extend(news.recent)
        self.last = news.last
        self.recent.extend(each for each in news.messages if each.kind == "move")
        if not self.ready.done() and self._asked <= kinds:
            self.ready.set_result(None)


class AllRuns:
    """The live stream of all runs. Recent events are kept for clients that reconnect."""

    def __init__(self, before: StreamState | None) -> None:
        self.followers: set[Follower] = set()
        self.number = 0
        self._coming: set[Follower] = set()
        self._until = 0.0
        self._reset()
        if before is not None:
            self._restore(before)

    def _restore(self, before: StreamState) -> None:
        """Restore the stream position saved by the previous server process."""
        self._epoch, self.number = before.epoch, before.number
        for each in before.sent:
            message = Message("move", each.run, each.data, seq=each.seq)
            message.position = each.position
            self._kept.append((each.number, message))
        # Followers of the previous server have LINGER seconds to reconnect.
        self._until, self._is_read = time.monotonic() + LINGER, True

    def to_state(self, upcoming: Mapping[str, int]) -> StreamState:
        """Return the stream state for the next server process."""
        sent = [
            SentEvent(number, each.position, each.run, each.seq, each.data)
            for number, each in self._kept
        ]
        return StreamState(self._epoch, self.number, upcoming, sent)

    def _reset(self) -> None:
        self._ready: asyncio.Future[None] | None = None
        self._epoch = os.urandom(4).hex()
        self._kept: deque[tuple[int, Message]] = deque(maxlen=KEPT)
        self._progress: dict[str, Message] = {}
        self._is_read = False

    @property
    def ready(self) -> asyncio.Future[None]:
        """A future that completes after the first read."""
        if self._ready is None:
            self._ready = _future()
        return self._ready

    def position_after(self, number: int, at: float) -> str:
        """Return the stream position after event `number`, read at time `at`."""
        return f"{self._epoch}-{number}-{int(at * 1000)}"

    def number_of(self, position: str) -> int:
        return int(position.split("-")[1])

    def has(self, position: str) -> bool:
        """Return True if all events after a stream position are still in memory."""
        oldest = self._kept[0][0] if self._kept else self.number + 1
        number = self.number_of(position)
        return position.startswith(self._epoch) and oldest - 1 <= number <= self.number

    def want(self, follower: Follower) -> None:
        """Register an expected follower, so that reading starts."""
        self._coming.add(follower)
        self._until = time.monotonic() + LINGER

    def behind(self, number: int) -> list[Message]:
        """Return the next batch of recent events above `number`."""
        first = self._kept[0][0] if self._kept else 0
        return _first_batch(
            each for _, each in islice(self._kept, max(0, number + 1 - first), None)
        )

    def join(self, follower: Follower) -> None:
        """Add a follower, and send the current progress of all runs."""
        self.followers.add(follower)
        self.give(follower, self._progress.values())

    def give(self, follower: Follower, messages: Iterable[Message]) -> None:
        """Send a follower those messages that its token may see."""
        only = follower.caller.run
        follower.put(each for each in messages if only in ("", each.run))

    def leave(self, follower: Follower) -> None:
        if follower in self._coming:
            self._until = time.monotonic() + LINGER
        self._coming.discard(follower)
        self.followers.discard(follower)

    def kinds(self, now: float) -> frozenset[str] | None:
        """Return the wanted message kinds, or None if no client follows all runs."""
        if not self._coming and now > self._until:
            if self._is_read:
                self._reset()
            return None
        self._is_read = True
        return frozenset({"move"}).union(*(each.kinds for each in self._coming))

    def take(self, run: str, messages: Sequence[Message], over: bool, at: float) -> None:
        """Record new messages of a run before they are sent to followers."""
        for message in messages:
            if message.kind == "move":
                self.number += 1
                message.position = self.position_after(self.number, at)
                self._kept.append((self.number, message))
            elif message.kind == "progress":
                self._progress[run] = message
        if over:
            self._progress.pop(run, None)

    def fail(self, error: Exception) -> None:
        """Report a read error to the waiting followers, and reset, so that the next follower reads
        from the beginning.
        """
        if not self.ready.done():
            self.ready.set_exception(error)
        self._reset()


def _future() -> asyncio.Future[None]:
    """Create a future whose exception may stay unread without a warning."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class Feed:
    """Live updates of a server, with all followers. Use only in the event loop."""

    def __init__(self, room: Room, followed: Path | None = None) -> None:
        """Restore the stream position from the file `followed` of the previous process."""
        self._room, self._path = room, followed
        before = None if followed is None else load_state(followed)
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
        """Number of open live streams."""
        return len(self._followers)

    # -- who follows

    @contextmanager
    def follow(
        self,
        caller: Token,
        form: Form,
        kinds: frozenset[str],
        cut: Callable[[], None] = lambda: None,
    ) -> Iterator[Follower]:
        """Register a stream of a token for the duration of the context.

        Raises Refused if the token has too many streams. `cut` closes the connection of a client
        that does not read the end of its stream.
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
        """Return the channel of a run, and start reading these kinds of messages.

        Raises Refused if the run does not exist, and RecipeError if it cannot be read.
        """
        channel = self._channels.get(run)
        if channel is None:
            channel = self._channels[run] = Channel()
        channel.want(kinds)
        self._read_now()
        await asyncio.shield(channel.ready)
        return channel

    async def read_snapshot(self, run: str) -> RunSnapshot:
        """Read the current state of a run from the store."""

        def read_snapshot() -> RunSnapshot:
            with self._room.borrow_workspace() as ws:
                row = run_of(ws, run)
                return RunSnapshot(row, list_attempt_logs(ws.store.runs.events(run)))

        return await run_in_threadpool(read_snapshot)

    async def stream_run(
        self, run: str, after: int, follower: Follower
    ) -> AsyncIterator[list[bytes]]:
        """Yield the encoded messages of one run after event `after`, until the run finishes.

        Raises Refused.
        """
        channel = await self.channel(run, follower.kinds)
        number = after
        while not follower.ended and number < channel.seen:
            page: Sequence[Message] = channel.behind(number)
            if not page:
                page = await run_in_threadpool(self._page, run, number)
            number = page[-1].seq if page else channel.seen
            texts = follower.texts(page)
            if texts:
                yield texts
            # The channel may have expired while the client was reading.
            if run not in self._channels:
                channel = await self.channel(run, follower.kinds)
        # No await from here to `take`, so no message is lost or repeated.
        follower.known[run] = number
        channel.join(follower)
        follower.put(channel.last)
        if channel.over:
            follower.end(OVER)
        while found := await follower.take():
            yield found

    async def stream_all(self, after: str, follower: Follower) -> AsyncIterator[list[bytes]]:
        """Yield encoded messages of all visible runs, after position `after` or from now on."""
        channels = self._all
        channels.want(follower)
        self._read_now()
        await asyncio.shield(channels.ready)
        number = channels.number
        begin = Message("begin", "", {"at": moment(time.time())})
        begin.position = channels.position_after(number, time.time())
        if after and channels.has(after):
            number = channels.number_of(after)
        elif after:
            gap = await self._fill_gap(after, follower)
            yield [each.text(follower.form) for each in (*gap, begin)]
        else:
            yield [begin.text(follower.form)]
        while not follower.ended:
            page = channels.behind(number)
            if not page:
                break
            number += len(page)
            texts = follower.texts(page)
            if texts:
                yield texts
        # No await from here to `take`, so no message is lost or repeated.
        channels.join(follower)
        while found := await follower.take():
            yield found

    async def _fill_gap(self, after: str, follower: Follower) -> list[Message]:
        """Return a gap message, and the messages after a position that is no longer in memory."""
        missed = await run_in_threadpool(self._read_missed, after, follower.caller.run)
        for message in missed:
            message.position = after
            follower.known[message.run] = message.seq
        gap = Message("gap", "", GAP if len(missed) < KEPT else CUT)
        shown = [each for each in missed if each.kind in follower.kinds]
        return [gap, *shown]

    def _page(self, run: str, number: int) -> list[Message]:
        with self._room.borrow_workspace() as ws:
            return [event_message(ws, each) for each in ws.store.runs.events(run, number, PAGE)]

    def _read_missed(self, after: str, only: str) -> list[Message]:
        since = int(after.rpartition("-")[2]) / 1000 - SPAN
        with self._room.borrow_workspace() as ws:
            events = ws.store.runs.moves_since(since, KEPT)
            return [event_message(ws, each) for each in events if only in ("", each.run)]

    # -- reading

    def _read_now(self) -> None:
        self._woken.set()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._continue_reading)

    def _continue_reading(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._next_request():
            self._read_now()

    def _next_request(self) -> ReadRequest | None:
        """Return the next read request for the store, or None without followers."""
        now = time.monotonic()
        self._drop_unwanted_channels(now)
        kinds_of_all = self._all.kinds(now)
        if kinds_of_all is None and not self._channels and not self._followers:
            return None
        kinds = {run: channel.kinds for run, channel in self._channels.items()}
        unread = {run for run, channel in self._channels.items() if not channel.ready.done()}
        return ReadRequest(kinds, kinds_of_all, frozenset(unread))

    def _drop_unwanted_channels(self, now: float) -> None:
        """Delete the channels of runs that nobody follows any more."""
        for run, channel in list(self._channels.items()):
            if not channel.followers and channel.wanted_until < now:
                del self._channels[run]

    async def _read(self) -> None:
        loop, reader = asyncio.get_running_loop(), FeedReader(self._room, self._upcoming)
        self._upcoming = None
        with ThreadPoolExecutor(1, "feed") as thread:
            try:
                while (look := self._next_request()) is not None and not self._is_stopping:
                    self._woken.clear()
                    at = time.time()
                    try:
                        found = await loop.run_in_executor(thread, reader.look, look)
                    # Any error ends the streams, so that no client waits forever.
                    except Exception as error:
                        self._fail(error)
                        await asyncio.sleep(CHECK)
                        continue
                    await self._give(look, found, at)
                    # New followers do not receive events from the time without a server.
                    if look.every is not None and not reader.behind and not self._all.ready.done():
                        self._all.ready.set_result(None)
                    await self._check(thread)
                    if reader.behind:
                        await self._wait_until_drained()
                    else:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._woken.wait(), LOOK)
            finally:
                if self._is_stopping:
                    self._upcoming = reader.next_events
                await loop.run_in_executor(thread, reader.close)

    async def _wait_until_drained(self) -> None:
        """Wait at most `LOOK` seconds until followers have received most queued messages."""
        deadline = time.monotonic() + LOOK
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK / 20)
            if all(each.size < BUFFER // 4 for each in self._followers):
                return

    async def _give(
        self, look: ReadRequest, found: Mapping[str, RunUpdate | None], at: float
    ) -> None:
        for run, news in found.items():
            channel = self._channels.get(run)
            if news is None:
                self._end_streams_of(run)
                continue
            if look.every is not None:
                self._all.take(run, news.messages, news.over, at)
            if channel is not None and run in look.runs:
                channel.take(news, look.runs[run])
            # Followers that join later have received these messages already.
            every = list(self._all.followers) if look.every is not None else []
            of_run = list(channel.followers) if channel is not None else []
            await _call_for_each(every, partial(self._all.give, messages=news.messages))
            await _call_for_each(of_run, partial(_send_update, news=news))

    def _end_streams_of(self, run: str) -> None:
        """End the streams of a run that does not exist or was deleted."""
        channel = self._channels.pop(run, None)
        if channel is None:
            return
        if not channel.ready.done():
            channel.ready.set_exception(NoSuchRun())
        for follower in list(channel.followers):
            follower.end(End("failed", "the run was deleted", "list the runs with GET /v1/runs"))

    def _fail(self, error: Exception) -> None:
        """End all streams because the store is unreadable."""
        if isinstance(error, RecipeError):
            words = hide_local_paths(str(error), self._room.root)
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
        """End streams with removed or expired tokens, and send `alive` events on quiet streams."""
        now = time.monotonic()
        if now - self._checked < CHECK:
            return
        self._checked = now
        loop = asyncio.get_running_loop()
        try:
            tokens = await loop.run_in_executor(thread, self._room.tokens.all)
        except RecipeError:
            return  # every request reports this error
        known = {token.id for token in tokens if not token.is_expired}
        for number, follower in enumerate(list(self._followers), 1):
            if follower.caller.id not in known:
                follower.end(TOKEN_GONE)
            follower.send_alive(now)
            if number % WAKE == 0:
                await asyncio.sleep(0)

    # -- the end

    async def stop(self) -> None:
        """End all streams because the server stops."""
        self._is_stopping = True
        self._woken.set()
        for follower in list(self._followers):
            follower.end(STOPS)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), LAST_WORDS)

    async def close(self) -> None:
        """Stop reading, and save the position of the all-runs stream."""
        self._is_stopping = True
        self._woken.set()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self._path is not None and self._upcoming is not None:
            try:
                save_state(self._path, self._all.to_state(self._upcoming))
            except OSError as error:
                _log.warning("the next server sends moves of the last minute again: %s", error)


def _first_batch(messages: Iterable[Message]) -> list[Message]:
    """Return the first messages, about `PIECE` bytes at most."""
    found, size = [], 0
    for message in messages:
        found.append(message)
        size += len(message.json)
        if size > PIECE:
            break
    return found


async def _call_for_each(followers: Sequence[Follower], what: Callable[[Follower], None]) -> None:
    """Call a function for each follower, yielding regularly to other tasks."""
    for number, follower in enumerate(followers, 1):
        what(follower)
        follower.wake()
        if number % WAKE == 0:
            await asyncio.sleep(0)


def _send_update(follower: Follower, news: RunUpdate) -> None:
    follower.put(news.messages)
    if news.over:
        follower.end(OVER)
