"""Step `train` of image-lora@1: write the command of one of diffusers' example scripts, run it, and gather what it made.  Knows no training itself.

What is added to a script: its numbers are told as those of other trainings here, and a checkpoint appears whole, with the history up to it, or not at
all.  A training that resumes from one has the same weights, moments and rate; the images of the epoch under way are begun anew.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from loop import fail

ADAPTER = "pytorch_lora_weights.safetensors"
HISTORY = "history.jsonl"
# What this recipe decides itself: to change it behind the recipe's back would break resuming, or change what the key says.
OURS = (
    "pretrained_model_name_or_path", "dataset_name", "instance_data_dir", "caption_column", "output_dir", "resume_from_checkpoint",
    "checkpointing_steps", "checkpoints_total_limit", "max_train_steps", "train_batch_size", "gradient_accumulation_steps", "report_to",
    "push_to_hub", "hub_token",
    "aspect_ratio_buckets", "use_aspect_ratio_buckets", "with_prior_preservation", "validation_prompt", "mixed_precision", "seed", "cache_latents",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """One of diffusers' scripts, and which options it has that others have not.

    `alone`: what it encodes beforehand is found again by the number of the batch, which holds on one device only.  `reads`: what makes it
    read captions as diffusers' pipeline does when it draws; by itself it would take other layers of the text encoder, or fewer tokens.
    """

    file: str
    buckets: bool = True
    offload: bool = True
    nf4: bool = True
    alpha: bool = True
    dropout: bool = False
    guidance: bool = False
    cache: bool = True
    alone: bool = False
    reads: tuple[str, ...] = ()


# At the commit that the recipe names.  sd3 encodes captions in every step; its latents would be found again by a number that is another image's.
SCRIPTS = {
    "flux2-klein": Script("train_dreambooth_lora_flux2_klein.py", dropout=True, reads=("--text_encoder_out_layers", "9", "18", "27")),
    "kontext": Script("train_dreambooth_lora_flux_kontext.py", offload=False, nf4=False, guidance=True, alone=True),
    "qwen-image": Script("train_dreambooth_lora_qwen_image.py"),
    "z-image": Script("train_dreambooth_lora_z_image.py", alone=True),
    "sd3.5": Script(
        "train_dreambooth_lora_sd3.py", buckets=False, offload=False, nf4=False, alpha=False, cache=False, reads=("--max_sequence_length", "256")
    ),
}


def main() -> None:
    options = _options()
    script = SCRIPTS[options.family]
    file = options.scripts / script.file
    images = learned(options.manifest)
    try:
        unable(options, script)
        more = given(options.set)
        print("\n".join(skipped(images, options.micro_batch, buckets=script.buckets)))
    except ValueError as error:
        fail(str(error))

    from image_lora_base import base_folder
    from precision import chosen
    from telemetry import require

    require(options.tracker)
    rank, work = int(os.environ.get("RANK", "0")), options.checkpoints
    precision = os.environ["ACCELERATE_MIXED_PRECISION"] = chosen(options.precision)
    base = base_folder(options.base, options.init, Path(f"drawn-{rank}"))
    words = command(options, script, images, base=base, data=folder(images, options.images, Path(f"learned-{rank}")), precision=precision)
    module = loaded(file)
    arguments = parsed(module, file.name, [*words, *more])
    arguments.report_to = None  # its numbers are told by `Telemetry`, to the tracker too
    if script.alone and hasattr(module, "BucketBatchSampler"):
        # Captions are encoded in the order of the first epoch and found again by their place in it: Kontext's script shuffles anew each time.
        module.BucketBatchSampler.__iter__ = lambda self: iter(self.batches)
    watch = Watch(options, vars(arguments), steps_of_epoch(images, options, buckets=script.buckets))
    watch.put()
    module.args = arguments  # type: ignore[attr-defined]  # where a script's data set looks for them
    module.main(arguments)
    if rank == 0:
        shutil.copyfile(work / ADAPTER, options.adapter)
        options.history.write_text("".join(watch.history))
        options.report.write_text(json.dumps(report(watch.history, len(images)), indent=2) + "\n")
        options.command.write_text(" \\\n  ".join([f"accelerate launch {file.name}", *_pairs([*words, *more])]) + "\n")


def learned(manifest: Path) -> list[dict[str, Any]]:
    """The prepared images, in their order."""
    return [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]


def unable(options: argparse.Namespace, script: Script) -> None:
    """Raise ValueError where the script of this family cannot do what is asked for."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    at_once = options.micro_batch * world
    if options.global_batch % at_once:
        raise ValueError(f"global_batch {options.global_batch} is no multiple of micro_batch × {world} processes = {at_once}; change one of them")
    if world > 1 and script.alone:
        raise ValueError(f"{script.file} pairs images with captions by the number of a batch, which {world} processes mix up; take one GPU")
    if options.base_storage == "nf4" and not script.nf4:
        raise ValueError(f"{script.file} knows no base in 4 bits; take base_storage=same, or another family")
    if options.caption_dropout and not script.dropout:
        raise ValueError(f"{script.file} drops no captions; take caption_dropout=0")
    if options.alpha != options.rank and not script.alpha:
        raise ValueError(f"{script.file} takes alpha for rank: leave alpha to its default, or set it to {options.rank}")
    if options.alpha != int(options.alpha):
        raise ValueError(f"diffusers' scripts take whole numbers for alpha, not {options.alpha:g}")


