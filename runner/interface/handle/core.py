"""Operations on runs, as generators without I/O: retries, polling, resumed streams.

Each `Operation` is a generator that a shell executes. The generator yields an Ask and is sent the
answer, or Lost if the request failed. After an Ask with `streams`, the generator yields More for
each piece, and is sent None at the end of the stream. It yields a Nap to sleep, and a Give for each
item of the caller. Retries happen here only: the caller gets every item exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast

from ...api.values import Artifact, File, Line, Status
from ...errors import Busy, CannotAsk, Infrastructure, NotFound
from ...storage.records.runs import FINAL, Event
from .transport import Events, Listing, LogPart, New, Pieces, RequestLost, RunPage, Transport

FEW: Final = 4
"""Tries of a request that is safe to repeat."""
ONCE: Final = 1
AT_ONCE: Final = 200
"""Runs per page of a list."""
FOREVER: Final = 1 << 60
LONGEST_NAP: Final = 15.0
"""Maximum seconds between two tries."""
SOON, LATER = 0.1, 1.0
"""Seconds between two polls of a followed run: the first interval, and the longest one while no
events arrive.
"""
_LONGEST_LINE: Final = 1 << 16


class TimedOut(Busy, TimeoutError):
    """The timeout of a wait expired."""


class TransportRequest(NamedTuple):
    """A request to the transport.  If `streams`, the answer is read piece by piece with More."""

    of: Callable[[Transport], object]
    streams: bool = False


class More(NamedTuple):
    """A request for the next piece of the current stream."""


class Nap(NamedTuple):
    """A pause."""

    seconds: float


class Give(NamedTuple):
    """An item for the caller."""

    item: object


Step: TypeAlias = TransportRequest | More | Nap | Give
Answer: TypeAlias = object
Operation: TypeAlias = Generator[Step, Answer, None]
_Answer = TypeVar("_Answer")
_Piece = TypeVar("_Piece")
_Part: TypeAlias = Generator[Step, Answer, _Answer]


class Clock(NamedTuple):
    """A deadline: the clock `now`, the deadline `until` in its seconds, and the timeout message
    `words`.  By default there is no deadline.
    """

    now: Callable[[], float] = lambda: 0.0
    until: float = math.inf
    words: str = ""

    def left(self) -> float:
        """Return the seconds until the deadline.  Raises TimedOut after the deadline."""
        left = self.until - self.now()
        if left <= 0:
            raise TimedOut(self.words)
        return left


ENDLESS: Final = Clock()


def with_python_fix(error: CannotAsk) -> CannotAsk:
    """Return the same error with a fix for Python callers, such as "call `resume()`"."""
    fix = f"call `{error.helps}()`" if error.helps else error.problems[0].fix
    return CannotAsk(error.code, error.message, error.run, fix)


def _ask_with_retries(
    of: Callable[[Transport], _Answer], tries: int, clock: Clock = ENDLESS
) -> _Part[_Answer]:
    """Return the answer to a question; ask again after a failure, up to `tries` times.  Raises the failure of the last try."""
    tried = 0
    while True:
        heard = yield TransportRequest(of)
        if not isinstance(heard, RequestLost):
            return cast("_Answer", heard)
        tried += 1
        if tried >= tries:
            raise heard.failure
        yield from _nap(tried, heard, clock)


def _nap(tried: int, lost: RequestLost, clock: Clock = ENDLESS) -> _Part[None]:
    wait = lost.wait or 0.25 * 2 ** min(tried - 1, 10)
    yield Nap(min(wait, LONGEST_NAP, clock.left()))


# -- operations ------------------------------------------------------------------------------------


def submit(new: New, key: str) -> Operation:
    """Store a run and give its id.  Repeated requests with the same key store one run."""
    yield Give((yield from _ask_with_retries(lambda transport: transport.submit(new, key), FEW)))


def ask(of: Callable[[Transport], object], tries: int = FEW) -> Operation:
    """Give the answer to one question, tried up to `tries` times.

    Pass `ONCE` if the request is not safe to repeat.
    """
    yield Give((yield from _ask_with_retries(of, tries)))


def _status(run: str, tries: int, clock: Clock = ENDLESS) -> _Part[Status]:
    return (yield from _ask_with_retries(lambda transport: transport.run(run), tries, clock))


def runs(listing: Listing) -> Operation:
    """Give the runs of a list, requested page by page."""
    left, after = listing.limit, listing.after
    while left > 0:
        wanted = listing._replace(limit=min(left, AT_ONCE), after=after)
        page = yield from _page(wanted)
        for each in page.runs:
            yield Give(each)
        left -= len(page.runs)
        after = page.next
        if not after:
            return


def _page(listing: Listing) -> _Part[RunPage]:
    return (yield from _ask_with_retries(lambda transport: transport.list_runs(listing), FEW))


def _new_events(run: str, after: int, tries: int, clock: Clock = ENDLESS) -> _Part[Sequence[Event]]:
    return (
        yield from _ask_with_retries(lambda transport: transport.events(run, after), tries, clock)
    )


def _ends(event: Event) -> bool:
    return event.subject == "run" and event.after in FINAL


def events(run: str, after: int, follow: bool) -> Operation:
    """Give the events of a run with numbers above `after`.

    If `follow`, also give new events until the run has finished.
    """
    over = not follow or (yield from _status(run, FEW)).over
    tried = 0
    while not over:
        stream = _EventPosition(after)
        trouble = yield from _stream(_follow(run, after), stream.take)
        tried = tried + 1 if trouble is not None and stream.after == after else 0
        after, over = stream.after, stream.over
        if over:
            return
        if trouble is not None:
            # All streams of the token may be in use: poll the events instead.
            for event in (yield from _new_events(run, after, FOREVER)):
                after, over = event.seq, over or _ends(event)
                yield Give(event)
            yield from _nap(max(1, tried), trouble)
        else:
            over = (yield from _status(run, FOREVER)).over
    while some := (yield from _new_events(run, after, FEW)):
        for event in some:
            after = event.seq
            yield Give(event)


def _follow(run: str, after: int) -> Callable[[Transport], Events]:
    return lambda transport: transport.follow(run, after)


class _EventPosition:
    """Position in the events of a followed run: the number of the last event, and the end of the
    run.
    """

    def __init__(self, after: int) -> None:
        self.after, self.over = after, False

    def take(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            self.after, self.over = event.seq, self.over or _ends(event)
            yield event


def wait(run: str, clock: Clock) -> Operation:
    """Give the final status of a run when the run has finished.  Raises TimedOut."""
    clock = clock._replace(words=f"run {run} has not finished yet")
    now = yield from _status(run, FOREVER, clock)
    after, nap, over = now.seq, SOON, now.over
    while not over:
        yield Nap(min(nap, clock.left()))
        some = yield from _new_events(run, after, FOREVER, clock)
        nap = SOON if some else min(LATER, nap * 1.5)
        after = some[-1].seq if some else after
        over = any(map(_ends, some))
    if not now.over:
        now = yield from _status(run, FOREVER, clock)
    yield Give(now)


class LogPosition:
    """Reading position in the log of an attempt."""

    def __init__(self, step: str, number: int) -> None:
        self.step, self.number, self.ended = step, number, False
        self.offset, self._rest = 0, b""

    def take(self, data: bytes) -> Iterator[Line]:
        """Add bytes and yield the lines that are complete."""
        self.offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield self._line(line)
        if len(self._rest) > _LONGEST_LINE:
            yield from self.end()

    def end(self) -> Iterator[Line]:
        """Yield the last, unterminated line at the end of the log."""
        rest, self._rest = self._rest, b""
        if rest:
            yield self._line(rest)

    def _line(self, data: bytes) -> Line:
        return Line(self.step, self.number, data.decode(errors="replace").removesuffix("\r"))


class Attempts:
    """The attempts of a run, as its events tell.

    `found` lists the wanted attempts in order of start, `after` is the number of the last event,
    and `is_over` means that the run has finished.
    """

    def __init__(self, is_wanted: Callable[[str, int], bool]) -> None:
        self.found: list[LogPosition] = []
        self.after = 0
        self.is_over = False
        self._is_wanted = is_wanted
        self._running: dict[str, LogPosition] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Record the starts and ends of attempts, and the end of the run."""
        for event in events:
            self.after = event.seq
            self.is_over = self.is_over or _ends(event)
            if event.subject == "step":
                self._take_event_of_step(event)

    def _take_event_of_step(self, event: Event) -> None:
        number = event.data.get("attempt")
        if event.after == "RUNNING" and isinstance(number, int):
            self._start(event.id, number)
        elif event.before == "RUNNING" and event.id in self._running:
            self._running.pop(event.id).ended = True

    def _start(self, step: str, number: int) -> None:
        # An attempt that another worker took over keeps its number.
        key = (step, number)
        known = next((each for each in self.found if (each.step, each.number) == key), None)
        attempt = known or LogPosition(step, number)
        attempt.ended = False
        self._running[step] = attempt
        if known is None and self._is_wanted(step, number):
            self.found.append(attempt)


