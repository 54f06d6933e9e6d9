"""What all fake providers share: requests and replies as values, and how an operation is found, refused, disturbed and carried out.

A World touches no clock, disk or network.  Equal seeds, faults and requests at equal times give equal replies and an equal ledger; a copy
(`copy.deepcopy`) lives on by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from .account import EPOCH, Account, M
from .faults import Fault, Luck, amount

Document: TypeAlias = Mapping[str, object]
"""A JSON object of the wire."""
EMPTY: Final[Mapping[str, str]] = {}
MAX_BODY: Final = 1 << 20


class Request(NamedTuple):
    """What a client sent.  `query` is as it stands in the address; names of `headers` are in lower case."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = EMPTY
    body: bytes = b""


class Reply(NamedTuple):
    """What the provider answers: a JSON value, or text.  `lost`: the caller gets no answer, its connection is closed.

    `hold`: for how many seconds the provider keeps the caller waiting for news; asked again then, it has them.
    """

    status: int
    body: object = None
    headers: Mapping[str, str] = EMPTY
    lost: bool = False
    hold: float = 0.0

    def encode(self) -> bytes:
        """The body's bytes."""
        if self.status == 204:
            return b""
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()

    @property
    def kind(self) -> str:
        """The Content-Type."""
        return self.headers.get("content-type") or (
            "text/plain; charset=utf-8" if isinstance(self.body, str) else "application/json"
        )


