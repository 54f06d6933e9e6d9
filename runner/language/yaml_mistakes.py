"""Explain a YAML parser's errors as common mistakes, with a fix for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from yaml import MarkedYAMLError


class Mistake(NamedTuple):
    """A mistake between two offsets of a text."""

    code: str
    message: str
    start: int
    end: int
    fix: str = ""


def rest_of_value(text: str, start: int, *, comments: bool = False) -> str:
    """Return the source text of a plain value from an index on.

    It ends with the line, or with the item in a flow collection. `comments`: include text after a
    `#`.
    """
    pattern = r"[^\r\n]*" if comments else r"(?:[^\r\n#]|(?<=\S)#)*"
    line = re.compile(pattern).match(text, start)
    value = line.group().rstrip() if line else ""
    before = text[_start_of_line(text, start) : start]
    opened = before.count("[") + before.count("{")
    closed = before.count("]") + before.count("}")
    if opened > closed and not comments:
        value = re.split(r",\s|[\]}]+\s*$", value)[0].rstrip()
    return value


def quote(value: str) -> str:
    """Return a text in quotes: double quotes unless it needs single ones."""
    if "\\" in value or '"' in value:
        return "'" + value.replace("'", "''") + "'"
    return f'"{value}"'


def unquoted_expression(text: str, index: int) -> Mistake:
    """Return the mistake of an unquoted `{{` at `index`, which YAML reads as a mapping."""
    start = index
    while start and text[start - 1] not in " \t\r\n,[":
        start -= 1
    line_ends = re.compile(r"\r|\n|$").finditer(text, index)
    line_end = next(line_ends).start()
    closed = text.find("}}", index, line_end)
    end = closed + 2 if closed != -1 else line_end
    tail = re.compile(r"[^\s,\[\]{}#]*").match(text, end)
    end = tail.end() if tail else end
    message = "an expression must be in quotes: YAML reads `{` as a mapping"
    return Mistake(
        "unquoted-expression", message, start, end, f"quote it: {quote(text[start:end])}"
    )


def explain(text: str, error: MarkedYAMLError) -> Mistake:
    """Return a parser's error as a known mistake, or else as a position and a sentence."""
    complaint = _Complaint.of(text, error)
    for find in _MISTAKES:
        mistake = find(complaint)
        if mistake is not None:
            return mistake
    problem, context = complaint.problem, complaint.context
    reason = f"{problem} ({context})" if context else problem
    index = complaint.index
    return Mistake("syntax", f"this is not YAML: {reason}", index, index + 1)


@dataclass(frozen=True, slots=True)
class _Complaint:
    """A parser's error and its position."""

    text: str
    problem: str
    context: str
    index: int  # of the problem
    begun: int  # start of the current construct
    line_start: int  # of the line with the problem
    line: str

    @classmethod
    def of(cls, text: str, error: MarkedYAMLError) -> _Complaint:
        mark, context_mark = error.problem_mark, error.context_mark
        index = min(mark.index, len(text)) if mark else 0
        begun = min(context_mark.index, len(text)) if context_mark else index
        line_start = _start_of_line(text, index)
        line = text[line_start:].split("\n", 1)[0].rstrip("\r")
        problem, context = error.problem or "", error.context or ""
        return cls(text, problem, context, index, begun, line_start, line)


