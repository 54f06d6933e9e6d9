"""Hosts whose health check fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as Of
from typing import Any

from drivers.base import Unreachable
from runner.execution.steps.health import HealthChecks
from tests.virtual import virtual


class Checked:
    """A host, what its checks answer, and how often it was asked."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = [*answers], 0
        self.place: Any = Of(name="h1", lost="")

    async def is_healthy(self, _command: object, _seconds: float) -> bool:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


def watch(host: Checked, seconds: float, *, health: bool = True) -> tuple[list[str], HealthChecks]:
    """The steps that were stopped on a host after some seconds."""
    stopped: list[str] = []

    async def stop() -> None:
        stopped.append("a")

    async def stop_other() -> None:
        stopped.append("b")

    here = Of(id="a", place=Of(members=[host.place]), stop=stop)
    elsewhere = Of(id="b", place=Of(members=[]), stop=stop_other)
    how = Of(run="check", every=10.0) if health else None
    steps: Any = Of(plan=Of(settings=Of(health=how)))
    running: Any = {"a": here, "b": elsewhere}
    hooks: Any = [host]
    checks = HealthChecks(steps, running, hooks)

    async def look() -> None:
        with checks.monitor():
            await asyncio.sleep(seconds)

    with virtual() as loop:
        loop.run_until_complete(look())
    return stopped, checks


def test_three_bad_looks_in_a_row_stop_what_runs_there() -> None:
    stopped, checks = watch(Checked(False), 35)
    assert stopped == ["a"]
    assert checks.take_sick("a") and not checks.take_sick("a") and not checks.take_sick("b")
    assert watch(Checked(False), 25)[0] == [] and watch(Checked(False), 65)[0] == ["a", "a"]


def test_a_good_look_begins_the_count_anew_and_an_unseen_host_counts_for_nothing() -> None:
    assert watch(Checked(False, False, True, False, False, True), 62)[0] == []
    far = Unreachable("far")
    assert watch(Checked(False, False, far, True), 100)[0] == []
    assert watch(Checked(False, far, False, False, True), 100)[0] == ["a"]


def test_a_lost_host_and_a_recipe_without_checks_are_not_looked_at() -> None:
    host = Checked(False)
    host.place.lost = "gone"
    assert watch(host, 100)[0] == [] and host.asked == 0
    host = Checked(False)
    assert watch(host, 100, health=False)[0] == [] and host.asked == 0
