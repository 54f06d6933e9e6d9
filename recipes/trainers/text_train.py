"""Step `train` of sft@1 and cpt: learn a LoRA adapter or the whole model from a token store, one optimizer step after another.  Knows no text.

What is trained depends on the settings and the global batch, not on how many processes share it, and a training that was killed and resumed ends
in the same bits as one that was not.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import precision
import text_record
import torch
import tuned
from control import Ending, every
from descent import CLIP, add_up, begin, rate_at, refuse_no_peak, restore, tensors
from loop import Checkpoints, draw, fail
from telemetry import TRACKERS, Telemetry, require
from text_model import DTYPES, batch_of, identity, load_base, loss_of, surprise
from tokens import Tokens, order

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from transformers import PreTrainedModel

GLANCE = 256  # held-out sequences that `eval_loss` looks at; step `evaluate` reads all of them
SETTINGS = (
    "method", "init", "rank", "alpha", "rank_stabilized", "dropout", "train_embeddings", "embedding_rate", "learning_rate", "warmup_steps",
    "decay_steps", "weight_decay", "global_batch", "micro_batch", "seed",
)  # fmt: skip


def main() -> None:
    options = _options()
    require(options.tracker)
    ending = Ending()
    accelerator = precision.start(options.precision)
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
        done, found, history = checkpoints.load(options.resume)
        if done > options.max_steps:
            fail(f"cannot resume from {options.resume}: it is at step {done}, beyond max_steps {options.max_steps}")
        training.restore(found)
        _say(me, f"resumed at step {done}")

    board, tracker = options.tensorboard, options.tracker
    telemetry = Telemetry(board, main=me == 0, history=history, tracker=tracker, project=options.project, settings=settings)
    save_every = every("CHECKPOINT_INTERVAL_STEPS", options.save_every)
    for step in range(done + 1, options.max_steps + 1):
        with telemetry.phase("data"):
            sequences = order(len(train), options.seed, (step - 1) * options.global_batch, options.global_batch)
            learned = sum(map(train.learned, sequences))
        rate = rate_at(step, options.learning_rate, options.warmup_steps, options.decay_steps)
        loss, norm, stopping = training.step(step, train, sequences, learned, rate, ending.asked, telemetry)
        if not math.isfinite(loss):
            fail(f"the loss is {loss} at step {step}; a smaller learning_rate, more warmup_steps, or precision bf16 instead of fp16 may help")
        values = {"loss": loss, "lr": rate, "grad_norm": norm, "tokens": learned}
        last = step == options.max_steps
        if options.eval_every and len(held_out) and (last or step % options.eval_every == 0):
            with telemetry.phase("evaluation"):
                values["eval_loss"] = training.glance(held_out)
        told = telemetry.step(step, samples=options.global_batch, **values)
        looked = f"  eval_loss {values['eval_loss']:.4f}" if "eval_loss" in values else ""
        speed = f"{told.get('tokens_per_second', 0):.0f} tokens/s"
        _say(me, f"step {step}/{options.max_steps}  loss {loss:.4f}  lr {rate:.3g}  grad_norm {norm:.3g}  {speed}{looked}")

        if last or stopping or step % save_every == 0:
            with telemetry.phase("checkpoint"):
                if me == 0:
                    checkpoints.save(step, training.tensors(), telemetry.history)
                accelerator.wait_for_everyone()
            ending.saved()
        elif me == 0 and ending.checkpoint:
            with telemetry.phase("checkpoint"):
                checkpoints.save(step, training.tensors(), telemetry.history)
            ending.saved()
        if stopping and not last:
            _say(me, f"asked to end; saved step {step}")
            telemetry.close()
            ending.end()

    if me == 0:
        # Of a training continued from its very end, nothing but this is left to do.
        training.export(options.weights)
        text_record.write(options.weights, {**settings, "max_steps": options.max_steps, "end_token": train.manifest["end_token"]})
        options.history.write_text("".join(telemetry.history))
    telemetry.close()
    accelerator.wait_for_everyone()
    accelerator.end_training()


class Training:
    """The model, its adapter if there is one, and what moves them."""

    def __init__(self, accelerator: Accelerator, options: argparse.Namespace) -> None:
        self._accelerator = accelerator
        self._micro = options.micro_batch
        self._seed = options.seed
        self._whole = options.method == "full"
        self._dtype = DTYPES[accelerator.mixed_precision]
        # Weights that are learned are kept in 32 bits: 16 would round most steps away.
        base = load_base(options.base, options.init, options.seed, "no" if self._whole else accelerator.mixed_precision)
        if self._whole:
            self.model: Any = base
        else:
            # The LoRA matrices are drawn on the CPU, hence the same on every kind of device.
            draw("adapter", options.seed)
            self.model = adapted(base, options)
        if options.checkpoint_activations:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.to(accelerator.device).train()
        self._learned = {name: weight for name, weight in sorted(self.model.named_parameters()) if weight.requires_grad}
        for weight in self._learned.values():
            weight.data = weight.data.float()
        self._optimizer = torch.optim.AdamW(_groups(self.model, self._learned, options), lr=options.learning_rate)
        begin(self._optimizer, self._learned)
        self._scaler = torch.amp.GradScaler(accelerator.device.type, enabled=accelerator.mixed_precision == "fp16")
        count = sum(weight.numel() for weight in self._learned.values())
        _say(accelerator.process_index, f"{count:,} weights learned of {sum(weight.numel() for weight in self.model.parameters()):,}; "
             f"{accelerator.num_processes} × {accelerator.device.type}, precision {accelerator.mixed_precision}")  # fmt: skip

    def step(
        self, step: int, tokens: Tokens, sequences: list[int], learned: int, rate: float, stop: bool, telemetry: Telemetry
    ) -> tuple[float, float, bool]:  # fmt: skip
        """One optimizer step over `sequences`, shared among the processes.

        The mean loss of a learned token in nats, the norm of its gradient before clipping, and whether any process was asked to stop.
        """
        world, me = self._accelerator.num_processes, self._accelerator.process_index
        share = len(sequences) // world
        mine = sequences[me * share : (me + 1) * share]
        draw("step", self._seed, step, me)
        summed = torch.zeros((), dtype=torch.float64, device=self._accelerator.device)
        for at in range(0, share, self._micro):
            with telemetry.phase("data"):
                batch = batch_of(tokens, mine[at : at + self._micro], self._accelerator.device)
            with telemetry.phase("model"):
                with self._accelerator.autocast():
                    loss = loss_of(self.model, batch) / max(learned, 1)
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                # Not read here: a GPU would have to finish before the next batch is even begun.
                summed += loss.detach()

        weights = list(self._learned.values())
        for weight in weights:
            # No gradient and a gradient of zero are two things to the optimizer, and which one it is must not depend on who saw which sequence.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if world > 1:
            with telemetry.phase("communication"):
                stop = add_up(weights, summed, stop)
        with telemetry.phase("optimizer"):
            self._scaler.unscale_(self._optimizer)
            norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["times"]
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad()
        return summed.item(), norm.item(), stop

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
        return tensors(self._optimizer, self._learned, self._scaler)

    def restore(self, found: dict[str, torch.Tensor]) -> None:
        restore(self._optimizer, self._learned, found, self._scaler)

    def export(self, folder: Path) -> None:
        """Write the adapter, or the whole model in the precision of the training."""
        if self._whole:
            self.model.to(self._dtype)
        tuned.save(self.model, folder)


def adapted(base: PreTrainedModel, options: argparse.Namespace) -> Any:
    """The base with LoRA on all linear layers, and with its embeddings learned whole where that is asked."""
    from peft import LoraConfig, get_peft_model

    tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    # One matrix used twice is learned once: peft keeps the other use on it.
    whole = [base.get_input_embeddings(), *([] if tied else [base.get_output_embeddings()])]  # type: ignore[no-untyped-call]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,
        # Kalajdzievski, 2023 (rsLoRA): alpha / sqrt(rank) keeps the size of what is learned as the rank grows; alpha / rank makes it vanish.
        use_rslora=options.rank_stabilized,
        lora_dropout=options.dropout,
        target_modules="all-linear",
        modules_to_save=[name.rpartition(".")[2] for name, module in base.named_modules() if module in whole] if options.train_embeddings else None,
        ensure_weight_tying=options.train_embeddings and tied,
    )
    return get_peft_model(base, config)


def _groups(model: torch.nn.Module, learned: dict[str, torch.nn.Parameter], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is learned alike: embeddings have a rate of their own, and only matrices decay."""
    inner: Any = model
    both = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    embeddings = {id(weight) for module in both if module is not None for weight in module.parameters()}
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for weight in learned.values():
        kind = (options.embedding_rate if id(weight) in embeddings else 1.0, options.weight_decay if weight.dim() > 1 else 0.0)
        groups.setdefault(kind, []).append(weight)
    return [{"params": weights, "times": times, "weight_decay": decay} for (times, decay), weights in groups.items()]


def _say(me: int, line: str) -> None:
    if me == 0:
        print(f"train: {line}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "weights", "history", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a checkpoint folder")
    parser.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard files")
    parser.add_argument("--tracker", choices=TRACKERS, default="none")
    parser.add_argument("--project", default="recipe", help="what the tracker files this run under")
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--init", choices=["pretrained", "random"], default="pretrained")
    parser.add_argument("--precision", choices=precision.ASKED, default="auto")
    for name in ("max-steps", "rank", "global-batch", "micro-batch", "save-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--alpha", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--embedding-rate", type=float, default=1.0, help="what the learning rate is multiplied by for the embeddings")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--decay-steps", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-stabilized", action="store_true")
    parser.add_argument("--train-embeddings", action="store_true")
    parser.add_argument("--checkpoint-activations", action="store_true")
    options = parser.parse_args()
    if options.resume and not options.resume.is_dir():
        fail(f"cannot resume from {options.resume}: no such folder")
    refuse_no_peak(options.warmup_steps, options.decay_steps)
    return options


if __name__ == "__main__":
    main()
