"""RunPod's REST v2 as a World: a GPU catalog with stock, pods, their logs, keys and bills."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, Final, NamedTuple

from ..runpod_wire import HOME
from .account import BOOT, Entry, Machine
from .world import (
    Boot,
    Call,
    Document,
    Part,
    Refused,
    Reply,
    Route,
    World,
    array,
    date,
    document,
    number,
    parse_digits,
)

MONTH: Final = 30 * 24  # hours
DISK: Final = 0.10
"""Disk price of a running pod in US dollars per GB and month; doubled for a stopped pod's volume."""
FOREIGN: Final = "somebody"
"""Owner of the machines that exist from the start (fault `foreign`).  These accept no logins."""
SSH: Final = 6.0
"""Seconds from RUNNING until the public SSH port is known."""
KEY: Final = re.compile(r"(ssh|ecdsa|sk)-\S+ \S+([ \t][^\n\r]*)?")
PORT: Final = re.compile(r"\d{1,5}/(tcp|http)")
CUDA_VERSIONS: Final = ("12.4", "12.8", "13.0")
PROBLEM: Final[Mapping[str, str]] = {"content-type": "application/problem+json"}
ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "PROVISIONING": ("stop", "terminate"),
    "STARTING": ("stop", "terminate"),
    "RUNNING": ("stop", "restart", "terminate"),
    "EXITED": ("start", "terminate"),
    "ERROR": ("start", "terminate"),
    "TERMINATED": (),
}
"""Allowed actions by pod status."""
KNOWN: Final = frozenset({"name", "image", "args", "disk", "ports", "env", "registry", "cloud", "cpu", "dataCenterIds", "globalNetworking"}) | {
    "gpu", "mounts", "startJupyter", "startSsh", "templateId"
}  # fmt: skip
CENTERS: Final = (
    ("US-KS-2", "NORTH_AMERICA"),
    ("US-TX-3", "NORTH_AMERICA"),
    ("EU-RO-1", "EUROPE"),
    ("EU-SE-1", "EUROPE"),
    ("AP-JP-1", "ASIA"),
)
GPUS: Final = (  # id, name, GB, $/h secure, $/h community, most in one pod
    ("NVIDIA GeForce RTX 3090", "RTX 3090", 24, 0.46, 0.22, 4),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.69, 0.34, 6),
    ("NVIDIA L40S", "L40S", 48, 0.86, 0.79, 8),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.49, 1.39, 8),
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.69, 2.49, 8),
    ("NVIDIA H200", "H200", 141, 3.59, 3.29, 8),
    ("NVIDIA B200", "B200", 180, 5.98, 5.19, 8),
)


class Gpu(NamedTuple):
    """A GPU type of the catalog.

    `secure` and `community` are US dollars per hour, `stock` is the number of GPUs for rent.
    """

    id: str
    name: str
    memory: int
    secure: float
    community: float
    most: int
    stock: int


@dataclass(kw_only=True)
class Pod(Machine):
    gpu: Gpu | None
    count: int
    price: float
    body: Document
    center: str
    cuda: str = "12.8"
    status: str = "PROVISIONING"
    port: int | None = None
    generation: int = 0  # number of starts
    started: float | None = None
    has: int = 0  # current number of GPUs
    log: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def volume(self) -> float:
        """Size in GB of the volume, which is kept when the pod stops."""
        return number(document(document(self.body.get("mounts")).get("persistent")).get("size"))

    @property
    def disk(self) -> float:
        return number(self.body.get("disk"), 50.0)


