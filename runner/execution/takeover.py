"""What a worker of another machine left of a run on hosts that this one reaches, too: leases and attempts, as the events of the run tell them.

An attempt is known at its host by its name.  Here it gets what it would have if this machine had begun it: a folder, a note of its host, and the
id of its state.  What it was given is as its key says, and was put there by the worker before us.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..planning.schedule import ORPHANED
from ..storage.records.ledger import LeaseRow
from ..storage.workspace import Workspace


class Left(NamedTuple):
    """An attempt that may go on: the host that it was begun on, and the generation of its state, if it keeps one."""

    place: str
    generation: str


def leases(ws: Workspace, run: str) -> list[LeaseRow]:
    """The leases of a run that were not given back, to be looked for with the driver."""
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


def attempts(ws: Workspace, run: str) -> Mapping[str, Left]:
    """The attempts of a run that another machine began, and whose end is not stored, by their names; each has its folder here from now on."""
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
