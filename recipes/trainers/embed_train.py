"""Step `train` of embed: pull texts that belong together close in space, on sentence-transformers' trainer.  Knows texts, not files of rows.

The loss of a row is −log(e^{s(a,p)/t} / Σ e^{s(a,x)/t}): s the cosine, a the anchor, p its positive, t the temperature, x all positives and negatives
of the batch (MultipleNegativesRankingLoss; van den Oord and others, 2018, arXiv:1807.03748).  Of triplets it may be max(0, s(a,n) − s(a,p) + margin).
With `matryoshka` it is the sum of the losses of the first numbers of embeddings (Kusupati and others, 2022, arXiv:2205.13147).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import notices
import text_record
import torch
import trl_common as common
from control import Ending
from embed_model import POOLINGS, Embedder, load, loss_of, retrieval
from loop import fail
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
from splits import Splits, scheduled

if TYPE_CHECKING:
    from datasets import Dataset

NAMES = {"held_out_cosine_ndcg@10": "ndcg"}
SETTINGS = ("loss", "temperature", "margin", "matryoshka", "pooling")
"""What decides the loss, beside the settings of all trainings."""


class EmbedTrainer(SentenceTransformerTrainer):
    """sentence-transformers' trainer.  The recipe writes the card."""

    model_class = Embedder

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass


def main() -> None:
    options = _options()
    ending = Ending()
    _pass_on_warnings()
    rows = Splits(options.data)
    common.decide(options, len(rows.train))
    options.eval_every *= bool(len(rows.held_out))
    trainer = _trainer(options, rows)
    made = {name: getattr(options, name) for name in SETTINGS} | {"prompts": rows.manifest["prompts"]}
    common.train(trainer, options, {"data": rows.digest, **made}, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        made |= {name: getattr(options, name) for name in ("init", "method", "precision", "seed")}
        text_record.write(options.out, {**made, "max_length": rows.manifest["max_length"]})


def _trainer(options: argparse.Namespace, rows: Splits) -> EmbedTrainer:
    # In-batch negatives have to be in the batch: gradients added up over small ones would compare each text with few others.
    whole = options.loss == "mnrl"
    prompts = rows.manifest["prompts"]
    config = common.arguments(
        SentenceTransformerTrainingArguments,
        argparse.Namespace(**{**vars(options), "micro_batch": options.global_batch}) if whole else options,
        batch_sampler=_in_order,
        prompts=_of_columns(prompts, rows.manifest["columns"]),
    )
    model = load(
        options.base,
        options.init,
        options.seed,
        "no",  # all of it is learned
        pooling=options.pooling,
        prompts=prompts,
        max_length=rows.manifest["max_length"],
        attention=None if options.attention == "auto" else options.attention,
    )
    common.say(f"pooling {model[1].pooling_mode}, {model.get_embedding_dimension()} numbers an embedding")
    glance = rows.glance if options.eval_every else None
    return EmbedTrainer(
        model=model,
        args=config,
        train_dataset=_without_twins(rows.train, options) if whole else scheduled(rows.train, options),
        eval_dataset=glance,
        loss=loss_of(model, options, config.per_device_train_batch_size),
        evaluator=retrieval(glance, prompts, options.micro_batch, name="held_out") if glance else None,
    )


def _in_order(dataset: Dataset, batch_size: int, drop_last: bool, **others: Any) -> DefaultBatchSampler:
    """Return batches of the rows as they lie: their order was decided with the schedule."""
    return DefaultBatchSampler(torch.utils.data.SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)  # type: ignore[arg-type]


def _without_twins(rows: Dataset, options: argparse.Namespace) -> Dataset:
    """Return all rows that a training reads, in the order of sentence-transformers' own sampler: no batch, on all devices, has a text twice.

    A longer training begins with the order of a shorter one.
    """
    sampler = NoDuplicatesBatchSampler(
        rows, batch_size=options.global_batch, drop_last=True, generator=torch.Generator(), seed=options.seed
    )  # fmt: skip
    order: list[int] = []
    wanted = options.max_steps * options.global_batch
    epoch = 0
    while len(order) < wanted:
        sampler.set_epoch(epoch)
        read = [place for batch in sampler for place in batch]
        if not read:
            fail(f"no batch of {options.global_batch} rows without a text twice can be made of {len(rows)} rows: a smaller global_batch")
        order += read
        epoch += 1
    return rows.select(order[:wanted])


def _of_columns(prompts: dict[str, str], columns: Sequence[str]) -> dict[str, str]:
    """Return the prompt of each column: anchors are queries, all others are documents."""
    found = {name: prompts["document" if place else "query"] for place, name in enumerate(columns)}
    return {name: prompt for name, prompt in found.items() if prompt}


class _Warnings(logging.Handler):
    """Hands each warning of a library on to the user, once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._told and common.first():
            self._told.add(text)
            notices.warn(text, "train")


def _pass_on_warnings() -> None:
    logger = logging.getLogger("sentence_transformers")
    logger.addHandler(_Warnings())
    logger.propagate = False


def _options() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.set_defaults(method="full")
    common.add_epochs(parser)
    parser.add_argument("--loss", choices=["mnrl", "triplet"], default="mnrl")
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--margin", type=float, default=0.3)
    parser.add_argument("--matryoshka", type=int, nargs="*", default=[])
    parser.add_argument("--pooling", choices=POOLINGS, default="auto")
    return common.parsed(parser)


if __name__ == "__main__":
    main()
