"""Two threads that write one file at the same time write two temporary files."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runner.storage.workspace import Workspace


def test_threads_that_write_one_file_at_once_all_succeed(tmp_path: Path) -> None:
    with Workspace.open(tmp_path) as ws:
        target, together = ws.home / "plans" / "p.json", threading.Barrier(8)

        def write(n: int) -> None:
            for _ in range(50):
                together.wait(timeout=60)
                ws.write(target, str(n).encode() * 1000)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        assert len(set(target.read_bytes())) == 1 and len(target.read_bytes()) == 1000
        assert [path.name for path in target.parent.iterdir()] == ["p.json"]
