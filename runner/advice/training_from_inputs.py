"""What a recipe's inputs say of its training, by the names that inputs of the library have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .memory import Model, Training

if TYPE_CHECKING:
    from ..language.values import Tree

PAIRS: Final = ("dpo", "orpo", "reward", "embed")
"""Recipes whose trainers put two sequences for each sample through the model together."""
LOGITS: Final[Mapping[str, Literal["none", "fused", "plain"]]] = {
    "reward": "none",
    "classify": "none",
    "embed": "none",
    "sft": "fused",
    "cpt": "fused",
    "dpo": "fused",
    "orpo": "plain",
}
"""Reward models, classifiers and embeddings have few numbers for each sequence where others have a vocabulary.  TRL 1.16 never has all logits of SFT,
DPO and what it writes itself (`trl/kernels/chunked_logprob.py`); of ORPO it has them, and of the chosen half twice, in 32 bits."""
STAGES: Final[Mapping[str, Literal[0, 2, 3]]] = {"none": 0, "zero2": 2, "zero3": 3, "fsdp": 3}
"""What `sharding` shares: FSDP shares what ZeRO 3 does."""
DIFFUSION: Final = {
    "flux": "flux",
    "sdxl": "sdxl",
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-v1": "sd",
    "sd1": "sd",
}
"""What the address of a diffusion model, or a recipe's name, has in it; and the family in recipes/hardware.yaml."""
ADAPTED: Final = {"flux": 4_085_760, "sdxl": 2_616_320}
"""Weights of a LoRA of rank 1 on the layers that our trainers adapt: inputs and outputs of each, added up."""

KEPT: Final = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0, "prodigy": 16}
"""Bytes that an optimizer keeps for a weight of 32 bits: two moments, in 32 bits or 8; sums of rows and columns; two moments and two more such."""

BLOCKS: Final = {
    "flux": (*[339_830_784] * 19, *[141_591_552] * 38),
    "sdxl": (*[10_001_280] * 4, *[34_748_160] * 50, *[10_001_280] * 6, *[34_748_160] * 10),
}
"""Weights of the linear layers of each transformer block, in the order in which `offload_blocks` takes them."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A training of a diffusion model, as the table of recipes/hardware.yaml is asked."""

    family: str
    method: str
    resolution: int
    batch: int
    rank: int
    checkpointing: bool
    stored: str = "same"  # how the frozen base is in memory: as it is computed with, fp8 or nf4
    away: int = 0  # transformer blocks of the base whose frozen weights are in main memory
    adapter: int = 16  # bytes for each weight of the LoRA: itself and its gradient, and what the optimizer and an average keep of it

    def __str__(self) -> str:
        less = "" if self.checkpointing else ", activations kept"
        base = "" if self.stored == "same" else f", base in {self.stored}"
        away = f", {self.away} blocks offloaded to CPU memory" if self.away else ""
        return f"{self.family} {self.method} at {self.resolution} pixels, batch {self.batch}, rank {self.rank}{base}{away}{less}"


def text(
    recipe: str,
    inputs: Mapping[str, Any],
    model: Model,
    *,
    devices: int = 1,
    reward: Model | None = None,
) -> Training | None:
    """A training of a language model, from the inputs of `recipe` (NAME@VERSION); None where they do not say how long a sequence is.

    `max_length` tokens, or `max_prompt_length` and `max_completion_length`; `method` lora, qlora or full (without it, lora where there is a `rank`);
    `micro_batch`, `rank`, `dropout`, `train_embeddings`, `checkpoint_activations`, `precision`, `optimizer`, `attention`, `sharding`.  `reward` is
    the reward model's shape.
    """
    name = recipe.partition("@")[0]
    length = _whole(inputs, "max_length")
    writes = _whole(inputs, "max_completion_length")
    if writes is not None:
        length = (_whole(inputs, "max_prompt_length") or 0) + writes
    method = inputs.get("method", "lora" if inputs.get("rank") else "full")
    if length is None or method not in ("full", "lora", "qlora"):
        return None
    full = method == "full"
    pairs = name in PAIRS
    drawn = (_whole(inputs, "global_batch") or 1) // max(1, devices) if writes is not None else 0
    others = reward.parameters if reward is not None else 0
    if full and (name == "dpo" or (writes is not None and inputs.get("beta", 1))):
        others += (
            model.parameters
        )  # without an adapter to take off, the reference is a second model
    return Training(
        method=method,
        length=length,
        batch=_whole(inputs, "micro_batch") or 1,
        pairs=pairs,
        rank=_whole(inputs, "rank") or 16,
        dropout=bool(inputs.get("dropout", 0)),
        embeddings=bool(inputs.get("train_embeddings", False)),
        master=full,
        frozen=32 if inputs.get("precision") == "no" else 16,
        checkpointing=bool(inputs.get("checkpoint_activations", True)),
        logits=LOGITS.get(name, "fused" if writes is not None else "plain"),
        optimizer=str(inputs.get("optimizer", "adamw")),
        attention="eager" if inputs.get("attention") == "eager" else "flash",
        stage=STAGES.get(str(inputs.get("sharding", "none")), 0),
        devices=devices,
        others=others,
        generating=max(drawn, 1) if writes is not None else 0,
    )


