"""A plain script of TRL on the rows, the weights and the order of `sft@1`: what its losses, times and memory are held against.

    PYTHONPATH=recipes/trainers python benchmarks/plain_sft.py --data TOKENS --base BASE --out OUT --max-steps STEPS …

TOKENS is what step `data` makes; the options are those of recipes/trainers/text_train.py, as far as they are here.  Prints one JSON object: the loss
of each step, its seconds from the end of the one before, and 10⁹ bytes at the most, as recipes/trainers/telemetry.py counts them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from adapters import adapted, add_options  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from telemetry import gpu_memory, memory  # type: ignore[import-not-found, unused-ignore]
from text_model import load_base  # type: ignore[import-not-found, unused-ignore]
from tokens import Tokens, order  # type: ignore[import-not-found, unused-ignore]
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def row(tokens: Tokens, number: int) -> dict[str, Any]:
    """A sequence as TRL packs it."""
    documents = tokens.documents(number)
    ids = [int(token) for document, _ in documents for token in document]
    labels = [
        int(token) if learned else -100
        for document, marks in documents
        for token, learned in zip(document, marks, strict=True)
    ]
    return {
        "input_ids": ids,
        "labels": labels,
        "seq_lengths": [len(document) for document, _ in documents],
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("max-steps", "global-batch", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--init", default="pretrained")
    parser.add_argument("--precision", choices=["bf16", "no"], default="no")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    tokens = Tokens(options.data, "train")
    rows = [
        row(tokens, number)
        for number in order(len(tokens), options.seed, 0, options.max_steps * options.global_batch)
    ]
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    tokenizer.pad_token = tokenizer.eos_token
    config = SFTConfig(
        output_dir=str(options.out), max_steps=options.max_steps, per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.global_batch // options.micro_batch, learning_rate=options.learning_rate,
        lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=not torch.cuda.is_available(), save_strategy="no", max_length=None,
        # Documents that share a sequence are distinguished by their positions, which TRL gives only then.
        padding_free=any(len(each["seq_lengths"]) > 1 for each in rows), optim="adamw_torch", seed=options.seed,
        gradient_checkpointing=options.checkpoint_activations, gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=options.precision == "bf16", dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy="sequential",
        weight_decay=options.weight_decay, disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    arithmetic = "no" if options.method == "full" else options.precision
    model = adapted(
        load_base(
            options.base,
            options.init,
            options.seed,
            arithmetic,
            four_bits=options.method == "qlora",
        ),
        options,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    print(
        json.dumps(
            {"losses": losses, "seconds": seconds, "memory_gb": memory() / 1e9, **gpu_memory()}
        )
    )


if __name__ == "__main__":
    main()
