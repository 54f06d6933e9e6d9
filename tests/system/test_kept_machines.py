"""Promise: a stack keeps one machine, started for a run and stopped after it; whatever dies and when, it never runs unnoticed and is never lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cloud import cloud, provider
from tests.fake_provider import provider as fake_provider
from tests.rented import alive, ours, rents
from tests.support import Space, until
from tests.system.test_stacks import STEP, stack

KEPT = "driver = 'loopback'\nkeep = 'stopped'\n"
POINTS = (
    "lease-intended",
    "lease-asked",
    "lease-recorded",
    "lease-up",
    "release-intended",
    "release-asked",
    "release-proved",
)


def kept(space: Space, more: str = "", **settings: object) -> None:
    cloud(space, **settings)
    space.recipe(STEP)
    stack(space, KEPT + more)


def status(space: Space) -> dict[str, object]:
    code, out, said = space.command("stack", "status", "tiny", "--json")
    assert code == 0, said
    found: dict[str, object] = json.loads(out)
    return found


def ran(space: Space, value: int, *words: str) -> str:
    space.recipe(STEP.replace("echo 1", f"echo {value}"))
    code, _, said = space.command("run", "--stack", "tiny", *words)
    assert code == 0 and space.read("o") == f"{value}\n", said
    return said


def test_a_kept_machine_is_made_once_and_started_and_stopped_for_each_run(space: Space) -> None:
    kept(space)
    assert "renting loopback host-1" in ran(space, 1)
    assert "starting loopback host-1" in ran(space, 2)
    assert provider(space) == ["created", "stopped", "started", "stopped"]
    found = status(space)
    assert (
        found["stands"] == "stopped"
        and found["uses"] == []
        and found["usd_an_hour_stopped"] == pytest.approx(0.12)
    )
    code, out, _ = space.command("reap")
    assert (
        code == 0
        and "kept " in out
        and "disk $2.88 a day" in out
        and "kept for the stack tiny of " in out
    )
    key = found["key"]
    code, _, said = space.command("reap", str(key))
    assert code == 2 and "terminate it with `recipe stack down tiny`" in said
    assert space.command("reap", "--dead", "--yes")[0] == 0 and len(provider(space)) == 4
    costs = json.loads(space.command("report", "--cost", "--month", "--json")[1])["leases"]
    assert sorted(each["key"] == key for each in costs) == [False, False, True] and all(
        each["usd"] > 0 for each in costs
    )
    assert space.command("stack", "down", "tiny")[0] == 0
    assert provider(space)[-1] == "destroyed" and status(space)["machine"] is None


def test_keep_alive_leaves_it_running_for_the_next_run_until_its_time_is_over(space: Space) -> None:
    kept(space, "auto_stop = '1h'\n")
    ran(space, 1, "--keep-alive")
    (use,) = status(space)["uses"]  # type: ignore[misc]
    assert use["run"] == "" and provider(space) == ["created"]
    code, out, _ = space.command("reap")
    assert (
        code == 0
        and "kept for the stack tiny of " in out
        and ", until 20" in out
        and provider(space) == ["created"]
    )
    ran(space, 2)
    assert provider(space) == ["created", "stopped"]
    code, _, said = space.command("run", "--driver", "loopback", "--keep-alive")
    assert code == 3 and "--keep-alive requires a stack with a persistent machine" in said


def test_a_stack_is_made_started_stopped_and_ended_by_hand(space: Space) -> None:
    kept(space)
    assert space.command("stack", "start", "tiny")[0] == 5
    code, out, said = space.command("stack", "up", "tiny")
    assert code == 0 and "tiny runs until 20" in out, said
    assert space.command("stack", "start", "tiny")[0] == 0 and provider(space) == ["created"]
    ran(space, 1)
    assert provider(space) == ["created", "stopped"], (
        "a run stops it, also one that did not start it"
    )
    assert (
        space.command("stack", "start", "tiny")[0] == 0
        and space.command("stack", "stop", "tiny")[0] == 0
    )
    assert provider(space) == ["created", "stopped", "started", "stopped"]
    assert (
        space.command("stack", "down", "tiny")[0] == 0
        and space.command("stack", "down", "tiny")[0] == 0
    )


def test_a_machine_that_its_time_has_stopped_is_started_again(space: Space) -> None:
    kept(space, "auto_stop = '2s'\nextra = {least = 1}\n")
    assert space.command("stack", "up", "tiny")[0] == 0
    until(lambda: status(space)["stands"] == "stopped")
    code, out, _ = space.command("reap")
    assert code == 0 and "ended" in out and "its rental period has ended" in out
    assert provider(space) == ["created", "stopped"]


def test_a_machine_that_is_gone_is_made_anew(space: Space) -> None:
    kept(space)
    ran(space, 1)
    (found,) = (space.root.parent / "cloud" / "leases").glob("[!.l]*")
    found.unlink()
    ran(space, 2)
    assert provider(space) == ["created", "stopped", "created", "stopped"]


def test_a_machine_that_does_not_do_for_a_step_is_named_with_what_to_do(space: Space) -> None:
    kept(space)
    ran(space, 1)
    space.recipe(STEP.replace("gpus: 1", "gpus: 2").replace("echo 1", "echo 9"))
    code, _, said = space.command("run", "--stack", "tiny")
    assert (
        code == 2 and "has less than a step requires" in said and "`recipe stack down tiny`" in said
    )
    stack(space, "driver = 'ssh'\nkeep = 'stopped'\nextra = {hosts = ['me@nowhere']}", "here")
    code, _, said = space.command("stack", "up", "here")
    assert code == 2 and "ssh cannot stop and restart machines" in said


def cases() -> Iterator[Any]:
    """Each point, of the run that makes the machine and of one that starts it; all but two by `make proof`."""
    for point in POINTS:
        for first in (True, False):
            few = (point, first) in (("lease-asked", True), ("release-asked", False))
            yield pytest.param(
                point,
                first,
                id=f"{point}-{'made' if first else 'started'}",
                marks=() if few else pytest.mark.proof,
            )


@pytest.mark.parametrize(("point", "first"), list(cases()))
def test_a_kill_at_any_point_leaves_a_machine_that_the_next_run_uses_and_stops(
    space: Space, point: str, first: bool
) -> None:
    kept(space)
    if not first:
        ran(space, 1)
    space.recipe(STEP.replace("echo 1", "echo 2"))
    code, _, said = space.command("run", "--stack", "tiny", env={"RECIPE_CRASH_AT": point})
    assert code == -signal.SIGKILL, said
    ran(space, 2)
    space.recipe(STEP.replace("echo 1", "echo 3"))
    code, _, said = space.command("run", "--stack", "tiny")
    assert code == 0, said
    events = provider(space)
    assert events[-1] == "stopped" and events.count("created") == 1 + events.count("destroyed"), (
        events
    )
    assert status(space)["uses"] == [] and space.command("stack", "down", "tiny")[0] == 0
    assert provider(space).count("destroyed") == provider(space).count("created")
    assert "no leases" in space.command("reap")[1]


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("gcp", "boot=0.1,takes=0.1,foreign=3"),
        pytest.param("vastai", "boot=0.1,foreign=3", marks=pytest.mark.proof),
        pytest.param("runpod", "boot=0.1,foreign=3", marks=pytest.mark.proof),
    ],
)
def test_a_provider_s_machine_is_kept_between_runs(
    space: Space, monkeypatch: pytest.MonkeyPatch, name: str, faults: str
) -> None:
    with fake_provider(name, "--hosts", "real", "--clock", "real", "--faults", faults) as real:
        rents(space, real, monkeypatch, name)
        stack(
            space,
            f"driver = '{name}'\nkeep = 'stopped'\nauto_stop = '1h'\nstore = 'results'\n[stores.results]\nurl = 'results'\npush = true\n",
        )
        code, _, said = space.command("stack", "up", "tiny")
        assert (
            code == 0
            and "created the store " in said
            and ("created the firewall rule recipe-" in said) is (name == "gcp")
        ), said
        assert "created" not in space.command("stack", "up", "tiny")[2]
        ran(space, 1)
        assert any((space.root / "results").iterdir()), "a stack's runs push to its store"
        space.recipe(
            "steps:\n  s: {run: 'ls ~/.recipe-host/agent > /dev/null && echo 2 > o', outputs: {o: o}, resources: {gpus: 1}}\n"
        )
        code, _, said = space.command("run", "--stack", "tiny")
        assert code == 0 and space.read("o") == "2\n", said
        assert ours(real) == ["created", "started", "stopped", "started", "stopped"]
        assert status(space)["stands"] == "stopped"
        code, out, _ = space.command("stack", "down", "tiny")
        assert (
            code == 0
            and "and its results are kept" in out
            and ("deleted the firewall rule " in out) is (name == "gcp")
        )
        assert (
            ours(real)[-1] == "destroyed"
            and not alive(real)
            and len(alive(real, foreign=True)) == 3
        )


@pytest.mark.proof
@pytest.mark.parametrize("name", ["gcp", "vastai", "runpod"])
def test_a_kept_machine_stops_when_its_time_is_over_also_after_a_second_start(
    space: Space, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By the provider, or by the machine itself with the key that it was given."""
    with fake_provider(
        name,
        "--hosts",
        "real",
        "--clock",
        "real",
        "--faults",
        "boot=0.1" + ",takes=0.1" * (name == "gcp"),
    ) as real:
        rents(space, real, monkeypatch, name, least=1)
        stack(
            space,
            f"driver = '{name}'\nkeep = 'stopped'\nauto_stop = '{30 if name == 'gcp' else 8}s'\n",
        )
        for times in (1, 2):
            code, _, said = space.command("stack", "up", "tiny")
            assert code == 0, said
            until(lambda: ours(real).count("stopped") == times)  # noqa: B023
        assert (
            ours(real) == ["created", "started", "stopped", "started", "stopped"]
            and len(alive(real)) == 1
        )