def picture(recipe: str, inputs: Mapping[str, Any], address: str) -> Picture | None:
    """A training of a diffusion model; None where neither the recipe nor its base is one that the table knows."""
    names = f"{recipe.partition('@')[0]} {address}".lower().replace(
        "flux.2", ""
    )  # of other sizes than FLUX.1
    family = next((family for word, family in DIFFUSION.items() if word in names), None)
    resolution = _whole(inputs, "resolution")
    if family is None or resolution is None:
        return None
    rank = _whole(inputs, "rank") or 0
    more = inputs.get("more_resolutions")
    return Picture(
        family,
        "lora" if rank else "full",
        max([resolution, *(more if isinstance(more, list) else [])]),
        _whole(inputs, "micro_batch") or 1,
        rank,
        bool(inputs.get("checkpoint_activations", True)),
        str(inputs.get("base_storage", "same")),
        _whole(inputs, "offload_blocks") or 0,
        8 + KEPT.get(str(inputs.get("optimizer", "adamw")), 8) + (4 if inputs.get("ema") else 0),
    )


def tokens(inputs: Mapping[str, Any], training: Training) -> float | None:
    """Tokens that go through the model in the whole training, at the most; None where the inputs do not say how many steps there are."""
    seen = samples(inputs)
    return None if seen is None else float(seen) * training.length * (2 if training.pairs else 1)


def samples(inputs: Mapping[str, Any]) -> int | None:
    """Samples in the whole training, each as often as it is seen; None where the inputs do not say how many steps there are."""
    if inputs.get("epochs"):
        return None  # as many as the data has
    steps, batch = _whole(inputs, "max_steps"), _whole(inputs, "global_batch")
    return None if steps is None or batch is None else steps * batch


class Smaller(NamedTuple):
    """Something to give up so that a training needs less memory."""

    inputs: dict[str, Tree]  # to set
    price: str  # what it costs, in words


def smaller(recipe: str, inputs: Mapping[str, Any]) -> list[Smaller]:
    """What can be given up in a training of `recipe` to need less memory, mildest first: inputs to set, and what that costs.

    Each comes on top of those before it.
    """
    found: list[Smaller] = []
    family = next((family for word, family in DIFFUSION.items() if word in recipe), "")
    batch = _whole(inputs, "micro_batch")
    while batch is not None and batch > 1:
        batch //= 2
        found.append(
            Smaller({"micro_batch": batch}, "a smaller batch per device: the same result, slower")
        )
    if inputs.get("checkpoint_activations") is False:
        found.append(
            Smaller(
                {"checkpoint_activations": True},
                "gradient checkpointing: the same result, a third slower",
            )
        )
    if inputs.get("optimizer") == "adamw" and "max_length" in inputs:
        found.append(
            Smaller({"optimizer": "adamw_8bit"}, "an 8-bit optimizer: slightly less precise")
        )
    if inputs.get("base_storage") == "same":
        if family != "sdxl":  # whose convolutions cannot be cast and computed again
            found.append(
                Smaller(
                    {"base_storage": "fp8"},
                    "an 8-bit base model: slightly less precise weights",
                )
            )
        found.append(Smaller({"base_storage": "nf4"}, "a 4-bit base model: less precise weights"))
        if inputs.get("offload_blocks") == 0 and family in BLOCKS:
            away: dict[str, Tree] = {"base_storage": "same", "offload_blocks": len(BLOCKS[family])}
            found.append(
                Smaller(
                    away,
                    "weights offloaded to CPU memory: the same result, much slower",
                )
            )
    for name in ("max_length", "max_completion_length"):
        length = _whole(inputs, name)
        while length is not None and length > 512:
            length //= 2
            found.append(Smaller({name: length}, "longer texts are truncated"))
    resolution = _whole(inputs, "resolution")
    if resolution is not None and resolution > 512:
        fewer: dict[str, Tree] = {"more_resolutions": []} if inputs.get("more_resolutions") else {}
        found.append(Smaller({"resolution": 512, **fewer}, "images with less detail"))
    if inputs.get("train_embeddings") is True:
        found.append(Smaller({"train_embeddings": False}, "the embeddings are not trained"))
    if inputs.get("method") == "full":
        found.append(
            Smaller({"method": "lora"}, "a LoRA adapter is trained instead of all weights")
        )
    if (
        "optimizer" in inputs
        and "max_length" in inputs
        and inputs.get("method") in ("lora", "full")
    ):
        found.append(
            Smaller(
                {"method": "qlora"},
                "a 4-bit base model (QLoRA): less precise weights, slower steps",
            )
        )
    rank = _whole(inputs, "rank")
    while rank is not None and rank > 8 and inputs.get("method") != "full":
        rank //= 2
        found.append(Smaller({"rank": rank}, "a smaller adapter"))
    return found


def larger(inputs: Mapping[str, Any]) -> list[dict[str, Tree]]:
    """Greater micro batches that share `global_batch` evenly, largest first: the same training, faster."""
    batch, whole = _whole(inputs, "micro_batch"), _whole(inputs, "global_batch")
    if batch is None or whole is None:
        return []
    return [{"micro_batch": size} for size in range(whole, batch, -1) if whole % size == 0]


def _whole(inputs: Mapping[str, Any], name: str) -> int | None:
    value = inputs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
