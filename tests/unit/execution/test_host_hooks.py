"""Each host of a run has its setup, health and cleanup commands once."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

from runner.execution.steps.host_hooks import HostHooks


def test_a_host_has_one_set_of_hooks_with_the_settings_of_the_plan() -> None:
    settings = Of(setup=["make data"], health=None, cleanup=None)
    steps: Any = Of(plan=Of(settings=settings, inputs={"size": 3}))
    hosts: list[Any] = [
        Of(name=name, capacity=Of(template_host=lambda _spec: {})) for name in ("one", "two")
    ]
    hooks = HostHooks(steps, "r1", 4)
    first, second = (hooks.of(host) for host in hosts)
    assert hooks.of(hosts[0]) is first is not second
    assert [each.place.name for each in hooks] == ["one", "two"]
    assert first._settings is settings and (first._run, first._fence) == ("r1", 4)
    assert first._scope["inputs"] == {"size": 3}
