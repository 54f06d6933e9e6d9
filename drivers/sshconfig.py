"""What `~/.ssh/config` says about a name: HostName, User, Port, IdentityFile, ProxyJump.  Everything else in it is passed over, `Match` blocks too.

As in OpenSSH the first value found wins, identity files add up, and a block counts when one of its patterns fits the name and none with `!` does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

DEPTH = 16  # of files that include each other


@dataclass(frozen=True, slots=True)
class Said:
    """What a file says about one name; empty where it says nothing."""

    host: str = ""
    user: str = ""
    port: int = 0
    identity: tuple[str, ...] = ()
    jump: str = ""


def said(name: str, path: Path, home: Path) -> Said:
    """What the file at `path` says about `name`.  A file that is not there says nothing.  Raises OSError, and ValueError for a port that is none."""
    found: dict[str, str] = {}
    identity: list[str] = []
    for word, value in _words(name, path, home, 0):
        if word == "identityfile":
            if value.lower() != "none":
                identity.append(_filled(value, name, home))
        else:
            found.setdefault(word, value)
    jump = found.get("proxyjump", "")
    return Said(
        host=found.get("hostname", "").replace("%h", name).replace("%%", "%"),
        user=found.get("user", ""),
        port=_port(found["port"], path) if "port" in found else 0,
        identity=tuple(identity),
        jump="" if jump.lower() == "none" else jump,
    )


def _words(name: str, path: Path, home: Path, depth: int) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return
    applies = True
    for line in text.splitlines():
        told = re.match(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)", line)
        if told is None:
            continue
        word, rest = told[1].lower(), told[2].strip()
        values = _split(rest)
        if word == "host":
            applies = _fits(name, values)
        elif word == "match":
            applies = False
        elif applies and word == "include" and depth < DEPTH:
            for value in values:
                place = Path(_filled(value, name, home))
                for file in sorted(
                    (home / ".ssh").glob(str(place))
                    if not place.is_absolute()
                    else Path("/").glob(str(place)[1:])
                ):
                    yield from _words(name, file, home, depth + 1)
        elif (
            applies and word in ("hostname", "user", "port", "identityfile", "proxyjump") and values
        ):
            yield word, values[0]


def _fits(name: str, patterns: list[str]) -> bool:
    low = name.lower()
    if any(
        pattern.startswith("!") and fnmatchcase(low, pattern[1:].lower()) for pattern in patterns
    ):
        return False
    return any(
        fnmatchcase(low, pattern.lower()) for pattern in patterns if not pattern.startswith("!")
    )


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape, lexer.quotes = True, "#", "", '"'
    try:
        return list(lexer)
    except (
        ValueError
    ):  # a quote that is not closed: OpenSSH refuses the file, we pass over the line
        return []


def _filled(value: str, name: str, home: Path) -> str:
    value = (
        value.replace("%%", "\0").replace("%d", str(home)).replace("%h", name).replace("\0", "%")
    )
    return f"{home}/{value[2:]}" if value.startswith("~/") else value


def _port(text: str, path: Path) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f'{path}: "{text}" is not a port')
    return int(text)
