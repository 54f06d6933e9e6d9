"""`limits.cost` is shown by every place that says what a run may take."""

from __future__ import annotations

import pytest

from tests.support import Space

LIMITED = "limits: {time: 1h, cost: 5 USD}\nsteps: {s: {run: echo 1 > o, outputs: {o: o}}}\n"


@pytest.mark.parametrize("verb", ["plan", "check", "show"])
def test_a_limit_on_money_is_shown(space: Space, verb: str) -> None:
    space.recipe(LIMITED)
    code, out, _ = space.command(verb, "./recipe.yaml")
    assert code == 0 and "5 USD" in out


def test_a_preset_s_limit_on_money_is_shown(space: Space) -> None:
    space.recipe("presets: {large: {limits: {cost: 7 USD}}}\n" + LIMITED)
    assert "7 USD with large" in space.command("show", "./recipe.yaml")[1]
    assert "limits: cost 7 USD" in space.command("plan", "--preset", "large")[1]


@pytest.mark.parametrize("verb", [["plan"], ["run", "-n"]])
def test_a_plan_shows_the_lower_of_two_limits_on_money(space: Space, verb: list[str]) -> None:
    space.recipe("limits: {cost: 7 USD}\nsteps: {s: {run: echo}}\n")
    assert "limits: cost 5 USD" in space.command(*verb, "--max-cost", "5")[1]
    assert "limits: cost 7 USD" in space.command(*verb, "--max-cost", "9")[1]


def test_a_plan_shows_the_limit_on_money_of_its_stack(space: Space) -> None:
    space.recipe("limits: {cost: 7 USD}\nsteps: {s: {run: echo}}\n")
    space.write("recipe.toml", '[stacks.small]\ndriver = "local"\nlimits = {cost = "3 USD"}\n')
    assert "limits: cost 3 USD" in space.command("plan", "--stack", "small")[1]
    assert "limits: cost 2 USD" in space.command("plan", "--stack", "small", "--max-cost", "2")[1]


def test_a_plan_without_a_limit_on_money_does_not_speak_of_it(space: Space) -> None:
    space.recipe("steps: {s: {run: echo}}\n")
    assert "USD" not in space.command("plan")[1]