def lines(run: str, step: str, attempt: int, follow: bool) -> Operation:
    """Give the log lines of a run, attempt by attempt in order of start.

    If `follow`, continue until the run has finished.

    An empty `step` selects all steps.  `attempt` 0 selects all attempts if `follow`, otherwise the
    last attempt of each step.
    """

    def is_wanted(id: str, number: int) -> bool:
        # The name of a matrix step stands for all its instances.
        is_wanted_step = step in ("", id, id.partition("[")[0])
        return is_wanted_step and attempt in (0, number)

    attempts = Attempts(is_wanted)
    if follow:
        yield from _follow_lines(run, attempts)
    else:
        yield from _read_lines(run, attempts, only_last=attempt == 0)


def _read_lines(run: str, attempts: Attempts, only_last: bool) -> _Part[None]:
    """Give the log lines so far, of all attempts or of the last attempt of each step."""
    while some := (yield from _new_events(run, attempts.after, FEW)):
        attempts.take(some)
    found = attempts.found
    if only_last:
        found = list({each.step: each for each in found}.values())
    for each in found:
        yield from _read_log(run, each)


def _follow_lines(run: str, attempts: Attempts) -> _Part[None]:
    """Give the log lines of all attempts until the run has finished."""
    nap, shown = SOON, 0
    attempts.is_over = (yield from _status(run, FEW)).over
    while True:
        some = yield from _new_events(run, attempts.after, FOREVER)
        if some:
            attempts.take(some)
            nap = SOON
            continue  # read all stored events first, so that the end of each attempt is known
        while shown < len(attempts.found):
            each = attempts.found[shown]
            shown += 1
            if attempts.is_over:
                yield from _read_log(run, each)
            else:
                yield from _follow_log(run, each, attempts)
        if attempts.is_over:
            return
        yield Nap(nap)
        nap = min(LATER, nap * 1.5)


