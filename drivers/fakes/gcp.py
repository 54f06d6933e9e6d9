"""Google Compute Engine v1 as a World: instances, operations, zone stock, quotas, preemption."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar, NamedTuple
from uuid import UUID

from ..gcp_prices import CARDS, DISK, Card, Shape
from .gcp_instances import (
    FOREIGN,
    GPUS,
    INSERTING,
    NAME,
    NOTICE,
    QUOTA,
    ROOT,
    TYPES,
    UNLISTED,
    ZONES,
    Instance,
    compile_filter,
    date,
    fingerprint,
    holds,
    list_price,
    parse_order,
    quota_metric,
    show_instance,
    whole,
)
from .world import Boot, Call, Document, Part, Refused, Reply, Route, World, array, document


class Operation(NamedTuple):
    """A long-running operation of the API, with the Unix times of its start and end."""

    name: str
    zone: str  # empty for an operation of the whole project
    kind: str
    target: str
    target_id: str
    asked: float
    done: float
    code: str = ""
    message: str = ""
    available: tuple[str, ...] = ()


class Operations(Part["Gcp"]):
    """Long-running operations, and the request ids that started them."""

    def __init__(self, world: Gcp) -> None:
        super().__init__(world)
        self._made: dict[str, Operation] = {}
        self._requests: dict[str, str] = {}

    def begin(
        self,
        zone: str,
        kind: str,
        target: Instance | str,
        seconds: float,
        failed: Mapping[str, object] | None = None,
    ) -> Operation:
        now = self._world.account.now
        name = f"operation-{int(now * 1000)}-{len(self._made):06x}"
        if isinstance(target, Instance):
            link = f"{ROOT}/projects/fake/zones/{zone}/instances/{target.name}"
            number_of = target.id
        else:
            link, number_of = target, "0"
        made = Operation(name, zone, kind, link, number_of, asked=now, done=now + seconds)
        if failed:
            zones = failed.get("zones")
            available = zones if isinstance(zones, tuple) else ()
            made = made._replace(
                code=str(failed["code"]), message=str(failed["message"]), available=available
            )
        self._made[name] = made
        return made

    def _status_of(self, made: Operation) -> str:
        if self._world.account.now >= made.done:
            return "DONE"
        return "RUNNING" if self._world.account.now >= made.asked + 1 else "PENDING"

    def _show(self, made: Operation) -> Document:
        status = self._status_of(made)
        where = f"zones/{made.zone}" if made.zone else "global"
        found: dict[str, object] = {
            "kind": "compute#operation", "id": str(5_000_000_000 + int(made.name.rpartition("-")[2], 16)), "name": made.name,
            "operationType": made.kind, "targetLink": made.target,
            "targetId": made.target_id, "status": status, "progress": 100 if status == "DONE" else 0, "insertTime": date(made.asked),
            "startTime": date(made.asked), "user": "nobody@example.com", "selfLink": f"{ROOT}/projects/fake/{where}/operations/{made.name}",
        }  # fmt: skip
        if made.zone:
            found["zone"] = f"{ROOT}/projects/fake/zones/{made.zone}"
        if status == "DONE":
            found["endTime"] = date(made.done)
            if made.code:
                found |= {
                    "error": {"errors": [_show_error(made)]},
                    "httpErrorStatusCode": 503,
                    "httpErrorMessage": "SERVICE UNAVAILABLE",
                }
        return found

    def operation(self, call: Call) -> Reply:
        made = self._made.get(call.names["operation"])
        if made is None or made.zone != call.names.get("zone", ""):
            return self._world.problem(
                404, "notFound", f"The resource '{call.names['operation']}' was not found"
            )
        return Reply(200, self._show(made))

    def wait(self, call: Call) -> Reply:
        """Return an operation after it ends, or still running after a time limit."""
        reply = self.operation(call)
        made = self._made.get(call.names["operation"])
        if made is None or reply.status != 200:
            return reply
        return reply._replace(hold=max(0.0, made.done - self._world.account.now))

    def operations(self, call: Call) -> Reply:
        wanted = re.search(r'operationType\s*(?:=|eq)\s*"?([\w.]+)', call.query.get("filter", ""))
        found = [made for made in self._made.values() if made.zone == call.names["zone"]]
        if wanted:
            found = [made for made in found if made.kind == wanted[1]]
        items = [self._show(made) for made in found]
        return Reply(200, {"kind": "compute#operationList", "id": "operations", "items": items})

    def replay(self, call: Call) -> Reply | None:
        """Return the operation of an earlier request with the same `requestId`; None if new.

        For an invalid `requestId`, returns an error reply.
        """
        wanted = call.query.get("requestId")
        if wanted is None:
            return None
        try:
            usable = UUID(wanted).int != 0
        except ValueError:
            usable = False
        if not usable:
            return self._world.problem(
                400,
                "invalid",
                f"Invalid value for field 'requestId': '{wanted}'. Must be a valid UUID.",
            )
        known = self._requests.get(f"{call.operation}/{wanted}")
        return None if known is None else Reply(200, self._show(self._made[known]))

    def accept(self, call: Call, made: Operation) -> Reply:
        wanted = call.query.get("requestId")
        if wanted:
            self._requests[f"{call.operation}/{wanted}"] = made.name
        return Reply(200, self._show(made))


def _show_error(made: Operation) -> Document:
    """Return the error of a failed operation in the API's JSON form."""
    metadatas = {
        "zone": made.zone,
        "zonesAvailable": ",".join(made.available),
        "vmType": "",
        "attachment": "",
    }
    info = {
        "reason": "resource_availability",
        "domain": "compute.googleapis.com",
        "metadatas": metadatas,
    }
    return {"code": made.code, "message": made.message, "errorDetails": [{"errorInfo": info}]}


