"""Step `train` of ai-toolkit@1: complete its configuration, run it, keep its checkpoints whole, gather what it made.  Knows no training itself.

ai-toolkit writes an adapter NAME_000000250.safetensors and one optimizer.pt for the newest of them, and resumes from what is in its folder.  When
it says that both are written they are put into a folder of their own; on a resume that folder's files are put back.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loop import Metrics, fail
from tool_run import AI_TOOLKIT, found, start, undone, write

OPTIMIZER = "optimizer.pt"
HISTORY = "history.jsonl"
CLIPS = Path("clips")
NAME = "adapter"  # of the job, and of its files: ai-toolkit resumes from whatever in its folder begins with it
SAVED, WHOLE = "Saved checkpoint to ", "Saved optimizer to "
BAR = re.compile(r"\| (\d+)/\d+ \[.*?lr: ([0-9.e+-]+).*? loss: ([0-9.e+-]+)")
NUMBER = re.compile(r"_(\d{9})")
# The parts of a process of type sd_trainer; ai-toolkit reads past any other without a word.
SECTIONS = (
    "network", "train", "model", "save", "sample", "first_sample", "datasets", "logging", "trigger_word", "guidance", "embedding", "decorator",
    "adapter", "device", "performance_log_every",
)  # fmt: skip
# What this recipe decides itself: to change it behind the recipe's back would break resuming, or change what the key says.
OURS = ("trigger_word", "save.save_every", "save.push_to_hub", "save.save_format", "train.steps", "train.batch_size", "train.start_step",
        "datasets.folder_path", "datasets.caption_ext", "model.name_or_path", "model.arch")  # fmt: skip
# By family: ai-toolkit's name of it, and what its own presets for it set.
FAMILIES: dict[str, dict[str, Any]] = {
    "wan2.1": {"model": {"arch": "wan21", "quantize_te": True}, "train": {"timestep_type": "sigmoid"}, "datasets": {"fps": 16}},
    "wan2.2-5b": {
        "model": {"arch": "wan22_5b", "quantize": True, "quantize_te": True, "low_vram": True},
        "train": {"timestep_type": "weighted"},
        "datasets": {"fps": 24, "do_i2v": True},
    },
    "wan2.2-14b": {
        "model": {
            "arch": "wan22_14b", "quantize": True, "quantize_te": True, "low_vram": True,
            "model_kwargs": {"train_high_noise": True, "train_low_noise": True},
        },
        "train": {"timestep_type": "linear", "switch_boundary_every": 10},
        "datasets": {"fps": 16},
    },
    "ltx-2": {
        "model": {"arch": "ltx2", "quantize": True, "quantize_te": True, "low_vram": True},
        "train": {"timestep_type": "weighted"},
        "datasets": {"fps": 24, "do_i2v": False, "do_audio": False},
    },
}  # fmt: skip


def main() -> None:
    options = _options()
    options.history.touch()
    try:
        config = complete(options)
    except ValueError as error:
        fail(str(error))
    file = Path("ai-toolkit.json").absolute()
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.copyfile(file, options.config_out)
    missing = [word for word in options.launcher if word.endswith(".py") and not Path(word).is_file()]
    if missing or not found(options.launcher):
        there = f"{(missing or options.launcher)[0]} is not there"
        undone(f"not trained: {AI_TOOLKIT.name} is not installed: {there}", AI_TOOLKIT.install, options.if_missing, options.report)
        return
    link(options.data, options.dataset)
    keeper = Keeper(options)
    keeper.restore()
    os.environ["SEED"] = str(options.seed)  # where ai-toolkit looks for it
    start([*options.launcher, str(file)], keeper.on_line)
    keeper.gather()
    write(
        options.report,
        {"trained": True, "family": options.family, "steps": keeper.step, "files": sorted(path.name for path in options.model.iterdir())},
    )


def complete(options: argparse.Namespace) -> dict[str, Any]:
    """ai-toolkit's configuration: the recipe's settings, those of the family, then the caller's own.  Raises ValueError."""
    more: dict[str, Any] = json.loads(options.set)
    if unknown := [name for name in more if name not in SECTIONS]:
        raise ValueError(f"set names {', '.join(unknown)}, which ai-toolkit's trainer does not read; it reads {', '.join(SECTIONS)}")
    deep = {f"{section}.{name}" for section, value in more.items() if isinstance(value, dict) for name in value}
    if taken := [name for name in OURS if name in more or name in deep]:
        raise ValueError(f"set names {', '.join(taken)}, which this recipe decides itself; leave it out")
    if options.global_batch % options.micro_batch:
        raise ValueError(f"global_batch {options.global_batch} is no multiple of micro_batch {options.micro_batch}; change one of them")
    prompts = json.loads(options.prompts)
    process: dict[str, Any] = {
        "type": "sd_trainer",
        "training_folder": "training",  # ai-toolkit takes no path that has _cn, _t2i, _LoRA or _refiner in it: a relative one has none
        "device": "cuda:0",
        "network": {"type": "lora", "linear": options.rank, "linear_alpha": options.alpha},
        "save": {"dtype": "bf16", "save_every": options.save_every, "max_step_saves_to_keep": 2, "push_to_hub": False},
        "datasets": {
            "folder_path": str(CLIPS.absolute()), "caption_ext": ".txt", "caption_dropout_rate": options.caption_dropout,
            "num_frames": options.num_frames, "resolution": json.loads(options.resolution), "cache_latents_to_disk": True,
        },
        "train": {
            "steps": options.max_steps, "batch_size": options.micro_batch, "gradient_accumulation": options.global_batch // options.micro_batch,
            "train_unet": True, "train_text_encoder": False, "gradient_checkpointing": True, "noise_scheduler": "flowmatch",
            "optimizer": "adamw8bit", "lr": options.learning_rate, "optimizer_params": {"weight_decay": 1e-4}, "dtype": "bf16",
            "cache_text_embeddings": True, "skip_first_sample": True, "disable_sampling": not prompts or not options.sample_every,
        },
        "model": {"name_or_path": str(options.base.absolute())},
        "sample": {
            "sampler": "flowmatch", "sample_every": options.sample_every or options.max_steps, "prompts": prompts, "seed": options.seed,
            "num_frames": options.num_frames,
        },
    }  # fmt: skip
    for part in (FAMILIES[options.family], more):
        merge(process, part)
    process["datasets"] = [process["datasets"]]
    return {"job": "extension", "config": {"name": NAME, "process": [process]}, "meta": {"name": "[name]", "version": "1.0"}}


