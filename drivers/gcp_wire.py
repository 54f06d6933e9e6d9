"""Typed requests and replies of the Compute Engine API v1.  Requests are never retried here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import google.auth
import httpx
from google.auth import exceptions

from .base import Denied, NoCapacity, Rejected, Throttled, Unreachable, Unsure
from .web import Answer, Fields, Web, inner, next_page, number, printable, rows, wait

API: Final = "https://compute.googleapis.com/compute/v1/"
WHOSE: Final = "Google"
SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
TOKEN: Final = "CLOUDSDK_AUTH_ACCESS_TOKEN"  # noqa: S105  # the name of a variable
PATIENCE: Final = 150.0
"""Request timeout in seconds.  Google's `wait` request takes up to two minutes."""
PAGE: Final = "500"
FULL: Final = (
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "insufficientCapacity",
    "UNSUPPORTED_OPERATION",
    "RESOURCE_NOT_READY",
    "VM_MIN_COUNT_NOT_REACHED",
)
"""Prefixes of error codes for a zone without capacity."""
QUOTAS: Final = ("QUOTA_EXCEEDED", "quotaExceeded")
RATES: Final = ("rateLimitExceeded", "userRateLimitExceeded", "RESOURCE_OPERATION_RATE_EXCEEDED")


class Operation(NamedTuple):
    """A long-running operation of the API.

    `code` and `words` tell why it failed, and `zones` where the machine may be available.
    """

    name: str
    zone: str
    done: bool
    code: str = ""
    words: str = ""
    zones: tuple[str, ...] = ()


class GcpInstance(NamedTuple):
    """A Compute Engine instance. `address` is its external IP address, once known."""

    name: str
    zone: str
    status: str
    address: str
    kind: str  # its machine type, and what is attached to it
    spot: bool
    disk: float  # GB
    labels: Fields
    items: Mapping[str, str]
    internal: str = ""  # its address in its network

    @property
    def description(self) -> str:
        return self.status


class Quota(NamedTuple):
    limit: float
    usage: float


