"""Die at a named point when the environment asks for it, so that tests can show what a kill -9 leaves behind.

`RECIPE_CRASH_AT=group-written:3` ends this process with SIGKILL the third time it passes that point.
"""

from __future__ import annotations

import os
import signal

_asked = os.environ.get("RECIPE_CRASH_AT", "")

if _asked:
    _name, _, _count = _asked.partition(":")
    _left = [int(_count or "1")]

    def crashpoint(name: str) -> None:
        if name == _name:
            _left[0] -= 1
            if _left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

else:

    def crashpoint(name: str) -> None:
        """A point that a test can crash at; nothing otherwise."""
