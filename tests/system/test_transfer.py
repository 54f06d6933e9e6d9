"""What travels arrives as it was, once, and only what is missing travels.  The host is this machine with a root of its own; every byte goes over `call`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from drivers.local import LocalHost
from runner.execution.transfer import Depot, Parcel, Taken
from runner.storage import files


class Town:
    """A host, its depot, and a folder here."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place = place
        self.host = LocalHost(place / "supervisor")
        self.depot = Depot(self.host, str(place / "there"), **options)

    def tree(self, name: str = "data") -> Path:
        """A tree with everything that a name or a file can be."""
        top = self.place / name
        for n in range(40):
            path = top / f"dir{n % 3}" / f"file {n}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"%d" % n * (n + 100))
        for odd in ("new\nline", "back\\slash", "-dash", "'quote\"", "ünï", os.fsdecode(b"bad\xff"), "l" * 200, "*", " space "):
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
        await self.depot.send(contents)
        for content in contents:
            assert files.scan(self.depot.path(content)) == content
        assert await self.depot.have(contents) == set(contents)
        return list(contents)

    async def attempt(self, parcel: Parcel | None = None, name: str = "attempt") -> Path:
        return Path(await self.depot.stage(name, parcel or Parcel({"given": (b"given", False)})))


@pytest.fixture
def go(tmp_path: Path) -> Callable[[Callable[[Town], Awaitable[None]]], None]:
    """Run something against an opened town."""

    def run(what: Callable[[Town], Awaitable[None]]) -> None:
        async def whole() -> None:
            town = Town(tmp_path)
            await town.depot.open()
            await what(town)
            await town.host.aclose()

        asyncio.run(whole())

    return run


Go = Callable[[Callable[[Town], Coroutine[Any, Any, None]]], None]


def test_a_tree_with_every_kind_of_name_arrives_as_it_was(go: Go) -> None:
    async def check(town: Town) -> None:
        await town.sends(town.tree())

    go(check)


def test_files_small_and_large_arrive_as_they_were(go: Go) -> None:
    async def check(town: Town) -> None:
        for name, size in (("empty", 0), ("small", 1000), ("large", (20 << 20) + 7)):
            (town.place / name).write_bytes(os.urandom(size))
        (town.place / "program").write_bytes(b"x")
        (town.place / "program").chmod(0o755)
        await town.sends(*(town.place / name for name in ("empty", "small", "large", "program")))

    go(check)


def test_an_attempt_sees_what_it_was_given_and_what_it_made_comes_home(go: Go) -> None:
    async def check(town: Town) -> None:
        (content,) = await town.sends(town.tree())
        parcel = Parcel(
            {"train.py": (b"pass", False), "bin/go": (b"#!", True)}, {"data": content}, ["out", "a/b"], {"saves": "states/k"}, {".sh": b"sh"}
        )
        path = await town.attempt(parcel)
        assert (path / "train.py").read_bytes() == b"pass" and os.access(path / "bin/go", os.X_OK)
        assert files.scan(path / "data") == content
        assert (path / "a/b").is_dir() and path.with_name("attempt.sh").read_bytes() == b"sh"
        (path / "saves" / "one").write_bytes(b"kept")
        os.rename(town.tree("made"), path / "out" / "made")
        (path / "out" / "weights").write_bytes(os.urandom(9 << 20))
        (path / "metrics.json").write_bytes(b"{}")
        harvest = await town.depot.take(str(path), [("out", True), ("metrics.json", False), ("absent", False)])
        assert harvest.changed == () and harvest.outputs["absent"] == Taken()
        outputs = {name: taken.content for name, taken in harvest.outputs.items() if taken.content}
        assert outputs == {"out": files.scan(path / "out"), "metrics.json": files.scan(path / "metrics.json")}
        assert await town.depot.keep(str(path), outputs) == set(outputs.values())
        for name, made in outputs.items():
            await town.depot.fetch(town.depot.path(made), harvest.outputs[name], str(town.place / "home" / name))
            assert files.scan(town.place / "home" / name) == made
        assert await town.depot.have(outputs.values()) == set(outputs.values())
        await town.depot.remove([str(path), f"{path}.sh"])
        assert not list((town.place / "there" / "attempts").iterdir())
        assert (town.place / "there" / "states" / "k" / "one").read_bytes() == b"kept"

    go(check)
