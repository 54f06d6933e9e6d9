"""What is asked of runs, and what its answers mean to a caller.  Touches no network, disk or clock.

A conversation is a generator.  It yields an Ask and is sent the answer, or Lost where none came; for one that streams it then yields More and is sent
pieces, and None at their end.  It yields a Nap to wait, and a Give for each thing that the caller gets.  Every operation is one, so an answer that
was lost is asked for again in one place: what was given once is not given again, and nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast

from ...api.values import Artifact, File, Line, Status
from ...errors import Busy, CannotAsk, Infrastructure, NotFound
from ...storage.records.runs import FINAL, Event
from .transport import Events, Listing, LogPart, Lost, New, Page, Pieces, Transport

FEW: Final = 4
"""How often is asked what may be asked twice."""
ONCE: Final = 1
AT_ONCE: Final = 200
"""Runs of a list that are asked for at once."""
FOREVER: Final = 1 << 60
LONGEST_NAP: Final = 15.0
"""Seconds between two tries at most."""
SOON, LATER = 0.1, 1.0
"""Seconds between two looks at a run that is followed: at first, and where nothing happens."""
_LONGEST_LINE: Final = 1 << 16


class TimedOut(Busy, TimeoutError):
    """What was waited for did not happen in time."""


class Ask(NamedTuple):
    """One question to what keeps the runs."""

    of: Callable[[Transport], object]
    streams: bool = False


class More(NamedTuple):
    """The next piece of the answer that streams."""


class Nap(NamedTuple):
    seconds: float


class Give(NamedTuple):
    item: object


Step: TypeAlias = Ask | More | Nap | Give
Heard: TypeAlias = object
Talk: TypeAlias = Generator[Step, Heard, None]
_Said = TypeVar("_Said")
_Piece = TypeVar("_Piece")
_Part: TypeAlias = Generator[Step, Heard, _Said]


class Clock(NamedTuple):
    """Until when something is tried: `now` counts seconds, and `words` say what did not happen.  By default without an end."""

    now: Callable[[], float] = lambda: 0.0
    until: float = math.inf
    words: str = ""

    def left(self) -> float:
        """Seconds that are left.  Raises TimedOut."""
        if (left := self.until - self.now()) <= 0:
            raise TimedOut(self.words)
        return left


ENDLESS: Final = Clock()


def in_python(error: CannotAsk) -> CannotAsk:
    """The same refusal with a fix for Python."""
    fix = f"call `{error.helps}()`" if error.helps else error.problems[0].fix
    return CannotAsk(error.code, error.message, error.run, fix)


def _got(of: Callable[[Transport], _Said], tries: int, clock: Clock = ENDLESS) -> _Part[_Said]:
    """The answer to a question, which is asked again where none came.  Raises what it says."""
    tried = 0
    while True:
        heard = yield Ask(of)
        if not isinstance(heard, Lost):
            return cast("_Said", heard)
        tried += 1
        if tried >= tries:
            raise heard.failure
        yield from _nap(tried, heard, clock)


def _nap(tried: int, lost: Lost, clock: Clock = ENDLESS) -> _Part[None]:
    wait = lost.wait or 0.25 * 2 ** min(tried - 1, 10)
    yield Nap(min(wait, LONGEST_NAP, clock.left()))


# -- operations ------------------------------------------------------------------------------------------------------------------------------------


def submit(new: New, key: str) -> Talk:
    """Store a run, and give its id.  With a key it is stored once, however often it is asked for."""
    yield Give((yield from _got(lambda there: there.submit(new, key), FEW)))


def ask(of: Callable[[Transport], object], tries: int = FEW) -> Talk:
    """Give the answer to one question, which is asked again where it was lost; `ONCE`: it may not be asked twice."""
    yield Give((yield from _got(of, tries)))


def _status(run: str, tries: int, clock: Clock = ENDLESS) -> _Part[Status]:
    return (yield from _got(lambda there: there.run(run), tries, clock))


def runs(listing: Listing) -> Talk:
    """Give the runs of a list, page after page."""
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


def _page(listing: Listing) -> _Part[Page]:
    return (yield from _got(lambda there: there.list_runs(listing), FEW))


def _news(run: str, after: int, tries: int, clock: Clock = ENDLESS) -> _Part[Sequence[Event]]:
    return (yield from _got(lambda there: there.events(run, after), tries, clock))


def _ends(event: Event) -> bool:
    return event.subject == "run" and event.after in FINAL


def events(run: str, after: int, follow: bool) -> Talk:
    """Give the events of a run whose numbers are above `after`; where they are followed also those that come, until it is over."""
    over = not follow or (yield from _status(run, FEW)).over
    tried = 0
    while not over:
        stream = _Followed(after)
        trouble = yield from _streamed(_follow(run, after), stream.take)
        tried = tried + 1 if trouble is not None and stream.after == after else 0
        after, over = stream.after, stream.over
        if over:
            return
        if trouble is not None:
            # All streams of the token may be in use: what happens is then asked for.
            for event in (yield from _news(run, after, FOREVER)):
                after, over = event.seq, over or _ends(event)
                yield Give(event)
            yield from _nap(max(1, tried), trouble)
        else:
            over = (yield from _status(run, FOREVER)).over
    while some := (yield from _news(run, after, FEW)):
        for event in some:
            after = event.seq
            yield Give(event)


def _follow(run: str, after: int) -> Callable[[Transport], Events]:
    return lambda there: there.follow(run, after)


class _Followed:
    """How far a run is followed."""

    def __init__(self, after: int) -> None:
        self.after, self.over = after, False

    def take(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            self.after, self.over = event.seq, self.over or _ends(event)
            yield event


def wait(run: str, clock: Clock) -> Talk:
    """Give how a run stands when it is over.  Raises TimedOut."""
    clock = clock._replace(words=f"run {run} has not finished yet")
    now = yield from _status(run, FOREVER, clock)
    after, nap, over = now.seq, SOON, now.over
    while not over:
        yield Nap(min(nap, clock.left()))
        some = yield from _news(run, after, FOREVER, clock)
        nap = SOON if some else min(LATER, nap * 1.5)
        after = some[-1].seq if some else after
        over = any(map(_ends, some))
    yield Give(now if now.over else (yield from _status(run, FOREVER, clock)))


class Attempt:
    """An attempt whose log is read."""

    def __init__(self, step: str, number: int) -> None:
        self.step, self.number, self.ended = step, number, False
        self.offset, self._rest = 0, b""

    def take(self, data: bytes) -> Iterator[Line]:
        """The lines that are whole now."""
        self.offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield self._line(line)
        if len(self._rest) > _LONGEST_LINE:
            yield from self.end()

    def end(self) -> Iterator[Line]:
        """What is left when nothing comes any more."""
        rest, self._rest = self._rest, b""
        if rest:
            yield self._line(rest)

    def _line(self, data: bytes) -> Line:
        return Line(self.step, self.number, data.decode(errors="replace").removesuffix("\r"))


def lines(run: str, step: str, attempt: int, follow: bool) -> Talk:
    """Give the lines that a run printed, attempt after attempt in the order in which they began; where it is followed until it is over.

    `step` is one of its steps, or all where it is empty; `attempt` one of their attempts.  0: without following, the last of each step, else all.
    """

    def wanted(id: str, number: int) -> bool:
        return attempt in (0, number) and (not step or step in (id, id.partition("[")[0]))

    found: list[Attempt] = []
    going: dict[str, Attempt] = {}
    after, nap, shown = 0, SOON, 0
    over = not follow or (yield from _status(run, FEW)).over
    while True:
        some = yield from _news(run, after, FOREVER if follow else FEW)
        for event in some:
            after = event.seq
            over = over or _ends(event)
            hear(event, found, going, wanted)
        if some:
            nap = SOON
            continue  # until nothing is new: then all that has ended is known
        if not follow and not attempt:
            found = list({each.step: each for each in found}.values())
        while shown < len(found):
            after, heard = yield from _printed(run, found[shown], follow and not over, after)
            for event in heard:
                over = over or _ends(event)
                hear(event, found, going, wanted)
            shown += 1
        if over:
            return
        yield Nap(nap)
        nap = min(LATER, nap * 1.5)


def hear(
    event: Event,
    found: list[Attempt],
    going: dict[str, Attempt],
    wanted: Callable[[str, int], bool],
) -> None:
    """Take note of an attempt that an event begins or ends: in `found` if its step and number are wanted; `going` are those that run, by step."""
    if event.subject != "step":
        return
    number = event.data.get("attempt")
    if event.after == "RUNNING" and isinstance(number, int):
        known = next(
            (each for each in found if (each.step, each.number) == (event.id, number)), None
        )
        each = going[event.id] = known or Attempt(
            event.id, number
        )  # one that another worker took up is the same
        each.ended = False
        if known is None and wanted(event.id, number):
            found.append(each)
    elif event.before == "RUNNING" and event.id in going:
        going.pop(event.id).ended = True


def log(run: str, part: LogPart) -> Talk:
    """Give the bytes of a log, from its offset on; where it is followed those that come, until its attempt is over, or the server ends the stream."""
    offset, tried = part.offset, 0

    def take(piece: bytes) -> tuple[bytes]:
        nonlocal offset
        offset += len(piece)
        return (piece,)

    while True:
        before = offset
        trouble = yield from _streamed(_log(run, part._replace(offset=before)), take)
        if trouble is None:
            return
        tried = tried + 1 if offset == before else 1
        if not part.follow and tried >= FEW:
            raise trouble.failure
        yield from _nap(tried, trouble)


def _log(run: str, part: LogPart) -> Callable[[Transport], Pieces]:
    return lambda there: there.log(run, part)


def _printed(run: str, each: Attempt, follow: bool, after: int) -> _Part[tuple[int, list[Event]]]:
    """Give what an attempt printed, to its end where it is followed; answers the events that were read meanwhile.

    A stream may end because the server does.  So an attempt is read to its end only where it was known to be over before.
    """
    heard: list[Event] = []
    tried = 0
    while True:
        was_over = each.ended or any(_ends(event) for event in heard)
        part = LogPart(each.step, each.number, each.offset, follow)
        before = each.offset
        trouble = yield from _streamed(_log(run, part), each.take)
        tried = tried + 1 if trouble is not None and each.offset == before else 0
        if trouble is None and (was_over or not follow):
            break
        if trouble is not None:
            if not follow and tried >= FEW:
                raise trouble.failure
            yield from _nap(max(1, tried), trouble)
        elif each.offset == before:
            yield Nap(SOON)
        if follow:
            some = yield from _news(run, after, FOREVER)
            after = some[-1].seq if some else after
            each.ended = each.ended or any(
                event.subject == "step" and event.id == each.step and event.before == "RUNNING"
                for event in some
            )
            heard += some
    for line in each.end():
        yield Give(line)
    return after, heard


def _streamed(
    of: Callable[[Transport], Iterable[_Piece]], take: Callable[[_Piece], Iterable[object]]
) -> _Part[Lost | None]:
    """Give what `take` makes of the pieces of one answer; what was lost where it did not come to its end."""
    yield Ask(of, streams=True)
    while True:
        piece = yield More()
        if piece is None or isinstance(piece, Lost):
            return piece
        for item in take(cast("_Piece", piece)):
            yield Give(item)


def download(run: str, chosen: Sequence[str]) -> Talk:
    """Give a File, and its bytes, for each file of the outputs of a run; `chosen` are names of outputs, or all where it is empty."""
    known = yield from _artifacts(run, "", "")
    names = [each.name for each in known]
    if missing := [name for name in chosen if name not in names]:
        raise NotFound(
            f'run {run} has no output "{missing[0]}"',
            fix=f"available outputs: {', '.join(names[:10]) or 'none yet'}",
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
    return (yield from _got(lambda there: there.artifacts(run, name, after), FEW))


def _folder(run: str, name: str) -> _Part[None]:
    """What is in an output that is a folder, page after page."""
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
    return lambda there: there.file(run, name, path, begin)


def _bytes(run: str, name: str, path: str) -> _Part[None]:
    """The bytes of one file; where the connection breaks it goes on behind what came."""
    offset, tried = 0, 0

    def take(piece: bytes) -> tuple[bytes]:
        nonlocal offset
        offset += len(piece)
        return (piece,)

    while True:
        before = offset
        trouble = yield from _streamed(_file(run, name, path, before), take)
        if trouble is None:
            return
        tried = tried + 1 if offset == before else 1
        if tried >= FEW:
            raise Infrastructure(f"cannot download {name}: {trouble}", fix="try again")
        yield from _nap(tried, trouble)