class Refused(Exception):
    """An operation ends here, with this reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


class Route(NamedTuple):
    """An operation by its method and path; `{name}` stands for one part of the path.  The operation is the method of that name of the
    World or of one of its parts."""

    method: str
    path: str
    operation: str
    gap: float = 0  # seconds that must lie between two calls, where `pace` is on
    plain: bool = False  # the body is text: the field `text`


class Call(NamedTuple):
    """One request of a known operation.  `names` are the parts of the path, `pairs` the query with what stands in it
    several times, `fields` the JSON body, `by` who calls: a digest of the key."""

    operation: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    pairs: Sequence[tuple[str, str]]
    fields: Document
    headers: Mapping[str, str]
    by: str
    luck: Luck

    def text(self, name: str, default: str = "") -> str:
        """A string of the body."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else default

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number of the body."""
        return number(self.fields.get(name), default)

    def values(self, name: str) -> list[str]:
        """All values of one name of the query."""
        return [value for each, value in self.pairs if each == name]

    def inner(self, name: str) -> Document:
        """An object of the body; empty where there is none."""
        return document(self.fields.get(name))


class Boot(NamedTuple):
    """What a machine that is real begins with.  `swept`: keys that it wrote itself are removed now.  `user` logs in at `address`.

    Port 0: a free one.
    """

    keys: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    script: str
    gpu: str
    gpus: int
    memory: int  # of one GPU, MiB
    swept: bool = False
    user: str = "root"
    address: str = "127.0.0.1"
    port: int = 0
    kept: tuple[str, ...] | None = None  # of the home, what a start finds again; None: all


class World(ABC, Generic[M]):
    """One account at one provider.  A provider gives `routes`, a method for each operation, its own words for errors, and `happen`."""

    routes: ClassVar[tuple[Route, ...]]
    open: ClassVar[frozenset[str]] = frozenset()
    """Operations that need no key."""
    exports: ClassVar[tuple[str, ...]]
    """What a caller sets so that the official client comes here; `{url}` stands for our address, `{key}` for a key."""

    def __init__(self, seed: int = 0, faults: Iterable[Fault] = (), now: float = EPOCH) -> None:
        self.seed = seed
        self.faults = list(faults)
        self.account: Account[M] = Account(self.faults, now, self.happen, self.halt)
        self.parts: list[object] = []
        """What carries out the operations that are no methods of this one."""
        self.ports: dict[str, int] | None = None
        self.port = 0  # a free port of this machine, for providers whose machines all listen on one
        self.key = ""
        self.calls = 0
        self._last: dict[str, float] = {}
        self.begin()

    # -- what a provider gives ---------------------------------------------------------------------------------------------------------------------

    def boot(self, machine: M) -> Boot | None:
        """What a machine that is up begins with; None for one that is never real.  `ports` has the loopback port of each that listens, or is None."""
        return None

    def own_keys(self, machine: str) -> tuple[str, ...]:
        """Keys that a machine was given, with which it may do something about itself."""
        return ()

    def is_own(self, by: str, machine: str) -> bool:
        """Whether a machine itself calls, with a key that it was given."""
        return by in (_digest(own) for own in self.own_keys(machine))

    def begin(self) -> None:
        """Make the market, and what is in the account already."""

    @abstractmethod
    def happen(self, machine: M, what: str) -> None:
        """A transition that was due: `up`, `preempted` or a word of the provider's own."""

    @abstractmethod
    def halt(self, machine: M) -> None:
        """The account is empty: stop what runs."""

    @abstractmethod
    def problem(self, status: int, code: str, message: str) -> Reply:
        """An error, in the provider's form."""

    def refusal(self, call: Call) -> Reply:
        """The reply to a missing or wrong key."""
        return self.problem(401, "unauthorized", "Invalid API key")

    def throttle_reply(self, route: Route) -> Reply:
        """The reply to requests that come too fast."""
        return self.problem(429, "rate_limited", "Too many requests")

    def decorate(self, reply: Reply) -> Reply:
        """Headers that every reply of the provider has."""
        return reply

    # -- one request -------------------------------------------------------------------------------------------------------------------------------

    def handle(self, request: Request, now: float) -> Reply:
        """Answer one request at the time `now`, in seconds since 1970; a time before the last one counts as the last one."""
        self.account.advance(now)
        found = [
            (route, match)
            for route, path in _compile_routes(self.routes)
            if (match := path.fullmatch(request.path))
        ]
        if not found:
            return self.decorate(self.problem(404, "not_found", f"there is no {request.path}"))
        here = [(route, match) for route, match in found if route.method == request.method]
        if not here:
            return self.decorate(
                self.problem(405, "method_not_allowed", f"{request.path} takes no {request.method}")
            )
        route, match = here[0]
        self.calls += 1
        luck = Luck(self.faults, f"{self.seed}/{self.calls}", route.operation)
        if luck.strikes("cut"):
            return Reply(503, lost=True)
        return self.decorate(self._answer(route, match.groupdict(), request, luck))

    def _answer(
        self, route: Route, names: Mapping[str, str], request: Request, luck: Luck
    ) -> Reply:
        fields = (
            {"text": request.body.decode("utf-8", "replace")}
            if route.plain
            else parse_body(request.body)
        )
        pairs = parse_qsl(request.query, keep_blank_values=True)
        query = dict(pairs)
        by = _who(request.headers, query)
        known = not self.key or by == _digest(self.key) or self.is_own(by, names.get("id", ""))
        call = Call(route.operation, names, query, pairs, fields or {}, request.headers, by, luck)
        if (
            (not by and not self.anonymous(route.operation))
            or (by and not known)
            or luck.strikes("denied")
        ):
            return self.refusal(call)
        if luck.strikes("throttled") or self.account.now - self._last.get(
            route.operation, -math.inf
        ) < route.gap * self.amount("pace"):
            return self.throttle_reply(route)
        self._last[route.operation] = self.account.now
        if luck.strikes("broken"):
            return self.problem(502, "bad_gateway", "Bad Gateway")
        if fields is None:
            return self.malformed_reply()
        part = next(part for part in (self, *self.parts) if hasattr(part, route.operation))
        try:
            reply: Reply = getattr(part, route.operation)(call)
        except Refused as refused:
            reply = refused.reply
        if luck.strikes("crashed"):
            reply = self.problem(500, "internal_error", "Internal Server Error")
        return reply._replace(lost=luck.strikes("lost"))

    def anonymous(self, operation: str) -> bool:
        """Whether an operation needs no key."""
        return operation in self.open

    def malformed_reply(self) -> Reply:
        """The reply to a body that is no JSON object."""
        return self.problem(400, "invalid_request", "Invalid JSON body")

    def amount(self, name: str, default: float = 0.0) -> float:
        """How much of a fault is set."""
        return amount(self.faults, name, default)


W = TypeVar("W")


class Part(Generic[W]):
    """Some operations of a World."""

    def __init__(self, world: W) -> None:
        self._world = world


@cache
def _compile_routes(routes: tuple[Route, ...]) -> list[tuple[Route, re.Pattern[str]]]:
    return [
        (route, re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(route.path))))
        for route in routes
    ]


def document(value: object) -> Document:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def number(value: object, default: float = 0.0) -> float:
    """A finite JSON number, or the default."""
    return (
        float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
        else default
    )


def parse_body(body: bytes) -> Document | None:
    """A request's body; None when it is no JSON object."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def date(at: float) -> str:
    """RFC 3339, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_value(text: str) -> object:
    """A JSON value in a query; None where it is none."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found


def _who(headers: Mapping[str, str], query: Mapping[str, str]) -> str:
    """Who calls: eight hex digits of the digest of the key; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else query.get("api_key", "")
    return _digest(key) if key else ""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]
