"""Fault injection for tests: kill the process at a named point.

`RECIPE_CRASH_AT=group-written:3` sends SIGKILL at the third pass of that point.
`group-written:3:STOP` sends SIGSTOP instead.
"""

from __future__ import annotations

import os
import signal

_asked = os.environ.get("RECIPE_CRASH_AT", "")

if _asked:
    _name, _count, _how = (*_asked.split(":"), "", "")[:3]
    _left, _signal = [int(_count or "1")], signal.Signals[f"SIG{_how or 'KILL'}"]

    def crashpoint(name: str) -> None:
        if name == _name:
            _left[0] -= 1
            if _left[0] == 0:
                os.kill(os.getpid(), _signal)

else:

    def crashpoint(name: str) -> None:
        """Do nothing: fault injection is off."""
