"""Typed requests and replies of the Vast.ai API.  Requests are never retried here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from . import web
from .base import Charge, Denied, Rejected, Resources, Throttled, Unreachable, Unsure
from .cloud import About
from .web import (
    Answer,
    Fields,
    Web,
    inner,
    next_page,
    number,
    parse_charge,
    parse_port,
    price,
    rows,
    wait,
)

PAGE: Final = 25
BROKEN: Final = ("error", "failed", "exception", "oci runtime", "permission denied")


class Ask(NamedTuple):
    """A machine offered for rent on Vast.ai.

    Prices are US dollars per hour, sizes are bytes, and the network speed in `traits` is in Mb/s.
    """

    id: str
    resources: Resources
    price: float | None  # None if the price cannot be read
    least_bid: float | None
    disk_price: float | None
    egress_price: float
    region: str
    reliability: float | None
    longest: float
    traits: About


class VastaiInstance(NamedTuple):
    """A rented machine.  `address` is the SSH server's host and port, once known."""

    id: str
    label: str
    states: tuple[str, str, str, str]  # actual, intended, current and next
    said: str
    address: tuple[str, int] | None
    price: float | None  # None if the price cannot be read

    @property
    def description(self) -> str:
        return f"{self.states[0] or self.states[2]}: {self.said}".strip(": ")

    @property
    def is_stopped(self) -> bool:
        """Return True if the instance was outbid, or the account is empty.

        Its disk is still billed.
        """
        return self.states[1:] == ("stopped", "stopped", "stopped")

    @property
    def is_broken(self) -> bool:
        """Return True if the instance is offline, or its container has failed or exited.

        A starting instance is `exited`, too, but not `running` in the other states.
        """
        actual, intended, current, _next = self.states
        if actual == "exited" and (intended, current) == ("running", "running"):
            return True
        if actual == "offline":
            return True
        if actual in ("running", "loading", ""):
            return False
        return any(word in self.said.lower() for word in BROKEN)


