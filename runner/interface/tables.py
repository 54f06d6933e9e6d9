"""Format tables as aligned text or Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .tail import safe_line, width


def align(table: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Format a table with aligned columns; columns in `right` are right-aligned."""
    widths = [max(map(width, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded = []
        for n, cell in enumerate(row):
            # `str.ljust` counts characters, not the columns of a terminal.
            space = " " * (widths[n] - width(cell))
            if n in right:
                padded.append(space + cell)
            else:
                padded.append(cell + space)
        lines.append("  ".join(padded).rstrip())
    return lines


def markdown(table: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Format a table as Markdown; columns in `right` are right-aligned."""
    rule = []
    for n in range(len(table[0])):
        line = "---:" if n in right else "---"
        rule.append(line)
    head, *rows = [list(map(_escape, row)) for row in table]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def _escape(cell: str) -> str:
    """Replace the characters that have a meaning in a Markdown table."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def cell(value: object) -> str:
    """Format a value for a table cell; None is empty."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else safe_line(str(value))
