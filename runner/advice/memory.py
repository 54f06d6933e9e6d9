"""Estimate how much GPU memory a training takes, from the model's config.json and a few settings.  Reads no file, asks no GPU, knows no recipe.

The peak of a step is what is there all the time (weights, gradients, optimizer) plus the greatest of what comes and goes: the kept activations with
one layer in its backward, the same with the logits in theirs, or the optimizer's scratch.  Every term is named in the answer.  docs/memory.md has the
formulas with their sources, and how far each published measurement is from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Method = Literal["full", "lora", "qlora"]
Verdict = Literal["FITS", "TIGHT", "NO"]

BELOW, ABOVE = 0.15, 0.175
"""The range around an estimate, as shares of it.  ABOVE makes FITS begin at 85 % of what a GPU has."""
CONTEXT: Final = 10**9
"""Bytes that CUDA and its libraries take on a device before the first tensor."""
LOST: Final = 0.03
"""Share lost between tensors.  PyTorch holds more than that while there is room, and gives it back before it runs out."""
CHUNKS: Final = 8
"""Parts in which a chunked loss is computed."""
BUCKET: Final = 2 * 500_000_000 * 2
"""DeepSpeed, ZeRO 1 and 2: two buckets (overlap_comm) of 5e8 elements of 2 bytes, whatever is trained."""

_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4 with double quantisation: 4 bits, one 8-bit scale for 64 weights, one 32-bit scale for 256 of those."""
_OPTIMIZERS: Final = {
    "adamw": 8.0,
    "adamw_fused": 8.0,
    "adamw_8bit": 2.0,
    "paged_adamw_8bit": 0.0,
    "paged_adamw": 0.0,
    "adafactor": 0.0,
    "sgd": 0.0,
}
"""Bytes of state for each trained weight, on the GPU.  Paged ones lie in managed memory, which PyTorch does not count and which leaves when room is
needed; Adafactor's rows and columns are too few to matter.  A fused AdamW steps in one kernel, without scratch."""


class Unknown(ValueError):
    """A config.json that does not say what must be known; the message says what."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder-only transformer: widths in elements, counts of weights."""

    family: str
    layers: int
    hidden: int
    attention: int  # heads × head_dim
    keys: int  # key-value heads × head_dim
    heads: int
    intermediate: int  # widest tensor of the feed-forward part that a token goes through, over the experts it takes
    vocabulary: int
    gated: bool
    parameters: int
    linear: int  # of these, in linear layers between the embeddings: what is quantised, and what LoRA adapts
    adapted: int  # sum over those layers of inputs + outputs: weights of a LoRA of rank 1
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """What decides the memory of one device.  Lengths are in tokens."""

    method: Method = "lora"
    length: int = 1024  # of one sequence
    batch: int = 1  # sequences in one forward pass
    pairs: bool = False  # chosen and rejected go through together: DPO, ORPO, reward models
    rank: int = 16
    targets: Literal["linear", "attention"] = "linear"  # where LoRA adapts
    dropout: bool = False  # LoRA: some of what its layers read is left out
    embeddings: bool = False  # LoRA: train the embeddings too, whole
    master: bool = (
        False  # full: weights in 32 bits, computed with in 16 (mixed precision); else 16 throughout
    )
    frozen: Literal[8, 16, 32] = (
        16  # bits of frozen weights; of 4-bit models those of what is not quantised
    )
    upcast: bool = False  # peft's prepare_model_for_kbit_training: what is not quantised, the residual stream and the logits have 32 bits
    checkpointing: bool = True  # activations are computed again
    attention: Literal["flash", "eager"] = (
        "flash"  # sdpa is flash here: it keeps no matrix of scores
    )
    compiled: bool = False  # elementwise work is fused, and computed again in the backward
    logits: Literal["plain", "logps", "chunked", "fused", "none"] = "plain"
    optimizer: str = "adamw"
    in_backward: bool = False  # a weight's gradient goes as soon as it is applied
    stage: Literal[0, 1, 2, 3] = 0  # ZeRO; FSDP full sharding is 3
    devices: int = 1
    offload: bool = False  # optimizer state, and with stage 3 weights, live in the host's memory
    others: int = (
        0  # weights of further models that lie there in 16 bits: a reference, a reward model
    )
    generating: int = (
        0  # sequences that are written together, each with its cache of keys and values
    )
    precompute: int = (
        0  # pairs whose reference log-probabilities are computed together, before the first step
    )
    context: bool = True  # what CUDA itself takes counts, as nvidia-smi does and PyTorch does not


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on each device at the peak: the likely figure, a range, the terms that it is the sum of, and where a factor was measured."""

    bytes: int
    low: int
    high: int
    terms: tuple[tuple[str, int], ...]
    measured: str = ""

    def verdict(self, usable: float) -> Verdict:
        """FITS: even the high end does, in `usable` bytes.  NO: not even the low end.  TIGHT: between."""
        return "FITS" if self.high <= usable else "NO" if self.low > usable else "TIGHT"

    def __str__(self) -> str:
        low, high = self.low / 1e9, self.high / 1e9
        places = 1 if high < 10 else 0
        return f"about {low:.{places}f}-{high:.{places}f} GB"


def estimate(model: Model | Mapping[str, Any], training: Training) -> Estimate:
    """What each device needs at the peak of a step.  `model` may be the content of a config.json.  Raises Unknown."""
    if not isinstance(model, Model):
        model = read(model)
    terms = {name: round(size) for name, size in _terms(model, training).items() if size >= 1}
    total = sum(terms.values())
    return Estimate(
        total, round(total * (1 - BELOW)), round(total * (1 + ABOVE)), tuple(terms.items())
    )


def calibrated(found: Estimate, factor: float, runs: int, measured: str) -> Estimate:
    """`found`, corrected by what `runs` measured: `factor` is what PyTorch held over what was estimated for it, CUDA's own part left out."""
    context = dict(found.terms).get("CUDA", 0)
    more = round((found.bytes - context) * (factor - 1))
    size = found.bytes + more
    # What settings change is still estimated, so that the range never closes.
    spread = max(0.05, BELOW / 2 / runs**0.5)
    terms = (*found.terms, (f"as measured, × {factor:.2f}", more))
    return Estimate(size, round(size * (1 - spread)), round(size * (1 + spread)), terms, measured)


