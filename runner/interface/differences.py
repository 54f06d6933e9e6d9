"""Format differences between cache keys, runs and directory trees as text or JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

from ..api.differences import Difference, diff_mappings, is_tree, without_files
from .tail import safe_ids, safe_line, span

_LISTED = 10  # maximum files of a tree, or lines of a script
_WIDEST = 200  # maximum characters of a line
_SHORT_LIST = 60  # characters of a list, as JSON, that is shown whole
_MEASURES = ("seconds", "cpu", "peak_memory")


def lines(change: Difference) -> list[str]:
    """Format one difference as text: the part with both values, or only the changed lines of a long
    value.
    """
    part, before, after = change.part, change.before, change.after
    name = safe_ids(part)
    if is_tree(before) and is_tree(after):
        files = [f"  {line}" for line in _file_lines(change.files)]
        return [f"{name}: {brief(before)} -> {brief(after)}", *files]
    if before is None:
        return [f"{name} is new: {text(part, after)}"]
    if after is None:
        return [f"{name} was removed: {text(part, before)}"]
    inner = _inside(before, after)
    if inner:
        return [f"{name} changed:", *(f"  {line}" for line in inner)]
    ratio = _ratio(part, before, after)
    return [f"{name}: {text(part, before)} -> {text(part, after)}{ratio}"]


def text(part: str, value: object) -> str:
    """Format a value on one line."""
    if isinstance(value, str) and brief(value) != value:
        return brief(value)
    plain = safe_line(_plain(part, value))
    return plain if len(plain) <= _WIDEST else plain[: _WIDEST - 1] + "…"


def _plain(part: str, value: object) -> str:
    """Format a value with the unit of its part: durations for seconds, megabytes for memory, else
    JSON or a bare word.
    """
    if isinstance(value, str):
        return value if _is_bare_word(value) else json.dumps(value, ensure_ascii=False)
    if part in ("seconds", "cpu") and isinstance(value, (int, float)):
        return span(value)
    if part == "peak_memory" and isinstance(value, int):
        return f"{value / 1e6:.0f} MB"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)


def _is_bare_word(text: str) -> bool:
    """Return True if a text needs no quotes."""
    return bool(text) and text == text.strip() and text.isprintable()


def brief(value: object) -> str:
    """Shorten the digest of a content id; return any other value as text."""
    if isinstance(value, str) and _is_content_id(value):
        return value[:14] + "…"
    return str(value)


def _is_content_id(text: str) -> bool:
    """Return True for the content ID of a file, an executable file or a directory."""
    return len(text) == 66 and text.startswith(("f:", "x:", "t:"))


def _file_lines(files: Mapping[str, str] | None) -> list[str]:
    """List the changed files of a tree: `+` added, `-` removed, `~` changed."""
    if files is None:
        return [
            "the changed files are unknown, because the earlier version's file list is not stored"
        ]
    return _cut([f"{sign} {safe_line(path)}" for path, sign in files.items()], "files")


def _inside(before: object, after: object) -> list[str]:
    """List the changed lines of a script, words of a command or entries of a mapping.

    Empty for values that are shown whole.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        return all_of(map(without_files, diff_mappings(before, after)), indent="")
    if isinstance(before, str) and isinstance(after, str):
        return _changed_lines(before, after)
    if isinstance(before, list) and isinstance(after, list):
        return _changed_words(before, after)
    return []


def _changed_lines(before: str, after: str) -> list[str]:
    """List the changed lines of two texts; empty if both have only one line."""
    if not _has_lines(before) and not _has_lines(after):
        return []
    return _unified_diff(before.splitlines(), after.splitlines())


def _changed_words(before: list[object], after: list[object]) -> list[str]:
    """List the changed items of two lists; empty if both are short."""
    if max(len(json.dumps(before)), len(json.dumps(after))) <= _SHORT_LIST:
        return []
    return _unified_diff([*map(_word, before)], [*map(_word, after)])


def _has_lines(text: str) -> bool:
    return "\n" in text.strip()


def _word(item: object) -> str:
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def _unified_diff(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """List the removed and added lines, without the headers of a unified diff."""
    changed = []
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            changed.append(f"{line[0]} {safe_line(line[1:])}"[:_WIDEST])
    return _cut(changed, "lines")


def _cut(lines: list[str], what: str) -> list[str]:
    if len(lines) <= _LISTED:
        return lines
    return [*lines[: _LISTED - 1], f"… and {len(lines) - _LISTED + 1} more {what}"]


def _ratio(part: str, before: object, after: object) -> str:
    """Return the relative change of a measured number, such as ` (+3.1%)`; empty for other values."""
    if not _is_number(before) or not _is_number(after):
        return ""
    is_chosen = part.startswith(("inputs.", "matrix."))
    has_fraction = isinstance(before, float) or isinstance(after, float)
    is_measured = has_fraction or part in _MEASURES
    if is_chosen or not is_measured:
        return ""
    if not before:  # no change is relative to 0
        return ""
    return f" ({(after - before) / abs(before):+.1%})"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_json(change: Difference) -> Mapping[str, object]:
    """Return one difference as JSON data."""
    found = {"part": change.part, "before": change.before, "after": change.after}
    return found if change.files is None else {**found, "files": change.files}


def all_of(changes: Iterable[Difference], indent: str) -> list[str]:
    """Format differences as indented lines of text."""
    found: list[str] = []
    for change in changes:
        found += [indent + line for line in lines(change)]
    return found
