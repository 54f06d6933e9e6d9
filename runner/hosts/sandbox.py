"""Run a step's command in a sandbox: wrap the command, and check that a host supports sandboxes.

The program on the host is `agent/sandbox.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from drivers.base import Command

from .. import agent
from ..agent.sandbox import MARK
from ..errors import CannotRun
from .link.stream import agent_program

if TYPE_CHECKING:
    from .engines import Mount
    from .place.place import Place

FIX: Final = "allow user namespaces on the host, run the step on another host, or set `sandbox: false` in the step"
_HERE: Final = str(Path(agent.__file__).parents[1])
_BEGIN: Final = (
    "import os, pwd, sys; home = pwd.getpwuid(os.getuid()).pw_dir;"
    " sys.path.append(os.path.join(home, sys.argv.pop(1)));"  # a relative root starts at the home directory
    " from agent import sandbox; os._exit(sandbox.main(sys.argv[1:]))"
)
_ASK: Final = (
    'box=$(mktemp -d) && cd / && "$@" closed "$box/box" "" 0 echo MADE 2>&1; rm -rf "$box"'
)


class Sandboxes:
    """The sandbox support of the hosts of one run.  Each host is tested once."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._refusals: dict[str, str] = {}

    async def check(self, place: Place) -> None:
        """Check that a host supports sandboxes.

        Raises CannotRun if it does not, and DriverError.
        """
        async with self._alone:
            if place.name not in self._refusals:
                self._refusals[place.name] = await _find_refusal(place)
        why = self._refusals[place.name]
        if why:
            raise CannotRun(f"cannot create a sandbox on {place.name}: {why}", fix=FIX)


async def _find_refusal(place: Place) -> str:
    """Return the reason if a host does not support sandboxes; otherwise empty."""
    if not place.elsewhere:
        return await asyncio.to_thread(find_local_refusal)
    output = bytearray()
    async for chunk in place.host.call(["sh", "-c", _ASK, "sh", *_program(place)]):
        output += chunk
    return _parse_refusal(output.decode(errors="replace"))


@cache
def find_local_refusal() -> str:
    """Return the reason if this machine does not support sandboxes; otherwise empty."""
    with tempfile.TemporaryDirectory() as folder:
        asked = [
            sys.executable,
            *_python_command(_HERE),
            "closed",
            f"{folder}/box",
            "",
            "0",
            "echo",
            "MADE",
        ]
        made = subprocess.run(asked, cwd="/", capture_output=True, text=True, check=False)
    return _parse_refusal(made.stdout + made.stderr)


def _parse_refusal(output: str) -> str:
    """Parse the output of the test command `echo MADE`: empty for success, otherwise the reason."""
    lines = output.splitlines()
    if "MADE" in lines:
        return ""
    last = lines[-1] if lines else "the test command printed nothing"
    return next((line[len(MARK) :] for line in lines if line.startswith(MARK)), last)


def wrap(
    command: Command, place: Place, python: str, mounts: Sequence[Mount], *, network: bool
) -> Command:
    """Return `command`, changed to run in a sandbox.  `python` is the interpreter of the step."""
    shown: list[str] = []
    for mount in mounts:
        shown += [_mode(mount), mount.path, mount.target]
    kind = "network" if network else "closed"
    words = (kind, f"{command.cwd}.box", python, f"{len(mounts)}", *shown)
    return replace(command, argv=(*_program(place), *words, *command.argv))


def _program(place: Place) -> list[str]:
    """Return the command of the sandbox program, which is in the directory of the host's agent."""
    if not place.elsewhere:
        return [place.python, *_python_command(_HERE)]
    root = place.folder.root if place.own_disk else place.host.root
    return [place.python, *_python_command(f"{root}/agent/{agent_program().digest}")]


def _python_command(folder: str) -> tuple[str, ...]:
    return ("-I", "-S", "-c", _BEGIN, folder)


def _mode(mount: Mount) -> str:
    if not mount.writable:
        return "r"
    return "f" if mount.path.endswith(".metrics") else "w"