# -- the model ---------------------------------------------------------------------------------------------------------------------------------------


def read(config: Mapping[str, Any]) -> Model:
    """The shape that a config.json tells.  Weights are counted as transformers makes them.  Raises Unknown."""
    if isinstance(config.get("text_config"), Mapping) and "hidden_size" not in config:
        config = {
            "model_type": config.get("model_type", ""),
            **config["text_config"],
        }  # it sees, too: the language half is what learns
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise Unknown(
            f'cannot count the weights of the model family "{family}"; known families: {", ".join(FAMILIES)}'
        )
    hidden = _whole(config, "hidden_size", "n_embd", "d_model")
    layers = _whole(config, "num_hidden_layers", "n_layer")
    heads = _whole(config, "num_attention_heads", "n_head")
    vocabulary = _whole(config, "vocab_size")
    if not heads:
        raise Unknown("config.json has no number of attention heads")
    old = family in ("gpt2", "gpt_neox", "bloom")
    kv_heads = heads if old else _whole(config, "num_key_value_heads", default=heads)
    head = _whole(
        config, "head_dim", default=256 if family.startswith("gemma") else hidden // heads
    )
    attention, keys = heads * head, kv_heads * head
    tied = bool(config.get("tie_word_embeddings", family in _TIED))
    gated = family not in _PLAIN
    biased = family in _PLAIN  # those old enough to have no gate have biases everywhere
    wide = (
        _whole(config, "n_inner" if family == "gpt2" else "intermediate_size", default=4 * hidden)
        if family != "bloom"
        else 4 * hidden
    )

    qkv_bias = (
        biased or bool(config.get("attention_bias", False)) or family in ("qwen2", "qwen2_moe")
    )
    out_bias = biased or (
        bool(config.get("attention_bias", False)) and family not in ("qwen2", "qwen2_moe")
    )
    linear = 2 * hidden * attention + 2 * hidden * keys
    small = (attention + 2 * keys if qkv_bias else 0) + (hidden if out_bias else 0)
    adapted = (hidden + attention) * 2 + (hidden + keys) * 2
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "gemma3"):
        small += 2 * head
    elif family in ("olmo2", "olmo3"):
        small += attention + keys
    norms = 4 if family in ("gemma2", "gemma3", "gemma3_text") else 2
    small += norms * hidden * (2 if biased else 1)

    def feed(width: int) -> tuple[int, int]:
        return (3 if gated else 2) * hidden * width, (3 if gated else 2) * (hidden + width)

    dense, dense_adapted = feed(wide)
    mlp_bias = wide + hidden if biased else (2 * wide + hidden if config.get("mlp_bias") else 0)
    experts = _whole(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    sparse, through = 0, wide
    total_linear, total_adapted, total_small = layers * linear, layers * adapted, layers * small
    if experts:
        each = _whole(config, "moe_intermediate_size", default=wide)
        chosen = _whole(config, "num_experts_per_tok", default=2)
        shared = _whole(
            config,
            "shared_expert_intermediate_size",
            default=each * _whole(config, "n_shared_experts", default=0),
        )
        sparse = sum(1 for n in range(layers) if _is_sparse(config, n))
        # Experts are one tensor for all of them, which LoRA on "all linear layers" passes over.
        total_linear += sparse * experts * feed(each)[0]
        if shared:
            total_linear += sparse * feed(shared)[0]
            total_adapted += sparse * feed(shared)[1]
            total_small += sparse * hidden if family == "qwen2_moe" else 0
        total_small += sparse * hidden * experts  # the router, which is never quantised
        through = max(chosen * each + shared, wide if sparse < layers else 0)
    total_linear += (layers - sparse) * dense
    total_adapted += (layers - sparse) * dense_adapted
    total_small += (layers - sparse) * mlp_bias
    embedding = vocabulary * hidden
    ends = embedding * (1 if tied else 2) + hidden * (2 if biased else 1)
    if family == "gpt2":
        ends += _whole(config, "n_positions", "max_position_embeddings", default=1024) * hidden
    elif family == "bloom":
        ends += 2 * hidden  # a norm after the embeddings
    return Model(
        family,
        layers,
        hidden,
        attention,
        keys,
        heads,
        through,
        vocabulary,
        gated,
        total_linear + total_small + ends,
        total_linear,
        total_adapted,
        tied,
    )


FAMILIES: Final = (
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "phi3",
    ),
    *("olmo2", "olmo3", "granite", "smollm3", "starcoder2", "gpt2", "gpt_neox", "bloom"),
)
"""The values of `model_type` whose weights are counted here to the last one: a test builds each in transformers."""
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "bloom", "starcoder2")
_PLAIN = ("gpt2", "gpt_neox", "bloom", "starcoder2")


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or ()) or layer < _whole(
        config, "first_k_dense_replace", default=0
    ):
        return False
    return (layer + 1) % max(1, _whole(config, "decoder_sparse_step", default=1)) == 0


