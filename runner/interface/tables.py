"""Format tables as aligned text or Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .tail import safe_line, width


def align(table: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Format a table with aligned columns; columns in `right` are right-aligned."""
    widths = [max(width(row[n]) for row in table) for n in range(len(table[0]))]
    padded = (
        [
            " " * (widths[n] - width(cell)) + cell
            if n in right
            else cell + " " * (widths[n] - width(cell))
            for n, cell in enumerate(row)
        ]
        for row in table
    )
    return ["  ".join(row).rstrip() for row in padded]


def markdown(table: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Format a table as Markdown; columns in `right` are right-aligned."""
    rule = ["---:" if n in right else "---" for n in range(len(table[0]))]
    rows = [
        [cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for cell in row]
        for row in table
    ]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def cell(value: object) -> str:
    """Format a value for a table cell; None is empty."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else safe_line(str(value))
