"""Overlay mounts for local steps that may change their inputs.

Checks the support, and wraps the command.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from drivers.base import Command

from ... import agent
from ...storage.content.disk import Disk, unlink

WORD: Final = "overlay"
"""The value of `inputs` in recipe.toml that enables overlays."""
BREAKS: Final = (
    "in steps with this setting, `sudo` and `chown` fail if you are not root, hard links to inputs fail, "
    "and an input that is a single large file cannot be renamed or deleted"
)
CHANGES: Final = ".over"
"""Suffix of the directory beside an attempt with the command's changes to its inputs."""
_BEGIN: Final = (sys.executable, "-IS", str(Path(agent.__file__).with_name("overlay.py")))
_PATIENCE: Final = 10.0
"""Timeout of a test mount in seconds."""


class Overlays:
    """Tests once per file system whether inputs can be overlaid.

    Test mounts are below `root`, the workspace's root.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._refusals: dict[int, str] = {}

    def refusal(self, path: str) -> str:
        """Return why an input cannot be overlaid; empty if it can.  Raises OSError."""
        device = os.stat(path).st_dev
        if device not in self._refusals:
            folder = path if os.path.isdir(path) else os.path.dirname(path)
            self._refusals[device] = find_refusal(self._root, folder)
        return self._refusals[device]


def find_refusal(root: str, source: str) -> str:
    """Mount a test overlay below `root`; return why it fails, empty if it works.  Raises OSError."""
    if sys.platform != "linux":
        return "overlays require Linux"
    trial = Disk(root).temporary()
    target = f"{trial}/target"
    os.makedirs(target)
    try:
        words = [*_BEGIN, f"{trial}/changes", "1", source, target]
        tried = subprocess.run(
            [*words, "sh", "-c", ': >"$1/.recipe-trial"', "-", target],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"mounting took more than {_PATIENCE:.0f} s"
    finally:
        with contextlib.suppress(OSError):
            unlink(trial)
    message = tried.stderr.strip().rpartition("\n")[2].removeprefix("recipe: ")
    return "" if tried.returncode == 0 else message or f"mounting ended with {tried.returncode}"


def wrap_overlays(command: Command, attempt: str, inputs: Mapping[str, str]) -> Command:
    """Return a command that mounts overlays over the inputs of the attempt at that path first.

    `inputs` maps each name in the attempt to the file or directory that it shows.
    """
    if not inputs:
        return command
    begin = [*_BEGIN, f"{attempt}{CHANGES}", str(len(inputs))]
    for name, source in sorted(inputs.items()):
        begin += [source, f"{attempt}/{name}"]
    return replace(command, argv=(*begin, *command.argv))
