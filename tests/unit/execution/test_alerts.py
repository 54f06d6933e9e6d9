"""Alerts of a run: printed, and sent to those that asked for them."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps import alerts


class Store:
    """A store with an outbox, and the letters that a server would write."""

    def __init__(self, *, has_letters: bool) -> None:
        self.posted, self.words = list[Any](), list[str]()
        self.store = Of(runs=self)
        self.outbox = Of(post=lambda run, letters: self.posted.append((run, letters)))
        self.letters = Of(alert=lambda *words: words) if has_letters else None
        self.run = "r1"

    def get(self, run: str) -> str:
        return f"row of {run}"

    def say(self, text: str) -> None:
        self.words.append(text)


@pytest.fixture(autouse=True)
def _at_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "time", Of(time=lambda: 1000.4))


@pytest.mark.parametrize(
    ("about", "id"), [("", "r1-low_disk-1000"), ("gpu-1", "r1-low_disk-gpu-1-1000")]
)
def test_an_alert_is_posted_once_a_second_for_each_thing_and_printed(about: str, id: str) -> None:
    store: Any = Store(has_letters=True)
    alerts.raise_alert(store, store, "low_disk", "5 % of the disk is free", about)
    letters = ("row of r1", "low_disk", id, 1000.4, "5 % of the disk is free")
    assert store.posted == [("r1", letters)] and store.words == ["5 % of the disk is free"]


def test_without_webhooks_it_is_only_printed() -> None:
    store: Any = Store(has_letters=False)
    alerts.raise_alert(store, store, "low_disk", "5 % of the disk is free")
    assert store.posted == [] and store.words == ["5 % of the disk is free"]
