"""The transport to a server, over HTTP with httpx.

`questions` builds the requests, and `core` decides about retries.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from drivers import install_line

from ...api.differences import Differences
from ...api.outcomes import Outcome
from ...api.values import (
    Artifact,
    Forecast,
    Point,
    QueuedRun,
    RecipeEntry,
    Status,
    WorkerStatus,
)
from ...errors import Infrastructure, Invalid, NotFound, Problem
from ...paths import config_folder
from ...storage.records.runs import Event
from . import questions
from .questions import Question
from .transport import (
    AsyncEvents,
    AsyncPieces,
    Events,
    Listing,
    LogPart,
    New,
    Of,
    Pieces,
    RequestLost,
    RunPage,
    Verb,
)

if TYPE_CHECKING:
    import httpx

PATIENCE: Final = 60.0
"""Read timeout in seconds.  After a timeout, a followed stream is opened again."""
CONNECT: Final = 10.0
LISTED: Final = 200
"""Number of newest runs in which a partial run ID is searched."""
T = TypeVar("T")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def is_server(address: str) -> bool:
    """Return True if the address is the URL of a server."""
    return address.startswith(("http://", "https://"))


def token_of(environ: Mapping[str, str]) -> str:
    """Return the API token from `RECIPE_TOKEN`, the file `RECIPE_TOKEN_FILE`, or
    ~/.config/recipe/token.  Raises Invalid.
    """
    token = environ.get("RECIPE_TOKEN", "")
    if token:
        return token.strip()
    named = environ.get("RECIPE_TOKEN_FILE", "")
    path = Path(named or f"{config_folder(environ)}/token")
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise Invalid(
                [Problem("open-token", f"other users can read {path}", fix=f"chmod 600 {path}")]
            )
        return path.read_text("utf-8").strip()
    except FileNotFoundError:
        if named:
            raise Invalid(
                [Problem("no-token", f"the file in RECIPE_TOKEN_FILE does not exist: {path}")]
            ) from None
        return ""


def _options(address: str) -> tuple[str, dict[str, str]]:
    """Return the URL of a server and the headers of each request.  Raises Invalid."""
    parts = urlsplit(address)
    _require_server(parts, address)
    _require_encryption(parts)
    token = token_of(os.environ)
    _require_token_form(token)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return address.rstrip("/"), headers


def _require_server(parts: SplitResult, address: str) -> None:
    """Raise Invalid if an address has no host, or more than a path after it."""
    # The paths of requests are appended to the address, and the token is the only credential.
    has_more = parts.username or parts.query or parts.fragment
    if has_more or not parts.hostname:
        problem = Problem(
            "bad-address",
            f"{parts.hostname or address} is not a server URL",
            fix="use the form https://HOST:PORT",
        )
        raise Invalid([problem])


def _require_encryption(parts: SplitResult) -> None:
    """Raise Invalid if the token would be sent to another machine unencrypted."""
    is_exposed = parts.scheme == "http" and parts.hostname not in _LOOPBACK
    if is_exposed and os.environ.get("RECIPE_INSECURE") != "1":
        fix = "use https://, a tunnel (ssh -L 8765:127.0.0.1:8765 HOST), or RECIPE_INSECURE=1 if a private network or proxy encrypts"
        words = f"the token would be sent to {parts.hostname} unencrypted"
        raise Invalid([Problem("not-encrypted", words, fix=fix)])


def _require_token_form(token: str) -> None:
    """Raise Invalid if a token cannot be sent in a header."""
    if not token.isascii() or any(char.isspace() for char in token):
        words = "the token does not have the form of a server token"
        raise Invalid([Problem("bad-token", words, fix="check RECIPE_TOKEN")])


def _require_httpx() -> None:
    """Raise Infrastructure if httpx is not installed."""
    from importlib.util import find_spec

    if find_spec("httpx") is None:
        raise Infrastructure(
            "access to a server requires httpx, which is not installed",
            fix=install_line("client"),
        )


def _parse_last(word: str) -> int | None:
    """Parse `last` as 0 and `last~N` as N; None for any other word."""
    if word == "last":
        return 0
    name, _, back = word.partition("~")
    return int(back) if name == "last" and back.isdecimal() else None


class HttpTransport:
    """A persistent connection to a server.  Methods raise Invalid and Infrastructure."""

    def __init__(self, address: str) -> None:
        _require_httpx()
        import httpx

        self.name, headers = _options(address)
        self._client = httpx.Client(
            headers=headers, timeout=httpx.Timeout(PATIENCE, connect=CONNECT)
        )

    def find(self, word: str) -> str:
        back = _parse_last(word)
        if back is not None:
            return self._last(word, back)
        run = self._expand_id(word)
        try:
            return self.run(run).id
        except NotFound:
            words = f'no run "{word}" at {self.name}'
            raise NotFound(words, fix="list the runs with `recipe runs`") from None

    def _expand_id(self, word: str) -> str:
        """Return the id of the newest run named `word`, or the only id that contains `word`, else
        `word` itself.  Raises NotFound if ambiguous.
        """
        if not word:
            return word
        listed = self.list_runs(Listing(LISTED)).runs
        for row in listed:
            if row.name == word:
                return row.id
        ids = [row.id for row in listed if word in row.id]
        if len(ids) > 1 and word not in ids:
            words = f'"{word}" matches {len(ids)} runs: {", ".join(ids[:3])}, …'
            raise NotFound(words, fix="use a longer part of the run ID")
        return ids[0] if len(ids) == 1 else word

    def _last(self, word: str, number: int) -> str:
        rows: list[Status] = []
        after = ""
        while True:
            page = self.list_runs(Listing(number + 1 - len(rows), after=after))
            rows += page.runs
            after = page.next
            if len(rows) > number:
                return rows[number].id
            if not after:
                words = f"{word}: the oldest run at {self.name} is last~{len(rows) - 1}"
                raise NotFound(words, fix="list the runs with `recipe runs`")

    def recipes(self) -> Sequence[RecipeEntry]:
        return self._answer(questions.recipes())

    def plan(self, new: New) -> Forecast:
        return self._answer(questions.plan(new))

    def list_runs(self, listing: Listing) -> RunPage:
        return self._answer(questions.list_runs(listing))

    def run(self, run: str) -> Status:
        return self._answer(questions.run(run))

    def submit(self, new: New, key: str) -> str:
        return self._answer(questions.submit(new, key))

    def events(self, run: str, after: int) -> Sequence[Event]:
        return self._answer(questions.events(run, after))

    def follow(self, run: str, after: int) -> Events:
        stream = questions.EventStream()
        for piece in self._pieces(questions.follow(run, after)):
            yield stream.take(piece)

    def log(self, run: str, part: LogPart) -> Pieces:
        return self._pieces(questions.log(run, part))

    def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]:
        return self._answer(questions.points(run, step, attempt, of))

    def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]:
        return self._answer(questions.artifacts(run, name, after))

    def file(self, run: str, name: str, path: str, begin: int) -> Pieces:
        return self._pieces(questions.file(run, name, path, begin))

    def request(self, run: str, what: Verb, *, keep_hosts: bool = False) -> Outcome:
        return self._answer(questions.request(run, what, keep_hosts=keep_hosts))

    def retry(self, run: str, begin: str | None) -> Outcome:
        return self._answer(questions.retry(run, begin))

    def prioritize(self, run: str, priority: int) -> Outcome:
        return self._answer(questions.prioritize(run, priority))

    def differences(self, a: str, b: str) -> Differences:
        return self._answer(questions.differences(a, b))

    def workers(self) -> Sequence[WorkerStatus]:
        return self._answer(questions.workers())

    def queue(self) -> Sequence[QueuedRun]:
        return self._answer(questions.queue())

    def close(self) -> None:
        self._client.close()

    def _answer(self, question: Question[T]) -> T:
        with _httpx_errors_as_lost():
            response = self._client.send(_request(self._client, self.name, question))
        _check_status(response, question)
        return question.read(response.content)

    def _pieces(self, question: Question[None]) -> Pieces:
        with _httpx_errors_as_lost():
            request = _request(self._client, self.name, question)
            with closing(self._client.send(request, stream=True)) as response:
                if response.status_code == question.nothing:
                    return
                if response.status_code >= 400:
                    response.read()
                _check_status(response, question)
                yield from response.iter_bytes()


class AsyncHttpTransport:
    """An asynchronous version of `HttpTransport`."""

    def __init__(self, address: str) -> None:
        _require_httpx()
        import httpx

        self.name, headers = _options(address)
        self._client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(PATIENCE, connect=CONNECT)
        )

    async def recipes(self) -> Sequence[RecipeEntry]:
        return await self._answer(questions.recipes())

    async def plan(self, new: New) -> Forecast:
        return await self._answer(questions.plan(new))

    async def run(self, run: str) -> Status:
        return await self._answer(questions.run(run))

    async def submit(self, new: New, key: str) -> str:
        return await self._answer(questions.submit(new, key))

    async def events(self, run: str, after: int) -> Sequence[Event]:
        return await self._answer(questions.events(run, after))

    async def follow(self, run: str, after: int) -> AsyncEvents:
        stream = questions.EventStream()
        async with aclosing(self._pieces(questions.follow(run, after))) as pieces:
            async for piece in pieces:
                yield stream.take(piece)

    def log(self, run: str, part: LogPart) -> AsyncPieces:
        return self._pieces(questions.log(run, part))

    async def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]:
        return await self._answer(questions.points(run, step, attempt, of))

    async def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]:
        return await self._answer(questions.artifacts(run, name, after))

    def file(self, run: str, name: str, path: str, begin: int) -> AsyncPieces:
        return self._pieces(questions.file(run, name, path, begin))

    async def request(self, run: str, what: Verb) -> Outcome:
        return await self._answer(questions.request(run, what, keep_hosts=False))

    async def retry(self, run: str, begin: str | None) -> Outcome:
        return await self._answer(questions.retry(run, begin))

    async def prioritize(self, run: str, priority: int) -> Outcome:
        return await self._answer(questions.prioritize(run, priority))

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, question: Question[T]) -> T:
        with _httpx_errors_as_lost():
            response = await self._client.send(_request(self._client, self.name, question))
        _check_status(response, question)
        return question.read(response.content)

    async def _pieces(self, question: Question[None]) -> AsyncPieces:
        with _httpx_errors_as_lost():
            request = _request(self._client, self.name, question)
            async with aclosing(await self._client.send(request, stream=True)) as response:
                if response.status_code == question.nothing:
                    return
                if response.status_code >= 400:
                    await response.aread()
                _check_status(response, question)
                async for piece in response.aiter_bytes():
                    yield piece


def _request(
    client: httpx.Client | httpx.AsyncClient, address: str, question: Question[T]
) -> httpx.Request:
    return client.build_request(
        question.method,
        f"{address}/{question.path}",
        params=dict(question.query),
        json=question.body,
        headers=dict(question.headers),
    )


def _check_status(response: httpx.Response, question: Question[T]) -> None:
    """Raise Lost or RecipeError if the answer is an HTTP error.  The body must have been read."""
    if response.status_code >= 400:
        wait = response.headers.get("retry-after", "")
        seconds = float(wait) if wait.isdecimal() else 0.0
        questions.refuse(response.status_code, response.content, seconds, question.run)


@contextmanager
def _httpx_errors_as_lost() -> Iterator[None]:
    """Convert httpx errors to Lost."""
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise RequestLost(str(error) or type(error).__name__) from error