def _show_scope(zone: str, name: str, rows: Sequence[Document]) -> Document:
    """Return a zone's part of an aggregated listing: its rows, or a warning that it has none."""
    if rows:
        return {name: rows}
    warning = {
        "code": "NO_RESULTS_ON_PAGE",
        "message": f"There are no results for scope 'zones/{zone}' on this page.",
        "data": [],
    }
    return {"warning": warning}


class Market(Part["Gcp"]):
    """GPU stock of each zone, and quotas of the project."""

    def __init__(self, world: Gcp) -> None:
        super().__init__(world)
        luck = Random(f"{world.seed}/market")
        self.stock: dict[tuple[str, str], int] = {}
        for zone in ZONES:
            for gpu in GPUS:
                self.stock[zone, gpu] = luck.choice((0, 0, 4, 8, 16))
        # However the luck falls, one GPU can be rented.
        self.stock[ZONES[0], "nvidia-l4"] = 8

    def _holders(self) -> list[Instance]:
        """Return the instances that occupy their GPUs."""
        return [made for made in self._world.account.alive() if holds(made)]

    def left(self, zone: str, gpu: str) -> int:
        """Return the number of free GPUs of a type in a zone."""
        taken = [made.gpus for made in self._holders() if (made.zone, made.gpu) == (zone, gpu)]
        return self.stock.get((zone, gpu), 0) - sum(taken)

    def used(self, region: str, gpu: str, spot: bool) -> int:
        """Return the use of a region's quota for a GPU type and market."""
        used = 0
        for made in self._holders():
            if (made.zone[:-2], made.gpu, made.spot) == (region, gpu, spot):
                used += made.gpus
        return used

    def used_globally(self) -> int:
        return sum(made.gpus for made in self._holders())

    def _accelerators(self, zone: str) -> list[Document]:
        """Return the GPU types of which a zone has any."""
        where = f"{ROOT}/projects/fake/zones/{zone}"
        rows: list[Document] = []
        for n, gpu in enumerate(GPUS):
            if not self.stock.get((zone, gpu)):
                continue
            row = {
                "kind": "compute#acceleratorType",
                "id": str(10_000 + n),
                "name": gpu,
                "description": gpu,
                "maximumCardsPerInstance": 8,
                "zone": where,
                "selfLink": f"{where}/acceleratorTypes/{gpu}",
            }
            rows.append(row)
        return rows

    def accelerator_types(self, call: Call) -> Reply:
        rows = self._accelerators(call.names["zone"])
        return Reply(
            200, {"kind": "compute#acceleratorTypeList", "id": "acceleratorTypes", "items": rows}
        )

    def all_accelerator_types(self, call: Call) -> Reply:
        items: dict[str, object] = {}
        for zone in ZONES:
            rows = self._accelerators(zone)
            items[f"zones/{zone}"] = _show_scope(zone, "acceleratorTypes", rows)
        return Reply(
            200,
            {
                "kind": "compute#acceleratorTypeAggregatedList",
                "id": "acceleratorTypes",
                "items": items,
            },
        )

    def global_quota(self) -> float:
        """Return the project's total GPU quota. A new project at Google has 0."""
        return 4 * self._world.amount("quota", QUOTA)

    def project(self, call: Call) -> Reply:
        used = float(self.used_globally())
        quotas = [{"metric": "GPUS_ALL_REGIONS", "limit": self.global_quota(), "usage": used}]
        return Reply(200, {"kind": "compute#project", "id": "1", "name": "fake", "quotas": quotas})

    def machine_types(self, call: Call) -> Reply:
        zone = call.names["zone"]
        rows: list[Document] = []
        for n, (name, kind) in enumerate(TYPES.items()):
            accelerators: list[Document] = []
            if kind.gpu:
                if not self.stock.get((zone, kind.gpu)):
                    continue
                gpu = {"guestAcceleratorType": kind.gpu, "guestAcceleratorCount": kind.gpus}
                accelerators.append(gpu)
            shown = {
                "kind": "compute#machineType",
                "id": str(20_000 + n),
                "name": name,
                "guestCpus": kind.cpus,
                "memoryMb": kind.memory,
                "zone": zone,
                "accelerators": accelerators,
            }
            rows.append(shown)
        return Reply(200, {"kind": "compute#machineTypeList", "id": "machineTypes", "items": rows})

    def region(self, call: Call) -> Reply:
        region = call.names["region"]
        zones = [f"{ROOT}/projects/fake/zones/{zone}" for zone in ZONES if zone[:-2] == region]
        if not zones:
            return self._world.problem(
                404, "notFound", f"The resource 'projects/fake/regions/{region}' was not found"
            )
        quotas: list[Document] = []
        for gpu, card in CARDS.items():
            if card.metric != UNLISTED:
                quotas.append(self._show_quota(region, gpu, spot=False))
            quotas.append(self._show_quota(region, gpu, spot=True))
        return Reply(
            200,
            {
                "kind": "compute#region",
                "id": "1000",
                "name": region,
                "status": "UP",
                "zones": zones,
                "quotas": quotas,
            },
        )

    def _show_quota(self, region: str, gpu: str, spot: bool) -> Document:
        return {
            "metric": quota_metric(gpu, spot),
            "limit": self._world.amount("quota", QUOTA),
            "usage": float(self.used(region, gpu, spot)),
        }


