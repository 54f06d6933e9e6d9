"""Run one DAG through `recipe` and its peers, side by side, and print times and ratios.

usage: peers.py [--steps 1000] [--peers ninja,make,doit,snakemake] [--bin PEERS/bin] [--rounds 5] [--jobs 2]

For each tool: cold (nothing built), no-op (all fresh), edit (one source changed).  Rounds interleave the tools, so that a drift of the machine's
speed hits all alike; a figure is the median, the ratio that of the medians to the first peer's.  Peers come from PyPI:
    python3 -m venv peers && peers/bin/pip install ninja doit snakemake
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

from dag import write

STATE = {
    "recipe": [".recipe"],
    "ninja": [".ninja_log", ".ninja_deps"],
    "make": [],
    "doit": [".doit.db", ".doit.db.db", ".doit.db.dat", ".doit.db.dir", ".doit.db.bak"],
    "snakemake": [".snakemake"],
}


def commands(folder: str, jobs: int) -> dict[str, list[str]]:
    def peer(name: str) -> str:
        return str(Path(folder, name).resolve()) if folder else name

    recipe = str(Path(sys.executable).with_name("recipe"))
    return {
        "recipe": [recipe, "run", "./recipe.yaml", "--driver=local", f"-j{jobs}"],
        "ninja": [peer("ninja"), f"-j{jobs}"],
        "make": ["make", "-s", f"-j{jobs}"],
        "doit": [peer("doit"), "-n", str(jobs)],
        "snakemake": [peer("snakemake"), f"-j{jobs}", "--quiet", "all"],
    }


def timed(argv: list[str], cwd: Path, log: Path) -> float:
    """Seconds of wall time of one command that must succeed."""
    with log.open("ab") as out:
        begun = time.perf_counter()
        code = subprocess.run(
            argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
        ).returncode
        took = time.perf_counter() - begun
    if code:
        sys.exit(f"{argv[0]} failed with {code}; see {log}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--peers", default="ninja,make,doit,snakemake")
    parser.add_argument(
        "--bin", default=str(Path(sys.executable).parent), help="where the peers are installed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    tools = ["recipe", *given.peers.split(",")]
    how = commands(given.bin, given.jobs)
    top = Path(tempfile.mkdtemp(prefix="dag-bench-"))
    took: dict[tuple[str, str], list[float]] = {}
    for tool in tools:
        write(top / tool, given.steps)
    for n in range(given.rounds):
        for tool in tools:
            home, log = top / tool, top / f"{tool}.log"
            for name in STATE[tool]:
                shutil.rmtree(home / name) if (home / name).is_dir() else (home / name).unlink(
                    missing_ok=True
                )
            shutil.rmtree(home / "out")
            (home / "out").mkdir()
            took.setdefault((tool, "cold"), []).append(timed(how[tool], home, log))
            made = len(os.listdir(home / "out"))
            if made != given.steps:
                sys.exit(f"{tool} made {made} of {given.steps} outputs; see {log}")
            took.setdefault((tool, "no-op"), []).append(timed(how[tool], home, log))
            (home / "src/s7.txt").write_text(f"edited in round {n}\n")
            took.setdefault((tool, "edit"), []).append(timed(how[tool], home, log))
    base = tools[1]
    print(
        f"{given.steps} steps, {given.jobs} jobs, median of {given.rounds} rounds; in brackets the ratio to {base}"
    )
    for tool in tools:
        cells = []
        for what in ("cold", "no-op", "edit"):
            mine, theirs = statistics.median(took[tool, what]), statistics.median(took[base, what])
            cells.append(f"{what} {mine:8.3f} s [{mine / theirs:6.2f}]")
        print(f"{tool:10}", "   ".join(cells))
    shutil.rmtree(top)


if __name__ == "__main__":
    main()
