"""What is asked of runs, and what its answers mean.  Touches no network, disk or clock.

A conversation is a generator.  It yields an Ask and is sent a Reply, or Lost where none came; for one that streams it then yields More and is sent
pieces, the last of them empty.  It yields a Nap to wait, and a Give for each thing that the caller gets.  Every operation is one, so an answer that
was lost is asked for again in one place: what was given once is not given again, and nothing is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

from ...api.outcomes import Outcome
from ...errors import (
    HELPS,
    NOT_NOTED,
    Busy,
    CannotAsk,
    Infrastructure,
    Invalid,
    NotFound,
    Problem,
    RecipeError,
)
from ...storage.records.runs import FINAL, Event
from ..values import (
    Failed,
    File,
    Line,
    LinkTo,
    OutputFile,
    Point,
    Progress,
    Status,
    StepProgress,
    StepStatus,
    Training,
)

FEW: Final = 4
"""How often is asked what may be asked twice."""
FOREVER: Final = 1 << 60
LONGEST_NAP: Final = 15.0
"""Seconds between two tries at most."""
SOON, LATER = 0.1, 1.0
"""Seconds between two looks at a run that is followed: at first, and where nothing happens."""
AGAIN: Final = frozenset({408, 429, 502, 503, 504})
"""Answers of a server that is busy, or of what stands before it while it is replaced."""
_LONGEST_LINE: Final = 1 << 16


class TimedOut(Busy, TimeoutError):
    """What was waited for did not happen in time."""


class Ask(NamedTuple):
    """One request.  `path` is below the address, `body` is sent as JSON."""

    method: str
    path: str
    query: Mapping[str, str | int] = {}
    body: Mapping[str, object] | None = None
    headers: Mapping[str, str] = {}
    streams: bool = False


class More(NamedTuple):
    """The next piece of the answer that streams."""


class Nap(NamedTuple):
    seconds: float


class Give(NamedTuple):
    item: object


class Reply(NamedTuple):
    """An answer: all of it, or, where it streams, its head."""

    status: int
    body: bytes = b""
    retry_after: float = 0.0


class Lost(Exception):
    """No answer came, or only a part of one."""


Pieces: TypeAlias = Generator[bytes, None, None]
AsyncPieces: TypeAlias = AsyncGenerator[bytes, None]

Step: TypeAlias = Ask | More | Nap | Give
Heard: TypeAlias = Reply | bytes | Lost | None
Talk: TypeAlias = Generator[Step, Heard, None]
_Said = TypeVar("_Said")
_Part: TypeAlias = Generator[Step, Heard, _Said]
_V = TypeVar("_V", bound=tuple[Any, ...])


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


# -- answers ---------------------------------------------------------------------------------------------------------------------------------------


def _read(kind: Callable[..., _V], fields: Sequence[str], value: object) -> _V:
    """A value of JSON as one of ours; what a newer server adds is left out.  Raises Infrastructure."""
    if not isinstance(value, Mapping):
        raise _strange()
    return kind(**{name: value[name] for name in fields if name in value})


def status_of(value: object) -> Status:
    """A run as the API has it, of a list or alone."""
    found = _read(Status, Status._fields, value)
    assert isinstance(value, Mapping)
    failed, training = value.get("failed"), value.get("training")
    return found._replace(
        progress=_read(Progress, Progress._fields, value.get("progress", {})),
        failed=_read(Failed, Failed._fields, failed) if failed is not None else None,
        training=_read(Training, Training._fields, training) if training is not None else None,
        steps=[_step_of(each) for each in value.get("steps", ())],
        outputs=[_read(OutputFile, OutputFile._fields, each) for each in value.get("outputs", ())],
        links=[_read(LinkTo, LinkTo._fields, each) for each in value.get("links", ())],
    )


def _step_of(value: object) -> StepStatus:
    found = _read(StepStatus, StepStatus._fields, value)
    assert isinstance(value, Mapping)
    progress = _read(StepProgress, StepProgress._fields, value.get("progress", {}))
    return found._replace(progress=progress)


def event_of(value: object) -> Event:
    """An event as the API has it."""
    found = _read(Event, Event._fields, value)
    return found._replace(at=datetime.fromisoformat(str(found.at)).timestamp())


# -- answers ---------------------------------------------------------------------------------------------------------------------------------------


def error_of(reply: Reply) -> RecipeError:
    """An answer that refuses, as the error that the command line has for it."""
    try:
        error = json.loads(reply.body)["error"]
        code, message, fix = str(error["code"]), str(error["message"]), str(error.get("fix", ""))
        problems = [
            Problem(str(each["code"]), str(each["message"]), None, str(each.get("fix", "")))
            for each in error.get("problems", ())
        ]
    except (ValueError, TypeError, LookupError):
        return _strange(reply.status)
    if reply.status == 404:
        return NotFound(message, fix=fix)
    if reply.status >= 500:
        return Infrastructure(message, fix=fix)
    if reply.status in (408, 429) or code == "busy":
        return Busy(message, fix=fix)
    if reply.status == 401:
        fix = "set RECIPE_TOKEN to a token of that server; its first start shows one"
    return Invalid(problems or [Problem(code, message, None, fix)])


def _strange(status: int = 200) -> Infrastructure:
    return Infrastructure(
        f"the answer (status {status}) is not one of `recipe serve`",
        fix="look at the address, and at what stands before the server",
    )


def _json(reply: Reply) -> Mapping[str, Any]:
    try:
        found = json.loads(reply.body)
    except ValueError:
        raise _strange(reply.status) from None
    if not isinstance(found, Mapping):
        raise _strange(reply.status)
    return found


def _got(ask: Ask, tries: int, clock: Clock = ENDLESS) -> _Part[Reply]:
    """The answer to a request, which is asked again where none came.  Raises what it says."""
    tried = 0
    while True:
        heard = yield ask
        tried += 1
        assert isinstance(heard, (Reply, Lost))
        if isinstance(heard, Reply) and heard.status < 400:
            return heard
        if isinstance(heard, Reply) and (heard.status not in AGAIN or tried >= tries):
            raise error_of(heard)
        if isinstance(heard, Lost) and tried >= tries:
            raise Infrastructure(
                f"the server does not answer: {heard}",
                fix="look whether it runs, and at its address",
            )
        yield from _nap(tried, heard, clock)


def _nap(tried: int, heard: Reply | Lost, clock: Clock = ENDLESS) -> _Part[None]:
    wait = (
        heard.retry_after
        if isinstance(heard, Reply) and heard.retry_after
        else 0.25 * 2 ** min(tried - 1, 10)
    )
    yield Nap(min(wait, LONGEST_NAP, clock.left()))


def _of(run: str, what: str = "") -> str:
    return f"v1/runs/{quote(run, safe='')}" + (f"/{what}" if what else "")


# -- operations ------------------------------------------------------------------------------------------------------------------------------------


def submit(body: Mapping[str, object], key: str) -> Talk:
    """Store a run, and give its id.  With a key it is stored once, however often it is asked for."""
    reply = yield from _got(Ask("POST", "v1/runs", {}, body, {"Idempotency-Key": key}), FEW)
    yield Give(str(_json(reply).get("id", "")))


def status(run: str) -> Talk:
    """Give how a run stands."""
    yield Give((yield from _status(run, FEW)))


def _status(run: str, tries: int, clock: Clock = ENDLESS) -> _Part[Status]:
    return status_of(_json((yield from _got(Ask("GET", _of(run)), tries, clock))))


def runs(query: Mapping[str, str | int], limit: int) -> Talk:
    """Give runs, the newest first."""
    after = ""
    while limit > 0:
        page = _json(
            (
                yield from _got(
                    Ask(
                        "GET",
                        "v1/runs",
                        {**query, "limit": min(limit, 200), **({"after": after} if after else {})},
                    ),
                    FEW,
                )
            )
        )
        for each in page.get("runs", ()):
            yield Give(status_of(each))
            limit -= 1
        after = page.get("next") or ""
        if not after:
            return


def control(run: str, what: str, body: Mapping[str, object]) -> Talk:
    """Ask a run to cancel, pause, resume or retry, and give the Outcome.  Raises CannotAsk."""
    try:
        reply = yield from _got(Ask("POST", _of(run, what), {}, body), 1)
    except Invalid as error:
        raise _refusal(error, run) from None
    found = _read(Outcome, Outcome._fields, {"state": "", "done": True, **_json(reply)})
    yield Give(found)


def in_python(error: CannotAsk) -> CannotAsk:
    """The same refusal with a fix for Python."""
    fix = f"call `{error.helps}()`" if error.helps else error.problems[0].fix
    return CannotAsk(error.code, error.message, error.run, fix)


def _refusal(error: Invalid, run: str) -> Invalid:
    """What a server refuses because of the state of a run, as Python and the command line raise it."""
    first = error.problems[0]
    if len(error.problems) == 1 and first.code in (*HELPS, NOT_NOTED):
        return in_python(CannotAsk(first.code, first.message, run))
    return error


def _news(run: str, after: int, tries: int, clock: Clock = ENDLESS) -> _Part[list[Event]]:
    page = _json((yield from _got(Ask("GET", _of(run, "events"), {"after": after}), tries, clock)))
    return [event_of(each) for each in page.get("events", ())]


def _ends(event: Event) -> bool:
    return event.subject == "run" and event.after in FINAL


def events(run: str, after: int, follow: bool) -> Talk:
    """Give the events of a run whose numbers are above `after`; where they are followed also those that come, until it is over."""
    nap, over = SOON, False
    if follow:
        over = (yield from _status(run, FEW)).over
    while True:
        some = yield from _news(run, after, FOREVER if follow else FEW)
        for event in some:
            after = event.seq
            over = over or _ends(event)
            yield Give(event)
        if some:
            nap = SOON
            continue
        if over or not follow:
            return
        yield Nap(nap)
        nap = min(LATER, nap * 1.5)


def wait(run: str, clock: Clock) -> Talk:
    """Give how a run stands when it is over.  Raises TimedOut."""
    clock = clock._replace(words=f"run {run} is not over yet")
    now = yield from _status(run, FOREVER, clock)
    after, nap, over = now.seq, SOON, now.over
    while not over:
        yield Nap(min(nap, clock.left()))
        some = yield from _news(run, after, FOREVER, clock)
        nap = SOON if some else min(LATER, nap * 1.5)
        after = some[-1].seq if some else after
        over = any(map(_ends, some))
    yield Give(now if now.over else (yield from _status(run, FOREVER, clock)))


def points(run: str, query: Mapping[str, str | int]) -> Talk:
    """Give what the steps of a run reported."""
    reply = yield from _got(Ask("GET", _of(run, "metrics"), query), FEW)
    for line in reply.body.splitlines():
        found = json.loads(line)
        yield Give(_read(Point, Point._fields, {**found, "source": found.get("from", "")}))


class _Attempt:
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
    found: list[_Attempt] = []
    going: dict[str, _Attempt] = {}
    after, nap, shown = 0, SOON, 0
    over = not follow or (yield from _status(run, FEW)).over
    while True:
        some = yield from _news(run, after, FOREVER if follow else FEW)
        for event in some:
            after = event.seq
            over = over or _ends(event)
            _hear(event, found, going, step, attempt)
        if some:
            nap = SOON
            continue  # until nothing is new: then all that has ended is known
        if not follow and not attempt:
            found = list({each.step: each for each in found}.values())
        while shown < len(found):
            after, heard = yield from _printed(run, found[shown], follow and not over, after)
            for event in heard:
                over = over or _ends(event)
                _hear(event, found, going, step, attempt)
            shown += 1
        if over:
            return
        yield Nap(nap)
        nap = min(LATER, nap * 1.5)


def _hear(
    event: Event, found: list[_Attempt], going: dict[str, _Attempt], step: str, attempt: int
) -> None:
    if event.subject != "step":
        return
    number = event.data.get("attempt")
    if event.after == "RUNNING" and isinstance(number, int):
        known = next(
            (each for each in found if (each.step, each.number) == (event.id, number)), None
        )
        each = going[event.id] = known or _Attempt(
            event.id, number
        )  # one that another worker took up is the same
        each.ended = False
        if (
            known is None
            and attempt in (0, number)
            and (not step or step in (event.id, event.id.partition("[")[0]))
        ):
            found.append(each)
    elif event.before == "RUNNING" and event.id in going:
        going.pop(event.id).ended = True


def _printed(run: str, each: _Attempt, follow: bool, after: int) -> _Part[tuple[int, list[Event]]]:
    """Give what an attempt printed, to its end where it is followed; answers the events that were read meanwhile.

    A stream may end because the server does.  So an attempt is read to its end only where it was known to be over before.
    """
    heard: list[Event] = []
    tried = 0
    while True:
        was_over = each.ended or any(_ends(event) for event in heard)
        query: dict[str, str | int] = {
            "step": each.step,
            "attempt": each.number,
            "offset": each.offset,
            **({"follow": "true"} if follow else {}),
        }
        before = each.offset
        trouble = yield from _streamed(
            Ask("GET", _of(run, "logs"), query, streams=True), each.take, 404
        )  # an attempt without a log printed nothing
        tried = tried + 1 if trouble is not None and each.offset == before else 0
        if trouble is None and (was_over or not follow):
            break
        if trouble is not None:
            if not follow and tried >= FEW:
                raise Infrastructure(
                    f"the server does not answer: {trouble}",
                    fix="look whether it runs, and at its address",
                )
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
    ask: Ask, take: Callable[[bytes], Iterable[object]], nothing: int
) -> _Part[Reply | Lost | None]:
    """Give what `take` makes of the pieces of one answer; what went wrong where it did not come to its end.  The status `nothing`: it has none."""
    heard = yield ask
    assert isinstance(heard, (Reply, Lost))
    if isinstance(heard, Lost) or heard.status in AGAIN:
        return heard
    if heard.status == nothing:
        return None
    if heard.status >= 400:
        raise error_of(heard)
    while True:
        piece = yield More()
        if isinstance(piece, Lost):
            return piece
        assert isinstance(piece, bytes)
        if not piece:
            return None
        for item in take(piece):
            yield Give(item)


def download(run: str, chosen: Sequence[str]) -> Talk:
    """Give a File, and its bytes, for each file of the outputs of a run; `chosen` are names of outputs, or all where it is empty."""
    known = _json((yield from _got(Ask("GET", _of(run, "artifacts")), FEW))).get("artifacts", ())
    names = [str(each["name"]) for each in known]
    if missing := [name for name in chosen if name not in names]:
        raise NotFound(
            f'run {run} has no output "{missing[0]}"',
            fix=f"it has {', '.join(names[:10]) or 'none yet'}",
        )
    for each in known:
        if chosen and each["name"] not in chosen:
            continue
        if not each["stored"]:
            raise Infrastructure(f"{each['name']} is not stored there any more", fix="run it again")
        if each["folder"]:
            yield from _folder(run, str(each["name"]))
        else:
            yield Give(File(str(each["name"]), str(each["content"]), each["bytes"]))
            yield from _bytes(run, str(each["name"]), "")


def _folder(run: str, name: str) -> _Part[None]:
    """What is in an output that is a folder, page after page."""
    after = ""
    yield Give(File(name, "d:", 0))
    while True:
        page = _json(
            (
                yield from _got(
                    Ask("GET", _of(run, "artifacts"), {"name": name, "after": after}), FEW
                )
            )
        ).get("artifacts", ())
        files = page[0]["files"] if page else ()
        for file in files:
            after = str(file["path"])
            yield Give(File(f"{name}/{after}", str(file["content"]), file["bytes"]))
            if str(file["content"])[:1] in "fx":
                yield from _bytes(run, name, after)
        if not files:
            return


def _bytes(run: str, name: str, path: str) -> _Part[None]:
    """The bytes of one file; where the connection breaks it goes on behind what came."""
    offset, tried = 0, 0

    def take(piece: bytes) -> tuple[bytes]:
        nonlocal offset
        offset += len(piece)
        return (piece,)

    while True:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        query = {"path": path} if path else {}
        before = offset
        trouble = yield from _streamed(
            Ask(
                "GET", f"{_of(run, 'artifacts')}/{quote(name)}", query, None, headers, streams=True
            ),
            take,
            416,
        )
        if trouble is None:
            return
        tried = tried + 1 if offset == before else 1
        if tried >= FEW:
            raise Infrastructure(
                f"{name} does not come: {trouble if isinstance(trouble, Lost) else error_of(trouble)}",
                fix="try again",
            )
        yield from _nap(tried, trouble)
