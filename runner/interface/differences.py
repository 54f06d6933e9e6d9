"""Say in words what differs between two pre-images, two runs, two trees.  Pure: what was stored is handed in, lines come out."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..planning import fingerprint
from ..planning.fingerprint import Change
from .tail import named, shown, span

Manifest = Callable[[str], Mapping[str, str] | None]
"""What a tree's content id stands for: path -> content."""

_LISTED = 10  # files of a tree, lines of a script
_WIDEST = 200

ASPECTS: Final = ("inputs", "data", "code", "command", "env", "outputs", "metrics", "time")


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run remembers of one step."""

    state: str
    preimage: Mapping[str, Any] | None = None
    outputs: Mapping[str, str] | None = None  # path -> content, where that is known
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepDifference:
    """How one step differed; `only` says which run has it, when one has not."""

    id: str
    states: tuple[str, str]
    changes: Mapping[str, Sequence[Change]]  # aspect -> differences; aspects without any are absent
    only: str = ""


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


def compare(a: Mapping[str, Ran], b: Mapping[str, Ran]) -> list[StepDifference]:
    """The steps of two runs, those of either, in the order of the second and then the first; equal ones have no changes."""
    answer = []
    for id in [*b, *(id for id in a if id not in b)]:
        left, right = a.get(id), b.get(id)
        if left is None or right is None:
            answer.append(
                StepDifference(
                    id,
                    (left.state if left else "", right.state if right else ""),
                    {},
                    "A" if right is None else "B",
                )
            )
        else:
            answer.append(StepDifference(id, (left.state, right.state), _aspects(left, right)))
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


def lines(change: Change, manifest: Manifest) -> list[str]:
    """One difference for people: the part with both values, and of what is large only what differs in it."""
    part, before, after = change.part, change.before, change.after
    if _is_tree(before) and _is_tree(after):
        return [
            f"{named(part)}: {brief(before)} -> {brief(after)}",
            *(f"  {line}" for line in tree_lines(str(before), str(after), manifest)),
        ]
    if before is not None and after is not None:
        inner = _inside(before, after)
        if inner:
            return [f"{named(part)} changed:", *(f"  {line}" for line in inner)]
        return [
            f"{named(part)}: {text(part, before)} -> {text(part, after)}{_ratio(part, before, after)}"
        ]
    if before is None:
        return [f"{named(part)} is new: {text(part, after)}"]
    return [f"{named(part)} is gone: it was {text(part, before)}"]


def text(part: str, value: object) -> str:
    """A value on one line."""
    if isinstance(value, str):
        if brief(value) != value:
            return brief(value)
        plain = (
            value
            if value and value == value.strip() and value.isprintable()
            else json.dumps(value, ensure_ascii=False)
        )
    elif part in ("seconds", "cpu") and isinstance(value, (int, float)):
        plain = span(value)
    elif isinstance(value, float):
        plain = f"{value:.6g}"
    elif part == "peak_memory" and isinstance(value, int):
        plain = f"{value / 1e6:.0f} MB"
    else:
        plain = json.dumps(value, ensure_ascii=False)
    plain = shown(plain)
    return plain if len(plain) <= _WIDEST else plain[: _WIDEST - 1] + "…"


def brief(value: object) -> str:
    """A content id with as much of its digest as people compare; anything else as it is."""
    if isinstance(value, str) and len(value) == 66 and value[:2] in ("f:", "x:", "t:"):
        return value[:14] + "…"
    return str(value)


def tree_lines(before: str, after: str, manifest: Manifest) -> list[str]:
    """Which files of a tree differ: `+` new, `-` gone, `~` changed."""
    old, new = manifest(before), manifest(after)
    if old is None or new is None:
        return ["which files changed is not known: what the earlier one held is not stored"]
    lines = [
        f"{sign} {shown(path)}"
        for path in sorted(old.keys() | new.keys())
        if (sign := _sign(old.get(path), new.get(path)))
    ]
    return _cut(lines, "files")


def _sign(before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    return "+" if before is None else "-" if after is None else "~"


def _inside(before: object, after: object) -> list[str]:
    """The lines of a script, or the words of a command, that differ; empty when the whole is short enough to show."""
    if (
        isinstance(before, str)
        and isinstance(after, str)
        and ("\n" in before.strip() or "\n" in after.strip())
    ):
        return _unified(before.splitlines(), after.splitlines())
    if (
        isinstance(before, list)
        and isinstance(after, list)
        and max(len(json.dumps(before)), len(json.dumps(after))) > 60
    ):
        return _unified([_word(item) for item in before], [_word(item) for item in after])
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for change in values(before, after)
            for line in lines(change, lambda _content: None)
        ]
    return []


def _word(item: object) -> str:
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def _unified(before: Sequence[str], after: Sequence[str]) -> list[str]:
    found = difflib.unified_diff(before, after, lineterm="", n=0)
    return _cut(
        [
            f"{line[0]} {shown(line[1:])}"[:_WIDEST]
            for line in found
            if not line.startswith(("---", "+++", "@@"))
        ],
        "lines",
    )


def _cut(lines: list[str], what: str) -> list[str]:
    return (
        lines
        if len(lines) <= _LISTED
        else [*lines[: _LISTED - 1], f"… and {len(lines) - _LISTED + 1} more {what}"]
    )


def _is_tree(value: object) -> bool:
    return isinstance(value, str) and len(value) == 66 and value.startswith("t:")


def _ratio(part: str, before: object, after: object) -> str:
    """By how much a number moved."""
    number = (int, float)
    if (
        isinstance(before, bool)
        or isinstance(after, bool)
        or not isinstance(before, number)
        or not isinstance(after, number)
        or not before
    ):
        return ""
    if part.startswith(("inputs.", "matrix.")) or not (
        isinstance(before, float)
        or isinstance(after, float)
        or part in ("seconds", "cpu", "peak_memory")
    ):
        return ""
    return f" ({(after - before) / abs(before):+.1%})"


def as_json(change: Change, manifest: Manifest) -> Mapping[str, object]:
    """One difference for programs."""
    found: dict[str, object] = {"part": change.part, "before": change.before, "after": change.after}
    if _is_tree(change.before) and _is_tree(change.after):
        old, new = manifest(str(change.before)), manifest(str(change.after))
        if old is not None and new is not None:
            found["files"] = {
                path: _sign(old.get(path), new.get(path))
                for path in sorted(old.keys() | new.keys())
                if old.get(path) != new.get(path)
            }
    return found


def all_of(changes: Iterable[Change], manifest: Manifest, indent: str) -> list[str]:
    return [indent + line for change in changes for line in lines(change, manifest)]
