"""GPU models as values, and training times computed from their speed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import NotFound, did_you_mean
from .memory import FRAGMENTATION, Model, TrainingSetup, count_trained_weights
from .training_from_inputs import ADAPTED, BLOCKS, DiffusionTraining

RESERVED: Final = 512 * 2**20
"""Bytes reserved from nvidia-smi's total for the driver and a display."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU model; `usable` is in bytes, `tflops` for 16-bit computation."""

    name: str
    memory: float  # nominal, 10⁹ bytes
    usable: int
    capability: float
    tflops: float
    asked: str  # name in `resources: {gpu: …}`
    names: tuple[str, ...]
    unchecked: tuple[str, ...] = ()  # fields without verified values

    @property
    def bf16(self) -> bool:
        return self.capability >= 8.0

    def has_memory(self, size: int, *, tolerance: float = 0.03) -> bool:
        """Return True if the GPU's nominal memory is about `size` bytes.

        `tolerance` is a fraction.
        """
        return abs(self.memory * 1e9 - size) <= tolerance * size


@dataclass(frozen=True, slots=True)
class DiffusionPeak:
    """The published or computed peak memory of a diffusion training, in 10⁹ bytes."""

    family: str
    method: str
    precision: str
    resolution: int
    batch: int
    rank: int
    checkpointing: bool
    gb: float
    source: str = ""  # source of a published value; empty if computed


