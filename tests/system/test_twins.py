"""Steps of one run that have the same key: one makes what it makes, the others wait and take it, and each publishes to its own path."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.execution.terms import Choice, Settings
from tests.support import Space, until

PLACES = [Settings(jobs=1), Settings(jobs=8), Settings(jobs=8, driver="loopback")]
NAMES = ["one at a time", "all at once", "elsewhere"]


def starts(space: Space) -> Counter[str]:
    """How often each command ran, by the word that it notes."""
    path = space.root / "starts"
    return Counter(path.read_text().split() if path.exists() else [])


def note(space: Space, word: str) -> str:
    return f"echo {word} >> {space.root}/starts"


def sweep(space: Space, data: str = "", ranks: str = "[4, 8]", **keys: Any) -> None:
    """A sweep over a recipe whose first step is the same for every rank."""
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    space.recipe(
        "recipe: sub@1\nsummary: A test\ninputs: {rank: {type: integer}}\nsteps:\n"
        f"  data: {{run: '{note(space, 'data')}; {data or 'echo data > data.txt'}', outputs: {{o: data.txt}}{more}}}\n"
        f"  train: {{run: '{note(space, 'train')}; echo {{{{ inputs.rank }}}} | cat - {{{{ steps.data.o }}}} > m.txt', outputs: {{m: m.txt}}}}\n",
        name="sub.yaml",
    )
    space.recipe(
        f"steps: {{s: {{matrix: {{rank: {ranks}}}, uses: ./sub.yaml, with: {{rank: '{{{{ matrix.rank }}}}'}}}}}}"
    )


def left(space: Space) -> list[str]:
    return [
        name
        for name in os.listdir(space.root / ".recipe/attempts")
        if not name.startswith("failed-")
    ]


@pytest.mark.parametrize("how", PLACES, ids=NAMES)
def test_what_two_instances_of_a_recipe_share_runs_once_and_is_published_by_both(
    space: Space, how: Settings
) -> None:
    sweep(space)
    space.run(settings=how)
    assert starts(space) == {"data": 1, "train": 2}
    assert [space.read(f"s[rank={rank}]/m.txt") for rank in (4, 8)] == ["4\ndata\n", "8\ndata\n"]
    assert space.read("s[rank=4]/data.txt") == space.read("s[rank=8]/data.txt") == "data\n"
    assert [e.reason for e in space.events if e.before == "QUEUED" and e.after == "READY"] == [
        "another step of this run produced the result"
    ]
    assert left(space) == [] and space.run(settings=how) == []


def test_a_step_inside_every_instance_of_a_recipe_is_named_as_select_names_it(space: Space) -> None:
    sweep(space)
    assert space.run(choice=Choice(until="s/data")) == ["s[rank=4]/data"] and starts(space) == {
        "data": 1
    }
    assert sorted(space.run(choice=Choice(again=("s/train",)))) == [
        "s[rank=4]/train",
        "s[rank=8]/train",
    ]
    assert (
        space.run(choice=Choice(until="s/train")) == []
        and space.run(choice=Choice(again=("s[rank=4]",))) != []
    )


def test_two_uses_of_one_recipe_share_what_is_the_same(space: Space) -> None:
    sweep(space)
    space.recipe(
        "steps: {a: {uses: ./sub.yaml, with: {rank: 1}}, b: {uses: ./sub.yaml, with: {rank: 1}}}"
    )
    space.run()
    assert (
        starts(space) == {"data": 1, "train": 1}
        and space.read("a/m.txt") == space.read("b/m.txt") == "1\ndata\n"
    )
    assert space.run() == []


@pytest.mark.parametrize("how", PLACES, ids=NAMES)
def test_when_the_first_fails_the_second_runs_by_itself(space: Space, how: Settings) -> None:
    sweep(space, data=f"mkdir {space.root}/once && exit 3; echo data > data.txt")
    space.attempt(settings=Settings(jobs=how.jobs, driver=how.driver, keep_going=True))
    assert (
        space.summary is not None
        and space.summary.state == "FAILED"
        and len(space.summary.failed) == 1
    )
    assert starts(space) == {"data": 2, "train": 1}
    assert sum((space.root / f"s[rank={rank}]/m.txt").exists() for rank in (4, 8)) == 1


@pytest.mark.parametrize("how", PLACES, ids=NAMES)
def test_both_fail_when_the_command_fails(space: Space, how: Settings) -> None:
    sweep(space, data="exit 3")
    space.attempt(settings=Settings(jobs=how.jobs, driver=how.driver, keep_going=True))
    assert space.summary is not None
    assert sorted((failure.id, failure.reason) for failure in space.summary.failed) == [
        (f"s[rank={n}]/data", "exit 3") for n in (4, 8)
    ]
    assert starts(space) == {"data": 2}


def test_a_retry_of_the_first_takes_what_the_second_made_meanwhile(space: Space) -> None:
    sweep(space, data=f"mkdir {space.root}/once && exit 3; echo data > data.txt", retries=1)
    space.run(settings=Settings(jobs=8))
    assert starts(space) == {"data": 2, "train": 2}


def test_under_B_what_two_steps_share_runs_once_more_and_not_twice(space: Space) -> None:
    sweep(space)
    space.run()
    space.run(choice=Choice(all=True))
    assert starts(space) == {"data": 2, "train": 4}
    assert space.read("s[rank=4]/m.txt") == "4\ndata\n" and space.run() == []


def test_steps_that_are_not_cached_share_nothing(space: Space) -> None:
    sweep(space, cache="false")
    space.run(settings=Settings(jobs=8))
    assert starts(space)["data"] == 2


def test_a_twin_is_not_prepared_ahead_and_run_again(space: Space) -> None:
    """Steps this short begin by themselves, one after the other, without being asked for."""
    sweep(space, ranks=str(list(range(12))))
    space.run(settings=Settings(jobs=2))
    assert starts(space) == {"data": 1, "train": 12} and space.run() == []


def test_what_a_killed_run_was_making_for_two_steps_is_taken_up_once(space: Space) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    sweep(space, data=f"read go < {gate}; echo data > data.txt")
    first = space.start("run", "-j2")
    until(lambda: starts(space)["data"] == 1)
    first.kill()
    first.communicate()
    second = space.start("run", "-j2")
    opened = os.open(gate, os.O_RDWR)
    os.write(opened, b"go\n")
    _, said = second.communicate(timeout=60)
    os.close(opened)
    assert second.returncode == 0, said
    assert starts(space) == {"data": 1, "train": 2} and left(space) == []
    assert space.read("s[rank=4]/data.txt") == space.read("s[rank=8]/data.txt") == "data\n"


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Steps as (what the command says, which earlier ones it takes): few words, so that many are the same."""
    size = draw(st.integers(1, 4))
    return [
        (
            draw(st.integers(0, 1)),
            draw(st.lists(st.integers(0, n - 1), unique=True, max_size=2)) if n else [],
        )
        for n in range(size)
    ]


