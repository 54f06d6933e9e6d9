"""Estimate the GPU memory of a training from the model's config.json and a few settings.

Pure: reads no file, queries no GPU and knows no recipe. The peak of a step is the permanent memory
(weights, gradients, optimizer state) plus the largest temporary part: kept activations with one
layer's backward pass, kept activations with the logits, or the optimizer's scratch space. The
answer names every term. docs/memory.md has the formulas, their sources, and the error against
published measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Method = Literal["full", "lora", "qlora"]
Verdict = Literal["FITS", "TIGHT", "NO"]

BELOW, ABOVE = 0.15, 0.175
"""The range around an estimate, as fractions.  With ABOVE, FITS begins at 85 % of GPU memory."""
CUDA_CONTEXT: Final = 10**9
"""Bytes of the CUDA context on each device, before the first tensor."""
FRAGMENTATION: Final = 0.03
"""Fraction lost to fragmentation.  PyTorch's cache is larger, but is freed when memory runs out."""
CHUNKS: Final = 8
"""Number of chunks of a chunked loss."""
BUCKET: Final = 2 * 500_000_000 * 2
"""Communication bytes of ZeRO 1 and 2: two buckets (overlap_comm) of 5e8 elements of 2 bytes."""

_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per NF4 weight with double quantisation: 4 bits, plus an 8-bit scale per 64 weights and a
32-bit scale per 256 of those scales."""
_OPTIMIZERS: Final = {
    "adamw": 8.0,
    "adamw_fused": 8.0,
    "adamw_8bit": 2.0,
    "paged_adamw_8bit": 0.0,
    "paged_adamw": 0.0,
    "adafactor": 0.0,
    "sgd": 0.0,
}
"""Bytes of optimizer state on the GPU per trained weight.  Paged optimizers use managed memory, which
PyTorch does not count and CUDA can evict.  Adafactor's state is negligible.  Fused AdamW needs no
scratch space."""


class Unknown(ValueError):
    """A config.json without a required value; the message names it."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder-only transformer: widths in elements, counts of weights."""

    family: str
    layers: int
    hidden: int
    attention: int  # heads × head_dim
    keys: int  # key-value heads × head_dim
    heads: int
    intermediate: int  # feed-forward width of one token, summed over its experts
    vocabulary: int
    gated: bool
    parameters: int
    linear: int  # parameters of linear layers without embeddings: quantised, or adapted by LoRA
    adapted: int  # inputs + outputs of those layers: weights of a rank-1 LoRA
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """The settings that determine the memory of one device; lengths are in tokens."""

    method: Method = "lora"
    length: int = 1024  # of one sequence
    batch: int = 1  # sequences in one forward pass
    pairs: bool = False  # chosen and rejected answers in one forward pass: DPO, ORPO, reward models
    rank: int = 16
    targets: Literal["linear", "attention"] = "linear"  # layers with a LoRA
    dropout: bool = False  # LoRA dropout
    embeddings: bool = False  # LoRA: train the full embeddings too
    master: bool = (
        False  # full: 32-bit weights with 16-bit computation (mixed precision); else 16 bits only
    )
    frozen: Literal[8, 16, 32] = (
        16  # bits of frozen weights; for 4-bit models, bits of the unquantised weights
    )
    upcast: bool = (
        False  # prepare_model_for_kbit_training of peft: 32 bits for all unquantised parts
    )
    checkpointing: bool = True  # gradient checkpointing
    attention: Literal["flash", "eager"] = "flash"  # includes sdpa: no score matrix is stored
    compiled: bool = (
        False  # torch.compile: fused elementwise operations, recomputed in the backward pass
    )
    logits: Literal["plain", "logps", "chunked", "fused", "none"] = "plain"
    optimizer: str = "adamw"
    in_backward: bool = (
        False  # optimizer step in the backward pass, which frees each gradient at once
    )
    stage: Literal[0, 1, 2, 3] = 0  # ZeRO; FSDP full sharding is 3
    devices: int = 1
    offload: bool = False  # optimizer state, and weights in stage 3, in CPU memory
    others: int = 0  # weights of other models in 16 bits: a reference model, a reward model
    generating: int = 0  # sequences generated together, each with a key-value cache
    precompute: int = 0  # pairs per batch of precomputed reference log-probabilities
    context: bool = True  # include CUDA's own memory, as nvidia-smi does


@dataclass(frozen=True, slots=True)
class Estimate:
    """The peak bytes on each device: the likely value, a range and the summed terms."""

    bytes: int
    low: int
    high: int
    terms: tuple[tuple[str, int], ...]
    measured: str = ""

    def verdict(self, usable: float) -> Verdict:
        """Compare the range with `usable` bytes.

        FITS: the upper bound fits. NO: even the lower bound exceeds `usable`. TIGHT: in between.
        """
        return "FITS" if self.high <= usable else "NO" if self.low > usable else "TIGHT"

    def __str__(self) -> str:
        low, high = self.low / 1e9, self.high / 1e9
        places = 1 if high < 10 else 0
        return f"about {low:.{places}f}-{high:.{places}f} GB"


