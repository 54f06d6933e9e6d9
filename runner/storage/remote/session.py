"""Bucket session: objects known to be damaged, and transferred bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from ...errors import Corrupt
from ..buckets.bucket import BucketUnreachable
from ..crew import Crew, Late
from . import layout

if TYPE_CHECKING:
    from ..buckets.bucket import Bucket, Stat
    from ..content.files import Entry

WIDTH: Final = 32
"""Maximum number of concurrent requests."""
GRACE: Final = 86_400.0
"""Time that an object is kept after a collection first found it unreferenced, in seconds."""

_A = TypeVar("_A")
_B = TypeVar("_B")


class MissingObject(Corrupt):
    """A traced content is missing from the store, or damaged."""


class Session:
    """Thread-safe session with a bucket."""

    def __init__(self, bucket: Bucket, now: Callable[[], float] = time.time) -> None:
        self.bucket, self.now = bucket, now
        self.bad: set[str] = set()
        """Names of damaged objects. Their existence proves nothing."""
        self._counting = threading.Lock()
        self.sent = 0
        """Bytes of content sent so far."""
        self.received = 0

    @property
    def url(self) -> str:
        return self.bucket.url

    def trace(self, key: str) -> layout.RemoteResult | None:
        data = self.bucket.read(layout.trace_name(key))
        return None if data is None else layout.trace_of(data, key)

    def there(self, name: str, size: int | None = None) -> bool:
        """Return True if an intact object exists that is safe from garbage collection.

        A young object is safe.
        """
        if name in self.bad:
            return False
        stat = self.bucket.head(name)
        if stat is None or size not in (None, stat.size):
            return False
        return self.now() - stat.at < GRACE / 2

    def missing_error(self, name: str, why: str) -> MissingObject:
        self.bad.add(name)
        return MissingObject(
            f"{self.url}/{name} {why}",
            fix="run again: the step will run and its results will be uploaded again",
        )

    def list_objects(self, prefix: str) -> list[Stat]:
        shape = {"traces": layout.TRACE, "states": layout.NOTE}.get(
            prefix.partition("/")[0], layout.OBJECT
        )
        return [stat for stat in self.bucket.names(prefix) if shape.fullmatch(stat.name)]

    def count_moved(self, *, sent: int = 0, received: int = 0) -> None:
        with self._counting:
            self.sent += sent
            self.received += received

    def map_files(self, do: Callable[[Entry], object], files: Sequence[Entry]) -> None:
        """Call `do`, which transfers one file, for each file of a tree."""
        # A larger file is itself transferred in parallel parts, so these come one by one.
        for file in files:
            if file.size > layout.PART:
                do(file)
        self.map(do, [file for file in files if file.size <= layout.PART])

    def map(
        self,
        do: Callable[[_A], _B],
        items: Iterable[_A],
        deadline: float | None = None,
        *,
        width: int = WIDTH,
    ) -> list[_B]:
        try:
            return Crew(min(width, self.bucket.width)).map(do, list(items), deadline)
        except Late:
            raise BucketUnreachable(
                f"no response from {self.url}",
                fix="check the network, or run without the store: `--store none`",
            ) from None
