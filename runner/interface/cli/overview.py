"""Run summaries for tables and JSON output."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from ...api.values import Status


class StepTally(TypedDict):
    """Step counts of a run by outcome."""

    ran: int
    fresh: int
    failed: int
    other: int


class ProgressOverview(TypedDict):
    """Progress of a run in `--json` output."""

    step: int
    total: int | None
    percent: float | None
    eta: float | None


class RunOverview(TypedDict):
    """Summary of a run in `--json` output.  `created` and `ended` are seconds since the epoch."""

    id: str
    name: str
    tags: list[str]
    note: str
    user: str
    recipe: str
    created: float
    ended: float | None
    seconds: float | None
    state: str
    failure: str
    reason: str
    progress: ProgressOverview
    steps: StepTally
    usd: float
    given: Mapping[str, object]
    preset: str | None
    inputs: Mapping[str, object]


def overview(found: Status) -> RunOverview:
    """Return the summary of a run for JSON output."""
    step, total, percent, eta = found.progress
    ran, fresh, failed, other = found.counts
    created, ended = seconds_of(found.created) or 0.0, seconds_of(found.ended)
    seconds = round(ended - created, 3) if ended is not None else None
    return {
        "id": found.id,
        "name": found.name,
        "tags": list(found.tags),
        "note": found.note,
        "user": found.user,
        "recipe": found.recipe,
        "created": created,
        "ended": ended,
        "seconds": seconds,
        "state": found.word,
        "failure": found.failure,
        "reason": found.reason,
        "progress": {"step": step, "total": total, "percent": percent, "eta": eta},
        "steps": {"ran": ran, "fresh": fresh, "failed": failed, "other": other},
        "usd": found.cost,
        "given": found.given,
        "preset": found.preset,
        "inputs": found.inputs,
    }


def seconds_of(text: str | None) -> float | None:
    """Convert an RFC 3339 time to seconds since the epoch."""
    if not text:
        return None
    return datetime.fromisoformat(text).timestamp()