def _whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    if default is None:
        raise Unknown(f"config.json has no {names[0]}")
    return default


# -- the terms ---------------------------------------------------------------------------------------------------------------------------------------


def _terms(model: Model, training: Training) -> dict[str, float]:
    if training.optimizer not in _OPTIMIZERS:
        raise Unknown(
            f'unknown optimizer "{training.optimizer}"; known optimizers: {", ".join(_OPTIMIZERS)}'
        )
    n = training.devices
    state = _OPTIMIZERS[training.optimizer]
    trained = float(trained_weights(model, training))
    embeddings = model.vocabulary * model.hidden * (1 if model.tied else 2)
    weights_over = n if training.stage == 3 else 1
    gradients_over = n if training.stage >= 2 else 1
    state_over = n if training.stage >= 1 else 1

    terms: dict[str, float] = {}
    narrow = _NF4 if training.method == "qlora" else training.frozen / 8
    if training.method == "full":
        terms["weights"] = trained * (4 if training.master else 2) / weights_over
        if training.master:
            # Autocast keeps the 16-bit copy of each trained weight until the pass is over.
            terms["16-bit copies of the weights"] = trained * 2 / weights_over
        grain = 4 if training.master else 2
        if training.in_backward:
            terms["one gradient"] = grain * max(
                model.vocabulary * model.hidden, model.hidden * model.intermediate
            )
        else:
            terms["gradients"] = trained * grain / gradients_over
        scratch = (
            trained * grain / state_over
            if training.optimizer == "adamw" and not training.in_backward
            else 0.0
        )
        if not training.master and training.optimizer in ("adamw", "adamw_fused"):
            state = 4.0  # Adam's moments have the type of the weights
    else:
        rest = model.parameters - model.linear
        wide = 4 if training.frozen == 32 or training.upcast else 2
        terms["frozen weights of linear layers"] = model.linear * narrow / weights_over
        terms["embeddings, norms and head"] = rest * wide / weights_over
        if training.embeddings:
            terms["embeddings that are trained"] = embeddings * 4
        terms["adapter"] = 4.0 * _adapted(model, training) / weights_over
        terms["gradients"] = trained * 4 / gradients_over
        scratch = trained * 4 / state_over if training.optimizer == "adamw" else 0.0
    if training.others:
        terms["other models"] = training.others * 2.0 / weights_over
    if training.offload:
        if training.stage == 3:
            for name in ("weights", "16-bit copies of the weights", "frozen weights"):
                terms.pop(name, None)
    else:
        terms["optimizer"] = trained * state / state_over
    if training.stage in (1, 2):
        terms["communication"] = BUCKET
    elif training.stage == 3:
        # Two layers are gathered at a time: the one at work and the next.
        each = 2.0 if training.method == "full" else narrow
        terms["gathered layers"] = (
            2 * each * model.linear / max(model.layers, 1) + 2 * model.vocabulary * model.hidden
        )

    tokens = training.length * training.batch * (2 if training.pairs else 1)
    layer = layer_bytes(model, training) * tokens
    gradients = 2.0 * (3 if model.gated else 2) * model.intermediate * tokens
    # The residual stream is what is kept at the borders of layers; it has 32 bits where embeddings do.
    stream = (
        4.0
        if training.upcast
        or (training.master and training.method == "full")
        or training.frozen == 32
        else 2.0
    )
    kept = model.layers * (stream * model.hidden * tokens if training.checkpointing else layer)
    logits = _logits(model, training, tokens)
    working = gradients + (layer if training.checkpointing else 0.0)
    if training.method == "qlora" or training.frozen == 8:
        working += 2.0 * model.hidden * model.intermediate  # one layer's weights, unpacked
    # In 16 bits, without gradients: nothing is kept but the logits of all.
    first = 2.0 * training.precompute * 2 * training.length * model.vocabulary
    # Keys and values of all that is written, and the logits of one token of each.
    written = training.generating * (
        4.0 * model.layers * model.keys * training.length + 6.0 * model.vocabulary
    )
    if kept + max(working, logits) >= max(scratch, first, written):
        terms["kept activations"] = kept
        terms["logits" if logits >= working else "a layer at work"] = max(working, logits)
    elif written >= max(scratch, first):
        terms["keys and values of what is written"] = written
    elif first >= scratch:
        terms["logits of the reference"] = first
    else:
        terms["the optimizer's scratch"] = scratch
    terms["lost between tensors"] = sum(terms.values()) * LOST
    if training.context:
        terms["CUDA"] = CONTEXT
    return terms


