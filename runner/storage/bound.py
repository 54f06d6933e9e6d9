"""Size limit for downloaded inputs: `[limits] input_gb` and the free disk space.

It is checked before and during a download.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import CannotRun

if TYPE_CHECKING:
    from .workspace import Workspace

LEFT: Final = 256 << 20
"""Disk space that downloads must leave free, in bytes."""
_GB: Final = 10**9


class DownloadLimit(NamedTuple):
    """Maximum number of bytes to download from a URL, and the reason for the limit."""

    address: str
    most: int
    why: str
    fix: str

    @classmethod
    def of(cls, ws: Workspace, address: str, *, here: bool = True) -> DownloadLimit:
        """Return the current size limit for a download.

        With `here`, the disk of this machine also limits it.
        """
        room = max(0, shutil.disk_usage(ws.home).free - LEFT) if here else sys.maxsize
        allowed = ws.config.limits.get("input_gb")
        if allowed is not None and allowed * _GB <= room:
            return cls(
                address,
                int(allowed * _GB),
                f"`[limits] input_gb` is {allowed:g}",
                "use a smaller input, or ask the server's owner to raise `input_gb`",
            )
        return cls(
            address,
            room,
            f"the disk has only {room / _GB:.1f} GB",
            "free disk space with `recipe gc`",
        )

    def check(self, size: int) -> None:
        """Raise CannotRun if `size` bytes exceed the download limit."""
        if size > self.most:
            raise CannotRun(
                f"{self.address} has at least {size / _GB:.1f} GB, but {self.why}", fix=self.fix
            )

    def counter(self) -> Any:
        """Return an fsspec callback that counts the bytes of one download.

        The callback raises CannotRun beyond the limit.
        """
        from fsspec.callbacks import Callback

        counter = Callback(hooks={"bound": lambda size, value, **_: self.check(value)})
        counter.branched = lambda *_, **_more: counter
        return counter
