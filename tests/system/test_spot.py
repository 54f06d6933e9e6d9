"""Promise: a spot machine that is taken away in the middle of a training costs no finished checkpoint; the run ends well on another."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivers.base import Need, Offer, Resources, Traits, Wish
from runner.hosts.place.place import Place
from runner.hosts.pool import HostPool
from runner.hosts.renting.needs import AnyMarket, Spot
from runner.hosts.renting.totals import CostModel, History
from runner.planning.step import ResourceSpec, StepSpec
from runner.storage.records.store import Store
from tests.fake_provider import provider
from tests.rented import alive, ours, rents
from tests.support import Space, until

STEPS = 12
# Saves each `every` steps, and on SIGTERM at the end of its step; keeps which steps each attempt did.
TRAIN = """
import json, os, pathlib, signal, sys, time
latest, every, marks = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
done = [] if latest == "none" else json.loads(pathlib.Path(latest, "done").read_text())
begin = sum(map(len, done)) + 1
done.append([])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))

def save(step):
    pathlib.Path("ckpt/new").mkdir(parents=True)
    pathlib.Path("ckpt/new/done").write_text(json.dumps(done))
    os.rename("ckpt/new", f"ckpt/step-{step}")

for step in range(begin, STEPS + 1):
    pathlib.Path(marks, f"{len(done)}-{step}").touch()
    while step == 5 and len(done) == 1 and not asked:
        time.sleep(0.05)  # until the machine is taken away
    done[-1].append(step)
    if asked or step % every == 0:
        save(step)
    if asked:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
pathlib.Path("o").write_text(json.dumps(done))
""".replace("STEPS", str(STEPS))


@pytest.mark.parametrize(("name", "every", "left"), [("gcp", 1000, 5), ("vastai", 2, 4)])
def test_a_training_that_is_preempted_goes_on_from_its_checkpoint_on_another_machine(
    space: Space, monkeypatch: pytest.MonkeyPatch, name: str, every: int, left: int
) -> None:
    """At Compute Engine the notice has it save the step that it is in; at Vast.ai, which gives none, the last checkpoint counts.

    The limit of the run is less than a machine may cost by its own end, and a machine that was taken away is not proved gone at once.
    """
    marks = space.root.parent / "marks"
    marks.mkdir()
    space.write("train.py", TRAIN)
    space.recipe(f"""limits: {{cost: 2 USD}}
steps:
  s:
    run: exec python3 train.py {{{{ state.ckpt.latest | default("none") }}}} {every} {marks}
    code: [train.py]
    resources: {{gpus: 1}}
    state: {{ckpt: {{path: ckpt/, checkpoint: "step-*", every: 1s}}}}
    outputs: {{o: o}}
""")
    with provider(
        name,
        "--hosts",
        "real",
        "--clock",
        "real",
        "--faults",
        "boot=0,takes=0.05,undead@destroy=once",
    ) as real:
        rents(space, real, monkeypatch, name, market="spot")
        run = space.start("run", "--driver", name)
        until(lambda: (marks / "1-5").exists() or run.poll() is not None)
        until(
            lambda: (
                name == "gcp"
                or [*space.root.glob(".recipe/**/step-4/done")]
                or run.poll() is not None
            )
        )
        assert json.loads(real.ask("/_preempt", ""))["preempted"] == 1
        _, said = run.communicate(timeout=60)
        assert run.returncode == 0, said
        done = json.loads(space.read("o"))
        assert [len(steps) for steps in done] == [left, STEPS - left] and [
            step for steps in done for step in steps
        ] == [*range(1, STEPS + 1)]
        assert ours(real).count("created") == ours(real).count("destroyed") == 2 and not alive(real)
    assert ("preemption notice for" in said) is (name == "gcp")
    with Store.open(space.root / ".recipe", read_only=True) as store:
        [last] = store.runs.latest()
        assert [
            event.reason
            for event in store.runs.events(last.id)
            if event.id == "s" and event.after == "QUEUED"
        ][1:] == ["preempted"]


@pytest.mark.parametrize(("market", "most"), [("spot", 3), ("any", 2)])
def test_after_some_that_were_taken_away_the_next_is_rented_on_demand(
    market: AnyMarket, most: int
) -> None:
    nothing = cast(Any, None)
    leases = cast(Any, SimpleNamespace(driver=SimpleNamespace(traits=Traits())))
    pool = HostPool(nothing, "r", nothing, "gcp", spot=Spot(market), leases=leases)
    wants = StepSpec("r@1", "s", {}, ResourceSpec(gpus=1))
    for number in range(most):
        assert pool.need(wants) == Need(gpus=1, market=market)
        taken = cast(
            Place, type("Taken", (), {"name": f"gcp {number}", "lost": "gone", "leaving": ""})()
        )
        pool.spot.add(taken)
        assert pool.spot.count_preempted([taken])
    assert pool.need(wants) == Need(gpus=1)


def test_a_spot_machine_is_dearer_than_its_price_by_the_hours_that_are_lost() -> None:
    spot, kept = Offer("gcp", "a", price=0.99, market="spot"), Offer("gcp", "b", price=1.0)
    assert kept.hourly == 1.0 < spot.hourly
    assert Offer("gcp", "c", price=0.4, market="spot").hourly < kept.hourly


def test_on_any_market_spot_is_taken_where_that_is_cheaper_by_what_was_lost_before() -> None:
    card = Resources(gpus=1, gpu="RTX 4090")
    spot = Offer("vastai", "1", card, price=0.5, market="spot")
    kept = Offer("vastai", "2", card, price=0.8)
    calm, rough = History(), History(preemptions={"vastai": (60, 40.0)})
    for wish in (Wish(hours=5.0), Wish()):
        assert CostModel(calm).rank([kept, spot], wish) == [spot, kept]
        assert CostModel(rough).rank([spot, kept], wish) == [spot, kept], "0.75 an hour"
    worse = History(preemptions={"vastai": (100, 40.0)})
    for wish in (Wish(hours=5.0), Wish()):
        assert CostModel(worse).rank([spot, kept], wish) == [kept, spot], "0.92 an hour"
    leases = cast(
        Any,
        SimpleNamespace(
            driver=SimpleNamespace(traits=Traits()), ledger=SimpleNamespace(since=lambda _: [])
        ),
    )
    pool = HostPool(
        cast(Any, None), "r", cast(Any, None), "vastai", spot=Spot("any"), leases=leases
    )
    need = Need(gpus=1, market="any")
    said = pool._why_spot(need, spot, [spot, kept])
    assert said.startswith(
        ", spot: cheaper than $0.80 on demand even with 0.05 preemptions an hour"
    )
    assert pool._why_spot(need, kept, [kept, spot]).startswith(", on demand: spot at $0.50 is not")
    assert pool._why_spot(Need(gpus=1), kept, [kept]) == ""
