"""`recipe why STEP`: explain a step's changed cache key, or the origin of its result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...api.differences import Manifest, with_changed_files
from ...api.finding import find_run
from ...execution.session import preview
from ...language.units import about
from ...planning import fingerprint
from ...planning.fingerprint import Change
from ...planning.halving import STOPPED
from ...planning.ids import stored_form
from ...survey import input_manifests
from ...survey.explain import describe_end, describe_replaced, preimage_of
from ..differences import all_of, as_json, text
from ..tail import safe_ids, safe_line, span
from .flags import JSON_HELP, RUN_HELP
from .targets import (
    add_request_words,
    describe_request,
    find_nodes,
    format_time,
    open_for_reading,
    resolve_request,
)

if TYPE_CHECKING:
    from ...storage.records.index import Trace
    from ...storage.records.runs import AttemptRow
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey


MANY = 10

WORDS = {
    "run": "would run",
    "maybe": "may run",
    "restore": "would be restored",
    "fresh": "is up to date",
    "skip": "is skipped",
}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "step",
        type=stored_form,
        metavar="STEP",
        help="Name of a step, such as `train`, or of one matrix instance, such as `train[lr=0.1]`",
    )
    add_request_words(parser)
    parser.add_argument(
        "--vs",
        metavar="RUN",
        help=(f"Compare with RUN instead of the last attempt. {RUN_HELP}"),
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "Examples:\n  recipe why train\n  recipe why train ./pipeline.yaml lr=0.2 --vs last~1"
    )


def run(args: argparse.Namespace) -> int:
    with open_for_reading(args.workspace) as ws:
        against = find_run(ws.store, args.vs).id if args.vs else None
        found = preview(ws, resolve_request(ws, args))
        answers = explain_nodes(ws, found, find_nodes(found, args.step), against)
        manifest_of = partial(input_manifests.find_manifest, ws, found)
        if args.json:
            steps = [answer.as_json(manifest_of) for answer in answers]
            print(json.dumps({"recipe": found.plan.recipe, "steps": steps}, indent=2))
            return 0
        print(describe_request(found))
        shown_answers = answers if args.verbose else answers[:MANY]
        for answer in shown_answers:
            print("\n".join(answer.lines(manifest_of)))
        if len(answers) > len(shown_answers):
            print(f"… and {len(answers) - len(shown_answers)} more instances (-v shows all)")
    return 0


@dataclass(slots=True)
class VerdictExplanation:
    """Explanation of one step's verdict."""

    id: str
    answer: str
    key: str | None
    reasons: list[str]
    changes: list[Change] | None  # None if a comparison is impossible
    against: AttemptRow | None
    chosen: str | None
    trace: Trace | None
    metrics: Mapping[str, object]
    causes: list[tuple[str, list[Change], list[str]]]

    def lines(self, manifest_of: Manifest) -> list[str]:
        """Format the explanation.  `manifest_of` returns the files of a tree by its content id."""
        lines = [f"{safe_ids(self.id)} {WORDS[self.answer]}"]
        lines += [f"  {safe_ids(reason)}" for reason in self.reasons]
        if self.trace is not None and self.answer in ("fresh", "restore"):
            lines += _describe_origin(self.trace, self.metrics)
        lines += self._compare(manifest_of)
        for id, changes, reasons in self.causes:
            lines.append(f"  {safe_ids(id)} would run first:")
            lines += [f"    {safe_ids(reason)}" for reason in reasons]
            lines += _change_lines(changes, manifest_of)
        return lines

    def _compare(self, manifest_of: Manifest) -> list[str]:
        """Return lines with the changes since the compared attempt."""
        if self.against is None:
            if self.chosen:
                return [f"  it did not run in {self.chosen}"]
            if self.answer in ("run", "maybe"):
                return ["  no earlier run in this workspace"]
            return []
        when = _describe_attempt(self.against)
        is_plain_fresh = self.answer == "fresh" and not self.chosen
        if self.changes is None:
            return [f"  it last ran {when}"]
        if not self.changes and is_plain_fresh:
            return []
        if not self.changes:
            return [f"  nothing changed since it ran {when}"]
        if is_plain_fresh:
            head = f"  it last ran {when}, with other inputs or code:"
        else:
            head = f"  since it ran {when}:"
        return [head, *_change_lines(self.changes, manifest_of)]

    def as_json(self, manifest_of: Manifest) -> Mapping[str, object]:
        changes = None
        if self.changes is not None:
            changes = _changes_as_json(self.changes, manifest_of)
        causes = [
            {"id": id, "reasons": reasons, "changes": _changes_as_json(changes, manifest_of)}
            for id, changes, reasons in self.causes
        ]
        attempt = None if self.against is None else _attempt_facts(self.against)
        made = None if self.trace is None else _trace_facts(self.trace, self.metrics)
        return {
            "id": self.id,
            "answer": self.answer,
            "key": self.key,
            "reasons": self.reasons,
            "compared_with": attempt,
            "changes": changes,
            "made": made,
            "causes": causes,
        }


def _describe_attempt(row: AttemptRow) -> str:
    """Format an attempt's run, start and outcome: `in run RUN, TIME, failed (exit 1)`."""
    started = f"in run {row.run}, {format_time(row.started or 0)}"
    if row.outcome == "done":
        return started
    if row.outcome == STOPPED or row.reason == "stopped":
        end = row.reason
    else:
        end = f"{row.outcome} ({row.reason})" if row.reason else row.outcome
    python = f", by {row.exit['python']}" if "python" in row.exit else ""
    return f"{started}, {end}{python}"


