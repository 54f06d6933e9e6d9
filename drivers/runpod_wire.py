"""Typed requests and replies of RunPod's REST API v2.  Requests are never retried here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from .base import Charge, Denied, Rejected, Throttled, Unsure
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
    printable,
    rows,
    seconds,
    wait,
)

HOME = "/root"
"""Home directory on a pod: its SSH server accepts only root."""


class RunpodGpu(NamedTuple):
    """A GPU type with its current availability.

    `prices` are US dollars per GPU-hour by cloud, and `memory` is in GB.
    """

    id: str
    memory: int
    prices: Mapping[str, float | None]  # None if a price cannot be read
    most: Mapping[str, int]
    centers: tuple[str, ...]
    cuda: float
    there: bool


class RunpodPod(NamedTuple):
    """A pod.

    `address` is its SSH server's host and port, once known.  `price` is US dollars per hour without
    disks.
    """

    id: str
    name: str
    status: str
    address: tuple[str, int] | None
    price: float | None  # None if the price cannot be read
    disk: int  # GB
    volume: int  # GB of persistent storage, kept when the pod stops
    gpus: int  # assigned GPUs; 0 also for a running pod that got none

    @property
    def description(self) -> str:
        return self.status


class RunpodClient:
    """A client of the RunPod API."""

    def __init__(self, api: str) -> None:
        self.web = Web(api)

    async def gpus(self, count: int, cloud: str) -> list[RunpodGpu]:
        """Return all GPU types, with the availability of `count` GPUs of each in one pod."""
        query = {"include": "AVAILABILITY", "product": "POD", "count": str(count), "cloud": cloud}
        fields = _good(await self.ask("GET", "/v2/catalog/gpus", query=query), "the catalog")
        found: list[RunpodGpu] = []
        for row in rows(fields, "gpus", "RunPod"):
            gpu = _gpu(row)
            if gpu is not None:
                found.append(gpu)
        return found

    async def centers(self) -> list[str]:
        """Return the names of all data centers."""
        fields = _good(await self.ask("GET", "/v2/catalog/datacenters"), "the data centers")
        return [f"{row.get('id', '')}" for row in rows(fields, "dataCenters", "RunPod")]

    async def create(self, order: Fields) -> Answer:
        return await self.ask("POST", "/v2/pods", order)

    async def show(self, id: str) -> RunpodPod | None:
        """Return one pod.  None if RunPod itself reports that it does not exist."""
        answer = await self.ask("GET", f"/v2/pods/{id}")
        if none(answer):
            return None
        found = pod(_good(answer, f"the pod {id}"))
        return None if found.status == "TERMINATED" else found

    async def listing(self) -> list[RunpodPod]:
        """Return all pods of the account, from all pages of the list."""
        found: list[RunpodPod] = []
        cursor, seen = "", set[str]()
        while True:
            query = {"cursor": cursor} if cursor else None
            fields = _good(await self.ask("GET", "/v2/pods", query=query), "the list of pods")
            found += [pod(row) for row in rows(fields, "pods", "RunPod")]
            # The cursor of the next page is below `pagination`, or at the top of the reply.
            paged = fields.get("pagination")
            holder = paged if isinstance(paged, dict) else fields
            cursor = next_page(holder.get("nextCursor"), seen, "the list of RunPod's pods")
            if not cursor:
                return [each for each in found if each.status != "TERMINATED"]

    async def destroy(self, id: str) -> None:
        """Request a pod's termination.

        A pod that cannot be terminated yet stays, and `show` returns it.
        """
        answer = await self.ask("DELETE", f"/v2/pods/{id}")
        if answer.status != 409 and not none(answer):
            _good(answer, f"the end of the pod {id}", empty=True)

    async def act(self, id: str, action: str) -> Answer:
        """Apply the action `start` or `stop` to a pod."""
        return await self.ask("POST", f"/v2/pods/{id}/action", {"action": action})

    async def charges(self, id: str) -> list[Charge]:
        """Return the hourly charges for a pod."""
        fields = _good(
            await self.ask("GET", "/v2/billing/pods", query={"podId": id, "bucketSize": "hour"}),
            "the bill",
        )
        found = [row for row in rows(fields, "records", "RunPod") if row.get("podId") == id]
        return [
            Charge(
                seconds(row.get("startTime"), "RunPod"),
                seconds(row.get("endTime"), "RunPod"),
                parse_charge(row, "totalAmount", "RunPod"),
            )
            for row in found
        ]

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
        answer = await self.web.ask(method, path, api_key(), body, query)
        if answer.status == 429:
            raise Throttled(
                f"too many requests to RunPod: {words(answer)}",
                after=wait(answer.headers.get("retry-after", "")),
            )
        if answer.status == 401:
            raise Denied(f"RunPod rejected the API key in RUNPOD_API_KEY: {words(answer)}")
        if answer.status == 410:
            raise Denied(f"RunPod no longer supports this API: {words(answer)} Upgrade recipe")
        if answer.status >= 500:
            raise Unsure(f"server error at RunPod ({answer.status}): {words(answer)}")
        return answer


def api_key() -> str:
    """Return the account's API key.

    Raises Denied with the searched locations if no key is found.
    """
    key = os.environ.get("RUNPOD_API_KEY", "").strip()
    if key:
        return key
    raise Denied(
        "no API key for RunPod in RUNPOD_API_KEY; create one at https://console.runpod.io/user/settings"
    )


def words(answer: Answer) -> str:
    """Return RunPod's error message with its list of errors in the request."""
    wrong = answer.fields.get("errors")
    if not isinstance(wrong, list):
        return answer.words
    more = printable("; ".join(f"{each}" for each in wrong[:5]))
    return f"{answer.words} {more}".strip()


