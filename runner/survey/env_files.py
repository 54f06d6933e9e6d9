"""Env files of steps (`env_file`).

A file is plain text without execution or expansion, and its values are not part of any key.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from ..errors import CannotRun
from ..reading import whole

_BLANK: Final = r"\s*(?:#[^\n]*)?(?:\n|\Z)"
_LINE: Final = r"""(?sx)[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
    (?: '(?P<literal>[^']*)'[ \t]*(?:\#[^\n]*)? | "(?P<quoted>(?:[^"\\]|\\.)*)"[ \t]*(?:\#[^\n]*)? | (?P<plain>(?!['"])[^\n]*) )
    (?:\n|\Z)"""
_COMMENT: Final = r"(?:^|\s)#.*"
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}


def parse_env(text: str) -> dict[str, str]:
    """Parse `NAME=value` lines. Errors contain the line number, but never the line's text.

    Raises ValueError.
    """
    found: dict[str, str] = {}
    whole_blank, whole_line = re.compile(_BLANK), re.compile(_LINE)
    text, at = text.removeprefix("\ufeff").replace("\r\n", "\n"), 0
    while at < len(text):
        if blank := whole_blank.match(text, at):
            at = blank.end()
            continue
        line = whole_line.match(text, at)
        if line is None or "\0" in line[0]:
            raise ValueError(f"line {text.count(chr(10), 0, at) + 1} is not NAME=value")
        found[line["name"]] = _value(line)
        at = line.end()
    return found


def _value(line: re.Match[str]) -> str:
    if line["literal"] is not None:
        return line["literal"]
    if line["quoted"] is not None:
        return re.sub(
            r"\\(.)",
            lambda escaped: _ESCAPES.get(escaped[1], escaped[1]),
            line["quoted"],
            flags=re.DOTALL,
        )
    return re.sub(_COMMENT, "", line["plain"]).strip()


class EnvFiles:
    """Cache of a workspace's env files, each read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[str, Mapping[str, str]] = {}

    def values(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the merged variables of env files. Later files take precedence.

        Raises CannotRun.
        """
        found: dict[str, str] = {}
        for path in paths:
            if path not in self._read:
                self._read[path] = self._parse(path)
            found |= self._read[path]
        return found

    def names(self, path: str) -> Collection[str]:
        """Return the variable names of an optional env file, or none if it cannot be read."""
        with contextlib.suppress(CannotRun):
            return self.values([path]).keys()
        return ()

    def faults(self, paths: Iterable[str]) -> Iterator[str]:
        """Yield a message for each unreadable env file."""
        for path in paths:
            try:
                self.values([path])
            except CannotRun as error:
                yield str(error)

    def _parse(self, path: str) -> Mapping[str, str]:
        try:
            return parse_env(whole(self._root / path).decode("utf-8"))
        except FileNotFoundError:
            raise CannotRun(f"the env_file {path} does not exist") from None
        except OSError as error:
            raise CannotRun(f"cannot read the env_file {path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise CannotRun(f"the env_file {path} is not UTF-8 text") from None
        except ValueError as error:
            raise CannotRun(f"the env_file {path}: {error}") from None