def estimate(model: Model | Mapping[str, Any], training: Training) -> Estimate:
    """Return the peak memory of a training step on each device.

    `model` may be the content of a config.json. Raises Unknown.
    """
    if not isinstance(model, Model):
        model = read(model)
    terms = {name: round(size) for name, size in _terms(model, training).items() if size >= 1}
    total = sum(terms.values())
    return Estimate(
        total, round(total * (1 - BELOW)), round(total * (1 + ABOVE)), tuple(terms.items())
    )


def calibrate(found: Estimate, factor: float, runs: int, measured: str) -> Estimate:
    """Return an estimate scaled by measurements of `runs` runs.

    `factor` is the ratio of PyTorch's measured memory to its estimate, without CUDA's own memory.
    """
    context = dict(found.terms).get("CUDA", 0)
    more = round((found.bytes - context) * (factor - 1))
    size = found.bytes + more
    # The effect of changed settings stays an estimate, so the range never closes.
    spread = max(0.05, BELOW / 2 / runs**0.5)
    terms = (*found.terms, (f"as measured, × {factor:.2f}", more))
    return Estimate(size, round(size * (1 - spread)), round(size * (1 + spread)), terms, measured)


# -- the model ---------------------------------------------------------------------------------------------------------------------------------------


def read(config: Mapping[str, Any]) -> Model:
    """Return the model shape from a config.json; weights are counted as in transformers.

    Raises Unknown.
    """
    if isinstance(config.get("text_config"), Mapping) and "hidden_size" not in config:
        config = {
            "model_type": config.get("model_type", ""),
            **config["text_config"],
        }  # a vision-language model: only the language model is trained
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
    biased = family in _PLAIN  # models without gates have biases in every layer
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
        # All experts share one tensor, which LoRA on "all linear layers" skips.
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
"""Supported values of `model_type`; a test compares the weight count of each with transformers."""
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
    trained = float(count_trained_weights(model, training))
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
        terms["adapter"] = 4.0 * _count_lora_weights(model, training) / weights_over
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
        # Two layers are gathered at a time: the current one and the next.
        each = 2.0 if training.method == "full" else narrow
        terms["gathered layers"] = (
            2 * each * model.linear / max(model.layers, 1) + 2 * model.vocabulary * model.hidden
        )

    tokens = training.length * training.batch * (2 if training.pairs else 1)
    layer = layer_bytes(model, training) * tokens
    gradients = 2.0 * (3 if model.gated else 2) * model.intermediate * tokens
    # Checkpoints between layers hold the residual stream, with the precision of the embeddings.
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
    # Reference log-probabilities need 16-bit logits and no gradients.
    first = 2.0 * training.precompute * 2 * training.length * model.vocabulary
    # Generation needs the key-value cache, and the logits of one token per sequence.
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
    terms["lost between tensors"] = sum(terms.values()) * FRAGMENTATION
    if training.context:
        terms["CUDA"] = CUDA_CONTEXT
    return terms


def count_trained_weights(model: Model, training: Training) -> int:
    """Return the number of trainable weights."""
    if training.method == "full":
        return model.parameters
    ends = model.vocabulary * model.hidden * (1 if model.tied else 2) if training.embeddings else 0
    return _count_lora_weights(model, training) + ends


def _count_lora_weights(model: Model, training: Training) -> int:
    """Return the number of LoRA weights: `rank` per input and output of each adapted layer."""
    attention = model.layers * (
        2 * (model.hidden + model.attention) + 2 * (model.hidden + model.keys)
    )
    return training.rank * (attention if training.targets == "attention" else model.adapted)


def layer_bytes(model: Model, training: Training) -> float:
    """Return the bytes per token that autograd saves for one layer's backward pass.

    Eager: the 32-bit input of each RMSNorm, the inputs of its weight and of the linear layers;
    queries, keys, values and the attention output; gate, activated gate, up and product of the
    feed-forward part. Autocast casts an input again for each linear layer, and so does a 32-bit
    LoRA. LoRA dropout keeps a mask of one byte per element. Compiled: elementwise operations are
    recomputed.
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
    """Return the bytes of the logits at the peak of their backward pass, as profiled in PyTorch."""
    if training.logits == "none":
        return 0.0
    elements = float(tokens) * model.vocabulary
    whole = 4.0 if training.upcast or training.frozen == 32 else 2.0
    scratch = 12.0  # log-probabilities, their gradient and the logits' gradient, 32 bits each
    if training.logits == "logps":
        # Sequence by sequence: all log-probabilities and gradients in 16 bits, one sequence twice.
        return elements * (whole + 4 + 2 / max(1, training.batch * (2 if training.pairs else 1)))
    if training.logits == "chunked":
        # The head's gradient of one chunk and the accumulated gradient exist together.
        head = 2.0 * model.vocabulary * model.hidden if training.method == "full" else 0.0
        return elements * (whole + (2 if training.compiled else scratch) / CHUNKS) + head
    if training.logits == "fused":
        # The chunk size makes the chunk's logits as large as all hidden states.
        return float(tokens) * model.hidden * (whole + scratch)
    return elements * (whole + scratch)
