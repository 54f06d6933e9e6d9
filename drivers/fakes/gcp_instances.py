"""What Google Compute Engine has to rent, what an instance is, and how a request for one and a filter of a listing are read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from ..gcp_prices import CARDS, SHAPES, SHIPPED, T4, V100, Shape
from .account import Machine
from .world import Document, document, number

ROOT: Final = "https://www.googleapis.com/compute/v1"
NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
ZONES: Final = (
    "us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "us-east1-b", "us-east1-c", "us-east1-d", "europe-west4-a", "europe-west4-b"
)  # fmt: skip
QUOTA: Final = 8.0
INSERTING: Final = 4.0
"""Seconds until an insertion has failed or is done, where the fault `takes` does not say."""
NOTICE: Final = 30.0
"""Seconds between the notice of a preemption and the end."""
FOREIGN: Final = "somebody"
"""Who made what is in the project from the start.  No one logs in there."""


TYPES: Final[Mapping[str, Shape]] = {
    "e2-standard-4": Shape(4, 16_384),
    **{f"n1-standard-{cpus}": Shape(cpus, cpus * 3840) for cpus in (8, 16, 32)},
    **{name: shape for name, shape in SHAPES.items() if not shape.attached},
}
"""Machine types, with the GPUs that they come with."""
BARE: Final = 0.05
"""US dollars an hour for a processor of a machine that has no GPU."""
GPUS: Final = tuple(CARDS)
UNLISTED: Final = "NVIDIA_H100_GPUS"
"""A quota that a region does not list: on demand it has a metric of its own elsewhere."""


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
    life: int = 0  # how often it has been started
    began: float | None = None
    noticed: bool = False  # it is being preempted, and its metadata says so
    host: str = ""  # where the world listens that it asks for its metadata
    attributes: dict[tuple[str, str], str] = field(default_factory=dict)

    def item(self, key: str) -> str:
        """A value of its metadata; empty where there is none."""
        return next(
            (f"{each.get('value', '')}" for each in self.items if each.get("key") == key), ""
        )

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
        disks = self.body.get("disks")
        rows = disks if isinstance(disks, list) else []
        sizes = [
            whole(document(document(disk).get("initializeParams")).get("diskSizeGb") or 10)
            for disk in rows
        ]
        return sum(sizes) or 10.0


def list_price(made: Instance) -> float:
    """US dollars an hour for an instance that runs, without its disks."""
    kind = last(made.body.get("machineType"))
    rate = (
        SHIPPED.price(
            made.zone[:-2], f"{kind}+{made.gpus}x{made.gpu}" if kind.startswith("n1-") else kind
        )
        if made.gpus
        else None
    )
    return made.type.cpus * BARE if rate is None else rate.spot if made.spot else rate.on_demand


def show_instance(made: Instance, address: str) -> Document:
    """An instance as the API shows it."""
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
    """RFC 3339, as the API writes times."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def fingerprint(made: Instance) -> str:
    """Another one after each change of labels or metadata; base64."""
    return hashlib.sha256(f"{made.id}/{made.changes}".encode()).hexdigest()[:11] + "="


def holds(made: Instance) -> bool:
    """Whether an instance has its GPUs, so that no other may."""
    return made.status != "TERMINATED"


def whole(value: object) -> float:
    """An int64, which the API writes as text."""
    return (
        float(value)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16
        else number(value)
    )


def last(value: object) -> str:
    """The name at the end of a resource's address."""
    return value.rpartition("/")[2] if isinstance(value, str) else ""


def parse_order(body: Document) -> tuple[Shape | None, str, int, str]:
    """The machine type, GPU and number of GPUs that a new instance asks for, or the field that is wrong."""
    name = body.get("name")
    kind = TYPES.get(last(body.get("machineType")))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None, "", 0, "name"
    if kind is None:
        return None, "", 0, "machineType"
    gpu, gpus = kind.gpu, kind.gpus
    extra = body.get("guestAccelerators")
    for each in extra if isinstance(extra, list) else []:
        gpu, gpus = (
            last(document(each).get("acceleratorType")),
            int(number(document(each).get("acceleratorCount"), 1)),
        )
        if (
            gpu not in (T4, V100)
            or not last(body.get("machineType")).startswith("n1-")
            or not 1 <= gpus <= 8
        ):
            return None, "", 0, "guestAccelerators"
    scheduling = document(body.get("scheduling"))
    if gpus and scheduling.get("onHostMaintenance") != "TERMINATE":
        return None, "", 0, "scheduling.onHostMaintenance"
    if scheduling.get("maxRunDuration") is not None and scheduling.get(
        "instanceTerminationAction"
    ) not in ("STOP", "DELETE"):
        return None, "", 0, "scheduling.instanceTerminationAction"
    labels = document(body.get("labels"))
    if not all(
        re.fullmatch(r"[a-z][-_a-z0-9]{0,62}", key)
        and re.fullmatch(r"[-_a-z0-9]{0,63}", str(value))
        for key, value in labels.items()
    ):
        return None, "", 0, "labels"
    disks = body.get("disks", [])
    if not isinstance(disks, list) or not disks:
        return None, "", 0, "disks"
    return kind, gpu, gpus, ""


def compile_filter(text: str) -> Callable[[Instance], bool]:
    """What a listing's filter lets through: `labels.KEY=VALUE`, `labels.KEY:*`, `name=VALUE` and `status=VALUE`, with AND.  Raises ValueError."""
    tests: list[tuple[str, str]] = []
    for part in re.split(r"\s+AND\s+|(?<=\))\s*(?=\()", text.strip()) if text.strip() else []:
        found = re.fullmatch(
            r"\(?\s*(labels\.[-_a-z0-9]+|name|status)\s*(?:=|:|\beq\b)\s*\"?([-\w*]+)\"?\s*\)?",
            part,
        )
        if found is None:
            raise ValueError(f"invalid filter: {part}")
        tests.append((found[1], found[2]))

    def passes(made: Instance) -> bool:
        values = {
            "name": made.name,
            "status": made.status,
            **{f"labels.{key}": str(value) for key, value in made.labels.items()},
        }
        return all(
            name in values and (wanted == "*" or values[name] == wanted) for name, wanted in tests
        )

    return passes
