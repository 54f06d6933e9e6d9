"""Events of a run, as shown to all clients."""

from __future__ import annotations

from typing import Final

from ..storage.records.runs import Event
from ..storage.workspace import Workspace
from .values import Facts, moment

PAGE: Final = 500
"""Maximum number of events in one read."""
_FOR_WORKERS: Final = frozenset(
    {"log", "metrics", "pattern", "env_files", "secrets", "offered", "generation"}
)
"""Event fields for workers only."""


def read_events(ws: Workspace, run: str, after: int, limit: int = PAGE) -> list[Event]:
    """Return the events of a run with numbers above `after`, in order. Raises NotFound."""
    return ws.store.runs.events(ws.store.runs.get(run).id, after, limit)


def event_facts(event: Event) -> Facts:
    """Return an event as a JSON-compatible mapping, without its worker-internal fields."""
    data = {name: value for name, value in event.data.items() if name not in _FOR_WORKERS}
    return {**event._asdict(), "at": moment(event.at), "data": data}
