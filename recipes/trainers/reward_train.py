"""Step `train` of reward: give a language model a head with one number, higher for chosen answers, on TRL's RewardTrainer.  Knows tokens, not text.

The loss of a pair is −log σ(r(c) − r(r)), the Bradley-Terry model of preference, r the head's number at the last token (Ouyang et al. 2022,
arXiv:2203.02155, eq. 1), plus, where it is asked for, k·mean((r(c) + r(r))²), which keeps rewards around zero (Eisenstein et al. 2023,
arXiv:2312.09244).
"""

from __future__ import annotations

import trl_common as common
from adapters import lora
from control import Ending
from preference_model import record, whole
from splits import Splits, scheduled
from trl import RewardConfig, RewardTrainer
from tuned import load_judge

NAMES = {"accuracy": "accuracy", "margin": "margin", "mean_reward": "mean_reward"}


def main() -> None:
    parser = common.parser(__doc__)
    common.add_epochs(parser)
    parser.add_argument("--center", type=float, default=0.0)
    options = common.parsed(parser)
    ending = Ending()
    pairs = Splits(options.data)
    common.decide(options, len(pairs.train))
    options.eval_every *= bool(len(pairs.held_out))
    config = common.arguments(
        RewardConfig,
        options,
        train_sampling_strategy="sequential",
        max_length=None,
        center_rewards_coefficient=options.center or None,
        remove_unused_columns=False,
    )
    model = common.load(options, load_judge)
    trainer = RewardTrainer(
        model=model,
        args=config,
        train_dataset=whole(scheduled(pairs.train, options)),
        eval_dataset=whole(pairs.glance) if options.eval_every and pairs.glance else None,
        processing_class=common.tokenizer_of(options.base, model),
        peft_config=lora(options, "SEQ_CLS"),  # which learns a head of this kind whole, beside the adapter
    )
    common.train(trainer, options, {"data": pairs.digest, "center": options.center}, ending, NAMES)
    common.export(trainer, options)
    if common.first():
        record(options, pairs)


if __name__ == "__main__":
    main()
