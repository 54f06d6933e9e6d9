"""Tables as text: columns in line for people, Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .tail import safe_line, width


def align(table: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """The rows of a table, its columns in line; those in `right` flush right."""
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
    """The same as a table of Markdown."""
    rule = ["---:" if n in right else "---" for n in range(len(table[0]))]
    rows = [
        [cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for cell in row]
        for row in table
    ]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def cell(value: object) -> str:
    """A value as it stands in a table for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else safe_line(str(value))
