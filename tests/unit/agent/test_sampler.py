"""What the agent writes of its host while a job runs: processors, memory, GPUs, and how far the job is."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivers.base import Command
from runner.agent import reach
from runner.agent.sampler import Sampler
from runner.hosts.link import client
from tests.support import old_python, until

OLD = old_python()
HOST = {"cpu_percent", "ram_used_gb", "disk_free_gb", "net_received_mb_per_s", "net_sent_mb_per_s"}


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    made = Sampler()
    yield made
    made.over(b"train")
    assert made.child == 0


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Two cards: each time that it is asked, the first is busier."""
    folder = tmp_path / "bin"
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\nprintf 'GPU-a, 90, 20000, 71, 300.5\\nGPU-b, 10, 1000, 40, [N/A]\\n'\nexec sleep 60\n"
    )
    smi.chmod(0o755)
    return folder


def looked(
    sampler: Sampler, folder: Path, *, locks: str = "", total: str = "", path: str = "/nowhere"
) -> Mapping[str, float]:
    sampler.look(
        [(b"train", os.fsencode(folder / "a.log"), locks.encode(), total.encode(), path.encode())]
    )
    lines = (folder / "a.host").read_text().splitlines()
    assert (folder / "a.latest").read_text() == f"{lines[-1]}\n"
    found: Mapping[str, float] = json.loads(lines[-1])
    return found


def test_a_look_tells_what_the_machine_has_to_do(sampler: Sampler, tmp_path: Path) -> None:
    looked(sampler, tmp_path)
    found = looked(sampler, tmp_path)
    assert HOST - {"cpu_percent"} <= found.keys() and abs(found["at"] - time.time()) < 5
    assert (
        0 < found["ram_used_gb"] < 100_000
        and found["disk_free_gb"] <= shutil.disk_usage(tmp_path).total / 1e9
    )
    assert not any(name.startswith("gpu") for name in found)


@pytest.mark.parametrize(
    ("locks", "percent", "used", "heat"),
    [("GPU-b", 10, 1.049, 40), ("GPU-a", 90, 20.972, 71), ("", 50, 20.972, 71)],
)
def test_the_gpus_are_those_that_the_job_holds_or_all(
    sampler: Sampler,
    tmp_path: Path,
    programs: Path,
    locks: str,
    percent: float,
    used: float,
    heat: float,
) -> None:
    until(
        lambda: "gpu_memory_used_gb" in looked(sampler, tmp_path, locks=locks, path=str(programs))
    )
    found = looked(sampler, tmp_path, locks=locks, path=str(programs))
    assert (
        found["gpu_utilization_percent"],
        found["gpu_memory_used_gb"],
        found["gpu_temperature_c"],
    ) == (percent, used, heat)
    assert found.get("gpu_power_w") == (None if locks == "GPU-b" else 300.5)


def test_how_far_a_training_is_comes_from_the_end_of_its_metrics(
    sampler: Sampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(step: int) -> None:
        with (tmp_path / "a.metrics").open("a") as file:
            file.write(f'{{"step": {step}, "loss": 1.5}}\n{{"loss": NaN\n{{"torn')

    tell(10)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    assert looked(sampler, tmp_path, total="50")["percent"] == 20.0
    (tmp_path / "a.metrics").write_text("")
    tell(20)
    monkeypatch.setattr(time, "time", lambda: now + 5)
    found = looked(sampler, tmp_path, total="50")
    assert (found["step"], found["total"], found["percent"], found["eta"]) == (20, 50, 40.0, 15.0)


def test_after_an_hour_a_line_is_written_once_a_minute(sampler: Sampler, tmp_path: Path) -> None:
    job = (b"train", os.fsencode(tmp_path / "a.log"), b"", b"", b"")
    for _ in range(744):
        sampler.look([job])
    assert len((tmp_path / "a.host").read_text().splitlines()) == 722


@pytest.mark.parametrize(
    "python",
    [
        pytest.param(None, id="this"),
        pytest.param(
            OLD,
            id="3.9",
            marks=pytest.mark.skipif(OLD is None, reason="there is no Python 3.9 here"),
        ),
    ],
)
def test_an_agent_looks_at_its_host_for_a_job_that_lasts_and_for_no_other(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, python: str | None
) -> None:
    if python is not None:
        monkeypatch.setattr(reach, "sys", SimpleNamespace(executable=python))
    monkeypatch.setattr(
        reach, "BEGIN", reach.BEGIN.replace("; server.main", "; server.SAMPLED = 0.2; server.main")
    )
    waits = (
        "/bin/sh",
        "-c",
        f"until grep -q gpu_power_w {tmp_path}/long.host; do sleep 0.02; done 2>/dev/null",
    )

    async def acting() -> None:
        host = client.connect_local(tmp_path / "root")
        try:
            short = await host.start(
                Command(("/bin/true",), str(tmp_path), {}, log=f"{tmp_path}/short.log"), "short"
            )
            long = await host.start(
                Command(
                    waits,
                    str(tmp_path),
                    {"PATH": f"{programs}:/bin:/usr/bin"},
                    log=f"{tmp_path}/long.log",
                ),
                "long",
            )
            assert await host.wait(short, timedelta(seconds=60)) is not None
            over = await host.wait(long, timedelta(seconds=60))
            assert over is not None and (over.code, over.strays) == (0, 0)
        finally:
            await host.aclose()

    asyncio.run(acting())
    assert not (tmp_path / "short.host").exists() and not list(tmp_path.glob("*.latest"))
