"""What this process may have of its machine, by the files of cgroups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.agent import cgroups
from runner.agent.sampler import Sampler
from runner.hosts.place.capacity import Capacity
from runner.storage.workspace import Workspace

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
ALL = float(len(os.sched_getaffinity(0)))
MB = 1 << 20


@pytest.mark.parametrize(
    ("ours", "files", "cpus", "memory"),
    [
        ("0::/", {"memory.max": f"{64 * MB}", "cpu.max": "50000 100000"}, 0.5, 64 * MB),
        (
            "0::/a/b",
            {
                "a/memory.max": f"{64 * MB}",
                "a/b/memory.max": "max",
                "a/b/cpu.max": "max 100000",
                "a/cpu.max": "25000 100000",
            },
            0.25,
            64 * MB,
        ),
        ("0::/of/another/machine", {"memory.max": f"{64 * MB}"}, ALL, 64 * MB),
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n0::/",
            {
                "memory/a/memory.limit_in_bytes": f"{64 * MB}",
                "cpu/cpu.cfs_quota_us": "20000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            0.2,
            64 * MB,
        ),
        (
            "4:memory:/\n1:cpu:/",
            {"memory/memory.limit_in_bytes": str(2**63 - 4096), "cpu/cpu.cfs_quota_us": "-1"},
            ALL,
            WHOLE,
        ),
        ("0::/", {}, ALL, WHOLE),
    ],
)
def test_a_machine_has_what_its_cgroups_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ours: str,
    files: dict[str, str],
    cpus: float,
    memory: int,
) -> None:
    monkeypatch.setattr(cgroups, "TOP", str(tmp_path))
    monkeypatch.setattr(cgroups, "OURS", str(tmp_path / "ours"))
    for name, text in {"ours": ours, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    with Workspace.open(tmp_path) as ws:
        assert ws.machine() == {"cpus": cpus, "memory": memory}
        assert Capacity(ws.machine(), tuple, 1, free=None).processors == max(1, int(cpus))  # type: ignore[arg-type]  # none is held
    assert bool(cgroups.memory()[1]) == (memory != WHOLE) and bool(cgroups.processors()[1]) == (
        cpus != ALL
    )


def test_what_a_bounded_group_uses_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "TOP", str(tmp_path))
    monkeypatch.setattr(cgroups, "OURS", str(tmp_path / "ours"))
    (tmp_path / "ours").write_text("0::/a\n")
    (tmp_path / "a").mkdir()
    told = {
        "memory.max": f"{64 * MB}",
        "memory.current": f"{40 * MB}",
        "memory.stat": f"anon 7\ninactive_file {8 * MB}",
    }
    told |= {"cpu.max": "50000 100000", "cpu.stat": "usage_usec 3000000"}
    for name, text in told.items():
        (tmp_path / name).write_text(text)  # of the group above
    sampler = Sampler()
    sampler.look([(b"train", os.fsencode(tmp_path / "a.log"), b"", b"", b"")])
    assert f'"ram_used_gb":{round(32 * MB / 1e9, 3)}' in (
        tmp_path / "a.latest"
    ).read_text().replace(" ", "")
    assert sampler._times[0] == 3.0
