"""Step `train` of sft@1 and cpt: learn a LoRA adapter or the whole model from a token store, or a stream, on TRL's SFTTrainer.  Knows no text.

The loss of a step is the mean of −log p over its learned tokens, wherever they are: the split of the global batch does not weigh.  TRL takes log p in
tiles and never holds the logits of a whole sequence.  What is trained depends on the settings and the global batch, not on how many processes share
it, and a training that was killed and resumed ends in the same bits as one that was not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import packing
import text_record
import torch
import trl_common as common
from adapters import adapted
from control import Ending
from datasets import Dataset
from loop import fail
from rows import BadData
from stream_data import Stream
from text_model import batch_of
from tokens import Sequences, Tokens, order
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

PLACE = "stream.json"  # of a checkpoint: where in the data set it goes on
LARGEST = 700.0  # the logarithm of the greatest perplexity that a number holds
GLANCE = 256  # held-out sequences that `eval_loss` looks at; step `evaluate` reads all of them
NAMES = {"tokens": "tokens", "perplexity": "perplexity"}


class Trainer(SFTTrainer):
    """Reads a token store in the order of its seed, and looks at held-out tokens one by one, each weighing the same."""

    def __init__(self, train: Tokens | Stream, held_out: Tokens, options: argparse.Namespace, **more: Any) -> None:
        self._held_out, self._learned, self._options = held_out, 0, options
        self._stream = train if isinstance(train, Stream) else None
        # TRL prepares text; these are tokens, and it is shown one row to begin with.
        shown = Dataset.from_dict({"sequence": [0]})
        self.flat = options.attention.startswith("flash")
        look = shown if options.eval_every else None
        super().__init__(train_dataset=shown, eval_dataset=look, data_collator=lambda rows: self._batch(train, rows), **more)
        self.train_dataset = _Order(None if isinstance(train, Stream) else len(train), options)
        self.processing_class = None  # or else each checkpoint has a tokenizer

    def _batch(self, tokens: Sequences, sequences: Sequence[int]) -> dict[str, torch.Tensor]:
        try:
            batch = batch_of(tokens, sequences, torch.device("cpu"), flat=self.flat)
        except BadData as error:
            fail(str(error))
        # TRL looks one token ahead itself.
        labels = batch.targets.roll(1, 1)
        labels[:, 0] = -100
        return {"input_ids": batch.tokens, "position_ids": batch.positions, "labels": labels}

    def _get_num_items_in_batch(self, batches: list[Any], device: torch.device) -> Any:
        counted = super()._get_num_items_in_batch(batches, device)
        self._learned = int(counted) if counted is not None else 0
        return counted

    def _save_checkpoint(self, *told: Any, **more: Any) -> None:
        super()._save_checkpoint(*told, **more)
        if self._stream is not None and common.first():
            place = self._stream.place(self.state.global_step * self._options.global_batch)
            (Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}" / PLACE).write_text(json.dumps(place) + "\n")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "tokens": self._learned} if "loss" in logs else logs, start_time)

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """The mean loss over the first held-out sequences.  Every process looks equally often, as a sharded model wants it."""
        model, device = self.model, self.args.device
        me, world, size = self.args.process_index, self.args.world_size, self.args.per_device_eval_batch_size
        count = min(GLANCE, len(self._held_out))
        both = torch.zeros(2, dtype=torch.float64, device=device)
        model.eval()
        for at in range(0, count, size * world):
            mine = range(at + me, min(at + size * world, count), world)
            batch = {name: part.to(device) for name, part in self._batch(self._held_out, mine or [0]).items()}
            with torch.no_grad(), self.compute_loss_context_manager():
                found = model(**batch, fused_lm_head=True, use_cache=False)
            if mine:
                both += torch.stack([-found.log_probs.sum(dtype=torch.float64), found.label_mask.sum().double()])
        model.train()
        if world > 1:
            torch.distributed.all_reduce(both)
        found = {"eval_loss": float(both[0] / both[1])}
        self.log({**found, "perplexity": math.exp(min(found["eval_loss"], LARGEST))})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found


class _Apart(TrainerCallback):
    """Asks the model that learns, with the kernels that it has here, whether documents that share a sequence see each other."""

    def __init__(self, flat: bool, options: argparse.Namespace) -> None:
        self._flat, self._options = flat, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        found = packing.difference(more["model"], flat=self._flat)
        if found > (packing.TOLERANCE if self._options.precision == "no" else packing.HALF_TOLERANCE):
            remedy = "packing=false" if not self._flat else "attention=sdpa"
            fail(f"documents that share a sequence see each other in this model: logits differ by {found:.2g} deviations; train it with {remedy}")


class _Order(torch.utils.data.Dataset[int]):
    """The numbers of all sequences that a training reads: one epoch shuffled after the other, each looked up when its turn comes.

    Without a length they come in their order, as a stream has them.
    """

    def __init__(self, length: int | None, options: argparse.Namespace) -> None:
        self._length, self._seed, self._count = length, options.seed, options.max_steps * options.global_batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        return number if self._length is None else order(self._length, self._seed, number, 1)[0]


def main() -> None:
    parser = common.parser(__doc__)
    common.add_epochs(parser)
    parser.add_argument("--stream", type=Path, help="the data set, to be read while training")
    parser.add_argument("--max-bad-rows", type=int, default=0, help="stream: bad rows of one reading that are left out")
    options = common.parsed(parser)
    ending = Ending()
    held_out = Tokens(options.data, "held_out")
    train = _stream(options) if options.stream else Tokens(options.data, "train")
    if isinstance(train, Tokens):
        common.decide(options, len(train))
    options.eval_every *= bool(len(held_out))
    config = common.arguments(SFTConfig, options, train_sampling_strategy="sequential", max_length=None, remove_unused_columns=False,
                              dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip
    base = common.load(options)
    trainer = Trainer(train, held_out, options, model=adapted(base, options), args=config, processing_class=common.tokenizer_of(options.base, base))
    if train.manifest["packing"] or trainer.flat:
        trainer.add_callback(_Apart(trainer.flat, options))
    settings = {"data": train.digest}
    common.train(trainer, options, settings, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        made = {name: getattr(options, name) for name in (*common.SETTINGS, "precision")} | {"max_steps": trainer.state.global_step}
        text_record.write(options.out, {**made, **settings, "world": config.world_size, "end_token": train.manifest["end_token"]})


def _stream(options: argparse.Namespace) -> Stream:
    """The data set itself, from where `options.resume` was in it.  Ends with a message where its length would have to be known."""
    if options.epochs:
        fail("epochs 0 is what streaming takes: how long a reading of all the data is shows at its end; say max_steps")
    # Each process cuts all rows into tokens: a share of the processors for each.
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1")))))
    try:
        stream = Stream(options.stream, options.data, options.base, options.max_bad_rows)
    except BadData as error:
        fail(str(error))
    if options.resume and (options.resume / PLACE).exists():
        stream.begin(json.loads((options.resume / PLACE).read_text()))
    return stream


if __name__ == "__main__":
    main()