class Catalog(Part["Runpod"]):
    """GPU catalog with stock and data centers."""

    def __init__(self, world: Runpod) -> None:
        super().__init__(world)
        luck = Random(f"{world.seed}/market")
        self.stock = [Gpu(*row, luck.choice((0, 1, 2, 4, 8, 16, 24))) for row in GPUS]
        if not any(gpu.stock for gpu in self.stock):
            self.stock[1] = self.stock[1]._replace(stock=8)

    def gpus(self, call: Call) -> Reply:
        shown = [self._type(gpu, call) for gpu in self.stock]
        return Reply(200, {"gpus": shown})

    def one_gpu(self, call: Call) -> Reply:
        found = self.find(call.names["id"].replace("%20", " "))
        if found is None:
            return self._world.problem(404, "not_found", "there is no such GPU type")
        return Reply(200, self._type(found, call))

    def find(self, name: object) -> Gpu | None:
        return next((gpu for gpu in self.stock if gpu.id == name), None)

    def _type(self, gpu: Gpu, call: Call) -> Document:
        count = max(1, parse_digits(call.query.get("count", ""), 5) or 1)
        level = self._describe_stock(gpu, count)
        shown: dict[str, object] = {
            "id": gpu.id, "name": gpu.name, "pool": None, "manufacturer": "NVIDIA", "memory": gpu.memory, "secure": True, "community": True,
            "price": {"secure": call.luck.price(gpu.secure), "community": call.luck.price(gpu.community)},
            "maxCount": {"secure": gpu.most, "community": gpu.most},
        }  # fmt: skip
        if call.query.get("include") == "AVAILABILITY":
            is_there = level != "NONE"
            shown["availability"] = level
            shown["dataCenters"] = [
                {"id": name, "name": name, "availability": level} for name, _ in CENTERS
            ]
            shown["cudaVersions"] = [
                {"version": version, "available": is_there} for version in CUDA_VERSIONS
            ]
        return shown

    def _describe_stock(self, gpu: Gpu, count: int) -> str:
        """Return the availability of pods with `count` GPUs of a type."""
        left = self.free(gpu) // count
        if left <= 0 or count > gpu.most:
            return "NONE"
        if left < 3:
            return "LOW"
        return "MEDIUM" if left < 9 else "HIGH"

    def raise_price(self, gpu: Gpu) -> Gpu:
        place = self.stock.index(gpu)
        secure, community = round(gpu.secure * 1.1, 4), round(gpu.community * 1.1, 4)
        self.stock[place] = gpu._replace(secure=secure, community=community)
        return self.stock[place]

    def centers(self, call: Call) -> Reply:
        rows = [
            {
                "id": name,
                "name": name,
                "region": region,
                "globalNetwork": True,
                "networkVolumeTypes": ["STANDARD"],
                "compliance": [],
            }
            for name, region in CENTERS
        ]
        return Reply(200, {"dataCenters": rows})

    def free(self, gpu: Gpu) -> int:
        taken = 0
        for pod in self._world.account.alive():
            if pod.gpu is not None and pod.gpu.id == gpu.id:
                taken += pod.has
        return gpu.stock - taken


class Keys(Part["Runpod"]):
    """SSH keys of the account."""

    def __init__(self, world: Runpod) -> None:
        super().__init__(world)
        self._keys: list[str] = []

    def keys(self, call: Call) -> Reply:
        return Reply(200, {"keys": self._keys})

    def replace_keys(self, call: Call) -> Reply:
        """Replace all SSH keys of the account."""
        keys = call.fields.get("keys")
        if call.fields.keys() != {"keys"} or not _are_texts(keys, KEY):
            return self._world.unfit(["keys: must be a list of public keys"])
        self._keys = [str(key) for key in array(keys)]
        return Reply(200, {"keys": self._keys})


class Logs(Part["Runpod"]):
    """Logs of pods and of the system."""

    def says(self, pod: Pod, source: str, line: str) -> None:
        pod.log.append((self._world.account.now + len(pod.log) * 1e-3, source, line))

    def logs(self, call: Call) -> Reply:
        """Return a pod log as a finite event stream. A client resumes after its last event ID."""
        pod = self._world.find_pod(call)
        source = call.query.get("source")
        after = call.headers.get("last-event-id") or call.query.get("since", "")
        rows: list[tuple[str, str, str]] = []
        for at, where, line in pod.log:
            if source in (None, where) and date(at) > after:
                rows.append((date(at), where, line))
        tail = parse_digits(call.query.get("tail", ""), 8) or 100
        rows = rows[-min(5000, tail) :]
        events = [
            f"id: {at}\ndata: {json.dumps({'source': where, 'line': line, 'ts': at})}\n\n"
            for at, where, line in rows
        ]
        return Reply(200, "".join(events), {"content-type": "text/event-stream"})


