"""A notification on this machine's desktop, by the program that its desktop has for that.  Without one, nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence


def notify(title: str, text: str) -> bool:
    """Show a notification; whether there was a program for it."""
    command = _command(title, text)
    if not command or shutil.which(command[0]) is None:
        return False
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return True


def _command(title: str, text: str) -> Sequence[str]:
    if sys.platform == "darwin":  # the words are arguments of the script, and no part of it
        script = (
            "on run argv",
            "display notification (item 2 of argv) with title (item 1 of argv)",
            "end run",
        )
        return ("osascript", *(word for line in script for word in ("-e", line)), title, text)
    return ("notify-send", "--app-name=recipe", "--", title, text)
