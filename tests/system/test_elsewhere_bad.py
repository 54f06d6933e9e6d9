"""What goes wrong on the way to other machines is one clear line, and an exit status that says whose turn it is."""

from __future__ import annotations

import os
import signal

from tests.servers.sshd import Sshd, sshd  # noqa: F401  (a fixture)
from tests.support import Space, until


def test_places_that_another_run_has_are_busy(space: Space) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    space.recipe(f"steps:\n  s: {{run: 'echo 1 > {space.root}/began; read go < {gate}', outputs: {{o: o}}}}\n")
    space.recipe("steps:\n  s: {run: 'echo 1 > p', outputs: {p: p}}\n", name="other.yaml")
    worker = space.start("run", "--driver", "loopback")
    until((space.root / "began").exists)
    code, _, said = space.command("run", "--driver", "loopback", "-f", "other.yaml")
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert code == 4, said
    assert "all places that loopback has are taken" in said and "Traceback" not in said


def test_a_root_that_cannot_be_written_is_reported_with_the_host_and_what_to_do(space: Space, sshd: Sshd) -> None:  # noqa: F811
    settings = sshd.settings()
    lines = [f"hosts = {settings['hosts']!r}", f"known_hosts = '{settings['known_hosts']}'", f"identity = '{settings['identity']}'", "agent = false"]
    space.write("recipe.toml", "[drivers.ssh]\nroot = '/proc/none'\n" + "\n".join(lines) + "\n")
    space.recipe("steps:\n  s: {run: 'echo 1 > o', outputs: {o: o}}\n")
    code, _, said = space.command("run", "--driver", "ssh")
    assert code == 2
    assert f"ssh {sshd.address} cannot be used" in said and "`root`" in said and "Traceback" not in said
