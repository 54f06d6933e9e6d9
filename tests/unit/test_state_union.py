"""The state of several nodes is one folder: what any of them has is looked at and brought, what goes there goes to all; a lost one has nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from drivers.base import HostLost, Rejected
from runner.hosts.place.checkpoint_sync import DirectoryListing, HostCheckpoints
from runner.hosts.place.state_union import NodesCheckpoints
from runner.hosts.transfer.download import HashedOutput
from runner.hosts.transfer.host_store import MissingDirectory
from runner.storage.content import files


class Disk(HostCheckpoints):
    """A node whose disk is a folder."""

    def __init__(self, root: Path, free: int = 100) -> None:
        self.root, self.free, self.lost = root, free, False

    def _here(self) -> None:
        if self.lost:
            raise HostLost("it is gone")

    async def list_files(self, path: str) -> DirectoryListing:
        self._here()
        found = [each for each in sorted((self.root / path).rglob("*")) if each.is_file()]
        return DirectoryListing(
            {
                str(each.relative_to(self.root / path)): (
                    each.stat().st_size,
                    each.stat().st_mtime_ns,
                )
                for each in found
            },
            self.free,
            1000,
        )

    async def hash_path(self, path: str) -> HashedOutput:
        self._here()
        if not (self.root / path).parent.is_dir():
            raise MissingDirectory(path)
        entries = tuple(files.entries(self.root / path)) if (self.root / path).is_dir() else ()
        if not entries:
            return HashedOutput()
        return HashedOutput(files.tree_id(entries), entries, sum(entry.size for entry in entries))

    async def download_hashed(self, path: str, taken: HashedOutput, target: Path) -> int:
        for entry in taken.entries:
            place = target / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True) if entry.kind == "d" else shutil.copy2(
                self.root / path / entry.path, place
            )
        return taken.size

    async def upload(self, source: Path, path: str) -> int:
        self._here()
        shutil.copytree(source, self.root / path, dirs_exist_ok=True)
        return 1

    async def remove(self, paths: Sequence[str]) -> None:
        self._here()
        for path in paths:
            shutil.rmtree(self.root / path)


def write(root: Path, **contents: str) -> None:
    for name, text in contents.items():
        path = root / "s" / "step-1" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def nodes(tmp: Path, told: list[str]) -> tuple[NodesCheckpoints, Disk, Disk]:
    first, second = Disk(tmp / "0"), Disk(tmp / "1", free=50)
    return NodesCheckpoints([first, second], told.append), first, second


def test_what_any_node_wrote_is_brought_and_of_two_the_first_counts(tmp_path: Path) -> None:
    told: list[str] = []
    over, _, _ = nodes(tmp_path, told)
    write(tmp_path / "0", same="0", alike="x", of_0="a")
    write(tmp_path / "1", same="1", alike="x", of_1="b", below__of_1="c")
    look = asyncio.run(over.list_files("s"))
    assert (
        sorted(look.files)
        == [f"step-1/{name}" for name in ("alike", "below/of_1", "of_0", "of_1", "same")]
        and look.free == 50
    )
    assert [*asyncio.run(over.list_resumable("s")).files] == []
    asyncio.run(over.download("s/step-1", tmp_path / "here"))
    here = {
        str(path.relative_to(tmp_path / "here")): path.read_text()
        for path in (tmp_path / "here").rglob("*")
        if path.is_file()
    }
    assert here == {"same": "0", "alike": "x", "of_0": "a", "of_1": "b", "below/of_1": "c"}
    assert told == ["step-1 differs between node 1 and node 0 in same; keeping the copy of node 0"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("here.")] == []
    with pytest.raises(Rejected):
        asyncio.run(over.download("s/step-2", tmp_path / "none"))


def test_what_is_put_there_is_put_on_every_node_and_removed_from_every_node(tmp_path: Path) -> None:
    over, _, _ = nodes(tmp_path, [])
    write(tmp_path / "0", a="a")
    asyncio.run(over.upload(tmp_path / "0" / "s" / "step-1", "s/step-2"))
    assert [*asyncio.run(over.list_resumable("s")).files] == ["step-2/a"]
    (tmp_path / "1/s/step-2/a").write_text("b")  # as long as the other
    assert [*asyncio.run(over.list_resumable("s")).files] == []
    asyncio.run(over.upload(tmp_path / "0" / "s" / "step-1", "s/step-2"))
    assert (tmp_path / "0/s/step-2/a").read_text() == (tmp_path / "1/s/step-2/a").read_text() == "a"
    asyncio.run(over.remove(["s/step-2"]))
    assert not (tmp_path / "0/s/step-2").exists() and not (tmp_path / "1/s/step-2").exists()


def test_a_new_node_has_nothing_and_what_the_others_have_may_not_be_all(tmp_path: Path) -> None:
    over, _, _ = nodes(tmp_path, [])
    write(tmp_path / "0", a="a")
    (tmp_path / "1" / "s").mkdir(parents=True)
    asyncio.run(over.download("s/step-1", tmp_path / "here"))
    assert not over.partial, "of two nodes that took part one may have written nothing"
    (tmp_path / "1" / "s").rmdir()
    asyncio.run(over.download("s/step-1", tmp_path / "there"))
    assert over.partial and [path.name for path in (tmp_path / "there").iterdir()] == ["a"]


def test_a_lost_node_has_nothing_and_when_all_are_lost_that_is_raised(tmp_path: Path) -> None:
    over, first, second = nodes(tmp_path, [])
    write(tmp_path / "0", a="a")
    write(tmp_path / "1", b="b")
    first.lost = True
    assert [*asyncio.run(over.list_files("s")).files] == ["step-1/b"]
    asyncio.run(over.download("s/step-1", tmp_path / "here"))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["b"] and over.partial
    second.lost = True
    with pytest.raises(HostLost):
        asyncio.run(over.list_files("s"))
