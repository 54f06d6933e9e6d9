"""A step that the kernel kills for memory is told as that; with a real limit, where cgroups let us set one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import Space, until

LIMIT = 256 << 20


@pytest.fixture
def small_room() -> Iterator[Path]:
    """A cgroup of our own with little memory."""
    by_kind = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    places = [
        (
            Path(f"/sys/fs/cgroup/memory{by_kind.get('memory', '/none')}"),
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
        ),
        (Path(f"/sys/fs/cgroup{by_kind.get('', '/none')}"), "memory.max", "memory.swap.max"),
    ]
    why = "no memory cgroup is ours to write"
    for parent, limit, swap in places:
        room = parent / f"recipe-test-{os.getpid()}"
        try:
            room.mkdir()
            (room / limit).write_text(str(LIMIT))
        except OSError as error:
            why = str(error)
            with suppress(OSError):
                room.rmdir()
            continue
        with suppress(OSError):
            (room / swap).write_text(str(LIMIT if "memsw" in swap else 0))
        try:
            yield room
        finally:
            until(lambda room=room: not (room / "cgroup.procs").read_text())
            room.rmdir()
        return
    pytest.skip(f"this process may not limit memory: {why}")


def test_a_step_that_takes_more_memory_than_there_is_is_reported_as_that(
    space: Space, small_room: Path
) -> None:
    space.recipe(
        'steps: {hungry: {run: [python, -c, "b = [bytearray(1 << 20) for _ in range(1024)]"]}}'
    )
    procs = small_room / "cgroup.procs"
    process = space.start("run", preexec_fn=lambda: procs.write_text(str(os.getpid())))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "killed by the kernel: out of memory" in err + out
    assert "exit 137" not in err + out
