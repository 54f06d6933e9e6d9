"""Promise: `nice` of a step is the niceness of its processes, and no part of its key."""

from __future__ import annotations

import os

import pytest

from runner.errors import Invalid
from tests.support import Space


def recipe(space: Space, nice: str) -> None:
    space.recipe(
        f"steps:\n  slow:\n    run: nice > niceness; (nice >> niceness)\n{nice}    outputs: {{made: niceness}}\n"
    )


def made(space: Space) -> list[int]:
    return [int(line) for line in (space.root / "niceness").read_text().split()]


def test_all_processes_of_a_step_have_its_niceness(space: Space) -> None:
    recipe(space, "    nice: 7\n")
    space.command("run")
    assert made(space) == [os.nice(0) + 7] * 2


def test_a_step_on_a_host_has_its_niceness(space: Space) -> None:
    recipe(space, "    nice: 7\n")
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 0 and made(space) == [os.nice(0) + 7] * 2, said


def test_another_niceness_runs_nothing_again(space: Space) -> None:
    recipe(space, "")
    assert space.run() == ["slow"]
    recipe(space, "    nice: 3\n")
    assert space.run() == []
    assert made(space) == [os.nice(0)] * 2


@pytest.mark.parametrize("nice", ["-1", "20", "low", "1.5"])
def test_a_niceness_that_no_user_may_ask_for_is_refused(space: Space, nice: str) -> None:
    recipe(space, f"    nice: {nice}\n")
    with pytest.raises(Invalid, match="nice"):
        space.plan()


def test_a_program_that_is_missing_is_named(space: Space) -> None:
    space.recipe("steps:\n  slow: {run: [there-is-none], nice: 3}\n")
    code, _, said = space.command("run")
    assert code != 0 and "there-is-none" in said, said