class Bills(Part["Runpod"]):
    """Billing records of pods."""

    def billing(self, call: Call) -> Reply:
        wanted = call.query.get("podId")
        billed: list[Entry] = []
        by_pod: dict[str, list[Entry]] = {}
        for entry in self._world.account.settle():
            if entry.event == "billed" and wanted in (None, entry.machine):
                billed.append(entry)
                by_pod.setdefault(entry.machine, []).append(entry)
        records = [_sum_pod(name, entries) for name, entries in by_pod.items()]
        totals: dict[str, float] = {}
        for what in ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount"):
            totals[what] = sum(number(record[what]) for record in records)
        first = min((entry.since for entry in billed), default=self._world.account.now)
        size = call.query.get("bucketSize", "day")
        if size not in SIZES:
            size = "day"
        query = {
            "startTime": date(first),
            "endTime": date(self._world.account.now),
            "bucketSize": size,
            "podId": wanted,
        }
        meta = {
            "query": query,
            "recordCount": len(records),
            "uniquePodCount": len(records),
            "totals": totals,
        }
        return Reply(200, {"records": records, "metadata": meta})


def _sum_pod(name: str, billed: Sequence[Entry]) -> Document:
    """Return the billing record of one pod."""
    gpu = sum(entry.usd for entry in billed if entry.what == "gpu")
    disk = sum(entry.usd for entry in billed if entry.what == "disk")
    return {
        "startTime": date(billed[0].since),
        "endTime": date(billed[-1].at),
        "podId": name,
        "totalAmount": gpu + disk,
        "gpuAmount": gpu,
        "cpuAmount": 0.0,
        "diskAmount": disk,
    }


