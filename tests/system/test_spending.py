"""Promise: what a run rents costs no more than its `limits.cost`, also when its worker hangs; and what was spent is shown."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.fake_provider import Provider, provider
from tests.rented import alive, ours, rents
from tests.support import Space, until

LIMIT = 0.05


@pytest.fixture(scope="module")
def real() -> Iterator[Provider]:
    with provider("vastai", "--hosts", "real", "--clock", "real", "--faults", "boot=0") as found:
        yield found


def billed(provider: Provider) -> float:
    return float(
        sum(entry["usd"] for entry in provider.ledger() if entry["mark"].startswith("recipe-"))
    )


def step(command: str, cost: float) -> str:
    return f"limits: {{cost: {cost} USD}}\nsteps:\n  s: {{run: '{command}', resources: {{gpus: 8}}, outputs: {{o: o}}}}\n"


def test_a_machine_whose_worker_hangs_ends_within_the_limit(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch, gpu="H100", least=1, reliability=0, verified=False)
    space.recipe(step("echo began > began; sleep 100; echo 1 > o", LIMIT))
    before = billed(real)
    worker = space.start("run", "--driver", "vastai", "--yes")
    until(lambda: "started" in ours(real) or worker.poll() is not None, seconds=30)
    worker.send_signal(signal.SIGSTOP)
    try:
        assert alive(real)
        until(lambda: not alive(real), seconds=60)
        price = max(entry["rate"] for entry in real.ledger() if entry["what"] == "gpu")
        assert price > 10 and 0 < billed(real) - before <= LIMIT + price * 5 / 3600
    finally:
        worker.kill()
        worker.communicate(timeout=30)


def test_a_run_stops_within_its_limit_and_shows_what_it_spent(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch, gpu="H100", least=1, reliability=0, verified=False)
    space.recipe(step("sleep 100; echo 1 > o", LIMIT))
    before = billed(real)
    code, _, said = space.command("run", "--driver", "vastai", "--yes")
    assert code == 1 and f"the run reached its limit of {LIMIT} USD (`limits.cost`)" in said
    assert not alive(real) and 0 < billed(real) - before <= LIMIT
    (row,) = json.loads(space.command("runs", "--json")[1])
    assert row["usd"] == pytest.approx(billed(real) - before, rel=0.01), (
        "by the provider's own charges"
    )
    told = json.loads(space.command("report", "--cost", "--json")[1])
    assert (
        told["usd"] == row["usd"]
        and told["leases"][0]["driver"] == "vastai"
        and told["leases"][0]["source"] == "charged"
    )
    [told_of] = json.loads(space.command("report", "--json")[1])["steps"]
    assert told_of["usd"] == row["usd"] and f"${row['usd']:.2f}" in space.command("report")[1]
    assert (
        f"${row['usd']:.2f}" in space.command("runs")[1]
        and "vastai" in space.command("report", "--cost", "--month")[1]
    )


def test_a_limit_that_pays_for_too_little_rents_nothing_and_says_the_sum(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch, gpu="H100", reliability=0, verified=False)
    space.recipe(step("echo 1 > o", LIMIT))
    before = ours(real)
    code, _, said = space.command("run", "--driver", "vastai", "--yes")
    assert (
        code == 3
        and "only $0.05 of `limits.cost` is left, enough for " in said
        and ours(real) == before
    )
