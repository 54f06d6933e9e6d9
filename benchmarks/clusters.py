"""Steps that do next to nothing on a cluster of Slurm, by `recipe` and its peers: seconds, and questions to the controller.

usage: clusters.py [--steps 40] [--peers snakemake,submitit] [--bin PEERS/bin] [--rounds 3]

The cluster is the tests' own: a controller and two nodes of two processors on this machine.  A round is one run of each tool in a new folder, with
one step and with `--steps` more beside it, as wide as the cluster; a figure is the median.  `recipe` is also given a chain: each step needs the one
before.
Commands of Slurm are counted by programs of the same names in front of PATH.  Peers come from PyPI:
    python3 -m venv peers && peers/bin/pip install snakemake snakemake-executor-plugin-slurm submitit
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

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.servers.slurm import Slurm

COUNTED = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol", "sacct")
SNAKEFILE = """
rule all:
    input: expand("{n}.txt", n=range(COUNT))
rule one:
    output: "{n}.txt"
    threads: 1
    shell: "echo 1 > {output}"
"""
SUBMITIT = """
import submitit
def one(n):
    open(f"{n}.txt", "w").write("1")
executor = submitit.AutoExecutor("logs")
executor.update_parameters(timeout_min=5, cpus_per_task=1, slurm_array_parallelism=4)
[job.result() for job in executor.map_array(one, range(COUNT))]
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peers", default="snakemake,submitit")
    parser.add_argument("--bin", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tools = ["recipe", "recipe, a chain", *filter(None, options.peers.split(","))]
    took: dict[tuple[str, int], list[float]] = {}
    asked: dict[tuple[str, int], list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch, Slurm() as cluster:
        top = Path(scratch)
        counters = _counters(top, cluster.env["SLURM_CONF"])
        environ = (
            os.environ
            | cluster.env
            | {"PATH": f"{counters}:{Path(options.bin).resolve()}:{os.environ['PATH']}"}
        )
        for number in range(options.rounds):
            for tool in tools:
                for steps in (1, 1 + options.steps):
                    folder = top / f"{number}-{tool.replace(', ', '-').replace(' ', '-')}-{steps}"
                    seconds, questions = _run(tool, steps, folder, top / "count", environ)
                    took.setdefault((tool, steps), []).append(seconds)
                    asked.setdefault((tool, steps), []).append(questions)
    print(
        f"{'':18}{'1 step':>10}{f'{1 + options.steps} steps':>12}{'each more':>12}{'commands':>10}"
    )
    for tool in tools:
        one, all = (statistics.median(took[tool, steps]) for steps in (1, 1 + options.steps))
        print(
            f"{tool:18}{one:9.2f}s{all:11.2f}s{(all - one) / options.steps * 1000:10.1f}ms{statistics.median(asked[tool, 1 + options.steps]):10.0f}"
        )


def _run(
    tool: str, steps: int, folder: Path, count: Path, environ: dict[str, str]
) -> tuple[float, int]:
    """Seconds of one run in a new folder, and commands of Slurm that it used."""
    folder.mkdir()
    count.write_text("")
    began = time.perf_counter()
    with (folder / "output").open("wb") as out:
        code = subprocess.run(
            _prepared(tool, steps, folder),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            check=False,
        )
    seconds = time.perf_counter() - began
    if code.returncode or not (folder / f"{steps - 1}.txt").exists():
        sys.exit(f"{tool} failed with {code.returncode}: {(folder / 'output').read_text()[-2000:]}")
    return seconds, len(count.read_text().splitlines())


def _prepared(tool: str, steps: int, folder: Path) -> list[str]:
    """The command of one tool; its files are in the folder."""
    if tool == "snakemake":
        (folder / "Snakefile").write_text(SNAKEFILE.replace("COUNT", str(steps)))
        quick = [
            "--slurm-init-seconds-before-status-checks=1",
            "--seconds-between-status-checks=1",
        ]  # 40 and 10 as it comes
        more = [
            "--slurm-no-account",
            "--slurm-status-command=squeue",
            *quick,
            "--default-resources",
            "mem_mb=50",
            "runtime=5",
        ]
        return ["snakemake", "--executor", "slurm", "--jobs", "100", *more]
    if tool == "submitit":
        (folder / "all.py").write_text(SUBMITIT.replace("COUNT", str(steps)))
        return ["python", "all.py"]
    chained = tool != "recipe"
    lines = ["recipe: steps@1", "summary: Steps that do next to nothing", "steps:"]
    for n in range(steps):
        deps = f"deps: [{n - 1}.txt], " if chained and n else ""
        lines.append(
            f"  s{n}: {{{deps}resources: {{cpus: 1}}, run: 'echo 1 > {n}.txt', outputs: {{o: {n}.txt}}}}"
        )
    (folder / "recipe.yaml").write_text("\n".join(lines) + "\n")
    (folder / "recipe.toml").write_text(f"[drivers.slurm]\nroot = '{folder}-there'\n")
    return [str(Path(sys.executable).with_name("recipe")), "run", "--driver", "slurm"]


def _counters(top: Path, conf: str) -> Path:
    """A folder of programs that count what they hand on, to the cluster of `conf`: snakemake's jobs lose the variable that names it."""
    folder = top / "bin"
    folder.mkdir()
    for name in COUNTED:
        if real := shutil.which(name):
            (folder / name).write_text(
                f'#!/bin/sh\necho {name} >> {top}/count\nSLURM_CONF={conf} exec {real} "$@"\n'
            )
            (folder / name).chmod(0o755)
    return folder


if __name__ == "__main__":
    main()