def _start_of_line(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


# -- each function detects one kind of mistake, or returns None --


def _braces(complaint: _Complaint) -> Mistake | None:
    text = complaint.text
    for start in (complaint.line_start, _start_of_line(text, complaint.begun)):
        braces = _bare_braces(text[start:].split("\n", 1)[0])
        if braces != -1:
            return unquoted_expression(text, start + braces)
    return None


def _tab(complaint: _Complaint) -> Mistake | None:
    start, problem = complaint.line_start, complaint.problem
    tab = re.match(r" *\t[ \t]*", complaint.line)
    if tab is None:
        return None
    is_named = "tab" in problem or "'\\t'" in problem
    if is_named or start + tab.end() >= complaint.index:
        first = start + complaint.line.index("\t")
        message = "a tab is used as indentation"
        return Mistake("tab", message, first, start + tab.end(), "indent with spaces")
    return None


def _start_of_text(complaint: _Complaint) -> Mistake | None:
    """Return the mistake of an unquoted text that starts with a special character."""
    text, context = complaint.text, complaint.context
    if "alias" in context:
        return _unquoted_start(text, complaint.begun, "a pattern")
    if "anchor" in context:
        return _unquoted_start(text, complaint.begun, "a value")
    if "cannot start any token" in complaint.problem and complaint.index < len(text):
        return _unquoted_start(text, complaint.index, "a value")
    return None


def _colon(complaint: _Complaint) -> Mistake | None:
    if "mapping values are not allowed" not in complaint.problem:
        return None
    text, index, line_start = complaint.text, complaint.index, complaint.line_start
    if re.search(r":\s", text[line_start:index]):
        return _unquoted_colon(index, line_start, complaint.line)
    message = "this line is indented as if it belonged to the value above"
    return Mistake("indent", message, index, index + 1)


def _brackets(complaint: _Complaint) -> Mistake | None:
    if "flow" not in complaint.context:
        return None
    return _in_brackets(complaint.text, complaint.index, complaint.begun, complaint.line_start)


def _quotes(complaint: _Complaint) -> Mistake | None:
    if "quoted scalar" not in complaint.context:
        return None
    text, begun = complaint.text, complaint.begun
    if "escape" in complaint.problem:
        slash = text.rfind("\\", begun, complaint.index + 1)
        message = f"`{text[slash : slash + 2]}` is not an escape"
        fix = "write it in single quotes, or with two backslashes"
        return Mistake("escape", message, slash, slash + 2, fix)
    return Mistake("unclosed", "this quote is never closed", begun, begun + 1)


def _block(complaint: _Complaint) -> Mistake | None:
    text, context, index = complaint.text, complaint.context, complaint.index
    line_start, line = complaint.line_start, complaint.line
    if "block" in context and not text[line_start:index].strip():
        message = "the indentation does not match the lines above"
        fix = "indent all lines of one level alike"
        return Mistake("indent", message, index, index + len(line.strip()), fix)
    if "block mapping" in context:
        message, fix = "unexpected text after the value", "quote the whole value"
        return Mistake("syntax", message, index, line_start + len(line), fix)
    return None


def _no_key(complaint: _Complaint) -> Mistake | None:
    if "simple key" not in complaint.context and "expected ':'" not in complaint.problem:
        return None
    begun = complaint.begun
    rest = rest_of_value(complaint.text, begun)
    message = "this is neither `key: value` nor an item of a list"
    return Mistake("syntax", message, begun, begun + max(1, len(rest)))


_MISTAKES: tuple[Callable[[_Complaint], Mistake | None], ...] = (
    _braces,
    _tab,
    _start_of_text,
    _colon,
    _brackets,
    _quotes,
    _block,
    _no_key,
)
"""Mistakes by priority: the first match explains a complaint."""


# -- words and places --

_END_OF_ITEM = re.compile(r"[^\s,]*?(?=,|\s|\]\s*(?:#.*)?$|\}\s*(?:#.*)?$)", re.MULTILINE)


def _unquoted_start(text: str, start: int, what: str) -> Mistake:
    rest = rest_of_value(text, start)
    message = f"{what} that starts with {text[start : start + 1]} must be in quotes"
    return Mistake("unquoted-text", message, start, start + len(rest), f"quote it: {quote(rest)}")


def _in_brackets(text: str, index: int, begun: int, line_start: int) -> Mistake:
    """Return the mistake at `index` in a list or mapping whose bracket is at `begun`."""
    is_in_word = index > 0 and not text[index - 1].isspace()
    if is_in_word and text[index : index + 1] in ("[", "{"):
        return _bracket_in_value(text, index, line_start)
    opening = text[begun : begun + 1]
    if not text[index:].strip() or text.count("\n", begun, index):
        return Mistake("unclosed", f"this `{opening}` is never closed", begun, begun + 1)
    where = f"the `{opening}` is in column {begun - line_start + 1}"
    message = f"a comma or the closing bracket is missing before this ({where})"
    return Mistake("syntax", message, index, index + 1)


def _bracket_in_value(text: str, index: int, line_start: int) -> Mistake:
    """Return the mistake of a value in brackets that contains the bracket at `index`."""
    start = index
    while start > line_start and text[start - 1] not in " \t,[{":
        start -= 1
    closing = _END_OF_ITEM.match(text, start)
    end = closing.end() if closing else index + 1
    kind = "list" if text[index] == "[" else "mapping"
    message = f"`{text[index]}` inside a value within brackets starts a new {kind}"
    return Mistake("unquoted-text", message, start, end, f"quote it: {quote(text[start:end])}")


def _bare_braces(line: str) -> int:
    """Return the index of a `{{` outside quotes and comments, or -1."""
    bare = re.sub(
        r"(?<![^\s\[{,])(?:\"(?:\\\\.|[^\"\\\\])*\"|'(?:''|[^'])*')|(?<!\S)#.*",
        lambda found: " " * len(found.group()),
        line,
    )
    return bare.find("{{")


def _unquoted_colon(index: int, line_start: int, line: str) -> Mistake:
    head = re.match(r"\s*(?:- +)*(?:\"[^\"]*\"|'[^']*'|[^\s:]+) *:\s+", line)
    value = ""
    if head and line_start + head.end() <= index:
        value = line[head.end() :].rstrip()
    fix = f"quote the whole value: {quote(value)}" if value else "quote the value"
    return Mistake(
        "unquoted-colon",
        "a colon and a space inside a value must be in quotes",
        index,
        index + 1,
        fix,
    )
