"""Step `train` of dpo: move a language model towards chosen answers and away from rejected ones, on TRL's DPOTrainer.  Knows tokens, not text.

The loss of a pair is −log σ(β((log π(c) − log π₀(c)) − (log π(r) − log π₀(r)))), π the model, π₀ the base, c and r the answers (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7).  With LoRA π₀ is the same model with its adapter switched off; nothing is held twice.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import trl_common as common
from adapters import lora
from control import Ending
from datasets import Dataset
from preference_model import record
from splits import Splits, scheduled
from trl import DPOConfig, DPOTrainer

NAMES = {"rewards/margins": "margin", "rewards/accuracies": "accuracy", "rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected"}


class Trainer(DPOTrainer):
    """Takes tokens as they are: step `data` has made and judged them."""

    def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
        return dataset


def main() -> None:
    parser = common.parser(__doc__)
    common.add_epochs(parser)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--precompute-reference", action="store_true")
    options = common.parsed(parser)
    ending = Ending()
    given = Splits(options.data)
    common.decide(options, len(given.train))
    options.eval_every *= bool(len(given.held_out))
    config = common.arguments(
        DPOConfig,
        options,
        train_sampling_strategy="sequential",
        beta=options.beta,
        loss_type=["sigmoid"],
        max_length=None,
        precompute_ref_log_probs=options.precompute_reference,
    )
    pairs = Splits(_writable(options)) if options.precompute_reference else given
    model, adapter = common.load(options), lora(options, "CAUSAL_LM")
    trainer = Trainer(
        model=model,
        # Only read from, so it may be as small as the arithmetic.
        ref_model=None if adapter or options.precompute_reference else common.load(options, learned=False),
        args=config,
        train_dataset=pairs.train,
        eval_dataset=pairs.glance if options.eval_every else None,
        processing_class=common.tokenizer_of(options.base, model),
        peft_config=adapter,
    )
    # Only now: what is computed beforehand is computed once for each row, however often it is read.
    trainer.train_dataset = scheduled(trainer.train_dataset, options)
    settings = {"data": pairs.digest, "beta": options.beta, "precompute_reference": options.precompute_reference}
    common.train(trainer, options, settings, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        record(options, pairs)


def _writable(options: argparse.Namespace) -> Path:
    """The pairs in a folder of this attempt, shared by its processes: TRL puts what it computes beside the rows."""
    folder: Path = options.history.parent / ".reference"
    if common.first():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in options.data.iterdir():
            (folder / file.name).symlink_to(file.resolve())
    common.together()
    return folder


if __name__ == "__main__":
    main()
