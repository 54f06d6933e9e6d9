"""Step `train` of sft@1 and cpt: learn a LoRA adapter or the whole model from a token store, on TRL's SFTTrainer.  Knows no text.

The loss of a step is the mean of −log p over its learned tokens, wherever they are: the split of the global batch does not weigh.  TRL takes log p in
tiles and never holds the logits of a whole sequence.  What is trained depends on the settings and the global batch, not on how many processes share
it, and a training that was killed and resumed ends in the same bits as one that was not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import text_record
import torch
import trl_common as common
from adapters import adapted
from control import Ending
from datasets import Dataset
from text_model import batch_of
from tokens import Tokens, order
from trl import SFTConfig, SFTTrainer

GLANCE = 256  # held-out sequences that `eval_loss` looks at; step `evaluate` reads all of them
NAMES = {"tokens": "tokens"}


class Trainer(SFTTrainer):
    """Reads a token store in the order of its seed, and looks at held-out tokens one by one, each weighing the same."""

    def __init__(self, train: Tokens, held_out: Tokens, options: argparse.Namespace, **more: Any) -> None:
        self._held_out, self._learned = held_out, 0
        # TRL prepares text; these are tokens, and it is shown one row to begin with.
        shown = Dataset.from_dict({"sequence": [0]})
        self._flat = options.attention.startswith("flash")
        look = shown if options.eval_every else None
        super().__init__(train_dataset=shown, eval_dataset=look, data_collator=lambda rows: self._batch(train, rows), **more)
        self.train_dataset = _Order(len(train), options)
        self.processing_class = None  # or else each checkpoint has a tokenizer

    def _batch(self, tokens: Tokens, sequences: Sequence[int]) -> dict[str, torch.Tensor]:
        batch = batch_of(tokens, sequences, torch.device("cpu"), flat=self._flat)
        # TRL looks one token ahead itself.
        labels = batch.targets.roll(1, 1)
        labels[:, 0] = -100
        return {"input_ids": batch.tokens, "position_ids": batch.positions, "labels": labels}

    def _get_num_items_in_batch(self, batches: list[Any], device: torch.device) -> Any:
        counted = super()._get_num_items_in_batch(batches, device)
        self._learned = int(counted) if counted is not None else 0
        return counted

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
        self.log(dict(found))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found


class _Order(torch.utils.data.Dataset[int]):
    """The numbers of all sequences that a training reads: one epoch shuffled after the other, each looked up when its turn comes."""

    def __init__(self, length: int, options: argparse.Namespace) -> None:
        self._length, self._seed, self._count = length, options.seed, options.max_steps * options.global_batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        return order(self._length, self._seed, number, 1)[0]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--epochs", type=float, default=0.0, help="readings of all sequences, in place of max_steps")
    options = common.parsed(parser)
    ending = Ending()
    train, held_out = Tokens(options.data, "train"), Tokens(options.data, "held_out")
    if options.epochs:
        options.max_steps = math.ceil(options.epochs * len(train) / options.global_batch)
    options.eval_every *= bool(len(held_out))
    config = common.arguments(SFTConfig, options, train_sampling_strategy="sequential", max_length=None, remove_unused_columns=False,
                              dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip
    base = common.load(options)
    trainer = Trainer(train, held_out, options, model=adapted(base, options), args=config, processing_class=common.tokenizer_of(options.base, base))
    settings = {"data": train.digest}
    common.train(trainer, options, settings, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        made = {name: getattr(options, name) for name in (*common.SETTINGS, "precision")} | {"max_steps": trainer.state.global_step}
        text_record.write(options.out, {**made, **settings, "world": config.world_size, "end_token": train.manifest["end_token"]})


if __name__ == "__main__":
    main()
