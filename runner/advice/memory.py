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
from typing import Any, Final, Literal, NamedTuple

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
"""Bytes of optimizer state on the GPU per trained weight.  Paged optimizers use managed memory,
which PyTorch does not count and CUDA can evict.  Adafactor's state is negligible.  Fused AdamW
needs no scratch space.
"""


class UnknownConfig(ValueError):
    """Error for a config.json without a required value. The message names the value."""


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder-only transformer: widths in elements, and weight counts."""

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
class TrainingSetup:
    """Training settings that determine the memory of one device. Lengths are in tokens."""

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

    @property
    def sequences(self) -> int:
        """Sequences of one step on a device. A preference pair has two."""
        return 2 * self.batch if self.pairs else self.batch


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory on each device in bytes: the likely value, a range and the summed terms."""

    bytes: int
    low: int
    high: int
    terms: tuple[tuple[str, int], ...]
    measured: str = ""

    def verdict(self, usable: float) -> Verdict:
        """Return the verdict FITS, TIGHT or NO for a device with `usable` bytes.

        FITS means that the upper bound fits, and NO that even the lower bound exceeds `usable`.
        TIGHT is in between.
        """
        if self.high <= usable:
            return "FITS"
        return "NO" if self.low > usable else "TIGHT"

    def __str__(self) -> str:
        low, high = self.low / 1e9, self.high / 1e9
        places = 1 if high < 10 else 0
        return f"about {low:.{places}f}-{high:.{places}f} GB"


def estimate(model: Model | Mapping[str, Any], training: TrainingSetup) -> MemoryEstimate:
    """Return the peak memory of a training step on each device.

    `model` may be the content of a config.json. Raises UnknownConfig.
    """
    if not isinstance(model, Model):
        model = read(model)
    terms = {name: round(size) for name, size in _terms(model, training).items() if size >= 1}
    total = sum(terms.values())
    return MemoryEstimate(
        total, round(total * (1 - BELOW)), round(total * (1 + ABOVE)), tuple(terms.items())
    )


def calibrate(found: MemoryEstimate, factor: float, runs: int, measured: str) -> MemoryEstimate:
    """Return an estimate scaled by measurements of `runs` runs.

    `factor` is the ratio of PyTorch's measured memory to its estimate, without CUDA's own memory.
    """
    context = dict(found.terms).get("CUDA", 0)
    more = round((found.bytes - context) * (factor - 1))
    size = found.bytes + more
    # The effect of changed settings stays an estimate, so the range never closes.
    spread = max(0.05, BELOW / 2 / runs**0.5)
    terms = (*found.terms, (f"as measured, × {factor:.2f}", more))
    return MemoryEstimate(
        size, round(size * (1 - spread)), round(size * (1 + spread)), terms, measured
    )


# -- the model --


def read(config: Mapping[str, Any]) -> Model:
    """Return the model shape from a config.json; weights are counted as in transformers.

    Raises UnknownConfig.
    """
    config = _language_config(config)
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise UnknownConfig(
            f'cannot count the weights of the model family "{family}"; known families: {", ".join(FAMILIES)}'
        )
    hidden = _whole(config, "hidden_size", "n_embd", "d_model")
    layers = _whole(config, "num_hidden_layers", "n_layer")
    heads = _whole(config, "num_attention_heads", "n_head")
    vocabulary = _whole(config, "vocab_size")
    if not heads:
        raise UnknownConfig("config.json has no number of attention heads")
    has_grouped_keys = family not in ("gpt2", "gpt_neox", "bloom")
    kv_heads = _whole(config, "num_key_value_heads", default=heads) if has_grouped_keys else heads
    default_head = 256 if family.startswith("gemma") else hidden // heads
    head = _whole(config, "head_dim", default=default_head)
    attention, keys = heads * head, kv_heads * head
    tied = bool(config.get("tie_word_embeddings", family in _TIED))

    block = _attention_part(config, family, hidden, attention, keys, head)
    feed_forward, intermediate = _feed_forward_part(config, family, hidden, layers)
    body = block.times(layers).plus(feed_forward)
    ends = _count_end_weights(config, family, hidden, vocabulary, tied)
    return Model(
        family=family,
        layers=layers,
        hidden=hidden,
        attention=attention,
        keys=keys,
        heads=heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        gated=family not in _PLAIN,
        parameters=body.linear + body.other + ends,
        linear=body.linear,
        adapted=body.adapted,
        tied=tied,
    )


