"""Takeover of leases and attempts that a worker on another machine left.

They are read from the events of the run. A host knows an attempt by its name. This machine
creates an attempt directory, a note of the host and the ID of the state, as if it had started the
attempt. The earlier worker staged the inputs that the key names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..planning.schedule import ORPHANED
from ..storage.records.ledger import LeaseRow
from ..storage.workspace import Workspace


class Left(NamedTuple):
    """Running attempt of an earlier worker: its host, and the ID of its checkpoint directory."""

    place: str
    generation: str


def read_leases(ws: Workspace, run: str) -> list[LeaseRow]:
    """Return the unreleased machine leases of a run, to be found by the driver."""
    found: dict[str, LeaseRow] = {}
    for event in ws.store.runs.events(run):
        if event.subject != "lease":
            continue
        offer, need, until = (event.data.get(name) for name in ("offered", "need", "until"))
        if (
            event.after not in ("COMING", "UP")
            or not isinstance(offer, dict)
            or not isinstance(need, dict)
            or not isinstance(until, (int, float))
        ):
            found.pop(event.id, None)
            continue
        found[event.id] = LeaseRow(
            event.id,
            str(event.data["driver"]),
            run,
            str(ws.root),
            need,
            "",
            "ASKED",
            offer,
            until,
            asked=event.at,
        )
    return list(found.values())


def adopt_attempts(ws: Workspace, run: str) -> Mapping[str, Left]:
    """Create local directories for another machine's open attempts, and return these by name."""
    open: dict[str, tuple[str, Left]] = {}
    for event in ws.store.runs.events(run):
        log, place = event.data.get("log"), event.data.get("site")
        if (
            event.subject == "step"
            and event.after == "RUNNING"
            and isinstance(log, str)
            and isinstance(place, str)
        ):
            open[event.id] = (
                Path(log).name.removesuffix(".log"),
                Left(place, str(event.data.get("generation", ""))),
            )
        elif event.subject == "step" and event.before == "RUNNING" and event.reason != ORPHANED:
            open.pop(event.id, None)
    found = {}
    for name, left in open.values():
        folder = ws.home / "attempts" / name
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            folder.with_name(f"{name}.site").write_text(left.place, encoding="utf-8")
            found[name] = left
    return found