class Runpod(World[Pod]):
    """Fake RunPod with one account and a stock of GPUs."""

    routes: ClassVar = (
        Route("POST", "/v2/pods", "create", 1.0),
        Route("GET", "/v2/pods", "listing", 1.0),
        Route("GET", "/v2/pods/{id}", "show", 1.0),
        Route("PATCH", "/v2/pods/{id}", "update", 1.0),
        Route("DELETE", "/v2/pods/{id}", "destroy", 1.0),
        Route("POST", "/v2/pods/{id}/action", "action", 1.0),
        Route("GET", "/v2/pods/{id}/logs", "logs", 1.0),
        Route("GET", "/v2/catalog/gpus", "gpus", 1.0),
        Route("GET", "/v2/catalog/gpus/{id}", "one_gpu", 1.0),
        Route("GET", "/v2/catalog/datacenters", "centers", 1.0),
        Route("GET", "/v2/account/ssh-keys", "keys", 1.0),
        Route("PUT", "/v2/account/ssh-keys", "replace_keys", 1.0),
        Route("GET", "/v2/billing/pods", "billing", 1.0),
    )
    exports: ClassVar = ("RUNPOD_API_URL={url}", "RUNPOD_API_KEY={key}")

    def begin(self) -> None:
        self.catalog = Catalog(self)
        self.logins = Keys(self)
        self.said = Logs(self)
        self.bills = Bills(self)
        self.parts = [self.catalog, self.logins, self.said, self.bills]
        for n in range(int(self.amount("foreign"))):
            self._make_pod(
                self.catalog.stock[0],
                0,
                {"name": f"theirs-{n}", "image": "somebody/else"},
                FOREIGN,
                None,
            )

    # -- its own words -----------------------------------------------------------------------------

    def problem(self, status: int, code: str, message: str) -> Reply:
        return Reply(
            status,
            {"title": code.replace("_", " ").capitalize(), "status": status, "detail": message},
            PROBLEM,
        )

    def malformed_reply(self) -> Reply:
        return self.problem(422, "unprocessable_entity", "the body is no JSON object")

    def throttle_reply(self, route: Route) -> Reply:
        reply = self.problem(429, "too_many_requests", "rate limit exceeded")
        return reply._replace(headers={**reply.headers, "retry-after": "1"})

    def decorate(self, reply: Reply) -> Reply:
        if reply.status == 401:
            return reply
        left = 0 if reply.status == 429 else 59
        limits = {
            "ratelimit": f'"minute";r={left};t=60',
            "ratelimit-policy": '"minute";q=60;w=60, "hour";q=3000;w=3600, "day";q=50000;w=86400',
        }
        allow = {"allow": "GET, POST, PATCH, PUT, DELETE"} if reply.status == 405 else {}
        return reply._replace(headers={**reply.headers, **limits, **allow})

    def happen(self, machine: Pod, what: str) -> None:
        if what == "starting" and machine.status == "PROVISIONING":
            machine.status = "STARTING"
            self.said.says(machine, "system", f"pulling {machine.body.get('image')}")
        elif what == "up" and machine.status in ("PROVISIONING", "STARTING"):
            self._up(machine)
        elif what == f"ssh {machine.generation}" and machine.status == "RUNNING":
            machine.port = 10_000 + (int(machine.id, 36) + 7919 * machine.generation) % 50_000
        elif what == "preempted" and machine.up:
            self._stop(machine, "preempted")

    def _up(self, machine: Pod) -> None:
        if machine.fails:
            machine.status = "ERROR"
            self.said.says(machine, "system", "error creating container: OCI runtime create failed")
            self._rates(machine)
            self.account.note("failed", machine)
            return
        machine.status, machine.up, machine.started = "RUNNING", True, self.account.now
        machine.generation += 1
        self.said.says(machine, "system", "start container")
        self.said.says(machine, "container", "ready")
        self._rates(machine)
        self.account.note("started", machine)
        # Tests with a short boot do not wait long for SSH, either.
        until_ssh = min(SSH, 2 * self.amount("boot", BOOT))
        self.account.later(machine, until_ssh, f"ssh {machine.generation}")

    def boot(self, machine: Pod) -> Boot | None:
        """Return the boot data of a pod: the key in PUBLIC_KEY, and `args` as the boot script."""
        if machine.by == FOREIGN:
            return None
        given = {name: str(value) for name, value in document(machine.body.get("env")).items()}
        own = {
            "RUNPOD_POD_ID": machine.id,
            "RUNPOD_API_KEY": f"pod-{machine.id}",
            "RUNPOD_GPU_COUNT": str(machine.has),
        }
        keys = (given["PUBLIC_KEY"],) if "PUBLIC_KEY" in given else ()
        gpu = machine.gpu or self.catalog.stock[0]
        mount = document(document(machine.body.get("mounts")).get("persistent"))
        path = str(mount.get("path") or "")
        # A mount outside the home has no counterpart in a directory.
        kept = (path.removeprefix(f"{HOME}/"),) if path.startswith(f"{HOME}/") else ()
        args = str(machine.body.get("args") or "")
        return Boot(
            keys,
            (*given.items(), *own.items()),
            args,
            gpu.id,
            machine.has,
            gpu.memory * 954,
            kept=kept,
        )

    def own_keys(self, machine: str) -> tuple[str, ...]:
        return (f"pod-{machine}",) if machine in self.account.machines else ()

    def halt(self, machine: Pod) -> None:
        if document(machine.body.get("mounts")).get("network"):
            self._stop(machine, "stopped")
        else:
            self._end(machine, "provider")

    # -- pods --------------------------------------------------------------------------------------

    def create(self, call: Call) -> Reply:
        wrong = _bad_pod(call.fields)
        if wrong:
            return self.unfit(wrong)
        asked = document(call.fields.get("gpu"))
        gpu = self.catalog.find(asked.get("id"))
        count = int(number(asked.get("count"), 1))
        if call.fields.get("gpu") is not None and gpu is None:
            return self.unfit([f"gpu.id: {asked.get('id')!r} is no GPU type"])
        if gpu is not None and call.luck.strikes("dearer"):
            gpu = self.catalog.raise_price(gpu)
        price = _hourly_price(gpu, count, call.fields.get("cloud"))
        if self.account.credit < price:
            return self.problem(
                402, "payment_required", "Your balance must cover at least one hour of this pod."
            )
        if gpu is not None:
            is_stocked = count <= gpu.most and self.catalog.free(gpu) >= count
            if not is_stocked or call.luck.strikes("taken"):
                return self.problem(
                    400,
                    "bad_request",
                    "There are no instances currently available with the requested specifications.",
                )
        wanted = array(call.fields.get("dataCenterIds"))
        if wanted and _choose_center(wanted) is None:
            return self.problem(400, "bad_request", "None of the data centers exists.")
        made = self._make_pod(gpu, count, call.fields, call.by, call)
        made.price = price
        self._rates(made)
        return Reply(201, self._show_pod(made))

    def unfit(self, errors: list[str]) -> Reply:
        reply = self.problem(422, "unprocessable_entity", "The request body is invalid.")
        return reply._replace(body={**document(reply.body), "errors": errors})

    def _make_pod(
        self, gpu: Gpu | None, count: int, body: Document, by: str, call: Call | None
    ) -> Pod:
        name = hashlib.sha256(f"{self.seed}/{len(self.account.machines)}".encode()).hexdigest()[:14]
        center = _choose_center(array(body.get("dataCenterIds"))) or CENTERS[0][0]
        made = Pod(
            id=name,
            mark=str(body.get("name", "")),
            by=by,
            gpu=gpu,
            count=count,
            price=0.0,
            body=body,
            center=center,
        )
        self.account.enter(made, call.luck if call else None)
        made.has = count
        if call is not None and count > 1 and call.luck.strikes("fewer"):
            made.has -= 1
        self.account.later(made, 2, "starting")
        self.account.boots(made)
        return made

    def _rates(self, pod: Pod) -> None:
        """Set a pod's billing rates: GPUs while it runs, and disks by its status."""
        going = pod.status in ("PROVISIONING", "STARTING", "RUNNING")
        disk = (pod.disk + pod.volume) * DISK if going else pod.volume * DISK * 2
        self.account.bill(pod, gpu=pod.price if pod.status == "RUNNING" else 0.0, disk=disk / MONTH)

    def listing(self, call: Call) -> Reply:
        return Reply(200, {"pods": [self._show_pod(pod) for pod in self.account.list_machines()]})

    def find_pod(self, call: Call) -> Pod:
        """Return the pod named in a request. Raises Refused if it does not exist."""
        found = self.account.find_living(call.names["id"])
        if found is None:
            raise Refused(self.problem(404, "not_found", f"pod {call.names['id']} was not found"))
        return found

    def show(self, call: Call) -> Reply:
        shown = self._show_pod(self.find_pod(call))
        return Reply(200, {**shown, "cost": call.luck.price(number(shown["cost"]))})

    def update(self, call: Call) -> Reply:
        pod = self.find_pod(call)
        fixed = {"gpu", "cpu", "cloud", "dataCenterIds", "startJupyter", "startSsh"}
        wrong = _check_fields(call.fields, {*KNOWN, "locked"} - fixed)
        if wrong:
            return self.unfit(wrong)
        pod.body = {**pod.body, **call.fields}
        pod.mark = str(pod.body.get("name", ""))
        self._rates(pod)
        return Reply(200, self._show_pod(pod))

    def destroy(self, call: Call) -> Reply:
        pod = self.find_pod(call)
        if self.is_own(call.by, pod.id):
            return self.problem(403, "forbidden", "The key of a pod cannot delete it.")
        if self.account.is_held(pod) or pod.body.get("locked") is True:
            return self.problem(409, "conflict", "The pod cannot be deleted now.")
        if self.account.is_doomed(pod, call.luck):
            self._end(pod, call.by)
        return Reply(204)

    def _end(self, pod: Pod, by: str) -> None:
        pod.status, pod.has = "TERMINATED", 0
        self.account.end(pod, by)

    def action(self, call: Call) -> Reply:
        pod = self.find_pod(call)
        wanted = call.fields.get("action")
        known = ("start", "stop", "restart", "terminate")
        if call.fields.keys() != {"action"} or wanted not in known:
            return self.unfit(["action: must be one of start, stop, restart, terminate"])
        if wanted not in ACTIONS[pod.status]:
            return self.problem(409, "conflict", f"A pod that is {pod.status} cannot {wanted}.")
        if wanted == "terminate":
            return self.destroy(call)
        if wanted == "start":
            if self.account.credit <= 0:
                return self.problem(402, "payment_required", "Your balance is empty.")
            # Other pods may have taken its GPUs meanwhile.
            pod.has = 0
            if pod.gpu is not None:
                pod.has = min(pod.count, max(0, self.catalog.free(pod.gpu)))
            if call.luck.strikes("fewer"):
                pod.has = 0
            pod.status = "STARTING"
            self._rates(pod)
            self.account.boots(pod, 0.4)
        if wanted == "stop":
            self._stop(pod, "stopped", call.by)
        if wanted == "restart":
            pod.status, pod.up, pod.port = "STARTING", False, None
            self._rates(pod)
            self.account.boots(pod, 0.2)
        return Reply(200, self._show_pod(pod))

    def _stop(self, pod: Pod, event: str, by: str = "") -> None:
        pod.status, pod.up, pod.port, pod.started, pod.has = "EXITED", False, None, None, 0
        self._rates(pod)
        self.said.says(pod, "system", "stop container")
        self.account.note(event, pod, by)

    def _address(self, pod: Pod) -> tuple[str, int | None]:
        """Return a pod's host and public SSH port, which is known some seconds after it runs."""
        if self.ports is None:
            return "203.0.113.40", pod.port
        return "127.0.0.1", self.ports.get(pod.id) if pod.port else None

    def _show_ssh(self, pod: Pod, ports: Sequence[str]) -> Document:
        host, port = self._address(pod)
        shown: dict[str, object] = {"proxy": None, "direct": None}
        if pod.status == "RUNNING":
            shown["proxy"] = {
                "host": "ssh.runpod.example",
                "port": 22,
                "username": f"{pod.id}-6441",
                "command": f"ssh {pod.id}-6441@ssh.runpod.example",
            }
        if port is not None and "22/tcp" in ports:
            shown["direct"] = {
                "host": host,
                "port": port,
                "username": "root",
                "command": f"ssh root@{host} -p {port}",
            }
        return shown

    def _show_runtime(self, pod: Pod, ports: Sequence[str]) -> Document:
        host, port = self._address(pod)
        uptime = 0 if pod.started is None else int(self.account.now - pod.started)
        return {
            "uptime": uptime,
            "gpus": [{"util": 0, "memoryUtil": 0}] * pod.has,
            "cpu": {"util": 0},
            "memory": {"util": 0},
            "ports": [_show_port(each, port, host) for each in ports],
        }

    def _show_pod(self, pod: Pod) -> Document:
        body, running = pod.body, pod.status == "RUNNING"
        ports, asked = ["22/tcp"], body.get("ports")
        if isinstance(asked, list):
            ports = [str(each) for each in asked]
        cuda = pod.cuda if pod.gpu else None
        started = None if pod.started is None else date(pod.started)
        shown: dict[str, object] = {
            "id": pod.id,
            "name": pod.mark,
            "status": pod.status,
            "actions": list(ACTIONS[pod.status]),
            "image": body.get("image") or "runpod/base",
            "args": body.get("args") or "",
            "disk": int(pod.disk),
            "mounts": document(body.get("mounts")),
            "ports": ports,
            "env": document(body.get("env")),
            "registry": body.get("registry"),
            "cloud": body.get("cloud") or "SECURE",
            "dataCenterId": pod.center,
            "cudaVersion": cuda,
            "ssh": self._show_ssh(pod, ports),
            "template": body.get("templateId"),
            "cost": 0.0,
            "locked": body.get("locked") is True,
            "globalNetworking": {"enabled": body.get("globalNetworking") is True},
            "runtime": None,
            "createdAt": date(pod.created),
            "startedAt": started,
        }
        if running:
            shown["cost"] = pod.price
            shown["runtime"] = self._show_runtime(pod, ports)
        cpu = document(body.get("cpu"))
        if pod.gpu is not None:
            if pod.has or not running:
                shown["gpu"] = {"id": pod.gpu.id, "count": pod.has or pod.count}
        elif cpu:
            cores = int(number(cpu.get("vcpuCount"), 2))
            shown["cpu"] = {"id": cpu["id"], "vcpuCount": cores, "memory": cores * 2}
        return shown