class _Part(NamedTuple):
    """Weight counts of one part of a model."""

    linear: int = 0  # weights of linear layers
    adapted: int = 0  # inputs + outputs of the linear layers that a LoRA adapts
    other: int = 0  # biases, norms and routers

    def plus(self, more: _Part) -> _Part:
        return _Part(
            self.linear + more.linear, self.adapted + more.adapted, self.other + more.other
        )

    def times(self, count: int) -> _Part:
        return _Part(self.linear * count, self.adapted * count, self.other * count)


def _language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language-model part of a config.json, the only trained part of a vision model."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        return {"model_type": config.get("model_type", ""), **text}
    return config


def _attention_part(
    config: Mapping[str, Any], family: str, hidden: int, attention: int, keys: int, head: int
) -> _Part:
    """Return the weights of one layer's attention and norms."""
    is_plain = family in _PLAIN
    if family in ("qwen2", "qwen2_moe"):
        # Its config.json does not say so.
        has_input_bias, has_output_bias = True, False
    else:
        has_input_bias = is_plain or bool(config.get("attention_bias", False))
        has_output_bias = has_input_bias
    other = 0
    if has_input_bias:
        other += attention + 2 * keys
    if has_output_bias:
        other += hidden
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "gemma3"):
        other += 2 * head
    elif family in ("olmo2", "olmo3"):
        other += attention + keys
    norms = 4 if family in ("gemma2", "gemma3", "gemma3_text") else 2
    vectors_of_norm = 2 if is_plain else 1  # with a bias
    other += norms * hidden * vectors_of_norm
    linear = 2 * hidden * attention + 2 * hidden * keys
    adapted = (hidden + attention) * 2 + (hidden + keys) * 2
    return _Part(linear, adapted, other)


