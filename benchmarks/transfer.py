"""Send data sets to a host through a real sshd on loopback, beside rsync, scp and tar over ssh, and print a table.

usage: transfer.py [--scale 1.0] [--rounds 1] [--shapes small,medium,large,text] [--place /dev/shm] [--cipher NAME|default] [--only NAMES]
                   [--rtt MS] [--mb MB_PER_SECOND]

Shapes: 50,000 files of 20 KB, 2,000 of 2 MB, 4 of 1 GB, and 4 of 1 GB of JSON lines; `--scale` shrinks the first two in number and the others in
size.  Each is sent cold (nothing is there), unchanged, and changed: one file of a hundred has other bytes, or, where there are few files, 1 % of
each.  Ours includes hashing here (digests of unchanged files are remembered, as a workspace does), hashing there, and making the connection, as the
others do.  `held` is ours over a connection that stands already, `down` brings all of it home again.  `--rtt` and `--mb` put a long wire between:
milliseconds of a round trip, and megabytes a second that a connection takes each way.  Seconds are wall
time, × is the time of each over ours; `cpu` are seconds of user and system time here and there; of several rounds, all are medians.  Both sides lie
on `--place`, which needs room for five times a shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from drivers.base import Host, Order, Wish
from drivers.ssh import Ssh
from runner.hosts.link.wire import Wire
from runner.hosts.transfer.download import HashedOutput
from runner.hosts.transfer.host_store import HostStore
from runner.storage.content import files
from runner.storage.content.digest_cache import DigestCache
from tests.servers.long_wire import LongWire
from tests.servers.sshd import Sshd

SHAPES = {
    "small": (50_000, 20_000),
    "medium": (2_000, 2_000_000),
    "large": (4, 1_000_000_000),
    "text": (4, 1_000_000_000),
}
FEW = ("large", "text")


def make(top: Path, shape: str, scale: float) -> Path:
    count, size = SHAPES[shape]
    count, size = (count, int(size * scale)) if shape in FEW else (max(4, int(count * scale)), size)
    rng = random.Random(shape)
    block = rng.randbytes(4 << 20) if shape != "text" else _lines(rng, 4 << 20)
    for n in range(count):
        path = top / f"d{n // 500:03}" / f"{n:06}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            left = size
            file.write(b"%016d" % n)
            left -= 16
            while left > 0:
                at = rng.randrange(len(block))
                left -= file.write(block[at : at + min(left, len(block) - at)])
    return top


def _lines(rng: random.Random, size: int) -> bytes:
    words = [rng.randbytes(rng.randrange(2, 6)).hex() for _ in range(4000)]
    text = bytearray()
    while len(text) < size:
        text += (
            json.dumps(
                {"id": rng.randrange(1 << 30), "text": " ".join(rng.choices(words, k=60))}
            ).encode()
            + b"\n"
        )
    return bytes(text[:size])


def change(top: Path) -> None:
    """Other bytes in one file of a hundred, or in one percent of each when there are few."""
    paths = sorted(path for path in top.rglob("*") if path.is_file())
    for path in paths[::100] if len(paths) >= 100 else paths:
        with path.open("r+b") as file:
            size = path.stat().st_size
            file.seek(size // 2)
            file.write(random.randbytes(size - size // 2 if len(paths) >= 100 else size // 100))


class Ours:
    """One workspace: it remembers digests and manifests from one time to the next, and which host it has; not the connection."""

    def __init__(self, sshd: Sshd, top: Path) -> None:
        self.driver = Ssh(**sshd.settings())
        self.top = top
        self.cache = DigestCache(top.parent)
        self.manifests: dict[str, Sequence[files.Entry]] = {}
        self.host = asyncio.run(self._rent())

    async def _rent(self) -> Host:
        offers = await self.driver.offers(Wish())
        lease = await self.driver.acquire(
            Order(offers[0], "benchmark", datetime.now(UTC) + timedelta(hours=1))
        )
        hosts = await self.driver.hosts(lease)
        assert hosts
        await self.driver.aclose()
        return hosts[0]

    def __call__(self) -> None:
        asyncio.run(self._send())

    def held(self) -> tuple[float, float]:
        """Seconds to send all of it to another root there, and to bring it home, over a connection that stands."""
        return asyncio.run(self._held())

    async def _send(self) -> None:
        content, manifest = self._manifest()
        host_store = await self._depot(".recipe-host")
        await host_store.prefetch_state([content])
        await host_store.send({content: str(self.top)}, {content: manifest})
        await self._close(host_store)

    async def _held(self) -> tuple[float, float]:
        content, manifest = self._manifest()
        host_store = await self._depot(".recipe-held")
        await host_store.find_existing([content])
        began = time.perf_counter()
        await host_store.send({content: str(self.top)}, {content: manifest})
        up = time.perf_counter() - began
        size = sum(entry.size for entry in manifest)
        home = self.top.parent / "home"
        began = time.perf_counter()
        await host_store.fetch(
            host_store.path(content), HashedOutput(content, tuple(manifest), size), str(home)
        )
        down = time.perf_counter() - began
        await self._close(host_store)
        shutil.rmtree(home)
        return up, down

    def _manifest(self) -> tuple[str, Sequence[files.Entry]]:
        manifest = self.cache.entries(self.top.name)
        content = files.tree_id(manifest)
        self.manifests[content] = manifest
        return content, manifest

    async def _depot(self, root: str) -> HostStore:
        host_store = HostStore(Wire(self.host, root), self.manifests.get)
        await host_store.open()
        return host_store

    async def _close(self, host_store: HostStore) -> None:
        await host_store.aclose()
        await self.host.aclose()
        await self.driver.aclose()


def peers(sshd: Sshd, top: Path, cipher: str) -> dict[str, Callable[[], None]]:
    ssh = [
        "ssh",
        "-F",
        "none",
        "-p",
        str(sshd.port),
        "-i",
        str(sshd.identity),
        "-o",
        f"UserKnownHostsFile={sshd.known_hosts}",
        "-o",
        "BatchMode=yes",
    ]
    if cipher != "default":
        ssh += ["-c", cipher]
    there, login = str(sshd.home / "theirs"), f"{sshd.user}@127.0.0.1"
    scp = ["scp", *("-P" if word == "-p" else word for word in ssh[1:]), "-q", "-r"]

    def rsync() -> None:
        subprocess.run(
            ["rsync", "-a", "-e", " ".join(ssh), f"{top}/", f"{login}:{there}/rsync/"], check=True
        )

    def copy() -> None:
        subprocess.run([*scp, f"{top}", f"{login}:{there}/scp"], check=True)

    def tar() -> None:
        with subprocess.Popen(
            ["tar", "-C", str(top), "-cf", "-", "."], stdout=subprocess.PIPE
        ) as pack:
            command = f"mkdir -p {there}/tar && tar -C {there}/tar -xf -"
            subprocess.run([*ssh, login, command], stdin=pack.stdout, check=True)

    return {"rsync -a": rsync, "scp -r": copy, "tar | ssh tar": tar}


def here() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def there(sshd: Sshd) -> float:
    """What everything below the server has used, that which has ended too."""
    told = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            told[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    found = {sshd._machine.pid if sshd._machine else 0}
    while more := {pid for pid, (parent, _) in told.items() if parent in found} - found:
        found |= more
    return sum(told[pid][1] for pid in found if pid in told) / os.sysconf("SC_CLK_TCK")


def timed(what: Callable[[], None], sshd: Sshd) -> tuple[float, float, float]:
    mine, theirs, wall = here(), there(sshd), time.perf_counter()
    what()
    wall = time.perf_counter() - wall
    return wall, here() - mine, there(sshd) - theirs


@contextmanager
def workplace(place: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="transfer-", dir=place) as folder:
        yield Path(folder)
        for below in Path(folder).rglob("*.t"):
            subprocess.run(["chmod", "-R", "u+w", str(below)], check=True)


@contextmanager
def behind(sshd: Sshd, rtt: float, rate: float) -> Iterator[None]:
    """A server at the other end of a long wire: seconds of a round trip, bytes a second.  Zeros: no wire."""
    if not rtt and not rate:
        yield
        return
    real = sshd.port
    with LongWire(real, rtt=rtt, rate=rate) as wire:
        known = Path(sshd.known_hosts)
        known.write_text(known.read_text().replace(f":{real}", f":{wire.port}"))
        sshd.port = wire.port
        try:
            yield
        finally:
            sshd.port = real


def measure(
    shape: str, options: argparse.Namespace
) -> tuple[str, int, dict[tuple[str, str], tuple[float, float, float]]]:
    """What was sent, its bytes, and for each state and way its seconds: wall, CPU here, CPU there."""
    with (
        workplace(options.place) as place,
        Sshd(place / "sshd") as sshd,
        behind(sshd, options.rtt / 1000, options.mb * 1e6),
    ):
        top = make(place / "data", shape, options.scale)
        count = sum(1 for path in top.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in top.rglob("*") if path.is_file())
        (sshd.home / "theirs").mkdir()
        ours = Ours(sshd, top)
        ways: dict[str, Callable[[], None]] = {"ours": ours}
        ways |= {
            name: way
            for name, way in peers(sshd, top, options.cipher).items()
            if any(word in name for word in options.only.split(","))
        }
        results = {}
        for state in ("cold", "unchanged", "1 % changed"):
            if state == "1 % changed":
                change(top)
            for name, way in ways.items():
                if state != "cold" and not (name == "ours" or name.startswith("rsync")):
                    continue  # these send everything, always
                results[state, name] = timed(way, sshd)
                if name.startswith(("scp", "tar")):
                    subprocess.run(
                        ["rm", "-rf", str(sshd.home / "theirs" / name.split()[0])], check=True
                    )
            if state == "cold":
                up, down = ours.held()
                results["held", "ours"], results["down", "ours"] = (up, 0.0, 0.0), (down, 0.0, 0.0)
        return f"{shape:7} {count:6} files {size / 1e6:6.0f} MB", size, results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shapes", default="small,medium,large")
    parser.add_argument("--place", default="/dev/shm")
    parser.add_argument("--cipher", default="aes128-gcm@openssh.com")
    parser.add_argument(
        "--only",
        default="",
        help="of the others, only those with one of these in their name: rsync,tar",
    )
    parser.add_argument("--rtt", type=float, default=0.0, help="milliseconds of a round trip")
    parser.add_argument(
        "--mb",
        type=float,
        default=0.0,
        help="megabytes a second, for each connection and direction; 0: as many as go through",
    )
    options = parser.parse_args()
    print(
        f"cipher of the others: {options.cipher}; on {options.place}; × is the time of each over ours"
    )
    for shape in options.shapes.split(","):
        rounds = [measure(shape, options) for _ in range(options.rounds)]
        medians = {
            key: [
                median(times)
                for times in zip(*(results[key] for *_, results in rounds), strict=True)
            ]
            for key in rounds[0][2]
        }
        for (state, name), (wall, mine, theirs) in medians.items():
            ratio, speed = wall / medians[state, "ours"][0], rounds[0][1] / 1e6 / wall
            cpu = f"cpu here {mine:6.2f} s, there {theirs:6.2f} s" if mine else ""
            print(
                f"{rounds[0][0]}  {state:12} {name:14} {wall:7.2f} s {ratio:5.2f}×  {speed:7.1f} MB/s  {cpu}",
                flush=True,
            )


if __name__ == "__main__":
    main()
