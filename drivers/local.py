"""The local machine as a host.  It has no driver, because it is never leased."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path

from .base import NOTHING, Argv, Host


class LocalHost(Host):
    """This machine as a host. `root` is a directory owned by recipe."""

    def __init__(self, root: Path) -> None:
        self.root = str(root.absolute())
        self.python = sys.executable

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        from . import calls

        return calls.call(
            argv, stdin, {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
        )
