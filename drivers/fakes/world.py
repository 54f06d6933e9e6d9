"""Common base of all fake providers: requests and replies as values, and request handling.

A World uses no clock, disk or network.  Equal seeds, faults and requests at equal times give equal
replies and an equal ledger. A copy (`copy.deepcopy`) is independent of its original.
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
"""A JSON object of a request or reply."""
EMPTY: Final[Mapping[str, str]] = {}
MAX_BODY: Final = 1 << 20


class Request(NamedTuple):
    """An HTTP request to a fake provider.

    `query` is still encoded, and `headers` have lower-case names.

    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = EMPTY
    body: bytes = b""


class Reply(NamedTuple):
    """A fake provider's reply: a JSON value, or text.

    If `lost`, the connection is closed without a reply.  If `hold` is set, the request waits that
    many seconds for a change and is then handled again.
    """

    status: int
    body: object = None
    headers: Mapping[str, str] = EMPTY
    lost: bool = False
    hold: float = 0.0

    def encode(self) -> bytes:
        """Return the reply body as bytes."""
        if self.status == 204:
            return b""
        text = self.body if isinstance(self.body, str) else json.dumps(self.body)
        return text.encode()

    @property
    def kind(self) -> str:
        """Content-Type of the reply."""
        usual = "text/plain; charset=utf-8" if isinstance(self.body, str) else "application/json"
        return self.headers.get("content-type") or usual


class Refused(Exception):
    """Exception that ends an API operation with this reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


class Route(NamedTuple):
    """HTTP method and path of an API operation. `{name}` stands for one path component.

    `operation` is the name of a method of the World or of one of its parts.
    """

    method: str
    path: str
    operation: str
    gap: float = 0  # minimum seconds between two calls, multiplied by `pace`
    plain: bool = False  # the body is plain text, stored as the field `text`


class Call(NamedTuple):
    """One request for a known API operation.

    `names` are the parts of the path, `pairs` the query with repeated names, `fields` the JSON
    body.  `by` is a digest of the caller's key.
    """

    operation: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    pairs: Sequence[tuple[str, str]]
    fields: Document
    headers: Mapping[str, str]
    by: str
    luck: Luck

    def text(self, name: str, default: str = "") -> str:
        """Return a text field of the request body, or `default`."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else default

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a finite number field of the request body, or `default`."""
        return number(self.fields.get(name), default)

    def values(self, name: str) -> list[str]:
        """Return all values of one query parameter."""
        return [value for each, value in self.pairs if each == name]

    def inner(self, name: str) -> Document:
        """Return an object field of the request body, or {} if missing."""
        return document(self.fields.get(name))


class Boot(NamedTuple):
    """Boot data of a machine that runs as a real process.

    If `swept`, the keys that the machine wrote itself are removed now.  `user` logs in at
    `address`.  Port 0 chooses a free port.
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
    kept: tuple[str, ...] | None = (
        None  # entries of the home directory that survive a restart; None for all
    )


