"""Steps `prepare` and `train` of axolotl@1: complete axolotl's configuration, run axolotl, gather what it made.  Knows no training itself."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from tool_run import AXOLOTL, absent, version, write

# axolotl's names for the three kinds of rows that `tool_data.py` writes.
TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "completion", "field": "text"},
    "prompt-completion": {
        "type": {
            "system_prompt": "",
            "field_instruction": "prompt",
            "field_output": "completion",
            "format": "{instruction}",
            "no_input_format": "{instruction}",
        }
    },
    "messages": {"type": "chat_template", "field_messages": "messages"},
}
# What this recipe decides itself: to change it behind the recipe's back would break resuming, or change what the key says.
OURS = (
    "output_dir",
    "resume_from_checkpoint",
    "auto_resume_from_checkpoints",
    "dataset_prepared_path",
    "gradient_accumulation_steps",
    "hub_model_id",
)

# Beside this program, where Python finds it.
POINTS = "axolotl_points.PointsPlugin"


def main() -> None:
    options = _options()
    rank = int(os.environ.get("RANK", "0"))
    report: Path = options.report
    try:
        config = complete(options)
    except ValueError as error:
        sys.exit(f"axolotl: {error}")
    # Beside the product's own file, not over it: every process writes one, as none may read what another has not finished.
    file = Path(f"axolotl-{rank}.yaml")
    file.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if rank == 0 and options.config_out:
        shutil.copyfile(file, options.config_out)
    there = version(AXOLOTL)
    if there is None:
        absent(AXOLOTL, options.if_missing, "not prepared" if options.stage == "preprocess" else "not trained", report)
        return

    # In this process, so that accelerate's ranks stay as they are; the second word is all that axolotl reads of a command line.
    sys.argv = ["axolotl", str(file)]
    runpy.run_module(f"axolotl.cli.{options.stage}", run_name="__main__", alter_sys=True)
    if rank == 0 and options.stage == "train":
        history = _gather(options)
        write(report, {"trained": True, "axolotl": there, "steps": history[-1]["step"] if history else 0})


def complete(options: argparse.Namespace) -> dict[str, Any]:
    """axolotl's configuration: the recipe's settings, what follows from data and devices, then the caller's own.  Raises ValueError."""
    config: dict[str, Any] = yaml.safe_load(options.settings.read_text(encoding="utf-8"))
    data = json.loads((options.data / "data.json").read_text())
    rows = {"ds_type": "json", **TYPES[data["format"]]}
    config["datasets"] = [{"path": str(options.data / "train.jsonl"), **rows}]
    if data["rows_held_out"]:
        config["test_datasets"] = [{"path": str(options.data / "held_out.jsonl"), "split": "train", **rows}]
        config["eval_steps"] = config["save_steps"]
    if data["format"] == "messages":
        config.setdefault("chat_template", "tokenizer_default_fallback_chatml")
    more = json.loads(options.set)
    if taken := [name for name in OURS if name in more]:
        raise ValueError(f"set names {', '.join(taken)}, which this recipe decides itself; leave it out")
    config |= more
    world = int(os.environ.get("WORLD_SIZE", "1"))
    at_once = int(config["micro_batch_size"]) * world
    if options.global_batch % at_once:
        raise ValueError(f"global_batch {options.global_batch} is no multiple of micro_batch × {world} processes = {at_once}; change one of them")
    config["gradient_accumulation_steps"] = options.global_batch // at_once
    config["dataset_prepared_path"] = str(options.prepared)
    config["output_dir"] = str(options.checkpoints or "unused")
    if options.stage == "train":
        config["plugins"] = [*(config.get("plugins") or ()), POINTS]
    if options.resume:
        config["resume_from_checkpoint"] = str(options.resume)
    return config


def _gather(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Copy model and TensorBoard files out of axolotl's folder, which stays as state, and write the losses down."""
    for file in sorted(options.checkpoints.iterdir()):
        if file.is_file():
            shutil.copyfile(file, options.model / file.name)
    if (options.checkpoints / "runs").is_dir():
        shutil.copytree(options.checkpoints / "runs", options.tensorboard, dirs_exist_ok=True)
    states = sorted(options.checkpoints.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.rsplit("-", 1)[-1]))
    points = json.loads(states[-1].read_text())["log_history"] if states else []
    with options.history.open("w") as file:
        for point in points:
            if "loss" in point:
                file.write(json.dumps(point) + "\n")
    return [point for point in points if "loss" in point]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=["preprocess", "train"], required=True)
    parser.add_argument("--settings", type=Path, required=True, help="the recipe's part of axolotl's configuration, YAML")
    parser.add_argument("--set", default="{}", help="the caller's own part, JSON, merged last")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--if-missing", choices=["fail", "report"], required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--config-out", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--history", type=Path)
    parser.add_argument("--tensorboard", type=Path)
    options = parser.parse_args()
    if options.history:
        options.history.touch()
    return options


if __name__ == "__main__":
    main()