@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    graph=graphs(), copies=st.integers(2, 4), jobs=st.sampled_from([1, 2, 8]), fails=st.booleans()
)
def test_copies_of_any_graph_run_each_key_once_and_publish_every_copy(
    tmp_path_factory: pytest.TempPathFactory,
    graph: list[tuple[int, list[int]]],
    copies: int,
    jobs: int,
    fails: bool,
) -> None:
    space = Space(Path(tmp_path_factory.mktemp("twins")))
    body = ""
    for n, (word, takes) in enumerate(graph):
        names = " ".join(f"{{{{ steps.t{take}.o }}}}" for take in takes)
        once = f"mkdir {space.root}/once 2>/dev/null && exit 1; " if fails and not n else ""
        body += f"  t{n}: {{run: '{note(space, f't{n}')}; {once}cat /dev/null {names} > o; echo {word} >> o', outputs: {{o: o}}, retries: 1}}\n"
    body = body.replace("outputs: {o: o}", "outputs: {o: OUT}")
    for n in range(len(graph)):
        body = (
            body.replace("> o;", f"> o{n};", 1)
            .replace(">> o'", f">> o{n}'", 1)
            .replace("OUT", f"o{n}", 1)
        )
    space.recipe(f"recipe: sub@1\nsummary: A test\nsteps:\n{body}", name="sub.yaml")
    space.recipe("steps:\n" + "".join(f"  c{n}: {{uses: ./sub.yaml}}\n" for n in range(copies)))
    space.run(settings=Settings(jobs=jobs))
    assert starts(space) == {f"t{n}": 1 + (fails and not n) for n in range(len(graph))}
    for n in range(len(graph)):
        assert len({space.read(f"c{copy}/o{n}") for copy in range(copies)}) == 1
    assert space.run(settings=Settings(jobs=jobs)) == []