def _hourly_price(gpu: Gpu | None, count: int, cloud: object) -> float:
    """Return the price of a pod in US dollars per hour. Without a GPU it is a CPU pod."""
    if gpu is None:
        return 0.08
    each = gpu.community if cloud == "COMMUNITY" else gpu.secure
    return each * count


def _show_port(port: str, public: int | None, host: str) -> Document:
    """Return one of a pod's ports, which is written as in `22/tcp`."""
    private, _, kind = port.partition("/")
    return {"private": int(private), "public": public, "type": kind, "ip": host}


def _choose_center(wanted: Sequence[object]) -> str | None:
    """Return the first of the wanted data centers that exists."""
    known = [name for name, _ in CENTERS]
    return next((str(each) for each in wanted if each in known), None)


SIZES: Final = ("hour", "day", "week", "month", "year")


def _bad_pod(body: Document) -> list[str]:
    """Return the validation errors of a pod creation request, as RunPod reports them."""
    found = _check_fields(body, KNOWN)
    if not body.get("name"):
        found.append("name: is required")
    if not body.get("image") and not body.get("templateId"):
        found.append("image: is required")
    if (body.get("gpu") is None) == (body.get("cpu") is None):
        found.append("gpu: give exactly one of gpu and cpu")
    if body.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY"):
        found.append("cloud: must be one of SECURE, COMMUNITY")
    gpu, cpu = document(body.get("gpu")), document(body.get("cpu"))
    if body.get("cpu") is not None and not _is_cpu(cpu):
        found.append("cpu: is not valid")
    if body.get("gpu") is not None and not _is_gpu(gpu):
        found.append("gpu: is not valid")
    if "allowedCudaVersions" in gpu and "minCudaVersion" in gpu:
        found.append("gpu: give allowedCudaVersions or minCudaVersion")
    return found


