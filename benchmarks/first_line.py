"""How long a person waits for the first line of a log: `recipe run` in a new folder, here, and on a server on which nothing of ours is yet.

    python benchmarks/first_line.py [--rounds 5] [--rtt here,0,100] [--peers make,doit]

One step with an input of 1 MB; elsewhere through a real sshd and, with a round trip in milliseconds, a long wire in front of it.  Seconds from
the start of the command to the first line in the log of the step, while it runs, and to its end; CPU seconds of the command itself; medians.
`again` is the same with another value, over what the first left, `fresh` once more with the same.  `make` and `doit` have their command write the
log.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

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


MAKE = """\
out.bin: data.bin
\t(echo it begins with $(WORD); sleep 0.5; cp data.bin out.bin) > say.log
"""
DOIT = """\
def task_say():
    script = "(echo it begins with one; sleep 0.5; cp data.bin out.bin) > say.log"
    return {"actions": [script], "file_dep": ["data.bin"], "targets": ["out.bin"]}
"""
LOGS = (".recipe/attempts/*.log", "say.log")


class Took(NamedTuple):
    """Seconds of one command: to the first line of the log (0 where nothing ran), to its end, and of processor time."""

    line: float
    end: float
    cpu: float


def once(space: Path, argv: Sequence[str], word: str = "") -> Took:
    """Run a command; `word` is in the line that is waited for."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    first = 0.0
    with subprocess.Popen(
        argv, cwd=space, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while word and process.poll() is None and not first:
            time.sleep(0.002)
            if any(
                f"begins with {word}".encode() in path.read_bytes()
                for pattern in LOGS
                for path in space.glob(pattern)
            ):
                first = time.perf_counter() - began
        said = process.communicate()[0]
    end = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode or bool(word) != bool(first):
        sys.exit(f"{argv[0]} ended with {process.returncode}:\n{said}")
    return Took(first, end, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def ours(space: Path, driver: str) -> dict[str, Took]:
    """The first run, the next one, and one that finds everything fresh."""
    code = "import sys; from runner.interface.cli.main import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "run", "data=data.bin", "--driver", driver]
    first, again = (once(space, [*argv, f"word={word}"], word) for word in ("one", "two"))
    return {"first": first, "again": again, "fresh": once(space, [*argv, "word=two"])}


def filled(folder: str) -> Path:
    space = Path(folder) / "space"
    space.mkdir()
    (space / "data.bin").write_bytes(os.urandom(1_000_000))
    return space


def here(peers: Sequence[str]) -> dict[str, Took]:
    """On this machine, beside others."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="first-", dir="/dev/shm") as folder:
        space = filled(folder)
        (space / "recipe.yaml").write_text(RECIPE)
        found = ours(space, "local")
    for name, file, text, argv in (
        ("make", "Makefile", MAKE, ["make", "WORD=one"]),
        ("doit", "dodo.py", DOIT, [sys.executable, "-m", "doit"]),
    ):
        if name in peers:
            with tempfile.TemporaryDirectory(prefix="first-", dir="/dev/shm") as folder:
                space = filled(folder)
                (space / file).write_text(text)
                found[name], found[f"{name}, fresh"] = once(space, argv, "one"), once(space, argv)
    return found


def there(rtt: float) -> dict[str, Took]:
    """On a server, so many seconds of a round trip away."""
    with (
        tempfile.TemporaryDirectory(prefix="first-", dir="/dev/shm") as folder,
        Sshd(Path(folder) / "sshd") as sshd,
        behind(sshd, rtt, 125e6 * (rtt > 0)),
    ):
        space = filled(folder)
        (space / "recipe.yaml").write_text(RECIPE)
        settings = f'hosts = ["{sshd.address}"]\nagent = false\nknown_hosts = "{sshd.known_hosts}"\nidentity = "{sshd.identity}"\n'
        # A python3 that is a script of a version manager takes a tenth of a second each time: servers have none.
        (space / "recipe.toml").write_text(
            f'[drivers.ssh]\n{settings}python = "{os.path.realpath(sys.executable)}"\n'
        )
        return ours(space, "ssh")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rtt", default="here,0,100")
    parser.add_argument("--peers", default="")
    options = parser.parse_args()
    print("| round trip | run | first line of its log | end | CPU |\n|---|---|---|---|---|")
    for rtt in options.rtt.split(","):
        rounds = [
            here(options.peers.split(",")) if rtt == "here" else there(float(rtt) / 1000)
            for _ in range(options.rounds)
        ]
        for run in rounds[0]:
            line, end, cpu = (median(each[run][n] for each in rounds) for n in (0, 1, 2))
            print(
                f"| {rtt} ms | {run} | {line:.2f} s | {end:.2f} s | {cpu:.2f} s |".replace(
                    "here ms", "here"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
