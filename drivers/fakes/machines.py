"""Run a local process for each machine of a World that is up.

The World decides which machines exist, and `Machines` follows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from .faults import Luck
from .world import Boot, World

GLANCE: Final = 0.1
"""Seconds between two checks of the World."""


SMI: Final = """#!/bin/sh
# What nvidia-smi of a machine with these GPUs says to those who ask for its list or for a few of its fields.
card=0
while [ $card -lt {gpus} ]; do
    uuid=GPU-{digest}-0000-0000-0000-00000000000$card
    case $1 in
    -L) echo "GPU $card: {gpu} (UUID: $uuid)" ;;
    --query-gpu=*)
        row=
        for field in $(echo "${{1#*=}}" | tr , ' '); do
            case $field in
            name | gpu_name) value='{gpu}' ;;
            memory.total) value={memory} ;;
            driver_version) value=580.95.05 ;;
            index) value=$card ;;
            uuid | gpu_uuid) value=$uuid ;;
            *) value='[N/A]' ;;
            esac
            row="$row${{row:+, }}$value"
        done
        echo "$row" ;;
    *) [ $card -gt 0 ] || echo 'NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0' ;;
    esac
    card=$((card + 1))
done
[ $card -gt 0 ] || {{ echo 'No devices were found' >&2; exit 6; }}
"""


class Machines:
    """Local processes that play a fake provider's machines, each in a directory below `root`."""

    def __init__(self, world: World[Any], root: Path) -> None:
        self._world, self._root = world, root
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._ports: dict[str, int] = {}
        world.ports = self._ports

    async def follow(self) -> None:
        """Start processes of new machines, end those of stopped machines, and update keys, once."""
        boots = self._find_boots()
        stopped = [name for name in self._running if name not in boots]
        for name in stopped:
            await self._end(name)
        for name, boot in boots.items():
            await self._update(name, self._root / name, boot)
        self._remove_gone()

    def _find_boots(self) -> dict[str, Boot]:
        """Return the boot settings of all machines that should run, by name."""
        boots: dict[str, Boot] = {}
        for name, machine in self._world.account.machines.items():
            boot = self._world.boot(machine) if machine.up else None
            if boot is not None:
                boots[name] = boot
        return boots

    async def _update(self, name: str, place: Path, boot: Boot) -> None:
        """Start a machine's process if it is new, and write the machine's keys."""
        if name not in self._running:
            await self._begin(name, place, boot)
        _write(place / "keys", "".join(f"{key}\n" for key in boot.keys))
        if boot.swept:
            (place / "home" / ".ssh" / "authorized_keys").unlink(missing_ok=True)

    def _remove_gone(self) -> None:
        """Remove the directories of deleted machines."""
        for name, machine in self._world.account.machines.items():
            place = self._root / name
            if machine.gone is not None and place.exists():
                shutil.rmtree(place, ignore_errors=True)

    async def _begin(self, name: str, place: Path, boot: Boot) -> None:
        _prepare_home(place / "home", boot)
        env = {"USER": boot.user, "LOGNAME": boot.user, **dict(boot.env)}
        if self._world.account.machines[name].impostor:
            env["RECIPE_SSHD_KEYS"] = str(place / "unseen")
        _write(place / "env", json.dumps(env))
        _write(place / "keys", "".join(f"{key}\n" for key in boot.keys))
        self._write_smi(name, place / "bin" / "nvidia-smi", boot)
        if boot.script:
            _write(place / "boot", boot.script)
        pipe = asyncio.subprocess.PIPE
        with (place / "sshd.log").open("ab") as log:
            words = (
                sys.executable,
                "-m",
                "drivers.fakes.sshd",
                str(place),
                boot.address,
                str(boot.port),
            )
            begun = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=log
            )
        assert begun.stdout is not None
        self._running[name] = begun
        self._ports[name] = int(await begun.stdout.readline())

    def _write_smi(self, name: str, path: Path, boot: Boot) -> None:
        """Write a machine's `nvidia-smi`, which hangs if the GPU driver is wedged."""
        path.parent.mkdir(exist_ok=True)
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        script = SMI.format(gpu=boot.gpu, gpus=boot.gpus, memory=boot.memory, digest=digest)
        if Luck(self._world.faults, name, "boot").strikes("wedged"):
            script = "#!/bin/sh\nexec sleep 900\n"
        _write(path, script)
        path.chmod(0o755)

    async def _end(self, name: str) -> None:
        self._ports.pop(name, None)
        begun = self._running.pop(name)
        assert begun.stdin is not None
        begun.stdin.close()
        await begun.wait()

    async def end(self) -> None:
        """End all machine processes."""
        for name in [*self._running]:
            await self._end(name)


def _prepare_home(home: Path, boot: Boot) -> None:
    """Create a machine's home directory, or remove all files that a restart does not keep."""
    home.mkdir(parents=True, exist_ok=True)
    if boot.kept is None:
        return
    for found in home.iterdir():
        if found.name in boot.kept:
            continue
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
