"""Ask the program of an attempt for something while it runs, by the file that its `$RECIPE_CONTROL` names; on any host, by a shell there."""

from __future__ import annotations

import json
from typing import Final, Literal

from drivers.base import Rejected

from .client import Client

FILE: Final = ".recipe-control"
"""In the directory of the attempt, which a container sees, too."""
# A pipe that a program put there would hold up who opens it.
_ASK: Final = '[ -f "$1" ] && grep -q listens "$1" 2>/dev/null && printf "%s\\n" "$2" >>"$1"'


def control_file(cwd: str) -> str:
    """The file for an attempt in this directory of its host."""
    return f"{cwd}/{FILE}"


async def ask_trainer(host: Client, cwd: str, what: Literal["pause", "stop", "checkpoint"]) -> bool:
    """Ask the program that runs in the directory `cwd`; False when it never said that it listens.  Raises DriverError."""
    try:
        async for _ in host.call(
            ("/bin/sh", "-c", _ASK, "sh", control_file(cwd), json.dumps({"ask": what}))
        ):
            pass
    except Rejected:
        return False
    return True
