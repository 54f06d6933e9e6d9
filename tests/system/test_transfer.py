"""What travels arrives as it was, once, and only what is missing travels.  The host is this machine with a root of its own; every byte goes over `call`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from drivers import calls
from drivers.base import NOTHING, Argv, Denied, Unreachable
from drivers.local import LocalHost
from runner.agent.frames import FrameParser, frame
from runner.errors import Corrupt, Infrastructure
from runner.hosts.link import wire
from runner.hosts.link.wire import TransferProgress, Wire
from runner.hosts.transfer import manifests
from runner.hosts.transfer.download import HashedOutput
from runner.hosts.transfer.host_store import AttemptContents, HostStore
from runner.storage.content import files
from runner.storage.content.files import Changed, Entry
from tests.tools import needs

RACES = int(os.environ.get("RECIPE_TRANSFER_RACES", "5"))


class Counted:
    """A host whose questions are counted, and before each of which something may happen."""

    def __init__(self, host: LocalHost) -> None:
        self.host, self.python = host, host.python
        self.asked = 0
        self.sent = 0  # bytes that came with questions
        self.before: Callable[[str], None] = lambda _function: None

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        async def counted() -> AsyncIterator[bytes]:
            frames = FrameParser()
            async for block in stdin:
                for payload in frames.feed(block) if block[:2] != b"PK" else ():
                    self.sent += max(0, len(payload) - 1) if payload[:1] == b"d" else 0
                    if payload[:1] == b"q":
                        self.asked += 1
                        self.before(json.loads(payload[1:])[1])
                yield block

        inner = cast(
            "AsyncGenerator[bytes, None]",
            self.host.call(argv, NOTHING if stdin is NOTHING else counted()),
        )
        async with aclosing(inner):
            async for block in inner:
                yield block


class Town:
    """A host, its host_store, and a folder here."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place = place
        self.wire = Counted(LocalHost(place / "supervisor"))
        self.host_stores: list[HostStore] = []
        self.host_store = self.another(**options)

    def another(self, root: str = "there", **options: Any) -> HostStore:
        self.host_stores.append(
            HostStore(Wire(cast(Any, self.wire), str(self.place / root), **options))
        )
        return self.host_stores[-1]

    async def aclose(self) -> None:
        for host_store in self.host_stores:
            await host_store.aclose()
        await self.wire.host.aclose()

    def tree(self, name: str = "data") -> Path:
        """A tree with everything that a name or a file can be."""
        top = self.place / name
        for n in range(40):
            path = top / f"dir{n % 3}" / f"file {n}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"%d" % n * (n + 100))
        for odd in (
            "new\nline",
            "back\\slash",
            "-dash",
            "'quote\"",
            "ünï",
            os.fsdecode(b"bad\xff"),
            "l" * 200,
            "*",
            " space ",
        ):
            (top / odd).write_bytes(os.fsencode(odd))
        (top / "run").write_bytes(b"#!/bin/sh\n")
        (top / "run").chmod(0o755)
        (top / "zero").write_bytes(b"")
        (top / "none" / "at all").mkdir(parents=True)
        (top / "link").symlink_to("dir1/file 1")
        (top / "dir1" / "up").symlink_to("../dir2")
        return top

    async def sends(self, *paths: Path) -> list[str]:
        contents = {files.scan(path): str(path) for path in paths}
        await self.host_store.send(contents)
        for content in contents:
            assert files.scan(self.host_store.path(content)) == content
        assert await self.host_store.find_existing(contents) == set(contents)
        return list(contents)

    async def attempt(self, parcel: AttemptContents | None = None, name: str = "attempt") -> Path:
        await self.host_store.stage(name, parcel or AttemptContents({"given": (b"given", 0o644)}))
        return Path(self.host_store.root, "attempts", name)


