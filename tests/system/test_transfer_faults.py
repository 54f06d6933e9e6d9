"""Whatever breaks on the way, what gets its name is right, and little is sent twice.  Numbers are small; RECIPE_TRANSFER_FAULTS=1000 makes them large.

Connections are cut, and bytes lost or flipped, at the level of `Host.call`: nothing that is flipped below it gets past the checksums of SSH.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from drivers.base import NOTHING, Argv, Order, Unreachable, Wish
from drivers.local import LocalHost
from drivers.ssh import Ssh
from runner.agent.frames import FrameParser
from runner.hosts.link import wire
from runner.hosts.link.wire import Wire
from runner.hosts.transfer import manifests
from runner.hosts.transfer.download import HashedOutput
from runner.hosts.transfer.host_store import HostStore
from runner.storage.content import files
from tests.servers.proxy import Fault, Proxy
from tests.servers.sshd import Sshd

FAULTS = int(os.environ.get("RECIPE_TRANSFER_FAULTS", "8"))
CHUNK = 128 << 10
PIPE = 640 << 10
"""Bytes that are on their way, in pipes and in what reads them, when a connection breaks: sent, but nowhere."""


class Weather:
    """`call` of another host, to which something happens when so many bytes went `into` or `out` of it."""

    def __init__(self, host: LocalHost, fault: str = "", way: str = "into", at: int = -1) -> None:
        self.host, self.fault, self.way, self.at = host, fault, way, at
        self.python = host.python
        self.passed = {"into": 0, "out": 0}
        self.data = 0  # bytes of files sent
        self.struck = False

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        cut = False

        async def changed(way: str, blocks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
            nonlocal cut
            frames = FrameParser()
            async for block in blocks:
                size = _sent(frames, block) if way == "into" else 0
                begun = self.passed[way]
                self.passed[way] += len(block)
                if not self.struck and self.way == way and begun <= self.at < self.passed[way]:
                    self.struck = True
                    n = self.at - begun
                    if self.fault == "flip":
                        block = block[:n] + bytes((block[n] ^ 1 << self.at % 8,)) + block[n + 1 :]
                    else:
                        cut = self.fault in ("cut", "kill")
                        self.data += min(n, size)
                        yield block[:n]
                        return
                self.data += size
                yield block

        inner = cast("AsyncGenerator[bytes, None]", self.host.call(argv, changed("into", stdin)))
        async with (
            aclosing(inner),
            aclosing(cast("AsyncGenerator[bytes, None]", changed("out", inner))) as outer,
        ):
            async for block in outer:
                if cut and self.fault == "kill":
                    break
                yield block
        if cut:
            raise Unreachable("the connection broke")


@pytest.fixture(autouse=True, params=["near", "far"])
def distance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the host is taken to be: on a long way many streams carry pieces."""
    monkeypatch.setattr(wire, "NEAR", float("inf") if request.param == "near" else 0.0)
    monkeypatch.setattr(wire, "LANE", CHUNK)


def _sent(frames: FrameParser, block: bytes) -> int:
    """Bytes of files in what is sent."""
    if block[:2] == b"PK":  # the agent itself
        return 0
    return sum(len(payload) - 1 for payload in frames.feed(block) if payload[:1] == b"d")


def dataset(top: Path) -> Path:
    """Many small files, and one of several chunks."""
    rng = random.Random(7)
    for n in range(40):
        path = top / f"d{n % 3}" / f"file {n}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.randrange(1, 16_000)))
    (top / "link").symlink_to("d1/file 1")
    (top / "empty").mkdir()
    (top / "large").write_bytes(rng.randbytes(5 * CHUNK + 1000))
    (top / "large").chmod(0o755)
    return top


async def send(place: Path, weather: Weather, sources: dict[str, str]) -> None:
    host_store = HostStore(Wire(cast(Any, weather), str(place)))
    host_store.wire.chunk = CHUNK
    await host_store.open()
    await host_store.send(sources)
    for content in sources:
        assert files.scan(host_store.path(content)) == content, (
            f"{weather.fault} {weather.way} at {weather.at}: a bad object was accepted"
        )
    assert await host_store.find_existing(sources) == set(sources)
    await host_store.aclose()


