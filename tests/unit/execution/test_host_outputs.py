"""Outputs that stayed on their hosts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import HostLost, Unreachable
from runner.errors import CannotRun, StoreUnavailable
from runner.execution.steps.bell import Bell
from runner.execution.steps.host_outputs import HostOutputs
from runner.planning.judge import StepResult
from tests.virtual import virtual


class Host:
    """A host that has some contents."""

    def __init__(
        self, has: set[str], *, fails: Exception | None = None, large: bool = True
    ) -> None:
        self.has, self.fails, self.large, self.brought = has, fails, large, list[str]()
        self.folder = self

    def fits(self, _wants: object) -> bool:
        return self.large

    def holds(self, content: str) -> bool:
        return content in self.has

    async def download_content(self, content: str) -> None:
        self.brought.append(content)
        await asyncio.sleep(10)
        if self.fails is not None:
            raise self.fails


class World:
    def __init__(self, *places: Host, away: bool = True, here: tuple[str, ...] = ()) -> None:
        self.lost, self.refused = list[Any](), list[Any]()
        self.bell, self.rings = Bell(), 0
        self.bell.wake = self._wake  # type: ignore[method-assign]
        parts: list[Any] = [
            Of(has=lambda content: content in here),
            Of(made={0: StepResult(True, {"o": "f1"}, {}), 1: StepResult(True, {"p": "f2"}, {})}),
            Of(is_remote=away, places=[*places]),
            Of(lose=lambda *words: self.lost.append(words)),
            Of(refuse=lambda id, cause: self.refused.append((id, *cause))),
        ]
        self.outputs = HostOutputs(*parts, self.bell)
        ups = [Of(producer=0, output="o"), Of(producer=1, output="p"), Of(producer=1, output="q")]
        self.node: Any = Of(upstream=ups)

    def _wake(self) -> None:
        self.rings += 1


def test_what_a_step_takes_and_is_not_here_is_absent() -> None:
    assert World().outputs.absent(World().node) == ["f1", "f2"]
    assert World(here=("f1",)).outputs.absent(World().node) == ["f2"]
    assert World(away=False).outputs.absent(World().node) == []


def test_a_holder_has_all_of_it_and_room_for_the_step() -> None:
    both, one, small = Host({"f1", "f2"}), Host({"f1"}), Host({"f1", "f2"}, large=False)
    assert World(both, one, small).outputs.holders(["f1", "f2"]) == [both]
    assert World(both, one, small).outputs.holders(["f1"]) == [both, one]


def test_each_content_comes_once_while_other_steps_run() -> None:
    async def bring() -> None:
        world.outputs.bring("b", ["f1", "f2"])
        world.outputs.bring("c", ["f1"])
        await asyncio.sleep(1)
        assert world.outputs.are_coming(["f1"]) and not world.outputs.are_coming(["f2"])
        await world.bell.settle(20)
        assert not world.outputs.are_coming(["f1"])

    host = Host({"f1"})
    world = World(host)
    with virtual() as loop:
        loop.run_until_complete(bring())
    assert host.brought == ["f1"] and not world.refused and not world.lost


@pytest.mark.parametrize(
    ("error", "refused", "lost"),
    [
        (HostLost("gone"), [], 1),
        (CannotRun("full", fix="free"), [("b", "error", "full", "free")], 0),
        (Unreachable("far"), [("b", "driver", "far", "")], 0),
        (StoreUnavailable("no answer"), [], 0),  # the step is judged again, and asks again
    ],
)
def test_a_step_whose_input_cannot_come_is_refused_or_its_host_is_lost(
    error: Exception, refused: list[Any], lost: int
) -> None:
    async def bring() -> None:
        world.outputs.bring("b", ["f1"])
        await world.bell.settle(20)

    world = World(Host({"f1"}, fails=error))
    with virtual() as loop:
        loop.run_until_complete(bring())
    assert world.refused == refused and len(world.lost) == lost
    assert world.rings == 1 and not world.outputs.are_coming(["f1"])