def log(run: str, part: LogPart) -> Operation:
    """Give the bytes of a log from `part.offset`.

    If `part.follow`, continue until the attempt has finished or the server ends the stream.
    """
    offset, tried = part.offset, 0

    def take(piece: bytes) -> tuple[bytes]:
        nonlocal offset
        offset += len(piece)
        return (piece,)

    while True:
        before = offset
        trouble = yield from _stream(_log(run, part._replace(offset=before)), take)
        if trouble is None:
            return
        tried = tried + 1 if offset == before else 1
        if not part.follow and tried >= FEW:
            raise trouble.failure
        yield from _nap(tried, trouble)


def _log(run: str, part: LogPart) -> Callable[[Transport], Pieces]:
    return lambda transport: transport.log(run, part)


def _read_log(run: str, each: LogPosition) -> _Part[None]:
    """Give the log lines of an attempt so far.

    Raises the failure of the last try if `FEW` tries bring nothing.
    """
    tried = 0
    while True:
        before = each.offset
        part = LogPart(each.step, each.number, before, follow=False)
        trouble = yield from _stream(_log(run, part), each.take)
        if trouble is None:
            break
        tried = tried + 1 if each.offset == before else 0
        if tried >= FEW:
            raise trouble.failure
        yield from _nap(max(1, tried), trouble)
    for line in each.end():
        yield Give(line)


