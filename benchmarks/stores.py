"""Put results into a bucket and have them again: this program, s3fs, boto3 and restic against one server in one run.  Knows speed, not correctness.

    python benchmarks/stores.py [--scale 0.1]

The server is moto, on loopback, in a process of its own: a slow one, so what counts is how many requests are made of it, and our own processor
seconds (user and system, the server's left out).  `again` is the same once more, unchanged; `1 %` after one file in a hundred has changed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from runner.settings import StoreSettings
from runner.storage.buckets import opening as buckets
from runner.storage.content.objects import Objects
from runner.storage.remote.remote import Remote
from tests.servers.moto import Moto


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of 5,000 files of 20 kB, and of one of 256 MB"
    )
    scale = parser.parse_args().scale
    place = Path(tempfile.mkdtemp(prefix="recipe-stores-"))
    try:
        with Moto() as server:
            os.environ.update(server.environ)
            print(
                f"{'what':<22}{'who':<10}{'put':>16}{'again':>16}{'1 %':>16}{'get':>16}   seconds of wall (of processor)"
            )
            for name, count, size in (
                ("small files", int(5000 * scale), 20_000),
                ("one large file", 1, int((256 << 20) * scale)),
            ):
                data = made(place / name.replace(" ", "-"), count, size)
                for who, peer in PEERS.items():
                    print(f"{name:<22}{who:<10}{peer(server, data, place / 'work')}", flush=True)
                    shutil.rmtree(place / "work", ignore_errors=True)
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(place)], check=False)
        shutil.rmtree(place)


def made(top: Path, count: int, size: int) -> Path:
    chance = random.Random(1)
    for n in range(count):
        folder = top / f"{n % 50}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}").write_bytes(chance.randbytes(size))
    return top


def changed(top: Path, work: Path) -> Path:
    """The same with every hundredth file another."""
    copy = work / "changed"
    shutil.copytree(top, copy)
    for n, path in enumerate(sorted(path for path in copy.rglob("*") if path.is_file())):
        if n % 100 == 0:
            with path.open("r+b") as file:
                file.write(b"changed")
    return copy


def timed(do: Callable[[], object]) -> str:
    def spent() -> float:
        return sum(
            sum(resource.getrusage(who)[:2])
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )

    wall, cpu = time.monotonic(), spent()
    do()
    return f"{time.monotonic() - wall:8.2f} ({spent() - cpu:5.2f})"


def ours(server: Moto, data: Path, work: Path) -> str:
    for name in ("here", "there"):
        for folder in ("objects", "partial"):
            (work / name / folder).mkdir(parents=True)
    here, there = Objects(work / "here"), Objects(work / "there")
    url = f"s3://{server.bucket()}/p"

    def remote() -> Remote:
        return Remote(buckets.open(StoreSettings("", url, endpoint=server.endpoint), work))

    shutil.copytree(data, work / "copy")
    content, other = here.take(work / "copy"), here.take(changed(data, work))
    told = [
        timed(lambda: remote().put(content, here)),
        timed(lambda: remote().put(content, here)),
        timed(lambda: remote().put(other, here)),
    ]
    return "".join([*told, timed(lambda: remote().fetch(content, there))])


def s3fs_(server: Moto, data: Path, work: Path) -> str:
    import s3fs

    fs = s3fs.S3FileSystem(
        endpoint_url=server.endpoint,
        skip_instance_cache=True,
        config_kwargs={"max_pool_connections": 32},
    )
    base, work_get = f"{server.bucket()}/p", str(work / "got")
    work.mkdir(parents=True)
    other = changed(data, work)
    put = timed(lambda: fs.put(str(data), base, recursive=True))
    again = timed(lambda: fs.put(str(data), base, recursive=True))
    return (
        put
        + again
        + timed(lambda: fs.put(str(other), base, recursive=True))
        + timed(lambda: fs.get(base, work_get, recursive=True))
    )


def boto(server: Moto, data: Path, work: Path) -> str:
    """As programs do: a pool of 16 threads."""
    from concurrent.futures import ThreadPoolExecutor

    bucket = server.bucket()
    work.mkdir(parents=True)

    def put(top: Path) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(
                pool.map(
                    lambda p: server.s3.upload_file(str(p), bucket, str(p.relative_to(top))),
                    [p for p in top.rglob("*") if p.is_file()],
                )
            )

    def get() -> None:
        names = [str(p.relative_to(data)) for p in data.rglob("*") if p.is_file()]
        for name in names:
            (work / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(16) as pool:
            list(
                pool.map(
                    lambda name: server.s3.download_file(bucket, name, str(work / "got" / name)),
                    names,
                )
            )

    other = changed(data, work)
    return (
        timed(lambda: put(data)) + timed(lambda: put(data)) + timed(lambda: put(other)) + timed(get)
    )


def restic(server: Moto, data: Path, work: Path) -> str:
    if shutil.which("restic") is None:
        return "   is not installed"
    work.mkdir(parents=True)
    other = changed(data, work)
    environ = {
        **os.environ,
        "RESTIC_PASSWORD": "x",
        "RESTIC_CACHE_DIR": str(work / "cache"),
        "RESTIC_REPOSITORY": f"s3:{server.endpoint}/{server.bucket()}/p",
    }

    def do(*words: str) -> None:
        subprocess.run(["restic", "-q", *words], env=environ, check=True, capture_output=True)

    do("init")
    told = [timed(partial(do, "backup", str(top))) for top in (data, data, other)]
    return "".join(told) + timed(lambda: do("restore", "latest", "--target", str(work / "got")))


PEERS = {"recipe": ours, "s3fs": s3fs_, "boto3": boto, "restic": restic}

if __name__ == "__main__":
    main()
