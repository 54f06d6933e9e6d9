"""Promise: whenever a run is killed, a run and `recipe reap` later no machine of ours is left at the provider, and those of others are untouched.

RECIPE_RENTED_KILLS says how many kills at random moments there are, beside one at each crash point; without it there is one, beside one at two points.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fake_provider import provider
from tests.rented import alive, key_of_the_account, rents
from tests.support import Space

KILLS = int(os.environ.get("RECIPE_RENTED_KILLS", "1"))
EVERY = ("lease-intended", "lease-asked", "lease-recorded", "lease-up", "release-intended", "release-asked", "release-proved")
POINTS = EVERY if "RECIPE_RENTED_KILLS" in os.environ else ("lease-asked", "release-asked")


@pytest.mark.longer
@pytest.mark.parametrize(
    "name",
    [
        "vastai",
        pytest.param("gcp", marks=pytest.mark.proof),
        pytest.param("runpod", marks=pytest.mark.proof),
        pytest.param("prime", marks=pytest.mark.proof),
    ],
)
def test_no_kill_of_a_run_leaks_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RECIPE_LEDGER", str(tmp_path / "ledger.db"))
    luck = random.Random(13)
    cases: list[tuple[Space, str, float]] = []
    faults = "boot=0,foreign=20,late=1" + ",takes=0.1,quota=500" * (name == "gcp")
    with provider(name, "--hosts", "real", "--clock", "real", "--faults", faults) as running:
        key = key_of_the_account(running, tmp_path) if name == "prime" else ""
        for n, point in enumerate([*POINTS, *[""] * KILLS]):
            space = Space(tmp_path / f"space-{n}")
            more = {"first_use": True, "key": key} if name == "prime" else {}
            rents(space, running, monkeypatch, name, settles=1.1, **more)
            space.recipe("steps:\n  s: {run: 'echo 1 > o; sleep 0.2', resources: {gpus: 1}, outputs: {o: o}}\n")
            cases.append((space, point, luck.uniform(0.4, 4.0)))

        def killed(case: tuple[Space, str, float]) -> int:
            space, point, moment = case
            worker = space.start(
                "run", "--driver", name, "--unattended", env={"RECIPE_CRASH_AT": point}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                worker.wait(60 if point else moment)
            except subprocess.TimeoutExpired:
                worker.send_signal(signal.SIGKILL)
            return worker.wait(60)

        def again(case: tuple[Space, str, float]) -> tuple[int, str]:
            code, _, said = case[0].command("run", "--driver", name, "--unattended")
            return code, said

        with ThreadPoolExecutor(6) as several:
            codes = list(several.map(killed, cases))
            resumed = [*cases[1 : len(POINTS) : 3], *cases[len(POINTS) :: 4]]
            after = list(several.map(again, resumed))
        assert codes[: len(POINTS)] == [-9] * len(POINTS)
        assert [said for code, said in after if code] == [] and {case[0].read("o") for case in resumed} == {"1\n"}
        code, out, said = cases[0][0].command("reap", "--dead", "--yes")
        assert code == 0, out + said
        left = alive(running)
        assert not left, (left, [(entry["machine"], entry["mark"]) for entry in running.ledger() if entry["machine"] in left][:1], out)
        assert len(alive(running, foreign=True)) == 20