def merge(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put `more` over a configuration, section by section."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            merge(config[name], value)
        else:
            config[name] = value


def link(data: Path, source: Path) -> None:
    """The files that were checked, as links, each with its caption: ai-toolkit writes what it computes from them beside them."""
    CLIPS.mkdir()
    for number, line in enumerate(data.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        name = f"{number:06d}{Path(row['file']).suffix.lower()}"
        (CLIPS / name).symlink_to((source / row["file"]).resolve())
        (CLIPS / name).with_suffix(".txt").write_text(row["caption"], encoding="utf-8")


class Keeper:
    """Reads what ai-toolkit prints: numbers into the history, and checkpoints into folders of their own when they are whole."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.folder = Path("training") / NAME
        self._kept: dict[str, int] = {}  # by name, when it was written
        self._saving: str | None = None
        self.step = 0
        self._history: list[str] = []
        told = os.environ.get("RECIPE_METRICS")
        self._metrics = Metrics(Path(told) if told else None)

    def restore(self) -> None:
        self.folder.mkdir(parents=True)
        if self._options.resume:
            for path in self._options.resume.iterdir():
                if path.name != HISTORY:
                    shutil.copyfile(path, self.folder / path.name)
            self._history = (self._options.resume / HISTORY).read_text().splitlines(keepends=True)
            self.step = json.loads(self._history[-1])["step"] if self._history else 0
            self._kept = self._written()

    def on_line(self, line: str) -> None:
        if SAVED in line:
            self._saving = _number(Path(line).name)
        elif WHOLE in line:
            self._keep()
        elif (read := BAR.search(line)) and int(read[1]) > self.step:
            self.step = int(read[1])
            values = {"loss": float(read[3]), "lr": float(read[2])}
            self._history.append(json.dumps({"step": self.step, **values}) + "\n")
            self._metrics.tell(self.step, max_steps=self._options.max_steps, **values)

    def _written(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.folder.glob("*.safetensors")}

    def _keep(self) -> None:
        """Copy what was written since the last time, and the optimizer that belongs to it."""
        written = {name: when for name, when in self._written().items() if _number(name) == self._saving}
        fresh = [name for name, when in written.items() if self._kept.get(name) != when]
        self._kept |= written
        target = self._options.checkpoints / f"step-{int(self._saving or self._options.max_steps):09d}"
        if not fresh or target.exists():
            return
        part = target.with_name(f".{target.name}.unfinished")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name in (*fresh, OPTIMIZER):
            shutil.copyfile(self.folder / name, part / name)
        (part / HISTORY).write_text("".join(self._history))
        part.rename(target)
        for old in sorted(self._options.checkpoints.glob("step-*"))[:-2]:
            shutil.rmtree(old)

    def gather(self) -> None:
        """The adapter of the last step, and what was drawn."""
        newest = max(self._options.checkpoints.glob("step-*"), default=None)
        if newest is None:
            fail("ai-toolkit ended well and left no adapter; what it said stands above")
        for path in newest.glob("*.safetensors"):
            shutil.copyfile(path, self._options.model / NUMBER.sub("", path.name))
        if (self.folder / "samples").is_dir():
            shutil.copytree(self.folder / "samples", self._options.samples, dirs_exist_ok=True)
        self._options.history.write_text("".join(self._history))


def _number(name: str) -> str | None:
    """The step in the name of an adapter; that of the last one has none."""
    found = NUMBER.search(name)
    return found[1] if found else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", nargs="+", required=True, help="the words that start ai-toolkit's run.py")
    parser.add_argument("--family", choices=FAMILIES, required=True)
    for name in ("base", "data", "dataset", "checkpoints", "model", "samples", "history", "report", "config-out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    for name in ("set", "prompts", "resolution"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("num-frames", "max-steps", "rank", "global-batch", "micro-batch", "seed", "save-every", "sample-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("learning-rate", "alpha", "caption-dropout"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--if-missing", choices=["fail", "report"], required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
