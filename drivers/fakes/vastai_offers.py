"""The market of Vast.ai, drawn from a seed, and the filters and sort orders of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple

from .world import Document, document, number

SEARCHED: Final = 64
"""Number of offers in a search without a limit."""
DAY: Final = 86_400.0
DEFAULTS: Final[Mapping[str, Document]] = MappingProxyType(
    {"verified": {"eq": True}, "rentable": {"eq": True}, "rented": {"eq": False}}
)
CONTROLS: Final = frozenset({"limit", "type", "order", "allocated_storage", "disable_bundling"})
ALIASES: Final = MappingProxyType(
    {"dphtotal": "dph_total", "reliability2": "reliability", "ask_contract_id": "id"}
)
GPUS: Final = (  # name, memory in MB, $/h for one, compute capability, bandwidth in GB/s, TFLOP/s
    ("RTX 3090", 24576, 0.18, 860, 780.0, 35.6),
    ("RTX 4090", 24564, 0.36, 890, 860.0, 82.6),
    ("RTX 5090", 32607, 0.55, 1200, 1510.0, 104.8),
    ("RTX A6000", 49140, 0.48, 860, 640.0, 38.7),
    ("L40S", 46068, 0.72, 890, 690.0, 91.6),
    ("A100 SXM4", 81920, 0.98, 800, 1600.0, 19.5),
    ("H100 SXM", 81559, 1.95, 900, 2800.0, 66.9),
    ("H200", 143771, 2.60, 900, 4000.0, 66.9),
)
PLACES: Final = (
    "Washington, US",
    "Oregon, US",
    "Quebec, CA",
    "Sweden, SE",
    "Czechia, CZ",
    "Taiwan, TW",
    "Poland, PL",
    "Japan, JP",
)


class Ask(NamedTuple):
    """A machine offered for rent on the fake Vast.ai market.

    `price` is US dollars per hour without storage.  `memory` is in MB, `disk` in GB, network speeds
    in Mb/s.
    """

    id: int
    machine: int
    gpu: str
    gpus: int
    vram: int
    price: float
    capability: int
    bandwidth: float
    flops: float
    cores: int
    memory: int
    disk: float
    storage: float  # US dollars a GB and month
    place: str
    reliability: float
    verified: bool
    datacenter: bool
    up: float
    down: float
    cuda: float
    longest: float  # seconds

    @property
    def bid(self) -> float:
        """Minimum bid for an interruptible instance in US dollars per hour."""
        return round(self.price * 0.55, 4)

    def storage_price(self, disk: float) -> float:
        """Return the storage price of `disk` GB in US dollars per hour."""
        return disk * self.storage / 30 / 24


def draw(luck: Random, name: int) -> Ask:
    """Generate a random offer with the ID `name`."""
    gpu, vram, price, capability, bandwidth, flops = luck.choice(GPUS)
    count = luck.choice((1, 1, 1, 2, 4, 8))
    datacenter = luck.random() < 0.4
    return Ask(
        name, 20_000 + name % 10_000, gpu, count, vram, round(price * count * luck.uniform(0.85, 1.3), 4), capability, bandwidth, flops * count,
        luck.choice((16, 32, 64, 128)), luck.choice((64_000, 128_000, 257_000, 515_000)), round(luck.uniform(120, 2000), 1),
        round(luck.uniform(0.08, 0.3), 3), luck.choice(PLACES), round(luck.uniform(0.93, 0.9999), 4), luck.random() < 0.85, datacenter,
        round(luck.uniform(90, 4000), 1), round(luck.uniform(90, 6000), 1), luck.choice((12.4, 12.8, 13.0)), round(luck.uniform(2, 90) * DAY, 1),
    )  # fmt: skip


def hardware(ask: Ask, gpus: int) -> Document:
    """Return the hardware fields shared by an offer and its instance."""
    return {
        "machine_id": ask.machine, "host_id": ask.machine // 3, "bundle_id": ask.id + 5, "hosting_type": int(ask.datacenter), "num_gpus": gpus,
        "gpu_name": ask.gpu, "gpu_ram": ask.vram, "gpu_total_ram": ask.vram * gpus, "gpu_frac": 1.0, "gpu_arch": "nvidia", "gpu_lanes": 16,
        "gpu_mem_bw": ask.bandwidth, "compute_cap": ask.capability, "cuda_max_good": ask.cuda, "driver_version": "580.95.05", "bw_nvlink": 0.0,
        "cpu_name": "AMD EPYC 7713 64-Core Processor", "cpu_cores": ask.cores, "cpu_cores_effective": float(ask.cores), "cpu_ram": ask.memory,
        "cpu_arch": "amd64", "disk_space": ask.disk, "disk_bw": 2500.0, "disk_name": "nvme", "inet_up": ask.up, "inet_down": ask.down,
        "inet_up_cost": 0.005, "inet_down_cost": 0.005, "direct_port_count": 64, "pci_gen": 4.0, "pcie_bw": 24.1, "mobo_name": "ROMED8-2T",
        "os_version": "22.04", "min_bid": ask.bid, "dlperf": ask.flops * 2, "dlperf_per_dphtotal": ask.flops * 2 / ask.price,
        "total_flops": ask.flops,
        "flops_per_dphtotal": ask.flops / ask.price, "score": ask.flops / ask.price * ask.reliability, "storage_cost": ask.storage,
        "storage_total_cost": ask.storage_price(8.0), "vram_costperhour": ask.price / max(1, ask.vram * ask.gpus), "static_ip": ask.datacenter,
        "public_ipaddr": f"203.0.113.{ask.id % 250}", "geolocation": ask.place, "geolocode": ask.id % 1000, "reliability2": ask.reliability,
        "verification": "verified" if ask.verified else "unverified", "webpage": None, "logo": "", "credit_discount_max": 0.1,
        "gpu_display_active": False,
    }  # fmt: skip


def row(ask: Ask, bid: bool, disk: float, now: float, rentable: bool) -> Document:
    """Return an offer as a search result, with the price of `disk` GB."""
    hourly, stored = ask.bid if bid else ask.price, ask.storage_price(disk)
    costs = {
        "gpuCostPerHour": hourly,
        "diskHour": stored,
        "totalHour": hourly + stored,
        "discountTotalHour": 0,
        "discountedTotalPerHour": hourly + stored,
    }
    return {
        **hardware(ask, ask.gpus), "id": ask.id, "ask_contract_id": ask.id, "dph_base": hourly, "dph_total": hourly + stored, "is_bid": bid,
        "gpu_max_power": 450, "gpu_max_temp": 85, "has_avx": 1, "cpu_ghz": 3.2, "hostname": None, "bundled_results": None, "driver_vers": 580095005,
        "rented": False, "rentable": rentable, "external": None, "start_date": now - 30 * DAY, "vms_enabled": False,
        "expected_reliability": ask.reliability, "reliability": ask.reliability, "end_date": now + ask.longest, "duration": ask.longest,
        "vericode": int(ask.verified), "discounted_dph_total": hourly + stored, "resource_type": "gpu", "cluster_id": None, "rn": 1,
        "search": costs, "instance": {**costs, "gpuCostPerHour": 0},
    }  # fmt: skip


def search(rows: list[Document], asked: Document) -> list[Document]:
    """Return the offers that pass the filters, sorted as requested.

    Raises KeyError or TypeError for an invalid filter.
    """
    filters: dict[str, object] = dict(DEFAULTS)
    for name, tests in asked.items():
        if name not in CONTROLS:
            filters[name] = tests
    kept = [each for each in rows if passes_all(each, filters)]
    order = asked.get("order")
    if not isinstance(order, list):
        order = [["score", "desc"]]
    for pair in reversed(order):
        if isinstance(pair, list) and len(pair) == 2:
            kept.sort(key=partial(_sort_key, pair[0]), reverse=pair[1] == "desc")
    return kept


def passes_all(row: Document, filters: Document) -> bool:
    """Return True if an offer passes all filters.

    Raises KeyError for an unknown operator, TypeError for values that cannot be compared.
    """
    return all(_passes(row, name, document(tests)) for name, tests in filters.items())


def _passes(row: Document, name: str, tests: Document) -> bool:
    value = _value(row, name)
    return all(_compare(operator, value, wanted) for operator, wanted in tests.items())


def _value(row: Document, name: str) -> object:
    if name == "verified":
        return row["verification"] == "verified"
    if name == "datacenter":
        return row["hosting_type"] == 1
    if name in ("external", "has_avx"):
        return bool(row[name])
    if name in ("gpu_ram_GB", "cpu_ram_GB"):
        return number(row[name[:-3]]) / 1000
    return row.get(ALIASES.get(name, name))


def _same(value: object, wanted: object) -> bool:
    """Compare a value with a filter.  Numbers may be text, as the official client sends them.

    A two-letter country code also matches every place in that country.
    """
    if isinstance(value, (int, float)) and isinstance(wanted, str):
        if str(value).lower() == wanted.lower():
            return True
        return not isinstance(value, bool) and value == _number(wanted)
    if value == wanted:
        return True
    if not isinstance(value, str) or not isinstance(wanted, str):
        return False
    return len(wanted) == 2 and value.endswith(f", {wanted}")


def _number(value: object) -> float:
    """Parse a number, which may be text; NaN if it is invalid."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else math.nan
    except ValueError:
        return math.nan


def _among(value: object, wanted: object) -> bool:
    return isinstance(wanted, list) and any(_same(value, each) for each in wanted)


def _compare(operator: str, value: object, wanted: object) -> bool:
    match operator:
        case "eq":
            return _same(value, wanted)
        case "neq":
            return not _same(value, wanted)
        case "gt":
            return _number(value) > _number(wanted)
        case "gte":
            return _number(value) >= _number(wanted)
        case "lt":
            return _number(value) < _number(wanted)
        case "lte":
            return _number(value) <= _number(wanted)
        case "in":
            return _among(value, wanted)
        case "notin":
            return not _among(value, wanted)
    raise KeyError(operator)


def _sort_key(name: str, row: Document) -> tuple[bool, float, str]:
    value = row.get(ALIASES.get(name, name))
    return value is not None, number(value), value if isinstance(value, str) else ""
