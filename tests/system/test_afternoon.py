"""The first afternoon with a repository of another shape, as `tests/afternoon.sh` types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "afternoon.sh"


def test_the_first_afternoon_goes_as_it_is_written_down(tmp_path: Path) -> None:
    env = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PROJECT")
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["sh", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(SCRIPT.read_text().splitlines()) <= 40
