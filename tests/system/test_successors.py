"""Short steps follow each other without waiting for the worker, and nothing else is different for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivers.base import Command, Job
from drivers.local import LocalHost
from runner.execution.session import Settings
from runner.execution.successors import AHEAD
from tests.support import Space, until

FEW = 12


def many(space: Space, special: Mapping[int, str] | None = None, *, count: int = FEW, more: str = "") -> None:
    """Steps that need nothing of each other; each notes that it began and makes a file.  `special` are other commands, by number."""
    note = f"echo $RECIPE_STEP >> {space.root}/starts"
    steps = "".join(
        f"  s{n:02}:\n    run: '{note}; {(special or {}).get(n, f'echo {n} > s{n:02}.txt')}'\n    outputs: {{o: s{n:02}.txt}}\n{more}"
        for n in range(count)
    )
    space.recipe(f"steps:\n{steps}")


def starts(space: Space) -> list[str]:
    path = space.root / "starts"
    return path.read_text().split() if path.exists() else []


def names(*numbers: int) -> list[str]:
    return [f"s{n:02}" for n in numbers]


def left(space: Space) -> list[str]:
    """What lies about, but for directories of failed attempts, which are kept to be looked at."""
    found = [name for name in os.listdir(space.root / ".recipe/attempts") if not name.startswith("failed-")]
    return found + os.listdir(space.root / ".recipe/partial")


def counts(space: Space) -> dict[str, int]:
    assert space.summary is not None
    return {state: count for state, count in space.summary.counts.items() if count}


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were handed over before their turn."""
    seen: list[str] = []
    follow = LocalHost.follow

    async def counted(self: LocalHost, command: Command, key: str, ahead: Job) -> Job:
        seen.append(command.env["RECIPE_STEP"])
        return await follow(self, command, key, ahead)

    monkeypatch.setattr(LocalHost, "follow", counted)
    return seen


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_short_steps_are_handed_over_before_their_turn_and_each_runs_once(space: Space, followed: list[str], jobs: int) -> None:
    many(space)
    assert sorted(space.run(settings=Settings(jobs=jobs))) == sorted(starts(space)) == names(*range(FEW))
    assert followed and [space.read(f"s{n:02}.txt") for n in range(FEW)] == [f"{n}\n" for n in range(FEW)]
    assert not left(space) and space.run() == []


def test_a_step_that_takes_its_time_keeps_no_other_from_the_room_that_is_free(space: Space, followed: list[str]) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    many(space, {5: f"read line < {gate}; echo 5 > s05.txt"})
    process = space.start("run", "-j2")
    until(lambda: sorted(starts(space)) == names(*range(FEW)))
    gate.write_text("go\n")
    said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def test_nothing_begins_after_a_failure_though_it_was_prepared(space: Space, followed: list[str]) -> None:
    many(space, {6: "exit 3"})
    space.attempt(settings=Settings(jobs=1))
    assert starts(space) == names(*range(7)) and counts(space) == {"DONE": 6, "FAILED": 1, "CANCELLED": 5}
    assert set(followed) > set(names(7)) and not left(space)
    assert space.attempt(settings=Settings(jobs=1, keep_going=True)) == names(*range(6, FEW))


def test_a_step_that_did_not_make_its_output_is_noticed_after_its_successor_began(space: Space, followed: list[str]) -> None:
    many(space, {6: ":"})
    space.attempt(settings=Settings(jobs=1))
    ran = len(starts(space))
    assert starts(space) == names(*range(ran)) and 7 <= ran <= 7 + AHEAD and not left(space)
    assert counts(space) == {"DONE": ran - 1, "FAILED": 1, "CANCELLED": FEW - ran}


