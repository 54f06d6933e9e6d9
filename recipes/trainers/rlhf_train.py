"""Step `train` of rlhf: learn from rewards of the model's own completions, by RLOO or GRPO.  Knows prompts and rewards, not where they come from.

One optimizer step: for each of global_batch / num_generations prompts, num_generations completions are drawn from the model as it is, each gets a
reward, and the model is moved towards those that are better than their siblings.  Completions are never used twice: nothing of them is needed to go
on from the end of a step.  What is drawn depends on the seed, the step and the place in the global batch (see rlhf_sampling); not so by vLLM.

RLOO: Ahmadian et al. 2024, arXiv:2402.14740: advantage = reward − mean reward of the siblings; the KL to the base is part of the reward.
GRPO: Shao et al. 2024, arXiv:2402.03300: advantage = (reward − mean) / deviation of the group; the KL is part of the loss.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adapters
import rlhf_rewards
import sharding
import text_record
import torch
import trl_common
from control import Ending
from disk import sha256
from loop import fail, needs
from rlhf_data import end_token, load, load_tokenizer
from rlhf_sampling import Draws, drawing, table
from rows import BadData
from text_model import identity
from tokens import order

if TYPE_CHECKING:
    from rlhf_rewards import Reward
    from telemetry import Telemetry
    from transformers import PreTrainedModel

SETTINGS = (
    "algorithm", "num_generations", "max_completion_length", "temperature", "beta", "rewards", "reward_pattern", "reward_length", "reward_init",
    "use_vllm",
)  # fmt: skip
GLANCE = 32  # held-out prompts that are looked at while training; step `evaluate` takes more
TOLD = {
    "reward": "reward", "reward_std": "reward_std", "kl": "kl", "entropy": "entropy", "completions/mean_length": "completion_tokens",
    "completions/clipped_ratio": "cut_off", "frac_reward_zero_std": "no_difference",
}  # fmt: skip


def main() -> None:
    options = _options()
    ending = Ending()
    kind, config = _algorithm(options.algorithm)
    if options.global_batch % options.num_generations:
        fail(f"global_batch {options.global_batch} is no multiple of num_generations {options.num_generations}")
    rows = load(options.data, "train")
    if not rows:
        fail(f"{options.data} holds no prompt to train on")
    trl_common.decide(options, len(rows) * options.num_generations)
    held_out = load(options.data, "held_out")[:GLANCE]
    options.eval_every *= bool(held_out)
    arguments = trl_common.arguments(
        config, options, num_generations=options.num_generations, max_completion_length=options.max_completion_length,
        temperature=options.temperature, beta=options.beta, disable_dropout=True,
        per_device_eval_batch_size=options.num_generations, **vllm(options),
    )  # fmt: skip
    try:
        tokenizer = load_tokenizer(options.base, options.chat_template, end_token(options.data)["text"])
    except BadData as error:
        fail(str(error))
    rewards = rlhf_rewards.asked(options, arguments.device)
    arguments.reward_weights = [reward.weight for reward in rewards]
    from datasets import Dataset

    # Only a number goes along: a row's other columns may be anything, and are looked up where they are needed.
    prompts = Dataset.from_list([{"prompt": row["prompt"], "row": number} for number, row in enumerate([*rows, *held_out])])
    trainer = kind(
        model=_policy(options, arguments.process_index == 0),
        reward_funcs=[_told(reward, [*rows, *held_out], lambda: trainer.keeper.telemetry) for reward in rewards],
        args=arguments,
        train_dataset=prompts.select(range(len(rows))),
        eval_dataset=prompts.select(range(len(rows), len(prompts))) if options.eval_every else None,
        processing_class=tokenizer,
        peft_config=adapters.lora(options, "CAUSAL_LM"),
    )
    trl_common.together()
    shutil.rmtree(options.checkpoints / ".drawn", ignore_errors=True)
    names = {**TOLD, **({f"rewards/{reward.name}/mean": f"reward_{reward.name}" for reward in rewards} if len(rewards) > 1 else {})}
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"data": sha256(options.data / "train.jsonl"), "weights": {reward.name: reward.weight for reward in rewards}}
    settings |= {"reward_model": identity(options.reward_model) if options.reward_model else None}
    settings |= {"reward_function": sha256(options.reward_function) if options.reward_function else None}
    trl_common.train(trainer, options, settings, ending, names)
    trl_common.export(trainer, options)
    if trl_common.first():
        made = {name: getattr(options, name) for name in (*trl_common.SETTINGS, "precision")}
        text_record.write(options.out, {**made, **settings, "end_token": end_token(options.data)})


def vllm(options: argparse.Namespace) -> dict[str, Any]:
    """What a Trainer's settings get where vLLM writes the completions, on the GPUs of the training.  Ends with a message where it cannot."""
    if not options.use_vllm:
        return {}
    needs("vllm", "use_vllm", "use_vllm=false")
    if options.method == "qlora":
        fail("use_vllm hands the learned weights to vLLM in 16 bits, which a base in 4 bits does not have: method=lora, or use_vllm=false")
    if options.init == "random":
        fail("use_vllm has vLLM read the base's weights from its files: init=pretrained, or use_vllm=false")
    # A cache for as many tokens as the base could read takes more than there is.
    longest = options.max_prompt_length + options.max_completion_length
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.vllm_memory, "vllm_max_model_length": longest}


