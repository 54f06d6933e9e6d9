"""A state between real hosts: over their shells, verified, whole or not at all, and small disks do not stop a training."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from drivers.base import NOTHING, Argv, HostLost, Order, Wish
from drivers.local import LocalHost
from drivers.loopback import Loopback
from runner.hosts.link.wire import Wire
from runner.hosts.place.checkpoint_sync import CheckpointSync, DirectoryListing, HostCheckpoints
from runner.hosts.place.host_task import StateFolder, SyncRound
from runner.hosts.transfer.host_store import HostStore
from tests.system.test_keeper import Training, steps
from tests.tools import needs

PATTERN = "step-*"
ROUNDS = int(os.environ.get("RECIPE_KEEPER_ROUNDS", "12"))


class Journey:
    """One training and the hosts that it runs on."""

    def __init__(self, root: Path, *, keep: int = 2) -> None:
        self.driver = Loopback(root / "machines", hosts=2)
        self.here, self.keep = root / "home" / "1" / "ckpt", keep
        self.told: list[SyncRound] = []

    async def arrive(self, number: int) -> tuple[CheckpointSync, Training]:
        """A keeper for an attempt on a host, and the folder that its trainer writes into."""
        offer = (await self.driver.offers(Wish()))[0]
        lease = await self.driver.acquire(
            Order(offer, f"lease-{number}", datetime.now(UTC) + timedelta(days=1))
        )
        hosts = await self.driver.hosts(lease)
        assert hosts is not None
        host_store = HostStore(Wire(hosts[0], ".recipe-host"))
        await host_store.open()
        kept = StateFolder(
            "ckpt", "ckpt", self.here, "states/0123456789abcdef/ckpt", PATTERN, None, self.keep
        )
        return CheckpointSync(
            HostCheckpoints(host_store), [kept], self.told.append, pause=nothing
        ), Training(Path(host_store.root, kept.host_path))


def deeper(checkpoint: Path) -> None:
    (checkpoint / "deeper").mkdir()
    (checkpoint / "deeper" / "names of their own\t").write_text("x")


async def nothing(_seconds: float) -> None:
    return


def test_a_training_moves_from_one_host_to_the_next_with_all_its_bytes(tmp_path: Path) -> None:
    async def story() -> None:
        journey = Journey(tmp_path)
        keeper, trainer = await journey.arrive(1)
        assert (await keeper.restore())["ckpt"].name is None
        for step in (1, 2, 3):
            trainer.save(step, size=100_000)
        deeper(trainer.folder / "step-3")
        (trainer.folder / "step-3" / "optimizer.json").chmod(0o755)
        (trainer.folder / "log").write_text("of the trainer")
        await keeper.sync()
        assert journey.told[-1].problem == "" and sorted(journey.told[-1].copied) == [
            "step-2",
            "step-3",
        ]
        assert steps(trainer.folder) == steps(journey.here) == [2, 3]
        await keeper.sync()
        assert journey.told[-1].copied == []
        await keeper.finish()
        assert journey.told[-1].copied == ["log"]
        saved = {
            path: path.read_bytes() for path in sorted(journey.here.rglob("*")) if path.is_file()
        }

        keeper, other = await journey.arrive(2)
        found = (await keeper.restore())["ckpt"]
        assert (found.name, found.step) == ("step-3", 3) and steps(other.folder) == [3]
        for path, data in saved.items():
            copy = other.folder / path.relative_to(journey.here)
            assert "step-2" in str(path) or (
                copy.read_bytes() == data and stat.S_IMODE(copy.stat().st_mode) & 0o200
            )
        assert (other.folder / "step-3" / "optimizer.json").stat().st_mode & 0o100
        # It is the trainer's own: to write over, to delete, shared with nothing that is kept for others.
        assert all(path.stat().st_nlink == 1 for path in other.folder.rglob("*") if path.is_file())
        (other.folder / "step-3" / "optimizer.json").write_text('{"more": 1}')
        deeper(other.save(4, size=100_000))
        await keeper.sync()
        assert sorted(journey.told[-1].copied) == ["step-3", "step-4"]
        assert (journey.here / "step-3" / "optimizer.json").read_text() == '{"more": 1}'
        shutil.rmtree(other.folder / "step-3")
        # Back where it was: only what is not there any more travels.
        await keeper.finish()
        keeper, first = await journey.arrive(1)
        assert (await keeper.restore())["ckpt"].name == "step-4"
        assert steps(first.folder) == [2, 3, 4]
        asked = journey.told[-1].size
        await keeper.restore()
        assert asked > 100_000 and journey.told[-1].size == 0

    asyncio.run(story())


SAVES = """
import hashlib, itertools, json, os, pathlib, pickle, shutil, sys
folder = pathlib.Path(sys.argv[1])
for step in itertools.count(1):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    body = hashlib.sha256(str(step).encode()).digest() * 8000
    head = json.dumps({"w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}}).encode()
    whole = len(head).to_bytes(8, "little") + head + body
    rest = {"optimizer.bin": pickle.dumps(body[:40000]), "random_states_0.pkl": pickle.dumps(step)}
    for name, data in {"model.safetensors": whole, **rest}.items():
        with open(path / name, "wb", 0) as file:
            for at in range(0, len(data), 20000):
                if not sys.stdin.buffer.read(1):
                    sys.exit()
                file.write(data[at : at + 20000])
    if step > 2:
        shutil.rmtree(folder / f"checkpoint-{step - 2}")
"""
"""Writes a piece for every byte that it reads, fifteen to a checkpoint."""


class Paced(HostCheckpoints):
    """While anything is asked of that host, its trainer goes on writing and deleting."""

    def __init__(self, host_store: HostStore, trainer: asyncio.subprocess.Process) -> None:
        super().__init__(host_store)
        self.trainer, self.random = trainer, random.Random(0)

    def go(self) -> None:
        assert self.trainer.stdin is not None
        self.trainer.stdin.write(b"." * self.random.randrange(8))

    async def list_files(self, path: str) -> DirectoryListing:
        self.go()
        found = await super().list_files(path)
        self.go()
        return found

    async def download(self, path: str, target: Path) -> int:
        self.go()
        return await super().download(path, target)


@pytest.mark.longer
def test_a_trainer_that_saves_and_deletes_all_the_time_gives_only_whole_checkpoints(
    tmp_path: Path,
) -> None:
    def right(path: Path) -> bool:
        body = hashlib.sha256(path.name.rpartition("-")[2].encode()).digest() * 8000
        there = (path / "random_states_0.pkl").exists() and (
            path / "random_states_0.pkl"
        ).stat().st_size > 0
        return there and (path / "model.safetensors").read_bytes().endswith(body)

    async def story() -> None:
        host = LocalHost(tmp_path / "supervisor")
        host_store = HostStore(Wire(host, str(tmp_path / "ours")))
        await host_store.open()
        there = Path(host_store.root) / "states" / "id" / "ckpt"
        here = tmp_path / "home" / "1" / "ckpt"
        told: list[SyncRound] = []
        there.mkdir(parents=True)
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SAVES, str(there), stdin=subprocess.PIPE
        )
        kept = StateFolder("ckpt", "ckpt", here, "states/id/ckpt", "checkpoint-*", None, None)
        keeper = CheckpointSync(Paced(host_store, trainer), [kept], told.append, pause=nothing)
        async with asyncio.timeout(120):
            while max(steps(there), default=0) < ROUNDS:
                await keeper.sync()
                assert not told[-1].problem and all(right(path) for path in here.glob("*"))
        trainer.kill()
        await trainer.wait()
        keeper = CheckpointSync(HostCheckpoints(host_store), [kept], told.append, pause=nothing)
        await keeper.finish()
        assert all(right(path) for path in here.glob("*")) and len(steps(here)) >= ROUNDS // 8
        last = max(step for step in steps(there) if right(there / f"checkpoint-{step}"))
        assert max(steps(here)) == last and not [
            name for name, why in told[-1].rejected if name == f"checkpoint-{last}"
        ]
        await host_store.aclose()

    asyncio.run(story())


class Mortal:
    """A host of which the connection is gone for good with the nth frame that is sent there."""

    def __init__(self, host: LocalHost, left: int) -> None:
        self.host, self.left, self.python = host, left, host.python

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        async def counted() -> AsyncIterator[bytes]:
            async for block in stdin:
                self.left -= 1
                if self.left < 0:
                    raise HostLost("gone")
                yield block

        async with aclosing(
            cast("AsyncGenerator[bytes, None]", self.host.call(argv, counted()))
        ) as inner:
            async for data in inner:
                yield data


def test_a_restore_that_dies_anywhere_leaves_nothing_half_there(tmp_path: Path) -> None:
    async def story() -> None:
        host = LocalHost(tmp_path / "supervisor")
        here = tmp_path / "home" / "1" / "ckpt"
        Training(here).save(1, size=3_000_000)
        died, trainer = 0, Training(tmp_path / "none")
        for calls in range(1, 60):
            mortal = Mortal(host, calls)
            host_store = HostStore(Wire(mortal, str(tmp_path / "ours")))  # type: ignore[arg-type]  # a host of which only this is asked
            there = tmp_path / "ours" / "states" / "id" / "ckpt"
            kept = StateFolder("ckpt", "ckpt", here, "states/id/ckpt", PATTERN, None, None)
            try:
                await host_store.open()
                await CheckpointSync(
                    HostCheckpoints(host_store), [kept], lambda _round: None
                ).restore()  # type: ignore[arg-type]
                break
            except HostLost:
                died += 1
            finally:
                await host_store.aclose()
            assert not there.exists() or trainer.whole(there) == set(steps(there))
        assert trainer.whole(there) == {1} and died > 5
        assert not list((tmp_path / "ours" / "states").glob(".arriving*"))

    asyncio.run(story())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    needs("mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_training_that_saves_more_than_a_small_disk_holds_goes_on_to_its_end(
    tmp_path: Path, small_disk: Path
) -> None:
    async def story() -> None:
        host = LocalHost(tmp_path / "supervisor")
        host_store = HostStore(Wire(host, str(small_disk / "ours")))
        await host_store.open()
        there = f"{host_store.root}/states/id/ckpt"
        told: list[SyncRound] = []
        keeper = CheckpointSync(
            HostCheckpoints(host_store),
            [
                StateFolder(
                    "ckpt",
                    "ckpt",
                    tmp_path / "home" / "1" / "ckpt",
                    "states/id/ckpt",
                    PATTERN,
                    None,
                    3,
                )
            ],
            told.append,
            pause=nothing,
        )
        trainer = Training(Path(there))
        for step in range(
            1, 13
        ):  # twelve megabytes in all; three checkpoints of one megabyte fit, four do not
            trainer.save(step, size=1_000_000)
            await keeper.sync()
        assert steps(tmp_path / "home" / "1" / "ckpt") == [10, 11, 12]
        assert trainer.whole(trainer.folder) >= {12}
        assert all(not done.problem for done in told)
        await host_store.aclose()

    asyncio.run(story())


def test_our_own_disk_that_is_full_is_said_and_loses_nothing(
    tmp_path: Path, small_disk: Path
) -> None:
    async def story() -> None:
        host = LocalHost(tmp_path / "supervisor")
        host_store = HostStore(Wire(host, str(tmp_path / "ours")))
        await host_store.open()
        there = f"{host_store.root}/states/id/ckpt"
        told: list[SyncRound] = []
        here = small_disk / "1" / "ckpt"
        keeper = CheckpointSync(
            HostCheckpoints(host_store),
            [StateFolder("ckpt", "ckpt", here, "states/id/ckpt", PATTERN, None, 1)],
            told.append,
            pause=nothing,
        )
        trainer = Training(Path(there))
        trainer.save(1, size=1_500_000)
        await keeper.sync()
        trainer.save(2, size=3_000_000)
        await keeper.sync()
        assert "copy is incomplete" in told[-1].problem and "free" in told[-1].problem
        assert trainer.whole(here) == {1} and steps(trainer.folder) == [1, 2]
        assert not any((here.parent / ".incoming" / "ckpt").iterdir())
        await host_store.aclose()

    asyncio.run(story())


def test_what_is_there_is_reported_with_its_times(tmp_path: Path) -> None:
    async def story() -> None:
        host_store = HostStore(Wire(LocalHost(tmp_path / "supervisor"), str(tmp_path / "ours")))
        folder = tmp_path / "ours" / "a state" / "ckpt"
        assert (await HostCheckpoints(host_store).list_files("a state/ckpt")).files == {}
        trainer = Training(folder)
        trainer.save(1)
        (folder / "step-1" / "näme of\ttheir own").write_text("x")
        (folder / "step-1" / "link").symlink_to("/nowhere")
        os.utime(folder / "step-1" / "optimizer.json", ns=(0, 1_700_000_000_000_000_000))
        found = await HostCheckpoints(host_store).list_files("a state/ckpt")
        assert set(found.files) == {
            f"step-1/{name}"
            for name in ("model.safetensors", "optimizer.json", "näme of\ttheir own", "link")
        }
        assert found.files["step-1/optimizer.json"] == (2, 1_700_000_000_000_000_000)
        room = shutil.disk_usage(tmp_path)
        assert (
            abs(found.total - room.total) < 0.1 * room.total
            and abs(found.free - room.free) < 0.1 * room.total
        )
        await host_store.aclose()

    asyncio.run(story())


def test_a_host_that_sends_wrong_names_writes_nothing_outside_the_state() -> None:
    class Liar:
        root = ""

        async def list_folder(self, path: str) -> tuple[list[tuple[str, int, int, bool]], int, int]:
            names = ("../../etc/passwd", "/etc/passwd", ".", "a/", "good")
            return [(name, 5, 7_500_000_000, False) for name in names], 50, 100

    async def story() -> None:
        assert dict((await HostCheckpoints(Liar()).list_files("x")).files) == {
            "good": (5, 7_500_000_000)
        }  # type: ignore[arg-type]

    asyncio.run(story())