def _is_cpu(cpu: Document) -> bool:
    if not isinstance(cpu.get("id"), str) or not cpu.keys() <= {"id", "vcpuCount"}:
        return False
    return _is_whole_number(cpu.get("vcpuCount", 2), 1)


def _is_gpu(gpu: Document) -> bool:
    known = {"id", "count", "allowedCudaVersions", "minCudaVersion"}
    if not isinstance(gpu.get("id"), str) or not gpu.keys() <= known:
        return False
    return _is_whole_number(gpu.get("count", 1), 1)


def _check_fields(body: Document, known: frozenset[str] | set[str]) -> list[str]:
    """Return the errors for unknown fields and for fields of the wrong type."""
    found = [f"{name}: is not known" for name in body if name not in known]
    found += _check_texts(body)
    for name in ("startSsh", "startJupyter", "globalNetworking", "locked"):
        if not isinstance(body.get(name, True), bool):
            found.append(f"{name}: must be true or false")
    if not _is_environment(body.get("env", {})):
        found.append("env: must be an object of texts")
    if not _is_whole_number(body.get("disk", 1), 1):
        found.append("disk: must be a whole number of at least 1")
    if not _are_texts(body.get("ports", []), PORT):
        found.append("ports: must be a list such as 22/tcp")
    if not isinstance(body.get("dataCenterIds", []), list):
        found.append("dataCenterIds: must be a list")
    return found + _check_mounts(body.get("mounts", {}))


