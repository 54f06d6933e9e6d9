"""A workspace that rents at a fake provider: its settings, and what the provider's ledger says."""

from __future__ import annotations

import functools
import json
import tempfile
import urllib.request
from pathlib import Path

import asyncssh
import pytest

from tests.fake_provider import Provider
from tests.support import Space

TRAIN = """
import random, sys
random.seed(7)
w, rows = 0.0, [(x / 10, 3 * x / 10 + random.gauss(0, 0.1)) for x in range(20)]
for step in range(50):
    w -= 0.05 * sum(2 * (w * x - y) * x for x, y in rows) / len(rows)
    print(f"step {step} w {w:.17g}")
open(sys.argv[1], "w").write(f"{w:.17g}\\n")
"""
RECIPE = (
    "steps:\n  data: {run: 'echo 20 rows > data.txt', outputs: {data: data.txt}}\n"
    "  train:\n    run: 'python3 train.py model.txt; cat {{ steps.data.data }} >> model.txt; echo $JOB_ID $JOB_URL >> model.txt; nvidia-smi -L | wc -l >&2'\n    code: [train.py]\n    env: {JOB_URL: http://jobs/}\n    pass_env: [JOB_ID]\n"
    "    resources: {gpus: 1}\n    outputs: {model: model.txt}\n"
    "  report: {run: 'wc -c < {{ steps.train.model }} > report.txt', outputs: {report: report.txt}}\n"
)


def rents(
    space: Space,
    provider: Provider,
    monkeypatch: pytest.MonkeyPatch,
    name: str = "vastai",
    **settings: object,
) -> None:
    """Have a workspace rent there, with the key of that account and an installation of its own."""
    for variable, value in provider.exports.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("JOB_ID", "job-7")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(space.root.parent / "config"))
    given = {"poll": 0.1, "settles": 0.2, **settings}
    space.write(
        "recipe.toml",
        f"[drivers.{name}]\n"
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()),
    )


def ours(provider: Provider) -> list[str]:
    """What happened to machines that bear a mark of `recipe`."""
    return [
        entry["event"]
        for entry in provider.ledger()
        if entry["mark"].startswith("recipe-") and entry["event"] != "billed"
    ]


def alive(provider: Provider, foreign: bool = False) -> set[str]:
    """The machines of ours, or of others, that are there still."""
    told = [
        entry for entry in provider.ledger() if entry["mark"].startswith("recipe-") is not foreign
    ]
    gone = {entry["machine"] for entry in told if entry["event"] == "destroyed"}
    return {entry["machine"] for entry in told} - gone


def installation(space: Space) -> Path:
    return space.root.parent / "config" / "recipe" / "installation"


def same_as_here(space: Space, driver: str, *words: str) -> None:
    """Run RECIPE on a rented machine and here: the same bytes, with the step's environment and the caller's variables in both."""
    space.write("train.py", TRAIN)
    space.recipe(RECIPE)
    code, _, said = space.command("run", "--driver", driver, *words)
    assert code == 0, said
    there = {name: (space.root / name).read_bytes() for name in ("model.txt", "report.txt")}
    assert there == _made_here() and there["model.txt"].endswith(b"job-7 http://jobs/\n")


@functools.cache
def _made_here() -> dict[str, bytes]:
    """What RECIPE makes on this machine."""
    with tempfile.TemporaryDirectory() as place:
        here = Space(Path(place) / "here")
        here.write("train.py", TRAIN)
        here.recipe(RECIPE.replace("    resources: {gpus: 1}\n", ""))
        here.run()
        return {name: (here.root / name).read_bytes() for name in ("model.txt", "report.txt")}


def key_of_the_account(provider: Provider, place: Path) -> str:
    """The file of a new private SSH key, whose public half the account at Prime has."""
    made = asyncssh.generate_private_key("ssh-ed25519")
    made.write_private_key(place / "key")
    body = json.dumps(
        {"name": "ours", "publicKey": made.export_public_key().decode().strip()}
    ).encode()
    headers = {
        "Authorization": f"Bearer {provider.exports['PRIME_API_KEY']}",
        "Content-Type": "application/json",
    }
    with urllib.request.urlopen(
        urllib.request.Request(f"{provider.url}/api/v1/ssh_keys", body, headers), timeout=20
    ) as reply:
        assert reply.status == 200
    return str(place / "key")
