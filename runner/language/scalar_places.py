"""From a place in a scalar's value to the characters of the file that stand for it: through quotes, escapes, folds and indentation."""

from __future__ import annotations

import re

_LONG_ESCAPES = {"x": 2, "u": 4, "U": 8}


def inside(source: str, base: int, value: str, offset: int, length: int | None) -> tuple[int, int]:
    """The place in the file of `length` characters from `offset` of a scalar that is written as `source` at `base`."""
    spans = _spans(source)
    if len(spans) != len(value):
        return base, base + len(source)
    first = min(max(offset, 0), len(value))
    last = min(first + max(1 if length is None else length, 1), len(value))
    if first == last:
        end = base + spans[-1][1] if spans else base
        return end, end + 1
    return base + spans[first][0], base + spans[last - 1][1]


def _spans(source: str) -> list[tuple[int, int]]:
    """For each character of a scalar's value, the part of `source` that stands for it."""
    if source[:1] in ("|", ">"):
        return _block_spans(source)
    quote = source[:1] if source[:1] in ("'", '"') else ""
    end = len(source) - len(quote)
    spans: list[tuple[int, int]] = []
    index = len(quote)
    while index < end:
        char = source[index]
        if quote == "'" and char == "'":
            spans.append((index, index + 2))
            index += 2
        elif quote == '"' and char == "\\":
            index = _escape(source, index, spans)
        elif char in " \t\r\n" and (fold := _BREAKS.match(source, index)):
            # White space around a line break goes; one break is a space, each further one a line feed.
            breaks = list(_BREAK.finditer(fold.group()))
            for found in breaks[1:] or breaks:
                spans.append((index + found.start(), index + found.start() + 1))
            index = fold.end()
        else:
            spans.append((index, index + 1))
            index += 1
    return spans


_BREAK = re.compile(r"\r\n?|\n")
_BREAKS = re.compile(r"[ \t]*(?:\r\n?|\n)(?:[ \t]*(?:\r\n?|\n))*[ \t]*")


def _escape(source: str, index: int, spans: list[tuple[int, int]]) -> int:
    """Note what the backslash at `index` stands for; where to go on."""
    name = source[index + 1]
    if name in "\r\n":
        # An escaped break joins the lines; blank lines after it still are line feeds.
        fold = _BREAKS.match(source, index + 1)
        assert fold
        for found in list(_BREAK.finditer(fold.group()))[1:]:
            spans.append((index + 1 + found.start(), index + 2 + found.start()))
        return fold.end()
    stop = index + 2 + _LONG_ESCAPES.get(name, 0)
    spans.append((index, stop))
    return stop


def _block_spans(source: str) -> list[tuple[int, int]]:
    """`_spans` of a literal or folded block."""
    header = _BREAK.search(source)
    if not header:
        return []
    marks = source[1 : header.start()].split("#")[0]
    lines: list[tuple[int, int, int]] = []  # start, end of the text, end of the break
    index = header.end()
    while index < len(source):
        found = _BREAK.search(source, index)
        stop, following = (found.start(), found.end()) if found else (len(source), len(source))
        lines.append((index, stop, following))
        index = following
    indent = _block_indent(source, lines, marks)
    texts: list[tuple[int, int, int]] = []
    for start, stop, following in lines:
        if (
            source[start:stop].strip(" ")
            and stop - start - len(source[start:stop].lstrip(" ")) < indent
        ):
            break  # a comment below the block
        texts.append((min(start + indent, stop), stop, following))
    blank = len(texts)
    while blank and texts[blank - 1][0] == texts[blank - 1][1]:
        blank -= 1
    spans: list[tuple[int, int]] = []
    folded = source[0] == ">"
    row = 0
    while row < blank:
        start, stop, _ = texts[row]
        spans += [(at, at + 1) for at in range(start, stop)]
        if row == blank - 1:
            break
        # A break between two flush lines folds; next to a deeper one, or in a literal, it stays.
        following = row + 1
        while folded and texts[following][0] == texts[following][1]:
            following += 1
        deep = any(
            source[texts[at][0] : texts[at][0] + 1] in (" ", "\t") for at in (row, following)
        )
        breaks = [(texts[at][1], texts[at][1] + 1) for at in range(row, following)]
        empty = start == stop
        spans += breaks if not folded or deep or empty or len(breaks) == 1 else breaks[1:]
        row = following
    ends = [
        (stop, stop + 1) for _, stop, following in texts[max(blank - 1, 0) :] if following > stop
    ]
    if "+" in marks:
        spans += (
            ends
            if blank
            else [(stop, stop + 1) for _, stop, following in texts if following > stop]
        )
    elif "-" not in marks and blank:
        spans += ends[:1]
    return spans


def _block_indent(source: str, lines: list[tuple[int, int, int]], marks: str) -> int:
    first = next(
        (source[start:stop] for start, stop, _ in lines if source[start:stop].strip(" ")), ""
    )
    # With an explicit indentation the first line may be deeper than the block: then the shallowest line tells it.
    if any(mark.isdigit() for mark in marks):
        depths = [
            len(text) - len(text.lstrip(" "))
            for start, stop, _ in lines
            if (text := source[start:stop]).strip(" ")
        ]
        return min(depths, default=0)
    return len(first) - len(first.lstrip(" "))
