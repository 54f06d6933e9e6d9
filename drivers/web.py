"""HTTP requests to a provider and typed replies, shared by the API clients of rented machines.

Requests are never retried here.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple, TypeAlias

import httpx

from .base import Denied, Unreachable, Unsure

Fields: TypeAlias = Mapping[str, object]
LARGEST: Final = 64 << 20  # bytes of a reply
PATIENCE: Final = 60.0  # seconds for one request
LIMIT: Final = (
    1e18  # larger numbers in replies are invalid, such as an integer of a thousand digits
)
PAGES: Final = 1000  # per listing
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_CENTS: Final = ("cent", "cents", "¢")
_HOURS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("s", "sec", "second"), 1 / 3600),
    **dict.fromkeys(("m", "min", "minute"), 1 / 60),
    **dict.fromkeys(("h", "hr", "hour"), 1.0),
    **dict.fromkeys(("d", "day"), 24.0),
    **dict.fromkeys(("w", "week"), 168.0),
    **dict.fromkeys(("mo", "month"), 720.0),
}
"""Hours per unit of time in a price, by the unit's names."""
_PRICE: Final = re.compile(
    r"(?P<sign>\$|us\$)?\s*(?P<amount>(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?)"
    rf"\s*(?P<unit>\$|usd|dollars?|{'|'.join(reversed(_CENTS))})?"
    rf"\s*((/|per|an?)\s*(?P<time>{'|'.join(sorted(_HOURS, reverse=True))})s?)?",
    re.ASCII,
)


class Answer(NamedTuple):
    """An HTTP reply.  `fields` is the reply's JSON object, empty if the reply has none."""

    status: int
    fields: Fields
    text: str
    headers: Mapping[str, str]

    @property
    def code(self) -> str:
        """Return the provider's error code.  Empty if the reply has none."""
        error = self.fields.get("error", "")
        if not isinstance(error, dict):
            return f"{error}"
        # Google's form, which has a list of causes.
        causes = error.get("errors")
        if not isinstance(causes, list) or not causes:
            return ""
        first = causes[0]
        return f"{first.get('reason', '')}" if isinstance(first, dict) else ""

    @property
    def words(self) -> str:
        """Return the provider's error message as one printable line.

        If the reply holds no text, this is the HTTP status.
        """
        error = self.fields.get("error")
        fields = error if isinstance(error, dict) else self.fields
        told = fields.get("msg") or fields.get("message") or fields.get("detail")
        return printable(f"{told or self.text or self.code}") or f"status {self.status}"


