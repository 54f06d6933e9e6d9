"""Seals: the file status of an intact object after recipe's last change.

While the status is unchanged, the object is used without hashing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .disk import mark
from .files import Content


class Seal(NamedTuple):
    """File status of an intact object, and the boot id at that time."""

    content: Content
    mark: str
    boot: str
    size: int
    at: float


class Seals:
    """Known file status of intact objects.

    `recall` loads stored seals.
    """

    def __init__(self, recall: Callable[[Content], Seal | None]) -> None:
        self._recall = recall
        self._known: dict[Content, Seal] = {}
        self._new: dict[Content, Seal] = {}
        self._boot = _boot_id()

    def of(self, content: Content) -> Seal | None:
        seal = self._known.get(content)
        if seal is None:
            seal = self._recall(content)
            if seal is not None:
                self._known[content] = seal
        return seal

    def of_this_boot(self, seal: Seal) -> bool:
        """Return True if a seal was created since the machine's last restart.

        Data written before a restart may not have reached the disk.
        """
        return seal.boot == self._boot

    def make(self, content: Content, path: str, size: int) -> None:
        """Record the current file status of an intact object at `path`."""
        self._known[content] = self._new[content] = Seal(
            content, mark(path)[1], self._boot, size, time.time()
        )

    def forget(self, content: Content) -> None:
        self._known.pop(content, None)
        self._new.pop(content, None)

    def learn(self, seals: Iterable[Seal]) -> None:
        """Add seals from another store object for the same directory."""
        for seal in seals:
            self._known[seal.content] = self._new[seal.content] = seal

    def changes(self) -> list[Seal]:
        """Return the new seals since the last call, for the store's `objects` table."""
        seals, self._new = list(self._new.values()), {}
        return seals


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
