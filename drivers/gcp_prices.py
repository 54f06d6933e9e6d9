"""Machine types with GPUs on Compute Engine, and their shipped list prices.

The prices of these regions are from public copies of Google's price list at DATE, and were not
compared with a bill.  An account may have discounts, and Spot prices change each month.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

DATE: Final = "2026-11-22"
DISK: Final = 0.10 / 30 / 24
"""Price of a balanced disk in US dollars per GB and hour."""


class Rate(NamedTuple):
    """Prices of a machine in US dollars per hour."""

    on_demand: float
    spot: float

    def times(self, count: float) -> Rate:
        return Rate(self.on_demand * count, self.spot * count)


class Shape(NamedTuple):
    """A machine type with its GPUs.

    If `attached`, the GPUs are requested separately. If `spot_only`, the machine is not sold on
    demand.
    """

    cpus: int
    memory: int  # MB
    gpu: str = ""
    gpus: int = 0
    attached: bool = False
    spot_only: bool = False


class Card(NamedTuple):
    """A GPU type: its name in nvidia-smi, its memory in MiB and its quota."""

    name: str
    memory: int
    metric: str


L4: Final = "nvidia-l4"
A100: Final = "nvidia-tesla-a100"
A100_80: Final = "nvidia-a100-80gb"
H100: Final = "nvidia-h100-80gb"
T4: Final = "nvidia-tesla-t4"
V100: Final = "nvidia-tesla-v100"

CARDS: Final[Mapping[str, Card]] = {
    L4: Card("NVIDIA L4", 23_034, "NVIDIA_L4_GPUS"),
    A100: Card("NVIDIA A100-SXM4-40GB", 40_960, "NVIDIA_A100_GPUS"),
    A100_80: Card("NVIDIA A100-SXM4-80GB", 81_920, "NVIDIA_A100_80GB_GPUS"),
    H100: Card("NVIDIA H100 80GB HBM3", 81_559, "NVIDIA_H100_GPUS"),
    T4: Card("Tesla T4", 15_360, "NVIDIA_T4_GPUS"),
    V100: Card("Tesla V100-SXM2-16GB", 16_160, "NVIDIA_V100_GPUS"),
}
"""GPU models by acceleratorType.  The quotas of Spot GPUs start with PREEMPTIBLE_."""

_G2_GPUS: Final = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}
"""L4 GPUs of a G2 machine, by its CPUs."""


def _list_shapes() -> Mapping[str, Shape]:
    shapes: dict[str, Shape] = {}
    for cpus, gpus in _G2_GPUS.items():
        shapes[f"g2-standard-{cpus}"] = Shape(cpus, cpus * 4096, L4, gpus)
    for n in (1, 2, 4, 8):
        shapes[f"a2-highgpu-{n}g"] = Shape(12 * n, 87_040 * n, A100, n)
    for n in (1, 2, 4, 8):
        shapes[f"a2-ultragpu-{n}g"] = Shape(12 * n, 174_080 * n, A100_80, n)
    for n in (1, 2, 4, 8):
        shapes[f"a3-highgpu-{n}g"] = Shape(26 * n, 239_616 * n, H100, n, spot_only=n < 8)
    for gpu in (T4, V100):
        for n, cpus in ((1, 8), (2, 16), (4, 32)):
            name = f"n1-standard-{cpus}+{n}x{gpu}"
            shapes[name] = Shape(cpus, cpus * 3840, gpu, n, attached=True)
    return shapes


SHAPES: Final = _list_shapes()
"""Offered machine types with their GPUs, by name.  Attached GPUs are part of the name."""

_G2_CORE, _G2_GB, _N1_CORE = Rate(0.024988, 0.009995), Rate(0.002927, 0.001171), Rate(0.0475, 0.01)
_HOSTS: Final[Mapping[str, Mapping[str, Rate]]] = {
    "us-central1": {
        A100: Rate(0.73948, 0.36975),
        A100_80: Rate(1.09962, 0.54978),
        H100: Rate(1.18251, 0.36117),
    },
    "us-east1": {A100: Rate(0.73948, 0.36975)},
    "us-west1": {A100: Rate(0.73948, 0.36975), H100: Rate(1.18251, 0.36117)},
    "us-east4": {A100_80: Rate(1.23833, 0.49613), H100: Rate(1.18251, 0.26996)},
    "europe-west4": {
        A100: Rate(0.81406, 0.31824),
        A100_80: Rate(1.2105, 0.47328),
        H100: Rate(1.24163, 0.28434),
    },
}
"""region -> the part of a machine that comes with one GPU of this kind."""
_GPUS: Final[Mapping[str, Mapping[str, Rate]]] = {
    "us-central1": {L4: Rate(0.56004, 0.2231), A100: Rate(2.93391, 1.4341), A100_80: Rate(3.92808, 1.964), H100: Rate(9.79655, 2.9926),
                    T4: Rate(0.35, 0.14), V100: Rate(2.48, 0.992)},
    "us-east1": {L4: Rate(0.56004, 0.2231), A100: Rate(2.93391, 1.4341), T4: Rate(0.35, 0.14), V100: Rate(2.48, 0.992)},
    "us-west1": {L4: Rate(0.56004, 0.2231), A100: Rate(2.93391, 1.4341), H100: Rate(9.79655, 2.9926), T4: Rate(0.35, 0.14), V100: Rate(2.48, 0.992)},
    "us-east4": {L4: Rate(0.55821, 0.2233), A100_80: Rate(4.4242, 1.7697), H100: Rate(9.79655, 2.2356), T4: Rate(0.35, 0.14)},
    "europe-west4": {L4: Rate(0.58804, 0.2438), A100: Rate(3.2273, 1.1691), A100_80: Rate(4.32526, 2.1626), H100: Rate(12.73552, 2.9112),
                     T4: Rate(0.35, 0.14), V100: Rate(2.55, 1.02)},
}  # fmt: skip
EGRESS: Final = 0.12
"""Price of internet traffic in US dollars per outgoing GB, up to 1 TB a month."""


class PriceList(NamedTuple):
    """List prices of the machines in SHAPES without disks, by region and name, for a date."""

    date: str
    rates: Mapping[str, Mapping[str, Rate]]

    @property
    def words(self) -> str:
        return f"list prices of {self.date}"

    @property
    def description(self) -> str:
        return f"{self.words}, of {', '.join(self.rates)}"

    def price(self, region: str, name: str) -> Rate | None:
        """Return the prices of a machine in a region, or None if unknown."""
        return self.rates.get(region, {}).get(name)


def _shipped_rate(region: str, name: str) -> Rate | None:
    shape = SHAPES[name]
    gpu = _GPUS[region].get(shape.gpu)
    if gpu is None:
        return None
    if name.startswith("g2-"):
        host = _sum(_G2_CORE.times(shape.cpus), _G2_GB.times(shape.memory / 1024))
    elif shape.attached:
        host = _N1_CORE.times(shape.cpus)
    else:
        one = _HOSTS[region].get(shape.gpu)
        if one is None:
            return None
        host = one.times(shape.gpus)
    return _sum(host, gpu.times(shape.gpus))


def _sum(one: Rate, other: Rate) -> Rate:
    return Rate(round(one.on_demand + other.on_demand, 5), round(one.spot + other.spot, 5))


def _list_shipped_prices() -> PriceList:
    rates: dict[str, dict[str, Rate]] = {}
    for region in _GPUS:
        of_region = rates.setdefault(region, {})
        for name in SHAPES:
            rate = _shipped_rate(region, name)
            if rate is not None:
                of_region[name] = rate
    return PriceList(DATE, rates)


SHIPPED: Final = _list_shipped_prices()