def _policy(options: argparse.Namespace, first: bool) -> PreTrainedModel:
    """The model to learn.  Where all of it is learned and the weights were drawn, they are put where TRL loads what the KL compares with from."""
    model = trl_common.load(options)
    if options.method == "full" and options.init == "random" and options.beta:
        folder = options.checkpoints / ".drawn"
        if first:
            model.save_pretrained(str(folder))
        trl_common.together()
        model.config._name_or_path = str(folder)
    return model


def _algorithm(name: str) -> tuple[Any, Any]:
    """The Trainer class and that of its settings."""
    import trl

    plain, config = (trl.RLOOTrainer, trl.RLOOConfig) if name == "rloo" else (trl.GRPOTrainer, trl.GRPOConfig)

    class Trainer(Drawn, plain):  # type: ignore[misc, valid-type]
        pass

    return Trainer, config


class Drawn:
    """Beside a Trainer class that learns from its own completions: which prompts a step has and what is drawn, however the step is shared."""

    def _get_train_sampler(self, dataset: object = None) -> torch.utils.data.Sampler[int]:
        arguments = self.args  # type: ignore[attr-defined]
        prompts = arguments.generation_batch_size // self.num_generations  # type: ignore[attr-defined]
        return _Groups(len(self.train_dataset), arguments.seed, prompts, self.num_generations, arguments.steps_per_generation, arguments.max_steps)  # type: ignore[attr-defined]

    def evaluate(self, *rest: Any, **more: Any) -> Any:
        # Each look draws with the same numbers: between two of them the model is what differs.
        self._part = self.args.process_index  # type: ignore[attr-defined]
        return super().evaluate(*rest, **more)  # type: ignore[misc]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **more: Any) -> Any:
        if self.args.use_vllm:  # type: ignore[attr-defined]
            with self.keeper.telemetry.phase("generation"):  # type: ignore[attr-defined]
                return super()._generate_single_turn(prompt_ids, *rest, **more)  # type: ignore[misc]
        arguments, model = self.args, self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        part, what = arguments.process_index, ("completion", arguments.seed, self.state.global_step + 1)  # type: ignore[attr-defined]
        if not model.training:
            part, self._part, what = self._part, self._part + arguments.world_size, ("look", arguments.seed, 0)
        draws = table(part * len(prompt_ids), len(prompt_ids), self.max_completion_length, *what)  # type: ignore[attr-defined]
        phase, drawn = self.keeper.telemetry.phase("generation"), drawing(model, Draws(draws, self.temperature))  # type: ignore[attr-defined]
        with phase, drawn, sharding.generating(self.model_wrapped):  # type: ignore[attr-defined]
            return super()._generate_single_turn(prompt_ids, *rest, **more)  # type: ignore[misc]


class _Groups(torch.utils.data.Sampler[int]):
    """The prompts of one step after another, each as often as it is completed; the Trainer asks for a step's once for each of its passes."""

    def __init__(self, rows: int, seed: int, prompts: int, generations: int, passes: int, steps: int) -> None:
        self._rows, self._seed, self._prompts, self._generations, self._passes, self._steps = rows, seed, prompts, generations, passes, steps

    def __len__(self) -> int:
        return self._prompts * self._generations * self._passes * self._steps

    def __iter__(self) -> Iterator[int]:
        for step in range(self._steps):
            chosen = order(self._rows, self._seed, step * self._prompts, self._prompts)
            for _ in range(self._passes):
                yield from (row for row in chosen for _ in range(self._generations))


def _told(reward: Reward, rows: list[dict[str, Any]], telemetry: Callable[[], Telemetry]) -> Callable[..., list[float | None]]:
    """The reward as TRL calls it, and its time told."""
    columns = sorted({name for row in rows for name in row} - {"prompt"})

    def worth(prompts: list[Any], completions: list[Any], row: list[int], **_: Any) -> list[float | None]:
        texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
        with telemetry().phase(reward.phase):
            return reward(prompts, texts, {name: [rows[number].get(name) for number in row] for name in columns})

    worth.__name__ = reward.name
    return worth


def _options() -> argparse.Namespace:
    parser = trl_common.parser(__doc__)
    trl_common.add_epochs(parser)
    rlhf_rewards.add_options(parser)
    parser.add_argument("--algorithm", choices=["rloo", "grpo"], required=True)
    parser.add_argument("--num-generations", type=int, required=True, help="completions of each prompt")
    parser.add_argument("--max-completion-length", type=int, required=True, help="tokens")
    parser.add_argument("--max-prompt-length", type=int, default=512, help="tokens")
    parser.add_argument("--use-vllm", action="store_true", help="vLLM writes the completions")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--beta", type=float, required=True, help="weight of the KL to the base model")
    parser.add_argument("--chat-template", type=Path)
    return trl_common.parsed(parser)


if __name__ == "__main__":
    main()
