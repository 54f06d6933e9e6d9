"""A folder keeps the promises of a shared store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.errors import Infrastructure
from runner.settings import StoreSettings
from runner.storage.buckets import opening as buckets
from runner.storage.buckets.bucket import Bucket
from runner.storage.content.objects import Objects
from runner.storage.remote.remote import Remote
from tests.contract.artifact_store_contract import *  # noqa: F403
from tests.contract.artifact_store_contract import file, key, names, trace


class Files:
    def __init__(self, root: Path) -> None:
        self.root = root

    def bucket(self) -> Bucket:
        return buckets.open(StoreSettings("", str(self.root)), Path("/nowhere"))

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()


@pytest.fixture
def raw(tmp_path: Path) -> Files:
    (tmp_path / "store").mkdir()
    return Files(tmp_path / "store")


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(Infrastructure, match="is not a directory") as caught:
        Remote(buckets.open(StoreSettings("", "typo"), tmp_path)).check()
    assert "create the" in caught.value.fix
    assert not (tmp_path / "typo").exists()


def test_a_relative_folder_is_below_the_workspace(tmp_path: Path) -> None:
    assert buckets.open(StoreSettings("", "a/../store"), tmp_path).url == str(tmp_path / "store")
    assert buckets.open(StoreSettings("", "file:///x/y"), tmp_path).url == "/x/y"
    assert buckets.open(StoreSettings("", "~/s"), tmp_path).url == os.path.expanduser("~/s")


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::s3://b/x",
        "zip://a::file:///b",
        "http://x/y",
        "memory://x",
        "s3://",
        "s3://b/../c",
        "reference://x",
        "gs://a//b",
    ],
)
def test_only_known_kinds_of_address_are_followed(url: str, tmp_path: Path) -> None:
    from runner.errors import Invalid

    with pytest.raises(Invalid) as caught:
        buckets.open(StoreSettings("", url), tmp_path)
    assert caught.value.problems[0].fix


def test_a_link_in_a_store_is_not_followed(
    raw: Files, here: Objects, there: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, b"the real one")
    secret = tmp_path / "secret"
    secret.write_bytes(b"the real one")
    raw.put(f"objects/{content[2:4]}/.keep", b"")
    (raw.root / "objects" / content[2:4] / content[2:]).symlink_to(secret)
    with pytest.raises(Infrastructure):
        Remote(raw.bucket()).fetch(content, there)


def test_what_a_dead_writer_left_goes_after_a_day(raw: Files) -> None:
    raw.put("partial/host-1-2-3", b"half")
    os.utime(raw.root / "partial" / "host-1-2-3", (1, 1))
    raw.put("partial/host-4-5-6", b"being written")
    Remote(raw.bucket()).mark()
    assert names(raw, "partial/") == ["partial/host-4-5-6"]


def test_a_folder_that_cannot_be_written_says_so(
    raw: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(raw.root))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Infrastructure, match="Permission denied"):
        Remote(raw.bucket()).bucket.write("x", b"1")


def test_without_links_the_first_trace_stays_too(
    raw: Files, here: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    remote = Remote(raw.bucket())
    a, b = file(here, tmp_path, b"a"), file(here, tmp_path, b"b")
    assert remote.tell(trace(1, a), {}) == trace(1, a)
    assert remote.tell(trace(1, b), {}) == trace(1, a)
    assert set(remote.lookup([key(1)])) == {key(1)}
