"""Source positions of the nodes of a document, as offsets, lines and columns."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from functools import cached_property

from runner.errors import Location

LONGEST_LINE = 1_000_000
"""Characters; a longer line is not shown."""
NO_NODE = -1


class LineTable:
    """Converter of text offsets to lines and columns."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    @cached_property
    def starts(self) -> list[int]:
        """The start index of each line."""
        line_break = r"\r\n?|\n" if "\r" in self.text else r"\n"
        return [0, *(found.end() for found in re.finditer(line_break, self.text))]

    def location(self, start: int, end: int) -> Location:
        """Return the location of the text from `start` to `end`, cut at the end of the line."""
        start = min(start, len(self.text))
        row = bisect_right(self.starts, start) - 1
        if row and start == len(self.text) == self.starts[row]:
            # The end of the file is shown at the end of its last line: an editor has no empty
            # line after it.
            row -= 1
            start = self._end_of_line(row)
        first, stop = self.starts[row], self._end_of_line(row)
        text = self.text[first:stop] if stop - first <= LONGEST_LINE else ""
        length = max(1, min(end, stop) - start)
        return Location(self.name, row + 1, start - first + 1, length, text)

    def _end_of_line(self, row: int) -> int:
        """Return the index of a line's end, before its line break."""
        if row + 1 == len(self.starts):
            return len(self.text)
        stop = self.starts[row + 1] - 1
        return stop - 1 if self.text[stop - 1 : stop + 1] == "\r\n" else stop


class Places:
    """Source positions of all document nodes in text order, as flat arrays (12 bytes per node)."""

    __slots__ = ("_children", "after", "ends", "folded", "starts", "targets")

    def __init__(self) -> None:
        self.starts, self.ends = array("I"), array("I")
        # First node after a collection and its content; 0 for a scalar or alias.
        self.after = array("I")
        self.targets: dict[int, int] = {}  # alias -> its target node
        self.folded: dict[int, str] = {}  # texts written with `>`
        self._children: dict[int, dict[str | int, tuple[int, int]]] = {}

    def add(self, start: int, end: int) -> None:
        """Add a node with its start and its provisional end."""
        self.starts.append(start)
        self.ends.append(end)
        self.after.append(0)

    def target(self, node: int) -> int:
        """Return the node itself, or the target of an alias."""
        while node in self.targets:
            node = self.targets[node]
        return node

    def children(self, node: int, value: object) -> dict[str | int, tuple[int, int]]:
        """Return the key and value nodes of a collection, by key or index.

        `value` is the collection's value. A dict keeps the text order, so keys are not read again.
        Items of a list have the key NO_NODE.
        """
        known = self._children.get(node)
        if known is None:
            known = self._children[node] = {}
            child = node + 1
            if isinstance(value, dict):
                for key in value:
                    known[key] = (child, child + 1)
                    child = self._node_behind(child + 1)
            elif isinstance(value, list):
                for index in range(len(value)):
                    known[index] = (NO_NODE, child)
                    child = self._node_behind(child)
        return known

    def _node_behind(self, node: int) -> int:
        """Return the first node after a node and its descendants."""
        return self.after[node] or node + 1
