"""A host over SSH, through a real sshd on this machine: what a step that does nothing costs, how fast bytes and logs travel, against plain ssh.

    python benchmarks/remote.py [--jobs 100] [--steps 40] [--mb 500] [--log-mb 1000]

Needs OpenSSH's server and client, and nothing else running.  Peers and ours take turns in one run.  CPU is seconds of user and system time of this
side alone; the other side, sshd and what it runs, shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import asyncssh

from drivers.base import Command
from runner.hosts.link.client import Client
from tests.servers.logins import hosted
from tests.servers.sshd import Sshd

LONG = timedelta(seconds=60)
MB = 1_000_000
BLOCK = os.urandom(1 << 20)


def cpu() -> float:
    """Seconds of this process and of its children that ended."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


async def timed(doing: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    wall, used = time.perf_counter(), cpu()
    await doing()
    return time.perf_counter() - wall, cpu() - used


async def spawned(*argv: str, feed: int = 0) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None

    async def fill() -> None:
        assert process.stdin is not None
        for _ in range(feed * MB // len(BLOCK)):
            process.stdin.write(BLOCK)
            await process.stdin.drain()
        process.stdin.close()

    filling = asyncio.ensure_future(fill())
    while await process.stdout.read(1 << 20):
        pass
    await filling
    await process.wait()


async def blocks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size * MB // len(BLOCK)):
        yield BLOCK


async def drained(stream: AsyncIterator[bytes]) -> int:
    size = 0
    async for data in stream:
        size += len(data)
    return size


def row(what: str, times: list[tuple[float, float]], unit: float, of: str) -> None:
    walls, cpus = sorted(wall for wall, _ in times), sorted(used for _, used in times)
    at = [walls[min(len(walls) - 1, int(len(walls) * share))] for share in (0.5, 0.95)]
    if unit:
        print(
            f"| {what} | {unit / walls[0]:.0f} {of} | {unit / at[0]:.0f} {of} | {cpus[len(cpus) // 2] / unit * 1000:.2f} s/GB |"
        )
    else:
        print(
            f"| {what} | {at[0] * 1000:.1f} ms | {at[1] * 1000:.1f} ms | {sum(cpus) / len(cpus) * 1000:.1f} ms |"
        )


async def nothing(
    host: Client,
    connection: asyncssh.SSHClientConnection,
    ssh: list[str],
    master: list[str],
    jobs: int,
) -> None:
    number = iter(range(10**9))
    step = Command(("true",), cwd="/", env={"PATH": os.environ["PATH"]})

    async def ours() -> None:
        job = await host.start(step, f"nothing{next(number)}")
        assert await host.wait(job, LONG) is not None
        assert await host.log(job, 0) == b""

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "**recipe: start, wait, log of `true`**": ours,
        "recipe: call of `true`": lambda: drained(host.call(("true",))),
        "asyncssh: run of `true`": lambda: connection.run("true"),
        "ssh with ControlMaster: `true`": lambda: spawned(*master, "true"),
        "ssh: `true`": lambda: spawned(*ssh, "true"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(jobs + 1):
        for name, way in ways.items():
            if turn % 10 == 0 or not name.startswith("ssh"):
                took = await timed(way)
                if turn:
                    times[name].append(took)
    print("\n| a command that does nothing | p50 | p95 | CPU here |\n|---|---|---|---|")
    for name, took in times.items():
        row(name, took, 0, "")


def chain(sshd: Sshd, place: Path, steps: int) -> None:
    """`recipe run` of a chain of steps that do nothing, there and here: from the start of one step to the start of the next."""
    lines = ["recipe: chain@1", "summary: Steps that do nothing", "steps:"]
    lines += [
        f"  s{number}: {{run: 'true'" + (f", needs: [s{number - 1}]" if number else "") + "}"
        for number in range(steps)
    ]
    settings = {
        "known_hosts": str(sshd.known_hosts),
        "identity": str(sshd.identity),
        "python": sys.executable,
    }
    toml = [
        f'[drivers.ssh]\nhosts = ["{sshd.address}"]\nagent = false',
        *(f'{name} = "{value}"' for name, value in settings.items()),
    ]
    code = "import sys; from runner.interface.cli.main import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    print(
        f"\n| a step of a chain of {steps} that do nothing | p50 | p95 | CPU here |\n|---|---|---|---|"
    )
    for what, driver in (("**recipe run --driver ssh**", ["--driver", "ssh"]), ("recipe run", [])):
        space = place / f"chain-{len(driver)}"
        space.mkdir()
        (space / "recipe.yaml").write_text("\n".join(lines) + "\n")
        (space / "recipe.toml").write_text("\n".join(toml) + "\n")
        used = cpu()
        subprocess.run(
            [sys.executable, "-c", code, "run", *driver],
            cwd=space,
            env=env,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        used = cpu() - used
        with contextlib.closing(sqlite3.connect(space / ".recipe" / "recipe.db")) as told:
            starts = [at for (at,) in told.execute("SELECT started FROM attempts ORDER BY started")]
        assert len(starts) == steps
        between = [later - earlier for earlier, later in itertools.pairwise(starts)]
        row(what, [(wall, used / steps) for wall in between], 0, "")


async def bulk(
    host: Client, connection: asyncssh.SSHClientConnection, ssh: list[str], size: int
) -> None:
    async def plain() -> None:
        async with connection.create_process("cat > /dev/null", encoding=None) as process:
            async for data in blocks(size):
                process.stdin.write(data)
                await process.stdin.drain()
            process.stdin.write_eof()
            await process.wait()

    zero = f"head -c {size * MB} /dev/zero"
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "**recipe: up**": lambda: drained(host.call(("sh", "-c", "cat > /dev/null"), blocks(size))),
        "asyncssh, write and drain: up": plain,
        "ssh `cat`: up": lambda: spawned(*ssh, "cat > /dev/null", feed=size),
        "**recipe: down**": lambda: drained(host.call(("sh", "-c", zero))),
        "ssh `cat`: down": lambda: spawned(*ssh, zero),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            times[name].append(await timed(way))
    print(f"\n| {size} MB, AES-128-GCM | best | median | CPU here |\n|---|---|---|---|")
    for name, took in times.items():
        row(name, took, size, "MB/s")


async def logs(host: Client, place: Path, size: int) -> None:
    job = await host.start(
        Command(
            ("/bin/sh", "-c", f"yes a line of a log | head -c {size * MB}"),
            cwd=str(place),
            env={"PATH": os.environ["PATH"]},
        ),
        "log",
    )
    assert await host.wait(job, LONG) is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read, began = 0, time.perf_counter()
    while data := await host.log(job, read):
        read += len(data)
    wall = time.perf_counter() - began
    assert read == size * MB
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"\n{size} MB of log read in {wall:.1f} s: **{size / wall:.0f} MB/s**, memory grown by {grown:.0f} MiB"
    )


async def main(jobs: int, steps: int, size: int, log_size: int) -> None:
    with tempfile.TemporaryDirectory() as place, Sshd(Path(place) / "sshd") as sshd:
        known = [
            "-F",
            "none",
            "-i",
            str(sshd.identity),
            "-p",
            str(sshd.port),
            "-o",
            f"UserKnownHostsFile={sshd.known_hosts}",
            "-o",
            "LogLevel=ERROR",
        ]
        ssh = ["ssh", *known, "-c", "aes128-gcm@openssh.com", f"{sshd.user}@127.0.0.1"]
        master = [
            *ssh[:-1],
            "-o",
            "ControlMaster=auto",
            "-o",
            "ControlPersist=30",
            "-o",
            f"ControlPath={place}/control",
            ssh[-1],
        ]
        ciphers = ["aes128-gcm@openssh.com"]
        async with (
            hosted(sshd.settings(root=f"{place}/root")) as host,
            asyncssh.connect(
                "127.0.0.1",
                sshd.port,
                username=sshd.user,
                known_hosts=str(sshd.known_hosts),
                client_keys=[str(sshd.identity)],
                config=None,
                encryption_algs=ciphers,
            ) as connection,
        ):
            await nothing(host, connection, ssh, master, jobs)
            await asyncio.to_thread(chain, sshd, Path(place), steps)
            await bulk(host, connection, ssh, size)
            await logs(host, Path(place), log_size)
        await spawned(*master[:-1], "-O", "exit", master[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--log-mb", type=int, default=1000)
    given = parser.parse_args()
    asyncio.run(main(given.jobs, given.steps, given.mb, given.log_mb))