class GcpClient:
    """A client of the Compute Engine API."""

    def __init__(self, api: str, project: str) -> None:
        self.web = Web(api, PATIENCE)
        self._project = (
            project
            or os.environ.get("CLOUDSDK_CORE_PROJECT")
            or os.environ.get("GOOGLE_CLOUD_PROJECT", "")
        )
        self._credentials: Any = None
        self.source = TOKEN

    async def insert(self, zone: str, body: Fields, request: str) -> Operation | None:
        """Request a new instance, or return None if one of this name exists.

        `request` is a UUID. Repeating a request with the same UUID returns the same operation.
        """
        answer = await self._ask("POST", f"zones/{zone}/instances", body, {"requestId": request})
        if answer.code == "alreadyExists":
            return None
        if answer.code in QUOTAS:
            raise NoCapacity(f"{printable(answer.words)} More: {self.quotas_page}")
        if answer.code.startswith(FULL):
            raise NoCapacity(answer.words)
        return _operation(_good(answer, "the order"))

    async def wait(self, asked: Operation) -> Operation:
        """Return an operation once it is done, or its state after two minutes."""
        return _operation(
            _good(
                await self._ask("POST", f"zones/{asked.zone}/operations/{asked.name}/wait"),
                "an operation",
            )
        )

    async def show(self, zone: str, name: str) -> GcpInstance | None:
        """Return one instance, or None if Google explicitly reports it as missing."""
        answer = await self._ask("GET", f"zones/{zone}/instances/{name}")
        if _is_gone(answer, name):
            return None
        return _instance(_good(answer, f"the instance {name}"))

    async def delete(self, zone: str, name: str) -> Operation | None:
        """Request the deletion of an instance, or return None if it does not exist."""
        answer = await self._ask("DELETE", f"zones/{zone}/instances/{name}")
        return _parse_operation_of(name, answer)

    async def start(self, zone: str, name: str, seconds: int) -> Operation | None:
        """Start a stopped instance for at most `seconds`, or return None if it does not exist."""
        limit: Fields = {
            "instanceTerminationAction": "STOP", "maxRunDuration": {"seconds": str(seconds)},
            "onHostMaintenance": "TERMINATE", "automaticRestart": False,
        }  # fmt: skip
        answer = await self._ask("POST", f"zones/{zone}/instances/{name}/setScheduling", limit)
        if _is_gone(answer, name):
            return None
        limited = _operation(_good(answer, f"the time of the instance {name}"))
        if not limited.done:
            await self.wait(limited)
        answer = await self._ask("POST", f"zones/{zone}/instances/{name}/start")
        return _parse_operation_of(name, answer)

    async def stop(self, zone: str, name: str) -> Operation | None:
        """Stop an instance, or return None if it does not exist."""
        answer = await self._ask("POST", f"zones/{zone}/instances/{name}/stop")
        return _parse_operation_of(name, answer)

    async def rule(self, name: str) -> bool:
        """Return True if a firewall rule with this name exists."""
        answer = await self._ask("GET", f"global/firewalls/{name}")
        return answer.status != 404 and bool(_good(answer, f"the rule {name}"))

    async def make_rule(self, name: str, network: str, tag: str, port: int) -> bool:
        """Create a firewall rule that opens a port of machines with a tag.

        Returns False if the rule exists already.
        """
        allowed = [{"IPProtocol": "tcp", "ports": [f"{port}"]}]
        body = {
            "name": name,
            "network": network,
            "direction": "INGRESS",
            "sourceRanges": ["0.0.0.0/0"],
            "targetTags": [tag],
            "allowed": allowed,
        }
        answer = await self._ask("POST", "global/firewalls", body)
        return answer.code != "alreadyExists" and bool(_good(answer, f"the rule {name}"))

    async def drop_rule(self, name: str) -> bool:
        """Delete a firewall rule. Return False if it does not exist."""
        answer = await self._ask("DELETE", f"global/firewalls/{name}")
        return answer.status != 404 and bool(_good(answer, f"the rule {name}"))

    async def was_preempted(self, zone: str, name: str) -> bool:
        """Return True if Google has preempted the instance."""
        query = {"filter": 'operationType="compute.instances.preempted"', "maxResults": PAGE}
        found = _good(await self._ask("GET", f"zones/{zone}/operations", query=query), "operations")
        if "items" not in found:
            return False
        return any(_last(row.get("targetLink")) == name for row in rows(found, "items", WHOSE))

    async def host_keys(self, zone: str, name: str) -> set[str]:
        """Return the host keys attested by an instance, in authorized_keys format."""
        answer = await self._ask(
            "GET",
            f"zones/{zone}/instances/{name}/getGuestAttributes",
            query={"queryPath": "hostkeys/"},
        )
        if answer.status == 404:
            return set()
        found = inner(
            _good(answer, "guest attributes").get("queryValue") or {}, "guest attributes", WHOSE
        )
        return {
            f"{row.get('key')} {row.get('value')}"
            for row in rows({"items": [], **found}, "items", WHOSE)
        }

    async def listing(self, filter: str) -> list[GcpInstance]:
        """List all instances that match a filter, in all zones.

        Raises Unreachable if a zone did not answer.
        """
        found = []
        for scope in await self._list_all("instances", filter):
            found += [
                _instance(row) for row in rows({"instances": [], **scope}, "instances", WHOSE)
            ]
        return found

    async def accelerators(self) -> dict[str, set[str]]:
        """Return the GPU types available in each zone."""
        found: dict[str, set[str]] = {}
        for scope in await self._list_all("acceleratorTypes", ""):
            for row in rows({"acceleratorTypes": [], **scope}, "acceleratorTypes", WHOSE):
                found.setdefault(_last(row.get("zone")), set()).add(f"{row.get('name')}")
        return found

    async def quotas(self, region: str = "") -> dict[str, Quota]:
        """Return the quotas of a region, or of the whole project."""
        path = f"regions/{region}" if region else ""
        fields = _good(await self._ask("GET", path), f"the quotas of {region or 'the project'}")
        found = rows({"quotas": [], **fields}, "quotas", WHOSE)
        return {
            f"{row.get('metric')}": Quota(number(row, "limit"), number(row, "usage"))
            for row in found
        }

    @property
    def quotas_page(self) -> str:
        """Return the URL of the console page for quota requests."""
        return f"https://console.cloud.google.com/iam-admin/quotas?project={self._project}"

    async def project(self) -> str:
        """Return the billed project. Raises Denied if no project is set."""
        if not self._project:
            await self._token()
        if not self._project:
            raise Denied(
                "no Google Cloud project is set: set `project` in [drivers.gcp], or CLOUDSDK_CORE_PROJECT"
            )
        return self._project

    async def _list_all(self, what: str, filter: str) -> list[Fields]:
        scopes: list[Fields] = []
        token, seen = "", set[str]()
        while True:
            query = {"maxResults": PAGE}
            if filter:
                query["filter"] = filter
            if token:
                query["pageToken"] = token
            fields = _good(
                await self._ask("GET", f"aggregated/{what}", query=query), f"the list of {what}"
            )
            if fields.get("unreachables"):
                raise Unreachable(
                    f"the list of {what} is incomplete: Google did not reach {printable(str(fields['unreachables']))}"
                )
            items = inner(fields.get("items", {}), f"the list of {what}", WHOSE)
            for where, item in items.items():
                scope = inner(item, where, WHOSE)
                # A zone without results has a warning, too, which says so.
                code = inner(scope.get("warning") or {}, where, WHOSE).get("code")
                if code not in (None, "NO_RESULTS_ON_PAGE"):
                    raise Unreachable(
                        f"the list of {what} is incomplete: {printable(where)}: {printable(str(code))}"
                    )
                scopes.append(scope)
            page = fields.get("nextPageToken")
            token = next_page(page, seen, f"the list of {what} of Google")
            if not token:
                return scopes

    async def _ask(
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
        token = await self._token()
        where = f"/projects/{quote(await self.project(), safe=':.')}{path and '/'}{path}"
        return self._check(await self.web.ask(method, where, token, body, query))

    def _check(self, answer: Answer) -> Answer:
        if answer.status == 429 or answer.code in RATES:
            raise Throttled(
                f"too many requests to Google: {answer.words}",
                after=wait(answer.headers.get("retry-after", "")),
            )
        if answer.status == 401:
            raise Denied(
                f"Google rejected the credentials of {self.source}: {answer.words} Log in again with `gcloud auth application-default login`"
            )
        if answer.status == 403 and answer.code not in (*QUOTAS, "alreadyExists"):
            raise Denied(
                f"this account has no permission in the project {self._project} at Google: {answer.words}"
            )
        if answer.status >= 500:
            raise Unsure(f"server error at Google ({answer.status}): {answer.words}")
        return answer

    async def _token(self) -> str:
        """Return an access token. Raises Denied with the searched locations if none is found."""
        token = os.environ.get(TOKEN, "").strip()
        if token:
            return token
        return await asyncio.to_thread(self._refresh_token)

    def _refresh_token(self) -> str:
        try:
            if self._credentials is None:
                if not _may_have():
                    raise exceptions.DefaultCredentialsError(
                        "this machine is not a Compute Engine instance"
                    )
                self._credentials, project = google.auth.default(scopes=[SCOPE], request=_request)
                self._project = self._project or project or ""
                self.source = (
                    os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
                    or "the application default credentials"
                )
            if not self._credentials.valid:
                self._credentials.refresh(_request)
            return f"{self._credentials.token}"
        except exceptions.TransportError as error:
            raise Unreachable(f"cannot get an access token from Google: {error}") from error
        except exceptions.GoogleAuthError as error:
            looked = f"neither {TOKEN} nor GOOGLE_APPLICATION_CREDENTIALS nor the application default credentials have any"
            raise Denied(
                f"no credentials for Google Cloud: {looked} ({printable(f'{error}')}); run `gcloud auth application-default login`"
            ) from error


def _may_have() -> bool:
    """Return True if Google credentials may exist.

    Without credentials, google-auth searches Google's own network for many seconds.
    """
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.join(
        os.path.expanduser("~"), ".config", "gcloud"
    )
    try:
        ours = "Google" in Path("/sys/class/dmi/id/product_name").read_text("utf-8", "replace")
    except OSError:
        ours = False
    if ours or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return True
    return Path(folder, "application_default_credentials.json").exists()


def find_lack_of_credentials() -> str:
    """Explain why no Google credentials can exist, or return "". Sends no request."""
    if os.environ.get(TOKEN, "").strip() or _may_have():
        return ""
    return "there are no credentials for Google Cloud; run `gcloud auth application-default login`"


class _Replied(NamedTuple):
    """An HTTP reply in the form that google-auth expects."""

    status: int
    headers: Mapping[str, str]
    data: bytes


def _request(
    url: str,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **_more: object,
) -> _Replied:
    """Send one HTTP request for google-auth."""
    try:
        reply = httpx.request(method, url, content=body, headers=headers, timeout=timeout or 30.0)
    except httpx.HTTPError as error:
        raise exceptions.TransportError(error) from error
    return _Replied(reply.status_code, reply.headers, reply.content)


def _is_gone(answer: Answer, name: str) -> bool:
    """Return True if a reply reports this instance as missing.

    A missing project or zone also has status 404.
    """
    return (
        answer.status == 404 and answer.code == "notFound" and f"/instances/{name}'" in answer.text
    )


def _good(answer: Answer, what: str) -> Fields:
    """Return a successful reply's fields. Raises an error for other replies."""
    if answer.status >= 400:
        raise Rejected(f"Google rejected {what}: {answer.words}")
    if not answer.fields or ("error" in answer.fields and "operationType" not in answer.fields):
        raise Unsure(f"cannot read Google's reply about {what}: {printable(answer.text[:80])}")
    return answer.fields


def _parse_operation_of(name: str, answer: Answer) -> Operation | None:
    """Parse the operation that a request started on an instance. None if the instance is gone."""
    if _is_gone(answer, name):
        return None
    return _operation(_good(answer, f"the instance {name}"))


def _operation(row: Fields) -> Operation:
    """Parse an operation.  Raises Unsure if the name or status is missing."""
    if not row.get("name") or not row.get("status"):
        raise Unsure("cannot read Google's reply about an operation")
    operation = Operation(f"{row['name']}", _last(row.get("zone")), row.get("status") == "DONE")
    error = inner(row.get("error") or {}, "an operation", WHOSE)
    errors = rows({"errors": [], **error}, "errors", WHOSE)
    if not errors:
        return operation
    first = errors[0]
    zones = _read_available_zones(first)
    return operation._replace(
        code=f"{first.get('code') or 'unknown'}",
        words=printable(f"{first.get('message') or ''}"),
        zones=zones,
    )


def _read_available_zones(error: Fields) -> tuple[str, ...]:
    """Return the zones that an error recommends instead."""
    zones: list[str] = []
    for detail in rows({"errorDetails": [], **error}, "errorDetails", WHOSE):
        info = inner(detail.get("errorInfo") or {}, "an error", WHOSE)
        metadata = inner(info.get("metadatas") or {}, "an error", WHOSE)
        for name in f"{metadata.get('zonesAvailable') or ''}".split(","):
            if name.strip():
                zones.append(name.strip())
    return tuple(zones)


def _instance(row: Fields) -> GcpInstance:
    """Parse an instance.  Raises Unsure if the name or status is missing."""
    metadata = inner(row.get("metadata") or {}, "an instance", WHOSE)
    rows_of_items = rows({"items": [], **metadata}, "items", WHOSE)
    items = {f"{item.get('key')}": f"{item.get('value', '')}" for item in rows_of_items}
    nics = rows({"networkInterfaces": [], **row}, "networkInterfaces", WHOSE)
    # The first interface and its first access are the machine's, if there are any.
    nic = next(iter(nics), {})
    access = next(iter(rows({"accessConfigs": [], **nic}, "accessConfigs", WHOSE)), {})
    kind = _read_kind(row)
    if not row.get("name") or not row.get("status"):
        raise Unsure("cannot read Google's reply about an instance")
    scheduling = inner(row.get("scheduling") or {}, "an instance", WHOSE)
    disks = rows({"disks": [], **row}, "disks", WHOSE)
    size = sum(number(disk, "diskSizeGb") for disk in disks)
    return GcpInstance(
        name=f"{row['name']}",
        zone=_last(row.get("zone")),
        status=f"{row['status']}",
        address=f"{access.get('natIP') or ''}",
        kind=kind,
        spot=scheduling.get("provisioningModel") == "SPOT",
        disk=size,
        labels=inner(row.get("labels") or {}, "an instance", WHOSE),
        items=items,
        internal=f"{nic.get('networkIP') or ''}",
    )


def _read_kind(row: Fields) -> str:
    """Return the machine type, followed by the attached GPUs of an N1 machine."""
    kind = _last(row.get("machineType"))
    if not kind.startswith("n1-"):
        return kind
    for gpu in rows({"guestAccelerators": [], **row}, "guestAccelerators", WHOSE):
        kind += f"+{number(gpu, 'acceleratorCount'):.0f}x{_last(gpu.get('acceleratorType'))}"
    return kind


def _last(value: object) -> str:
    """Return the name at the end of a resource URL."""
    return f"{value or ''}".rpartition("/")[2]
