"""Promise: a run on machines of Compute Engine brings home what a run here makes, and gives every machine back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.fake_provider import Provider, provider
from tests.rented import alive, ours, rents, same_as_here
from tests.support import Space


@pytest.fixture(scope="module")
def real() -> Iterator[Provider]:
    with provider(
        "gcp",
        "--hosts",
        "real",
        "--clock",
        "real",
        "--faults",
        "boot=0.1,takes=0.1,foreign=3,taken@create=once",
    ) as found:
        yield found


def test_a_run_on_compute_engine_makes_what_a_run_here_makes(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first zone has no room: it costs nothing, and the next is asked."""
    rents(space, real, monkeypatch, "gcp")
    same_as_here(space, "gcp")
    assert ours(real) == ["created", "started", "destroyed"] and len(alive(real, foreign=True)) == 3


@pytest.mark.parametrize(
    "nodes", [2, *(pytest.param(count, marks=pytest.mark.proof) for count in (4, 8, 16))]
)
def test_several_machines_of_one_zone_are_the_nodes_of_a_step_and_a_zone_with_too_few_is_left(
    space: Space, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    faults = "boot=0.1,takes=0.1,quota=64,taken@create=once"
    with provider("gcp", "--hosts", "real", "--clock", "real", "--faults", faults) as google:
        rents(space, google, monkeypatch, "gcp")
        run = json.dumps(f"echo $NODE_RANK >> {space.root}/begun; echo > o")
        space.recipe(
            f"steps: {{train: {{nodes: {nodes}, resources: {{gpus: 1}}, outputs: {{o: o}}, run: {run}}}}}"
        )
        code, out, said = space.command("plan", "--driver", "gcp")
        words = f"{nodes} of these machines, in one zone, as the nodes of train"
        assert code == 0 and words in out, out + said
        process = space.start("run", "--driver", "gcp", "--yes")
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0 and "trying another zone" in said, said
        assert sorted(map(int, space.read("begun").split())) == [*range(nodes)]
        zones = [
            line.split()[1].partition("/")[0]
            for line in said.splitlines()
            if " is up after " in line
        ]
        assert len(set(zones[-nodes:])) == 1, said
        assert ours(google).count("created") == ours(google).count("destroyed") and not alive(
            google
        )


def test_plan_and_run_refuse_nodes_that_would_not_reach_each_other_in_the_same_words(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    with provider("vastai") as market:
        rents(space, market, monkeypatch)
        space.recipe("steps: {s: {nodes: 2, resources: {gpus: 1}, run: 'true'}}")
        ends = [space.command(verb, "--driver", "vastai") for verb in ("plan", "run")]
    words = "s requires 2 nodes, but vastai"
    assert [code for code, _, _ in ends] == [2, 2]
    assert all(words in said for _, _, said in ends), ends
