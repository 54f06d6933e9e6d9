"""Asks a server, over HTTP by httpx.  What an answer means, and what is asked again, `core` decides."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from drivers import install_line

from ...errors import Infrastructure, Invalid, Problem
from .core import Ask, AsyncPieces, Lost, Pieces, Reply

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
            raise Invalid(
                [Problem("open-token", f"{path} can be read by others", fix=f"chmod 600 {path}")]
            )
        return path.read_text("utf-8").strip()
    except FileNotFoundError:
        if named:
            raise Invalid(
                [Problem("no-token", f"RECIPE_TOKEN_FILE names {path}, which is not there")]
            ) from None
        return ""


def _options(address: str) -> tuple[str, dict[str, str]]:
    """The address of a server, and what is sent with each request.  Raises Invalid."""
    parts = urlsplit(address)
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise Invalid(
            [
                Problem(
                    "bad-address",
                    f"{parts.hostname or address} is no address of a server",
                    fix="write it as https://HOST:PORT",
                )
            ]
        )
    if (
        parts.scheme == "http"
        and parts.hostname not in _LOOPBACK
        and os.environ.get("RECIPE_INSECURE") != "1"
    ):
        fix = "use https://, a tunnel (ssh -L 8765:127.0.0.1:8765 HOST), or RECIPE_INSECURE=1 where something else encrypts"
        raise Invalid(
            [
                Problem(
                    "not-encrypted",
                    f"the token would go to {parts.hostname} for everybody to read",
                    fix=fix,
                )
            ]
        )
    token = token_of(os.environ)
    if not token.isascii() or any(char.isspace() for char in token):
        raise Invalid(
            [
                Problem(
                    "bad-token",
                    "the token is not one that a server gave out",
                    fix="look at RECIPE_TOKEN",
                )
            ]
        )
    return address.rstrip("/"), {"Authorization": f"Bearer {token}"} if token else {}


def _httpx() -> None:
    """Raises Infrastructure where httpx is not installed."""
    from importlib.util import find_spec

    if find_spec("httpx") is None:
        raise Infrastructure(
            "the client of servers needs httpx, which is not installed",
            fix=install_line("client"),
        )


class Server:
    """A server at an address, with a connection that is kept.  Raises Invalid, Infrastructure."""

    def __init__(self, address: str) -> None:
        _httpx()
        import httpx

        self.name, headers = _options(address)
        self._client = httpx.Client(
            headers=headers, timeout=httpx.Timeout(PATIENCE, connect=CONNECT)
        )

    def send(self, ask: Ask) -> tuple[Reply, Pieces]:
        """Raises Lost."""
        with _loss():
            response = self._client.send(_request(self._client, self.name, ask), stream=True)

        def pieces() -> Pieces:
            with _loss(), closing(response):
                yield from response.iter_bytes()

        return _head(response), pieces()

    def close(self) -> None:
        self._client.close()


class AsyncServer:
    """The same by `await`."""

    def __init__(self, address: str) -> None:
        _httpx()
        import httpx

        self.name, headers = _options(address)
        self._client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(PATIENCE, connect=CONNECT)
        )

    async def send(self, ask: Ask) -> tuple[Reply, AsyncPieces]:
        """Raises Lost."""
        with _loss():
            response = await self._client.send(_request(self._client, self.name, ask), stream=True)

        async def pieces() -> AsyncPieces:
            with _loss():
                async with aclosing(response):
                    async for piece in response.aiter_bytes():
                        yield piece

        return _head(response), pieces()

    async def close(self) -> None:
        await self._client.aclose()


def _request(client: httpx.Client | httpx.AsyncClient, address: str, ask: Ask) -> httpx.Request:
    return client.build_request(
        ask.method,
        f"{address}/{ask.path}",
        params=dict(ask.query),
        json=ask.body,
        headers=dict(ask.headers),
    )


def _head(response: httpx.Response) -> Reply:
    wait = response.headers.get("retry-after", "")
    return Reply(response.status_code, retry_after=float(wait) if wait.isdecimal() else 0.0)


@contextmanager
def _loss() -> Iterator[None]:
    """What httpx raises, as Lost."""
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise Lost(str(error) or type(error).__name__) from error
