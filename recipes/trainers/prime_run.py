"""Step `train` of prime-rl@1: start prime-rl on the configuration that passed the guard, resume from a checkpoint, gather what it made."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from tool_points import Files, Points
from tool_run import PRIME_RL, absent, found, start, write

RUN = "run"
METRICS = "**/metrics.jsonl"  # in which each of its programs writes a line for a step


def main() -> None:
    options = _options()
    if not found(options.launcher):
        absent(PRIME_RL, options.if_missing, "not trained", options.report)
        return
    # Checkpoints go into the state, which prime-rl takes for no earlier run as long as it is empty; all else into a folder that is new each time.
    folder = options.runs / RUN
    argv = [*options.launcher, "@", str(options.config), "--output-dir", str(options.runs), "--run.name", RUN]
    argv += ["--model.name", str(options.base.absolute()), "--max-steps", str(options.max_steps)]
    argv += ["--ckpt.output-dir", str(options.checkpoints.parent)]
    if options.resume:
        argv += ["--resume.dir", str(options.resume)]
    with Files(Points(options.max_steps), folder, METRICS):
        start(argv)

    last = _newest(options.checkpoints)
    if last:
        shutil.copytree(last, options.checkpoint, copy_function=_link, dirs_exist_ok=True)
    weights = _newest(folder / "broadcasts")
    if weights:
        shutil.copytree(weights, options.model, copy_function=_link, dirs_exist_ok=True)
    steps = int(last.name.rpartition("_")[2]) if last else 0
    write(options.report, {"trained": True, "steps": steps, "weights": "model" if weights else "checkpoint, in torch's distributed format"})


def _link(source: str, target: str) -> None:
    """The same bytes under two names, as a checkpoint of a large model takes long to copy; on another disk they are copied."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _newest(folder: Path) -> Path | None:
    steps = [path for path in folder.glob("step_*") if path.name.rpartition("_")[2].isdigit()]
    return max(steps, key=lambda path: int(path.name.rpartition("_")[2]), default=None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", nargs="+", required=True, help="the words that start prime-rl's `rl`")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--if-missing", choices=["fail", "report"], required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
