"""Workers, the queue and rented machines as a server shows them: who is idle, why a run waits, what a machine costs, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.interface.cli.main import main
from runner.storage.records.ledger import LeaseRow, Ledger
from tests.servers.rest import Rest
from tests.support import RECIPE, until

HELLO = """\
recipe: hello@1
steps: {say: {run: 'echo hello > {{ outputs.o }}', outputs: {o: hello.txt}}}
"""
SETTINGS = """\
[recipes]
allow = ["hello.yaml"]
[drivers.loopback]
price = 1.2
gpus = 1
root = "cloud"
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("queue") / "space"
    root.mkdir()
    (root / "hello.yaml").write_text(HELLO)
    (root / "recipe.toml").write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RECIPE_LEDGER", str(root.with_name("ledger.db")))
        with Rest(root) as server:
            yield server


def idle(rest: Rest, *words: str) -> subprocess.Popen[bytes]:
    """A worker that waits for runs, and of which the server has heard."""
    known = len(rest.get("/v1/workers")["workers"])
    worker = subprocess.Popen(
        [*RECIPE, "worker", "-qq", *words], cwd=rest.root, stdin=subprocess.DEVNULL
    )
    until(lambda: len(rest.get("/v1/workers")["workers"]) > known)
    return worker


def waits(rest: Rest) -> dict[str, tuple[int, str]]:
    """Place and reason of each run that waits."""
    found = rest.get("/v1/queue")["runs"]
    return {each["run"]: (each["position"], each["waits"]["kind"]) for each in found}


def leased(key: str, run: str, workspace: str, state: str = "ASKED") -> None:
    """Note a lease of a machine."""
    offer = {"resources": {"gpus": 2, "gpu": "H100"}}
    row = LeaseRow(key, "loopback", run, workspace, {}, "me", "ASKED", offer, until=9e9, price=36.0)
    with Ledger.open(Path(os.environ["RECIPE_LEDGER"]).with_name("ledger.db")) as ledger:
        ledger.ask(row)


def test_an_idle_worker_is_shown_with_what_it_takes_until_it_ends(rest: Rest) -> None:
    worker = idle(rest, "--label", "gpu=a100", "--driver", "ssh", "--at-most", "user=2")
    try:
        (found,) = rest.get("/v1/workers")["workers"]
        assert (found["alive"], found["idle"], found["capacity"]) == (True, True, 1)
        assert str(worker.pid) in found["worker"] and found["runs"] == []
        assert (found["driver"], found["labels"]) == ("ssh", {"gpu": "a100"})
        assert found["at_most"] == {"user": 2} and found["heard"] >= found["since"]
    finally:
        worker.terminate()
        worker.wait(60)
    assert rest.get("/v1/workers")["workers"] == []


def test_a_worker_that_was_killed_is_shown_as_dead_with_when_it_was_heard_of(rest: Rest) -> None:
    worker = idle(rest, "--driver", "ssh")
    worker.send_signal(signal.SIGKILL)
    worker.wait(60)
    (found,) = rest.get("/v1/workers")["workers"]
    assert (found["alive"], found["idle"]) == (False, False) and found["heard"]


def test_a_queue_has_its_order_and_why_each_run_waits(rest: Rest) -> None:
    first, second = rest.submit(), rest.submit(labels={"gpu": "a100"})
    later = rest.submit(not_before="2099-01-01T00:00:00Z")
    assert waits(rest) == {
        first: (1, "no-worker"),
        second: (2, "no-worker"),
        later: (3, "not-due"),
    }
    worker = idle(rest, "--driver", "ssh")
    try:
        assert waits(rest)[first] == (1, "driver")
        assert (
            rest.get(f"/v1/runs/{first}")["waits"]["fix"]
            == "start one with `recipe worker --driver local`"
        )
    finally:
        worker.terminate()
        worker.wait(60)
    assert rest.ask("PATCH", f"/v1/runs/{second}", {"priority": 7}).json()["priority"] == 7
    assert waits(rest)[second] == (1, "no-worker") and waits(rest)[first][0] == 2
    last = rest.get(f"/v1/runs/{second}/events")["events"][-1]
    assert (last["reason"], last["data"]) == ("prioritized", {"priority": 7})
    assert rest.get(f"/v1/runs/{second}")["position"] == 1
    for run in (first, second, later):
        assert rest.ask("POST", f"/v1/runs/{run}/cancel").status_code == 202
    assert waits(rest) == {} and rest.get(f"/v1/runs/{first}")["waits"] is None
    gone = rest.ask("PATCH", f"/v1/runs/{first}", {"priority": 1})
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "final")
    assert rest.ask("PATCH", f"/v1/runs/{first}", {"priority": 10**9}).status_code == 422


def test_a_machine_that_nothing_uses_is_shown_with_its_cost_and_can_be_ended(rest: Rest) -> None:
    leased("k1", "", str(rest.root))
    leased("k2", "20260101-000000-abcdef", "/no/such/workspace")

    def shown() -> dict[str, Any]:
        found = rest.get("/v1/leases")
        assert found["usd_an_hour"] == 36.0 * len(found["leases"])
        return {each["key"]: each for each in found["leases"]}

    found = shown()
    assert (found["k1"]["here"], found["k2"]["here"]) == (True, False)
    assert (found["k1"]["gpus"], found["k1"]["gpu"], found["k1"]["used"]) == (2, "H100", "unknown")
    assert (found["k1"]["run"], found["k2"]["run"]) == ("", "20260101-000000-abcdef")
    assert 0 < found["k1"]["usd"] < 36 and found["k1"]["until"] > found["k1"]["since"]
    ended = rest.ask("POST", "/v1/leases/k1/end").json()
    assert ended == {"key": "k1", "ended": True, "said": ""}
    assert list(shown()) == ["k2"]
    assert rest.ask("POST", "/v1/leases/k1/end").status_code == 404
    reader = rest.ask("POST", "/v1/tokens", {"scope": "read"}).json()["token"]
    assert rest.ask("POST", "/v1/leases/k2/end", token=reader).status_code == 403
    assert rest.ask("POST", "/v1/leases/k2/end").json()["ended"]


@pytest.mark.parametrize("place", ["here", "server"])
def test_the_command_line_shows_the_queue_and_changes_its_order(
    rest: Rest, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPE_TOKEN", rest.token)
    to = ("--to", rest.url if place == "server" else "here")
    first, second = rest.submit(), rest.submit()

    def command(*words: str) -> str:
        capsys.readouterr()
        assert main(["-C", str(rest.root), *words, *to]) == 0
        return capsys.readouterr().out

    def order() -> list[str]:
        return [each["run"] for each in json.loads(command("queue", "--json"))["runs"]]

    assert order() == [first, second]
    assert "with priority 5" in command("prioritize", second[-6:], "5")
    assert order() == [second, first]
    told = command("queue").splitlines()
    assert told[0].split()[:2] == ["RUN", "RECIPE"] and "no worker is running" in told[1]
    assert "no worker is running; start a worker with `recipe worker` (position 2" in command(
        "show", first
    )
    for run in (first, second):
        rest.ask("POST", f"/v1/runs/{run}/cancel")
    assert command("queue").startswith("no queued runs\n")