@dataclass(frozen=True, slots=True)
class DiffusionSpeed:
    """The published seconds per image of a diffusion training on a GPU model."""

    family: str
    method: str
    pixels: int
    seconds: float
    gpu: str
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPU data in recipes/hardware.yaml."""

    gpus: tuple[GpuModel, ...]
    utilisation: tuple[float, float]
    speed: tuple[DiffusionSpeed, ...]
    diffusion: tuple[DiffusionPeak, ...]

    def find(self, word: str) -> GpuModel:
        """Return the GPU model with this name or driver name.  Raises NotFound."""
        named = self._find_named(word)
        if named is not None:
            return named
        names = [gpu.name for gpu in self.gpus]
        fix = did_you_mean(word.lower(), names) or f"use one of {', '.join(names)}"
        raise NotFound(f'unknown GPU "{word}"', fix=fix)

    def find_requested(self, word: str, memory: int | None) -> GpuModel | None:
        """Return the GPU model for `gpu` and `gpu_memory` in resources; None unless one matches."""
        plain = _normalize(word)
        found: list[GpuModel] = []
        for gpu in self.gpus:
            if plain in map(_normalize, (gpu.name, gpu.asked, *gpu.names)):
                found.append(gpu)
        if memory is not None:
            found = [gpu for gpu in found if gpu.has_memory(memory)]
        return found[0] if len(found) == 1 else None

    def find_offered(self, word: str, memory: int | None) -> GpuModel | None:
        """Return the GPU model of a provider's offer, such as "A100 SXM4"; None if it is unknown.

        Without an exact name, the offer's memory in bytes and the longest matching short name
        decide.
        """
        named = self._find_named(word)
        if named is not None or memory is None:
            return named
        plain = _normalize(word)
        alike = [gpu for gpu in self.gpus if gpu.has_memory(memory, tolerance=0.08)]
        contained = [gpu for gpu in alike if _normalize(gpu.asked) in plain]
        return _find_most_specific(contained)

    def _find_named(self, word: str) -> GpuModel | None:
        """Return the first GPU model with this name or driver name, or None."""
        plain = _normalize(word)
        for gpu in self.gpus:
            if plain in map(_normalize, (gpu.name, *gpu.names)):
                return gpu
        return None

    def estimate_usable(self, size: int) -> int:
        """Estimate the usable bytes of a GPU from its nominal memory size.

        The value is the lowest among known GPU models of that size, or else 97 %.
        """
        alike = [gpu.usable for gpu in self.gpus if gpu.has_memory(size)]
        return min(alike, default=round(size * 0.97))


def _find_most_specific(gpus: Sequence[GpuModel]) -> GpuModel | None:
    """Return the GPU model with the longest short name; None unless exactly one has it."""
    longest = max((len(_normalize(gpu.asked)) for gpu in gpus), default=0)
    best = [gpu for gpu in gpus if len(_normalize(gpu.asked)) == longest]
    return best[0] if len(best) == 1 else None


def read(data: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]] | None = None) -> Hardware:
    """Return the content of recipes/hardware.yaml as values.

    `own` has the user's GPU models: fields of known models are replaced, new models come first.
    """
    known, theirs = data["gpus"], own or {}
    cards = {name: item for name, item in theirs.items() if name not in known}
    cards |= {name: {**item, **theirs.get(name, {})} for name, item in known.items()}
    utilisation = (data["utilisation"]["low"], data["utilisation"]["high"])
    gpus = tuple(_parse_gpu(name, item) for name, item in cards.items())
    speed = tuple(DiffusionSpeed(**item) for item in data["speed"])
    diffusion = tuple(DiffusionPeak(**item) for item in data["diffusion"])
    return Hardware(gpus, utilisation, speed, diffusion)


REQUIRED_FIELDS: Final = ("memory", "capability", "tflops")
"""Required fields of a new GPU model."""


def _parse_gpu(name: str, item: Mapping[str, Any]) -> GpuModel:
    names = tuple(item.get("names", (name,)))
    reports = item.get("reports") or round(item["memory"] * 1e9 * 0.97) // 2**20
    usable = reports * 2**20 - RESERVED
    return GpuModel(
        name,
        item["memory"],
        usable,
        item["capability"],
        item["tflops"],
        item.get("gpu", names[0]),
        names,
        tuple(item.get("unchecked", ())),
    )


def count_operations(model: Model, training: TrainingSetup, tokens: float) -> float:
    """Return the floating-point operations for training on `tokens` tokens.

    Per weight: two in the forward pass, two for the activation gradients, and two for the weight
    gradients of trained weights (Kaplan et al., https:

    arxiv.org/abs/2001.08361, section 2.1). Gradient checkpointing adds a second forward pass.
    Attention covers half of the sequence on average, with two products per unit of width, and costs
    twice as much in the backward pass.
    """
    # In a mixture of experts, `intermediate` covers only the active experts.
    matrices = 3 if model.gated else 2
    feed = matrices * model.hidden * model.intermediate
    attention = 2 * model.hidden * (model.attention + model.keys)
    met = model.layers * (feed + attention) + model.vocabulary * model.hidden
    learned = met if training.method == "full" else count_trained_weights(model, training)
    again = 1 if training.checkpointing else 0
    scores = 2.0 * model.layers * training.length * model.attention
    return tokens * (2.0 * met * (2 + again) + 2.0 * learned + scores * (3 + again))


def estimate_seconds(
    hardware: Hardware, gpu: GpuModel, work: float, devices: int = 1
) -> tuple[float, float]:
    """Return the lowest and highest seconds for `work` operations, from typical GPU utilisation."""
    low, high = hardware.utilisation
    each = gpu.tflops * 1e12 * devices
    return work / (each * high), work / (each * low)


def estimate_image_seconds(
    hardware: Hardware, gpu: GpuModel, *, family: str, method: str, pixels: int, devices: int = 1
) -> tuple[float, float] | None:
    """Return the lowest and highest estimate of seconds per image in diffusion training.

    None if nothing is published for the family. Assumes that the time scales with pixels and with
    GPU speed.
    """
    found: list[float] = []
    for row in hardware.speed:
        if (row.family, row.method) == (family, method):
            seconds = row.seconds * hardware.find(row.gpu).tflops / gpu.tflops
            found.append(seconds * pixels / row.pixels / devices)
    return (min(found), max(found)) if found else None


def find_row(rows: Sequence[DiffusionPeak], case: DiffusionTraining) -> DiffusionPeak | None:
    """Return the table row with the least memory that covers this training, or None.

    Weights must be stored alike. The rank may be up to four times the row's rank, because a LoRA is
    a small part of the total: see `count_extra_adapter_bytes`.
    """
    same = {"flux": ("bf16",), "sdxl": ("fp16", "bf16"), "sd": ("no", "fp16", "bf16")}[case.family]
    bits = same if case.stored == "same" else (case.stored,)
    found = [row for row in rows if row.precision in bits and _covers(row, case)]
    return min(found, key=lambda row: row.gb, default=None)


def _covers(row: DiffusionPeak, case: DiffusionTraining) -> bool:
    """Return True if a row's training is at least as large as `case`, except for its rank."""
    if (row.family, row.method) != (case.family, case.method):
        return False
    if row.checkpointing and not case.checkpointing:
        return False
    if row.resolution < case.resolution or row.batch < case.batch:
        return False
    return 4 * row.rank >= case.rank


def count_extra_adapter_bytes(row: DiffusionPeak, case: DiffusionTraining) -> int:
    """Return the additional bytes of a training's LoRA compared with the row's LoRA.

    The row's LoRA has weights, gradients and two AdamW moments, 32 bits each.
    """
    return max(0, case.rank * case.adapter - row.rank * 16) * ADAPTED.get(case.family, 0)


def count_offloaded_bytes(case: DiffusionTraining) -> int:
    """Return the 16-bit weights offloaded to CPU memory, in bytes, without the largest block."""
    sizes = BLOCKS.get(case.family, ())[: case.away]
    if not sizes:
        return 0
    return round((sum(sizes) - max(sizes)) * 2 * (1 + FRAGMENTATION))


def _normalize(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\bnvidia\b", "", name.lower()))