class VastaiClient:
    """A client of the Vast.ai API."""

    def __init__(self, api: str) -> None:
        self.web = Web(api)

    async def search(self, query: Fields) -> list[Ask]:
        answer = await self.ask("POST", "/api/v0/bundles/", query)
        found: list[Ask] = []
        for row in rows(_good(answer, "the search"), "offers", "Vast.ai"):
            ask = _ask(row)
            if ask is not None:
                found.append(ask)
        return found

    async def create(self, ask: str, order: Fields) -> Answer:
        return await self.ask("PUT", f"/api/v0/asks/{ask}/", order)

    async def show(self, id: str) -> VastaiInstance | None:
        """Return one machine.  None if Vast.ai itself reports that it does not exist."""
        answer = await self.ask("GET", f"/api/v0/instances/{id}/", query={"owner": "me"})
        if answer.code == "no_such_instance":
            return None
        found = _good(answer, f"the instance {id}").get("instances", "")
        if found is None:
            return None
        return _instance(inner(found, f"the instance {id}", "Vast.ai"))

    async def listing(self) -> list[VastaiInstance]:
        """Return all machines of the account.

        Each page starts after the last seen id, so a machine that vanishes meanwhile shifts no
        others.
        """
        found: list[VastaiInstance] = []
        last = 0
        for _ in range(web.PAGES):
            query = {
                "limit": str(PAGE),
                "order_by": json.dumps([{"col": "id", "dir": "asc"}]),
                "select_filters": json.dumps({"id": {"gt": last}}),
            }
            fields = _good(
                await self.ask("GET", "/api/v1/instances/", query=query), "the list of instances"
            )
            page = [_instance(row) for row in rows(fields, "instances", "Vast.ai")]
            if any(int(each.id) <= last for each in page):
                raise Unreachable(
                    "cannot read Vast.ai's list of instances: it contains instances that were not requested"
                )
            found += page
            if len(page) < PAGE:
                return found
            last = max(int(each.id) for each in page)
        raise Unreachable("Vast.ai's list of instances: pagination did not end")

    async def destroy(self, id: str) -> None:
        answer = await self.ask("DELETE", f"/api/v0/instances/{id}/", {})
        if answer.code != "no_such_instance":
            _good(answer, f"the instance {id}")

    async def become(self, id: str, state: str) -> bool:
        """Set a machine's state to `running` or `stopped`.  Return False if it does not exist."""
        answer = await self.ask("PUT", f"/api/v0/instances/{id}/", {"state": state})
        if answer.code == "no_such_instance":
            return False
        _good(answer, f"the instance {id}")
        return True

    async def attach(self, id: str, key: str) -> None:
        _good(
            await self.ask("POST", f"/api/v0/instances/{id}/ssh/", {"ssh_key": key}),
            f"the key of the instance {id}",
        )

    async def charges(self, since: float) -> list[tuple[str, Charge]]:
        """Return the charges for all instances, each with the instance's label."""
        found: list[tuple[str, Charge]] = []
        token, seen = "", set[str]()
        while True:
            days = {
                "day": {"gte": int(since), "lte": int(time.time()) + 86400},
                "type": {"in": ["instance"]},
            }
            query = {"select_filters": json.dumps(days), "limit": "500"}
            if token:
                query["after_token"] = token
            fields = _good(await self.ask("GET", "/api/v0/charges/", query=query), "the charges")
            for row in rows(fields, "results", "Vast.ai"):
                label = inner(row.get("metadata") or {}, "a charge", "Vast.ai").get("label")
                charge = Charge(
                    number(row, "start"), number(row, "end"), parse_charge(row, "amount", "Vast.ai")
                )
                found.append((f"{label or ''}", charge))
            token = next_page(fields.get("next_token"), seen, "the list of Vast.ai's charges")
            if not token:
                return found

    async def user(self) -> Fields:
        return _good(await self.ask("GET", "/api/v0/users/current/"), "the account")

    async def ask(
        self,
        method: str,
        path: str,
        body: Fields | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request.

        Raises Unreachable if the request cannot have been received, Unsure if that is unknown,
        Throttled, Denied.
        """
        return _check_answer(await self.web.ask(method, path, api_key(), body, query))


def key_file() -> Path:
    """Return the path of the official client's key file."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder, "vastai", "vast_api_key")


def api_key() -> str:
    """Return the account's API key.

    Raises Denied with the searched locations if no key is found.
    """
    key = os.environ.get("VAST_API_KEY", "").strip()
    if key:
        return key
    with suppress(OSError, ValueError):
        key = key_file().read_text("utf-8").strip()
    if key:
        return key
    raise Denied(
        f"no API key for Vast.ai in VAST_API_KEY or {key_file()}; create one at https://cloud.vast.ai/manage-keys/"
    )


def key_source() -> str:
    """Name the location of the account's API key."""
    return "VAST_API_KEY" if os.environ.get("VAST_API_KEY") else str(key_file())


def _check_answer(answer: Answer) -> Answer:
    """Return a valid API reply. Raises Throttled, Denied or Unsure for other replies."""
    if answer.status == 429:
        if answer.code == "search_quota_exceeded":
            raise Denied(f"Vast.ai allows no more searches until {_describe_reset(answer)}")
        told = answer.headers.get("retry-after") or answer.words.rpartition("threshold=")[2]
        raise Throttled(f"too many requests to Vast.ai: {answer.words}", after=wait(told))
    if answer.status in (401, 403) or answer.code == "auth_error":
        raise Denied(f"Vast.ai rejected the API key of {key_source()}: {answer.words}")
    if answer.status >= 500:
        raise Unsure(f"server error at Vast.ai ({answer.status}): {answer.words}")
    return answer


def _describe_reset(answer: Answer) -> str:
    """Describe when Vast.ai allows searches again. Its quota lasts until midnight."""
    at = number(answer.headers, "x-ratelimit-reset")
    if not at:
        return "midnight UTC"
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # far beyond the years of a calendar
        return "midnight UTC"


def _good(answer: Answer, what: str) -> Fields:
    """Return a successful reply's fields. Raises an error for other replies."""
    if answer.status >= 400 or answer.fields.get("success") is False:
        raise Rejected(f"Vast.ai rejected {what}: {answer.words}")
    if not answer.fields:
        raise Unsure(f"cannot read Vast.ai's reply about {what}: {answer.words[:80]}")
    return answer.fields


def _ask(row: Fields) -> Ask | None:
    """Parse an offer.  None if a required field is missing."""
    cores, total = number(row, "cpu_cores_effective"), number(row, "cpu_cores")
    if not cores or not total or not number(row, "id") or not number(row, "num_gpus"):
        return None
    share = min(1.0, cores / total)
    mib = 1 << 20
    have = Resources(
        cpus=cores,
        memory=int(number(row, "cpu_ram") * share) * mib,
        gpus=int(number(row, "num_gpus")),
        gpu=f"{row.get('gpu_name', '')}",
        gpu_memory=int(number(row, "gpu_ram")) * mib,
        disk=int(number(row, "disk_space") * 1e9),
    )
    traits = About(
        verified=row.get("verification") == "verified",
        datacenter=row.get("hosting_type") == 1,
        inet=number(row, "inet_down"),
        cuda=number(row, "cuda_max_good"),
    )
    return Ask(
        id=f"{int(number(row, 'id'))}",
        resources=have,
        price=price(row.get("dph_base")),
        least_bid=price(row.get("min_bid")),
        disk_price=price(row.get("storage_cost"), 30 * 24),
        egress_price=price(row.get("inet_up_cost")) or 0.0,
        region=f"{row.get('geolocation') or ''}",
        reliability=min(1.0, number(row, "reliability2", "reliability")) or None,
        longest=number(row, "duration") / 3600,
        traits=traits,
    )


def _instance(row: Fields) -> VastaiInstance:
    actual, intended, current, coming = (
        f"{row.get(name) or ''}"
        for name in ("actual_status", "intended_status", "cur_state", "next_state")
    )
    address = _parse_address(row)
    return VastaiInstance(
        f"{int(number(row, 'id'))}",
        f"{row.get('label') or ''}",
        (actual, intended, current, coming),
        f"{row.get('status_msg') or ''}",
        address,
        price(row.get("dph_total")),
    )


def _parse_address(row: Fields) -> tuple[str, int] | None:
    """Return an instance's public address and the port mapped to its SSH server, or None."""
    ports = row.get("ports")
    mapped = ports.get("22/tcp") if isinstance(ports, dict) else None
    if not isinstance(mapped, list) or not mapped:
        return None
    port = parse_port(inner(mapped[0], "a port", "Vast.ai").get("HostPort"))
    if port is None:
        return None
    return f"{row.get('public_ipaddr') or ''}".strip(), port
