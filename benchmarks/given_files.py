"""One step with many input files, selected by a glob or given as one directory.

usage (as root, because it mounts file systems):
    given_files.py [--files 100000] [--runs 3] [--against CHECKOUT]

Each measurement has a new ext4 file system.  On a shared one, ext4 avoids recently deleted inodes, so
each measurement would slow down the next ones.  The first run hashes the files.  Each further run has
another value of an input, so that the step runs again.  `--against` measures the recipe of another
checkout as well.  The time of `cp -al`, which creates the same hard links, is printed for comparison.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPE = """\
recipe: given@1
inputs: {{round: {{type: string}}}}
steps:
  s: {{run: 'echo {{{{ inputs.round }}}} > out', deps: ['{deps}'], outputs: {{o: out}}}}
"""
DEPS = {"glob": "data/*.txt", "directory": "data"}
IMAGE_BYTES = 6 << 30
AGENT_STAYS = 60
"""Seconds to wait until the agent of the last run has left the file system."""


@contextmanager
def new_file_system(scratch: Path) -> Iterator[Path]:
    """Mount a new ext4 file system."""
    image, mounted = scratch / "image", scratch / "mounted"
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    mounted.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
    try:
        yield mounted
    finally:
        unmount(mounted)
        image.unlink()


def unmount(mounted: Path) -> None:
    deadline = time.monotonic() + AGENT_STAYS
    while subprocess.run(["umount", mounted], capture_output=True).returncode:
        if time.monotonic() > deadline:
            sys.exit(f"{mounted} is still in use")
        time.sleep(1)


def prepare(root: Path, files: int, deps: str) -> Path:
    """Write the recipe and its input files, and return the folder."""
    folder = root / "work"
    (folder / "data").mkdir(parents=True)
    for number in range(files):
        (folder / f"data/{number}.txt").write_text(f"{number}\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(deps=deps))
    os.sync()
    return folder


def measure(command: list[str | Path], folder: Path) -> str:
    """Run a command; return its wall, user and system time."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = ours | {"HOME": f"{folder.parent}/home", "RECIPE_LEDGER": f"{folder.parent}/ledger"}
    begun = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    if status:
        sys.exit(f"{command[0]} failed in {folder}")
    os.sync()
    return f"wall {wall:5.1f} s, user {usage.ru_utime:5.1f} s, system {usage.ru_stime:5.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    checkouts = [Path(__file__).parents[1], *([args.against] if args.against else [])]
    with tempfile.TemporaryDirectory() as scratch:
        for kind, deps in DEPS.items():
            for checkout in checkouts:
                print(f"{kind} of {args.files:,} files, {checkout}", flush=True)
                with new_file_system(Path(scratch)) as mounted:
                    folder = prepare(mounted, args.files, deps)
                    for run in range(args.runs):
                        recipe = checkout / ".venv/bin/recipe"
                        took = measure([recipe, "run", f"round={run}"], folder)
                        print(f"  run {run + 1}   {took}", flush=True)
                    print(f"  cp -al  {measure(['cp', '-al', 'data', 'copy'], folder)}", flush=True)


if __name__ == "__main__":
    main()
