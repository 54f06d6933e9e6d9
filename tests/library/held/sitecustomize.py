"""A Python with this folder in its PYTHONPATH stops when it has printed a line with $HOLD_AT in it, until somebody opens the pipe $HOLD_GATE to write.

So a test signals a training in a certain step, however busy the machine is.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


class Held:
    """Standard output, with one line after which it waits."""

    def __init__(self, stream: TextIO, at: str, gate: str) -> None:
        self._stream, self._at, self._gate = stream, at, gate
        self._line = ""

    def write(self, text: str) -> int:
        count = self._stream.write(text)
        self._line += text
        if self._line.endswith("\n"):
            line, self._line = self._line, ""
            if self._at in line:
                self._stream.flush()
                os.close(os.open(self._gate, os.O_RDONLY))
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if "HOLD_AT" in os.environ:
    sys.stdout = Held(sys.stdout, os.environ["HOLD_AT"], os.environ["HOLD_GATE"])  # type: ignore[assignment]