class World(ABC, Generic[M]):
    """Base of fake providers, each with one account.

    A provider defines `routes`, a method for each operation, its own error format, and three steps
    of its machines: `begin` creates the first ones, the account calls `happen` when a transition is
    due, and `halt` when the credit is used up.
    """

    routes: ClassVar[tuple[Route, ...]]
    open: ClassVar[frozenset[str]] = frozenset()
    """Operations that need no key."""
    exports: ClassVar[tuple[str, ...]]
    """Variables that direct the official client to this server; `{url}` and `{key}` are replaced."""

    def __init__(self, seed: int = 0, faults: Iterable[Fault] = (), now: float = EPOCH) -> None:
        self.seed = seed
        self.faults = list(faults)
        self.account: Account[M] = Account(self.faults, now, self.happen, self.halt)
        self.parts: list[object] = []
        """Objects with the operations that are not methods of this World."""
        self.ports: dict[str, int] | None = None  # by machine; None without real machines
        self.port = 0  # a free local port, for providers whose machines all use one port
        self.key = ""
        self.calls = 0
        self._last: dict[str, float] = {}
        self.begin()

    # -- defined by each provider ------------------------------------------------------------------

    def boot(self, machine: M) -> Boot | None:
        """Return the boot data of a running machine, or None if it never runs as a real process.

        `ports` maps the listening machines to loopback ports, and is None without real machines.
        """
        return None

    def own_keys(self, machine: str) -> tuple[str, ...]:
        """Return the API keys of a machine, with which it may manage itself."""
        return ()

    def is_own(self, by: str, machine: str) -> bool:
        """Return True if a caller is the machine itself, using one of its own API keys."""
        return by in (_digest(own) for own in self.own_keys(machine))

    def begin(self) -> None:
        """Create the market and the account's initial machines."""

    @abstractmethod
    def happen(self, machine: M, what: str) -> None:
        """Execute a due machine transition: `up`, `preempted`, or a provider-specific name."""

    @abstractmethod
    def halt(self, machine: M) -> None:
        """Stop a machine because the account's credit is used up."""

    @abstractmethod
    def problem(self, status: int, code: str, message: str) -> Reply:
        """Return an error reply in the provider's format."""

    def refusal(self, call: Call) -> Reply:
        """Return the reply to a missing or wrong API key."""
        return self.problem(401, "unauthorized", "Invalid API key")

    def throttle_reply(self, route: Route) -> Reply:
        """Return the rate-limit reply."""
        return self.problem(429, "rate_limited", "Too many requests")

    def decorate(self, reply: Reply) -> Reply:
        """Add the headers common to all replies of the provider."""
        return reply

    # -- one request -------------------------------------------------------------------------------

    def handle(self, request: Request, now: float) -> Reply:
        """Answer one request at Unix time `now`. Time never goes backwards."""
        self.account.advance(now)
        found: list[tuple[Route, re.Match[str]]] = []
        for route, path in _compile_routes(self.routes):
            match = path.fullmatch(request.path)
            if match:
                found.append((route, match))
        if not found:
            return self.decorate(self.problem(404, "not_found", f"there is no {request.path}"))
        here = next((pair for pair in found if pair[0].method == request.method), None)
        if here is None:
            return self.decorate(
                self.problem(405, "method_not_allowed", f"{request.path} takes no {request.method}")
            )
        route, match = here
        self.calls += 1
        luck = Luck(self.faults, f"{self.seed}/{self.calls}", route.operation)
        if luck.strikes("cut"):
            return Reply(503, lost=True)
        return self.decorate(self._answer(route, match.groupdict(), request, luck))

    def _answer(
        self, route: Route, names: Mapping[str, str], request: Request, luck: Luck
    ) -> Reply:
        fields: Document | None
        if route.plain:
            fields = {"text": request.body.decode("utf-8", "replace")}
        else:
            fields = parse_body(request.body)
        pairs = parse_qsl(request.query, keep_blank_values=True)
        query = dict(pairs)
        by = _who(request.headers, query)
        call = Call(route.operation, names, query, pairs, fields or {}, request.headers, by, luck)
        # A caller without a key does not use up a fault that happens once.
        if not self._lets_in(call) or luck.strikes("denied"):
            return self.refusal(call)
        if luck.strikes("throttled") or self._comes_too_soon(route):
            return self.throttle_reply(route)
        self._last[route.operation] = self.account.now
        if luck.strikes("broken"):
            return self.problem(502, "bad_gateway", "Bad Gateway")
        if fields is None:
            return self.malformed_reply()
        parts = (self, *self.parts)
        part = next(part for part in parts if hasattr(part, route.operation))
        try:
            reply: Reply = getattr(part, route.operation)(call)
        except Refused as refused:
            reply = refused.reply
        if luck.strikes("crashed"):
            reply = self.problem(500, "internal_error", "Internal Server Error")
        return reply._replace(lost=luck.strikes("lost"))

    def _lets_in(self, call: Call) -> bool:
        """Return True if the caller's API key is valid, or missing where none is needed."""
        if not call.by:
            return self.anonymous(call.operation)
        if not self.key or call.by == _digest(self.key):
            return True
        return self.is_own(call.by, call.names.get("id", ""))

    def _comes_too_soon(self, route: Route) -> bool:
        """Return True if the last call of this API operation was less than its gap ago."""
        last = self._last.get(route.operation, -math.inf)
        return self.account.now - last < route.gap * self.amount("pace")

    def anonymous(self, operation: str) -> bool:
        """Return True if an API operation needs no key."""
        return operation in self.open

    def malformed_reply(self) -> Reply:
        """Return the reply to a body that is not a JSON object."""
        return self.problem(400, "invalid_request", "Invalid JSON body")

    def amount(self, name: str, default: float = 0.0) -> float:
        """Return the configured value of a fault, or `default` if the fault is not set."""
        return amount(self.faults, name, default)


W = TypeVar("W")


class Part(Generic[W]):
    """A group of API operations of a fake provider."""

    def __init__(self, world: W) -> None:
        self._world = world


@cache
def _compile_routes(routes: tuple[Route, ...]) -> list[tuple[Route, re.Pattern[str]]]:
    return [
        (route, re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(route.path))))
        for route in routes
    ]


def document(value: object) -> Document:
    """Return a JSON object, or {} for any other value."""
    return value if isinstance(value, dict) else {}


def array(value: object) -> list[object]:
    """Return a JSON array, or [] for any other value."""
    return value if isinstance(value, list) else []


def number(value: object, default: float = 0.0) -> float:
    """Return a finite JSON number, or `default` for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    return float(value) if abs(value) < 1e300 else default


def parse_digits(text: str, most: int) -> int | None:
    """Parse a whole number of at most `most` ASCII digits. None for any other text."""
    if not text.isascii() or not text.isdigit():
        return None
    return int(text) if len(text) <= most else None


def parse_body(body: bytes) -> Document | None:
    """Parse a request body, or return None if it is not a JSON object."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def date(at: float) -> str:
    """Format a Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_value(text: str) -> object:
    """Parse a JSON value from a query, or return None if invalid."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found


def _who(headers: Mapping[str, str], query: Mapping[str, str]) -> str:
    """Return the digest of the caller's API key, or "" without a key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else query.get("api_key", "")
    return _digest(key) if key else ""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]
