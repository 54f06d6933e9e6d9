"""Machines that are rented, replaced and given back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import HostLost, NoCapacity
from runner.errors import StoreUnavailable
from runner.execution.steps import renting
from runner.execution.steps.bell import Bell
from runner.execution.steps.renting import Machines
from runner.execution.steps.run_schedule import RunSchedule
from runner.planning.schedule import Scheduler, Task
from runner.planning.step import TEMPORARY
from tests.unit.execution.fakes import Journal
from tests.virtual import virtual


class Pool:
    """A pool of machines of one kind."""

    def __init__(self) -> None:
        self.is_remote = self.is_priced = True
        self.moves, self.refused = list[Any](), dict[Any, str]()
        self.limit: float | None = None
        self.leases: object = object()
        self.is_full = self.over = False
        self.rented, self.given_back, self.replaced = list[Any](), list[Any](), list[Any]()
        self.have, self.spares, self.leaving_ones = 0, list[Any](), list[Any]()
        self.ending_ones, self.unused, self.allocated = list[Any](), list[Any](), 0
        self.fails: Exception | None = None
        self.gives = True
        self.together: set[str] = set()
        self.head = Of(count_workers=lambda spec: spec)
        self.inventory = Of(
            coming=[],
            count_machines=lambda need: self.have + self.inventory.coming.count(need),
            find_spare=lambda queued, _places: self.spares,
            mark_leaving=lambda: self.leaving_ones,
            take_ending=lambda: self.ending_ones,
            find_unused_leases=lambda: self.unused,
        )

    def money_is_over(self) -> bool:
        return self.over

    def needs_one_zone(self, spec: int) -> bool:
        return spec > 1

    def runs_locally(self, spec: int) -> bool:
        return spec == 0

    def need(self, spec: int) -> str:
        return "gpu"

    async def rent(self, need: str, ready: Any) -> None:
        self.rented.append(need)
        await asyncio.sleep(5)
        if self.fails is not None:
            raise self.fails
        self.have += 1

    def refuse(self, need: str, why: str) -> None:
        self.refused[need] = why

    async def release(self, place: Any, reason: str) -> bool:
        self.given_back.append((place.name, reason))
        if self.fails is not None:
            raise self.fails
        return self.gives

    async def replace(self, place: Any) -> list[Any]:
        self.replaced.append(place.name)
        await asyncio.sleep(5)
        if self.fails is not None:
            raise self.fails
        return [Of(name="h2")]

    async def allocate(self) -> list[Any]:
        self.allocated += 1
        return [Of(name="h2")]


class Host(Of):
    """A host that is one of the keys of a mapping."""

    __hash__ = object.__hash__


class World:
    """A run of two steps, each of which wants a machine of its own."""

    def __init__(self, most: int = 0, crews: tuple[int, ...] = (1, 1)) -> None:
        self.pool, self.said, self.spent = Pool(), list[str](), list[float]()
        self.journal, self.bell = Journal(), Bell()
        self.schedule = RunSchedule(
            Scheduler([Task("a"), Task("b")], {}, jobs=4, keep_going=False), self.journal
        )
        self.crews = dict(zip("ab", crews, strict=True))
        self.setups: list[str] = []
        self.coming = False
        self.local: set[str] = set()
        self.upstream: list[Any] = []
        self.stopped: list[Any] = []
        nodes = [Of(id="a", outputs=[("o", "o", TEMPORARY)], upstream=[])]
        steps = Of(
            todo={"a", "b"},
            is_local=lambda id: id in self.local,
            spec=lambda id: self.crews[id],
            node=lambda _id: Of(upstream=self.upstream),
            plan=Of(nodes=nodes),
            survey=Of(request=Of(current_python=False)),
            left_on_hosts=lambda _objects: set(),
        )

        async def setup() -> None:
            self.setups.append("")

        self.stopper = Of(money_is_spent=self.spent.append, is_stopping=False)
        self.running: dict[str, Any] = {}
        parts: list[Any] = [
            Of(delivers=False, objects=None),
            self.pool,
            steps,
            self.schedule,
            self.journal,
            Of(say=self.said.append, run="r"),
            self.running,
            Of(of=lambda _place: Of(setup=setup)),
            Of(places=set),
            self.stopper,
            self.bell,
        ]
        self.machines = Machines(*parts, most_for_a_need=most)

    def run(self, place: Any, *, stopped: bool = False) -> None:
        async def stop() -> None:
            pass

        def note(grace: Any) -> Any:
            self.stopped.append(grace)
            return stop()

        self.running["a"] = Of(id="a", place=Of(members=[place]), stop_asked=stopped, stop=note)

    def queue(self, *ids: str) -> None:
        for id in ids:
            self.schedule.judge(id, "run", "")


def act(world: World, *, looks: int = 1, seconds: float = 0.0) -> None:
    async def look() -> None:
        for _ in range(looks):
            world.machines.rent()
            await asyncio.sleep(0.3)
        await world.bell.settle(seconds)
        world.coming = world.machines.are_coming
        world.bell.cancel_background()
        await asyncio.sleep(0)

    world.machines._looked = 0.0  # each loop begins at the same time
    with virtual() as loop:
        loop.run_until_complete(look())


@pytest.mark.parametrize(
    ("queued", "most", "crews", "rented"),
    [
        ("", 2, (1, 1), 0),
        ("a", 2, (1, 1), 1),
        ("ab", 2, (1, 1), 2),
        ("ab", 0, (1, 1), 1),
        ("ab", 1, (1, 3), 3),
    ],
)
def test_machines_are_rented_for_queued_steps_up_to_the_most_at_once(
    queued: str, most: int, crews: tuple[int, int], rented: int
) -> None:
    world = World(most, crews)
    world.queue(*queued)
    act(world, looks=3)
    assert world.pool.rented == ["gpu"] * rented
    assert world.coming is bool(rented)
    assert world.pool.together == ({"gpu"} if 3 in crews else set())


def test_what_is_there_or_coming_is_not_rented_again() -> None:
    world = World(1)
    world.queue("a")
    act(world, looks=3, seconds=20)
    assert world.pool.rented == ["gpu"] and not world.coming
    act(world, looks=3)
    assert world.pool.rented == ["gpu"] and not world.pool.inventory.coming


@pytest.mark.parametrize("case", ["paused", "refused", "full", "local", "stays", "here"])
def test_nothing_is_rented_for_a_step_that_needs_no_machine_now(case: str) -> None:
    world = World(2)
    world.queue("a")
    if case == "paused":
        world.schedule.pause()
    if case == "refused":
        world.pool.refused["gpu"] = "none"
    if case == "full":
        world.pool.is_full = True
    if case == "local":
        world.local = {"a", "b"}
    if case == "stays":
        world.crews = {"a": 0, "b": 0}
    if case == "here":
        world.pool.is_remote = False
    act(world)
    assert not world.pool.rented


def test_a_machine_that_has_an_output_for_a_step_here_is_needed_too() -> None:
    world = World(2)
    world.queue("b")
    world.local = {"b"}
    act(world)
    assert world.pool.rented == []
    world.upstream = [Of(producer=0, output="o")]
    act(world)
    assert world.pool.rented == ["gpu"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoCapacity("none left"), "none left"),
        (ZeroDivisionError("x"), "internal error of recipe: ZeroDivisionError: x"),
    ],
)
def test_a_need_that_cannot_be_met_is_refused_and_not_asked_for_again(
    error: Exception, words: str
) -> None:
    world = World(1)
    world.pool.fails = error
    world.queue("a")
    act(world, looks=3, seconds=20)
    assert world.pool.refused == {"gpu": words} and world.pool.rented == ["gpu"]
    assert not world.machines.are_coming


def test_machines_without_use_are_given_back_and_what_fails_is_said() -> None:
    world = World()
    world.pool.spares = [(Of(name="h1"), "idle")]
    act(world, seconds=1)
    assert world.pool.given_back == [("h1", "idle")] and not world.said
    world.pool.gives = False
    act(world, seconds=1)
    assert "h1 is not released yet" in world.said[0]
    world.pool.fails = NoCapacity("down")
    act(world, seconds=1)
    assert "cannot release h1: down; try again with `recipe reap`" in world.said[1]


def test_the_limit_of_cost_is_told_to_who_stops() -> None:
    world = World()
    world.pool.limit, world.pool.over = 3.0, True
    act(world)
    assert world.spent == [3.0]
    world.pool.over = False
    act(world)
    world.pool.limit, world.pool.over = None, True
    act(world)
    world.pool.limit, world.pool.leases = 3.0, None
    act(world)
    assert world.spent == [3.0]


def test_what_runs_on_a_machine_that_is_taken_away_saves_once() -> None:
    world = World()
    place: Any = Of(name="h1", notice="soon")
    world.run(place)
    world.pool.leaving_ones = [place]
    act(world, seconds=1)
    assert world.stopped == ["soon"]
    assert world.said == [
        "preemption notice for h1: a is saving a checkpoint and will resume on another host"
    ]
    world.run(place, stopped=True)
    act(world, seconds=1)
    world.run(Of(name="h9"))
    act(world, seconds=1)
    assert world.stopped == ["soon"]


def test_a_lost_host_is_replaced_once_and_all_hosts_of_a_group_that_are_gone() -> None:
    async def lose() -> None:
        world.machines.lose(place, HostLost("no answer"))
        world.machines.lose(place, HostLost("no answer"))
        assert world.machines.are_coming
        await world.bell.settle(20)

    world = World()
    place: Any = Host(name="h1", lost="", lost_members={})
    with virtual() as loop:
        loop.run_until_complete(lose())
    assert world.pool.replaced == ["h1"] and place.lost == "no answer"
    assert world.said == ["lost host h1: no answer", "h2 replaces h1"]
    assert len(world.setups) == 1 and not world.machines.are_coming
    first, second = Host(name="n1", lost=""), Host(name="n2", lost="")
    place = Host(name="group", lost="", lost_members={second: "off"})
    with virtual() as loop:
        loop.run_until_complete(lose())
    assert second.lost == "off" and not first.lost and not place.lost


def test_a_host_that_cannot_be_replaced_is_said() -> None:
    async def lose() -> None:
        world.machines.lose(place, HostLost("gone"))
        await world.bell.settle(20)

    world = World()
    world.pool.fails = NoCapacity("no other")
    place: Any = Host(name="h1", lost="", lost_members={})
    with virtual() as loop:
        loop.run_until_complete(lose())
    assert world.said == ["lost host h1: gone", "no other"] and not world.machines.are_coming


@pytest.mark.parametrize(
    ("case", "allocated"), [("", 1), ("paused", 0), ("stopping", 0), ("here", 0), ("early", 0)]
)
def test_the_next_allocation_is_asked_for_before_one_ends(case: str, allocated: int) -> None:
    world = World()
    world.pool.is_priced = False
    place: Any = Of(name="h1", lost="", leaving="its lease ends", notice=1)
    world.pool.ending_ones, world.pool.unused = [place], [place]
    world.pool.leaving_ones = [] if case == "early" else [place]
    if case == "paused":
        world.schedule.pause()
    if case == "stopping":
        world.stopper.is_stopping = True
    if case == "here":
        world.local = {"a", "b"}
    act(world, seconds=20)
    assert world.pool.allocated == allocated
    assert world.pool.given_back == ([] if case == "early" else [("h1", "its lease ends")])
    assert world.said == (["h2 replaces h1"] if allocated else [])


@pytest.mark.parametrize(("delivers", "priced", "more"), [(True, False, True), (True, True, False)])
def test_moves_of_leases_are_noted_with_what_another_worker_needs(
    monkeypatch: pytest.MonkeyPatch, delivers: bool, priced: bool, more: bool
) -> None:
    monkeypatch.setattr(renting, "log_remote", lambda *words: logged.append(words[2:]))
    logged: list[Any] = []
    world = World()
    world.machines._ws.delivers = delivers  # type: ignore[misc]
    world.pool.is_priced = priced
    row = Of(key="k1", state="UP", reason="", driver="ssh", offer={"id": "o"}, price=0.5)
    row.lease, row.need, row.until = {"id": "i-1"}, {"gpus": 1}, 9.0
    world.pool.moves = [("COMING", row)]
    world.machines.note_moves()
    (move,) = world.journal.moves[-1:]
    assert (move.subject, move.id, move.before, move.after) == ("lease", "k1", "COMING", "UP")
    assert move.data["price"] == 0.5 and ("offered" in move.data) is more
    assert logged == [("ssh", "i-1", "UP")] and not world.pool.moves


def test_after_a_ledger_that_does_not_answer_no_second_machine_is_rented() -> None:
    world = World()
    world.queue("a")
    world.pool.fails = StoreUnavailable("the ledger does not answer")
    act(world, seconds=10)
    assert world.pool.rented == ["gpu"] and not world.pool.refused
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="the ledger does not answer"):
            act(world, seconds=10)
    assert world.pool.rented == ["gpu"]
