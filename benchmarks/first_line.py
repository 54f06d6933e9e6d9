"""How long a person waits for the first line of a log from a server on which nothing of ours is yet: `recipe run --driver ssh` in a new folder.

    python benchmarks/first_line.py [--rounds 5] [--rtt 0,100]

One step with an input of 1 MB, through a real sshd and, with a round trip in milliseconds, a long wire in front of it.  Seconds from the start of the
command to the first line in the log of the step, and to its end; medians.  `again` is the same with another value, over what the first left.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.transfer import behind
from tests.servers.sshd import Sshd

RECIPE = """\
recipe: hello@1
summary: Says a line and copies a file
inputs:
  data: {type: file, doc: What is copied}
  word: {type: string, default: one, doc: Another value is another run}
steps:
  say:
    run: |
      echo it begins with {{ inputs.word }}
      sleep 0.5
      cp {{ inputs.data }} out.bin
    outputs: [out.bin]
"""


def once(space: Path, word: str) -> tuple[float, float]:
    """Seconds to the first line of the log, and to the end."""
    code = "import sys; from runner.interface.cli.main import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "run", "data=data.bin", f"word={word}", "--driver", "ssh"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    began = time.perf_counter()
    first = 0.0
    with subprocess.Popen(argv, cwd=space, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None and not first:
            time.sleep(0.005)
            if any(f"begins with {word}" in path.read_text() for path in space.glob(".recipe/runs/*/say.*.log")):
                first = time.perf_counter() - began
        said = process.communicate()[0]
    if process.returncode or not first:
        sys.exit(f"the run ended with {process.returncode}:\n{said}")
    return first, time.perf_counter() - began


def round_of(rtt: float) -> dict[str, tuple[float, float]]:
    """The first run on a new machine, and the next one."""
    with (
        tempfile.TemporaryDirectory(prefix="first-", dir="/dev/shm") as folder,
        Sshd(Path(folder) / "sshd") as sshd,
        behind(sshd, rtt, 125e6 * (rtt > 0)),
    ):
        space = Path(folder) / "space"
        space.mkdir()
        (space / "recipe.yaml").write_text(RECIPE)
        (space / "data.bin").write_bytes(os.urandom(1_000_000))
        settings = f'hosts = ["{sshd.address}"]\nagent = false\nknown_hosts = "{sshd.known_hosts}"\nidentity = "{sshd.identity}"\n'
        (space / "recipe.toml").write_text(f"[drivers.ssh]\n{settings}")
        return {"first": once(space, "one"), "again": once(space, "two")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rtt", default="0,100")
    options = parser.parse_args()
    print("| round trip | run | first line of its log | end |\n|---|---|---|---|")
    for rtt in map(float, options.rtt.split(",")):
        rounds = [round_of(rtt / 1000) for _ in range(options.rounds)]
        for run in ("first", "again"):
            line, end = (median(each[run][n] for each in rounds) for n in (0, 1))
            print(f"| {rtt:g} ms | {run} | {line:.2f} s | {end:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