@pytest.mark.proof
def test_a_pod_that_comes_back_without_its_gpus_is_ended_and_another_is_rented(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_provider(
        "runpod", "--hosts", "real", "--clock", "real", "--faults", "boot=0.05,fewer=1"
    ) as real:
        rents(space, real, monkeypatch, "runpod")
        stack(space, "driver = 'runpod'\nkeep = 'stopped'\n")
        space.recipe(
            "steps:\n  s: {run: 'echo $HOME > o', outputs: {o: o}, resources: {gpus: 1}}\n"
        )
        code, _, said = space.command("run", "--stack", "tiny")
        assert code == 0 and status(space)["stands"] == "stopped", said
        first = status(space)
        assert first["usd_an_hour_stopped"] == pytest.approx(2 * 0.10 / 30 / 24 * 32), (
            "a volume costs twice as much while its pod stands still"
        )
        assert space.command("run", "--stack", "tiny", "--force")[0] == 0
        assert ours(real) == [
            "created",
            "started",
            "stopped",
            "started",
            "destroyed",
            "created",
            "started",
            "stopped",
        ]
        assert status(space)["machine"] != first["machine"] and len(alive(real)) == 1
        assert space.command("stack", "down", "tiny")[0] == 0 and not alive(real)


@pytest.mark.proof
@pytest.mark.parametrize("first", [True, False], ids=["made", "started"])
def test_a_kill_at_any_point_leaves_a_pod_that_the_next_run_uses_and_stops(
    space: Space, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    with fake_provider(
        "runpod", "--hosts", "real", "--clock", "real", "--faults", "boot=0,foreign=3,late=1"
    ) as real:
        rents(space, real, monkeypatch, "runpod", settles=1.1)
        stack(space, "driver = 'runpod'\nkeep = 'stopped'\n")
        for n, point in enumerate(POINTS):
            if not first:
                ran(space, 3 * n)
            space.recipe(STEP.replace("echo 1", f"echo {3 * n + 1}"))
            code, _, said = space.command("run", "--stack", "tiny", env={"RECIPE_CRASH_AT": point})
            assert code == -signal.SIGKILL, (point, said)
            ran(space, 3 * n + 1)
            ran(space, 3 * n + 2)
            assert (
                status(space)["uses"] == []
                and status(space)["stands"] == "stopped"
                and len(alive(real)) == 1
            ), point
            if first:
                assert space.command("stack", "down", "tiny")[0] == 0 and not alive(real), point
        assert space.command("stack", "down", "tiny")[0] == 0
        assert (
            not alive(real)
            and len(alive(real, foreign=True)) == 3
            and "no leases" in space.command("reap")[1]
        )
