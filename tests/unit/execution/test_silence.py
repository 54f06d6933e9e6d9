"""Alerts about machines that do not answer."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps import silence
from runner.execution.steps.silence import Silences
from tests.virtual import virtual


class World:
    def __init__(self, *, away: bool = True, letters: bool = True) -> None:
        self.host, self.contact = Of(failing_for=0.0), Of(silent_for=0.0)
        self.said, self.posted, self.logged = list[str](), list[Any](), list[str]()
        place: Any = Of(name="h1", contact=self.contact, host=self.host)
        place.members = [place]
        pool: Any = Of(is_remote=away, places=[place], name="ssh", instance_of=lambda _place: "i-1")
        runs = Of(get=lambda run: run, outbox=Of(post=lambda *words: self.posted.append(words)))
        alert = Of(alert=lambda _row, name, *_words: name)
        ws: Any = Of(
            config=Of(flags={"alerts.silent_minutes": 2.0}),
            store=Of(runs=runs),
            letters=alert if letters else None,
        )
        self.silences = Silences(ws, Of(run="r", say=self.said.append), pool)  # type: ignore[arg-type]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    log = lambda _ws, _run, _name, _instance, what: made.logged.append(what)  # noqa: E731
    monkeypatch.setattr(silence, "log_remote", log)
    return made


def looks(world: World, seconds: int) -> None:
    for _ in range(seconds):
        LOOP[0].now += 1.0
        world.silences.check()


LOOP: list[Any] = []


@pytest.fixture(autouse=True)
def clock() -> Any:
    with virtual() as loop:
        LOOP[:] = [loop]
        yield


def test_an_alert_is_raised_once_after_the_minutes_of_the_settings(world: World) -> None:
    world.contact.silent_for = 1.0
    looks(world, 100)
    assert not world.said
    looks(world, 100)
    assert len(world.said) == 1 and world.said[0].startswith("h1 has not answered for 2 minutes;")
    assert world.logged == ["machine_silent"] and world.posted == [("r", "machine_silent")]
    world.contact.silent_for = 0.0
    looks(world, 2)
    assert world.said[1].startswith("h1 answers again, after") and len(world.said) == 2
    assert world.logged[1:] == ["machine_answers"]


def test_a_short_silence_is_not_spoken_of(world: World) -> None:
    world.host.failing_for = 1.0
    looks(world, 60)
    world.host.failing_for = 0.0
    looks(world, 60)
    world.host.failing_for = 1.0
    looks(world, 100)
    assert not world.said


def test_each_silence_of_a_machine_whose_connection_fails_has_its_own_alert(world: World) -> None:
    world.host.failing_for = 1.0
    looks(world, 200)
    world.host.failing_for = 0.0
    looks(world, 60)
    assert len(world.said) == 2
    world.host.failing_for = 1.0
    looks(world, 100)  # counted from its own start
    assert len(world.said) == 2
    looks(world, 100)
    assert len(world.said) == 3 and world.said[2].startswith("h1 has not answered for 2 minutes;")


def test_this_machine_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(away=False)
    world.contact.silent_for = 1.0
    looks(world, 200)
    assert not world.said


def test_without_receivers_the_console_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(letters=False)
    monkeypatch.setattr(silence, "log_remote", lambda *_words: None)
    world.contact.silent_for = 1.0
    looks(world, 200)
    assert len(world.said) == 1 and not world.posted
