"""Promise: the program of `[hooks] spend` is asked before anything is rented, and knows afterwards what it cost."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from runner.errors import Invalid
from runner.execution.terms import Settings
from runner.interface.cli.costs import of_run
from tests.cloud import cloud, provider
from tests.support import Space

RENTED = Settings(driver="loopback")
RECIPE = "limits: {cost: 2 USD}\nsteps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"
HOOK = """import json, pathlib, sys
asked = json.loads(sys.stdin.readline())
with pathlib.Path(sys.argv[1]).open("a") as file:
    file.write(json.dumps(asked) + "\\n")
if asked["do"] == sys.argv[2]:
    print("team vision has 0 points left")
    sys.exit(1)
"""


def hooked(space: Space, refuses: str = "nothing", **settings: object) -> None:
    space.write("hook.py", HOOK)
    cloud(space, **settings)
    text = (space.root / "recipe.toml").read_text()
    space.write("recipe.toml", text + f'[hooks]\nspend = ["python3", {json.dumps(str(space.root / "hook.py"))}, "asked.jsonl", "{refuses}"]\n')
    space.recipe(RECIPE)


def asked(space: Space) -> list[Mapping[str, object]]:
    return [json.loads(line) for line in space.read("asked.jsonl").splitlines()]


@pytest.fixture(autouse=True)
def here(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(space.root)


def test_a_run_is_reserved_once_and_charged_what_it_cost(space: Space) -> None:
    hooked(space)
    space.run(settings=RENTED)
    first, last = asked(space)
    assert space.summary is not None
    cost = of_run(space.summary.run)
    assert (first["do"], first["usd"], first["driver"]) == ("reserve", 2.0, "loopback")
    assert last == {**first, "do": "charge", "usd": cost.usd, "leases": last["leases"]} and cost.usd > 0
    space.run(settings=RENTED)
    assert len(asked(space)) == 2, "a run with nothing to do asks nobody"


def test_a_program_that_refuses_rents_nothing(space: Space) -> None:
    hooked(space, "reserve")
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 3 and "nothing may be spent: team vision has 0 points left" in said and "[hooks] spend" in said
    assert provider(space) == [] and [each["do"] for each in asked(space)] == ["reserve"]


def test_what_was_reserved_is_given_back_where_no_machine_comes_up(space: Space) -> None:
    hooked(space, faults={"no_capacity": 9})
    space.attempt(settings=RENTED)
    assert space.summary is not None and space.summary.failed[0].unplaced
    assert [each["do"] for each in asked(space)] == ["reserve", "refund"]


def test_a_program_that_is_not_there_is_named(space: Space) -> None:
    cloud(space)
    space.write("recipe.toml", (space.root / "recipe.toml").read_text() + '[hooks]\nspend = ["./points"]\n')
    space.recipe(RECIPE)
    with pytest.raises(Invalid, match=r"\./points cannot be run: No such file"):
        space.run(settings=RENTED)
    assert provider(space) == []
