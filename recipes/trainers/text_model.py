"""The base model, batches from a token store, and how well a model predicts a split of it.  Does not know training."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from loop import draw, fail, needs
from tokens import Sequences, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNLEARNED = -100  # the target that is not learned
PADS = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>", "<|vision_pad|>", "<|PAD_TOKEN|>")
"""What tokenizers call the token that is there to fill up, where they do not say so themselves."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, padded at the end.  Positions begin again with each document, so that packed ones do not see each other."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor  # the token that follows, or UNLEARNED


def load_base(base: Path, init: str, seed: int, precision: str, *, four_bits: bool = False, attention: str | None = None) -> PreTrainedModel:
    """The base model with its own weights, or, where `init` is random, with weights drawn from the seed.

    `attention` is transformers' name of what computes it, where it is not to choose.  With `four_bits` the linear layers lie in memory as NF4, their
    scales quantised too, and are computed with in `precision`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    # A log keeps what people can act on: no bar of a load that takes a second, no news of names that peft has to change.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")

    if init == "random":
        draw("init", seed)
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        fresh: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)  # type: ignore[no-untyped-call]
        return in_four_bits(fresh, base, load_base, precision) if four_bits else fresh.to(DTYPES[precision])
    if not any(base.glob("*.safetensors")) and not any(base.glob("*.bin")):
        fail(f"{base} holds no weights (*.safetensors); init=random would train from random ones")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        base, dtype=DTYPES[precision], local_files_only=True, attn_implementation=attention, **(nf4(precision) if four_bits else {})
    )
    return as_loaded(model)


def as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose weights in 4 bits stay as they were read.

    On a processor with AVX512-BF16, bitsandbytes packs them at the first forward pass in eval mode, and computes with
    other roundings from then on.  When that is depends on evaluations and resumes, and so would what is learned.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def nf4(precision: str) -> dict[str, Any]:
    """What `from_pretrained` is to be given, for QLoRA (Dettmers and others, 2023, arXiv:2305.14314)."""
    from transformers import BitsAndBytesConfig

    needs("bitsandbytes", "method qlora", "method=lora")
    compute = DTYPES[precision]
    # Stored as what it is computed with: FSDP shards nothing but floats of one type.
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute, bnb_4bit_quant_storage=compute
    )
    return {"quantization_config": config, "device_map": {"": f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"}}


def in_four_bits(fresh: PreTrainedModel, base: Path, loads: Callable[..., PreTrainedModel], precision: str) -> PreTrainedModel:
    """Drawn weights in 4 bits: they are quantised where they are read from files, by `loads`."""
    with tempfile.TemporaryDirectory() as folder:
        fresh.save_pretrained(folder)
        found = loads(Path(folder), "pretrained", 0, precision, four_bits=True, attention=fresh.config._attn_implementation)
    found.name_or_path = str(base)
    return found


def fill_up(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Give a tokenizer a token to fill up with that is not the end token, if its vocabulary has one, or the `rows` of embeddings have room for one.

    Else the end token fills up.  Texts are filled up behind their end.
    """
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        known = tokenizer.get_vocab()
        named = next((name for name in PADS if name in known and name != tokenizer.eos_token), None)
        if named is None and rows > max(known.values()) + 1:
            named = PADS[1]
            tokenizer.add_special_tokens({"pad_token": named})
        tokenizer.pad_token = named or tokenizer.eos_token
    tokenizer.padding_side = "right"


def identity(base: Path) -> str:
    """A name for the base model's files that is quick to take: what the config says, and how long each file is."""
    files = sorted(
        (file.name, file.stat().st_size) for file in base.iterdir() if file.is_file() and not file.name.startswith(".") and file.suffix != ".md"
    )
    return hashlib.sha256(repr(files).encode() + (base / "config.json").read_bytes()).hexdigest()


def batch_of(tokens: Sequences, sequences: Sequence[int], device: torch.device, *, flat: bool = False) -> Batch:
    """Sequences side by side: tokens, positions and targets, each of `len(sequences)` × the length of the longest.

    `flat`: one behind the other in one row, without padding, for kernels that find documents by their positions there.
    """
    read = [tokens.documents(sequence) for sequence in sequences]
    if flat:
        read = [[document for documents in read for document in documents]]
    width = max(sum(len(ids) for ids, _ in documents) for documents in read)
    shape = (len(read), width)
    ids, positions, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, UNLEARNED, np.int64)
    for row, documents in enumerate(read):
        at = 0
        for document, learned in documents:
            end = at + len(document)
            ids[row, at:end] = document
            # To the end of the row: padding goes on counting, so that it does not look like documents of one token.
            positions[row, at:] = np.arange(width - at)
            targets[row, at : end - 1] = np.where(learned[1:], document[1:].astype(np.int64), UNLEARNED)
            at = end
    return Batch(*(torch.from_numpy(array).to(device) for array in (ids, positions, targets)))


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The sum over learned tokens of −log p: to be divided by the number of tokens of a whole step, wherever its sequences are."""
    # No mask: padding is at the end, where causal attention does not see it, and documents are told apart by their positions.
    logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
    wanted = batch.targets != UNLEARNED
    return torch.nn.functional.cross_entropy(logits[wanted].float(), batch.targets[wanted], reduction="sum")


def surprise(model: torch.nn.Module, tokens: Tokens, sequences: Sequence[int], size: int, device: torch.device) -> tuple[float, int]:
    """The sum of −ln p over the learned tokens of many sequences, `size` at a time, and the number of those tokens."""
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for at in range(0, len(sequences), size):
            batch = batch_of(tokens, sequences[at : at + size], device)
            total += float(loss_of(model, batch))
            count += int((batch.targets != UNLEARNED).sum())
    model.train(was_training)
    return total, count
