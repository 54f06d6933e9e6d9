"""A sweep of 12 instances, two at a time: `recipe sweep` beside `dvc exp run --queue`, with the same script that trains for a moment.

    python benchmarks/sweep.py [--dvc PATH] [--rounds N]

`--dvc` is the program, in an environment of its own; without it only ours is measured.  Prints medians of the wall time of a first sweep,
and of one with six more instances.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """import json, sys, time
lr, rank = float(sys.argv[1]), int(sys.argv[2])
time.sleep(0.5)
json.dump({"loss": abs(lr - 3e-4) * 1000 + 1 / rank}, open("metrics.json", "w"))
open("model.txt", "w").write("m")
"""
RECIPE = """recipe: mine@1
inputs: {lr: {type: number, default: 1e-4}, rank: {type: integer, default: 4}}
steps:
  prep:
    run: 'cp data.txt prepared.txt'
    deps: [data.txt]
    outputs: {data: prepared.txt}
  train:
    run: 'python3 train.py {{ inputs.lr }} {{ inputs.rank }} < {{ steps.prep.data }}'
    code: [train.py]
    outputs: {model: model.txt, metrics: metrics.json}
    metrics: {file: metrics.json}
"""
DVC = """stages:
  prep: {cmd: cp data.txt prepared.txt, deps: [data.txt], outs: [prepared.txt]}
  train:
    cmd: python3 train.py ${lr} ${rank} < prepared.txt
    deps: [train.py, prepared.txt]
    params: [lr, rank]
    outs: [model.txt]
    metrics: [metrics.json: {cache: false}]
"""
RATES, RANKS, MORE = "1e-4,2e-4,3e-4,4e-4", "4,8,16", "1e-4,2e-4,3e-4,4e-4,5e-4,6e-4"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dvc", default="")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    took: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        took.setdefault("recipe", []).append(ours())
        if args.dvc:
            took.setdefault("dvc", []).append(theirs(args.dvc))
    for name, rounds in took.items():
        first, more = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"{name}: 12 instances {first:.2f} s, six more {more:.2f} s")


def ours() -> tuple[float, float]:
    program = str(Path(sys.executable).with_name("recipe"))
    with tempfile.TemporaryDirectory() as folder:
        _repository(folder)
        Path(folder, "mine.yaml").write_text(RECIPE)
        words = [program, "sweep", "mine.yaml", f"rank={RANKS}", "-j2", "--min", "loss", "-q"]
        return _timed(folder, [[*words, f"lr={RATES}"]]), _timed(folder, [[*words, f"lr={MORE}"]])


def theirs(dvc: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        _repository(folder)
        Path(folder, "dvc.yaml").write_text(DVC)
        Path(folder, "params.yaml").write_text("lr: 1e-4\nrank: 4\n")
        _timed(
            folder,
            [
                ["git", "init", "-q"],
                [dvc, "init", "-q"],
                [dvc, "config", "core.analytics", "false"],
            ],
        )
        _timed(
            folder,
            [
                ["git", "add", "-A"],
                ["git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"],
            ],
        )

        def sweep(rates: str) -> float:
            run = [dvc, "exp", "run", "-q"]
            return _timed(
                folder,
                [
                    [*run, "--queue", "-S", f"lr={rates}", "-S", f"rank={RANKS}"],
                    [*run, "--run-all", "-j", "2"],
                ],
            )

        return sweep(RATES), sweep("5e-4,6e-4")


def _repository(folder: str) -> None:
    Path(folder, "train.py").write_text(TRAIN)
    Path(folder, "data.txt").write_text("data\n" * 1000)


def _timed(folder: str, commands: list[list[str]]) -> float:
    # dvc starts its workers by its name
    path = f"{os.path.dirname(commands[-1][0])}:{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | {
        "PATH": path,
        "DVC_NO_ANALYTICS": "1",
    }
    began = time.monotonic()
    for command in commands:
        subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
