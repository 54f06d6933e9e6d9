"""One edited step: `recipe run` after an edit of its only input, and again without an edit.

usage: edit.py [--rounds 15] [--against CHECKOUT] [--shim]

Wall seconds and CPU seconds of the whole process, without its agent; medians.  `--against` measures the recipe of another checkout in turn.  `--shim`
puts a `python3` first on PATH that looks for its interpreter for about 70 ms of processor time, like a shim of pyenv.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

RECIPE = """\
recipe: one@1
steps:
  s: {run: 'cat a | cksum > out', deps: [a], outputs: {o: out}}
"""
SHIM = """\
#!/bin/sh
i=0
while [ $i -lt 120000 ]; do i=$((i + 1)); done
exec /usr/bin/python3 "$@"
"""


class Took(NamedTuple):
    """Wall and CPU seconds of one process."""

    wall: float
    cpu: float


def prepare(folder: Path, shim: bool) -> Path:
    """Write the recipe, and the shim if wanted, and return the folder."""
    (folder / "bin").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    if shim:
        (folder / "bin/python3").write_text(SHIM)
        (folder / "bin/python3").chmod(0o755)
    return folder


def run(checkout: Path, folder: Path) -> Took:
    """Run the recipe of a folder with the program of a checkout."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = ours | {"PATH": f"{folder}/bin:/usr/bin:/bin", "RECIPE_LEDGER": f"{folder}/ledger"}
    begun = time.perf_counter()
    process = subprocess.Popen(
        [checkout / ".venv/bin/recipe", "run"],
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"recipe of {checkout} failed in {folder}")
    return Took(time.perf_counter() - begun, usage.ru_utime + usage.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--shim", action="store_true")
    args = parser.parse_args()
    checkouts = [Path(__file__).parents[1], *([args.against] if args.against else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            each: prepare(Path(scratch, str(n)), args.shim) for n, each in enumerate(checkouts)
        }
        edited: dict[Path, list[Took]] = {each: [] for each in checkouts}
        same: dict[Path, list[Took]] = {each: [] for each in checkouts}
        for n in range(args.rounds + 1):
            for checkout, folder in folders.items():
                (folder / "a").write_text(f"{n}\n")
                edited[checkout].append(run(checkout, folder))
                same[checkout].append(run(checkout, folder))
    for checkout in checkouts:
        print(checkout)
        for words, found in (
            ("one edited step", edited[checkout]),
            ("nothing to do", same[checkout]),
        ):
            wall, cpu = (median(values[1:]) for values in zip(*found, strict=True))
            print(f"  {words:16} wall {wall:.3f} s, CPU {cpu:.3f} s")


if __name__ == "__main__":
    main()