@pytest.fixture(autouse=True, params=["near", "far"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the host is taken to be: on a long way many streams carry pieces."""
    monkeypatch.setattr(wire, "NEAR", float("inf") if request.param == "near" else 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries nothing is waited for."""
    for module in ("link.wire", "transfer.upload", "transfer.download"):
        monkeypatch.setattr(f"runner.hosts.{module}.retry_pause", lambda _failures: 0.0)


@pytest.fixture
def go(tmp_path: Path) -> Callable[[Callable[[Town], Awaitable[None]]], None]:
    """Run something against an opened town."""

    def run(what: Callable[[Town], Awaitable[None]]) -> None:
        async def whole() -> None:
            town = Town(tmp_path)
            try:
                await town.host_store.open()
                await what(town)
            finally:
                await town.aclose()

        asyncio.run(whole())

    return run


Go = Callable[[Callable[[Town], Coroutine[Any, Any, None]]], None]


def test_a_tree_with_every_kind_of_name_arrives_as_it_was(go: Go) -> None:
    async def check(town: Town) -> None:
        await town.sends(town.tree())

    go(check)


def test_files_small_and_large_arrive_as_they_were(go: Go) -> None:
    async def check(town: Town) -> None:
        for name, size in (("empty", 0), ("small", 1000), ("large", (40 << 20) + 7)):
            (town.place / name).write_bytes(os.urandom(size))
        (town.place / "program").write_bytes(b"x")
        (town.place / "program").chmod(0o755)
        await town.sends(*(town.place / name for name in ("empty", "small", "large", "program")))

    go(check)


def test_an_attempt_sees_what_it_was_given_and_what_it_made_comes_home(go: Go) -> None:
    async def check(town: Town) -> None:
        (content,) = await town.sends(town.tree())
        parcel = AttemptContents(
            {"train.py": (b"pass", 0o644), "bin/go": (b"#!", 0o555)},
            {"data": content},
            ["out", "a/b"],
            {"saves": "states/k"},
            {".sh": b"sh"},
        )
        path = await town.attempt(parcel)
        assert (path / "train.py").read_bytes() == b"pass" and os.access(path / "bin/go", os.X_OK)
        assert files.scan(path / "data") == content
        assert (path / "a/b").is_dir() and path.with_name("attempt.sh").read_bytes() == b"sh"
        (path / "saves" / "one").write_bytes(b"kept")
        os.rename(town.tree("made"), path / "out" / "made")
        (path / "out" / "weights").write_bytes(os.urandom(9 << 20))
        (path / "metrics.json").write_bytes(b"{}")
        harvest = await town.host_store.hash_outputs(str(path), ["out", "metrics.json", "absent"])
        assert harvest.changed == () and harvest.outputs["absent"] == HashedOutput()
        outputs = {name: taken.content for name, taken in harvest.outputs.items() if taken.content}
        assert outputs == {
            "out": files.scan(path / "out"),
            "metrics.json": files.scan(path / "metrics.json"),
        }
        assert await town.host_store.store_outputs(str(path), outputs) == set(outputs.values())
        for name, made in outputs.items():
            await town.host_store.fetch(
                town.host_store.path(made), harvest.outputs[name], str(town.place / "home" / name)
            )
            assert files.scan(town.place / "home" / name) == made
        assert await town.host_store.find_existing(outputs.values()) == set(outputs.values())
        await town.host_store.remove([str(path), f"{path}.sh"])
        assert not list((town.place / "there" / "attempts").iterdir())
        assert (town.place / "there" / "states" / "k" / "one").read_bytes() == b"kept"

    go(check)


# -- only what is missing


def test_of_what_an_earlier_try_brought_only_that_stays_which_is_there_still(go: Go) -> None:
    """A state that its trainer went on writing after the connection broke came home with what had been deleted."""

    async def do(town: Town) -> None:
        top, home = town.tree("there/states"), town.place / "home"
        earlier = home.with_name("home.coming")
        shutil.copytree(top, earlier, symlinks=True)
        (earlier / "deleted").write_text("x")
        (earlier / "folder").mkdir()
        (earlier / "folder" / "below").write_text("x")
        (earlier / "link").unlink()
        (earlier / "link").symlink_to("dir1/file 4")
        (earlier / "zero").unlink()
        (earlier / "zero").mkdir()
        (earlier / "none" / "at all").rmdir()
        (earlier / "none" / "at all").write_text("x")
        taken = (await town.host_store.hash_outputs(str(town.place / "there"), ["states"])).outputs[
            "states"
        ]
        await town.host_store.fetch(str(top), taken, str(home))
        assert files.scan(home) == files.scan(top) == taken.content
        file = (await town.host_store.hash_outputs(str(top), ["zero"])).outputs["zero"]
        (town.place / "file.coming").mkdir()
        await town.host_store.fetch(str(top / "zero"), file, str(town.place / "file"))
        assert (town.place / "file").read_bytes() == b""

    go(do)


def test_what_is_there_already_costs_one_round_trip(go: Go) -> None:
    async def check(town: Town) -> None:
        sources = {content: str(town.place / "data") for content in await town.sends(town.tree())}
        manifests = {content: files.entries(path) for content, path in sources.items()}
        town.wire.asked = town.wire.sent = 0
        await town.host_store.send(sources, manifests)
        assert town.wire.asked == 1 and town.wire.sent == 0

    go(check)


def test_of_a_tree_that_changed_a_little_only_the_change_travels(go: Go) -> None:
    async def check(town: Town) -> None:
        top = town.tree()
        for n in range(300):
            (top / f"big {n}").write_bytes(os.urandom(20_000))
        (old,) = await town.sends(top)
        (top / "big 7").write_bytes(os.urandom(20_000))
        (top / "big 8").unlink()
        shutil.rmtree(top / "dir0")
        (top / "dir0").write_bytes(b"a file where a folder was")
        (top / "zero").unlink()
        (top / "zero").mkdir()
        (top / "zero" / "one").write_bytes(b"a folder where a file was")
        (top / "run").chmod(0o644)
        (top / "link").unlink()
        (top / "link").symlink_to("dir2")
        town.wire.asked = town.wire.sent = 0
        await town.sends(top)
        assert town.wire.asked <= 4 and town.wire.sent < 120_000  # the manifest is 50,000 of it
        assert files.scan(town.host_store.path(old)) == old

    go(check)


@pytest.mark.parametrize("holes", [500, 2])  # in one call, and in many
def test_of_a_large_file_that_changed_a_little_only_chunks_travel(
    go: Go, holes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.hosts.transfer.upload._HOLES", holes)

    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        top = town.place / "data"
        top.mkdir()
        (top / "large").write_bytes(os.urandom(40 * town.host_store.wire.chunk + 5))
        (old,) = await town.sends(top)
        with (top / "large").open("r+b") as file:
            for at in (3, 20, 21, 40):
                file.seek(at * town.host_store.wire.chunk)
                file.write(b"new")
        with (top / "large").open("ab") as file:
            file.write(b"longer")
        town.wire.sent = 0
        await town.sends(top)
        assert town.wire.sent < 5 * town.host_store.wire.chunk
        assert files.scan(town.host_store.path(old)) == old

    go(check)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_a_host_remembers_the_digests_of_the_pieces_of_a_large_file_and_is_found_out_when_they_are_wrong(
    go: Go, wrong: bool
) -> None:
    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        grain = town.host_store.wire.chunk // 4

        def digests(data: bytes) -> list[str]:
            return [
                hashlib.sha256(data[at : at + grain]).hexdigest()
                for at in range(0, len(data), grain)
            ]

        versions = [os.urandom(40 * town.host_store.wire.chunk + 5)]
        for number in range(3):
            at = (3 + number) * town.host_store.wire.chunk
            versions.append(versions[-1][:at] + b"new" + versions[-1][at + 3 :])
        top = town.place / "data"
        top.mkdir()
        for number, data in enumerate(versions):
            (top / "large").write_bytes(data)
            town.wire.sent = 0
            await town.sends(top)
            remembered = town.place / "there" / "pieces" / hashlib.sha256(data).hexdigest()
            if (
                number or wire.NEAR == 0.0
            ):  # near, a file that is sent whole is hashed once, and in pieces only when another is built on it
                assert json.loads(remembered.read_text()) == [grain, digests(data)]
                assert not number or town.wire.sent <= 2 * town.host_store.wire.chunk
            if wrong:
                remembered.write_text(json.dumps([grain, digests(versions[min(number + 1, 3)])]))

    go(check)


@pytest.mark.parametrize("change", ["in the middle", "longer", "shorter"])
@pytest.mark.parametrize("gone", [False, True], ids=["", "whose older one is deleted meanwhile"])
def test_a_large_file_in_a_tree_of_which_the_host_remembers_the_pieces_is_not_read_there_before_it_is_sent(
    go: Go, change: str, gone: bool
) -> None:
    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        top, large = town.place / "data", town.place / "data" / "large"
        top.mkdir()
        large.write_bytes(os.urandom(40 * town.host_store.wire.chunk + 5))
        await town.sends(top)
        with large.open("r+b") as file:
            file.write(b"new")  # near, pieces are remembered when another file is built on them
        (old,) = await town.sends(top)
        with large.open("r+b") as file:
            if change == "in the middle":
                for at in (7, 21, 22):
                    file.seek(at * town.host_store.wire.chunk - 1)
                    file.write(b"ab")
            elif change == "longer":
                file.seek(0, os.SEEK_END)
                file.write(b"x" * town.host_store.wire.chunk)
            else:
                file.truncate(33 * town.host_store.wire.chunk + 7)
        asked: list[str] = []

        def before(function: str) -> None:
            asked.append(function)
            if function == "write" and gone and asked.count("write") == 1:
                here = Path(town.host_store.path(old))
                here.chmod(0o700)
                (here / "large").unlink()

        town.wire.before, town.wire.sent = before, 0
        await town.sends(top)
        if not gone:
            assert (
                "base" in asked
                and "chunks" not in asked
                and town.wire.sent <= 6.1 * town.host_store.wire.chunk
            )

    go(check)


def test_of_a_large_file_that_may_be_executed_now_next_to_nothing_travels(go: Go) -> None:
    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        top = town.place / "data"
        top.mkdir()
        (top / "large").write_bytes(os.urandom(40 * town.host_store.wire.chunk + 5))
        await town.sends(top)
        (top / "large").chmod(0o755)
        town.wire.sent = 0
        await town.sends(top)
        assert town.wire.sent < town.host_store.wire.chunk

    go(check)


@pytest.mark.parametrize("change", ["in the middle", "longer", "shorter", "executable"])
def test_of_a_large_file_by_itself_that_changed_a_little_only_chunks_travel(
    go: Go, change: str
) -> None:
    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        one, other = town.place / "one", town.place / "other"
        other.write_bytes(os.urandom(41 * town.host_store.wire.chunk))
        one.write_bytes(os.urandom(40 * town.host_store.wire.chunk + 5))
        old, _ = await town.sends(one, other)
        with one.open("r+b") as file:
            if change == "in the middle":
                file.seek(21 * town.host_store.wire.chunk - 1)
                file.write(b"ab")
            elif change == "longer":
                file.seek(0, os.SEEK_END)
                file.write(b"x" * town.host_store.wire.chunk)
            elif change == "shorter":
                file.truncate(33 * town.host_store.wire.chunk + 7)
        if change == "executable":
            one.chmod(0o755)
        town.wire.sent = 0
        (new,) = await town.sends(one)
        assert new != old and town.wire.sent <= 2.1 * town.host_store.wire.chunk
        assert files.scan(town.host_store.path(old)) == old

    go(check)


def test_a_large_file_that_is_like_none_there_travels_whole_and_arrives(go: Go) -> None:
    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        one = town.place / "one"
        for _ in range(2):
            one.write_bytes(os.urandom(20 * town.host_store.wire.chunk))
            town.wire.sent = 0
            await town.sends(one)
            assert town.wire.sent >= 20 * town.host_store.wire.chunk

    go(check)


def test_an_object_that_was_written_to_is_found_out_and_put_right(go: Go) -> None:
    async def check(town: Town) -> None:
        one = town.place / "one"
        one.write_bytes(os.urandom(1000))
        tree, file = await town.sends(town.tree(), one)
        for path in (
            Path(town.host_store.path(tree)) / "dir1" / "file 1",
            Path(town.host_store.path(file)),
        ):
            path.chmod(0o644)
            os.utime(path, (path.stat().st_mtime + 5,) * 2)
            path.write_bytes(b"spoilt")
        assert await town.host_store.find_existing({tree, file}) == set()
        await town.sends(town.place / "data", one)

    go(check)


def test_what_was_there_before_a_reboot_is_hashed_and_not_sent_again(go: Go) -> None:
    async def check(town: Town) -> None:
        top = town.tree()
        (top / "large").write_bytes(os.urandom(9 << 20))
        (content,) = await town.sends(top)
        for seal in (town.place / "there" / "seals").iterdir():
            seal.write_text("another boot")
        assert await town.host_store.find_existing({content}) == set()
        town.wire.sent = 0
        await town.host_store.send({content: str(top)})
        assert town.wire.sent < 20_000
        assert await town.host_store.find_existing({content}) == {content}

    go(check)


@pytest.mark.usefixtures("impatient")
def test_a_sender_that_gave_up_leaves_what_arrived_to_the_next(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.hosts.transfer.upload.TRIES", 2)

    async def check(town: Town) -> None:
        town.host_store.wire.chunk = 64 << 10
        top = town.tree()
        (top / "large").write_bytes(os.urandom(10 * town.host_store.wire.chunk))
        content = files.scan(top)

        def cut(_function: str) -> None:
            if town.wire.sent > 6 * town.host_store.wire.chunk:
                raise Unreachable

        town.wire.before = cut
        with pytest.raises(Unreachable):
            await town.host_store.send({content: str(top)})
        town.wire.before = lambda _function: None
        before, town.wire.sent = town.wire.sent, 0
        await town.another().open()
        town.host_store = town.another()
        town.host_store.wire.chunk = 64 << 10
        await town.host_store.open()
        await town.sends(top)
        assert before >= 6 * town.host_store.wire.chunk > town.wire.sent

    go(check)


def test_an_attempt_is_made_while_what_it_is_given_is_sent_and_that_does_not_count_as_a_change(
    go: Go,
) -> None:
    async def check(town: Town) -> None:
        data = town.place / "data"
        data.write_bytes(b"data")
        content = files.scan(data)
        staging = asyncio.ensure_future(
            town.host_store.stage("early", AttemptContents(links={"in": content}), (content,))
        )
        await town.host_store.send({content: str(data)})
        await staging
        attempt = Path(town.host_store.root, "attempts/early")
        assert (attempt / "in").read_bytes() == b"data" and not (attempt / "in").is_symlink()
        assert (await town.host_store.hash_outputs(str(attempt), [])).changed == ()

    go(check)


def test_an_attempt_whose_input_does_not_come_is_not_made(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(town: Town) -> None:
        with pytest.raises(wire.UploadGone):
            await town.host_store.stage(
                "early", AttemptContents(links={"in": f"f:{'0' * 64}"}), (f"f:{'0' * 64}",)
            )
        assert not os.listdir(town.place / "there/attempts")

    go(check)


def test_what_was_asked_ahead_is_not_asked_again_and_is_believed_once(go: Go) -> None:
    asked: list[str] = []

    async def check(town: Town) -> None:
        paths = [town.place / name for name in ("one", "two", "three")]
        for path in paths:
            path.write_text(path.name)
        contents = [files.scan(path) for path in paths]
        await town.host_store.prefetch_state(contents[:2])
        town.wire.before = asked.append
        await town.host_store.send({contents[0]: str(paths[0])})
        assert "begin" not in asked
        await town.host_store.send({contents[0]: str(paths[0])})
        await town.host_store.send({contents[1]: str(paths[1]), contents[2]: str(paths[2])})
        assert asked.count("begin") == 2
        assert await town.host_store.find_existing(contents) == set(contents)

    go(check)


def test_many_who_send_the_same_at_once_all_succeed(go: Go) -> None:
    async def check(town: Town) -> None:
        top = town.tree()
        one = town.place / "one"
        one.write_bytes(os.urandom(100_000))
        sources = {files.scan(path): str(path) for path in (top, one)}
        host_stores = [town.another() for _ in range(RACES)]
        for host_store in host_stores:
            await host_store.open()
        await asyncio.gather(
            *(host_store.send(sources) for host_store in host_stores),
            *(host_stores[0].send(sources) for _ in range(RACES)),
        )
        await town.sends(top, one)
        left = [
            path
            for path in (town.place / "there" / "partial").rglob("*")
            if path.name != ".alive" and not path.is_dir()
        ]
        assert left == []

    go(check)


def test_a_file_that_changes_while_it_is_sent_is_named(go: Go) -> None:
    async def check(town: Town) -> None:
        top = town.tree()
        content, manifest = files.scan(top), files.entries(top)
        (top / "dir1" / "file 1").write_bytes(b"other")
        with pytest.raises(Changed, match="dir1/file 1"):
            await town.host_store.send({content: str(top)}, {content: manifest})

    go(check)


def test_a_sender_is_heard_of_there_while_a_large_file_is_under_way(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what came of it would be somebody else's after ten minutes."""
    monkeypatch.setattr("runner.hosts.transfer.upload._SIGN", 0.001)
    asked: list[bool] = []

    async def check(town: Town) -> None:
        town.wire.before = lambda function: asked.append(function == "free")
        (town.place / "large").write_bytes(os.urandom(40 << 20))
        await asyncio.gather(
            town.host_store.find_free_space(), town.host_store.find_free_space()
        )  # a stream for each
        asked.clear()
        await town.sends(town.place / "large")
        assert any(asked)
        still = [
            task
            for task in asyncio.all_tasks()
            if getattr(task.get_coro(), "__qualname__", "") == "Sender._send_signs_of_life"
        ]
        assert len(still) <= 1
        if still:
            await asyncio.wait(still, timeout=20)
            assert still[0].cancelled()

    go(check)


def test_progress_is_reported_and_ends_with_all(go: Go) -> None:
    async def check(town: Town) -> None:
        told: list[TransferProgress] = []
        town.host_store = town.another(progress=told.append, name="box")
        await town.host_store.open()
        await town.sends(town.tree())
        assert (
            told[-1].done == told[-1].total > 0 and told[-1].eta == 0 and told[-1].what == "to box"
        )
        assert [progress.done for progress in told] == sorted(progress.done for progress in told)

    go(check)


# -- attempts


def test_staging_again_after_a_lost_answer_is_no_second_attempt(go: Go) -> None:
    async def check(town: Town) -> None:
        path = await town.attempt()
        (path / "made").write_bytes(b"by the job")
        assert await town.attempt() == path
        assert (path / "made").read_bytes() == b"by the job"

    go(check)


def test_inputs_that_an_attempt_changed_are_named(go: Go) -> None:
    async def check(town: Town) -> None:
        one = town.place / "one"
        one.write_bytes(os.urandom(100_000))
        tree, file = await town.sends(town.tree(), one)
        path = await town.attempt(
            AttemptContents(
                {"a": (b"a", 0o644), "b": (b"b", 0o644), "c": (b"c", 0o644)},
                {"data": tree, "one": file},
            )
        )
        assert (await town.host_store.hash_outputs(str(path), [])).changed == ()
        later = path.with_name("attempt.in").stat().st_mtime + 1
        for name in ("b", "data/dir1/file 1"):
            os.utime(path / name, (later, later))
        (path / "c").unlink()
        assert sorted((await town.host_store.hash_outputs(str(path), [])).changed) == [
            "b",
            "c",
            tree,
        ]
        assert await town.host_store.find_existing({tree, file}) == {file}

    go(check)


def test_what_is_no_output_is_reported_in_words(go: Go) -> None:
    async def check(town: Town) -> None:
        path = await town.attempt()
        for name in ("out", "pipes", "links"):
            (path / name).mkdir()
        os.mkfifo(path / "pipe")
        os.mkfifo(path / "pipes" / "inner")
        (path / "links" / "away").symlink_to("/etc/passwd")
        (path / "out" / "etc").symlink_to("/etc")
        outputs = ["pipe", "pipes", "links", "given", "out/etc/passwd", "states"]
        taken = (await town.host_store.hash_outputs(str(path), outputs)).outputs
        assert {name: one.problem for name, one in taken.items()} == {
            "pipe": "pipe is neither a file nor a directory",
            "pipes": "pipes: 'inner' is neither a file nor a directory",
            "links": "links: a link to '/etc/passwd' points outside the directory: 'away'",
            "given": "",
            "out/etc/passwd": "out/etc/passwd is behind a link that points outside the attempt directory",
            "states": "",
        }
        assert taken["given"].kind == "f" and taken["states"].kind == "-"

    go(check)


def test_an_output_that_is_kept_can_be_given_to_the_next_attempt(go: Go) -> None:
    async def check(town: Town) -> None:
        path = await town.attempt()
        (path / "states").mkdir()
        shutil.copytree(town.tree(), path / "out", symlinks=True)
        shutil.copytree(town.place / "data", path / "states" / "out", symlinks=True)
        taken = (await town.host_store.hash_outputs(str(path), ["out", "states/out"])).outputs
        content = taken["out"].content
        assert await town.host_store.store_outputs(
            str(path), {"states/out": content}, copy=["states/out"]
        ) == {content}
        assert (path / "states" / "out").is_dir()
        assert await town.host_store.store_outputs(str(path), {"out": content}) == {content}
        assert await town.host_store.find_existing({content}) == {content}
        following = await town.attempt(AttemptContents({}, {"in": content}), "following")
        assert files.scan(following / "in") == content

    go(check)


def test_a_sweep_takes_what_is_unused_and_leaves_what_attempts_need(go: Go) -> None:
    async def check(town: Town) -> None:
        paths = [town.place / name for name in ("used", "forgotten", "young")]
        for path in paths:
            path.write_bytes(path.name.encode())
        used, forgotten, young = await town.sends(*paths)
        (tree,) = await town.sends(town.tree())
        await town.attempt(AttemptContents({}, {"x": used}))
        for content in (used, forgotten, tree):
            os.utime(town.place / "there" / "used" / manifests.object_name(content), (0, 0))
        programs = town.place / "there" / "agent"
        (ours,) = [path for path in programs.iterdir() if len(path.name) == 64]
        (programs / ("a" * 64)).mkdir()
        os.utime(programs / ("a" * 64), (0, 0))
        assert await town.host_store.clear((), unused=timedelta(days=1), every=timedelta(0)) == 2
        for content, there in ((used, True), (forgotten, False), (tree, False), (young, True)):
            assert Path(town.host_store.path(content)).exists() is there  # noqa: ASYNC240
        assert [path for path in programs.iterdir() if len(path.name) == 64] == [ours], (
            "the program of a version that nobody uses is deleted, too"
        )

    go(check)


def test_a_sweep_takes_states_that_were_not_written_to_and_none_while_an_attempt_is_there(
    go: Go,
) -> None:
    async def check(town: Town) -> None:
        root = town.place / "there"
        for name in ("old", "young"):
            (root / "states" / name / "ck" / "step-1").mkdir(parents=True)
        (root / "states" / "young" / "ck" / "step-1" / "w").write_text("w")
        for path in (root / "states" / "young" / "ck" / "step-1", *(root / "states").rglob("*")):
            if path.name != "w":
                os.utime(path, (0, 0))
        attempt = await town.attempt(AttemptContents({"x": (b"x", 0o644)}))
        assert await town.host_store.clear((), every=timedelta(0)) == 0
        assert await town.host_store.clear([str(attempt)]) == 0  # the last one was just now
        assert not attempt.exists()
        os.utime(root / "swept", (0, 0))
        assert await town.host_store.clear(()) == 1
        assert [path.name for path in (root / "states").iterdir()] == ["young"]

    go(check)


# -- hosts that lack something


def test_a_host_without_a_python_is_refused_with_what_to_do(tmp_path: Path) -> None:
    class Bare:
        root, python = "there", ""

        def call(
            self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
        ) -> AsyncGenerator[bytes, None]:
            script = argv[2].replace("PATH=$PATH:/usr/local/bin:/usr/bin:/bin", "PATH=/nowhere")
            named = [word for word in argv[3:] if not word.startswith("/")]
            return calls.call(
                ("/bin/sh", "-c", script, *named),
                stdin,
                {"PATH": "/nowhere", "HOME": str(tmp_path)},
                tmp_path,
            )

    async def check() -> None:
        with pytest.raises(
            Denied,
            match=r"no CPython 3\.9 or later on the host: install Python on the host, set `python`",
        ):
            await HostStore(Wire(cast(Any, Bare()), "there")).open()
        assert not (tmp_path / "there").exists()

    asyncio.run(check())


# -- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Three megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    needs("mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_host_without_room_is_found_out_before_anything_is_sent(go: Go, small_disk: Path) -> None:
    async def check(town: Town) -> None:
        (town.place / "large").write_bytes(bytes(5_000_000))
        town.host_store = town.another("small/there", name="box")
        await town.host_store.open()
        with pytest.raises(Infrastructure, match=r"box has 2\.\d MB free disk space, but 5\.0 MB"):
            await town.sends(town.place / "large")
        assert town.wire.sent < 1000

    go(check)


@pytest.mark.parametrize("shape", ["tree", "file"])
def test_a_disk_that_fills_up_there_is_reported_and_what_arrived_is_used_later(
    go: Go, small_disk: Path, shape: str
) -> None:
    async def check(town: Town) -> None:
        town.host_store = town.another("small/there", name="box")
        town.host_store.wire.chunk = 64 << 10
        await town.host_store.open()
        source = town.place / "source"
        if shape == "tree":
            source.mkdir()
            for n in range(50):
                (source / f"{n}").write_bytes(os.urandom(30_000))
        else:
            source.write_bytes(os.urandom(1_500_000))
        filler = small_disk / "filler"

        def fill(function: str) -> None:
            if function in ("batch", "write") and not filler.exists():
                filler.write_bytes(bytes(2_000_000))

        town.wire.before = fill
        with pytest.raises(Infrastructure, match="the disk of box is full"):
            await town.sends(source)
        town.wire.before = lambda _function: None
        filler.unlink()
        town.wire.sent = 0
        await town.sends(source)
        assert town.wire.sent < 1_300_000

    go(check)


def test_a_disk_that_is_full_here_is_reported(go: Go, small_disk: Path) -> None:
    async def check(town: Town) -> None:
        path = await town.attempt()
        (path / "big").write_bytes(os.urandom(5_000_000))
        (path / "some").write_bytes(os.urandom(2_500_000))
        outputs = (await town.host_store.hash_outputs(str(path), ["big", "some"])).outputs
        with pytest.raises(Infrastructure, match=r"only 3\.\d MB disk space is free"):
            await town.host_store.fetch(str(path / "big"), outputs["big"], str(small_disk / "big"))

        def fill(_function: str) -> None:
            (small_disk / "filler").write_bytes(bytes(1_500_000))

        town.wire.before = fill
        with pytest.raises(Infrastructure, match="the disk is full"):
            await town.host_store.fetch(
                str(path / "some"), outputs["some"], str(small_disk / "some")
            )
        town.wire.before = lambda _function: None
        (small_disk / "filler").unlink()
        await town.host_store.fetch(str(path / "some"), outputs["some"], str(small_disk / "some"))
        assert files.scan(small_disk / "some") == outputs["some"].content

    go(check)


# -- hosts that mean ill


class Liar:
    """A host that answers every question with this, in the right form."""

    def __init__(self, answer: object = None, stream: bytes = b"", repeat: int = 1) -> None:
        self.answer, self.stream, self.repeat = answer, stream, repeat
        self.told = 0
        self.python = ""

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        yield f"\n{argv[5]} here\n".encode() + frame(b"g/there")
        async for block in stdin:
            if not block.endswith(frame()):
                continue
            for _ in range(self.repeat if self.stream else 0):
                self.told += len(self.stream)
                yield frame(b"d", self.stream)
            yield frame(b"r", json.dumps(self.answer).encode())


def row(path: str, kind: str = "f", value: str = "a" * 64) -> list[object]:
    return [path, kind, 3, value]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("../x")], "is not a valid file name"),
        ([row("/etc/x")], "is not a valid file name"),
        ([row("a/./b")], "is not a valid file name"),
        ([row("n" * 300)], "is not a valid file name"),
        ([row("a"), row("a")], "duplicate name"),
        ([row("a"), row("a/b")], "is below a file"),
        ([row("a", "l", "../../etc")], "points outside the directory"),
        ([row("a", "l", "."), row("b", "l", "a/..")], "points outside the directory"),
        ([row("a", "l", "a")], "points outside the directory"),
        ([row("a", "l", "/etc"), row("a/passwd")], "is below a file|points outside the directory"),
    ],
)
def test_names_and_links_that_a_host_makes_up_are_refused(
    rows: list[list[object]], words: str
) -> None:
    async def check() -> None:
        harvest = await HostStore(
            Wire(cast(Any, Liar([[["d", rows]], []])), "/there")
        ).hash_outputs("/there/attempts/a", ["out"])
        with pytest.raises(AssertionError, match=words):
            assert not harvest.outputs["out"].problem, harvest.outputs["out"].problem
        assert harvest.outputs["out"].content == ""

    asyncio.run(check())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        7,
        [],
        {},
        [[["d", 3]], []],
        [[["z", []]], []],
        [[["f", []]], []],
        [[["d", [["a", "f", "x", 1]]]], []],
        "x" * 10_000,
    ],
)
def test_an_answer_without_sense_is_corrupt_and_nothing_worse(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.hosts.link.wire.TRIES", 2)

    async def check() -> None:
        with pytest.raises(Corrupt, match="arrive incomplete"):
            await HostStore(Wire(cast(Any, Liar(answer)), "/there")).hash_outputs(
                "/there/attempts/a", ["out"]
            )

    asyncio.run(check())


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.hosts.link.wire.LONGEST_ANSWER", 1 << 20)

    async def check() -> None:
        liar = Liar(stream=bytes(1 << 16), repeat=1_000_000)
        with pytest.raises(Infrastructure, match="sends an endless reply"):
            await HostStore(Wire(cast(Any, liar), "/there")).hash_outputs(
                "/there/attempts/a", ["out"]
            )
        assert liar.told < 2 << 20

    asyncio.run(check())


@pytest.mark.usefixtures("impatient")
def test_bytes_that_are_not_what_was_said_never_get_the_name(tmp_path: Path) -> None:
    async def check() -> None:
        entries = (Entry("a", "f", 3, "0" * 64), Entry("b/c", "f", 3, "1" * 64))
        liar = Liar(stream=b"xxx" * 1000, repeat=1_000_000)
        with pytest.raises(Corrupt, match="changed after the step finished"):
            await HostStore(Wire(cast(Any, liar), "/there")).fetch(
                "/there/out", HashedOutput("t:" + "2" * 64, entries, 6), str(tmp_path / "home")
            )
        assert not (tmp_path / "home").exists()
        assert liar.told < 100_000
        with pytest.raises(Corrupt, match="is not a valid file name"):
            outside = (Entry("../outside", "f", 3, "0" * 64),)
            await HostStore(Wire(cast(Any, liar), "/there")).fetch(
                "/there/out", HashedOutput("t:" + "2" * 64, outside, 3), str(tmp_path / "home")
            )
        assert not (tmp_path / "outside").exists()

    asyncio.run(check())


def test_what_a_login_shell_prints_first_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    async def check() -> None:
        class Noisy(Counted):
            async def call(
                self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
            ) -> AsyncIterator[bytes]:
                yield b"Welcome!\n\nrecipe 1234\n\0"
                async for block in super().call(argv, stdin):
                    yield block

        town = Town(tmp_path)
        town.wire = Noisy(town.wire.host)
        town.host_store = town.another()
        await town.host_store.open()
        (content,) = await town.sends(town.tree())
        manifest = tuple(files.entries(town.place / "data"))
        await town.host_store.fetch(
            town.host_store.path(content),
            HashedOutput(content, manifest, 0),
            str(town.place / "home"),
        )
        assert files.scan(town.place / "home") == content
        beside = Path(town.host_store.path(content) + ".json")
        kept = json.loads(beside.read_text(errors="surrogateescape"))  # noqa: ASYNC240
        assert [Entry(*row) for row in kept] == list(manifest)
        await town.aclose()

    asyncio.run(check())


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from drivers.local import LocalHost
from runner.hosts.transfer.host_store import HostStore
from runner.hosts.link.wire import Wire
from runner.storage.content import files

class Fragile:
    def __init__(self, host):
        self.host, self.sent, self.python = host, 0, host.python

    def call(self, argv, stdin):
        async def counted():
            async for block in stdin:
                self.sent += len(block)
                if self.sent > int(sys.argv[3]):
                    os.kill(os.getpid(), signal.SIGKILL)
                yield block
        return self.host.call(argv, counted())

async def send():
    host_store = HostStore(Wire(Fragile(LocalHost(Path(sys.argv[1], "supervisor"))), sys.argv[1] + "/there"))
    host_store.wire.chunk = 64 << 10
    await host_store.open()
    await host_store.send({files.scan(sys.argv[2]): sys.argv[2]})

asyncio.run(send())
"""


def test_a_process_that_is_killed_leaves_what_arrived_to_the_next(go: Go) -> None:
    async def check(town: Town) -> None:
        top = town.tree()
        for n in range(40):
            (top / f"more {n}").write_bytes(os.urandom(60_000))
        (top / "large").write_bytes(os.urandom(12_000_000))
        argv = [sys.executable, "-c", KILLED, str(town.place), str(top), "12000000"]
        killed = await asyncio.create_subprocess_exec(
            *argv, env={**os.environ, "PYTHONPATH": str(Path(manifests.__file__).parents[3])}
        )
        assert await killed.wait() == -9
        town.host_store.wire.chunk = 64 << 10
        town.wire.sent = 0
        await town.sends(top)
        assert town.wire.sent < 7_000_000  # of 14.4 million; two of them may have been in pipes

    go(check)
