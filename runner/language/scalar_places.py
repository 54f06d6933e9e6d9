"""Map characters of a scalar's value to their positions in the file.

Handles quotes, escapes, folds and indentation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Span: TypeAlias = tuple[int, int]
"""Start and end of the characters in the source that stand for one character of the value."""

_LONG_ESCAPES = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits behind the letter of an escape."""
_BREAK = re.compile(r"\r\n?|\n")
_BREAKS = re.compile(r"[ \t]*(?:\r\n?|\n)(?:[ \t]*(?:\r\n?|\n))*[ \t]*")


def inside(source: str, base: int, value: str, offset: int, length: int | None) -> Span:
    """Return the file span of `length` characters at `offset` in a YAML scalar's value.

    `source` is the scalar's source text, which starts at `base`. If characters cannot be mapped,
    the span is the whole scalar.
    """
    spans = _spans(source)
    if len(spans) != len(value):
        return base, base + len(source)
    first = min(max(offset, 0), len(value))
    width = max(length or 1, 1)
    last = min(first + width, len(value))
    if first == last:
        end = base + spans[-1][1] if spans else base
        return end, end + 1
    return base + spans[first][0], base + spans[last - 1][1]


def _spans(source: str) -> list[Span]:
    """Return the source span of each character of a YAML scalar's value."""
    if source[:1] in ("|", ">"):
        return _block_spans(source)
    quote = source[:1] if source[:1] in ("'", '"') else ""
    end = len(source) - len(quote)
    spans: list[Span] = []
    index = len(quote)
    while index < end:
        char = source[index]
        fold = _BREAKS.match(source, index) if char in " \t\r\n" else None
        if quote == "'" and char == "'":
            spans.append((index, index + 2))
            index += 2
        elif quote == '"' and char == "\\":
            index = _read_escape(source, index, spans)
        elif fold:
            # White space around a line break goes; one break is a space, each further one a line
            # feed.
            breaks = _spans_of_fold(fold)
            spans += breaks[1:] or breaks
            index = fold.end()
        else:
            spans.append((index, index + 1))
            index += 1
    return spans


def _spans_of_fold(fold: re.Match[str]) -> list[Span]:
    """Return the span of each line break in a fold of a scalar."""
    start = fold.start()
    found = _BREAK.finditer(fold.group())
    return [(start + each.start(), start + each.start() + 1) for each in found]


def _read_escape(source: str, index: int, spans: list[Span]) -> int:
    """Append the span of the escape sequence at `index`, and return the following index."""
    name = source[index + 1]
    if name in "\r\n":
        # An escaped break joins the lines; following blank lines remain line feeds.
        fold = _BREAKS.match(source, index + 1)
        assert fold
        spans += _spans_of_fold(fold)[1:]
        return fold.end()
    stop = index + 2 + _LONG_ESCAPES.get(name, 0)
    spans.append((index, stop))
    return stop


# -- blocks --


class _Line(NamedTuple):
    """A line of a YAML block scalar: its text span and the end of its line break."""

    start: int
    end: int
    next_start: int

    @property
    def is_empty(self) -> bool:
        return self.start == self.end

    @property
    def line_break(self) -> Span:
        return self.end, self.end + 1


def _block_spans(source: str) -> list[Span]:
    """Return the source span of each character of a literal or folded block scalar."""
    header = _BREAK.search(source)
    if not header:
        return []
    marks = source[1 : header.start()].split("#")[0]
    lines = _lines_of_block(source, header.end(), marks)
    count = len(lines)  # without the empty lines at the end
    while count and lines[count - 1].is_empty:
        count -= 1
    spans = _spans_of_lines(source, lines[:count], is_folded=source[0] == ">")
    tail = lines[max(count - 1, 0) :]
    # The file may end without a line break.
    last_breaks = [line.line_break for line in tail if line.next_start > line.end]
    if "+" in marks:
        spans += last_breaks
    elif "-" not in marks and count:
        spans += last_breaks[:1]
    return spans


def _lines_of_block(source: str, index: int, marks: str) -> list[_Line]:
    """Return the lines of a block scalar, with text offsets after the indentation."""
    lines: list[_Line] = []
    while index < len(source):
        found = _BREAK.search(source, index)
        end, next_start = found.span() if found else (len(source), len(source))
        lines.append(_Line(index, end, next_start))
        index = next_start
    texts = [source[line.start : line.end] for line in lines]
    indent = _indent_of_block(texts, marks)
    content: list[_Line] = []
    for line, text in zip(lines, texts, strict=True):
        if text.strip(" ") and _indent(text) < indent:
            break  # a comment below the block
        content.append(line._replace(start=min(line.start + indent, line.end)))
    return content


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _indent_of_block(texts: Sequence[str], marks: str) -> int:
    """Return the indentation of a block scalar.

    With an explicit indentation indicator, the first line may be deeper; then the shallowest line
    counts.
    """
    indents = [_indent(text) for text in texts if text.strip(" ")]
    if not indents:
        return 0
    has_indicator = any(mark.isdigit() for mark in marks)
    return min(indents) if has_indicator else indents[0]


def _spans_of_lines(source: str, lines: Sequence[_Line], *, is_folded: bool) -> list[Span]:
    """Return the source spans of block scalar lines and of the line breaks between them."""
    spans: list[Span] = []
    row = 0
    while row < len(lines):
        line = lines[row]
        spans += [(index, index + 1) for index in range(line.start, line.end)]
        following = row + 1
        if is_folded:
            following = _skip_empty(lines, following)
        if following < len(lines):
            spans += _spans_of_breaks(source, lines[row : following + 1])
        row = following
    return spans


def _skip_empty(lines: Sequence[_Line], row: int) -> int:
    """Return the row of the next line with text, or the number of lines."""
    while row < len(lines) and lines[row].is_empty:
        row += 1
    return row


def _spans_of_breaks(source: str, lines: Sequence[_Line]) -> list[Span]:
    """Return the source spans of the line breaks from the first of some lines to the last.

    A single break is kept, as a line feed or a space. Of several breaks between two flush lines,
    folding removes the first.
    """
    first, last = lines[0], lines[-1]
    breaks = [line.line_break for line in lines[:-1]]
    if len(breaks) == 1 or first.is_empty:
        return breaks
    if _is_deeper(source, first) or _is_deeper(source, last):
        return breaks
    return breaks[1:]


def _is_deeper(source: str, line: _Line) -> bool:
    """Return True if a block scalar's line is indented deeper than the block."""
    return source[line.start : line.start + 1] in (" ", "\t")
