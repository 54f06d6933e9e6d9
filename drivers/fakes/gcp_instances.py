"""Machine types, prices and instances of Google Compute Engine, and parsers for orders and filters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from ..gcp_prices import CARDS, SHAPES, SHIPPED, T4, V100, Shape
from .account import Machine
from .world import Document, array, document, number, parse_digits

ROOT: Final = "https://www.googleapis.com/compute/v1"
NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
ZONES: Final = (
    "us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "us-east1-b", "us-east1-c", "us-east1-d", "europe-west4-a", "europe-west4-b"
)  # fmt: skip
QUOTA: Final = 8.0
INSERTING: Final = 4.0
"""Default seconds until an insertion is done or has failed; the fault `takes` overrides it."""
NOTICE: Final = 30.0
"""Default seconds between a preemption notice and the preemption; the fault `notice` overrides it."""
FOREIGN: Final = "somebody"
"""Owner of the machines that exist from the start (fault `foreign`).  These accept no logins."""


_N1: Final = {f"n1-standard-{cpus}": Shape(cpus, cpus * 3840) for cpus in (8, 16, 32)}
_WITH_GPUS: Final = {name: shape for name, shape in SHAPES.items() if not shape.attached}
TYPES: Final[Mapping[str, Shape]] = {"e2-standard-4": Shape(4, 16_384), **_N1, **_WITH_GPUS}
"""Machine type -> CPUs, memory and included GPUs."""
BARE: Final = 0.05
"""US dollars per hour and CPU, for machines without GPUs."""
GPUS: Final = tuple(CARDS)
UNLISTED: Final = "NVIDIA_H100_GPUS"
"""A quota metric that no region lists.  On-demand H100s have a metric of their own elsewhere."""


@dataclass(kw_only=True)
class Instance(Machine):
    name: str
    zone: str
    body: Document
    type: Shape
    gpu: str
    gpus: int
    status: str = "PROVISIONING"
    labels: Document = field(default_factory=dict)
    items: list[Document] = field(default_factory=list)
    changes: int = 0
    life: int = 0  # number of starts
    began: float | None = None
    noticed: bool = False  # has a preemption notice in its metadata
    host: str = ""  # address of the World, as its metadata server
    attributes: dict[tuple[str, str], str] = field(default_factory=dict)

    def item(self, key: str) -> str:
        """Return a metadata value of the instance, or "" if missing."""
        for each in self.items:
            if each.get("key") == key:
                return f"{each.get('value', '')}"
        return ""

    @property
    def scheduling(self) -> Document:
        return document(self.body.get("scheduling"))

    @property
    def spot(self) -> bool:
        return (
            self.scheduling.get("provisioningModel") == "SPOT"
            or self.scheduling.get("preemptible") is True
        )

    @property
    def disk(self) -> float:
        sizes: list[float] = []
        for disk in array(self.body.get("disks")):
            parameters = document(document(disk).get("initializeParams"))
            sizes.append(whole(parameters.get("diskSizeGb") or 10))
        return sum(sizes) or 10.0


def list_price(made: Instance) -> float:
    """Return the hourly price of a running instance without disks, in US dollars."""
    name = last(made.body.get("machineType"))
    if name.startswith("n1-"):
        name = f"{name}+{made.gpus}x{made.gpu}"
    rate = SHIPPED.price(made.zone[:-2], name) if made.gpus else None
    if rate is None:
        return made.type.cpus * BARE
    return rate.spot if made.spot else rate.on_demand


def quota_metric(gpu: str, spot: bool) -> str:
    """Return the name of a region's quota for a GPU type."""
    metric = CARDS[gpu].metric
    return f"PREEMPTIBLE_{metric}" if spot else metric


