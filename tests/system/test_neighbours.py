"""Promise: what a host and this machine both see does not travel, and nothing is taken for what it is not."""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from drivers.local import LocalHost
from runner.hosts.link.wire import Meter, Wire
from runner.hosts.transfer import download
from runner.hosts.transfer.host_store import HostStore
from runner.storage.content.files import scan


def between(tmp_path: Path, story: Callable[[HostStore], Awaitable[None]]) -> None:
    """A host whose root is beside our folder, on the same disk."""

    async def told() -> None:
        host_store = HostStore(
            Wire(LocalHost(tmp_path / "agent"), str(tmp_path / "there")),
            folder=str(tmp_path / "here"),
        )
        await host_store.open()
        await story(host_store)
        await host_store.aclose()

    asyncio.run(told())


def travelling(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of files that go over the wire, either way."""
    found: list[int] = []
    monkeypatch.setattr(Meter, "add", lambda _self, size: found.append(size))
    return found


def tree(top: Path) -> Path:
    (top / "deep" / "empty").mkdir(parents=True)
    (top / "deep" / "large.bin").write_bytes(os.urandom(3 << 20))
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "link").symlink_to("run.sh")
    return top


def test_a_host_of_this_disk_is_known_and_leaves_no_trace_of_the_question(tmp_path: Path) -> None:
    async def story(host_store: HostStore) -> None:
        assert host_store.shared_disk.host_sees_workspace and host_store.shared_disk.sees_host_root
        assert not list((tmp_path / "here").iterdir())
        assert not glob.glob(f"{tmp_path}/there/**/word-*", recursive=True, include_hidden=True)

    between(tmp_path, story)


def test_a_host_that_sees_another_disk_at_our_path_is_no_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "runner.hosts.transfer.shared_disk._write",
        lambda path, _word: Path(path).parent.mkdir() or Path(path).write_text("of another disk"),
    )

    async def story(host_store: HostStore) -> None:
        assert (
            not host_store.shared_disk.host_sees_workspace
            and await host_store.shared_disk.find_same([str(tmp_path)]) == set()
        )

    between(tmp_path, story)


def test_a_path_is_used_in_place_only_where_it_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")

    async def story(host_store: HostStore) -> None:
        paths = [str(one), str(other), str(tmp_path / "absent"), str(tmp_path)]
        assert await host_store.shared_disk.find_same(paths) == {
            str(one),
            str(other),
            str(tmp_path),
        }
        monkeypatch.setattr(
            "runner.hosts.transfer.shared_disk.marks",
            lambda path: [1, 2, 3, 4] if path == str(one) else [],
        )
        assert await host_store.shared_disk.find_same(paths) == set(), (
            "an inode, a size or a time differs"
        )

    between(tmp_path, story)


def test_a_file_that_another_node_links_meanwhile_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one"
    one.write_text("1")
    asked: list[str] = []

    async def ask(wire: Wire, verb: str, *words: Any, **more: Any) -> Any:
        if verb == "same":
            asked.append(verb)
            if len(asked) == 1:
                os.link(one, tmp_path / "link")
        return await real_ask(wire, verb, *words, **more)

    real_ask = Wire.ask
    monkeypatch.setattr(Wire, "ask", ask)

    async def story(host_store: HostStore) -> None:
        assert await host_store.shared_disk.find_same([str(one)]) == {str(one)}

    between(tmp_path, story)
    assert len(asked) == 2


def test_trees_and_files_go_to_a_neighbour_and_come_home_without_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tree(tmp_path / "tree"), tmp_path / "model.bin"
    file.write_bytes(os.urandom(2 << 20))
    sources = {scan(path): str(path) for path in (folder, file)}
    bytes_sent = travelling(monkeypatch)

    async def story(host_store: HostStore) -> None:
        await host_store.send(sources)
        assert await host_store.find_existing(list(sources)) == set(sources)
        assert sum(bytes_sent) < 10_000, "only links and folders travel"
        for content, source in sources.items():
            at = host_store.path(content)
            taken = (
                await host_store.hash_outputs(os.path.dirname(at), [os.path.basename(at)])
            ).outputs[os.path.basename(at)]
            assert taken.content == content
            target = tmp_path / f"home-{os.path.basename(source)}"
            await host_store.fetch(at, taken, str(target))
            assert scan(target) == content
        assert sum(bytes_sent) < 10_000

    between(tmp_path, story)


def test_what_a_disk_shows_wrongly_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's file system may show older bytes for a while."""
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(2 << 20))
    content = scan(file)
    stale = tmp_path / "stale"
    stale.write_bytes(file.read_bytes()[:-1])

    async def story(host_store: HostStore) -> None:
        draw = host_store.shared_disk.copy_to_host
        monkeypatch.setattr(
            type(host_store.shared_disk),
            "copy_to_host",
            lambda _self, sources: draw(dict.fromkeys(sources, str(stale))),
        )
        await host_store.send({content: str(file)})
        assert scan(Path(host_store.path(content))) == content
        at = host_store.path(content)
        monkeypatch.setattr(
            download, "copy", lambda _source, target: Path(target).write_bytes(stale.read_bytes())
        )
        taken = (
            await host_store.hash_outputs(os.path.dirname(at), [os.path.basename(at)])
        ).outputs[os.path.basename(at)]
        await host_store.fetch(at, taken, str(tmp_path / "home"))
        assert scan(tmp_path / "home") == content

    between(tmp_path, story)
