"""Promise: a run that may rent at several providers takes the cheapest of all, goes on at another where one fails, and leaves no machine and no cent behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.storage.records.ledger import Ledger
from tests.fake_provider import Provider, provider
from tests.rented import alive, ours, rents
from tests.support import Space, until

ANY = "any:vastai,runpod"


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Provider, Provider]]:
    real = ("--hosts", "real", "--clock", "real", "--faults", "boot=0.2,foreign=5")
    with provider("vastai", *real) as vastai, provider("runpod", *real) as runpod:
        yield vastai, runpod


@pytest.fixture
def renting(space: Space, two: tuple[Provider, Provider], monkeypatch: pytest.MonkeyPatch) -> Space:
    """A workspace with an account at both; offers of vastai are the cheaper ones."""
    for each, name in zip(two, ("vastai", "runpod"), strict=True):
        rents(space, each, monkeypatch, name)
    settings = "".join(
        f"[drivers.{name}]\npoll = 0.1\nsettles = 0.2\n" for name in ("vastai", "runpod")
    )
    space.write("recipe.toml", settings)
    return space


def test_a_run_goes_on_at_another_provider_after_a_kill_with_no_leak_and_the_bill_in_its_ledger(
    renting: Space, two: tuple[Provider, Provider]
) -> None:
    vastai, runpod = two
    began = renting.root / "began"
    renting.recipe(
        "limits: {cost: 2 USD}\n"
        f"steps:\n  s: {{run: 'echo >> {began}; [ $(wc -l < {began}) = 2 ] || sleep 600; echo 1 > o', resources: {{gpus: 1}}, outputs: {{o: o}}}}\n"
    )
    run = renting.start("run", "--driver", ANY, stderr=None)
    until(lambda: began.exists() or run.poll() is not None)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert len(alive(vastai)) == 1 and not ours(runpod), "the cheapest of both"
    vastai.ask("/_exit", "")
    vastai.ask("/_faults", "boot=0.2,foreign=5,taken@create=1")
    code, _, said = renting.command("run", "--driver", ANY)
    assert code == 0 and renting.read("o") == "1\n", said
    assert "resuming run" in said and "renting runpod" in said, said
    assert "the run's data and secrets may be sent to machines of vastai or runpod" in said
    assert not alive(vastai) and not alive(runpod)
    with Ledger.open(Path(os.environ["RECIPE_LEDGER"]), read_only=True) as ledger:
        rows = ledger.since(0)
        assert {row.state for row in rows} == {"GONE"}
        assert {row.driver for row in rows if row.lease} == {"vastai", "runpod"}
        noted = sum(spent.usd for spent in ledger.costs([row.key for row in rows]).values())
    billed = sum(
        entry["usd"]
        for each in two
        for entry in each.ledger()
        if entry["event"] == "billed" and entry["mark"].startswith("recipe-")
    )
    assert noted == pytest.approx(billed, abs=0.0005)