class Firewalls(Part["Gcp"]):
    """Firewall rules of the project."""

    def __init__(self, world: Gcp) -> None:
        super().__init__(world)
        self._rules: dict[str, Document] = {}

    def add_firewall(self, call: Call) -> Reply:
        name = call.text("name")
        if not NAME.fullmatch(name):
            return self._world.problem(400, "invalid", "Invalid value for field 'resource.name'.")
        if name in self._rules:
            return self._world.problem(
                409,
                "alreadyExists",
                f"The resource 'projects/fake/global/firewalls/{name}' already exists",
            )
        self._rules[name] = {
            "kind": "compute#firewall",
            "id": str(30_000 + len(self._rules)),
            **call.fields,
        }
        return self._world.asked.accept(
            call,
            self._world.asked.begin(
                "", "insert", f"{ROOT}/projects/fake/global/firewalls/{name}", 2
            ),
        )

    def firewall(self, call: Call) -> Reply:
        found = self._rules.get(call.names["name"])
        if found is None:
            return self._world.problem(404, "notFound", "The firewall was not found")
        return Reply(200, found)

    def drop_firewall(self, call: Call) -> Reply:
        name = call.names["name"]
        if self._rules.pop(name, None) is None:
            return self._world.problem(404, "notFound", "The firewall was not found")
        return self._world.asked.accept(
            call,
            self._world.asked.begin(
                "", "delete", f"{ROOT}/projects/fake/global/firewalls/{name}", 2
            ),
        )


