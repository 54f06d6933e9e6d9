"""A plain script of TRL on the rows, the weights and the order of `sft@1`: what its losses and its times are held against.

    PYTHONPATH=recipes/trainers python benchmarks/plain_sft.py TOKENS BASE OUT SEED STEPS

TOKENS is what step `data` makes.  Prints one JSON object: the loss of each step, and its seconds from the end of the one before.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from adapters import adapted  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from text_model import load_base  # type: ignore[import-not-found, unused-ignore]
from tokens import Tokens, order  # type: ignore[import-not-found, unused-ignore]
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def row(tokens: Tokens, number: int) -> dict[str, Any]:
    """A sequence as TRL packs it."""
    documents = tokens.documents(number)
    ids = [int(token) for document, _ in documents for token in document]
    labels = [int(token) if learned else -100 for document, marks in documents for token, learned in zip(document, marks, strict=True)]
    return {"input_ids": ids, "labels": labels, "seq_lengths": [len(document) for document, _ in documents]}


def main() -> None:
    tokens, base, out, seed, steps = Tokens(Path(sys.argv[1]), "train"), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    rows = [row(tokens, number) for number in order(len(tokens), seed, 0, steps * 16)]
    options = Namespace(method="lora", rank=8, alpha=16, dropout=0.0, rank_stabilized=False, dora=False, train_embeddings=True, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    config = SFTConfig(
        output_dir=out, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", max_length=None, padding_free=True, optim="adamw_torch", seed=seed,
        gradient_checkpointing=False, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy="sequential",
        weight_decay=0.0, disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    model = adapted(load_base(base, "random", seed, "no"), options)
    trainer = SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[clock])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps({"losses": losses, "seconds": [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]}))


if __name__ == "__main__":
    main()
