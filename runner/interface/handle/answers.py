"""Convert API replies, from a server's JSON or a workspace's facts, to the values of `api.values`.

Unknown fields of a newer server are ignored.  Functions raise Infrastructure for a malformed reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from ...api.differences import Difference, Differences, StepDifference
from ...api.outcomes import Outcome
from ...api.values import (
    Artifact,
    ArtifactFile,
    ExpectedStep,
    Failed,
    Forecast,
    GpuMemory,
    LinkTo,
    Machine,
    OutputFile,
    Point,
    Progress,
    QueuedRun,
    Reason,
    RecipeEntry,
    Status,
    StepCounts,
    StepProgress,
    StepStatus,
    Training,
    WorkerStatus,
)
from ...errors import Infrastructure
from ...storage.records.runs import Event

_V = TypeVar("_V", bound=tuple[Any, ...])


def unexpected_reply(status: int = 200) -> Infrastructure:
    """Return the error for a reply that does not come from `recipe serve`."""
    return Infrastructure(
        f"unexpected reply (status {status}): not from `recipe serve`",
        fix="check the URL, and the proxy in front of the server",
    )


def mapping_of(body: bytes, status: int = 200) -> Mapping[str, Any]:
    """Parse a JSON body as an object.  Raises Infrastructure for any other body."""
    try:
        found = json.loads(body)
    except ValueError:
        raise unexpected_reply(status) from None
    if not isinstance(found, Mapping):
        raise unexpected_reply(status)
    return found


def status_of(value: object) -> Status:
    """Return the status of a run, from a list entry or a single run."""
    facts = _mapping(value)
    found = _read(Status, Status._fields, facts)
    return found._replace(
        progress=_read(Progress, Progress._fields, facts.get("progress", {})),
        counts=_read(StepCounts, StepCounts._fields, facts.get("counts", {})),
        failed=_read_optional(Failed, Failed._fields, facts.get("failed")),
        training=_read_optional(Training, Training._fields, facts.get("training")),
        waits=_read_optional(Reason, Reason._fields, facts.get("waits")),
        steps=[_step_of(each) for each in facts.get("steps", ())],
        outputs=_read_list(OutputFile, OutputFile._fields, facts.get("outputs", ())),
        links=_read_list(LinkTo, LinkTo._fields, facts.get("links", ())),
    )


def _step_of(value: object) -> StepStatus:
    found = _read(StepStatus, StepStatus._fields, value)
    progress = _mapping(value).get("progress", {})
    return found._replace(progress=_read(StepProgress, StepProgress._fields, progress))


def event_of(value: object) -> Event:
    """Return an event."""
    found = _read(Event, Event._fields, value)
    return found._replace(at=datetime.fromisoformat(str(found.at)).timestamp())


def point_of(value: object) -> Point:
    """Return one metrics point of an attempt."""
    facts = _mapping(value)
    return _read(Point, Point._fields, {**facts, "source": facts.get("from", "")})


def artifact_of(value: object) -> Artifact:
    """Return an output, with its files."""
    found = _read(Artifact, Artifact._fields, value)
    return found._replace(files=_read_list(ArtifactFile, ArtifactFile._fields, found.files))


def recipe_of(value: object) -> RecipeEntry:
    """Return one entry of the recipe list."""
    return _read(RecipeEntry, RecipeEntry._fields, value)


def forecast_of(value: object) -> Forecast:
    """Return the forecast of a run."""
    found = _read(Forecast, Forecast._fields, value)
    machines = _read_list(Machine, Machine._fields, found.machines)
    return found._replace(machines=machines, steps=[_expected_of(each) for each in found.steps])


def _expected_of(value: object) -> ExpectedStep:
    found = _read(ExpectedStep, ExpectedStep._fields, value)
    return found._replace(memory=_read_optional(GpuMemory, GpuMemory._fields, found.memory))


def differences_of(value: object) -> Differences:
    """Return the differences between two runs."""
    found = _mapping(value)
    steps = [_step_difference_of(each) for each in found.get("steps", ())]
    inputs = _read_list(Difference, Difference._fields, found.get("inputs", ()))
    return Differences(inputs, steps)


def _step_difference_of(value: object) -> StepDifference:
    found = _read(StepDifference, StepDifference._fields, value)
    changes = {}
    for name, values in found.changes.items():
        changes[name] = _read_list(Difference, Difference._fields, values)
    first, second = found.states
    return found._replace(states=(first, second), only=found.only or "", changes=changes)


def outcome_of(value: object) -> Outcome:
    """Return the outcome of a request such as cancel or retry."""
    return _read(Outcome, Outcome._fields, {"state": "", "done": True, **_mapping(value)})


def worker_of(value: object) -> WorkerStatus:
    """Return the status of a worker."""
    return _read(WorkerStatus, WorkerStatus._fields, value)


def queued_of(value: object) -> QueuedRun:
    """Return a queued run."""
    found = _read(QueuedRun, QueuedRun._fields, value)
    return found._replace(waits=_read(Reason, Reason._fields, _mapping(value).get("waits", {})))


def _read(kind: Callable[..., _V], fields: Sequence[str], value: object) -> _V:
    facts = _mapping(value)
    # A field that an older server does not send keeps its default.
    known = {name: facts[name] for name in fields if name in facts}
    try:
        return kind(**known)
    except TypeError:
        raise unexpected_reply() from None


def _read_list(
    kind: Callable[..., _V], fields: Sequence[str], values: Iterable[object]
) -> list[_V]:
    return [_read(kind, fields, each) for each in values]


def _read_optional(kind: Callable[..., _V], fields: Sequence[str], value: object) -> _V | None:
    return _read(kind, fields, value) if value is not None else None


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise unexpected_reply()
    return value
