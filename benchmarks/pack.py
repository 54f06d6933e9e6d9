"""Name a dataset by its content with `recipe pack` and its peers, side by side, and print times and ratios.

usage: pack.py [--files 50000] [--size 20000] [--large 1000000000] [--bin PEERS/bin] [--rounds 3] [--at DIR] [--walk]

Shapes: many small files, and one large file.  For each tool: cold (it knows nothing), unchanged (the same again).  Rounds interleave the tools; a
figure is the median of wall time of whole processes, with user + system seconds in brackets, the ratio that of the medians to GNU tar's.  What each
does: `recipe pack` names the dataset and its shards and keeps digests; `recipe pack --out` writes the shards too, twice to the same folder; GNU tar
writes a tar into `sha256sum` each time; `dvc add` copies into its cache, unchanged is `dvc status`; `restic backup` stores into a new repository.
A peer that is missing is said so and left out.  With `--walk`: an unchanged tree beside a loop of scandir and stat.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

RECIPE = str(Path(sys.executable).with_name("recipe"))
ENVIRONMENT = {
    **{
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    },  # as installed: compiled once
    "RESTIC_PASSWORD": "benchmark",
    "DVC_NO_ANALYTICS": "1",
    "CORE_ANALYTICS": "false",
    "LC_ALL": "C.UTF-8",
}


def fill(folder: Path, files: int, size: int) -> None:
    """Random bytes, a thousand files in a directory."""
    data = Random(files).randbytes(min(size, 64 << 20) + files)
    for n in range(files):
        if n % 1000 == 0:
            (folder / f"{n // 1000:03}").mkdir(parents=True)
        with (folder / f"{n // 1000:03}/{n:06}.bin").open("wb") as file:
            left = size
            while left:
                left -= file.write(data[n : n + min(left, 64 << 20)])


def peers(folder: str, work: Path) -> dict[str, tuple[Callable[[], None], list[str], list[str]]]:
    """What makes a tool forget, its cold command, and its unchanged one."""

    def peer(name: str) -> str:
        return shutil.which(name, path=f"{folder}:{os.environ['PATH']}") or ""

    def forget(*names: str) -> Callable[[], None]:
        def forgotten() -> None:
            for name in names:
                path = work / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

        return forgotten

    def dvc() -> None:
        forget(".dvc", "data.dvc", ".dvcignore", ".gitignore")()
        quietly([peer("dvc"), "init", "--no-scm", "-q"], work)

    def restic() -> None:
        forget("repository")()
        quietly([peer("restic"), "init", "-q", "-r", "repository"], work)

    tar = ["sh", "-c", "tar --sort=name -cf - data | sha256sum"]
    backup = [peer("restic"), "backup", "-q", "-r", "repository", "data"]
    found = {
        "recipe pack": (
            forget(".recipe"),
            [RECIPE, "pack", "data", "-q"],
            [RECIPE, "pack", "data", "-q"],
        ),
        "recipe pack --out": (
            forget(".recipe", "packed"),
            [RECIPE, "pack", "data", "-q", "--out", "packed"],
            [RECIPE, "pack", "data", "-q", "--out", "packed"],
        ),
        "GNU tar | sha256sum": (lambda: None, tar, tar),
        "dvc add, dvc status": (
            dvc,
            [peer("dvc"), "add", "-q", "data"],
            [peer("dvc"), "status", "-q"],
        ),
        "restic backup": (restic, backup, backup),
    }
    for name, (_, argv, _) in list(found.items()):
        if not argv[0]:
            print(f"{name}: not here, left out")
            del found[name]
    return found


def quietly(argv: list[str], cwd: Path) -> None:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed with {done.returncode}: {done.stderr.decode()[-500:]}")


def timed(argv: list[str], cwd: Path) -> tuple[float, float]:
    """Wall time, and user + system time, of one command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    quietly(argv, cwd)
    took = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def walked(top: str) -> int:
    count = 0
    with os.scandir(top) as listing:
        for item in listing:
            if item.is_dir(follow_symlinks=False):
                count += walked(item.path)
            else:
                item.stat(follow_symlinks=False)
                count += 1
    return count


def beside_a_walk(work: Path, rounds: int) -> None:
    """How an unchanged tree compares with the least that could be done."""
    from runner.storage.content.digest_cache import DigestCache

    cache = DigestCache(work, (), work / "listings")
    cache.content_of("data")
    cache.changes()
    walks, looks, loads = [], [], []
    for _ in range(rounds):
        for times, what in (
            (walks, lambda: walked(str(work / "data"))),
            (looks, lambda: cache.content_of("data")),
        ):
            begun = time.process_time()
            what()
            times.append(time.process_time() - begun)
        begun = time.process_time()
        DigestCache(work, (), work / "listings").content_of("data")
        loads.append(time.process_time() - begun)
    walk, look, load = (statistics.median(times) for times in (walks, looks, loads))
    print(
        f"CPU seconds: scandir + stat {walk:.3f}; an unchanged tree {look:.3f} ({look / walk:.2f}), listing read {load:.3f} ({load / walk:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=20_000)
    parser.add_argument("--large", type=int, default=1_000_000_000)
    parser.add_argument(
        "--bin", default=str(Path(sys.executable).parent), help="where dvc and restic are installed"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", help="a folder on the disk to measure on")
    parser.add_argument("--walk", action="store_true")
    given = parser.parse_args()
    for shape, files, size in (
        (f"{given.files:,} x {given.size:,} B", given.files, given.size),
        (f"1 x {given.large:,} B", 1, given.large),
    ):
        work = Path(tempfile.mkdtemp(prefix="pack-bench-", dir=given.at))
        try:
            fill(work / "data", files, size)
            os.sync()  # what is still to be written would be paid for by the first one
            quietly(["sh", "-c", "tar -cf - data | wc -c"], work)
            print(f"\n{shape}")
            if given.walk and files > 1:
                beside_a_walk(work, given.rounds)
            took: dict[tuple[str, str], list[tuple[float, float]]] = {}
            tools = peers(given.bin, work)
            for _ in range(given.rounds):
                for name, (forget, cold, unchanged) in tools.items():
                    forget()
                    took.setdefault((name, "cold"), []).append(timed(cold, work))
                    took.setdefault((name, "unchanged"), []).append(timed(unchanged, work))
            print(f"{'':22}" + "".join(f"{what:>30}" for what in ("cold", "unchanged")))
            for name in tools:
                cells = []
                for what in ("cold", "unchanged"):
                    wall, cpu = (
                        statistics.median(column) for column in zip(*took[name, what], strict=True)
                    )
                    base = statistics.median(wall for wall, _ in took["GNU tar | sha256sum", what])
                    cells.append(f"{f'{wall:.2f} s ({cpu:.2f} cpu)  {wall / base:.2f}':>30}")
                print(f"{name:22}" + "".join(cells))
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
