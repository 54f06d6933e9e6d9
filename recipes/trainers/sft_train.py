"""Step `train` of sft: learn a LoRA adapter from a token store, one optimizer step after another.

What is trained depends on the settings and the global batch, not on how many processes share it, and a training that was killed and resumed ends
in the same bits as one that was not.  Gradients are added up in one flat buffer at the end of a step and not by DistributedDataParallel, whose
buckets are laid out anew after its first step: with more than two processes a resumed run would add in another order.  Knows tokens, not text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loop import Checkpoints, Ending, Metrics, draw, fail, start
from sft_model import batch_of, identity, load_base, loss_of, surprise
from tokens import Tokens, order

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from peft import PeftModel
    from transformers import PreTrainedModel

CLIP = 1.0  # the norm that the gradient of a step may have
GLANCE = 256  # held-out sequences that `eval_loss` looks at; step `evaluate` reads all of them
MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = (
    "init", "rank", "alpha", "dropout", "train_embeddings", "learning_rate", "warmup_steps", "decay_steps", "global_batch", "micro_batch", "seed",
)  # fmt: skip


def main() -> None:
    options = _options()
    ending = Ending()
    accelerator = start()
    world, me = accelerator.num_processes, accelerator.process_index
    if options.global_batch % world:
        fail(f"global_batch {options.global_batch} cannot be shared evenly by {world} processes")
    train, held_out = Tokens(options.data, "train"), Tokens(options.data, "held_out")

    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"data": train.digest, "base": identity(options.base), "precision": accelerator.mixed_precision, "world": world}
    training = Training(accelerator, options)
    checkpoints = Checkpoints(options.checkpoints, settings)
    history: list[str] = []
    done = 0
    if options.resume:
        done, tensors, history = checkpoints.load(options.resume)
        if done > options.max_steps:
            fail(f"cannot resume from {options.resume}: it is at step {done}, beyond max_steps {options.max_steps}")
        training.restore(tensors)
        _say(me, f"resumed at step {done}")

    told = os.environ.get("RECIPE_METRICS")
    metrics = Metrics(Path(told) if told and me == 0 else None)
    for step in range(done + 1, options.max_steps + 1):
        sequences = order(len(train), options.seed, (step - 1) * options.global_batch, options.global_batch)
        learned = sum(map(train.learned, sequences))
        rate = _rate(step, options)
        at = time.perf_counter()
        loss, stopping = training.step(step, train, sequences, learned, rate, ending.asked)
        speed = {"tokens_per_second": round(learned / (time.perf_counter() - at), 1)}
        if accelerator.device.type == "cuda":
            speed["gpu_memory_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        if not math.isfinite(loss):
            fail(f"the loss is {loss} at step {step}; a smaller learning_rate, more warmup_steps, or precision bf16 instead of fp16 may help")
        values = {"loss": loss, "lr": rate, "tokens": learned}
        last = step == options.max_steps
        if options.eval_every and len(held_out) and (last or step % options.eval_every == 0):
            values["eval_loss"] = training.glance(held_out)
        history.append(json.dumps({"step": step, **values}) + "\n")
        metrics.tell(step, **values, **speed)
        looked = f"  eval_loss {values['eval_loss']:.4f}" if "eval_loss" in values else ""
        _say(me, f"step {step}/{options.max_steps}  loss {loss:.4f}  lr {rate:.3g}  {speed['tokens_per_second']:.0f} tokens/s{looked}")

        if last or stopping or step % options.save_every == 0:
            if me == 0:
                checkpoints.save(step, training.tensors(), history)
            accelerator.wait_for_everyone()
        if stopping and not last:
            _say(me, f"asked to end; saved step {step}")
            ending.end()

    if me == 0:
        training.export(options.adapter)
        options.history.write_text("".join(history))
    accelerator.wait_for_everyone()
    accelerator.end_training()


class Training:
    """The model with its adapter, and what moves it."""

    def __init__(self, accelerator: Accelerator, options: argparse.Namespace) -> None:
        self._accelerator = accelerator
        self._micro = options.micro_batch
        self._seed = options.seed
        precision = accelerator.mixed_precision
        base = load_base(options.base, options.init, options.seed, precision)
        # The LoRA matrices are drawn on the CPU, hence the same on every kind of device.
        draw("adapter", options.seed)
        self.model = adapted(base, options.rank, options.alpha, options.dropout, options.train_embeddings)
        if options.checkpoint_activations:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.to(accelerator.device).train()
        self._learned = {name: weight for name, weight in sorted(self.model.named_parameters()) if weight.requires_grad}
        for weight in self._learned.values():
            weight.data = weight.data.float()
        self._optimizer = torch.optim.AdamW(self._learned.values(), lr=options.learning_rate, weight_decay=0.0)
        # Now and not at its first step, which a scaler may leave out: a checkpoint always has the same parts.
        for weight in self._learned.values():
            self._optimizer.state[weight] = {"step": torch.tensor(0.0), **{key: torch.zeros_like(weight) for key in MOMENTS}}
        self._scaler = torch.amp.GradScaler(accelerator.device.type, enabled=precision == "fp16")
        count = sum(weight.numel() for weight in self._learned.values())
        _say(accelerator.process_index, f"{count:,} weights learned of {sum(weight.numel() for weight in self.model.parameters()):,}; "
             f"{accelerator.num_processes} × {accelerator.device.type}, precision {precision}")  # fmt: skip

    def step(self, step: int, tokens: Tokens, sequences: list[int], learned: int, rate: float, stop: bool) -> tuple[float, bool]:
        """One optimizer step over `sequences`, shared among the processes.  The loss, and whether any process was asked to stop."""
        world, me = self._accelerator.num_processes, self._accelerator.process_index
        share = len(sequences) // world
        mine = sequences[me * share : (me + 1) * share]
        draw("step", self._seed, step, me)
        summed = 0.0
        for at in range(0, share, self._micro):
            batch = batch_of(tokens, mine[at : at + self._micro], self._accelerator.device)
            with self._accelerator.autocast():
                loss = loss_of(self.model, batch) / max(learned, 1)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            summed += loss.item()

        weights = list(self._learned.values())
        for weight in weights:
            # No gradient and a gradient of zero are two things to the optimizer, and which one it is must not depend on who saw which sequence.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if world > 1:
            summed, stop = self._add_up(weights, summed, stop)
        self._scaler.unscale_(self._optimizer)
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return summed, stop

    def _add_up(self, weights: list[torch.nn.Parameter], loss: float, stop: bool) -> tuple[float, bool]:
        grads = [weight.grad for weight in weights if weight.grad is not None]
        told = torch.tensor([loss, float(stop)], device=self._accelerator.device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), told])
        torch.distributed.all_reduce(flat)
        at = 0
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = flat[at : at + grad.numel()].view_as(weight)
            at += grad.numel()
        return float(flat[-2]), bool(flat[-1] > 0)

    def glance(self, tokens: Tokens) -> float:
        """The mean loss over the first held-out sequences."""
        me, world = self._accelerator.process_index, self._accelerator.num_processes
        with self._accelerator.autocast():
            total, count = surprise(self.model, tokens, range(me, min(GLANCE, len(tokens)), world), self._micro, self._accelerator.device)
        both = torch.tensor([total, count], dtype=torch.float64, device=self._accelerator.device)
        if world > 1:
            torch.distributed.all_reduce(both)
        return float(both[0] / both[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on, but for its number."""
        found: dict[str, torch.Tensor] = {}
        for name, weight in self._learned.items():
            found[f"weight.{name}"] = weight
            for key in MOMENTS:
                found[f"{key}.{name}"] = self._optimizer.state[weight][key]
        # With fp16 a step whose gradient overflowed is left out, so the optimizer's count is not ours.
        found["optimizer.step"] = next(iter(self._optimizer.state.values()))["step"]
        if self._scaler.is_enabled():
            state = self._scaler.state_dict()
            found["scaler"] = torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self._learned.items():
                weight.copy_(tensors[f"weight.{name}"])
                self._optimizer.state[weight]["step"].copy_(tensors["optimizer.step"])
                for key in MOMENTS:
                    self._optimizer.state[weight][key].copy_(tensors[f"{key}.{name}"])
        if self._scaler.is_enabled():
            scale, growth = tensors["scaler"].tolist()
            self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": scale, "_growth_tracker": int(growth)})

    def export(self, folder: Path) -> None:
        """Write the adapter as peft reads it, in bytes that depend on the training only."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(str(folder))
        (folder / "README.md").unlink(missing_ok=True)  # a form to fill in, by peft
        file = folder / "adapter_config.json"
        config = json.loads(file.read_text())
        # A path in an attempt directory says nothing to anybody, and peft writes sets in the order of this process's hashes.
        config["base_model_name_or_path"] = None
        for name in ("target_modules", "modules_to_save"):
            if isinstance(config.get(name), list):
                config[name] = sorted(config[name])
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def adapted(base: PreTrainedModel, rank: int, alpha: float, dropout: float, embeddings: bool) -> PeftModel:
    """The base with LoRA on all linear layers, and with its embeddings learned whole where that is asked."""
    from peft import LoraConfig, get_peft_model

    tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    # One matrix used twice is learned once: peft keeps the other use on it.
    whole = [base.get_input_embeddings(), *([] if tied else [base.get_output_embeddings()])]  # type: ignore[no-untyped-call]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a scale: peft divides it by the rank
        lora_dropout=dropout,
        target_modules="all-linear",
        modules_to_save=[name.rpartition(".")[2] for name, module in base.named_modules() if module in whole] if embeddings else None,
        ensure_weight_tying=embeddings and tied,
    )
    model: PeftModel = get_peft_model(base, config)
    return model


def _rate(step: int, options: argparse.Namespace) -> float:
    """The learning rate of a step: up over the warm-up, then level, or down a cosine to a tenth at `decay_steps`.

    Not a function of max_steps: a training continued with more steps is the one that was asked for more at once.
    """
    warm = min(1.0, step / options.warmup_steps) if options.warmup_steps else 1.0
    fall = 1.0
    if options.decay_steps:
        fall = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / options.decay_steps)))
    return float(options.learning_rate * warm * fall)


def _say(me: int, line: str) -> None:
    if me == 0:
        print(f"train: {line}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "adapter", "history", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a checkpoint folder")
    parser.add_argument("--init", choices=["pretrained", "random"], default="pretrained")
    for name in ("max-steps", "rank", "global-batch", "micro-batch", "save-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--alpha", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--decay-steps", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-embeddings", action="store_true")
    parser.add_argument("--checkpoint-activations", action="store_true")
    options = parser.parse_args()
    if options.resume and not options.resume.is_dir():
        fail(f"cannot resume from {options.resume}: no such folder")
    return options


if __name__ == "__main__":
    main()
