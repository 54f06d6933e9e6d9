"""What a YAML parser's complaint means: the mistakes that people make, in our words and with what to write instead."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from yaml import MarkedYAMLError


class Mistake(NamedTuple):
    """What is wrong between two places of a text."""

    code: str
    message: str
    start: int
    end: int
    fix: str = ""


def rest_of_value(text: str, start: int, *, comments: bool = False) -> str:
    """The text of a plain value as its author saw it: up to the end of the line, or of the item when a flow collection goes on."""
    line = re.compile(r"[^\r\n]*" if comments else r"(?:[^\r\n#]|(?<=\S)#)*").match(text, start)
    value = line.group().rstrip() if line else ""
    before = text[text.rfind("\n", 0, start) + 1 : start]
    if not comments and before.count("[") + before.count("{") > before.count("]") + before.count(
        "}"
    ):
        value = re.split(r",\s|[\]}]+\s*$", value)[0].rstrip()
    return value


def quoted(value: str) -> str:
    if "\\" in value or '"' in value:
        return "'" + value.replace("'", "''") + "'"
    return f'"{value}"'


def unquoted_expression(text: str, index: int) -> Mistake:
    """`{{` outside quotes, at `index`: YAML reads braces as a mapping."""
    start = index
    while start and text[start - 1] not in " \t\r\n,[":
        start -= 1
    line_end = next(iter(found.start() for found in re.compile(r"\r|\n|$").finditer(text, index)))
    closed = text.find("}}", index, line_end)
    end = closed + 2 if closed != -1 else line_end
    tail = re.compile(r"[^\s,\[\]{}#]*").match(text, end)
    end = tail.end() if tail else end
    message = "an expression must be in quotes: YAML reads `{` as a mapping"
    return Mistake(
        "unquoted-expression", message, start, end, f"quote it: {quoted(text[start:end])}"
    )


def explain(text: str, error: MarkedYAMLError) -> Mistake:
    """A parser's complaint as a mistake that people make, or at least as a place and a sentence."""
    problem, context = error.problem or "", error.context or ""
    mark, context_mark = error.problem_mark, error.context_mark
    index = min(mark.index, len(text)) if mark else 0
    begun = min(context_mark.index, len(text)) if context_mark else index
    line_start = text.rfind("\n", 0, index) + 1
    line = text[line_start:].split("\n", 1)[0].rstrip("\r")
    for start in (line_start, text.rfind("\n", 0, begun) + 1):
        braces = _bare_braces(text[start:].split("\n", 1)[0])
        if braces != -1:
            return unquoted_expression(text, start + braces)
    tab = re.match(r" *\t[ \t]*", line)
    if tab and ("tab" in problem or "'\\t'" in problem or line_start + tab.end() >= index):
        return Mistake(
            "tab",
            "a tab is used as indentation",
            line_start + line.index("\t"),
            line_start + tab.end(),
            "indent with spaces",
        )
    if "alias" in context or "anchor" in context:
        return _unquoted_start(text, begun, "a pattern" if "alias" in context else "a value")
    if "cannot start any token" in problem and text[index : index + 1]:
        return _unquoted_start(text, index, "a value")
    if "mapping values are not allowed" in problem:
        if re.search(r":\s", text[line_start:index]):
            return _unquoted_colon(text, index, line_start, line)
        return Mistake(
            "indent", "this line is indented as if it belonged to the value above", index, index + 1
        )
    if "flow" in context:
        return _in_brackets(text, index, begun, line_start)
    if "quoted scalar" in context:
        if "escape" in problem:
            slash = text.rfind("\\", begun, index + 1)
            fix = "write it in single quotes, or with two backslashes"
            return Mistake(
                "escape", f"`{text[slash : slash + 2]}` is not an escape", slash, slash + 2, fix
            )
        return Mistake("unclosed", "this quote is never closed", begun, begun + 1)
    if "block" in context and text[line_start:index].strip() == "":
        fix = "give everything of one level the same indentation"
        return Mistake(
            "indent",
            "this line does not line up with the lines above it",
            index,
            index + len(line.strip()),
            fix,
        )
    if "block mapping" in context:
        return Mistake(
            "syntax",
            "nothing may follow the value here",
            index,
            line_start + len(line),
            "quote the whole value",
        )
    if "simple key" in context or "expected ':'" in problem:
        rest = rest_of_value(text, begun)
        return Mistake(
            "syntax",
            "this is neither `key: value` nor an item of a list",
            begun,
            begun + max(1, len(rest)),
        )
    reason = f"{problem} ({context})" if context else problem
    return Mistake("syntax", f"this is not YAML: {reason}", index, index + 1)


def _unquoted_start(text: str, start: int, what: str) -> Mistake:
    rest = rest_of_value(text, start)
    message = f"{what} that starts with {text[start : start + 1]} must be in quotes"
    return Mistake("unquoted-text", message, start, start + len(rest), f"quote it: {quoted(rest)}")


def _in_brackets(text: str, index: int, begun: int, line_start: int) -> Mistake:
    """What is wrong at `index` of a list or mapping whose bracket is at `begun`."""
    char = text[index : index + 1]
    if char in ("[", "{") and index and not text[index - 1].isspace():
        start = index
        while start > line_start and text[start - 1] not in " \t,[{":
            start -= 1
        closing = re.compile(r"[^\s,]*?(?=,|\s|\]\s*(?:#.*)?$|\}\s*(?:#.*)?$)", re.MULTILINE).match(
            text, start
        )
        end = closing.end() if closing else index + 1
        message = f"`{char}` inside a value within brackets starts a new {'list' if char == '[' else 'mapping'}"
        return Mistake("unquoted-text", message, start, end, f"quote it: {quoted(text[start:end])}")
    opening = text[begun : begun + 1]
    if text[index:].strip() == "" or text.count("\n", begun, index):
        return Mistake("unclosed", f"this `{opening}` is never closed", begun, begun + 1)
    message = f"a comma or the closing bracket is missing before this (the `{opening}` is in column {begun - line_start + 1})"
    return Mistake("syntax", message, index, index + 1)


def _bare_braces(line: str) -> int:
    """Where `{{` stands outside quotes and comments, or -1."""
    bare = re.sub(
        r"(?<![^\s\[{,])(?:\"(?:\\\\.|[^\"\\\\])*\"|'(?:''|[^'])*')|(?<!\S)#.*",
        lambda found: " " * len(found.group()),
        line,
    )
    return bare.find("{{")


def _unquoted_colon(text: str, index: int, line_start: int, line: str) -> Mistake:
    head = re.match(r"\s*(?:- +)*(?:\"[^\"]*\"|'[^']*'|[^\s:]+) *:\s+", line)
    value = line[head.end() :].rstrip() if head and line_start + head.end() <= index else ""
    fix = f"quote the whole value: {quoted(value)}" if value else "quote the value"
    return Mistake(
        "unquoted-colon",
        "a colon and a space inside a value must be in quotes",
        index,
        index + 1,
        fix,
    )