def _feed_forward_part(
    config: Mapping[str, Any], family: str, hidden: int, layers: int
) -> tuple[_Part, int]:
    """Return the weights of all feed-forward layers, and the feed-forward width used per token."""
    matrices = 2 if family in _PLAIN else 3

    def matrices_of(width: int) -> _Part:
        return _Part(matrices * hidden * width, matrices * (hidden + width))

    wide = _feed_forward_width(config, family, hidden)
    dense = matrices_of(wide)._replace(other=_count_feed_forward_bias(config, family, hidden, wide))
    experts = _whole(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not experts:
        return dense.times(layers), wide
    expert = _whole(config, "moe_intermediate_size", default=wide)
    chosen = _whole(config, "num_experts_per_tok", default=2)
    shared = _whole(
        config,
        "shared_expert_intermediate_size",
        default=expert * _whole(config, "n_shared_experts", default=0),
    )
    # All experts share one tensor, which LoRA on "all linear layers" skips.  The router is never
    # quantised.
    sparse = _Part(experts * matrices_of(expert).linear, 0, hidden * experts)
    if shared:
        sparse = sparse.plus(matrices_of(shared))
        if family == "qwen2_moe":
            sparse = sparse.plus(_Part(other=hidden))
    sparse_layers = sum(_is_sparse(config, n) for n in range(layers))
    dense_layers = layers - sparse_layers
    dense_width = wide if dense_layers else 0
    intermediate = max(chosen * expert + shared, dense_width)
    return sparse.times(sparse_layers).plus(dense.times(dense_layers)), intermediate


def _feed_forward_width(config: Mapping[str, Any], family: str, hidden: int) -> int:
    if family == "bloom":
        return 4 * hidden
    name = "n_inner" if family == "gpt2" else "intermediate_size"
    return _whole(config, name, default=4 * hidden)


def _count_feed_forward_bias(
    config: Mapping[str, Any], family: str, hidden: int, width: int
) -> int:
    if family in _PLAIN:
        return width + hidden
    return 2 * width + hidden if config.get("mlp_bias") else 0


def _count_end_weights(
    config: Mapping[str, Any], family: str, hidden: int, vocabulary: int, tied: bool
) -> int:
    """Return the number of weights in embeddings, output head and final norm."""
    matrices = 1 if tied else 2
    vectors_of_norm = 2 if family in _PLAIN else 1  # with a bias
    ends = vocabulary * hidden * matrices + hidden * vectors_of_norm
    if family == "gpt2":
        ends += _whole(config, "n_positions", "max_position_embeddings", default=1024) * hidden
    elif family == "bloom":
        ends += 2 * hidden  # a norm after the embeddings
    return ends


FAMILIES: Final = (
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
    "olmo2",
    "olmo3",
    "granite",
    "smollm3",
    "starcoder2",
    "gpt2",
    "gpt_neox",
    "bloom",
)
"""Supported values of `model_type`; a test compares the weight count of each with transformers."""
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "bloom", "starcoder2")
_PLAIN = ("gpt2", "gpt_neox", "bloom", "starcoder2")
"""Model families without gates, which have a bias in every layer."""


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Return True if a layer of a model has a mixture of experts."""
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    if layer < _whole(config, "first_k_dense_replace", default=0):
        return False
    step = max(1, _whole(config, "decoder_sparse_step", default=1))
    return (layer + 1) % step == 0


def _whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    if default is None:
        raise UnknownConfig(f"config.json has no {names[0]}")
    return default


# -- the terms --


class _Shards(NamedTuple):
    """Number of devices that share each part of the training state."""

    weights: int
    gradients: int
    optimizer: int


def _shards_of(training: TrainingSetup) -> _Shards:
    # Each stage of ZeRO shards one part more.
    weights = training.devices if training.stage == 3 else 1
    gradients = training.devices if training.stage >= 2 else 1
    optimizer = training.devices if training.stage >= 1 else 1
    return _Shards(weights, gradients, optimizer)


def _terms(model: Model, training: TrainingSetup) -> dict[str, float]:
    """Return the bytes of each component of the peak memory, by name."""
    if training.optimizer not in _OPTIMIZERS:
        raise UnknownConfig(
            f'unknown optimizer "{training.optimizer}"; known optimizers: {", ".join(_OPTIMIZERS)}'
        )
    stage = training.stage
    shards = _shards_of(training)
    trained = float(count_trained_weights(model, training))
    if training.method == "full":
        terms = _full_terms(model, training, shards, trained)
    else:
        terms = _adapter_terms(model, training, shards, trained)
    if training.others:
        terms["other models"] = training.others * 2.0 / shards.weights
    if not training.offload:
        terms["optimizer"] = trained * _optimizer_bytes(training) / shards.optimizer
    elif stage == 3:
        for name in _OFFLOADED_WEIGHTS:
            terms.pop(name, None)
    if stage in (1, 2):
        terms["communication"] = BUCKET
    elif stage == 3:
        terms["gathered layers"] = _gathered_bytes(model, training)
    terms |= _peak_terms(model, training, _scratch_bytes(training, shards, trained))
    terms["lost between tensors"] = sum(terms.values()) * FRAGMENTATION
    if training.context:
        terms["CUDA"] = CUDA_CONTEXT
    return terms


_OFFLOADED_WEIGHTS: Final = (
    "weights",
    "16-bit copies of the weights",
    "frozen weights of linear layers",
    "embeddings, norms and head",
)
"""Terms that ZeRO stage 3 keeps in CPU memory with offload."""


def _full_terms(
    model: Model, training: TrainingSetup, shards: _Shards, trained: float
) -> dict[str, float]:
    """Return the bytes of weights and gradients in full fine-tuning."""
    width = _gradient_bytes(training)
    terms = {"weights": trained * width / shards.weights}
    if training.master:
        # Autocast keeps the 16-bit copy of each trained weight until the pass is over.
        terms["16-bit copies of the weights"] = trained * 2 / shards.weights
    if training.in_backward:
        largest = max(model.vocabulary * model.hidden, model.hidden * model.intermediate)
        terms["one gradient"] = width * largest
    else:
        terms["gradients"] = trained * width / shards.gradients
    return terms


def _adapter_terms(
    model: Model, training: TrainingSetup, shards: _Shards, trained: float
) -> dict[str, float]:
    """Return the bytes of weights and gradients in LoRA training."""
    rest = model.parameters - model.linear
    wide = _computation_bytes(training)
    terms = {
        "frozen weights of linear layers": model.linear * _frozen_bytes(training) / shards.weights,
        "embeddings, norms and head": rest * wide / shards.weights,
    }
    if training.embeddings:
        terms["embeddings that are trained"] = _count_embedding_weights(model) * 4
    terms["adapter"] = 4.0 * _count_lora_weights(model, training) / shards.weights
    terms["gradients"] = trained * 4 / shards.gradients
    return terms


def _frozen_bytes(training: TrainingSetup) -> float:
    return _NF4 if training.method == "qlora" else training.frozen / 8


def _trains_16_bit_weights(training: TrainingSetup) -> bool:
    return training.method == "full" and not training.master


def _computation_bytes(training: TrainingSetup) -> int:
    """Return the bytes of one value in the computation, which has 32 or 16 bits."""
    if training.upcast or training.frozen == 32:
        return 4
    return 2


def _gradient_bytes(training: TrainingSetup) -> int:
    """Return the bytes of a gradient, and of a weight in full fine-tuning."""
    return 2 if _trains_16_bit_weights(training) else 4


def _optimizer_bytes(training: TrainingSetup) -> float:
    """Return the bytes of optimizer state per trained weight."""
    is_adamw = training.optimizer in ("adamw", "adamw_fused")
    if is_adamw and _trains_16_bit_weights(training):
        return 4.0  # AdamW's moments have the type of the weights
    return _OPTIMIZERS[training.optimizer]


def _scratch_bytes(training: TrainingSetup, shards: _Shards, trained: float) -> float:
    """Return the temporary bytes of an optimizer step, which only the unfused AdamW needs."""
    is_in_backward = training.method == "full" and training.in_backward
    if training.optimizer != "adamw" or is_in_backward:
        return 0.0
    return trained * _gradient_bytes(training) / shards.optimizer


def _gathered_bytes(model: Model, training: TrainingSetup) -> float:
    """Return the bytes of the layers gathered by ZeRO 3: the current layer and the next."""
    width = 2.0 if training.method == "full" else _frozen_bytes(training)
    layers = 2 * width * model.linear / max(model.layers, 1)
    return layers + 2 * model.vocabulary * model.hidden


def _peak_terms(model: Model, training: TrainingSetup, scratch: float) -> dict[str, float]:
    """Return the largest temporary memory: of the backward pass, generation or the optimizer."""
    tokens = training.length * training.sequences
    layer = layer_bytes(model, training) * tokens
    if training.checkpointing:
        kept = model.layers * (_stream_bytes(training) * model.hidden * tokens)
    else:
        kept = model.layers * layer
    logits = _logits(model, training, tokens)
    working = _working_bytes(model, training, tokens, layer)
    # Reference log-probabilities need 16-bit logits and no gradients.
    first = 2.0 * training.precompute * 2 * training.length * model.vocabulary
    # Generation needs the key-value cache, and the logits of one token per sequence.
    cache = 4.0 * model.layers * model.keys * training.length
    written = training.generating * (cache + 6.0 * model.vocabulary)
    if kept + max(working, logits) >= max(scratch, first, written):
        largest = "logits" if logits >= working else "the active layer"
        return {"stored activations": kept, largest: max(working, logits)}
    if written >= max(scratch, first):
        return {"key-value cache of generation": written}
    if first >= scratch:
        return {"logits of the reference model": first}
    return {"scratch memory of the optimizer": scratch}


def _stream_bytes(training: TrainingSetup) -> float:
    """Return the bytes of one residual-stream element, as stored by gradient checkpointing."""
    has_master = training.master and training.method == "full"
    return 4.0 if has_master else float(_computation_bytes(training))


def _working_bytes(model: Model, training: TrainingSetup, tokens: int, layer: float) -> float:
    """Return the bytes of one layer's backward pass; `layer` are its activations."""
    matrices = 3 if model.gated else 2
    working = 2.0 * matrices * model.intermediate * tokens
    if training.checkpointing:
        working += layer
    if training.method == "qlora" or training.frozen == 8:
        working += 2.0 * model.hidden * model.intermediate  # one dequantised layer
    return working


