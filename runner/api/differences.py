"""What differs between two runs: what they were given, and what each step read, ran, made and reported.  Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..planning import fingerprint
from ..planning.fingerprint import Change
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from ..survey.input_manifests import load_manifest
from .values import Facts

Manifest = Callable[[str], Mapping[str, str] | None]
"""What a tree's content id stands for: path -> content."""

ASPECTS: Final = ("inputs", "data", "code", "command", "env", "outputs", "metrics", "time")


class Difference(NamedTuple):
    """A part that differs.  `files`: of two trees those that do, `+` new, `-` gone, `~` changed; None where that is not known, or they are none."""

    part: str
    before: Any = None
    after: Any = None
    files: Mapping[str, str] | None = None


class StepDifference(NamedTuple):
    """How one step differed; `only` says which run has it, A or B, when one has not."""

    id: str
    states: tuple[str, str]
    only: str = ""
    changes: Mapping[str, Sequence[Difference]] = {}
    """By aspect; aspects without any are absent."""


class Differences(NamedTuple):
    """What differs between two runs."""

    inputs: Sequence[Difference]
    steps: Sequence[StepDifference]
    """Those of either, in the order of the second and then the first; equal ones have no changes."""


def compare_runs(ws: Workspace, a: RunRow, b: RunRow) -> Differences:
    """Return what differs between two runs, as they are remembered."""

    def manifest(content: str) -> Mapping[str, str] | None:
        return load_manifest(ws, content)

    inputs = [resolve(change, manifest) for change in values(a.inputs, b.inputs)]
    return Differences(inputs, compare(remembered(ws, a.id), remembered(ws, b.id), manifest))


def difference_facts(found: Differences) -> Facts:
    """Return what differs as values of JSON."""
    steps = [
        {
            "id": step.id,
            "states": list(step.states),
            "only": step.only or None,
            "changes": {
                name: [change._asdict() for change in changes]
                for name, changes in step.changes.items()
            },
        }
        for step in found.steps
    ]
    return {"inputs": [change._asdict() for change in found.inputs], "steps": steps}


def resolve(change: Change, manifest: Manifest) -> Difference:
    """Return a difference with the files in which two trees differ."""
    found = plain(change)
    if not (is_tree(change.before) and is_tree(change.after)):
        return found
    old, new = manifest(str(change.before)), manifest(str(change.after))
    if old is None or new is None:
        return found
    signs = {path: _sign(old.get(path), new.get(path)) for path in sorted(old.keys() | new.keys())}
    return found._replace(files={path: sign for path, sign in signs.items() if sign})


def plain(change: Change) -> Difference:
    """Return a difference without a look into trees."""
    return Difference(change.part, change.before, change.after)


def is_tree(value: object) -> bool:
    """Whether a value is the content id of a tree."""
    return isinstance(value, str) and len(value) == 66 and value.startswith("t:")


def _sign(before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    return "+" if before is None else "-" if after is None else "~"


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run remembers of one step."""

    state: str
    preimage: Mapping[str, Any] | None = None
    outputs: Mapping[str, str] | None = None  # path -> content, where that is known
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def aspect(part: str) -> str:
    """The word under which people look for a part of a pre-image."""
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


def compare(
    a: Mapping[str, Ran], b: Mapping[str, Ran], manifest: Manifest = lambda _content: None
) -> list[StepDifference]:
    """The steps of two runs, those of either, in the order of the second and then the first; equal ones have no changes."""
    answer = []
    for id in [*b, *(id for id in a if id not in b)]:
        left, right = a.get(id), b.get(id)
        if left is None or right is None:
            answer.append(
                StepDifference(
                    id,
                    (left.state if left else "", right.state if right else ""),
                    "A" if right is None else "B",
                )
            )
        else:
            changes = {
                name: [resolve(change, manifest) for change in found]
                for name, found in _aspects(left, right).items()
            }
            answer.append(StepDifference(id, (left.state, right.state), changes=changes))
    return answer


def _aspects(left: Ran, right: Ran) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    if left.preimage is not None and right.preimage is not None:
        for change in fingerprint.explain(left.preimage, right.preimage):
            found.setdefault(aspect(change.part), []).append(change)
    if "python" in left.facts and "python" in right.facts:
        found.setdefault("env", []).extend(
            values({"python": left.facts["python"]}, {"python": right.facts["python"]})
        )
    if left.state == right.state:  # what a step that failed did not make tells nothing
        if left.outputs is not None and right.outputs is not None:
            found.setdefault("outputs", []).extend(values(left.outputs, right.outputs))
        found.setdefault("metrics", []).extend(values(left.metrics, right.metrics))
        found["time"] = [
            change for change in values(_timing(left), _timing(right)) if _differs(change)
        ]
    return {name: found[name] for name in ASPECTS if found.get(name)}


def values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """What differs between two mappings."""
    return [
        Change(name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _timing(ran: Ran) -> dict[str, float]:
    found = {"seconds": ran.seconds} if ran.seconds is not None else {}
    return found | {
        name: ran.facts[name]
        for name in ("cpu", "peak_memory")
        if isinstance(ran.facts.get(name), (int, float))
    }


def _differs(change: Change) -> bool:
    """Whether a measured number is another, and not the same one measured twice."""
    before, after = change.before, change.after
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return False
    floor = 16e6 if change.part == "peak_memory" else 0.5
    return abs(after - before) > max(floor, 0.1 * max(abs(before), abs(after)))


def remembered(ws: Workspace, run: str) -> dict[str, Ran]:
    """Return the steps that had something to do in a run, as it remembers them."""
    attempts = {row.step: row for row in ws.store.runs.attempts(run)}
    traces = ws.store.index.traces([row.key for row in attempts.values() if row.key])
    moves = [event for event in ws.store.runs.events(run) if event.subject == "step"]
    ended = {event.id: event.data for event in moves if event.before == "RUNNING"}
    states = {
        event.id: event.after for event in moves
    }  # in the order in which the steps were first heard of
    found = {}
    for id, state in states.items():
        attempt, data = attempts.get(id), ended.get(id, {})
        if state == "FRESH":
            continue
        if attempt is None:
            found[id] = Ran(state)
            continue
        # Another run may have made the trace of this key first: its outputs need not be those of this run.
        trace = traces.get(attempt.key)
        outputs = (
            {made.path: str(made.content) for made in trace.outputs}
            if trace is not None and trace.run == run
            else None
        )
        image, metrics, seconds = attempt.preimage, data.get("metrics"), data.get("seconds")
        found[id] = Ran(
            state,
            image if isinstance(image, dict) and image else None,
            outputs,
            metrics if isinstance(metrics, dict) else {},
            float(seconds) if isinstance(seconds, (int, float)) else None,
            attempt.exit,
        )
    return found
