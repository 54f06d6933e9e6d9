"""What docs/clouds.md has a newcomer type works, without an account."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import Space

DOCUMENT = Path(__file__).parents[2] / "docs" / "clouds.md"


def test_a_newcomer_rents_is_killed_and_owes_nothing(space: Space) -> None:
    section = DOCUMENT.read_text("utf-8").split("## Try it without an account")[1].split("\n## ")[0]
    yaml, console = (
        re.search(r"```yaml\n(.*?)```", section, re.DOTALL),
        re.search(r"```console\n(.*?)```", section, re.DOTALL),
    )
    assert yaml and console
    space.write("tiny.yaml", yaml[1])
    space.write("recipe.toml", "[drivers.vastai]\npoll = 0.2\nsettles = 0.2\n")
    lines = [line.removeprefix("$ ") for line in console[1].splitlines()]
    assert len(lines) == 7
    home = space.root.parent
    env = {
        **os.environ,
        "XDG_CONFIG_HOME": str(home / "config"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with subprocess.Popen(
        ["sh", "-c", "\n".join(lines)],
        cwd=space.root,
        env=env,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None and shell.stderr is not None
        try:
            out = [line for line in iter(shell.stdout.readline, "") if line]
        finally:
            os.killpg(shell.pid, signal.SIGINT)
    told = "".join(out)
    assert "tiny@1" in told or "vastai for train: " in told, told
    assert space.read("cards.txt").startswith("GPU 0") and "no leases" in told and out[-1] == "1\n"
    assert re.search(r"vastai +[0-9a-f]{16} .* GONE ", told), told