def pod(row: Fields) -> RunpodPod:
    """Parse a pod.  Raises Unsure if the reply is not a pod."""
    if not isinstance(row.get("id"), str) or not isinstance(row.get("status"), str):
        raise Unsure("cannot read RunPod's reply about a pod")
    # `ssh.proxy` is never used: it runs no commands with input.
    direct = _inside(_inside(row, "ssh"), "direct")
    port = parse_port(direct.get("port"))
    address = None if port is None else (f"{direct.get('host', '')}", port)
    volume = _inside(_inside(row, "mounts"), "persistent")
    return RunpodPod(
        id=f"{row['id']}",
        name=f"{row.get('name') or ''}",
        status=f"{row['status']}",
        address=address,
        price=price(row.get("cost")),
        disk=int(number(row, "disk")),
        volume=int(number(volume, "size")),
        gpus=int(number(_inside(row, "gpu"), "count")),
    )


def none(answer: Answer) -> bool:
    """Return True if RunPod itself reports the pod as missing.

    Its reply is then a problem document, unlike a 404 from a proxy in between.
    """
    return answer.status == 404 and answer.fields.get("status") == 404 and "title" in answer.fields


def _inside(row: Fields, name: str) -> Fields:
    """Return an object field in a reply, or {} if missing."""
    found = row.get(name)
    return found if isinstance(found, dict) else {}


def _good(answer: Answer, what: str, empty: bool = False) -> Fields:
    """Return a successful reply's fields. Raises an error for other replies."""
    if answer.status == 403:
        raise Denied(f"the API key in RUNPOD_API_KEY does not allow {what}: {words(answer)}")
    if answer.status >= 400:
        raise Rejected(f"RunPod rejected {what}: {words(answer)}")
    if not answer.fields and not empty:
        raise Unsure(f"cannot read RunPod's reply about {what}: {answer.words[:80]}")
    return answer.fields


def _gpu(row: Fields) -> RunpodGpu | None:
    """Parse a GPU type.  None if a required field is missing."""
    listed = inner(row.get("price") or {}, "a price", "RunPod")
    most = inner(row.get("maxCount") or {}, "a type of GPU", "RunPod")
    if not number(row, "memory") or not isinstance(row.get("id"), str):
        return None
    centers = rows(row, "dataCenters", "RunPod")
    stocked = [f"{each.get('id', '')}" for each in centers if each.get("availability") != "NONE"]
    versions = rows(row, "cudaVersions", "RunPod")
    cuda = [number(each, "version") for each in versions if each.get("available")]
    clouds = [name for name in ("secure", "community") if row.get(name)]
    prices = {name: price(listed.get(name)) for name in clouds}
    most_of = {name: int(number(most, name)) for name in clouds}
    return RunpodGpu(
        id=f"{row['id']}",
        memory=int(number(row, "memory")),
        prices=prices,
        most=most_of,
        centers=tuple(stocked),
        cuda=max([0.0, *cuda]),
        there=row.get("availability", "NONE") != "NONE",
    )