def _count_embedding_weights(model: Model) -> int:
    matrices = 1 if model.tied else 2
    return model.vocabulary * model.hidden * matrices


def count_trained_weights(model: Model, training: TrainingSetup) -> int:
    """Return the number of trainable weights."""
    if training.method == "full":
        return model.parameters
    ends = _count_embedding_weights(model) if training.embeddings else 0
    return _count_lora_weights(model, training) + ends


def _count_lora_weights(model: Model, training: TrainingSetup) -> int:
    """Return the number of LoRA weights: `rank` per input and output of each adapted layer."""
    if training.targets != "attention":
        return training.rank * model.adapted
    queries_and_outputs = 2 * (model.hidden + model.attention)
    keys_and_values = 2 * (model.hidden + model.keys)
    return training.rank * model.layers * (queries_and_outputs + keys_and_values)


def layer_bytes(model: Model, training: TrainingSetup) -> float:
    """Return the bytes per token that autograd saves for one layer's backward pass.

    Eager: the 32-bit input of each RMSNorm, the inputs of its weight and of the linear layers;
    queries, keys, values and the attention output; gate, activated gate, up and product of the
    feed-forward part. Autocast casts an input again for each linear layer, and so does a 32-bit
    LoRA. LoRA dropout keeps a mask of one byte per element. Compiled: elementwise operations are
    recomputed.
    """
    hidden, wide = model.hidden, model.intermediate
    attention = 2 * (model.attention + 2 * model.keys) + 2 * model.attention
    inputs = 8  # bytes per unit of width
    casts = 0
    if training.compiled:
        kept = 2 if model.gated else 1  # tensors of the feed-forward part
    elif training.method == "full":
        inputs = 26 if training.master else 16
        kept = 4 if model.gated else 2
    elif training.targets == "attention":
        kept = 3 if model.gated else 1
        casts = 2 * (3 * hidden + model.attention)
    else:
        kept = 4 if model.gated else 2
        casts = 2 * (5 * hidden + model.attention)
    found = inputs * hidden + attention + 2 * kept * wide + casts
    if not training.compiled:
        found += _dropout_bytes(model, training)
    if training.attention == "eager":
        # Scores after the softmax in 32 bits and in 16, and keys and values repeated for each head.
        found += 6 * model.heads * training.length + 4 * (model.attention - model.keys)
    return float(found)


