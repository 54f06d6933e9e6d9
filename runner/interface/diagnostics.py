"""Format problems as text with the source line and a caret, as JSON, as GitHub annotations or as
SARIF.

File content is never sent to a terminal unchanged: control, bidirectional and invisible characters
are shown as escapes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import quote

from runner.errors import Location, Problem
from runner.language.units import count_text
from runner.planning.ids import readable

from .tail import width

Format = Literal["text", "json", "github", "sarif"]

_TAB = 4
_ENDLESS = re.compile(r"\S{200,}")  # an unbroken run of characters, shortened in messages
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # control characters of ASCII, except a tab
_LONGEST = 1000  # maximum characters of a message or fix
_SHOWN = 30
"""Maximum number of problems in text output; errors take precedence.  The other formats list all problems."""
_WIDEST = 160  # maximum characters shown of a source line
_COLOURS = {"error": "31", "warning": "33", "note": "36"}


def render(
    problems: Iterable[Problem], format: Format, color: bool = False, *, unchecked: int = 0
) -> str:
    """Format `problems`, sorted by location.

    Any output ends with a line feed.  `unchecked` is the number of rules that lacked information.
    """
    ordered = sorted(dict.fromkeys(problems), key=_place)
    if format == "json":
        return json.dumps([_plain(problem) for problem in ordered], indent=2) + "\n"
    if format == "sarif":
        return json.dumps(_sarif(ordered), indent=2) + "\n"
    if format == "github":
        return "".join(map(_annotation, ordered))
    return _text(ordered, color, unchecked) if ordered else ""


def _place(problem: Problem) -> tuple[str, int, int]:
    where = problem.where
    return (where.path, where.line, where.column) if where else ("", 0, 0)


# --- text ---


def _text(ordered: Sequence[Problem], color: bool, unchecked: int) -> str:
    """Format up to `_SHOWN` problems as paragraphs, with the counts in the last line."""
    errors_first = sorted(ordered, key=lambda problem: problem.severity != "error")
    shown = sorted(errors_first[:_SHOWN], key=_place)
    text = "".join(_paragraph(problem, color) for problem in shown)
    if len(ordered) > _SHOWN:
        more = len(ordered) - _SHOWN
        text += f"… and {more} more; `recipe validate --format json` lists all\n"
    count = _count(ordered)
    if unchecked:
        count += f", {unchecked} not checked"
    return f"{text}{count}\n"


def _paragraph(problem: Problem, color: bool) -> str:
    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color else text

    shade = _COLOURS.get(problem.severity, "31")
    where = problem.where
    place = f"{_line(where.path)}:{where.line}:{where.column}: " if where else ""
    lines = [
        paint(place, "1")
        + paint(f"{problem.severity}:", f"1;{shade}")
        + " "
        + _line(readable(problem.message))
    ]
    if where and where.text:
        source, indent, marked = _excerpt(where)
        lines += [f"  {source}", "  " + " " * indent + paint("^" * marked, shade)]
    if problem.fix:
        lines.append("  " + paint("fix:", "32") + " " + _line(readable(problem.fix)))
    return "\n".join(lines) + "\n"


def _excerpt(where: Location) -> tuple[str, int, int]:
    """Return the displayed source line, the number of columns before the caret, and the width of
    the underline.
    """
    text, first = where.text, min(where.column - 1, len(where.text))
    # For a long line, show the text around the location.
    begin = 0 if first + where.length <= _WIDEST else max(0, first - _WIDEST // 4)
    end = min(len(text), begin + _WIDEST)
    cells = [_show_char(char) for char in text[begin:end]]
    first, last = first - begin, min(max(first + max(where.length, 1), first), end) - begin
    head = "…" if begin else ""
    tail = "…" if end < len(text) else ""
    before = head + "".join(cells[:first])
    marked = "".join(cells[first:last])
    return before + marked + "".join(cells[last:]) + tail, width(before), max(1, width(marked))


def _line(text: str) -> str:
    text = _ENDLESS.sub(lambda word: f"{word[0][:40]}… ({len(word[0]):,} characters)", text)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text):,} characters)"
    return "".join(_show_char(char) for char in text)


def _show_char(char: str) -> str:
    """Return a character, or its escape if the character is not safe for a terminal."""
    if char.isprintable() and unicodedata.category(char) != "Cf":
        return char
    if char == "\t":
        return " " * _TAB
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _count(problems: Sequence[Problem]) -> str:
    counts = []
    for severity in ("error", "warning", "note"):
        number = sum(problem.severity == severity for problem in problems)
        if number:
            counts.append(count_text(number, severity))
    return ", ".join(counts)


# --- for programs ---


def _plain(problem: Problem) -> dict[str, str | int | None]:
    found: dict[str, str | int | None] = {
        "code": problem.code,
        "severity": problem.severity,
        "message": problem.message,
        "fix": problem.fix,
        "path": None,
        "line": None,
        "column": None,
        "length": None,
    }
    where = problem.where
    if where is not None:
        found |= {
            "path": where.path,
            "line": where.line,
            "column": where.column,
            "length": where.length,
        }
    return found


def _annotation(problem: Problem) -> str:
    level = {"error": "error", "warning": "warning"}.get(problem.severity, "notice")
    where = problem.where
    properties = {"title": problem.code}
    if where:
        end = str(where.column + where.length)
        properties = {
            "file": where.path,
            "line": str(where.line),
            "col": str(where.column),
            "endColumn": end,
            **properties,
        }
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    fix = f" (fix: {problem.fix})" if problem.fix else ""
    return f"::{level} {listed}::{_data(problem.message + fix)}\n"


def _data(text: str) -> str:
    # GitHub ends a command at a raw line break and decodes these three escapes.  Unescaped text
    # could inject commands.
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return _CONTROL.sub(lambda found: _show_char(found[0]), escaped)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _sarif(problems: Sequence[Problem]) -> dict[str, object]:
    codes = sorted({problem.code for problem in problems})
    rules = [{"id": code} for code in codes]
    results = [_result(problem, codes.index(problem.code)) for problem in problems]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "recipe", "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }


def _result(problem: Problem, rule: int) -> dict[str, object]:
    level = problem.severity if problem.severity in ("error", "warning", "note") else "error"
    text = f"{problem.message} ({problem.fix})" if problem.fix else problem.message
    result: dict[str, object] = {
        "ruleId": problem.code,
        "ruleIndex": rule,
        "level": level,
        "message": {"text": text},
    }
    where = problem.where
    if where is not None:
        region = {
            "startLine": where.line,
            "startColumn": where.column,
            "endColumn": where.column + where.length,
        }
        uri = quote(where.path, errors="surrogateescape")
        result["locations"] = [
            {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
        ]
    return result