def show_instance(made: Instance, address: str) -> Document:
    """Return an instance in the API's JSON form."""
    zone = f"{ROOT}/projects/fake/zones/{made.zone}"
    nic = {
        "kind": "compute#networkInterface", "name": "nic0", "network": f"{ROOT}/projects/fake/global/networks/default",
        "networkIP": address if address.startswith("127.") else f"10.128.0.{int(made.id) % 250}",
        "accessConfigs": [{"kind": "compute#accessConfig", "type": "ONE_TO_ONE_NAT", "name": "External NAT", "natIP": address,
                           "networkTier": "PREMIUM"}],
    }  # fmt: skip
    disk = {"kind": "compute#attachedDisk", "type": "PERSISTENT", "mode": "READ_WRITE", "boot": True, "autoDelete": True, "index": 0,
            "source": f"{zone}/disks/{made.name}", "deviceName": "persistent-disk-0", "diskSizeGb": str(int(made.disk))}  # fmt: skip
    found: dict[str, object] = {
        "kind": "compute#instance", "id": made.id, "name": made.name, "status": made.status, "zone": zone,
        "selfLink": f"{zone}/instances/{made.name}",
        "machineType": f"{zone}/machineTypes/{last(made.body.get('machineType')) or 'e2-standard-4'}", "creationTimestamp": date(made.created),
        "labels": made.labels, "labelFingerprint": fingerprint(made), "networkInterfaces": [nic], "disks": [disk],
        "metadata": {"kind": "compute#metadata", "fingerprint": fingerprint(made), "items": made.items},
        "scheduling": {"onHostMaintenance": "TERMINATE", "automaticRestart": False, "provisioningModel": "STANDARD", **made.scheduling},
        "cpuPlatform": "Intel Cascade Lake", "startRestricted": False, "deletionProtection": made.body.get("deletionProtection") is True,
    }  # fmt: skip
    if made.gpus:
        found["guestAccelerators"] = [
            {
                "acceleratorType": f"{zone}/acceleratorTypes/{made.gpu}",
                "acceleratorCount": made.gpus,
            }
        ]
    if made.began is not None:
        found["lastStartTimestamp"] = date(made.began)
    return found


def date(at: float) -> str:
    """Format a Unix time as RFC 3339, as the API does."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def fingerprint(made: Instance) -> str:
    """Return the fingerprint of an instance.  It is base64, and changes with labels or metadata."""
    return hashlib.sha256(f"{made.id}/{made.changes}".encode()).hexdigest()[:11] + "="


def holds(made: Instance) -> bool:
    """Return True if an instance occupies its GPUs."""
    return made.status != "TERMINATED"


def whole(value: object) -> float:
    """Parse an int64, which the API writes as text."""
    digits = parse_digits(value, 15) if isinstance(value, str) else None
    return number(value) if digits is None else float(digits)


def last(value: object) -> str:
    """Return the last path component of a resource URL."""
    return value.rpartition("/")[2] if isinstance(value, str) else ""


def parse_order(body: Document) -> tuple[Shape | None, str, int, str]:
    """Parse the machine type, GPU and GPU count of an insert request, or an invalid field's name."""
    name = body.get("name")
    kind = TYPES.get(last(body.get("machineType")))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None, "", 0, "name"
    if kind is None:
        return None, "", 0, "machineType"
    gpu, gpus = kind.gpu, kind.gpus
    takes_gpus = last(body.get("machineType")).startswith("n1-")
    for each in map(document, array(body.get("guestAccelerators"))):
        gpu = last(each.get("acceleratorType"))
        gpus = int(number(each.get("acceleratorCount"), 1))
        if not takes_gpus or gpu not in (T4, V100):
            return None, "", 0, "guestAccelerators"
        if not 1 <= gpus <= 8:
            return None, "", 0, "guestAccelerators"
    scheduling = document(body.get("scheduling"))
    if gpus and scheduling.get("onHostMaintenance") != "TERMINATE":
        return None, "", 0, "scheduling.onHostMaintenance"
    action = scheduling.get("instanceTerminationAction")
    if scheduling.get("maxRunDuration") is not None and action not in ("STOP", "DELETE"):
        return None, "", 0, "scheduling.instanceTerminationAction"
    for key, value in document(body.get("labels")).items():
        if not re.fullmatch(r"[a-z][-_a-z0-9]{0,62}", key):
            return None, "", 0, "labels"
        if not re.fullmatch(r"[-_a-z0-9]{0,63}", str(value)):
            return None, "", 0, "labels"
    disks = body.get("disks", [])
    if not isinstance(disks, list) or not disks:
        return None, "", 0, "disks"
    return kind, gpu, gpus, ""


def compile_filter(text: str) -> Callable[[Instance], bool]:
    """Compile the filter of an instance listing. Raises ValueError.

    Supports `labels.KEY=VALUE`, `labels.KEY:*`, `name=VALUE` and `status=VALUE`, joined by AND.
    """
    tests: list[tuple[str, str]] = []
    parts = re.split(r"\s+AND\s+|(?<=\))\s*(?=\()", text.strip()) if text.strip() else []
    for part in parts:
        found = re.fullmatch(
            r"\(?\s*(labels\.[-_a-z0-9]+|name|status)\s*(?:=|:|\beq\b)\s*\"?([-\w*]+)\"?\s*\)?",
            part,
        )
        if found is None:
            raise ValueError(f"invalid filter: {part}")
        tests.append((found[1], found[2]))

    def passes(made: Instance) -> bool:
        values = {"name": made.name, "status": made.status}
        for key, value in made.labels.items():
            values[f"labels.{key}"] = str(value)
        for name, wanted in tests:
            if name not in values:
                return False
            if wanted not in ("*", values[name]):
                return False
        return True

    return passes
