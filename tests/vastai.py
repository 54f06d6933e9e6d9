"""A workspace that rents at the fake Vast.ai: its settings, and what the provider's ledger says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_provider import Provider
from tests.support import Space


def rents(space: Space, provider: Provider, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Have a workspace rent there, with the key of that account and an installation of its own."""
    for name, value in provider.exports.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(space.root.parent / "config"))
    given = {"poll": 0.1, "settles": 0.2, **settings}
    space.write("recipe.toml", "[drivers.vastai]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))


def ours(provider: Provider) -> list[str]:
    """What happened to machines that bear a mark of `recipe`."""
    return [entry["event"] for entry in provider.ledger() if entry["mark"].startswith("recipe-") and entry["event"] != "billed"]


def alive(provider: Provider, foreign: bool = False) -> set[str]:
    """The machines of ours, or of others, that are there still."""
    told = [entry for entry in provider.ledger() if entry["mark"].startswith("recipe-") is not foreign]
    gone = {entry["machine"] for entry in told if entry["event"] == "destroyed"}
    return {entry["machine"] for entry in told} - gone


def installation(space: Space) -> Path:
    return space.root.parent / "config" / "recipe" / "installation"
