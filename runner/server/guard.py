"""Checks of every request before routing: host, origin, size, JSON body and token."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import answers, page
from .answers import Refused
from .tickets import Tickets
from .tokens import Token, Tokens

TURNS: Final = 8
"""Number of requests that start in one iteration of the event loop."""
LARGEST: Final = 1 << 20
"""Maximum size of a request body in bytes."""
DRAINED: Final = 8 << 20
"""Bytes read of an oversized body. A client that is still sending would not see the response."""
HEADERS: Final = 64
LONGEST_URL: Final = 56 << 10
"""Maximum size of a URL in bytes: 4,496 characters of parameters, at most 12 bytes each."""
LONGEST_HEAD: Final = 64 << 10
"""Maximum size of a request's URL and headers in bytes."""
PATIENCE: Final = 30.0
"""Seconds within which a request must arrive completely."""
DEEPEST: Final = 32
"""Maximum nesting depth of a JSON body."""
LONGEST: Final = 1 << 16
"""Maximum number of characters of a text in a body."""
_NOWHERE = re.compile(rb"(?i)%2f|%5c|%00|//|(?:^|/)(?:\.|%2e){1,2}(?:/|$)")
_NEVER_REPEATED: Final = (
    b"host",
    b"authorization",
    b"content-type",
    b"content-length",
    b"origin",
)
_SAFE: Final = {
    b"x-content-type-options": b"nosniff",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}


class Turns:
    """Queue that starts only a few requests at a time, in order of arrival.

    After a restart, all followers reconnect at once. Connected clients are served in between.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun = 0

    async def take(self) -> None:
        """Wait for this request's turn."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next)
        if self._begun < TURNS and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < TURNS:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)


class Guard:
    """ASGI middleware that rejects invalid requests and sets `scope["state"]["caller"]`.

    The caller is a Token, or None for /health and the files of the web page.
    """

    def __init__(
        self, app: ASGIApp, root: Path, tokens: Tokens, tickets: Tickets, hosts: Set[str]
    ) -> None:
        self._app, self._root, self._hosts = app, root, hosts
        self._tokens, self._tickets = tokens, tickets
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        await self._turns.take()
        if scope["type"] == "websocket":
            await self._open(scope, receive, send)
            return
        try:
            headers = self._headers(scope)
            scope.setdefault("state", {})["caller"] = self._caller(scope["path"], headers)
            given = await _body(headers, receive)
        except Refused as refused:
            await _refuse(send, self._root, refused)
            return

        async def replay_body() -> Message:
            nonlocal given
            if given is None:
                return await receive()
            message: Message = {"type": "http.request", "body": given, "more_body": False}
            given = None
            return message

        await self._app(scope, replay_body, _add_security_headers(send))

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a WebSocket with a token or a ticket. Browsers cannot send a token."""
        try:
            headers = self._headers(scope)
            secret, scope["query_string"] = _without_ticket(scope["query_string"])
            if secret and b"authorization" not in headers:
                caller = self._tickets.use(secret)
                if caller is None:
                    words = "invalid ticket: already used or expired"
                    raise Refused(
                        401, "unauthorized", words, "create another with POST /v1/tickets"
                    )
            else:
                caller = self._caller(scope["path"], headers)
            scope.setdefault("state", {})["caller"] = caller
        except Refused as refused:
            await _refuse(send, self._root, refused, "websocket.http.response")
            return
        await self._app(scope, receive, send)

    def _headers(self, scope: Scope) -> Mapping[bytes, bytes]:
        """Return the headers of a request by name.

        Raises Refused for too many or repeated headers, an unknown host or origin, and an invalid
        path.
        """
        _check_size(scope)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        count = Counter(name for name, _ in scope["headers"])
        if any(count[name] > 1 for name in _NEVER_REPEATED):
            raise Refused(400, "bad-request", "a header appears twice")
        self._check_host(headers)
        if _NOWHERE.search(scope.get("raw_path") or b"/"):
            raise Refused(
                404,
                "not-found",
                "unknown path",
                "see the list of paths in GET /openapi.json",
            )
        if b"%00" in scope.get("query_string", b""):
            raise Refused(422, "bad-value", "a parameter contains a NUL character")
        return headers

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refused for a request to an unknown host, or from a page of another host."""
        if headers.get(b"host", b"").decode("latin-1").lower() not in self._hosts:
            raise Refused(
                421,
                "unknown-host",
                "the server does not accept this host name",
                "add it to `hosts` under [server] in recipe.toml",
            )
        origin = headers.get(b"origin")
        if origin is not None:
            host = urlsplit(origin.decode("latin-1")).netloc.lower()
            if host not in self._hosts:
                words = "requests from pages of other servers are not allowed"
                raise Refused(403, "foreign-origin", words)

    def _caller(self, path: str, headers: Mapping[bytes, bytes]) -> Token | None:
        """Return the access token of a request.

        None for /health without a token and for the files of the web page, which contain no data.
        Raises Refused for other requests without a valid token.
        """
        kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
        if path in page.PARTS or (not kind and path == "/health"):
            return None
        token = None
        if kind.lower() == b"bearer":
            token = self._tokens.find(secret.strip().decode("latin-1"))
        if token is None:
            words = "the token is unknown or expired" if kind else "a token is required"
            raise Refused(
                401, "unauthorized", words, "send the header `Authorization: Bearer TOKEN`"
            )
        return token


