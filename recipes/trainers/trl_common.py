"""What the trainings on TRL share: exact resume, whole checkpoints, the end by signal, one line a step.  Does not know what is learned from what.

Hugging Face's Trainer saves file after file into the folder it is told.  Here that is a hidden one, and what is complete is renamed out of it:
a checkpoint is whole or not there.  `recipe.json` in it names each file with its SHA-256, and the settings under which the training may go on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

# CUDA wants this before its first product, else no two runs are equal; TRL says with every import that what is experimental may change.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # bars of progress are for terminals, and this is a log

import adapters
import descent
import precision
import sharding
import torch
import tuned
from control import Ending, every
from descent import CLIP, in_any, rate_at
from disk import appear, sha256
from loop import draw, fail
from telemetry import TRACKERS, Telemetry, require
from text_model import DTYPES, fill_up, identity, load_base
from transformers import PrinterCallback, TrainerCallback

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerControl, TrainerState, TrainingArguments

RECORD, HISTORY = "recipe.json", "history.jsonl"
SETTINGS = (
    "init", "method", "rank", "alpha", "dropout", "rank_stabilized", "dora", "train_embeddings", "embedding_rate", "learning_rate", "warmup_steps",
    "decay_steps", "schedule", "floor", "weight_decay", "optimizer", "neftune", "attention", "sharding", "global_batch", "micro_batch", "seed",
)  # fmt: skip
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
BEST = "best"
INSIDE = f"{BEST}/weights"  # of a checkpoint: a folder with an adapter right beside its own would be taken for a second one
Arguments = TypeVar("Arguments", bound="TrainingArguments")


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every training on TRL takes."""
    made = argparse.ArgumentParser(description=about)
    for name in ("data", "base", "out", "history", "checkpoints"):
        made.add_argument(f"--{name}", type=Path, required=True)
    made.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard files")
    made.add_argument("--resume", type=Path, help="a checkpoint folder")
    made.add_argument("--init", choices=["pretrained", "random"], default="pretrained")
    adapters.add_options(made)
    descent.add_options(made)
    for name in ("max-steps", "global-batch", "micro-batch", "save-every"):
        made.add_argument(f"--{name}", type=int, required=True)
    made.add_argument("--neftune", type=float, default=0.0, help="noise on the embeddings of what is read")
    made.add_argument("--attention", choices=ATTENTION, default="auto")
    made.add_argument("--sharding", choices=sharding.KINDS, default="none")
    made.add_argument("--early-stopping", type=int, default=0, help="looks at held-out data without a better one, after which the training is over")
    made.add_argument("--keep-best", action="store_true", help="what comes out is what judged best while training")
    made.add_argument("--callbacks", nargs="*", default=[], metavar="FILE.py:CLASS", help="transformers.TrainerCallbacks")
    made.add_argument("--eval-every", type=int, default=0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--checkpoint-activations", action="store_true")
    made.add_argument("--precision", choices=precision.ASKED, default="auto")
    made.add_argument("--tracker", choices=TRACKERS, default="none")
    made.add_argument("--project", default="recipe", help="what the tracker files this run under")
    return made


def add_epochs(made: argparse.ArgumentParser) -> None:
    """The option of trainings whose data is read again and again, which `decide` heeds."""
    made.add_argument("--epochs", type=float, default=0.0, help="readings of all the data, in place of max_steps")


def decide(options: argparse.Namespace, samples: int) -> None:
    """Set `max_steps` where `epochs` of so many samples are asked for.  The samples are kept: each step tells its epoch."""
    options.samples = samples
    if options.epochs:
        options.max_steps = math.ceil(options.epochs * samples / options.global_batch)


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options as given, with `precision` decided.  Ends with a message where the checkpoint to resume from is none."""
    options = made.parse_args()
    if options.resume and not options.resume.is_dir():
        fail(f"cannot resume from {options.resume}: no such folder")
    descent.refuse(options)
    require(options.tracker)
    options.callbacks = callbacks(options.callbacks)
    options.precision = precision.chosen(options.precision)
    return options


def arguments(kind: type[Arguments], options: argparse.Namespace, **more: Any) -> Arguments:
    """The settings of a Trainer: `global_batch` shared among the processes, nothing reported but by us, nothing that differs from run to run.

    Ends with a message where not as many processes came up as were asked for, where they cannot share the batch evenly, or where nothing would be
    looked at for what goes by looks.
    """
    _quiet()
    if (options.early_stopping or options.keep_best) and not options.eval_every:
        asked = "early_stopping" if options.early_stopping else "keep_best"
        fail(f"{asked} goes by looks at held-out data, and there is none: eval_every above 0, and an eval_fraction that keeps rows from training")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    asked = os.environ.get("RECIPE_WORLD_SIZE", "")
    if asked and int(asked) != world:
        fail(f"{asked} processes were asked for, {world} came up; `--cpu --num_processes 2` starts one, `--multi_gpu` starts two")
    cpu = not torch.cuda.is_available()
    if options.precision == "fp16" and cpu:
        fail("precision fp16 needs a GPU; on a CPU use bf16 or no")
    if options.global_batch % world:
        fail(f"global_batch {options.global_batch} cannot be shared evenly by {world} processes")
    if world == 1 and torch.cuda.device_count() > 1:
        # One process that sees several would wrap the model in DataParallel, which neither TRL nor a bit-exact resume can do with.
        fail(f"{torch.cuda.device_count()} GPUs and one process: start one for each (accelerate launch --multi_gpu), or set CUDA_VISIBLE_DEVICES=0")
    share = options.global_batch // world
    micro = next(size for size in range(min(options.micro_batch, share), 0, -1) if share % size == 0)
    unfinished = _unfinished(options.checkpoints)
    shutil.rmtree(unfinished, ignore_errors=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Two thirds of a step's time, to find programs that read what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    made = kind(
        output_dir=str(unfinished),
        max_steps=options.max_steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        learning_rate=options.learning_rate,
        weight_decay=0.0,
        max_grad_norm=CLIP,
        optim="adamw_torch",  # of trainers whose optimizer is not made here
        neftune_noise_alpha=options.neftune or None,
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        gradient_checkpointing=options.checkpoint_activations,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        # Or else its buckets are laid out anew after the first step, and more than two processes add up in another order after a resume.
        ddp_find_unused_parameters=world > 2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=every("CHECKPOINT_INTERVAL_STEPS", options.save_every),
        eval_strategy="steps" if options.eval_every else "no",
        eval_steps=options.eval_every or None,
        seed=options.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=cpu,
        dataloader_pin_memory=not cpu,
        **sharding.arguments(options, world),
        **{"per_device_eval_batch_size": micro, **more},
    )
    sharding.begin(made)
    return made


def train(trainer: Trainer, options: argparse.Namespace, settings: Mapping[str, object], ending: Ending, names: Mapping[str, str]) -> None:
    """Run the training to its end, from `options.resume` on where that is given, and write its history.

    `settings` is what must not change over a resume, beside `SETTINGS`; `names` the trainer's own numbers that are told, each with its name here.
    Where it was asked to end it has saved, and dies of the signal.  Meanwhile `trainer.keeper.telemetry` takes phases that only the trainer knows.
    """
    settings = {name: getattr(options, name) for name in SETTINGS} | dict(settings)
    settings |= {"base": identity(options.base), "precision": options.precision, "world": trainer.args.world_size}
    history: list[str] = []
    step = 0
    if options.resume:
        step, history = _check(options.resume, settings, options.max_steps)
        say(f"resumed at step {step}")
    best = options.checkpoints / f".{BEST}"
    if first():
        shutil.rmtree(best, ignore_errors=True)
        if options.resume and (options.resume / INSIDE).exists():
            shutil.copytree(options.resume / INSIDE, best)
    together()
    found = [weight for _, weight in adapters.learned(trainer.model)]
    for weight in found:
        weight.data = weight.data.float()
    adapters.noise(trainer.model, options)
    groups = [
        {"params": group.weights, "lr": options.learning_rate * group.times, "weight_decay": group.decay}
        for group in adapters.groups(trainer.model, options)
    ]
    trainer.optimizer = descent.made(options.optimizer, groups, options.learning_rate)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda before: rate_at(before + 1, 1.0, options.warmup_steps, options.decay_steps, options.schedule, options.floor)
    )
    every_weight = sum(weight.numel() for weight in trainer.model.parameters())
    say(f"{sum(weight.numel() for weight in found):,} weights learned of {every_weight:,}; "
        f"{trainer.args.world_size} × {trainer.args.device.type}, precision {options.precision}")  # fmt: skip
    keeper = Keeper(trainer, options, settings, ending, names, history)
    trainer.keeper = keeper  # type: ignore[attr-defined]
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(keeper)
    for each in options.callbacks:
        trainer.add_callback(each)
    if keeper.over:  # as it was when it was saved: nothing is left but to write it down
        trainer.args.max_steps = step
        trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(step * options.global_batch))  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
    # Hugging Face's Trainer leaves a form to fill in there.
    shutil.rmtree(_unfinished(options.checkpoints), ignore_errors=True)
    if trainer.state.global_step < options.max_steps and not keeper.over:
        say(f"asked to end; saved step {trainer.state.global_step}")
        ending.end()
    if first():
        options.history.write_text("".join(keeper.telemetry.history))
    together()


class Keeper(TrainerCallback):
    """Told by the Trainer where it is: tells each step once, makes checkpoints whole, and stops at a step's end when asked to."""

    telemetry: Telemetry

    def __init__(
        self, trainer: Trainer, options: argparse.Namespace, settings: Mapping[str, object], ending: Ending, names: Mapping[str, str],
        history: list[str],
    ) -> None:  # fmt: skip
        self._trainer, self._options, self._settings, self._ending, self._history = trainer, options, settings, ending, history
        self._looks = [_judged(told) for told in map(json.loads, history) if {"eval_loss", "eval_reward"} & set(told)]
        common = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm", "eval_loss": "eval_loss"}
        self._names = {**common, **names, **{f"eval_{name}": f"eval_{mine}" for name, mine in names.items()}}
        self._values: dict[str, float] = {}
        self._phase = ExitStack()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        # A resumed state brings the intervals of the training that saved it.
        state.save_steps, state.eval_steps, state.logging_steps = args.save_steps, args.eval_steps or 0, args.logging_steps
        self.telemetry = Telemetry(
            self._options.tensorboard, main=first(), history=self._history, tracker=self._options.tracker, project=self._options.project,
            settings=self._settings,
        )  # fmt: skip
        self._turn("data")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        # Each step draws from its own number: what a resumed process drew before it does not matter.
        draw("step", args.seed, state.global_step + 1, args.process_index)
        self._turn("model")

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._turn("optimizer")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._turn("communication")
        if args.eval_strategy != "no" and state.global_step == state.max_steps:
            control.should_evaluate = True
        if in_any(self._ending.asked, args.device):
            control.should_save = control.should_training_stop = True
        elif in_any(self._ending.checkpoint, args.device):
            control.should_save = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **more: Any) -> None:
        if "loss" not in logs and "eval_loss" not in logs:
            return
        self._values |= {mine: logs[name] if isinstance(logs[name], int) else float(logs[name]) for name, mine in self._names.items() if name in logs}
        if "eval_loss" in logs:
            if "eval_reward" in self._values:
                del self._values["eval_loss"]  # of completions of its own, which says nothing
            return
        if not math.isfinite(loss := logs["loss"]):
            remedy = "a smaller learning_rate, more warmup_steps, or precision bf16 instead of fp16"
            fail(f"the loss is {loss} at step {state.global_step}; {remedy} may help")
        if control.should_evaluate:
            self._turn("evaluation")
        else:
            self._tell(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._looks.append(_judged(self._values))
        if self._options.keep_best and self._since_best == 0:
            # Written over the last: the same training has the same files.
            save(self._trainer, self._options, self._options.checkpoints / f".{BEST}")
        if self.over:
            control.should_save = control.should_training_stop = True
        self._tell(args, state, control)
        if self.over:
            better = "eval_reward has not risen" if self._names.get("eval_reward") else "eval_loss has not fallen"
            say(f"step {state.global_step}: {better} for {self._since_best} looks; the training is over")

    @property
    def over(self) -> bool:
        """Whether held-out data says that more training is of no use."""
        return bool(0 < self._options.early_stopping <= self._since_best)

    @property
    def _since_best(self) -> int:
        """Looks since the best one."""
        return len(self._looks) - 1 - self._looks.index(min(self._looks)) if self._looks else 0

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._ending.saved()
        together()
        made = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        best = self._options.checkpoints / f".{BEST}"
        if first() and best.exists():
            shutil.copytree(best, made / INSIDE)
        if first():
            _settle(made, self._options.checkpoints, state.global_step, self._settings, self.telemetry.history)
        elif args.local_process_index == 0 and made.exists():
            appear(made, self._options.checkpoints / made.name)  # on a disk of its own: what the processes of this node saved
        together()
        self._turn("data")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._phase.close()
        self.telemetry.close()

    def _tell(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """The step is over but for its checkpoint, which holds the line of its own step."""
        self._phase.close()
        values, self._values = self._values, {}
        batch, whole = self._options.global_batch, getattr(self._options, "samples", 0)
        epoch = state.global_step * batch / whole if whole else None
        told = self.telemetry.step(state.global_step, samples=batch, of=args.max_steps, epoch=epoch, **values)
        shown = "  ".join(f"{name} {values[name]:.4g}" for name in values)
        if told:
            say(f"step {state.global_step}/{args.max_steps}  {shown}  {told['samples_per_second']:.4g} samples/s")
        self._turn("checkpoint" if control.should_save else "data")

    def _turn(self, phase: str) -> None:
        self._phase.close()
        self._phase.enter_context(self.telemetry.phase(phase))


def _judged(told: Mapping[str, float]) -> float:
    """What a look at held-out data came to, the lower the better: the loss, or of those who learn from rewards how little they got."""
    return -float(told["eval_reward"]) if "eval_reward" in told else float(told["eval_loss"])


def say(line: str) -> None:
    """One line of the log, by the first process."""
    if first():
        print(f"train: {line}", flush=True)


def first() -> bool:
    """Whether this is the one process that speaks and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def together() -> None:
    """Wait for the other processes."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def load(options: argparse.Namespace, loads: Callable[..., PreTrainedModel] = load_base, *, learned: bool = True) -> PreTrainedModel:
    """The model to start from, by `loads`: in 32 bits where all of it is learned, else in the precision of the training, or in 4 bits for qlora."""
    precision = "no" if learned and options.method == "full" else options.precision
    return loads(options.base, options.init, options.seed, precision, four_bits=options.method == "qlora",
                 attention=None if options.attention == "auto" else options.attention)  # fmt: skip


def tokenizer_of(base: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The base's tokenizer, with a token to fill up with that is not the end token, where the vocabulary has one or has room for one.

    Where it has neither the end token fills up: masks here are made from lengths, so that the end of an answer is learned all the same.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    fill_up(tokenizer, model.get_input_embeddings().num_embeddings)
    return tokenizer


def export(trainer: Trainer, options: argparse.Namespace) -> None:
    """Write what was learned to `options.out`: the adapter as peft reads it, or the whole model in the training's precision; and the tokenizer.

    With `keep_best` it is what judged best.  The same training writes the same bytes.
    """
    best = options.checkpoints / f".{BEST}"
    if options.keep_best and best.exists():
        if first():
            shutil.copytree(best, options.out, dirs_exist_ok=True)
    else:
        save(trainer, options, options.out)
    if first() and trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(str(options.out))  # type: ignore[union-attr]
    together()
    if first():
        shutil.rmtree(best, ignore_errors=True)


def save(trainer: Trainer, options: argparse.Namespace, folder: Path) -> None:
    """Write the weights as they are now; all processes take part where they are sharded."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if options.sharding != "none" else None
    if first():
        model = trainer.accelerator.unwrap_model(trainer.model)
        tuned.save(model, folder, state=state, dtype=DTYPES[options.precision] if options.method == "full" else None)
    together()


def callbacks(named: Sequence[str]) -> list[TrainerCallback]:
    """One of each class that is named as `FILE.py:CLASS`.  Ends with a message where one cannot be had, or is no TrainerCallback."""
    modules: dict[str, ModuleType] = {}  # by what is in them: two classes of one file see the same names
    return [_callback(Path(file), name, modules) for file, _, name in (each.rpartition(":") for each in named)]


def _callback(file: Path, name: str, modules: dict[str, ModuleType]) -> TrainerCallback:
    try:
        text = file.read_text()
        if text not in modules:
            modules[text] = sys.modules[f"callbacks{len(modules)}"] = ModuleType(f"callbacks{len(modules)}")
            exec(compile(text, str(file), "exec"), vars(modules[text]))
        kind = vars(modules[text]).get(name)
        if not isinstance(kind, type) or not issubclass(kind, TrainerCallback):
            fail(f"callbacks: {file.name}:{name} is no class on transformers.TrainerCallback" if kind else f"callbacks: {file.name} has no {name}")
        return kind()
    except Exception as error:  # whatever a user's file may raise
        fail(f"callbacks: {file.name}:{name} failed: {type(error).__name__}: {error}")


def _settle(made: Path, folder: Path, step: int, settings: Mapping[str, object], history: list[str]) -> None:
    """Give a checkpoint its record and its name.  It appears at once, whole."""
    (made / "README.md").unlink(missing_ok=True)
    (made / HISTORY).write_text("".join(history))
    files = {str(file.relative_to(made)): sha256(file) for file in sorted(made.rglob("*")) if file.is_file()}
    (made / RECORD).write_text(json.dumps({"format": 1, "step": step, "files": files, "settings": settings}, indent=2) + "\n")
    appear(made, folder / made.name)


def _check(checkpoint: Path, settings: Mapping[str, object], steps: int) -> tuple[int, list[str]]:
    """The step of a checkpoint and the history up to it.  Ends with a message where it is damaged, of another training, or beyond `steps`."""
    try:
        record = json.loads((checkpoint / RECORD).read_text())
        damaged = [name for name, digest in record["files"].items() if sha256(checkpoint / name) != digest]
        step, made = int(record["step"]), record["settings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"cannot resume from {checkpoint}: not a complete checkpoint: {error}")
    if damaged:
        fail(f"cannot resume from {checkpoint}: {', '.join(damaged)} is not as it was saved")
    if other := [
        f"{name} was {made.get(name)}, is {settings.get(name)}" for name in sorted({*made, *settings}) if made.get(name) != settings.get(name)
    ]:
        fail(f"cannot resume from {checkpoint}: it was made by another training: {'; '.join(other)}")
    if step > steps:
        fail(f"cannot resume from {checkpoint}: it is at step {step}, beyond max_steps {steps}")
    return step, (checkpoint / HISTORY).read_text().splitlines(keepends=True)


def _unfinished(checkpoints: Path) -> Path:
    return checkpoints / ".unfinished"


def _quiet() -> None:
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging

    # A log keeps what people can act on.
    disable_progress_bar()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|trl)\.")