def given(text: str) -> list[str]:
    """The caller's own options of the script, as words of a command.  Raises ValueError for one that this recipe decides."""
    more: dict[str, Any] = json.loads(text)
    if taken := [name for name in OURS if name in more]:
        raise ValueError(f"set names {', '.join(taken)}, which this recipe decides itself; leave it out")
    words: list[str] = []
    for name, value in more.items():
        if value is not False and value is not None:
            words += [f"--{name}", *([] if value is True else map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def batches_of_epoch(images: Sequence[dict[str, Any]], micro_batch: int, *, buckets: bool) -> int:
    """Batches of an epoch.  A script with buckets takes images of one size together, and leaves out a batch that is not full."""
    sizes: Counter[tuple[int, int]] = Counter()
    for image in images:
        sizes[image["width"], image["height"]] += image["repeats"]
    if not buckets:
        return math.ceil(sizes.total() / micro_batch)
    return sum(count // micro_batch for count in sizes.values())


def steps_of_epoch(images: Sequence[dict[str, Any]], options: argparse.Namespace, *, buckets: bool) -> int:
    """Steps in which a script reads all images once: the last of them has fewer batches than the others where they do not come out even."""
    global_batch: int = options.global_batch
    return math.ceil(batches_of_epoch(images, options.micro_batch, buckets=buckets) * options.micro_batch / global_batch)


def skipped(images: Sequence[dict[str, Any]], micro_batch: int, *, buckets: bool) -> list[str]:
    """What is to say of images that are in no batch.  Raises ValueError where all are."""
    batches = batches_of_epoch(images, micro_batch, buckets=buckets)
    if not batches:
        raise ValueError(f"no size has {micro_batch} images, so no batch of micro_batch {micro_batch} is ever full; take micro_batch=1")
    whole = sum(image["repeats"] for image in images)
    left = whole - batches * micro_batch
    return [f"train: {left} of {whole} images are left out of each epoch, as a batch has {micro_batch} of one size"] if left > 0 else []


def command(
    options: argparse.Namespace, script: Script, images: Sequence[dict[str, Any]], *, base: Path, data: Path, precision: str
) -> list[str]:  # fmt: skip
    """The words of the script's command line, but for those that the caller adds."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    values: dict[str, object] = {
        "pretrained_model_name_or_path": base,
        "dataset_name": data,
        "caption_column": "text",
        "cache_dir": data.with_name(f"{data.name}-cache"),
        "instance_prompt": options.trigger or "an image",  # asked for, and never learned: each image has its caption
        "resolution": options.resolution,
        "max_train_steps": options.max_steps,
        "train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.global_batch // (options.micro_batch * world),
        "learning_rate": options.learning_rate,
        "lr_scheduler": "constant_with_warmup",  # so that raising max_steps goes on as if it had been so from the start
        "lr_warmup_steps": options.warmup_steps,
        "optimizer": "prodigy" if options.optimizer == "prodigy" else "adamw",
        "adam_weight_decay": options.weight_decay,
        "rank": options.rank,
        "weighting_scheme": options.timesteps,
        "mixed_precision": precision,
        "seed": options.seed,
        "output_dir": options.checkpoints,
        "checkpointing_steps": options.save_every,
        "checkpoints_total_limit": 2,
    }
    flags = ["center_crop"]
    if script.alpha:
        values["lora_alpha"] = int(options.alpha)
    if script.buckets:
        values["aspect_ratio_buckets"] = ";".join(sorted({f"{image['height']},{image['width']}" for image in images}))
        flags.append("use_aspect_ratio_buckets")
    if script.dropout:
        values["caption_dropout"] = options.caption_dropout
    if script.guidance:
        values["guidance_scale"] = options.guidance
    if options.base_storage == "nf4":
        kind = Path("nf4.json")
        kind.write_text(json.dumps({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}))
        values["bnb_quantization_config_path"] = kind
    if options.resume:
        values["resume_from_checkpoint"] = options.resume.name
    for flag, there in (
        ("cache_latents", script.cache), ("offload", script.offload), ("gradient_checkpointing", options.checkpoint_activations),
        ("use_8bit_adam", options.optimizer == "adamw_8bit"), ("upcast_before_saving", options.base_storage == "same"),
    ):  # fmt: skip
        flags += [flag] if there else []
    return [word for name, value in values.items() for word in (f"--{name}", str(value))] + [*script.reads, *(f"--{flag}" for flag in flags)]


def folder(images: Sequence[dict[str, Any]], source: Path, target: Path) -> Path:
    """The images as `datasets` reads a folder of them: links, and a metadata.jsonl with the captions.  An image with repeats is there more often."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with (target / "metadata.jsonl").open("w", encoding="utf-8") as file:
        for image in images:
            for time in range(image["repeats"]):
                name = f"{image['id']}-{time}.png"
                (target / name).symlink_to((source / f"{image['id']}.png").resolve())
                file.write(json.dumps({"file_name": name, "text": image["caption"]}, ensure_ascii=False) + "\n")
    return target


def loaded(file: Path) -> ModuleType:
    """The script as a module, which finds what is beside it as if it were started itself."""
    if not file.is_file():
        fail(f"{file} is not there: the recipe fetches diffusers' examples at the commit that it names")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        fail(f"{file.name} imports {error.name}, which is not in this step's Python; the recipe's own environment has it: leave out --python")
    return module


def parsed(module: ModuleType, name: str, words: Sequence[str]) -> argparse.Namespace:
    """The script's own reading of its command line.  Ends with a message where it refuses one."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments: argparse.Namespace = module.parse_args(list(words))
    except (SystemExit, ValueError) as error:
        told = said.getvalue().strip().splitlines()
        fail(f"{name} refuses its options: {told[-1].partition('error: ')[2] if told else error}; look at what set gives")
    return arguments


class Watch:
    """What stands in for three methods of accelerate's `Accelerator` while a script trains: steps are told, and checkpoints are whole."""

    def __init__(self, options: argparse.Namespace, settings: Mapping[str, object], steps_of_epoch: int) -> None:
        self._options, self._settings, self._steps_of_epoch = options, settings, steps_of_epoch
        kept = options.resume / HISTORY if options.resume else None
        self.history = kept.read_text().splitlines(keepends=True) if kept and kept.exists() else []
        self._losses: list[float] = []
        self._done = json.loads(self.history[-1])["step"] if self.history else 0
        self._part: Path | None = None

    def put(self) -> None:
        from accelerate import Accelerator  # type: ignore[import-untyped]

        self._save: Callable[..., Any] = Accelerator.save_state
        # As functions of their own: a method that is put there would get no Accelerator.
        Accelerator.init_trackers = lambda _, *words, **more: self._begin()
        Accelerator.log = lambda _, values, step=0, **more: self._log(values, step)
        Accelerator.save_state = lambda accelerator, folder, **more: self._saved(accelerator, Path(folder))
        Accelerator.end_training = lambda _: self.telemetry.close() if _.is_main_process else None

    def _begin(self) -> None:
        """A script calls this on one process, when all is on its device and the first step is next."""
        from telemetry import Telemetry

        options = self._options
        self.telemetry = Telemetry(
            options.tensorboard, history=self.history, tracker=options.tracker, project=f"image-lora-{options.family}", settings=self._settings
        )
        self.history = self.telemetry.history

    def _log(self, values: Mapping[str, float], step: int) -> None:
        """A script tells each micro batch; the last of a step has the step's own number."""
        if not hasattr(self, "telemetry"):
            return
        self._losses.append(values["loss"])
        if step > self._done:
            self._done = step
            loss = sum(self._losses) / len(self._losses)
            epoch = step / self._steps_of_epoch
            self.telemetry.step(step, samples=self._options.global_batch, of=self._options.max_steps, epoch=epoch, loss=loss, lr=values["lr"])
            self._losses.clear()
            if self._part:
                (self._part / HISTORY).write_text("".join(self.history))
                self._part.rename(self._part.with_name(self._part.name.removeprefix("tmp-")))
                self._part = None

    def _saved(self, accelerator: Any, final: Path) -> None:
        """A script saves before it tells the step that it saves: the checkpoint gets its name when the history has the step."""
        self._part = final.with_name(f"tmp-{final.name}")
        shutil.rmtree(self._part, ignore_errors=True)
        self._save(accelerator, str(self._part))


def report(history: Sequence[str], images: int) -> dict[str, object]:
    """What is known of the training: these scripts judge by no held-out images."""
    losses = [line["loss"] for line in map(json.loads, history) if math.isfinite(line.get("loss", math.nan))]
    few = max(1, min(20, len(losses) // 2))
    ends = {"loss_first": losses[:few], "loss_last": losses[-few:]} if losses else {}
    means = {name: round(sum(part) / len(part), 6) for name, part in ends.items()}
    return {"steps": json.loads(history[-1])["step"] if history else 0, "images": images, "held_out": 0, "mean_of_steps": few, **means}


def _pairs(words: Sequence[str]) -> list[str]:
    """An option and its value on a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=SCRIPTS, required=True)
    for name in ("scripts", "base", "images", "manifest", "checkpoints", "adapter", "history", "report", "command", "tensorboard"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    for name in ("init", "precision", "optimizer", "timesteps", "base-storage", "tracker"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("trigger", "set"):
        parser.add_argument(f"--{name}", default="{}" if name == "set" else "")
    for name in ("resolution", "max-steps", "warmup-steps", "rank", "global-batch", "micro-batch", "seed", "save-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("learning-rate", "weight-decay", "alpha", "caption-dropout", "guidance"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--checkpoint-activations", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