def _change_lines(changes: Sequence[Change], manifest_of: Manifest) -> list[str]:
    return all_of([with_changed_files(each, manifest_of) for each in changes], "    ")


def _changes_as_json(
    changes: Sequence[Change], manifest_of: Manifest
) -> list[Mapping[str, object]]:
    return [as_json(with_changed_files(each, manifest_of)) for each in changes]


def _attempt_facts(row: AttemptRow) -> Mapping[str, object]:
    return {
        "run": row.run,
        "attempt": row.n,
        "started": row.started,
        "outcome": row.outcome,
        "reason": row.reason,
    }


def _trace_facts(trace: Trace, metrics: Mapping[str, object]) -> Mapping[str, object]:
    return {
        "run": trace.run,
        "at": trace.made_at,
        "seconds": trace.seconds,
        "facts": trace.facts,
        "metrics": metrics,
        "outputs": {path: content for _, path, content in trace.outputs},
    }


def explain_nodes(
    ws: Workspace, found: Survey, numbers: list[int], against: str | None
) -> list[VerdictExplanation]:
    """Explain each node against its attempt in the run `against`, or its last attempt in any run."""
    ids = [found.plan.nodes[n].id for n in numbers]
    rows = ws.store.runs.latest_attempts(found.plan.recipe, ids, run=against)
    return [
        _explain_node(ws, found, n, rows.get(id), against)
        for n, id in zip(numbers, ids, strict=True)
    ]


def _explain_node(
    ws: Workspace, found: Survey, n: int, row: AttemptRow | None, against: str | None
) -> VerdictExplanation:
    verdict = found.verdicts[n]
    changes = differences(found, n, row)
    reasons = list(verdict.reasons)
    reasons += [f"would replace {words}" for words in describe_replaced(ws, verdict.conflicts)]
    is_unexplained = verdict.answer == "run" and not reasons
    if is_unexplained and row is not None and changes == []:
        reasons.append(explain_unremembered(row))
    trace = None
    if verdict.key is not None:
        trace = ws.store.index.traces([verdict.key]).get(verdict.key)
    metrics: Mapping[str, object] = {}
    if verdict.made is not None:
        metrics = verdict.made.metrics
    elif trace is not None:
        metrics = trace.numbers
    causes = _causes(ws, found, n) if verdict.answer == "maybe" else []
    return VerdictExplanation(
        id=found.plan.nodes[n].id,
        answer=verdict.answer,
        key=verdict.key,
        reasons=reasons,
        changes=changes,
        against=row,
        chosen=against,
        trace=trace,
        metrics=metrics,
        causes=causes,
    )


def differences(found: Survey, n: int, row: AttemptRow | None) -> list[Change] | None:
    """Return the differences of the cache key's inputs since an attempt; None if either is unknown."""
    image = preimage_of(found, n)
    if row is None or image is None or not isinstance(row.preimage, dict):
        return None
    return fingerprint.explain(row.preimage, image)


def explain_unremembered(row: AttemptRow) -> str:
    """Explain the rerun of a step with an unchanged cache key."""
    if row.outcome != "done":
        return describe_end(row)
    return "the result of the last attempt is not stored: an input changed during the attempt, or `recipe gc` removed it"


def _causes(ws: Workspace, found: Survey, n: int) -> list[tuple[str, list[Change], list[str]]]:
    """Return the dependencies of node `n` that will run, with their changes and reasons.

    They explain why node `n` may rerun. At most MANY are listed.
    """
    before = sorted(found.plan.before([n]) - {n})
    running = [need for need in before if found.verdicts[need].answer == "run"][:MANY]
    ids = [found.plan.nodes[need].id for need in running]
    rows = ws.store.runs.latest_attempts(found.plan.recipe, ids)
    causes = []
    for need, id in zip(running, ids, strict=True):
        row = rows.get(id)
        changes = differences(found, need, row) or []
        reasons = list(found.verdicts[need].reasons)
        if not changes and not reasons:
            reasons = [explain_missing_result(row)]
        causes.append((id, changes, reasons))
    return causes


def explain_missing_result(row: AttemptRow | None) -> str:
    """Explain the rerun of a step without changes since its last attempt `row`."""
    if row is None:
        return "no earlier run in this workspace"
    return explain_unremembered(row)


def _describe_origin(trace: Trace, metrics: Mapping[str, object]) -> list[str]:
    """Return lines with the run that created a result, and its time, memory and metrics."""
    facts = dict(trace.facts)
    is_adopted = facts.pop("adopted", False)
    who = "adopted with `recipe adopt`" if is_adopted else f"created by run {trace.run}"
    lines = [f"  key {trace.key[:16]}…, {who}, {format_time(trace.made_at)}"]
    words = [span(trace.seconds)] if trace.seconds else []
    words += [_describe_fact(name, value) for name, value in facts.items()]
    known = [each for each in words if each]
    if known:
        lines.append(f"  {', '.join(known)}")
    if metrics:
        shown = [f"{safe_line(name)} {text(name, value)}" for name, value in metrics.items()]
        lines.append(f"  {', '.join(shown)}")
    return lines


def _describe_fact(name: str, value: object) -> str:
    """Return the words for a stored fact of an attempt; empty for a memory that was not measured."""
    if name == "peak_memory" and isinstance(value, int):
        return f"{about(value)} peak memory" if value else ""
    if name == "cpu" and isinstance(value, (int, float)):
        return f"{span(value)} CPU time"
    if name == "checkpoint_bytes" and isinstance(value, int):
        return f"{about(value)} of checkpoints copied here"
    return f"{name} {text(name, value)}"