def _follow_log(run: str, each: LogPosition, attempts: Attempts) -> _Part[None]:
    """Give the log lines of an attempt until it has finished.

    Adds the events read meanwhile to `attempts`.

    A stream may also end because the server stops, so a log is complete only if the attempt had
    finished before the stream was opened.
    """
    ended = each.ended
    tried = 0
    while True:
        had_ended = ended or attempts.is_over
        before = each.offset
        part = LogPart(each.step, each.number, before, follow=True)
        trouble = yield from _stream(_log(run, part), each.take)
        if trouble is None and had_ended:
            break
        is_empty = each.offset == before
        tried = tried + 1 if trouble is not None and is_empty else 0
        if trouble is not None:
            yield from _nap(max(1, tried), trouble)
        elif is_empty:
            yield Nap(SOON)
        some = yield from _new_events(run, attempts.after, FOREVER)
        attempts.take(some)
        # `each.ended` misses an attempt that a later one replaced without an event of its end.
        ended = ended or any(_ends_attempt(event, each.step) for event in some)
    for line in each.end():
        yield Give(line)


def _ends_attempt(event: Event, step: str) -> bool:
    is_of_step = event.subject == "step" and event.id == step
    return is_of_step and event.before == "RUNNING"


def _stream(
    of: Callable[[Transport], Iterable[_Piece]], take: Callable[[_Piece], Iterable[object]]
) -> _Part[RequestLost | None]:
    """Pass each piece of a streamed answer to `take` and give the resulting items.

    Returns the failure if the stream broke, else None.
    """
    yield TransportRequest(of, streams=True)
    while True:
        piece = yield More()
        if piece is None or isinstance(piece, RequestLost):
            return piece
        for item in take(cast("_Piece", piece)):
            yield Give(item)


def download(run: str, chosen: Sequence[str]) -> Operation:
    """Give a File and then its bytes, for each file in the outputs of a run.  `chosen` are output names; empty selects all outputs."""
    known = yield from _artifacts(run, "", "")
    names = [each.name for each in known]
    missing = [name for name in chosen if name not in names]
    if missing:
        available = ", ".join(names[:10]) or "none yet"
        raise NotFound(
            f'run {run} has no output "{missing[0]}"', fix=f"available outputs: {available}"
        )
    for each in known:
        if chosen and each.name not in chosen:
            continue
        if not each.stored:
            raise Infrastructure(
                f"{each.name} is no longer stored there", fix="run the recipe again"
            )
        if each.folder:
            yield from _folder(run, each.name)
        else:
            yield Give(File(each.name, each.content, each.bytes))
            yield from _bytes(run, each.name, "")


def _artifacts(run: str, name: str, after: str) -> _Part[Sequence[Artifact]]:
    return (
        yield from _ask_with_retries(lambda transport: transport.artifacts(run, name, after), FEW)
    )


def _folder(run: str, name: str) -> _Part[None]:
    """Give the files of an output directory, requested page by page."""
    after = ""
    yield Give(File(name, "d:", 0))
    while True:
        page = yield from _artifacts(run, name, after)
        files = page[0].files if page else ()
        for file in files:
            after = file.path
            yield Give(File(f"{name}/{after}", file.content, file.bytes))
            if file.content[:1] in "fx":
                yield from _bytes(run, name, after)
        if not files:
            return


def _file(run: str, name: str, path: str, begin: int) -> Callable[[Transport], Pieces]:
    return lambda transport: transport.file(run, name, path, begin)


def _bytes(run: str, name: str, path: str) -> _Part[None]:
    """Give the bytes of one file.  A broken transfer resumes after the last byte received."""
    offset, tried = 0, 0

    def take(piece: bytes) -> tuple[bytes]:
        nonlocal offset
        offset += len(piece)
        return (piece,)

    while True:
        before = offset
        trouble = yield from _stream(_file(run, name, path, before), take)
        if trouble is None:
            return
        tried = tried + 1 if offset == before else 1
        if tried >= FEW:
            raise Infrastructure(f"cannot download {name}: {trouble}", fix="try again")
        yield from _nap(tried, trouble)
