"""Where a step may start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps.placement import Placement
from runner.hosts.place.capacity import GpuPick
from runner.planning.plan import LOCAL
from runner.planning.step import ResourceSpec, StepSpec

SPEC = StepSpec("", "s", {}, resources=ResourceSpec(cpus=2))


def host(name: str, *, room: bool = True, silent: float = 0.0, pick: Any = None) -> Any:
    async def picked(_count: int) -> Any:
        return pick

    capacity = Of(pick=picked, devices=("g0", "g1"))
    return Of(
        name=name,
        elsewhere="" if name == "local" else name,
        has_room=lambda _wants: room,
        contact=Of(silent=silent),
        capacity=capacity,
    )


class World:
    """A pool, and what its steps are told."""

    def __init__(self, *places: Any, **more: Any) -> None:
        self.priced, self.hopes, self.coming = False, False, False
        self.absent, self.holders, self.arriving = list[str](), list[Any](), False
        vars(self).update(more)
        self.brought, self.failed, self.again = list[Any](), list[Any](), list[Any]()
        self.said, self.rests, self.local = list[str](), list[Any](), list[bool]()

        def places_of(_spec: Any, *, local: bool) -> list[Any]:
            self.local.append(local)
            return [*places]

        made = {0: Of(outputs={"o": "f1"})}
        self.made = made
        steps = Of(made=made, forget_made=made.pop, plan=Of(nodes=[Of(id="a")]))
        schedule = Of(
            rest=lambda *words: self.rests.append(words),
            make_again=lambda *words: self.again.append(words),
        )
        pool = Of(
            places_of=places_of,
            is_priced=self.priced,
            head=Of(choose_places=lambda _spec, found: found[:0]),
            lost=["h9: gone"],
            name="vastai",
            may_get_place=lambda _spec: self.hopes,
        )
        outputs = Of(
            absent=lambda _node: self.absent,
            holders=lambda _contents, _wants=None: self.holders,
            bring=lambda *words: self.brought.append(words),
            are_coming=lambda _contents: self.arriving,
        )
        parts: list[Any] = [
            steps,
            schedule,
            Of(say=self.said.append),
            pool,
            outputs,
            Of(are_coming=self.coming),
            Of(fail_unstarted=lambda *words: self.failed.append(words)),
        ]
        self.placement = Placement(*parts)
        self.node: Any = Of(id="b", flags=0, upstream=[Of(producer=0, output="o")])

    def find(self, spec: StepSpec = SPEC) -> Any:
        found: Any = self.placement.find(self.node, spec)
        return found.name if found is not None else None

    def settle(self) -> bool:
        return self.placement.settle_unplaced(self.node, SPEC)


def test_a_step_starts_where_there_is_room_and_the_host_answers() -> None:
    full, silent, well = host("h1", room=False), host("h2", silent=5), host("h3")
    assert World(full, silent, well).find() == "h3" and World(full, silent).find() == "h2"
    assert World(full, host("h4", room=False)).find() is None and World().find() is None


def test_this_machine_alone_is_not_asked_for_room_but_a_rented_one_is() -> None:
    assert World(host("local", room=False)).find() == "local"
    assert World(host("local", room=False), priced=True).find() is None
    assert World(host("h1", room=False)).find() is None


def test_a_step_of_this_machine_is_placed_here() -> None:
    world = World(host("local"))
    world.node.flags = LOCAL
    assert world.find() == "local" and world.local == [True]


def test_a_step_goes_where_its_inputs_are_or_they_come_here() -> None:
    holder = host("h2")
    world = World(host("h1"), absent=["f1"], holders=[holder])
    assert world.find() == "h2" and not world.brought
    world = World(host("h1"), absent=["f1"])
    assert world.find() is None and world.brought == [("b", ["f1"])]
    world = World(host("local"), absent=["f1"], holders=[holder])
    world.node.flags = LOCAL
    assert world.find() is None and world.brought == [("b", ["f1"])]


def test_a_step_of_several_nodes_needs_as_many_hosts() -> None:
    assert World(host("h1"), host("h2")).find(SPEC._replace(nodes=2)) is None


def test_an_input_that_is_nowhere_any_more_is_made_again() -> None:
    world = World(absent=["f1"])
    assert world.settle() and not world.failed
    assert world.again == [("a", "its output was on a lost host")] and not world.made


@pytest.mark.parametrize(
    "more",
    [
        {"coming": True},
        {"hopes": True},
        {"absent": ["f1"], "holders": [host("h1")], "arriving": True},
    ],
)
def test_a_step_waits_while_a_host_or_its_input_may_come(more: dict[str, Any]) -> None:
    world = World(**more)
    assert not world.settle() and not world.failed and not world.again


@pytest.mark.parametrize(
    ("priced", "fix"), [(True, "list the offers with `recipe offers --driver vastai`"), (False, "")]
)
def test_a_step_fails_when_there_will_never_be_a_host(priced: bool, fix: str) -> None:
    world = World(priced=priced)
    assert world.settle()
    ((id, cause),) = world.failed
    assert (id, cause.words) == ("b", "no host is left for the step: h9: gone")
    assert cause.fix.startswith(fix) and bool(cause.fix) is priced


def test_waiting_for_gpus_that_others_use_is_said_once_a_host() -> None:
    busy = host("h1", pick=GpuPick((), 5.0, 2))
    free = host("h1", pick=GpuPick(("g0",), 0.0, 0))  # type: ignore[arg-type]
    world = World()
    pick = world.placement.pick_gpus
    assert asyncio.run(pick("b", free, 1)) == ("g0",) and not world.rests
    assert asyncio.run(pick("b", busy, 2)) == () == asyncio.run(pick("c", busy, 2))
    assert world.said == ["waiting for 2 GPUs on h1: 2 of 2 are in use by another run"]
    assert world.rests == [("b", 5.0), ("c", 5.0)]
    one = host("local", pick=GpuPick((), 5.0, 1))
    asyncio.run(pick("b", one, 1))
    assert world.said[1] == "waiting for a GPU: 1 of 2 is in use by another run"
    ours = host("h2", pick=GpuPick((), 5.0, 0))
    asyncio.run(pick("b", ours, 1))
    assert len(world.said) == 2
