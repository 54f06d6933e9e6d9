"""Differences between two runs: inputs, and each step's data, command, outputs and metrics.

Read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..planning import fingerprint
from ..planning.fingerprint import Change
from ..storage.records.index import Trace
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.workspace import Workspace
from ..survey.input_manifests import load_manifest
from .values import Facts

Manifest = Callable[[str], Mapping[str, str] | None]
"""Look up the files of a directory by its content ID: path to content, or None if unknown."""

ASPECTS: Final = ("inputs", "data", "code", "command", "env", "outputs", "metrics", "time")


class Difference(NamedTuple):
    """A changed property of a step, with its values before and after.

    If both values are directories, `files` maps each changed path to `+` (added), `-` (removed) or
    `~` (modified). None if the listings are unknown.
    """

    part: str
    before: Any = None
    after: Any = None
    files: Mapping[str, str] | None = None


class StepDifference(NamedTuple):
    """The differences of one step between runs A and B. `only` is A or B if the other lacks the
    step.
    """

    id: str
    states: tuple[str, str]
    only: str = ""
    changes: Mapping[str, Sequence[Difference]] = {}
    """Changes by aspect. Unchanged aspects are absent."""


class Differences(NamedTuple):
    """The differences between two runs."""

    inputs: Sequence[Difference]
    steps: Sequence[StepDifference]
    """Steps of both runs, in the order of the second run. Equal steps have no changes."""


def compare_runs(ws: Workspace, a: RunRow, b: RunRow) -> Differences:
    """Return the differences between two recorded runs."""

    def manifest(content: str) -> Mapping[str, str] | None:
        return load_manifest(ws, content)

    inputs = [with_changed_files(change, manifest) for change in diff_mappings(a.inputs, b.inputs)]
    return Differences(
        inputs, compare_steps(read_step_records(ws, a.id), read_step_records(ws, b.id), manifest)
    )


def difference_facts(found: Differences) -> Facts:
    """Convert the differences between two runs to JSON values."""
    steps = [_step_facts(step) for step in found.steps]
    return {"inputs": _change_facts(found.inputs), "steps": steps}


def _step_facts(step: StepDifference) -> Facts:
    return {
        "id": step.id,
        "states": list(step.states),
        "only": step.only or None,
        "changes": {name: _change_facts(changes) for name, changes in step.changes.items()},
    }


def _change_facts(changes: Iterable[Difference]) -> list[Facts]:
    return [change._asdict() for change in changes]


def with_changed_files(change: Change, manifest: Manifest) -> Difference:
    """Convert a change to a `Difference`, with the changed files if both values are directories."""
    found = without_files(change)
    if not (is_tree(change.before) and is_tree(change.after)):
        return found
    old, new = manifest(str(change.before)), manifest(str(change.after))
    if old is None or new is None:
        return found
    files: dict[str, str] = {}
    for path in sorted(old.keys() | new.keys()):
        sign = _sign(old.get(path), new.get(path))
        if sign:
            files[path] = sign
    return found._replace(files=files)


def without_files(change: Change) -> Difference:
    """Convert a change to a `Difference` without comparing directory listings."""
    return Difference(change.part, change.before, change.after)


def is_tree(value: object) -> bool:
    """Return True if a value is the content ID of a directory."""
    return isinstance(value, str) and len(value) == 66 and value.startswith("t:")


def _sign(before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    if before is None:
        return "+"
    if after is None:
        return "-"
    return "~"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The stored record of one step in one run."""

    state: str
    preimage: Mapping[str, Any] | None = None
    outputs: Mapping[str, str] | None = None  # path -> content, None if unknown
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def aspect_of(part: str) -> str:
    """Return the comparison category, one of `ASPECTS`, of a part of a cache key."""
    head = part.partition(" ")[0].partition(".")[0]
    if part.startswith(("code ", "git")):
        return "code"
    if part.startswith(("file ", "model ", "absent ")):
        return "data"
    if head in ("inputs", "matrix", "steps"):
        return "inputs"
    if head in ("lock", "tool", "image", "env", "pass_env", "python", "setup", "secrets", "host"):
        return "env"
    return "outputs" if head in ("output", "outputs") else "command"


