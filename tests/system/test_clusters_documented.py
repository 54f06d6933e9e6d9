"""What docs/clusters.md has a newcomer type works, on a cluster of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.servers.slurm import Slurm, slurm  # noqa: F401  (a fixture)
from tests.support import Space

DOCUMENT = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_the_first_allocation_takes_five_lines(space: Space, slurm: Slurm) -> None:  # noqa: F811
    section = DOCUMENT.read_text("utf-8").split("## The first allocation")[1].split("\n## ")[0]
    yaml, console = (
        re.search(r'```yaml title="squares.yaml"\n(.*?)```', section, re.DOTALL),
        re.search(r"```console\n(.*?)```", section, re.DOTALL),
    )
    assert yaml and console
    space.write("squares.yaml", yaml[1])
    space.write("recipe.toml", f"[drivers.slurm]\nroot = '{space.root.parent}/there'\n")
    env = {**os.environ, **slurm.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", console[1], re.MULTILINE)
    assert len(lines) == 5
    for line, printed in lines:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=space.root,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert printed == "…\n" or done.stdout == printed
        if line == "recipe run ./squares.yaml":
            assert (
                "0 ran, 1 fresh" in done.stdout + done.stderr
                or "fresh" in done.stdout + done.stderr
            )
