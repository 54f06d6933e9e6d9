"""What happened to a run: its events as every front shows them."""

from __future__ import annotations

from typing import Final

from ..storage.records.runs import Event
from ..storage.workspace import Workspace
from .values import Facts, moment

PAGE: Final = 500
"""Events that are read at once."""
_FOR_WORKERS: Final = frozenset(
    {"log", "metrics", "pattern", "env_files", "secrets", "offered", "generation"}
)
"""What events hold for workers alone."""


def read_events(ws: Workspace, run: str, after: int, limit: int = PAGE) -> list[Event]:
    """Return the events of a run whose numbers are above `after`, in order.  Raises NotFound."""
    return ws.store.runs.events(ws.store.runs.get(run).id, after, limit)


def event_facts(event: Event) -> Facts:
    """Return an event without what it holds for workers alone; its time as RFC 3339 has it."""
    data = {name: value for name, value in event.data.items() if name not in _FOR_WORKERS}
    return {**event._asdict(), "at": moment(event.at), "data": data}
