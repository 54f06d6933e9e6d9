"""How `recipe` grows with the number of steps, and how quickly it starts.

usage: scale.py [--steps 100,1000,10000,100000] [--run-up-to 10000] [--history 20000]

Per size: seconds and peak memory of the first `recipe plan` (read, check, compile, judge), of a run with everything to do (as CPU time of the worker
a step, its children excluded), and of a run with nothing to do.  Then `--help`, `list` and a no-op of ten steps, whole processes, median of eleven.
Then verbs in a workspace of two steps with one run, and with so many runs before it: milliseconds of the processor, median of eleven.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dag import write

from tests.history import remember

RECIPE = str(Path(sys.executable).with_name("recipe"))


def measured(argv: list[str], cwd: Path) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak memory (MB) of one process that must succeed.  Its detached children are not counted."""
    begun = time.perf_counter()
    process = subprocess.Popen(argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(argv)} failed in {cwd}")
    return time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


PAIR = """\
recipe: pair@1
inputs: {n: {type: integer, default: 0}}
steps:
  a: {run: 'echo {{ inputs.n }} > a', outputs: {o: a}}
  bb: {run: 'cp {{ steps.a.o }} b', outputs: {o: b}}
"""


def with_history(count: int) -> None:
    """Print what verbs take after one run, and after so many more."""
    home = Path(tempfile.mkdtemp(prefix="scale-"))
    (home / "recipe.yaml").write_text(PAIR)
    measured([RECIPE, "run", "-q"], home)
    took: dict[str, list[float]] = {}
    number = 0
    for before in (0, count):
        if before:
            remember(home, before)
        for words in (
            "run n={}",
            "run",
            "status",
            "why a",
            "show last",
            "logs last",
            "runs",
            "diff",
        ):
            times = []
            for _ in range(11):
                number += 1
                times.append(measured([RECIPE, *words.format(number).split()], home)[1])
            took.setdefault(words, []).append(statistics.median(times) * 1000)
    for words, (first, later) in took.items():
        print(f"recipe {words:12} {first:6.0f} ms  with {count} runs before it {later:6.0f} ms")
    shutil.rmtree(home)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", default="100,1000,10000,100000")
    parser.add_argument("--run-up-to", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=20_000)
    given = parser.parse_args()
    print(
        f"{'steps':>7}  {'plan s':>7}  {'plan MB':>7}  {'run s':>7}  {'CPU ms/step':>11}  {'no-op s':>7}  {'no-op MB':>8}"
    )
    for steps in map(int, filter(None, given.steps.split(","))):
        home = Path(tempfile.mkdtemp(prefix="scale-"))
        write(home, steps, width=min(1000, max(10, steps // 10)))
        plan, _, plan_memory = measured([RECIPE, "plan", "./recipe.yaml"], home)
        cells = [f"{plan:7.2f}", f"{plan_memory:7.0f}"]
        if steps <= given.run_up_to:
            run, cpu, _ = measured([RECIPE, "run", "./recipe.yaml", "-j2", "-q"], home)
            noop, _, memory = measured([RECIPE, "run", "./recipe.yaml", "-j2", "-q"], home)
            start = measured([RECIPE, "--help"], home)[1]
            cells += [
                f"{run:7.2f}",
                f"{(cpu - start) / steps * 1000:11.2f}",
                f"{noop:7.2f}",
                f"{memory:8.0f}",
            ]
        print(f"{steps:7}  " + "  ".join(cells), flush=True)
        shutil.rmtree(home)
    home = Path(tempfile.mkdtemp(prefix="scale-"))
    write(home, 10, width=4)
    measured([RECIPE, "run", "./recipe.yaml", "-q"], home)
    for words in (["--help"], ["list"], ["run", "./recipe.yaml"]):
        times = [measured([RECIPE, *words], home)[0] for _ in range(11)]
        print(f"recipe {' '.join(words):20} {statistics.median(times) * 1000:6.0f} ms")
    python = [measured([sys.executable, "-c", "pass"], home)[0] for _ in range(11)]
    print(f"python -c pass              {statistics.median(python) * 1000:6.0f} ms")
    shutil.rmtree(home)
    with_history(given.history)


if __name__ == "__main__":
    main()
