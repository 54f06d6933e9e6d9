"""GPUs as values: what each has, and how long it may compute at a training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import NotFound, did_you_mean
from .memory import LOST, Model, Training, trained_weights
from .training_from_inputs import ADAPTED, BLOCKS, Picture

RESERVED: Final = 512 * 2**20
"""Bytes of what nvidia-smi shows that cannot be counted on: the driver's own, a display's."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.  `usable` is in bytes, `tflops` in 10¹² a second for 16 bits."""

    name: str
    memory: float  # on the box, 10⁹ bytes
    usable: int
    capability: float
    tflops: float
    asked: str  # the word for it in `resources: {gpu: …}`
    names: tuple[str, ...]
    unchecked: tuple[str, ...] = ()  # of its figures, those that were not checked again

    @property
    def bf16(self) -> bool:
        return self.capability >= 8.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A diffusion training as it was seen, or counted: peak memory in 10⁹ bytes."""

    family: str
    method: str
    precision: str
    resolution: int
    batch: int
    rank: int
    checkpointing: bool
    gb: float
    source: str = ""  # of what was published; none of what was counted


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a diffusion training took for one image of so many pixels, on the GPU of that name."""

    family: str
    method: str
    pixels: int
    seconds: float
    gpu: str
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """What recipes/hardware.yaml says."""

    gpus: tuple[Gpu, ...]
    utilisation: tuple[float, float]
    speed: tuple[Speed, ...]
    diffusion: tuple[Seen, ...]

    def find(self, word: str) -> Gpu:
        """The GPU that somebody names: by its name here, or as a driver reports it.  Raises NotFound."""
        plain = _plain(word)
        for gpu in self.gpus:
            if plain in (_plain(gpu.name), *map(_plain, gpu.names)):
                return gpu
        names = [gpu.name for gpu in self.gpus]
        raise NotFound(
            f'no figures for a GPU "{word}"',
            fix=did_you_mean(word.lower(), names) or f"known: {', '.join(names)}",
        )

    def meant(self, word: str, memory: int | None) -> Gpu | None:
        """The GPU that resources ask for by a word, which is a part of its name, and perhaps bytes; None where that is none or several of ours."""
        found = [
            gpu
            for gpu in self.gpus
            if any(_plain(word) == _plain(name) for name in (gpu.name, gpu.asked, *gpu.names))
        ]
        if memory is not None:
            found = [gpu for gpu in found if abs(gpu.memory * 1e9 - memory) <= 0.03 * memory]
        return found[0] if len(found) == 1 else None

    def sold(self, word: str, memory: int | None) -> Gpu | None:
        """The GPU that a provider offers under a name such as "A100 SXM4", with so many bytes; None where it has no figures."""
        plain = _plain(word)
        exact = [gpu for gpu in self.gpus if plain in map(_plain, (gpu.name, *gpu.names))]
        if exact or memory is None:
            return exact[0] if exact else None
        alike = [
            gpu
            for gpu in self.gpus
            if _plain(gpu.asked) in plain and abs(gpu.memory * 1e9 - memory) <= 0.08 * memory
        ]
        longest = max((len(_plain(gpu.asked)) for gpu in alike), default=0)
        alike = [gpu for gpu in alike if len(_plain(gpu.asked)) == longest]
        return alike[0] if len(alike) == 1 else None

    def of_memory(self, size: int) -> int:
        """Bytes that can be used of a GPU of which only the size on the box is known: as of the known one of that size with the least, else 97 %."""
        alike = [gpu.usable for gpu in self.gpus if abs(gpu.memory * 1e9 - size) <= 0.03 * size]
        return min(alike, default=round(size * 0.97))


def read(data: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]] | None = None) -> Hardware:
    """The content of recipes/hardware.yaml as values.  `own` are a user's GPUs: those that are known get other figures, the rest come before them."""
    known, theirs = data["gpus"], own or {}
    cards = {name: item for name, item in theirs.items() if name not in known}
    cards |= {name: {**item, **theirs.get(name, {})} for name, item in known.items()}
    utilisation = (data["utilisation"]["low"], data["utilisation"]["high"])
    gpus = tuple(_gpu(name, item) for name, item in cards.items())
    return Hardware(
        gpus,
        utilisation,
        tuple(Speed(**item) for item in data["speed"]),
        tuple(Seen(**item) for item in data["diffusion"]),
    )