class Guests(Part["Gcp"]):
    """Metadata server, guest attributes and serial port of an instance."""

    def preempted(self, call: Call) -> Reply:
        """Report whether the calling instance has a preemption notice.

        With `wait_for_change`, the reply waits half a second for the notice.
        """
        found = self._find_caller(call)
        if found is None:
            return Reply(403, "Forbidden")
        if found.noticed:
            return Reply(200, "TRUE")
        return Reply(200, "FALSE", hold=0.5 if "wait_for_change" in call.query else 0.0)

    def _find_caller(self, call: Call) -> Instance | None:
        """Return the instance that calls its metadata server, or None for any other request."""
        if call.headers.get("metadata-flavor") != "Google":
            return None
        return self._world.account.machines.get(call.names["id"])

    def attest(self, call: Call) -> Reply:
        """Write a guest attribute of the calling instance, if `enable-guest-attributes` allows it."""
        found = self._find_caller(call)
        if found is None or found.item("enable-guest-attributes").upper() != "TRUE":
            return Reply(403, "Forbidden")
        found.attributes[call.names["namespace"], call.names["key"]] = call.text("text")
        return Reply(200, "")

    def serial(self, call: Call) -> Reply:
        found = self._world.find_instance(call)
        text = "startup-script exit status 0\n" if found.up else ""
        return Reply(
            200,
            {
                "kind": "compute#serialPortOutput",
                "contents": text,
                "start": "0",
                "next": str(len(text)),
            },
        )

    def guest_attributes(self, call: Call) -> Reply:
        """Return the guest attributes below `queryPath`, which is `NAMESPACE/` or `NAMESPACE/KEY`."""
        found = self._world.find_instance(call)
        where = call.query.get("queryPath", "")
        rows: list[Document] = []
        for (namespace, key), value in sorted(found.attributes.items()):
            if where in ("", f"{namespace}/", f"{namespace}/{key}"):
                rows.append({"namespace": namespace, "key": key, "value": value})
        if not rows:
            return self._world.problem(
                404, "notFound", f"The resource '{where}' of type 'Guest Attribute' was not found."
            )
        return Reply(
            200,
            {"kind": "compute#guestAttributes", "queryPath": where, "queryValue": {"items": rows}},
        )


class Lists(Part["Gcp"]):
    """Paginated listings of instances."""

    def _page(self, call: Call, rows: list[Instance]) -> tuple[list[Instance], str]:
        """Return one page of a listing, and the token of the next page.

        Raises Refused for an invalid filter or token.
        """
        try:
            test = compile_filter(call.query.get("filter", ""))
            size = min(500, int(call.query.get("maxResults", "500")))
            after = base64.urlsafe_b64decode(call.query.get("pageToken", "")).decode()
            begin = int(after or 0) if self._world.amount("restless") else 0
        except ValueError:
            raise Refused(
                self._world.problem(
                    400, "invalid", "Invalid value for field 'filter', 'maxResults' or 'pageToken'."
                )
            ) from None
        found = sorted(filter(test, rows), key=lambda made: (made.zone, made.name))
        # Restless pages are counted, so instances that vanish meanwhile shift the later ones.
        if self._world.amount("restless"):
            end = begin + size
            return found[begin:end], str(end) if end < len(found) else ""
        rest = [made for made in found if f"{made.zone}/{made.name}" > after]
        page = rest[:size]
        if len(rest) <= size or not page:
            return page, ""
        return page, f"{page[-1].zone}/{page[-1].name}"

    def listing(self, call: Call) -> Reply:
        unreached = ZONES[0] if self._world.amount("unreachable") else ""
        listed = self._world.account.list_machines()
        page, token = self._page(call, [made for made in listed if made.zone != unreached])
        items: dict[str, object] = {}
        for zone in ZONES:
            rows = [self._show(made) for made in page if made.zone == zone]
            items[f"zones/{zone}"] = _show_scope(zone, "instances", rows)
        found: dict[str, object] = {
            "kind": "compute#instanceAggregatedList",
            "id": "projects/fake/aggregated/instances",
            "items": items,
        }
        if token:
            found["nextPageToken"] = _encode_token(token)
        if unreached:
            found["unreachables"] = [f"zones/{unreached}"]
            del items[f"zones/{unreached}"]
        return Reply(200, found)

    def zone_listing(self, call: Call) -> Reply:
        zone, listed = call.names["zone"], self._world.account.list_machines()
        page, token = self._page(call, [made for made in listed if made.zone == zone])
        found: dict[str, object] = {
            "kind": "compute#instanceList",
            "id": "instances",
            "items": [self._show(made) for made in page],
        }
        if token:
            found["nextPageToken"] = _encode_token(token)
        return Reply(200, found)

    def _show(self, made: Instance) -> Document:
        return show_instance(made, self._world.address(made))