def _check_size(scope: Scope) -> None:
    """Raise Refused for a request with too many or too large headers, or a too long URL."""
    if len(scope["headers"]) > HEADERS:
        raise Refused(431, "too-many-headers", f"a request may have at most {HEADERS} headers")
    url = len(scope["path"]) + len(scope["query_string"])
    if url > LONGEST_URL:
        raise Refused(400, "too-large", f"a URL may have at most {LONGEST_URL} bytes")
    if url + sum(len(name) + len(value) for name, value in scope["headers"]) > LONGEST_HEAD:
        raise Refused(
            431,
            "too-large",
            f"the URL and headers of a request may have at most {LONGEST_HEAD} bytes in total",
        )


async def _body(headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
    """Read the JSON body of a request. Raises Refused if it is too large or not JSON."""
    length = headers.get(b"content-length", b"0")
    if length == b"0" and b"transfer-encoding" not in headers:
        return None
    if length.isdigit() and int(length[:20]) > DRAINED:
        raise _too_large()
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" or b"content-encoding" in headers:
        raise Refused(415, "not-json", "send the body as application/json, without compression")
    try:
        data = await asyncio.wait_for(_receive_body(receive), PATIENCE)
    except TimeoutError:
        raise Refused(
            408, "too-slow", f"the request did not arrive completely within {PATIENCE:.0f} s"
        ) from None
    if data:
        _check_json(data)
    return data


async def _receive_body(receive: Receive) -> bytes:
    data, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "bad-request", "the request is incomplete")
        size += len(message.get("body", b""))
        if size <= LARGEST:
            data += message.get("body", b"")
        if size > DRAINED or (size > LARGEST and not message.get("more_body", False)):
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(data)


def _too_large() -> Refused:
    return Refused(
        413, "too-large", f"a body may have at most {LARGEST} bytes", "pass the data by its address"
    )


def _check_json(data: bytes) -> None:
    """Raise Refused if a body is not JSON, is nested too deeply, or contains an invalid text."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise Refused(
            400, "not-json", "the body is not valid JSON, or is nested too deeply"
        ) from None
    level: list[object] = [value]
    for _ in range(DEEPEST):
        texts = _texts_of(level)
        if any("\0" in text or not _is_unicode(text) for text in texts):
            raise Refused(
                422, "bad-value", "a text contains a NUL character or an incomplete character"
            )
        if any(len(text) > LONGEST for text in texts):
            raise Refused(
                422,
                "too-long",
                f"a text may have at most {LONGEST} characters",
                "pass the data by its address",
            )
        level = _values_inside(level)
        if not level:
            return
    raise Refused(400, "not-json", f"the body is nested deeper than {DEEPEST} levels")


def _texts_of(values: Iterable[object]) -> list[str]:
    """Return the texts among JSON values, and the names in their mappings."""
    texts: list[str] = []
    for value in values:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            texts += value
    return texts


def _values_inside(values: Iterable[object]) -> list[object]:
    """Return the JSON values one level deeper."""
    inside: list[object] = []
    for value in values:
        if isinstance(value, dict):
            inside += value.values()
        elif isinstance(value, list):
            inside += value
    return inside


def _reject_constant(word: str) -> float:
    raise ValueError(word)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _without_ticket(query: bytes) -> tuple[str, bytes]:
    """Return the ticket in a query string, and the query string without it."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    secret = next((value for name, value in pairs if name == "ticket"), "")
    return secret, urlencode([pair for pair in pairs if pair[0] != "ticket"]).encode()


async def _refuse(send: Send, root: Path, refused: Refused, kind: str = "http.response") -> None:
    data = answers.error_body(root, refused.code, refused.message, refused.fix, refused.problems)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *_SAFE.items(),
    ]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": f"{kind}.start", "status": refused.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": data})


def _add_security_headers(send: Send) -> Send:
    """Add security headers to every response."""

    async def send_safely(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", ())}
            added = [(name, value) for name, value in _SAFE.items() if name not in present]
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return send_safely