NEEDED: Final = ("memory", "capability", "tflops")
"""What has to be said of a GPU that is not known."""


def _gpu(name: str, item: Mapping[str, Any]) -> Gpu:
    names = tuple(item.get("names", (name,)))
    reports = item.get("reports") or round(item["memory"] * 1e9 * 0.97) // 2**20
    usable = reports * 2**20 - RESERVED
    return Gpu(
        name,
        item["memory"],
        usable,
        item["capability"],
        item["tflops"],
        item.get("gpu", names[0]),
        names,
        tuple(item.get("unchecked", ())),
    )


def operations(model: Model, training: Training, tokens: float) -> float:
    """Floating-point operations to learn from `tokens` tokens.

    Two for each weight that a token meets forwards, as many back to the activations, as many for the gradients of those that learn (Kaplan et al.,
    https://arxiv.org/abs/2001.08361, section 2.1), and the forward pass once more where activations are computed again.  Attention meets half of the
    sequence at the mean, with two products for each of its width, and has twice that to do backwards.
    """
    # Of experts, a token meets those it is sent to; `intermediate` is what it goes through.
    feed = (3 if model.gated else 2) * model.hidden * model.intermediate
    attention = 2 * model.hidden * (model.attention + model.keys)
    met = model.layers * (feed + attention) + model.vocabulary * model.hidden
    learned = met if training.method == "full" else trained_weights(model, training)
    again = 1 if training.checkpointing else 0
    scores = 2.0 * model.layers * training.length * model.attention
    return tokens * (2.0 * met * (2 + again) + 2.0 * learned + scores * (3 + again))


def seconds(hardware: Hardware, gpu: Gpu, work: float, devices: int = 1) -> tuple[float, float]:
    """How long `work` operations may take, least and most: a guess, from what such trainings reach of what a GPU could do."""
    low, high = hardware.utilisation
    each = gpu.tflops * 1e12 * devices
    return work / (each * high), work / (each * low)


def image_seconds(
    hardware: Hardware, gpu: Gpu, *, family: str, method: str, pixels: int, devices: int = 1
) -> tuple[float, float] | None:
    """How long a diffusion training may take for one image of so many pixels, least and most; None where none of its family is published.

    A published figure is carried over by the speeds of the two GPUs and by pixels, each of which it is taken to go by.
    """
    found = [
        row.seconds * hardware.find(row.gpu).tflops / gpu.tflops * pixels / row.pixels / devices
        for row in hardware.speed
        if (row.family, row.method) == (family, method)
    ]
    return (min(found), max(found)) if found else None


def fitting(rows: Sequence[Seen], case: Picture) -> Seen | None:
    """The row of the table that asks for at least as much as this case, with the least memory, weights stored alike; None where there is none.

    A LoRA's rank is a small part of the whole, so that one of up to four times the row's rank is taken for the same case: see `adapter_more`.
    """
    same = {"flux": ("bf16",), "sdxl": ("fp16", "bf16"), "sd": ("no", "fp16", "bf16")}[case.family]
    bits = same if case.stored == "same" else (case.stored,)
    found = [
        row
        for row in rows
        if (row.family, row.method) == (case.family, case.method)
        and row.precision in bits
        and row.resolution >= case.resolution
        and row.batch >= case.batch
        and 4 * row.rank >= case.rank
        and (case.checkpointing or not row.checkpointing)
    ]
    return min(found, key=lambda row: row.gb, default=None)


def adapter_more(row: Seen, case: Picture) -> int:
    """Bytes that a LoRA takes more than the row's, which has weights, gradients and AdamW's two moments, 32 bits each."""
    return max(0, case.rank * case.adapter - row.rank * 16) * ADAPTED.get(case.family, 0)


def left_away(case: Picture) -> int:
    """Bytes of 16-bit weights that stay in main memory, less those of the largest block among them, which are here while it computes."""
    sizes = BLOCKS.get(case.family, ())[: case.away]
    return round((sum(sizes) - max(sizes)) * 2 * (1 + LOST)) if sizes else 0


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\bnvidia\b", "", name.lower()))