@pytest.mark.longer
@pytest.mark.parametrize("way", ["into", "out"])
@pytest.mark.parametrize("fault", ["cut", "kill", "flip", "lose"])
def test_no_fault_on_the_way_there_is_accepted_and_little_is_sent_twice(
    fault: str, way: str, tmp_path: Path
) -> None:
    """`cut` ends the bytes and then the connection, `kill` the program there too, `lose` drops the rest of a stream without a word."""
    top = dataset(tmp_path / "data")
    one = tmp_path / "one"
    one.write_bytes(random.Random(8).randbytes(3 * CHUNK))
    sources = {files.scan(path): str(path) for path in (top, one)}

    async def sweep() -> None:
        host = LocalHost(tmp_path / "supervisor")
        calm = Weather(host)
        await send(tmp_path / "calm", calm, sources)
        rng = random.Random(f"{fault} {way}")
        for n in range(max(1, FAULTS // 8)):
            weather = Weather(host, fault, way, rng.randrange(calm.passed[way]))
            place = tmp_path / f"there{n}"
            await send(place, weather, sources)
            again = weather.data - calm.data
            assert (
                weather.struck or weather.at >= weather.passed[weather.way]
            )  # answers are not always equally long
            assert again <= CHUNK + PIPE, (
                f"{fault} {way} at {weather.at}: {again} bytes were sent twice"
            )
            hosted = place / "objects"
            assert sorted(
                path.name for path in hosted.glob("*/*") if not path.name.endswith(".json")
            ) == sorted(map(manifests.object_name, sources))
            below = [path for path in hosted.rglob("*") if not path.is_symlink()]
            assert not [
                path for path in below if path.stat().st_mode & 0o222 and len(path.name) != 2
            ]
            for path in below:
                if path.is_dir():
                    path.chmod(0o755)
            shutil.rmtree(place)

    asyncio.run(sweep())


@pytest.mark.longer
@pytest.mark.parametrize("fault", ["cut", "kill", "flip", "lose"])
def test_no_fault_on_the_way_home_is_accepted_and_little_is_fetched_twice(
    fault: str, tmp_path: Path
) -> None:
    top = dataset(tmp_path / "data")
    content, manifest = files.scan(top), tuple(files.entries(top))
    taken = HashedOutput(
        content, manifest, sum(entry.size for entry in manifest if entry.kind in "fx")
    )

    async def fetch(weather: Weather, target: Path) -> None:
        host_store = HostStore(Wire(cast(Any, weather), str(tmp_path / "there")))
        host_store.wire.chunk = CHUNK
        await host_store.fetch(str(top), taken, str(target))
        assert files.scan(target) == content, f"{fault} at {weather.at}: bad bytes were accepted"
        shutil.rmtree(target)
        await host_store.aclose()

    async def sweep() -> None:
        host = LocalHost(tmp_path / "supervisor")
        calm = Weather(host)
        opened = HostStore(Wire(cast(Any, calm), str(tmp_path / "there")))
        await opened.open()
        await opened.aclose()
        calm.passed["out"] = 0
        await fetch(calm, tmp_path / "home")
        rng = random.Random(fault)
        for _ in range(max(1, FAULTS // 4)):
            weather = Weather(host, fault, "out", rng.randrange(calm.passed["out"]))
            await fetch(weather, tmp_path / "home")
            again = weather.passed["out"] - calm.passed["out"]
            assert (
                weather.struck or weather.at >= weather.passed[weather.way]
            )  # answers are not always equally long
            assert again <= CHUNK + PIPE, (
                f"{fault} at {weather.at}: {again} bytes were fetched twice"
            )
        await host.aclose()

    asyncio.run(sweep())


@pytest.mark.longer
def test_a_connection_that_breaks_again_and_again_delivers_in_the_end(tmp_path: Path) -> None:
    """Through a real server, and a proxy that cuts each connection after so many bytes; with more faults, at as many places."""
    top = dataset(tmp_path / "data")
    content, manifest = files.scan(top), tuple(files.entries(top))
    rng = random.Random(3)

    async def travel(settings: dict[str, Any]) -> None:
        driver = Ssh(**settings)
        lease = await driver.acquire(
            Order((await driver.offers(Wish()))[0], "key", datetime.now(UTC) + timedelta(hours=1))
        )
        host = (await driver.hosts(lease) or [])[0]
        host_store = HostStore(Wire(host, ".recipe-host"))
        host_store.wire.chunk = CHUNK
        await host_store.open()
        await host_store.send({content: str(top)})
        assert files.scan(host_store.path(content)) == content
        await host_store.fetch(
            host_store.path(content), HashedOutput(content, manifest, 0), str(tmp_path / "home")
        )
        assert files.scan(tmp_path / "home") == content
        await host_store.aclose()
        await host.aclose()
        await driver.aclose()

    with Sshd(tmp_path / "sshd") as sshd, Proxy(sshd.port, record=0) as proxy:
        kind, key = sshd.host_key.split()
        sshd.known_hosts.write_text(f"[127.0.0.1]:{proxy.port} {kind} {key}\n")
        for _ in range(max(3, FAULTS // 8)):
            proxy.next(
                Fault("cut", at=rng.randrange(20_000, 700_000), way=rng.choice(("up", "down")))
            )
        asyncio.run(travel(sshd.settings(hosts=[f"{sshd.user}@127.0.0.1:{proxy.port}"])))
        assert len(proxy.connections) > 2
