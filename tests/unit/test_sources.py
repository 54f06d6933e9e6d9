"""What `recipe.lock` decides about addresses: no network is asked where it has an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivers import install_line
from runner.errors import CannotRun
from runner.storage import sources
from runner.storage.workspace import Workspace


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """A bucket with one object, as a store of fsspec."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a.txt").write_text("a")
    return f"file://{tmp_path}/bucket"


def test_a_moving_address_is_resolved_once(tmp_path: Path, bucket: str) -> None:
    with Workspace.open(tmp_path) as ws:
        first = sources.resolve(ws, "s3", bucket, update=False)
        (tmp_path / "bucket" / "a.txt").write_text("bb")
        assert first is not None and sources.resolve(ws, "s3", bucket, update=False) == first
        assert json.loads((tmp_path / "recipe.lock").read_text()) == {bucket: first}
        assert sources.resolve(ws, "s3", bucket, update=True) != first


def test_a_commit_needs_no_lock_and_no_network(tmp_path: Path) -> None:
    with Workspace.open(tmp_path) as ws:
        assert (
            sources.resolve(ws, "hf", "hf://org/name@" + "ab" * 20, update=False)
            == "hf:" + "ab" * 20
        )
        assert not (tmp_path / "recipe.lock").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_a_damaged_lock_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.lock").write_text(text)
    with (
        Workspace.open(tmp_path) as ws,
        pytest.raises(CannotRun, match=r"cannot read .*recipe\.lock"),
    ):
        sources.resolve(ws, "hf", "hf://org/name", update=False)


def test_what_changed_since_it_was_resolved_is_not_taken_for_it(
    tmp_path: Path, bucket: str
) -> None:
    with Workspace.open(tmp_path) as ws:
        identity = sources.resolve(ws, "s3", bucket, update=False)
        assert identity is not None
        (tmp_path / "bucket" / "a.txt").write_text("bb")
        with pytest.raises(CannotRun, match="has changed since it was resolved") as error:
            sources.fetch(ws, "s3", bucket, identity, ())
        assert "--update" in error.value.fix
        assert not [path for path in (ws.home / "cache").rglob("*") if path.is_file()]
        now = sources.resolve(ws, "s3", bucket, update=True)
        assert now is not None
        assert (sources.fetch(ws, "s3", bucket, now, ()) / "a.txt").read_text() == "bb"


def test_another_query_is_asked_about_and_what_it_leads_to_is_not_taken_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "https://host/rows"
    monkeypatch.setattr(
        sources,
        "first_byte",
        lambda _, path, name: sources.Object(name, None, Path(path).read_text()),
    )
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 9)
    with Workspace.open(tmp_path) as ws:
        ws.addresses[address] = f"file://{tmp_path}/a"
        first = sources.resolve(ws, "s3", address, update=False)
        assert first is not None
        (tmp_path / "a").write_text("changed")
        assert sources.resolve(ws, "s3", address, update=False) == first  # nobody is asked again
        ws.addresses[address] = f"file://{tmp_path}/b"
        with pytest.raises(CannotRun, match="has changed since it was resolved"):
            sources.resolve(ws, "s3", address, update=False)
        assert sources.resolve(ws, "s3", address, update=True) != first


class Unversioned:
    """A client of fsspec whose server names no version: `key` has two bytes, `none` is empty."""

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, object]]:
        return {path: {"size": 0 if path == "none" else 2}}


def test_an_object_without_a_version_is_not_taken_for_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sources, "open_client", lambda _, address: (Unversioned(), address.rpartition("/")[2])
    )
    with Workspace.open(tmp_path) as ws:
        with pytest.raises(CannotRun, match="s3://b/key has no version") as error:
            sources.ask_identity(ws, "s3", "s3://b/key")
        assert "use the path of the copy" in error.value.fix
        assert sources.ask_identity(ws, "s3", "s3://b/none").startswith("etag:")


@pytest.mark.parametrize(
    ("address", "extra"),
    [("hf://a/b", "hub"), ("s3://b/k", "s3"), ("gs://b/k", "gcs"), ("https://h/f", "s3")],
)
def test_a_missing_client_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, extra: str
) -> None:
    def missing(*_asked: object) -> str:
        raise ModuleNotFoundError("No module named 'client'")

    monkeypatch.setattr(sources, "_ask_hub", missing)
    monkeypatch.setattr(sources, "_ask_store", missing)
    with (
        Workspace.open(tmp_path) as ws,
        pytest.raises(CannotRun, match="No module named 'client'") as caught,
    ):
        sources.ask_identity(ws, address.partition("://")[0], address)
    assert caught.value.fix == install_line(extra)


@pytest.mark.parametrize("word", ["1", "true", "ON", "yes"])
def test_a_hub_that_may_not_be_asked_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", word)
    with Workspace.open(tmp_path) as ws, pytest.raises(CannotRun, match="HF_HUB_OFFLINE is set"):
        sources.ask_identity(ws, "hf", "hf://org/name")
