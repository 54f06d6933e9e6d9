"""Step `train` of unsloth@1: write unsloth's configuration, run its command, gather what it made.  Knows no training itself."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from tool_points import Points, Printed
from tool_run import UNSLOTH, absent, found, start, undone, version, write

FORMATS = {"prompt-completion": "alpaca", "messages": "chatml"}
SECTIONS = ("model", "data", "training", "lora", "logging")


def main() -> None:
    options = _options()
    try:
        config = complete(options)
    except ValueError as error:
        sys.exit(f"unsloth: {error}")
    options.config_out.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    there = version(UNSLOTH)
    if there is None or not found([UNSLOTH.command]):
        absent(UNSLOTH, options.if_missing, "not trained", options.report)
        return
    if not _has_gpu():
        undone("not trained: unsloth needs a GPU, and this machine has none", "run it on one that has", options.if_missing, options.report)
        return
    # It writes only below a home of its own, which is otherwise in the user's.
    home = Path("unsloth-home").absolute()
    os.environ["UNSLOTH_STUDIO_HOME"] = str(home)
    max_steps = int(config["training"]["max_steps"])
    printed = Printed(Points(max_steps), max_steps)
    start([UNSLOTH.command, "train", "--config", str(options.config_out)], printed.on_line)
    printed.end()
    made = home / "outputs" / "model"
    history = _gather(made, options)
    write(options.report, {"trained": True, "unsloth": there, "steps": history[-1]["step"] if history else 0})


def complete(options: argparse.Namespace) -> dict[str, Any]:
    """unsloth's configuration: the recipe's settings, the rows under names that it reads, then the caller's own.  Raises ValueError."""
    config: dict[str, Any] = yaml.safe_load(options.settings.read_text(encoding="utf-8"))
    form = json.loads((options.data / "data.json").read_text())["format"]
    rows = Path("unsloth-rows.jsonl")
    # Line by line as files have them: to a string, U+2028 and its like in a text end a line too.
    with rows.open("w", encoding="utf-8") as file, (options.data / "train.jsonl").open(encoding="utf-8") as lines:
        file.writelines(json.dumps(_row(json.loads(line)), ensure_ascii=False) + "\n" for line in lines)
    config["data"] = {"local_dataset": [str(rows)], "format_type": FORMATS[form]}
    for section, values in json.loads(options.set).items():
        if section not in SECTIONS or section == "data" or (section == "training" and "output_dir" in values):
            raise ValueError(f"set may name training, lora and logging, without training.output_dir; not {section}")
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    batch = int(config["training"]["batch_size"])
    if options.global_batch % batch:
        raise ValueError(f"global_batch {options.global_batch} is no multiple of micro_batch {batch}; change one of them")
    config["training"]["gradient_accumulation_steps"] = options.global_batch // batch
    return config


def _has_gpu() -> bool:
    import torch  # where unsloth is, it is

    return torch.accelerator.is_available()


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return row if "messages" in row else {"instruction": row["prompt"], "input": "", "output": row["completion"]}


def _gather(made: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    for file in sorted(made.iterdir()):
        if file.is_file():
            shutil.copyfile(file, options.model / file.name)
    states = sorted(made.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.rsplit("-", 1)[-1]))
    points = [point for point in json.loads(states[-1].read_text())["log_history"] if "loss" in point] if states else []
    options.history.write_text("".join(json.dumps(point) + "\n" for point in points))
    return points


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the recipe's part of unsloth's configuration, YAML")
    parser.add_argument("--set", default="{}", help="the caller's own part, JSON, merged last")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--if-missing", choices=["fail", "report"], required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--config-out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--history", type=Path, required=True)
    options = parser.parse_args()
    options.history.touch()
    return options


if __name__ == "__main__":
    main()
