"""Promise: whenever a run is killed, a run and `recipe reap` later no machine of ours is left at the provider, and those of others are untouched.

Runs have a limit of cost and rent on the spot market, at a provider that fails, throttles, and has odd prices.
No workspace ever has two machines at once, no step ends twice, and what a run brings home is what a run here makes.

RECIPE_RENTED_KILLS says how many kills at random moments there are, beside one at each crash point.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.storage.records.ledger import Ledger
from tests.fake_provider import Provider, provider
from tests.rented import TRAIN, alive, key_of_the_account, rents
from tests.support import Space

KILLS = int(os.environ.get("RECIPE_RENTED_KILLS", "5"))
POINTS = (
    "lease-intended",
    "lease-asked",
    "lease-recorded",
    "lease-up",
    "release-intended",
    "release-asked",
    "release-proved",
)
WAVE = 12
"""Kills before everything is reaped: each machine that a dead run leaves is a process here."""
PATIENCE = 600.0
MARKETS = {"vastai": "spot", "gcp": "spot", "prime": "any"}
"""Prime has few spot machines, and RunPod none."""
QUIET = "boot=0,foreign=20,late=1"
FAULTS = QUIET + ",throttled=0.02,broken=0.02,reserved=1,preempted=30,spelled=0.3,unpriced=0.2"
STEP = "limits: {{cost: 3 USD}}\nsteps:\n  s: {{run: 'python3 train.py o; sleep 0.1; echo 1 >> {ended}', code: [train.py], resources: {{gpus: 1}}, outputs: {{o: o}}}}\n"


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
def test_no_kill_of_a_run_leaks_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RECIPE_LEDGER", str(tmp_path / "ledger.db"))
    luck = random.Random(13)
    cases: list[tuple[Space, str, float]] = []
    more_of_google = ",takes=0.1,quota=500" * (name == "gcp")
    faults = QUIET + more_of_google
    with provider(name, "--hosts", "real", "--clock", "real", "--faults", faults) as running:
        key = key_of_the_account(running, tmp_path) if name == "prime" else ""
        for n, point in enumerate([*POINTS, *[""] * KILLS]):
            space = Space(tmp_path / f"space-{n}")
            more = {"first_use": True, "key": key} if name == "prime" else {}
            if name in MARKETS:
                more["market"] = MARKETS[name]
            rents(space, running, monkeypatch, name, settles=1.1, **more)
            space.write("train.py", TRAIN)
            space.recipe(STEP.format(ended=tmp_path / f"ended-{n}"))
            cases.append((space, point, luck.uniform(0.4, 4.0)))

        def killed(case: tuple[Space, str, float]) -> int:
            space, point, moment = case
            worker = space.start(
                "run",
                "--driver",
                name,
                "--unattended",
                env={"RECIPE_CRASH_AT": point},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                worker.wait(PATIENCE if point else moment)
            except subprocess.TimeoutExpired:
                worker.send_signal(signal.SIGKILL)
            return worker.wait(60)

        def again(case: tuple[Space, str, float]) -> tuple[int, str]:
            worker = case[0].start(
                "run",
                "--driver",
                name,
                "--unattended",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            said, _ = worker.communicate(timeout=PATIENCE)
            return worker.returncode, said

        resumed: list[Space] = []
        # Of the first each reaches its crash point: the others meet faults, too.
        begins = [0, *range(len(POINTS), len(cases), WAVE)]
        for begin, end in zip(begins, [*begins[1:], len(cases)], strict=True):
            wave = cases[begin:end]
            with ThreadPoolExecutor(6) as several:
                codes = list(several.map(killed, wave))
                after = list(several.map(again, wave[1::3]))
            assert [
                point
                for code, (_, point, _) in zip(codes, wave, strict=True)
                if point and code != -9
            ] == []
            assert [said for code, said in after if code] == []
            resumed += [case[0] for case in wave[1::3]]
            reaper = wave[0][0].start(
                "reap", "--dead", "--yes", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            said, _ = reaper.communicate(timeout=PATIENCE)
            left = alive(running)
            assert reaper.returncode == 0 and not left, (
                said,
                left,
                [entry for entry in running.ledger() if entry["machine"] in left][:2],
            )
            running.ask("/_faults", FAULTS + more_of_google)
            print(f"{name}: {end} kills, {len(resumed)} resumed, 0 left")
        here = Space(tmp_path / "here")
        here.write("train.py", TRAIN)
        here.recipe(STEP.format(ended=tmp_path / "ended").replace("resources: {gpus: 1}, ", ""))
        here.run()
        assert {space.read("o") for space in resumed} == {here.read("o")}
        assert {
            path.name: text
            for path in tmp_path.glob("ended-*")
            if (text := path.read_text()) != "1\n"
        } == {}, "a step that ended was run again"
        assert len(alive(running, foreign=True)) == 20
        assert {
            entry["event"] for entry in running.ledger() if not entry["mark"].startswith("recipe-")
        } <= {"created", "started", "billed"}
        assert twice(running, tmp_path / "ledger.db") == []


def twice(running: Provider, path: Path) -> list[str]:
    """Workspaces that had two machines at once."""
    with Ledger.open(path, read_only=True) as ledger:
        spaces = {row.key: row.workspace for row in ledger.since(0)}
    found, living = [], dict[str, str]()
    for entry in running.ledger():
        if (space := spaces.get(entry["mark"].rpartition("-")[2])) is None:
            continue
        if (
            entry["event"] == "created"
            and living.setdefault(space, entry["machine"]) != entry["machine"]
        ):
            found.append(f"{space}: {entry['machine']} beside {living[space]}")
        elif entry["event"] == "destroyed" and living.get(space) == entry["machine"]:
            del living[space]
    return found