def _dropout_bytes(model: Model, training: TrainingSetup) -> int:
    """Return the bytes per token of the masks of a LoRA's dropout in one layer."""
    if not training.dropout or training.method == "full":
        return 0
    masks = 3 * model.hidden + model.attention
    if training.targets != "attention":
        matrices = 2 if model.gated else 1
        masks += matrices * model.hidden + model.intermediate
    return masks


def _logits(model: Model, training: TrainingSetup, tokens: int) -> float:
    """Return the bytes of the logits at the peak of their backward pass, as profiled in PyTorch."""
    if training.logits == "none":
        return 0.0
    elements = float(tokens) * model.vocabulary
    whole = float(_computation_bytes(training))
    scratch = 12.0  # log-probabilities, their gradient and the logits' gradient, 32 bits each
    if training.logits == "logps":
        # Sequence by sequence: all log-probabilities and gradients in 16 bits, one sequence twice.
        return elements * (whole + 4 + 2 / max(1, training.sequences))
    if training.logits == "chunked":
        # The head's gradient of one chunk and the accumulated gradient exist together.
        head = 2.0 * model.vocabulary * model.hidden if training.method == "full" else 0.0
        of_chunk = 2 if training.compiled else scratch
        return elements * (whole + of_chunk / CHUNKS) + head
    if training.logits == "fused":
        # The chunk size makes the chunk's logits as large as all hidden states.
        return float(tokens) * model.hidden * (whole + scratch)
    return elements * (whole + scratch)
