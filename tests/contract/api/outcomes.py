"""The documented outcome of each request, by how a run stands.  The contract suite holds all fronts to it, and docs/server.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

VERBS: Final = ("cancel", "pause", "resume", "retry", "prioritize")


class Done(NamedTuple):
    """The run is in this state when the request returns."""

    state: str


class Asked(NamedTuple):
    """The worker of the run is asked, and brings it to this state."""

    state: str


class Refused(NamedTuple):
    """The state of the run forbids it; the code says why."""

    code: str


class NewRun(NamedTuple):
    """The request of the run is QUEUED as a new run."""


class Stays(NamedTuple):
    """The run stays in its state, with another priority."""


Outcome = Done | Asked | Refused | NewRun | Stays

_NOT_OVER: Final = Refused("not-final")
_NOT_PAUSED: Final = Refused("not-paused")
_WORKED_ON: Final = {
    "cancel": Asked("CANCELLED"),
    "pause": Asked("PAUSED"),
    "resume": _NOT_PAUSED,
    "retry": _NOT_OVER,
    "prioritize": Stays(),
}
_LEFT: Final = {
    "cancel": Done("CANCELLED"),
    "pause": Done("PAUSED"),
    "resume": Done("QUEUED"),
    "retry": _NOT_OVER,
    "prioritize": Stays(),
}
_PAUSED: Final = {
    "cancel": Done("CANCELLED"),
    "pause": Refused("already"),
    "resume": Done("QUEUED"),
    "retry": _NOT_OVER,
    "prioritize": Stays(),
}
_OVER: Final = {
    "cancel": Refused("final"),
    "pause": Refused("final"),
    "resume": Refused("final"),
    "retry": NewRun(),
    "prioritize": Refused("final"),
}


class Standing(NamedTuple):
    """How a run stands, in words, and what each request does to it."""

    words: str
    outcomes: Mapping[str, Outcome]


STANDINGS: Final[Mapping[str, Standing]] = {
    "queued": Standing(
        "QUEUED, no worker has claimed it",
        {**_LEFT, "resume": _NOT_PAUSED},
    ),
    "active": Standing("ACTIVE, its worker runs", _WORKED_ON),
    "stopped": Standing("ACTIVE, its worker is stopped (SIGSTOP)", _WORKED_ON),
    "elsewhere": Standing("ACTIVE, its worker runs on another machine", _WORKED_ON),
    "pausing": Standing(
        "ACTIVE, asked to pause",
        {**_WORKED_ON, "resume": Asked("ACTIVE")},
    ),
    "left": Standing("NEEDS_RECOVERY: its worker was killed", _LEFT),
    "left-run": Standing("NEEDS_RECOVERY: its `recipe run` was killed", _LEFT),
    "lost": Standing("NEEDS_RECOVERY: its worker on another machine is silent", _LEFT),
    "paused": Standing("PAUSED, submitted", _PAUSED),
    "paused-run": Standing("PAUSED, begun by `recipe run`", _PAUSED),
    "completed": Standing("COMPLETED", _OVER),
    "failed": Standing("FAILED", _OVER),
    "cancelled": Standing("CANCELLED", _OVER),
}
