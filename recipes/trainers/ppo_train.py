"""Step `train` of ppo: proximal policy optimization on TRL 1.12.0, the last release that has it.  Knows prompts and a reward model, not whose.

One step: global_batch completions are drawn, judged by the reward model, and the policy and a value model learn from them, `epochs` times over, by
the clipped objective of Schulman et al. 2017, arXiv:1707.06347, eq. 7, with a KL to the base in the reward (Ziegler et al. 2019, arXiv:1909.08593).

TRL's trainer neither saves nor resumes; here it does.  It asks for one batch at the beginning of each step, and that is where a step draws its seed
from its number: what came before does not matter, and a resumed training ends in the bits of one that was not disturbed.  Advantages are whitened and
minibatches shuffled within a process, so unlike in rlhf@1 the number of processes is part of what is trained.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

# TRL says with every import that what is experimental may change; this version of it does not.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import adapters
import numpy as np
import text_record
import torch
import trl
import trl_common
from control import Ending, every
from descent import in_any, rate_at, restore, tensors
from disk import sha256
from loop import Checkpoints, draw, fail
from rlhf_data import end_token, load, prompt_ids
from rlhf_rewards import classifier
from telemetry import Telemetry
from text_model import identity
from tokens import order
from transformers import PrinterCallback, TrainerCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RELEASE = "1.12.0"
SETTINGS = (
    "init", "method", "rank", "alpha", "dropout", "learning_rate", "warmup_steps", "decay_steps", "global_batch", "micro_batch", "seed",
    "max_completion_length", "temperature", "kl_coef", "epochs", "reward_init", "missing_eos_penalty",
)  # fmt: skip
TOLD = {
    "objective/scores": "reward", "objective/kl": "kl", "objective/entropy": "entropy", "loss/policy_avg": "policy_loss",
    "loss/value_avg": "value_loss", "policy/clipfrac_avg": "clipped",
}  # fmt: skip


def main() -> None:
    options = _options()
    if trl.__version__ != RELEASE:
        fail(
            f"PPO needs trl {RELEASE}, the last release that has it, and this Python has {trl.__version__}: "
            "run ppo@1 in its own environment (without --python current), or use rlhf@1, which learns from rewards with current trl"
        )
    trl_common.say("ppo@1 is deprecated: trl dropped PPO after 1.12.0, and this environment gets no fixes; rlhf@1 does the same with RLOO or GRPO")
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    ending = Ending()
    rows = load(options.data, "train")
    if not rows:
        fail(f"{options.data} holds no prompt to train on")
    config = trl_common.arguments(
        PPOConfig, options, total_episodes=options.max_steps * options.global_batch, response_length=options.max_completion_length,
        temperature=options.temperature, kl_coef=options.kl_coef, num_ppo_epochs=options.epochs, num_sample_generations=0, stop_token="eos",
        missing_eos_penalty=options.missing_eos_penalty or None, local_rollout_forward_batch_size=options.micro_batch,
    )  # fmt: skip
    config.save_strategy = "no"
    # TRL's settings have a field of that name, which is not filled in yet.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    policy = trl_common.load(options)
    tokenizer = _tokenizer(options, policy)
    reward_model, value_model = (classifier(options.reward_model, options.reward_init, options.seed, dtype) for dtype in (options.precision, "no"))
    _fits(options, tokenizer, reward_model)
    if options.checkpoint_activations:
        for model in (policy, value_model):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # TRL's own reference, the policy without its adapter, is lost below DistributedDataParallel.
    separate = options.method == "full" or world > 1

    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"data": sha256(options.data / "train.jsonl"), "base": identity(options.base), "reward_model": identity(options.reward_model)}
    settings |= {"precision": options.precision, "world": world}
    checkpoints = Checkpoints(options.checkpoints, settings)
    done, found, history = 0, None, []
    if options.resume:
        done, found, history = checkpoints.load(options.resume)
        if done > options.max_steps:
            fail(f"cannot resume from {options.resume}: it is at step {done}, beyond max_steps {options.max_steps}")
        trl_common.say(f"resumed at step {done}")
        config.total_episodes = (options.max_steps - done) * options.global_batch

    ids = [{"input_ids": prompt_ids(row["prompt"], tokenizer)} for row in rows]
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=trl_common.load(options) if separate else None,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=ids,
        eval_dataset=ids[:1],
        peft_config=adapters.lora(options, "CAUSAL_LM"),
    )
    learned = {name: weight for name, weight in sorted(trainer.accelerator.unwrap_model(trainer.model).named_parameters()) if weight.requires_grad}
    optimizer = trainer.optimizer.optimizer
    if found is not None:
        restore(optimizer, learned, found)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda before: rate_at(done + before + 1, 1.0, options.warmup_steps, options.decay_steps)
    )
    telemetry = Telemetry(options.tensorboard, main=trainer.is_world_process_zero(), history=history, tracker=options.tracker, settings=settings)
    keeper = _Keeper(options, done, len(ids), checkpoints, trainer, learned, telemetry, ending)
    trainer.dataloader = _Steps(ids, tokenizer, options, done, config, keeper)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(keeper)
    ppo_trainer.batch_generation = _timed(ppo_trainer.batch_generation, telemetry, "generation")
    if done < options.max_steps:
        trainer.train()
    telemetry.close()
    if trainer.is_world_process_zero():
        options.history.write_text("".join(telemetry.history))
    trainer.model = trainer.accelerator.unwrap_model(trainer.model).policy
    trl_common.export(trainer, options)
    if trl_common.first():
        text_record.write(options.out, {**settings, "end_token": end_token(options.data)})


class _Steps:
    """The batches of the steps that are left; each begins its step."""

    def __init__(
        self, ids: list[dict[str, list[int]]], tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, done: int, config: Any,
        keeper: _Keeper,
    ) -> None:  # fmt: skip
        self._ids, self._tokenizer, self._options, self._done, self._keeper = ids, tokenizer, options, done, keeper
        self._world, self._me = config.world_size, config.process_index

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        batch, seed = self._options.global_batch, self._options.seed
        share = batch // self._world
        for step in range(self._done + 1, self._options.max_steps + 1):
            self._keeper.turn("data")
            rows = order(len(self._ids), seed, (step - 1) * batch, batch)
            mine = [self._ids[row] for row in rows[self._me * share : (self._me + 1) * share]]
            made = self._tokenizer.pad(mine, return_tensors="pt")
            self._keeper.turn("model")
            draw("step", seed, step, self._me)
            # TRL shuffles its minibatches by numpy.
            np.random.seed(torch.initial_seed() % 2**32)
            yield {"input_ids": made["input_ids"]}


class _Keeper(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Told by the trainer of each step's end: tells the step, saves, and dies of the signal where it was asked to end."""

    def __init__(
        self, options: argparse.Namespace, done: int, prompts: int, checkpoints: Checkpoints, trainer: Any,
        learned: dict[str, torch.nn.Parameter], telemetry: Telemetry, ending: Ending,
    ) -> None:  # fmt: skip
        self._options, self._done, self._checkpoints, self._trainer, self._learned = options, done, checkpoints, trainer, learned
        self._prompts = prompts
        self._telemetry, self._ending = telemetry, ending
        self._values: dict[str, float] = {}
        self._phase = ExitStack()
        self._norms: list[torch.Tensor] = []
        plain = trainer.optimizer.step

        def step(*rest: Any, **more: Any) -> Any:
            if trainer.accelerator.sync_gradients:
                self._norms.append(torch.nn.utils.get_total_norm([weight.grad for weight in learned.values() if weight.grad is not None]))
            with telemetry.phase("optimizer"):
                return plain(*rest, **more)

        trainer.optimizer.step = step

    def turn(self, phase: str) -> None:
        """What the step does from now on, but for what is within it and tells its own time."""
        self._phase.close()
        self._phase.enter_context(self._telemetry.phase(phase))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
        self._values = {mine: float(logs[name]) for name, mine in TOLD.items()}
        self._values["loss"] = self._values["policy_loss"] + args.vf_coef * self._values["value_loss"]
        self._values["lr"] = float(logs["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._phase.close()
        step = self._done + state.global_step
        values = {**self._values, "grad_norm": float(torch.stack(self._norms).mean())}
        self._norms.clear()
        if not math.isfinite(values["loss"]):
            fail(f"the loss is {values['loss']} at step {step}; a smaller learning_rate or more warmup_steps may help")
        batch = self._options.global_batch
        told = self._telemetry.step(step, samples=batch, of=self._options.max_steps, epoch=step * batch / self._prompts, **values)
        shown = "  ".join(f"{name} {values[name]:.4g}" for name in ("reward", "kl", "loss", "grad_norm"))
        trl_common.say(f"step {step}/{self._options.max_steps}  {shown}  {told.get('samples_per_second', 0):.4g} samples/s")
        last = step == self._options.max_steps
        stopping, checkpoint = in_any(self._ending.asked, args.device), in_any(self._ending.checkpoint, args.device)
        if last or stopping or checkpoint or step % every("CHECKPOINT_INTERVAL_STEPS", self._options.save_every) == 0:
            self._ending.saved()
            if state.is_world_process_zero:
                with self._telemetry.phase("checkpoint"):
                    self._checkpoints.save(step, tensors(self._trainer.optimizer.optimizer, self._learned), self._telemetry.history)
            trl_common.together()
        if stopping and not last:
            trl_common.say(f"asked to end; saved step {step}")
            self._ending.end()


def _timed(function: Any, telemetry: Telemetry, phase: str) -> Any:
    def timed(*rest: Any, **more: Any) -> Any:
        with telemetry.phase(phase):
            return function(*rest, **more)

    return timed


def _tokenizer(options: argparse.Namespace, policy: Any) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, padding on the left, with a token to fill up with that is not the end token: TRL finds the end of an answer by it."""
    tokenizer = trl_common.tokenizer_of(options.base, policy)
    tokenizer.eos_token = end_token(options.data)["text"]
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        others = [token for token in tokenizer.added_tokens_decoder if token != tokenizer.eos_token_id]
        if not others:
            fail("the base's tokenizer has no token but the end token to fill up with, and PPO could not tell where an answer ends: add one to it")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(others[-1])
    tokenizer.padding_side = "left"
    if options.chat_template:
        tokenizer.chat_template = options.chat_template.read_text()
    return tokenizer


def _fits(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, reward_model: Any) -> None:
    """Ends with a message where the reward model cannot read the policy's tokens: TRL's PPO hands it tokens, not text."""
    from transformers import AutoTokenizer

    if not hasattr(reward_model, "score"):
        fail(f"{options.reward_model.name} has no head called score, which trl's PPO looks for; rlhf@1 takes any reward model")
    theirs = AutoTokenizer.from_pretrained(options.reward_model, local_files_only=True).get_vocab()
    if any(theirs.get(token, number) != number for token, number in tokenizer.get_vocab().items()):
        fail("the reward model has another tokenizer than the base, and trl's PPO hands it tokens: take one made from the same base, or use rlhf@1")


def _options() -> argparse.Namespace:
    parser = trl_common.parser(__doc__)
    parser.add_argument("--reward-model", type=Path, required=True)
    parser.add_argument("--reward-init", choices=["pretrained", "random"], default="pretrained")
    parser.add_argument("--max-completion-length", type=int, required=True, help="tokens")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--kl-coef", type=float, required=True, help="weight of the KL to the base model")
    parser.add_argument("--epochs", type=int, default=4, help="times that the completions of a step are learned from")
    parser.add_argument("--missing-eos-penalty", type=float, default=0.0)
    parser.add_argument("--chat-template", type=Path)
    return trl_common.parsed(parser)


if __name__ == "__main__":
    main()
