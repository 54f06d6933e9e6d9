"""Asks a server, over HTTP by httpx.  What an answer means, and what is asked again, `core` decides."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ...errors import Infrastructure, Invalid, Problem
from .core import Ask, Lost

if TYPE_CHECKING:
    import httpx

PATIENCE: Final = 60.0
"""Seconds without a byte, after which a connection is given up; what is followed is asked for again."""
CONNECT: Final = 10.0
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def is_server(address: str) -> bool:
    """Whether runs at this address are a server's."""
    return address.startswith(("http://", "https://"))


def token_of(environ: Mapping[str, str]) -> str:
    """The token that is sent: `RECIPE_TOKEN`, or the file that `RECIPE_TOKEN_FILE` names, else ~/.config/recipe/token.  Raises Invalid."""
    from ...paths import config_folder

    if token := environ.get("RECIPE_TOKEN", ""):
        return token.strip()
    named = environ.get("RECIPE_TOKEN_FILE", "")
    path = Path(named or f"{config_folder(environ)}/token")
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise Invalid([Problem("open-token", f"{path} can be read by others", fix=f"chmod 600 {path}")])
        return path.read_text("utf-8").strip()
    except FileNotFoundError:
        if named:
            raise Invalid([Problem("no-token", f"RECIPE_TOKEN_FILE names {path}, which is not there")]) from None
        return ""


def _options(address: str) -> tuple[str, dict[str, str]]:
    """The address of a server, and what is sent with each request.  Raises Invalid."""
    parts = urlsplit(address)
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise Invalid([Problem("bad-address", f"{parts.hostname or address} is no address of a server", fix="write it as https://HOST:PORT")])
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK and os.environ.get("RECIPE_INSECURE") != "1":
        fix = "use https://, a tunnel (ssh -L 8765:127.0.0.1:8765 HOST), or RECIPE_INSECURE=1 where something else encrypts"
        raise Invalid([Problem("not-encrypted", f"the token would go to {parts.hostname} for everybody to read", fix=fix)])
    token = token_of(os.environ)
    if not token.isascii() or any(char.isspace() for char in token):
        raise Invalid([Problem("bad-token", "the token is not one that a server gave out", fix="look at RECIPE_TOKEN")])
    return address.rstrip("/"), {"Authorization": f"Bearer {token}"} if token else {}


def _httpx() -> None:
    """Raises Infrastructure where httpx is not installed."""
    from importlib.util import find_spec

    if find_spec("httpx") is None:
        raise Infrastructure("httpx is not installed, which asks servers", fix="pip install 'recipe-runner[client]'")


def _retry_after(headers: httpx.Headers) -> float:
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


class Answer:
    def __init__(self, response: httpx.Response) -> None:
        self._response, self.status, self.retry_after = response, response.status_code, _retry_after(response.headers)

    def pieces(self) -> Iterator[bytes]:
        import httpx

        try:
            yield from self._response.iter_bytes()
        except httpx.HTTPError as error:
            raise Lost(_words(error)) from error

    def close(self) -> None:
        self._response.close()


class Server:
    """A server at an address, with a connection that is kept.  Raises Invalid, Infrastructure."""

    def __init__(self, address: str) -> None:
        _httpx()
        import httpx

        self.name, headers = _options(address)
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(PATIENCE, connect=CONNECT))

    def send(self, ask: Ask) -> Answer:
        """Raises Lost."""
        import httpx

        try:
            request = self._client.build_request(
                ask.method, f"{self.name}/{ask.path}", params=dict(ask.query), json=ask.body, headers=dict(ask.headers)
            )
            return Answer(self._client.send(request, stream=True))
        except httpx.HTTPError as error:
            raise Lost(_words(error)) from error

    def close(self) -> None:
        self._client.close()


class AsyncAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self._response, self.status, self.retry_after = response, response.status_code, _retry_after(response.headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        import httpx

        try:
            async for piece in self._response.aiter_bytes():
                yield piece
        except httpx.HTTPError as error:
            raise Lost(_words(error)) from error

    async def close(self) -> None:
        await self._response.aclose()


class AsyncServer:
    """The same by `await`."""

    def __init__(self, address: str) -> None:
        _httpx()
        import httpx

        self.name, headers = _options(address)
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(PATIENCE, connect=CONNECT))

    async def send(self, ask: Ask) -> AsyncAnswer:
        """Raises Lost."""
        import httpx

        try:
            request = self._client.build_request(
                ask.method, f"{self.name}/{ask.path}", params=dict(ask.query), json=ask.body, headers=dict(ask.headers)
            )
            return AsyncAnswer(await self._client.send(request, stream=True))
        except httpx.HTTPError as error:
            raise Lost(_words(error)) from error

    async def close(self) -> None:
        await self._client.aclose()


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