class Web:
    """HTTP client for one provider's API, at the address `api`."""

    def __init__(self, api: str, patience: float = PATIENCE) -> None:
        self.api, self._patience = api.rstrip("/"), patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None
        self.ahead = 0.0
        """Seconds by which the provider's clock was ahead of this machine's in the last reply."""

    async def ask(
        self,
        method: str,
        path: str,
        key: str,
        body: Fields | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one HTTP request.

        Raises Unreachable if the request cannot have been received, Unsure if that is unknown.
        """
        try:
            request = self._of_loop().build_request(
                method,
                self.api + path,
                json=body,
                params=query,
                headers={"Authorization": f"Bearer {key}"},
            )
            reply = await self._of_loop().send(request, stream=True)
            text = bytearray()
            async for data in reply.aiter_bytes():
                text += data
                if len(text) > LARGEST:
                    raise Unsure(f"the reply of {self.api} has more than {LARGEST >> 20} MB")
            await reply.aclose()
        except (
            httpx.ConnectError,
            httpx.ConnectTimeout,
            httpx.PoolTimeout,
            httpx.UnsupportedProtocol,
            httpx.InvalidURL,
        ) as error:
            raise Unreachable(
                f"cannot reach {self.api}: {error or type(error).__name__}"
            ) from error
        except httpx.HTTPError as error:
            raise Unsure(f"no reply from {self.api}: {error or type(error).__name__}") from error
        # A redirect does not come from the provider, so its body is no reply of the API.
        if 300 <= reply.status_code < 400:
            raise Unsure(f"{self.api} redirects ({reply.status_code}) instead of answering")
        self._compare_clocks(reply.headers)
        return read_answer(reply.status_code, bytes(text), reply.headers)

    def _compare_clocks(self, headers: Mapping[str, str]) -> None:
        if "date" not in headers:
            self.ahead = 0.0
            return
        with suppress(TypeError, ValueError):
            self.ahead = parsedate_to_datetime(headers["date"]).timestamp() - time.time()

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _of_loop(self) -> httpx.AsyncClient:
        if self._client is None or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._client = httpx.AsyncClient(timeout=self._patience, follow_redirects=False)
        return self._client


def printable(text: str) -> str:
    """Convert untrusted text to one printable line for a message."""
    return "".join(map(_replace_unprintable, text[:300])).strip()


def _replace_unprintable(letter: str) -> str:
    return letter if letter.isprintable() else " "


def number(row: Fields, *names: str) -> float:
    """Return the first finite number among the JSON fields `names`, also if written as text.

    Otherwise 0.
    """
    for name in names:
        found = _parse_number(row.get(name))
        if found is not None:
            return found
    return 0.0


def _parse_number(value: object) -> float | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    # A bool is an int in Python, but no number of a reply.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < LIMIT else None


def parse_port(value: object) -> int | None:
    """Parse a TCP port, also if written as text.  None if it is no port."""
    found = _parse_number(value)
    if found is None or not found.is_integer():
        return None
    return int(found) if 0 < found < 65536 else None


def price(value: object, hours: float = 1.0) -> float | None:
    """Parse a price to US dollars per hour, or return None if invalid.

    A price is invalid if it is unreadable, negative or in another currency. A bare number is a
    price for `hours` hours. Text may name dollars or cents, and a unit of time: "0.83", "$0.83/hr",
    "19.92 USD per day", "83 cents".
    """
    if isinstance(value, str):
        match = _PRICE.fullmatch(value.strip().lower())
        if match is None:
            return None
        # "$5 cents" is dollars by its sign and cents by its unit.
        if match["sign"] and match["unit"]:
            return None
        if match["time"]:
            hours = _HOURS[match["time"]]
        value = float(match["amount"])
        if match["unit"] in _CENTS:
            value /= 100.0
    # A bool is an int in Python, but no price.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not 0 <= value < LIMIT:
        return None
    return value / hours


def parse_charge(row: Fields, name: str, whose: str) -> float:
    """Parse a provider's charge in US dollars.

    Raises Unreachable if it cannot be read.  The accrued cost then counts instead.
    """
    usd = price(row.get(name))
    if usd is None:
        raise Unreachable(f"cannot read a charge of {whose}: {printable(repr(row.get(name)))}")
    return usd


def seconds(text: object, whose: str) -> float:
    """Parse an ISO 8601 time of a provider into seconds since the epoch.  Raises Unsure."""
    try:
        return datetime.fromisoformat(f"{text}").timestamp()
    except ValueError as error:
        raise Unsure(f"cannot read a time of {whose}") from error


def wait(told: str) -> timedelta:
    """Parse a provider's retry delay in seconds, limited to 0.1 to 60, by default 5."""
    try:
        return timedelta(seconds=min(max(float(told), 0.1), 60.0))
    except ValueError:
        return timedelta(seconds=5)


def rows(fields: Fields, name: str, whose: str) -> list[Fields]:
    """Return a list of objects in a reply field. Raises Unsure if the field holds no list."""
    found = fields.get(name)
    if not isinstance(found, list):
        raise Unsure(f'the reply of {whose} has no list "{name}"')
    return [inner(row, name, whose) for row in found]


def next_page(token: object, seen: set[str], what: str) -> str:
    """Return the token of the next page, or "" at the end.

    `seen` collects the earlier tokens.  Raises Unreachable for pages that repeat or never end.
    """
    if not token:
        return ""
    text = f"{token}"
    if text in seen or len(seen) >= PAGES:
        raise Unreachable(f"{what}: pagination did not end (repeated or too many page tokens)")
    seen.add(text)
    return text


def inner(value: object, what: str, whose: str) -> Fields:
    """Return a value that must be a JSON object. Raises Unsure otherwise."""
    if not isinstance(value, dict):
        raise Unsure(f"cannot read the reply of {whose} about {what}")
    return value


def explain_missing_key(read_key: Callable[[], str]) -> str:
    """Explain why an account's API key cannot be read, or return "" if it can."""
    try:
        read_key()
    except Denied as error:
        return str(error)
    return ""


def read_answer(status: int, body: bytes, headers: Mapping[str, str]) -> Answer:
    """Parse an HTTP reply."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        read = None
    fields = read if isinstance(read, dict) else {}
    return Answer(status, fields, body[:300].decode("utf-8", "replace"), headers)
