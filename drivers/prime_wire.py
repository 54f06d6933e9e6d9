"""Typed requests and replies of the Prime Intellect API.  Requests are never retried here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

from .base import Charge, Denied, Market, Rejected, Resources, Throttled, Unreachable, Unsure
from .web import (
    Answer,
    Fields,
    Web,
    inner,
    number,
    parse_charge,
    parse_port,
    price,
    printable,
    rows,
    seconds,
)

PAGE: Final = 100
PAGES: Final = 1000
TOO_OFTEN: Final = timedelta(seconds=10)
FULL: Final = (
    "no capacity",
    "capacity",
    "unavailable",
    "out of stock",
    "insufficient",
    "quota exceeded",
    "limit exceeded",
    "maxprice",
)
"""Texts of errors that concern only this offer."""
_LOGIN: Final = re.compile(
    r"(?:ssh\s+)?(?P<user>[\w.-]+)@(?P<host>[\w.:-]+?)(?:\s+-p\s+(?P<port>\d{1,5}))?"
)


_ORDERED: Final = ("cloudId", "gpuType", "socket", "dataCenter", "country", "security", "provider")
"""Fields of an offer to repeat when ordering it."""


class PrimeOffer(NamedTuple):
    """A GPU offer from a provider behind Prime.

    `price` is US dollars per hour with `disk` GB, and `order` holds the fields to repeat when
    ordering.
    """

    id: str
    resources: Resources
    price: float | None  # None: it cannot be read
    disk_price: float
    disk: int
    region: str
    market: Market
    secure: bool
    inet: float
    there: bool
    order: Mapping[str, str]
    images: tuple[str, ...]  # Prime's names of the available images; empty: unknown


class PrimePod(NamedTuple):
    """A pod.

    `login` is user, host and port, once known. `ready` means that the installation has finished,
    which the status ACTIVE does not tell.
    """

    id: str
    name: str
    status: str
    ready: bool
    failure: str
    login: tuple[str, str, int] | None
    price: float | None  # None: it cannot be read

    @property
    def description(self) -> str:
        text = self.status
        if not self.ready:
            text += ", not installed yet"
        if self.failure:
            text += f": {self.failure}"
        return text


class PrimeClient:
    """A client of the Prime Intellect API.  `team` pays if set, otherwise the key's own account."""

    def __init__(self, api: str, team: str) -> None:
        self.web, self.team = Web(api), team

    async def search(self, disk: int) -> list[PrimeOffer]:
        """Return all single-machine offers with a disk of at least `disk` GB."""
        found: list[PrimeOffer] = []
        for page in range(1, PAGES):
            query = {"page": str(page), "page_size": str(PAGE)}
            fields = _good(
                await self.ask("GET", "/api/v1/availability/gpus", query=query), "the search"
            )
            items = rows(fields, "items", "Prime")
            for row in items:
                ask = _ask(row, disk)
                if ask is not None:
                    found.append(ask)
            if len(items) < PAGE or page * PAGE >= number(fields, "totalCount"):
                return found
        raise Unreachable("Prime's list of offers: pagination did not end")

    async def create(self, order: Fields) -> Answer:
        return await self.ask("POST", "/api/v1/pods", order)

    async def show(self, id: str) -> PrimePod | None:
        """Return one pod, or None if the API does not find it.

        This does not prove that the pod is gone: any unknown address gets the same reply.
        """
        answer = await self.ask("GET", f"/api/v1/pods/{id}")
        return None if answer.status == 404 else pod(_good(answer, f"the pod {id}"))

    async def listing(self) -> list[PrimePod]:
        """Return all pods of the account.

        Raises Unreachable if pods change during the listing, as one may then be missing.
        """
        return [pod(row) for row in await self._pages("/api/v1/pods", "the list of pods")]

    async def history(self) -> list[tuple[str, Charge]]:
        """Return the charges for deleted pods, each with the pod ID."""
        found = await self._pages("/api/v1/pods/history", "the history")
        charges: list[tuple[str, Charge]] = []
        for row in found:
            if not row.get("terminatedAt"):
                continue
            charge = Charge(
                _at(row, "createdAt"),
                _at(row, "terminatedAt"),
                parse_charge(row, "totalBilledPrice", "Prime"),
            )
            charges.append((f"{row.get('id')}", charge))
        return charges

    async def _pages(self, path: str, what: str) -> list[Fields]:
        found: dict[str, Fields] = {}
        totals: set[float] = set()
        for page in range(PAGES):
            query = {"offset": str(page * PAGE), "limit": str(PAGE)}
            if self.team:
                query["team_id"] = self.team
            fields = _good(await self.ask("GET", path, query=query), what)
            items = rows(fields, "data", "Prime")
            found |= {f"{row.get('id')}": row for row in items}
            totals.add(number(fields, "total_count"))
            if len(items) < PAGE:
                break
        if len(totals) > 1 or len(found) != max(totals):
            raise Unreachable(f"{what} at Prime changed during the request")
        return [*found.values()]

    async def destroy(self, id: str) -> None:
        """Request the deletion of a pod.

        A pod that cannot be deleted yet stays, and `show` returns it.
        """
        answer = await self.ask("DELETE", f"/api/v1/pods/{id}")
        if answer.status not in (400, 404, 409):
            _good(answer, f"the end of the pod {id}", empty=True)

    async def keys(self) -> list[str]:
        """Return the type and key of each public SSH key in the account."""
        found = await self._pages("/api/v1/ssh_keys", "the SSH keys")
        return [" ".join(f"{row.get('publicKey') or ''}".split()[:2]) for row in found]

    async def balance(self) -> float:
        """Return the wallet balance in US dollars."""
        query = {"limit": "1", "offset": "0"}
        if self.team:
            query["teamId"] = self.team
        answer = await self.ask("GET", "/api/v1/billing/wallet", query=query)
        return number(_good(answer, "the wallet"), "balance_usd")

    async def ask(
        self,
        method: str,
        path: str,
        body: Fields | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one API request.

        Raises Unreachable if the request cannot have been received, Unsure if that is unknown,
        Throttled, Denied.
        """
        answer = await self.web.ask(method, path, api_key(), body, query)
        if answer.status == 429:
            raise Throttled(f"too many requests to Prime: {words(answer)}", after=TOO_OFTEN)
        if answer.status in (401, 403):
            raise Denied(f"Prime rejected the API key of {key_source()}: {words(answer)}")
        if answer.status == 402:
            raise Denied(
                f"Prime does not rent to this account: {words(answer)} See https://app.primeintellect.ai/dashboard/billing"
            )
        if answer.status >= 500:
            raise Unsure(f"server error at Prime ({answer.status}): {words(answer)}")
        return answer


def config_file() -> Path:
    """Return the path of the official client's settings file."""
    return Path(os.path.expanduser("~"), ".prime", "config.json")


def config(name: str) -> str:
    """Read a setting of the official client, or return "" if not set."""
    try:
        read = json.loads(config_file().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    found = read.get(name) if isinstance(read, dict) else None
    return found.strip() if isinstance(found, str) else ""


def api_key() -> str:
    """Return the account's API key.

    Raises Denied with the searched locations if no key is found.
    """
    key = os.environ.get("PRIME_API_KEY", "").strip() or config("api_key")
    if key:
        return key
    raise Denied(
        f"no API key for Prime in PRIME_API_KEY or {config_file()}; create one at https://app.primeintellect.ai/dashboard/tokens"
    )


def key_source() -> str:
    """Name the location of the account's API key."""
    return "PRIME_API_KEY" if os.environ.get("PRIME_API_KEY") else str(config_file())


def words(answer: Answer) -> str:
    """Return Prime's error message. For an invalid request, it includes the error of each field."""
    wrong = answer.fields.get("detail")
    if not isinstance(wrong, list):
        return answer.words
    told = [_describe_field_error(each) for each in wrong[:5] if isinstance(each, dict)]
    return printable("; ".join(told))


def _describe_field_error(error: Fields) -> str:
    location = error.get("loc")
    where = ".".join(map(str, location)) if isinstance(location, list) else ""
    return f"{where}: {error.get('msg')}"


def pod(row: Fields) -> PrimePod:
    """Parse a pod.  Raises Unsure if the reply is not a pod."""
    if not isinstance(row.get("id"), str) or not isinstance(row.get("status"), str):
        raise Unsure("cannot read Prime's reply about a pod")
    ready = (
        row.get("installationStatus") == "FINISHED" or number(row, "installationProgress") >= 100
    )
    return PrimePod(
        id=f"{row['id']}",
        name=f"{row.get('name') or ''}",
        status=f"{row['status']}",
        ready=ready,
        failure=printable(f"{row.get('installationFailure') or ''}"),
        login=_parse_login(row.get("sshConnection")),
        price=price(row.get("priceHr")),
    )


def _parse_login(connection: object) -> tuple[str, str, int] | None:
    """Return user, host and port of the first SSH login, or None if there is none yet.

    A pod with several nodes has a list of logins, and a starting pod may have `[null]`.
    """
    first = connection
    if isinstance(connection, list):
        first = next(iter(_strings(connection)), None)
    if not isinstance(first, str):
        return None
    match = _LOGIN.fullmatch(first.strip())
    if match is None:
        return None
    port = parse_port(match["port"] or 22)
    return None if port is None else (match["user"], match["host"], port)


def _strings(value: object) -> tuple[str, ...]:
    """Return the texts in a list of a reply, or () if the value is no list."""
    if not isinstance(value, list):
        return ()
    return tuple(each for each in value if isinstance(each, str))


def _good(answer: Answer, what: str, empty: bool = False) -> Fields:
    """Return a successful reply's fields. Raises an error for other replies."""
    if answer.status >= 400:
        raise Rejected(f"Prime rejected {what}: {words(answer)}")
    if not answer.fields and not empty:
        raise Unsure(f"cannot read Prime's reply about {what}: {answer.words[:80]}")
    return answer.fields


def _ask(row: Fields, disk: int) -> PrimeOffer | None:
    """Parse an offer with at least `disk` GB of disk, or return None if a field is missing."""
    hourly = _parse_hourly_price(row)
    count = int(number(row, "gpuCount"))
    if not count or not isinstance(row.get("cloudId"), str):
        return None
    disks = inner(row.get("disk") or {}, "an offer", "Prime")
    cpus = inner(row.get("vcpu") or {}, "an offer", "Prime")
    memory = inner(row.get("memory") or {}, "an offer", "Prime")
    size = _choose_disk_size(disks, disk)
    stored = _parse_disk_price(disks, size)
    have = Resources(
        cpus=number(cpus, "defaultCount"),
        memory=int(number(memory, "defaultCount")) * 10**9,
        gpus=count,
        gpu=f"{row.get('gpuType', '')}".replace("_", " "),
        gpu_memory=int(number(row, "gpuMemory")) * 10**9,
        disk=size * 10**9,
    )
    market: Market = "spot" if row.get("isSpot") else "on-demand"
    order = {name: f"{row.get(name) or ''}" for name in _ORDERED}
    whole: float | None = None
    # A base price of 0 is no price, either: the price of the disk alone would be too low.
    if hourly and stored is not None:
        whole = hourly + stored
    return PrimeOffer(
        id=f"{row['cloudId']}",
        resources=have,
        price=whole,
        disk_price=stored or 0.0,
        disk=size,
        region=f"{row.get('dataCenter') or ''}, {row.get('country') or ''}",
        market=market,
        secure=row.get("security") == "secure_cloud",
        inet=number(row, "internetSpeed"),
        there=row.get("stockStatus") != "Unavailable",
        order=order,
        images=_strings(row.get("images")),
    )


def _parse_hourly_price(row: Fields) -> float | None:
    """Return an offer's hourly price with the included disk. None if it cannot be read."""
    prices = inner(row.get("prices") or {}, "a price", "Prime")
    if prices.get("currency", "USD") != "USD":
        return None
    return price(prices.get("communityPrice") or prices.get("onDemand"))


def _choose_disk_size(disks: Fields, wanted: int) -> int:
    """Return the size in GB of the disk to order: at least `wanted`, if the offer allows it."""
    least, default, most = (
        int(number(disks, name)) for name in ("minCount", "defaultCount", "maxCount")
    )
    usual = max(wanted, default)
    if not most and not least:
        return usual
    return min(max(wanted, least), most or usual)


def _parse_disk_price(disks: Fields, size: int) -> float | None:
    """Return the hourly price of a disk of `size` GB beyond the part that the offer includes.

    None if it cannot be read.
    """
    included = int(number(disks, "defaultCount")) if disks.get("defaultIncludedInPrice") else 0
    unit = disks.get("pricePerUnit")
    if unit is None or size <= included:
        return 0.0
    per_gb = price(unit)
    return None if per_gb is None else (size - included) * per_gb


def _at(row: Fields, name: str) -> float:
    return seconds(row.get(name), "Prime")
