"""Inputs in buckets go to a host without passing this machine, where they can."""

from __future__ import annotations

import asyncio
import json
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
        self.copy = root / "copies" / "x"
        config = Of()
        ws: Any = Of(home=root, config=config, cache=Of(content_of=lambda _path: "f-copy"))
        ws.write = self._write
        facts = Of(takes={"asked": "etag"})
        masker = Of(learn=self.learned.extend)
        survey: Any = Of(facts=facts)
        commits: Any = Of(say=self.said.append, masker=masker)
        monkeypatch.setattr(bucket_inputs, "denying_drivers", lambda _config, _name: ())
        monkeypatch.setattr(bucket_inputs, "cache_path", lambda *_words: self.copy)
        self.inputs = BucketInputs(ws, survey, commits, "vastai")
        monkeypatch.setattr(self.inputs, "_sign_objects", lambda *_words: Of(size=self.size))
        self.place: Any = Of(name="h1", folder=self)
        self.source = Of(
            in_bucket=True, lookup_key="asked", address="s3://b/x", only=(), name="data"
        )

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def holds(self, content: str) -> bool:
        return content in self.has

    async def look_up(self, contents: list[str]) -> None:
        self.has.update(content for content in contents if content == "f-there")

    async def pull(self, source: Any, known: str, learn: Any) -> str:
        self.pulled.append(known)
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
    assert world.learned == ["secret"]


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
    assert world.bring() == {} and not world.pulled


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
    assert world.learned == ["x"] * bucket_inputs.LEARNED