def test_a_successor_that_fails_is_tried_again_by_its_own_count(space: Space, followed: list[str]) -> None:
    once = "test -e {0} || {{ : > {0}; exit 1; }}; echo 1 > s{1:02}.txt"
    many(space, {n: once.format(space.root / f"tried{n}", n) for n in (3, 4, 7)}, more="    retries: 1\n")
    space.run(settings=Settings(jobs=2))
    assert sorted(starts(space)) == sorted(names(*range(FEW), 3, 4, 7)) and not left(space)
    begun = [(event.id, event.data["attempt"]) for event in space.events if event.after == "RUNNING"]
    assert sorted(begun) == sorted([(id, 1) for id in names(*range(FEW))] + [(id, 2) for id in names(3, 4, 7)])


def test_a_program_that_is_not_there_ends_its_own_step_only(space: Space, followed: list[str]) -> None:
    many(space)
    with (space.root / "recipe.yaml").open("a") as file:
        file.write("  s99:\n    run: [no-such-program]\n")
    space.attempt(settings=Settings(jobs=1, keep_going=True))
    assert counts(space) == {"DONE": FEW, "FAILED": 1} and not left(space)


@pytest.mark.parametrize("answers", [["finishing"], ["finishing", "stopping"]])
def test_an_interrupt_takes_back_what_was_prepared(space: Space, answers: list[str]) -> None:
    gate, said = space.root / "gate", space.root / "said"
    os.mkfifo(gate)
    many(space, {6: f"read line < {gate}; echo 6 > s06.txt"})
    with said.open("w") as file:
        process = space.start("run", "-j1", start_new_session=True, stdout=file, stderr=file)
    until(lambda: len(starts(space)) == 7)
    for answer in answers:
        os.killpg(process.pid, signal.SIGINT)
        until(lambda answer=answer: answer in said.read_text())
    if len(answers) == 1:
        gate.write_text("go\n")
    process.wait(timeout=60)
    assert process.returncode == 130 and starts(space) == names(*range(7)) and not left(space)


@pytest.mark.parametrize("point", ["attempt-made", "attempt-staged", "job-started", "job-over", "object-put", "published", "group-written"])
@pytest.mark.parametrize("passing", [3, 7])
def test_a_worker_killed_among_short_steps_is_followed_by_one_that_ends_the_same(space: Space, point: str, passing: int) -> None:
    many(space)
    process = space.start("run", "-j2", env={"RECIPE_CRASH_AT": f"{point}:{passing}"})
    process.communicate(timeout=60)
    space.run(settings=Settings(jobs=2))
    assert [space.read(f"s{n:02}.txt") for n in range(FEW)] == [f"{n}\n" for n in range(FEW)]
    assert set(starts(space)) == set(names(*range(FEW))) and len(starts(space)) <= 2 * FEW
    assert not left(space) and space.run() == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    above=st.lists(st.lists(st.integers(0, 13), max_size=2), min_size=8, max_size=14),
    bad=st.sets(st.integers(0, 13), max_size=2),
    jobs=st.integers(1, 3),
    data=st.data(),
)
def test_with_any_failures_what_can_run_runs_once_and_what_cannot_does_not(
    tmp_path_factory: pytest.TempPathFactory, above: list[list[int]], bad: set[int], jobs: int, data: Any
) -> None:
    space = Space(Path(tmp_path_factory.mktemp("any")))
    needs = {n: {u for u in ups if u < n} for n, ups in enumerate(above)}
    how = {n: data.draw(st.sampled_from(["exit 1", ":", "kill -9 $$"])) for n in bad}
    note = f"echo $RECIPE_STEP >> {space.root}/starts"
    space.recipe(
        {
            "steps": {
                f"s{n:02}": {"run": f"{note}; {how.get(n, f'echo {n} > s{n:02}.txt')}", "needs": names(*ups), "outputs": {"o": f"s{n:02}.txt"}}
                for n, ups in needs.items()
            }
        }
    )
    space.attempt(settings=Settings(jobs=jobs, keep_going=True))
    lost = set[int]()
    for n, ups in needs.items():
        lost |= {n} if ups & (lost | bad) else set()
    assert sorted(starts(space)) == names(*(n for n in needs if n not in lost))
    assert counts(space).get("FAILED", 0) == len((bad & needs.keys()) - lost) and not left(space)
