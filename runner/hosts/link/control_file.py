"""Requests to a running training program, by the file that `$RECIPE_CONTROL` names.

A shell on the host writes the file.
"""

from __future__ import annotations

import json
from typing import Final, Literal

from drivers.base import Rejected

from .client import Client

FILE: Final = ".recipe-control"
"""File name in the attempt directory, which a container sees too."""
# The test avoids a pipe, which would block the shell.
_ASK: Final = '[ -f "$1" ] && grep -q listens "$1" 2>/dev/null && printf "%s\\n" "$2" >>"$1"'


def control_file(cwd: str) -> str:
    """Return the path of the control file for an attempt directory."""
    return f"{cwd}/{FILE}"


async def ask_trainer(host: Client, cwd: str, what: Literal["pause", "stop", "checkpoint"]) -> bool:
    """Send a request to the training program in the directory `cwd`.

    Returns False if the program does not listen.  Raises DriverError.
    """
    try:
        async for _ in host.call(
            ("/bin/sh", "-c", _ASK, "sh", control_file(cwd), json.dumps({"ask": what}))
        ):
            pass
    except Rejected:
        return False
    return True
