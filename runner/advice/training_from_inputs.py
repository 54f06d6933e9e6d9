"""Derive the training settings for estimates from the inputs of library recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .memory import Model, TrainingSetup

if TYPE_CHECKING:
    from ..language.values import Tree

PAIRS: Final = ("dpo", "orpo", "reward", "embed")
"""Recipes whose trainers process two sequences per sample in one forward pass."""
LOGITS: Final[Mapping[str, Literal["none", "fused", "plain"]]] = {
    "reward": "none",
    "classify": "none",
    "embed": "none",
    "sft": "fused",
    "cpt": "fused",
    "dpo": "fused",
    "orpo": "plain",
}
"""Logits computation per recipe.  Reward models, classifiers and embedding models have a few
outputs per sequence instead of a vocabulary.  TRL 1.16 computes chunked log-probabilities for SFT,
DPO and generation (`trl/kernels/chunked_logprob.py`).  ORPO holds all logits, and those of the
chosen half twice, in 32 bits.
"""
STAGES: Final[Mapping[str, Literal[0, 2, 3]]] = {"none": 0, "zero2": 2, "zero3": 3, "fsdp": 3}
"""ZeRO stage of each `sharding` value; FSDP full sharding equals stage 3."""
DIFFUSION: Final = {
    "flux": "flux",
    "sdxl": "sdxl",
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-v1": "sd",
    "sd1": "sd",
}
"""Text in the address of a diffusion model or in a recipe's name -> family in
recipes/hardware.yaml.
"""
ADAPTED: Final = {"flux": 4_085_760, "sdxl": 2_616_320}
"""Weights of a rank-1 LoRA: the sum of inputs and outputs over the adapted layers."""

KEPT: Final = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0, "prodigy": 16}
"""Optimizer bytes per 32-bit weight.  AdamW has two moments of 32 or 8 bits, Prodigy four of 32
bits. Adafactor's row and column sums are negligible.
"""

BLOCKS: Final = {
    "flux": (*[339_830_784] * 19, *[141_591_552] * 38),
    "sdxl": (*[10_001_280] * 4, *[34_748_160] * 50, *[10_001_280] * 6, *[34_748_160] * 10),
}
"""Linear weights of each transformer block, in the order of `offload_blocks`."""


@dataclass(frozen=True, slots=True)
class DiffusionTraining:
    """Settings of a diffusion training, for comparison with the table in recipes/hardware.yaml."""

    family: str
    method: str
    resolution: int
    batch: int
    rank: int
    checkpointing: bool
    stored: str = "same"  # storage type of the frozen base: same as the computation, fp8 or nf4
    away: int = 0  # transformer blocks offloaded to CPU memory
    adapter: int = 16  # bytes per LoRA weight: weight, gradient, optimizer state and average (EMA)

    def __str__(self) -> str:
        less = "" if self.checkpointing else ", activations kept"
        base = "" if self.stored == "same" else f", base in {self.stored}"
        away = f", {self.away} blocks offloaded to CPU memory" if self.away else ""
        return f"{self.family} {self.method} at {self.resolution} pixels, batch {self.batch}, rank {self.rank}{base}{away}{less}"


def read_text_training(
    recipe: str,
    inputs: Mapping[str, Any],
    model: Model,
    *,
    devices: int = 1,
    reward: Model | None = None,
) -> TrainingSetup | None:
    """Return the training settings of a language model from a recipe's inputs, or None.

    None means that the sequence length is not set. `recipe` is NAME@VERSION. The length is
    `max_length`, or `max_prompt_length` plus `max_completion_length`. Without `method`, a `rank`
    means lora. `reward` is the reward model's shape.
    """
    name = recipe.partition("@")[0]
    generates = _whole(inputs, "max_completion_length") is not None
    length = _sequence_length(inputs)
    usual_method = "lora" if inputs.get("rank") else "full"
    method = inputs.get("method", usual_method)
    if length is None or method not in ("full", "lora", "qlora"):
        return None
    full = method == "full"
    others = reward.parameters if reward is not None else 0
    # The reference of a LoRA is its base model; full fine-tuning needs a second model.
    has_reference = name == "dpo" or _has_penalty(inputs, generates)
    if full and has_reference:
        others += model.parameters
    generating = _count_generated(inputs, devices) if generates else 0
    frozen: Literal[16, 32] = 32 if inputs.get("precision") == "no" else 16
    attention: Literal["eager", "flash"] = (
        "eager" if inputs.get("attention") == "eager" else "flash"
    )
    return TrainingSetup(
        method=method,
        length=length,
        batch=_whole(inputs, "micro_batch") or 1,
        pairs=name in PAIRS,
        rank=_whole(inputs, "rank") or 16,
        dropout=bool(inputs.get("dropout", 0)),
        embeddings=bool(inputs.get("train_embeddings", False)),
        master=full,
        frozen=frozen,
        checkpointing=bool(inputs.get("checkpoint_activations", True)),
        logits=_logits_of(name, generates),
        optimizer=str(inputs.get("optimizer", "adamw")),
        attention=attention,
        stage=STAGES.get(str(inputs.get("sharding", "none")), 0),
        devices=devices,
        others=others,
        generating=generating,
    )


def _sequence_length(inputs: Mapping[str, Any]) -> int | None:
    """Return the longest sequence in tokens: a prompt with its answer, or a text."""
    completion = _whole(inputs, "max_completion_length")
    if completion is None:
        return _whole(inputs, "max_length")
    return (_whole(inputs, "max_prompt_length") or 0) + completion


def _count_generated(inputs: Mapping[str, Any], devices: int) -> int:
    """Return the number of sequences that each device generates together."""
    whole = _whole(inputs, "global_batch") or 1
    return max(1, whole // max(1, devices))


def _has_penalty(inputs: Mapping[str, Any], generates: bool) -> bool:
    """Return True if a trainer compares generated answers with those of a reference model."""
    return generates and bool(inputs.get("beta", 1))


def _logits_of(name: str, generates: bool) -> Literal["none", "fused", "plain"]:
    """Return how the trainer of a recipe computes its logits."""
    if name in LOGITS:
        return LOGITS[name]
    return "fused" if generates else "plain"


def read_diffusion_training(
    recipe: str, inputs: Mapping[str, Any], address: str
) -> DiffusionTraining | None:
    """Return the settings of a diffusion training; None for an unknown model family."""
    names = f"{recipe.partition('@')[0]} {address}".lower()
    names = names.replace("flux.2", "")  # of other sizes than FLUX.1
    family = next((family for word, family in DIFFUSION.items() if word in names), None)
    resolution = _whole(inputs, "resolution")
    if family is None or resolution is None:
        return None
    rank = _whole(inputs, "rank") or 0
    method = "lora" if rank else "full"
    more = inputs.get("more_resolutions")
    resolutions = [resolution, *more] if isinstance(more, list) else [resolution]
    optimizer = KEPT.get(str(inputs.get("optimizer", "adamw")), 8)
    average = 4 if inputs.get("ema") else 0
    return DiffusionTraining(
        family,
        method,
        max(resolutions),
        _whole(inputs, "micro_batch") or 1,
        rank,
        bool(inputs.get("checkpoint_activations", True)),
        str(inputs.get("base_storage", "same")),
        _whole(inputs, "offload_blocks") or 0,
        8 + optimizer + average,
    )


def count_tokens(inputs: Mapping[str, Any], training: TrainingSetup) -> float | None:
    """Return the largest token count of the training; None if its step count is unknown."""
    seen = count_samples(inputs)
    if seen is None:
        return None
    sequences = 2 if training.pairs else 1
    return float(seen) * training.length * sequences


def count_samples(inputs: Mapping[str, Any]) -> int | None:
    """Return the samples of the whole training, with repeats; None if the step count is unknown."""
    if inputs.get("epochs"):
        return None  # depends on the data
    steps, batch = _whole(inputs, "max_steps"), _whole(inputs, "global_batch")
    return None if steps is None or batch is None else steps * batch


class MemorySaving(NamedTuple):
    """An input change that reduces GPU memory, and its cost."""

    inputs: dict[str, Tree]  # to set
    price: str  # disadvantage, for messages


def list_memory_savings(recipe: str, inputs: Mapping[str, Any]) -> list[MemorySaving]:
    """Return input changes that reduce a training's memory, mildest first.

    Each change applies on top of the earlier ones.
    """
    family = next((family for word, family in DIFFUSION.items() if word in recipe), "")
    method = inputs.get("method")
    found = _halve(inputs, "micro_batch", 1, "a smaller batch per device: the same result, slower")
    if inputs.get("checkpoint_activations") is False:
        words = "gradient checkpointing: the same result, a third slower"
        found.append(MemorySaving({"checkpoint_activations": True}, words))
    if inputs.get("optimizer") == "adamw" and "max_length" in inputs:
        words = "an 8-bit optimizer: slightly less precise"
        found.append(MemorySaving({"optimizer": "adamw_8bit"}, words))
    if inputs.get("base_storage") == "same":
        found += _list_base_savings(family, inputs)
    for name in ("max_length", "max_completion_length"):
        found += _halve(inputs, name, 512, "longer texts are truncated")
    resolution = _whole(inputs, "resolution")
    if resolution is not None and resolution > 512:
        fewer: dict[str, Tree] = {"more_resolutions": []} if inputs.get("more_resolutions") else {}
        found.append(MemorySaving({"resolution": 512, **fewer}, "images with less detail"))
    if inputs.get("train_embeddings") is True:
        found.append(MemorySaving({"train_embeddings": False}, "the embeddings are not trained"))
    if method == "full":
        words = "a LoRA adapter is trained instead of all weights"
        found.append(MemorySaving({"method": "lora"}, words))
    if "optimizer" in inputs and "max_length" in inputs and method in ("lora", "full"):
        words = "a 4-bit base model (QLoRA): less precise weights, slower steps"
        found.append(MemorySaving({"method": "qlora"}, words))
    if method != "full":
        found += _halve(inputs, "rank", 8, "a smaller adapter")
    return found


def _halve(inputs: Mapping[str, Any], name: str, least: int, words: str) -> list[MemorySaving]:
    """Return changes that halve a number until it is at most `least`; none if it is unknown."""
    found = []
    value = _whole(inputs, name)
    while value is not None and value > least:
        value //= 2
        found.append(MemorySaving({name: value}, words))
    return found


def _list_base_savings(family: str, inputs: Mapping[str, Any]) -> list[MemorySaving]:
    """Return the changes for the frozen weights of a diffusion model."""
    found = []
    if family != "sdxl":  # whose convolutions cannot be cast and computed again
        words = "an 8-bit base model: slightly less precise weights"
        found.append(MemorySaving({"base_storage": "fp8"}, words))
    words = "a 4-bit base model: less precise weights"
    found.append(MemorySaving({"base_storage": "nf4"}, words))
    if inputs.get("offload_blocks") == 0 and family in BLOCKS:
        away: dict[str, Tree] = {"base_storage": "same", "offload_blocks": len(BLOCKS[family])}
        words = "weights offloaded to CPU memory: the same result, much slower"
        found.append(MemorySaving(away, words))
    return found


def list_larger_batches(inputs: Mapping[str, Any]) -> list[dict[str, Tree]]:
    """Return larger micro batches that divide `global_batch`, largest first."""
    batch, whole = _whole(inputs, "micro_batch"), _whole(inputs, "global_batch")
    if batch is None or whole is None:
        return []
    return [{"micro_batch": size} for size in range(whole, batch, -1) if whole % size == 0]


def _whole(inputs: Mapping[str, Any], name: str) -> int | None:
    value = inputs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