def _encode_token(token: str) -> str:
    return base64.urlsafe_b64encode(token.encode()).decode()


class Changes(Part["Gcp"]):
    """Requests that change an existing instance: scheduling, metadata, labels."""

    def set_scheduling(self, call: Call) -> Reply:
        """Change the scheduling limits of a stopped instance."""
        found = self._world.find_instance(call)
        if found.status != "TERMINATED":
            return self._world.problem(
                400, "resourceNotReady", f"The resource '{found.name}' is not stopped"
            )
        found.body = {**found.body, "scheduling": {**found.scheduling, **call.fields}}
        return self._world.asked.accept(
            call, self._world.asked.begin(found.zone, "setScheduling", found, 0.1)
        )

    def simulate(self, call: Call) -> Reply:
        """Simulate a maintenance event, which preempts a Spot instance."""
        found = self._world.find_instance(call)
        if found.spot:
            self._world.happen(found, "preempted")
        return self._world.asked.accept(
            call,
            self._world.asked.begin(
                found.zone, "compute.instances.simulateMaintenanceEvent", found, 1
            ),
        )

    def _change(self, call: Call, key: str, kind: str, change: str) -> Reply:
        found = self._world.find_instance(call)
        if call.fields.get(key) != fingerprint(found):
            return self._world.problem(
                412, "conditionNotMet", f"{change} fingerprint is stale: read the instance again."
            )
        found.changes += 1
        if kind == "setLabels":
            found.labels = call.inner("labels")
        else:
            found.items = [document(item) for item in array(call.fields.get("items"))]
        return self._world.asked.accept(call, self._world.asked.begin(found.zone, kind, found, 1))

    def set_metadata(self, call: Call) -> Reply:
        return self._change(call, "fingerprint", "setMetadata", "Metadata")

    def set_labels(self, call: Call) -> Reply:
        return self._change(call, "labelFingerprint", "setLabels", "Labels")


