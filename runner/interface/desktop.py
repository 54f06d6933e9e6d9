"""Show desktop notifications with `osascript` on macOS or `notify-send` elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence


def notify(title: str, text: str) -> bool:
    """Show a notification.

    Returns False if the notification program is missing or cannot be run.
    """
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
    if sys.platform == "darwin":
        # Pass the texts as arguments, so that they cannot change the script.
        show = "display notification (item 2 of argv) with title (item 1 of argv)"
        return ("osascript", "-e", "on run argv", "-e", show, "-e", "end run", title, text)
    return ("notify-send", "--app-name=recipe", "--", title, text)
