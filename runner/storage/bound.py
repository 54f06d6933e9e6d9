"""How large an input from an address may be: what `[limits] input_gb` allows, and what the disk has room for.

Asked before a fetch, and while it goes on.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import CannotRun

if TYPE_CHECKING:
    from .workspace import Workspace

LEFT: Final = 256 << 20
"""Bytes of the disk that inputs leave to everything else."""
_GB: Final = 10**9


class Bound(NamedTuple):
    """How many bytes may be fetched from an address, and why no more."""

    address: str
    most: int
    why: str
    fix: str

    @classmethod
    def of(cls, ws: Workspace, address: str, *, here: bool = True) -> Bound:
        """What holds for a fetch that begins now, to the disk of this machine or past it."""
        room = max(0, shutil.disk_usage(ws.home).free - LEFT) if here else sys.maxsize
        if (allowed := ws.config.limits.get("input_gb")) is not None and allowed * _GB <= room:
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
        """Raises CannotRun for more bytes than may be fetched."""
        if size > self.most:
            raise CannotRun(
                f"{self.address} has {size / _GB:.1f} GB or more, and {self.why}", fix=self.fix
            )

    def counter(self) -> Any:
        """A callback of fsspec that counts the bytes of all files of one fetch, and ends it by the same error."""
        from fsspec.callbacks import Callback

        counter = Callback(hooks={"bound": lambda size, value, **_: self.check(value)})
        counter.branched = lambda *_, **_more: counter
        return counter