def compare_steps(
    a: Mapping[str, StepRecord],
    b: Mapping[str, StepRecord],
    manifest: Manifest = lambda _content: None,
) -> list[StepDifference]:
    """Compare two runs step by step, in the step order of the second run.

    Equal steps have no changes.
    """
    answer = []
    for id in dict.fromkeys((*b, *a)):
        left, right = a.get(id), b.get(id)
        if left is None or right is None:
            only = "A" if right is None else "B"
            answer.append(StepDifference(id, (_state_of(left), _state_of(right)), only))
            continue
        changes: dict[str, list[Difference]] = {}
        for aspect, found in _changes_by_aspect(left, right).items():
            changes[aspect] = [with_changed_files(change, manifest) for change in found]
        answer.append(StepDifference(id, (left.state, right.state), changes=changes))
    return answer


def _state_of(record: StepRecord | None) -> str:
    return record.state if record is not None else ""


def _changes_by_aspect(left: StepRecord, right: StepRecord) -> dict[str, list[Change]]:
    """Return the changes between two records of a step, grouped by category."""
    found: dict[str, list[Change]] = {name: [] for name in ASPECTS}
    for change in _key_changes(left, right):
        found[aspect_of(change.part)].append(change)
    found["env"] += _python_changes(left, right)
    if left.state == right.state:  # missing outputs of a failed step are not a difference
        found["outputs"] += _output_changes(left, right)
        found["metrics"] += diff_mappings(left.metrics, right.metrics)
        found["time"] += filter(_is_noticeable, diff_mappings(_timing(left), _timing(right)))
    return {name: changes for name, changes in found.items() if changes}


def _key_changes(left: StepRecord, right: StepRecord) -> Sequence[Change]:
    """Return the changes of the cache key, or none if a record lacks its preimage."""
    if left.preimage is None or right.preimage is None:
        return ()
    return fingerprint.explain(left.preimage, right.preimage)


def _python_changes(left: StepRecord, right: StepRecord) -> Sequence[Change]:
    if "python" not in left.facts or "python" not in right.facts:
        return ()
    before, after = left.facts["python"], right.facts["python"]
    return diff_mappings({"python": before}, {"python": after})


def _output_changes(left: StepRecord, right: StepRecord) -> Sequence[Change]:
    """Return the changed outputs, or none if the outputs of a record are unknown."""
    if left.outputs is None or right.outputs is None:
        return ()
    return diff_mappings(left.outputs, right.outputs)


def diff_mappings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two mappings."""
    changes = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old != new:
            changes.append(Change(name, old, new))
    return changes


def _timing(ran: StepRecord) -> dict[str, float]:
    found = {"seconds": ran.seconds} if ran.seconds is not None else {}
    for name in ("cpu", "peak_memory"):
        if isinstance(ran.facts.get(name), (int, float)):
            found[name] = ran.facts[name]
    return found


def _is_noticeable(change: Change) -> bool:
    """Return True if a metric changed by more than its usual variation."""
    before, after = change.before, change.after
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return False
    floor = 16e6 if change.part == "peak_memory" else 0.5
    return abs(after - before) > max(floor, 0.1 * max(abs(before), abs(after)))


def read_step_records(ws: Workspace, run: str) -> dict[str, StepRecord]:
    """Return the records of a run's steps, except steps that were up to date."""
    attempts = {row.step: row for row in ws.store.runs.attempts(run)}
    traces = ws.store.index.traces([row.key for row in attempts.values() if row.key])
    states: dict[str, str] = {}  # in order of the first event of each step
    ended: dict[str, Mapping[str, object]] = {}
    for event in ws.store.runs.events(run):
        if event.subject != "step":
            continue
        states[event.id] = event.after
        if event.before == "RUNNING":
            ended[event.id] = event.data
    found = {}
    for id, state in states.items():
        attempt, data = attempts.get(id), ended.get(id, {})
        if state == "FRESH":
            continue
        if attempt is None:
            found[id] = StepRecord(state)
            continue
        found[id] = _record_of(state, attempt, data, traces.get(attempt.key))
    return found


def _record_of(
    state: str, attempt: AttemptRow, ended: Mapping[str, object], trace: Trace | None
) -> StepRecord:
    """Return the record of a step from its last attempt. `ended` is the data of its last event."""
    preimage = attempt.preimage if isinstance(attempt.preimage, dict) else {}
    # If another run cached this key first, its outputs may differ from the outputs of this run.
    outputs: dict[str, str] | None = None
    if trace is not None and trace.run == attempt.run:
        outputs = {made.path: str(made.content) for made in trace.outputs}
    metrics, seconds = ended.get("metrics"), ended.get("seconds")
    if not isinstance(metrics, dict):
        metrics = {}
    duration = float(seconds) if isinstance(seconds, (int, float)) else None
    return StepRecord(state, preimage or None, outputs, metrics, duration, attempt.exit)
