"""Step `train` of orpo: learn chosen answers and their odds over rejected ones in one go, on TRL's ORPOTrainer.  Knows tokens, not text.

The loss of a pair is −log p(c) per token, over prompt and answer, − β log σ(log odds(c) − log odds(r)), odds(y) = p(y)/(1 − p(y)) with p(y) the mean
probability of a token of y as e^(mean log p) (Hong et al. 2024, arXiv:2403.07691, eq. 4 and 6).  There is no reference model.
"""

from __future__ import annotations

import trl_common as common
from adapters import lora
from control import Ending
from datasets import Dataset
from preference_model import record
from splits import Splits, scheduled
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

NAMES = {
    "log_odds_chosen": "log_odds", "rewards/accuracies": "accuracy", "nll_loss": "nll_loss", "logps/chosen": "logps_chosen",
    "logps/rejected": "logps_rejected",
}  # fmt: skip


class Tokens:
    """Pairs as ORPOTrainer makes them from text: it maps its own tokenizer over the rows, and these have been through one."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows

    def map(self, *_: object, **__: object) -> Tokens:
        return self

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        row = self._rows[number]
        prompt = row["prompt_ids"]
        made = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name in ("chosen", "rejected"):
            whole = prompt + row[f"{name}_ids"]
            made[f"{name}_input_ids"] = whole
            made[f"{name}_attention_mask"] = [1] * len(whole)
            made[f"{name}_labels"] = [-100] * len(prompt) + row[f"{name}_ids"]
        return made


def main() -> None:
    parser = common.parser(__doc__)
    common.add_epochs(parser)
    parser.add_argument("--beta", type=float, default=0.1)
    options = common.parsed(parser)
    ending = Ending()
    pairs = Splits(options.data)
    common.decide(options, len(pairs.train))
    options.eval_every *= bool(len(pairs.held_out))
    glance = pairs.glance if options.eval_every else None
    # Rows were cut by step `data`; the trainer is told its limit only because it wants one.
    config = common.arguments(
        ORPOConfig,
        options,
        train_sampling_strategy="sequential",
        beta=options.beta,
        max_length=pairs.manifest["max_length"],
        remove_unused_columns=False,
    )
    model = common.load(options)
    trainer = ORPOTrainer(
        model=model,
        args=config,
        train_dataset=Tokens(scheduled(pairs.train, options)),
        eval_dataset=Tokens(glance) if glance is not None else None,
        processing_class=common.tokenizer_of(options.base, model),
        peft_config=lora(options, "CAUSAL_LM"),
    )
    common.train(trainer, options, {"data": pairs.digest, "beta": options.beta}, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        record(options, pairs)


if __name__ == "__main__":
    main()
