"""What a worker does for those who are told of runs, and nothing where nobody is: deliver the outbox beside its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ..storage.workspace import Workspace

LAST_WORDS: Final = 3.0
"""Seconds that a process waits at its end for what is due; the rest waits for another."""


@contextmanager
def delivering(ws: Workspace, seconds: float) -> Iterator[bool]:
    """Deliver reports meanwhile, and for so many seconds after it.  False: the settings and the environment name no receiver."""
    if ws.letters is None:
        yield False
        return
    from ..reports.delivery import Delivery

    delivery = Delivery(ws.own, ws.environ)
    delivery.start()
    try:
        yield True
    finally:
        delivery.end(seconds)
