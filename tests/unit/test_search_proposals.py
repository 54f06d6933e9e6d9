"""What a search proposes: from results alone, nothing twice, and closer to the best than chance."""

from __future__ import annotations

import random

import pytest

from drivers import install_line
from runner.api.sweeps import Range, Space
from runner.errors import CannotRun
from runner.interface import search
from runner.interface.search import Trial

PLANE = Space({"x": Range(-10, 10, False, False), "y": Range(-5, 5, False, False)}, {})


def bowl(x: float, y: float) -> float:
    return (x - 3) ** 2 + (y + 1) ** 2


def sought(where: Space, wanted: int, seed: int = 0, width: int = 4) -> list[Trial]:
    tried: list[Trial] = []
    while len(tried) < wanted and (
        new := search.propose(where, tried, min(width, wanted - len(tried)), least=True, seed=seed)
    ):
        tried += [Trial(point, bowl(*map(float, point))) for point in new]
    return tried


def test_thirty_trials_come_close_to_the_bottom_of_a_bowl() -> None:
    assert min(trial.result or 0 for trial in sought(PLANE, 30)) < 0.5
    chance = random.Random(0)
    assert min(bowl(chance.uniform(-10, 10), chance.uniform(-5, 5)) for _ in range(30)) > 0.5


def test_the_same_seed_and_results_give_the_same_proposals() -> None:
    tried = sought(PLANE, 8)
    assert search.propose(PLANE, tried, 4, least=True, seed=0) == search.propose(
        PLANE, tried, 4, least=True, seed=0
    )
    assert search.propose(PLANE, tried, 4, least=True, seed=0) != search.propose(
        PLANE, tried, 4, least=True, seed=1
    )
    better = [tried[0]._replace(result=-9.0), *tried[1:]]
    assert sought(PLANE, 12)[:8] == tried and better != tried


def test_nothing_is_proposed_twice_and_a_space_that_is_all_tried_gives_nothing() -> None:
    where = Space({"x": Range(1, 3, False, True), "y": [4, 8]}, {})
    values = [tuple(trial.values) for trial in sought(where, 30)]
    assert sorted(values) == [(x, y) for x in (1, 2, 3) for y in (4, 8)]


def test_a_trial_that_failed_is_known_and_not_learned_from() -> None:
    where = Space({"opt": ["adam", "sgd", "lion"], "betas": [[0.9, 0.99], [0.8, 0.9]]}, {})
    tried = [Trial(["adam", [0.9, 0.99]], None), Trial(["sgd", [0.8, 0.9]], 1.0)]
    found = search.propose(where, tried, 9, least=False, seed=0)
    assert (
        len(found) == 4 and ["adam", [0.9, 0.99]] not in found and ["sgd", [0.8, 0.9]] not in found
    )


def test_numbers_lie_in_their_range_and_are_short() -> None:
    where = Space({"lr": Range(1e-5, 1e-1, True, False), "rank": Range(4, 64, True, True)}, {})
    rates = [float(str(trial.values[0])) for trial in sought(where, 12)]
    assert all(1e-5 <= rate <= 1e-1 and len(repr(rate)) <= 9 for rate in rates) and any(
        rate < 1e-3 for rate in rates
    )
    assert all(
        isinstance(trial.values[1], int) and 4 <= trial.values[1] <= 64
        for trial in sought(where, 12)
    )


def test_without_optuna_the_line_that_installs_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(CannotRun) as caught:
        search.library()
    assert caught.value.fix == install_line("search")