class Gcp(World[Instance]):
    """Fake Google Compute Engine with one project."""

    _P: ClassVar = "/compute/v1/projects/{project}"
    _Z: ClassVar = _P + "/zones/{zone}"
    _I: ClassVar = _Z + "/instances/{name}"
    _M: ClassVar = "/_machine/{id}/computeMetadata/v1/instance"
    """Metadata server of an instance: $GCE_METADATA_HOST replaces metadata.google.internal."""
    routes: ClassVar = (
        Route("POST", _Z + "/instances", "create"),
        Route("GET", _Z + "/instances", "zone_listing"),
        Route("GET", _P + "/aggregated/instances", "listing"),
        Route("GET", _I, "show"),
        Route("DELETE", _I, "destroy"),
        Route("POST", _I + "/start", "start"),
        Route("POST", _I + "/stop", "stop"),
        Route("POST", _I + "/setScheduling", "set_scheduling"),
        Route("POST", _I + "/setMetadata", "set_metadata"),
        Route("POST", _I + "/setLabels", "set_labels"),
        Route("POST", _I + "/simulateMaintenanceEvent", "simulate"),
        Route("GET", _I + "/serialPort", "serial"),
        Route("GET", _I + "/getGuestAttributes", "guest_attributes"),
        Route("GET", _Z + "/operations", "operations"),
        Route("GET", _Z + "/operations/{operation}", "operation"),
        Route("POST", _Z + "/operations/{operation}/wait", "wait"),
        Route("GET", _P + "/global/operations/{operation}", "operation"),
        Route("POST", _P + "/global/operations/{operation}/wait", "wait"),
        Route("GET", _P, "project"),
        Route("GET", _Z + "/acceleratorTypes", "accelerator_types"),
        Route("GET", _P + "/aggregated/acceleratorTypes", "all_accelerator_types"),
        Route("GET", _Z + "/machineTypes", "machine_types"),
        Route("GET", _P + "/regions/{region}", "region"),
        Route("POST", _P + "/global/firewalls", "add_firewall"),
        Route("GET", _P + "/global/firewalls/{name}", "firewall"),
        Route("DELETE", _P + "/global/firewalls/{name}", "drop_firewall"),
        Route("GET", _M + "/preempted", "preempted"),
        Route("PUT", _M + "/guest-attributes/{namespace}/{key}", "attest", plain=True),
    )
    open: ClassVar = frozenset(route.operation for route in routes)
    """All operations, because clients of an emulator send no token."""
    exports: ClassVar = (
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE={url}/compute/v1/", "CLOUDSDK_CORE_PROJECT=fake", "CLOUDSDK_AUTH_ACCESS_TOKEN={key}",
        "GCP_SSH_PORT={port}",
    )  # fmt: skip

    def begin(self) -> None:
        self.asked = Operations(self)
        self.market = Market(self)
        self.firewalls = Firewalls(self)
        self.guests = Guests(self)
        self.lists = Lists(self)
        self.changes = Changes(self)
        self.parts = [
            self.asked,
            self.market,
            self.firewalls,
            self.guests,
            self.lists,
            self.changes,
        ]
        for n in range(int(self.amount("foreign"))):
            self._make_instance(
                f"theirs-{n}",
                ZONES[0],
                {"name": f"theirs-{n}"},
                FOREIGN,
                TYPES["e2-standard-4"],
                "",
                0,
            )

    # -- its own words -----------------------------------------------------------------------------

    def problem(self, status: int, code: str, message: str) -> Reply:
        reasons = {
            "not_found": "notFound",
            "bad_gateway": "backendError",
            "internal_error": "backendError",
            "invalid_request": "parseError",
        }
        reason = reasons.get(code, code)
        domain = "usageLimits" if reason in ("quotaExceeded", "rateLimitExceeded") else "global"
        return Reply(
            status,
            {
                "error": {
                    "code": status,
                    "message": message,
                    "errors": [{"domain": domain, "reason": reason, "message": message}],
                }
            },
        )

    def refusal(self, call: Call) -> Reply:
        return self.problem(401, "authError", "Request had invalid authentication credentials.")

    def anonymous(self, operation: str) -> bool:
        """Return True if an API operation needs no token.

        With real machines, only the calls of a machine itself need none.
        """
        return not self.key or operation in ("preempted", "attest")

    @property
    def takes(self) -> float:
        """Seconds until an insert operation ends. Stopping and deleting take twice as long."""
        return self.amount("takes", INSERTING)

    def throttle_reply(self, route: Route) -> Reply:
        return self.problem(
            403 if self.calls % 2 else 429, "rateLimitExceeded", "Rate Limit Exceeded"
        )

    def happen(self, machine: Instance, what: str) -> None:
        word, _, life = what.partition(" ")
        if life and life != str(machine.life):
            return
        if word == "up" and machine.status in ("PROVISIONING", "STAGING"):
            self._finish_boot(machine)
        elif word == "staging" and machine.status == "PROVISIONING":
            machine.status = "STAGING"
        elif word == "stopped" and machine.status == "STOPPING":
            self._stop_machine(machine, "stopped")
        elif word == "gone":
            self.account.end(machine)
        elif word == "preempted" and machine.up and not machine.noticed:
            machine.noticed = True
            self.account.later(machine, self.amount("notice", NOTICE), f"taken {machine.life}")
        elif word == "taken" and machine.up:
            self.asked.begin(machine.zone, "compute.instances.preempted", machine, 0)
            self.account.note("preempted", machine)
            self._end(machine)
        elif word == "expired" and machine.up:
            self.asked.begin(machine.zone, "compute.instances.stop", machine, 0)
            self._end(machine)

    def _finish_boot(self, machine: Instance) -> None:
        if machine.fails:
            self._stop_machine(machine, "failed")
            return
        machine.status = "RUNNING"
        machine.up = True
        machine.began = self.account.now
        machine.noticed = False
        self._rates(machine)
        self.account.note("started", machine)
        self._end_at_limit(machine)

    def _end_at_limit(self, machine: Instance) -> None:
        """Schedule the termination of an instance that has a `maxRunDuration`."""
        longest = whole(document(machine.scheduling.get("maxRunDuration")).get("seconds"))
        if longest:
            self.account.later(machine, longest, f"expired {machine.life}")

    def _end(self, machine: Instance) -> None:
        """Delete or stop an instance, as set by its `instanceTerminationAction`."""
        if machine.scheduling.get("instanceTerminationAction") == "DELETE":
            self.account.end(machine, "provider")
        else:
            self._stop_machine(machine, "stopped")

    def _stop_machine(self, machine: Instance, event: str) -> None:
        machine.status, machine.up, machine.began = "TERMINATED", False, None
        self._rates(machine)
        self.account.note(event, machine)

    def halt(self, machine: Instance) -> None:
        self._stop_machine(machine, "stopped")

    def boot(self, machine: Instance) -> Boot | None:
        if machine.by == FOREIGN:
            return None
        gpu, memory, _ = CARDS.get(machine.gpu, Card("none", 0, ""))
        user, _, key = machine.item("ssh-keys").partition(":")
        keys = (key,) if key and machine.item("enable-oslogin").upper() != "TRUE" else ()
        env = (("GCE_METADATA_HOST", f"{machine.host}/_machine/{machine.id}"),)
        where = self.address(machine)
        return Boot(
            keys,
            env,
            machine.item("startup-script"),
            gpu,
            machine.gpus,
            memory,
            user=user or "root",
            address=where,
            port=self.port,
        )

    def address(self, machine: Instance) -> str:
        """Return the IP address of an instance.

        Real machines all listen on one port, so each has its own loopback address.
        """
        if self.ports is None:
            return f"203.0.113.{int(machine.id) % 250}"
        digits = hashlib.sha256(f"{self.key} {machine.id}".encode()).digest()
        return f"127.{digits[0] or 1}.{digits[1]}.{digits[2] or 1}"

    def _rates(self, machine: Instance) -> None:
        gpu = list_price(machine) if machine.up else 0.0
        self.account.bill(machine, gpu=gpu, disk=machine.disk * DISK)

    # -- instances ---------------------------------------------------------------------------------

    def create(self, call: Call) -> Reply:
        before = self.asked.replay(call)
        if before is not None:
            return before
        zone, name = call.names["zone"], call.text("name")
        kind, gpu, gpus, wrong = parse_order(call.fields)
        if zone not in ZONES:
            return self.problem(
                404, "notFound", f"The resource 'projects/fake/zones/{zone}' was not found"
            )
        if wrong or kind is None:
            return self.problem(400, "invalid", f"Invalid value for field 'resource.{wrong}'.")
        if self.account.credit <= 0:
            return self.problem(
                403, "accountDisabled", "This API method requires billing to be enabled."
            )
        if self.at(zone, name) is not None:
            return self.problem(
                409,
                "alreadyExists",
                f"The resource 'projects/fake/zones/{zone}/instances/{name}' already exists",
            )
        spot = document(call.fields.get("scheduling")).get("provisioningModel") == "SPOT"
        if gpus:
            exceeded = self._find_exceeded_quota(zone[:-2], gpu, gpus, spot)
            if exceeded:
                return self.problem(403, "quotaExceeded", exceeded)
        if call.luck.strikes("taken") or self._lacks(zone, gpu, gpus):
            link = f"{ROOT}/projects/fake/zones/{zone}/instances/{name}"
            error = self._exhausted_error(zone, gpu, gpus)
            operation = self.asked.begin(zone, "insert", link, self.takes, error)
            return self.asked.accept(call, operation)
        made = self._make_instance(name, zone, call.fields, call.by, kind, gpu, gpus, call)
        if call.luck.strikes("fewer") and made.gpus > 1:
            made.gpus -= 1
        return self.asked.accept(call, self.asked.begin(zone, "insert", made, self.takes))

    def _find_exceeded_quota(self, region: str, gpu: str, gpus: int, spot: bool) -> str:
        """Return the message about a quota that does not allow `gpus` more GPUs, or ""."""
        limit = self.amount("quota", QUOTA)
        if self.market.used(region, gpu, spot) + gpus > limit:
            metric = quota_metric(gpu, spot)
            return f"Quota '{metric}' exceeded.  Limit: {limit} in region {region}."
        if self.market.used_globally() + gpus > self.market.global_quota():
            return (
                f"Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: {self.market.global_quota()} globally."
            )
        return ""

    def _lacks(self, zone: str, gpu: str, gpus: int) -> bool:
        """Return True if a zone has fewer than `gpus` free GPUs of a type."""
        return gpus > 0 and self.market.left(zone, gpu) < gpus

    def _exhausted_error(self, zone: str, gpu: str, gpus: int) -> Mapping[str, object]:
        others: list[str] = []
        for other in ZONES:
            if other == zone or other[:-2] != zone[:-2]:
                continue
            if not gpu or self.market.left(other, gpu) >= gpus:
                others.append(other)
        code = "ZONE_RESOURCE_POOL_EXHAUSTED"
        if self.calls % 2:  # Google has both codes
            code += "_WITH_DETAILS"
        message = f"The zone 'projects/fake/zones/{zone}' does not have enough resources available to fulfill the request."
        return {"code": code, "message": message, "zones": tuple(others)}

    def _make_instance(
        self,
        name: str,
        zone: str,
        body: Document,
        by: str,
        kind: Shape,
        gpu: str,
        gpus: int,
        call: Call | None = None,
    ) -> Instance:
        items = [document(item) for item in array(document(body.get("metadata")).get("items"))]
        host = call.headers.get("host", "") if call else ""
        made = Instance(
            id=str(4_000_000_000_000_000_000 + len(self.account.machines) * 7919),
            mark=name,
            by=by or "anonymous",
            name=name,
            zone=zone,
            body=body,
            type=kind,
            gpu=gpu,
            gpus=gpus,
            labels=document(body.get("labels")),
            items=items,
            host=host,
        )
        self.account.enter(made, call.luck if call else None)
        self._rates(made)
        self.account.later(made, self.takes / 2, "staging")
        self.account.boots(made)
        if call is not None and made.spot:
            self.account.interruptible(made, call.luck)
        return made

    def at(self, zone: str, name: str) -> Instance | None:
        for made in self.account.alive():
            if made.zone == zone and made.name == name:
                return made
        return None

    def find_instance(self, call: Call) -> Instance:
        """Return the instance named in a request. Raises Refused if it does not exist."""
        found = self.at(call.names["zone"], call.names["name"])
        if found is None:
            where = f"projects/{call.names['project']}/zones/{call.names['zone']}/instances/{call.names['name']}"
            raise Refused(self.problem(404, "notFound", f"The resource '{where}' was not found"))
        return found

    def show(self, call: Call) -> Reply:
        found = self.find_instance(call)
        return Reply(200, show_instance(found, self.address(found)))

    def destroy(self, call: Call) -> Reply:
        before = self.asked.replay(call)
        if before is not None:
            return before
        found = self.find_instance(call)
        if self.account.is_held(found) or found.body.get("deletionProtection") is True:
            return self.problem(
                400,
                "resourceInUseByAnotherResource",
                "Resource cannot be deleted if it's protected against deletion.",
            )
        if self.account.is_doomed(found, call.luck):
            found.status = "STOPPING"
            found.life += 1
            self.account.later(found, 2 * self.takes, "gone")
        return self.asked.accept(
            call, self.asked.begin(found.zone, "delete", found, 2 * self.takes)
        )

    def stop(self, call: Call) -> Reply:
        found = self.find_instance(call)
        if found.status in ("RUNNING", "STAGING", "PROVISIONING"):
            found.status = "STOPPING"
            found.life += 1
            self.account.later(found, 2 * self.takes, f"stopped {found.life}")
        return self.asked.accept(call, self.asked.begin(found.zone, "stop", found, 2 * self.takes))

    def start(self, call: Call) -> Reply:
        found = self.find_instance(call)
        if found.status not in ("TERMINATED", "RUNNING"):
            return self.problem(
                400, "resourceNotReady", f"The resource '{found.name}' is not ready"
            )
        if self.account.credit <= 0:
            return self.problem(
                403, "accountDisabled", "This API method requires billing to be enabled."
            )
        failed = None
        if found.status == "TERMINATED":
            if call.luck.strikes("taken") or self._lacks(found.zone, found.gpu, found.gpus):
                failed = self._exhausted_error(found.zone, found.gpu, found.gpus)
            else:
                found.status = "STAGING"
                found.life += 1
                self.account.boots(found, 0.6)
        return self.asked.accept(
            call, self.asked.begin(found.zone, "start", found, self.takes, failed)
        )
