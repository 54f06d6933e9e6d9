"""BadValue, and helpers that write values and counts in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class BadValue(Exception):
    """Error for an invalid value of an input.

    `message` continues a sentence that starts with the input's name. `fix` proposes a remedy.
    """

    def __init__(self, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.fix = code, message, fix


def text_of(value: object) -> str:
    """Format a value in recipe syntax, for example `true` instead of `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def show(value: object) -> str:
    """Format a value for a message: the first line cut to 60 characters, or the type."""
    if isinstance(value, str):
        return f'"{shorten(value)}"'
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return text_of(value)
    return f"a {type(value).__name__}"


def shorten(value: object) -> str:
    """Return the first line of a value's text, cut to 60 characters."""
    line = str(value).partition("\n")[0]
    return line if len(line) <= 60 else line[:57] + "..."


def join_or(words: Sequence[str]) -> str:
    """Join words as `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