def trained_weights(model: Model, training: Training) -> int:
    """How many weights learn."""
    if training.method == "full":
        return model.parameters
    ends = model.vocabulary * model.hidden * (1 if model.tied else 2) if training.embeddings else 0
    return _adapted(model, training) + ends


def _adapted(model: Model, training: Training) -> int:
    """Weights of the LoRA: `rank` for each input and each output of a layer that it adapts."""
    attention = model.layers * (
        2 * (model.hidden + model.attention) + 2 * (model.hidden + model.keys)
    )
    return training.rank * (attention if training.targets == "attention" else model.adapted)


def layer_bytes(model: Model, training: Training) -> float:
    """Bytes that one layer keeps for its backward, for each token: what autograd saves of transformers' layers, counted by a test.

    Eager: of each RMSNorm its input in 32 bits, and what its weight and the linear layers after it need; queries, keys, values and the output of the
    attention; of the feed-forward part gate, activated gate, up and product.  Autocast casts an input anew for each linear layer that reads it, as a
    LoRA in 32 bits does; its dropout keeps a mask of a byte for each element.  Compiled: what is elementwise is computed again.
    """
    hidden, wide = model.hidden, model.intermediate
    attention = 2 * (model.attention + 2 * model.keys) + 2 * model.attention
    if training.compiled:
        found = 8 * hidden + attention + 2 * (2 if model.gated else 1) * wide
    elif training.method == "full":
        found = (
            (26 if training.master else 16) * hidden
            + attention
            + 2 * (4 if model.gated else 2) * wide
        )
    elif training.targets == "attention":
        found = (
            8 * hidden
            + attention
            + 2 * (3 if model.gated else 1) * wide
            + 2 * (3 * hidden + model.attention)
        )
    else:
        found = (
            8 * hidden
            + attention
            + 2 * (4 if model.gated else 2) * wide
            + 2 * (5 * hidden + model.attention)
        )
    if training.dropout and training.method != "full" and not training.compiled:
        found += (
            3 * hidden
            + model.attention
            + (0 if training.targets == "attention" else (2 if model.gated else 1) * hidden + wide)
        )
    if training.attention == "eager":
        # Scores after the softmax in 32 bits and in 16, and keys and values repeated for each head.
        found += 6 * model.heads * training.length + 4 * (model.attention - model.keys)
    return float(found)


def _logits(model: Model, training: Training, tokens: int) -> float:
    """Bytes of the logits when their backward is at its peak, as PyTorch's profiler counts them."""
    if training.logits == "none":
        return 0.0
    elements = float(tokens) * model.vocabulary
    whole = 4.0 if training.upcast or training.frozen == 32 else 2.0
    scratch = 12.0  # log-probabilities, their gradient and that of the logits, each in 32 bits
    if training.logits == "logps":
        # One sequence after the other: log-probabilities and gradients of all in 16 bits, and of one once more.
        return elements * (whole + 4 + 2 / max(1, training.batch * (2 if training.pairs else 1)))
    if training.logits == "chunked":
        # The gradient that the head has from one chunk is added to that from those before: both are there.
        head = 2.0 * model.vocabulary * model.hidden if training.method == "full" else 0.0
        return elements * (whole + (2 if training.compiled else scratch) / CHUNKS) + head
    if training.logits == "fused":
        # So many tokens at a time that their logits are as large as the hidden states of all.
        return float(tokens) * model.hidden * (whole + scratch)
    return elements * (whole + scratch)