def _check_texts(body: Document) -> list[str]:
    found: list[str] = []
    for name in ("name", "image", "args", "registry", "templateId"):
        if not isinstance(body.get(name, ""), str):
            found.append(f"{name}: must be text")
    for name in ("name", "image", "templateId"):
        if body.get(name) == "":
            found.append(f"{name}: must not be empty")
    return found


def _is_environment(value: object) -> bool:
    """Return True for an object whose values are all texts."""
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _are_texts(value: object, pattern: re.Pattern[str]) -> bool:
    """Return True for a list of texts that all match a pattern."""
    if not isinstance(value, list):
        return False
    return all(isinstance(each, str) and pattern.fullmatch(each) for each in value)


def _check_mounts(mounts: object) -> list[str]:
    held = document(mounts)
    if not isinstance(mounts, dict) or held.keys() - {"persistent", "network"} or len(held) > 1:
        return ["mounts: give persistent or network"]
    if "persistent" in held and not _is_disk(document(held["persistent"])):
        return ["mounts.persistent: size must be at least 10"]
    if "network" in held and not _are_volumes(held["network"]):
        return ["mounts.network: must be a list of volumeId and path"]
    return []


def _is_disk(mount: Document) -> bool:
    if mount.keys() != {"size", "path"}:
        return False
    return _is_whole_number(mount["size"], 10) and isinstance(mount["path"], str)


def _are_volumes(mounts: object) -> bool:
    return isinstance(mounts, list) and all(_is_volume(document(each)) for each in mounts)


def _is_volume(mount: Document) -> bool:
    if mount.keys() != {"volumeId", "path"}:
        return False
    return all(isinstance(value, str) for value in mount.values())


def _is_whole_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31
