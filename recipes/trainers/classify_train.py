"""Step `train` of classify: give a model a head with a number for each label, on transformers' Trainer.  Knows tokens, not text.

The loss of a row is −log softmax(f)(y): f the head's numbers, y the label, at the first token of models that read both ways, at the last of others.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import text_record
import trl_common as common
from adapters import adapted
from classify_model import figures
from control import Ending
from splits import Splits, scheduled
from transformers import DataCollatorWithPadding, EvalPrediction, Trainer, TrainingArguments
from tuned import load_judge

NAMES = {"accuracy": "accuracy", "macro_f1": "macro_f1"}


def main() -> None:
    parser = common.parser(__doc__)
    common.add_epochs(parser)
    options = common.parsed(parser)
    ending = Ending()
    rows = Splits(options.data)
    labels = rows.manifest["labels"]
    common.decide(options, len(rows.train))
    options.eval_every *= bool(len(rows.held_out))
    config = common.arguments(TrainingArguments, options, train_sampling_strategy="sequential")
    model = common.load(options, partial(load_judge, labels=labels))
    tokenizer = common.tokenizer_of(options.base, model)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # type: ignore[union-attr]

    def judged(found: EvalPrediction) -> dict[str, float]:
        told = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        found_figures = figures(np.asarray(told).argmax(-1), np.asarray(found.label_ids), labels)
        return {name: found_figures[name] for name in NAMES}

    trainer = Trainer(
        model=adapted(model, options, "SEQ_CLS"),  # peft learns a head of this kind whole, beside the adapter
        args=config,
        train_dataset=scheduled(rows.train, options),
        eval_dataset=rows.glance if options.eval_every else None,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=judged,
    )
    common.train(trainer, options, {"data": rows.digest, "labels": labels}, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        made = {name: getattr(options, name) for name in ("init", "method", "precision", "seed")}
        text_record.write(options.out, {**made, "labels": labels})


if __name__ == "__main__":
    main()
