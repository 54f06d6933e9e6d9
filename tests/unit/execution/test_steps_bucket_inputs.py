"""Inputs in buckets go to a host without passing this machine, where they can."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps import bucket_inputs
from runner.execution.steps.bucket_inputs import BucketInputs
from runner.hosts.place.staging import SMALL
from runner.hosts.transfer.pulling import CannotPull

LARGE = SMALL + 1


class World:
    """A host that may read a bucket, and one input there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.size, self.pulled = root, LARGE, list[Any]()
        self.has: set[str] = set()
        self.can_pull, self.passes, self.said = True, False, list[str]()
        self.learned: list[Any] = []
        self.lessons, self.looks, self.signs = 0, list[str](), 0
        self.copy = root / "copies" / "x"
        config = Of()
        ws: Any = Of(home=root, config=config, cache=Of(content_of=lambda _path: "f-copy"))
        ws.write = self._write
        facts = Of(takes={"asked": "etag"})
        masker = Of(learn=self._learn)
        survey: Any = Of(facts=facts)
        commits: Any = Of(say=self.said.append, masker=masker)
        monkeypatch.setattr(bucket_inputs, "denying_drivers", lambda _config, _name: ())
        monkeypatch.setattr(bucket_inputs, "cache_path", lambda *_words: self.copy)
        self.inputs = BucketInputs(ws, survey, commits, "vastai")
        monkeypatch.setattr(self.inputs, "_sign_objects", self._sign)
        self.place: Any = Of(name="h1", folder=self)
        self.source = Of(
            in_bucket=True, lookup_key="asked", address="s3://b/x", only=(), name="data"
        )

    def _learn(self, secrets: list[Any]) -> None:
        self.lessons += 1
        self.learned += secrets

    def _sign(self, *_words: object) -> Any:
        self.signs += 1
        return Of(size=self.size)

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def holds(self, content: str) -> bool:
        return content in self.has

    async def look_up(self, contents: list[str]) -> None:
        self.looks += contents
        self.has.update(content for content in contents if content == "f-there")

    async def pull(self, source: Any, known: str, learn: Any) -> str:
        self.pulled.append(known)
        await asyncio.sleep(0)
        learn(["secret"])
        if self.passes:
            raise CannotPull("no way there")
        self.has.add("f-1")
        return "f-1"

    def bring(self) -> dict[str, str]:
        directory: Any = Of(objects={})
        node: Any = Of(takes=[self.source])
        asyncio.run(self.inputs.bring(node, directory, self.place))
        found: dict[str, str] = directory.objects
        return found

    def note(self) -> Path:
        (found,) = (self.root / "cache").glob("content-*")
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_large_input_is_pulled_once_and_remembered(world: World) -> None:
    assert world.bring() == {"data": "f-1"} and world.bring() == {"data": "f-1"}
    assert world.pulled == [""] and json.loads(world.note().read_text()) == ["f-1", LARGE]
    assert world.learned == ["secret"] and world.looks == []


def test_what_another_host_had_is_looked_for_there(world: World) -> None:
    world.bring()
    world.note().write_text(json.dumps(["f-there", LARGE]))
    world.has.clear()
    assert world.bring() == {"data": "f-there"} and len(world.pulled) == 1
    world.note().write_text(json.dumps(["f-gone", LARGE]))
    assert world.bring() == {"data": "f-1"} and world.pulled[1:] == ["f-gone"]


def test_a_small_input_goes_through_this_machine(world: World) -> None:
    world.size = SMALL
    assert world.bring() == {} and not world.pulled
    world.copy.parent.mkdir(parents=True)
    world.copy.write_text("x")
    assert world.bring() == {} and not world.pulled and world.signs == 1


def test_a_folder_that_this_machine_has_is_large_for_all_that_is_known(world: World) -> None:
    world.copy.mkdir(parents=True)
    assert world.bring() == {"data": "f-1"} and world.pulled == ["f-copy"]


def test_an_input_that_two_steps_want_at_once_is_pulled_once(world: World) -> None:
    node: Any = Of(takes=[world.source])
    directories: list[Any] = [Of(objects={}), Of(objects={})]

    async def bring() -> None:
        await asyncio.gather(*[world.inputs.bring(node, each, world.place) for each in directories])

    asyncio.run(bring())
    assert [each.objects for each in directories] == [{"data": "f-1"}] * 2
    assert world.pulled == [""]


def test_what_is_known_of_an_input_is_marked_as_used(world: World) -> None:
    world.bring()
    os.utime(world.note(), (1, 1))
    world.bring()
    assert world.note().stat().st_mtime > 1
    world.copy.mkdir(parents=True)
    os.utime(world.copy.parent, (1, 1))
    world.bring()
    assert world.copy.parent.stat().st_mtime > 1


@pytest.mark.parametrize(("denying", "secret"), [((), True), (("vastai",), False)])
def test_urls_have_secrets_only_if_the_driver_may_send_them(
    denying: tuple[str, ...], secret: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    ws: Any = Of(config=None)
    none: Any = None
    monkeypatch.setattr(bucket_inputs, "denying_drivers", lambda _config, _name: denying)
    monkeypatch.setattr(
        "runner.storage.signed.sign_objects", lambda *_words, secret: found.append(secret)
    )
    source: Any = world.source
    BucketInputs(ws, none, none, "vastai")._sign_objects(source, "etag")
    assert found == [secret]


def test_an_input_that_cannot_be_pulled_passes_this_machine_and_is_not_tried_again(
    world: World,
) -> None:
    world.passes = True
    assert world.bring() == {} == world.bring() and len(world.pulled) == 1
    assert world.said == ["copying s3://b/x to h1 through this machine: no way there"]


def test_other_inputs_and_hosts_that_cannot_pull_are_left_alone(world: World) -> None:
    world.source.in_bucket = False
    assert world.bring() == {}
    world.source.in_bucket, world.can_pull = True, False
    assert world.bring() == {} and not world.pulled


def test_at_most_so_many_addresses_are_learned(world: World) -> None:
    world.inputs._learn(["x"] * (bucket_inputs.LEARNED + 5))  # type: ignore[list-item]
    world.inputs._learn(["y"])  # type: ignore[list-item]
    assert world.learned == ["x"] * bucket_inputs.LEARNED and world.lessons == 1
