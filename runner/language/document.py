"""Parse a YAML file into plain values with their source locations.

Independent of recipes.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.errors import Invalid, Location, NotFound, Problem

from .node_places import NO_NODE, LineTable, Places
from .scalar_places import inside
from .yaml_reader import MAX_PROBLEMS, LimitError, Locate, YamlReader, find_doubtful_scalars
from .yaml_scalars import REFUSED_CHARACTERS

if TYPE_CHECKING:
    from .values import Tree

# 100,000 steps are 15 MB; in memory a file with one emoji takes four bytes a character.
MAX_BYTES = 24_000_000


class _Found(NamedTuple):
    """The deepest existing part of a path in a document."""

    key: int  # node; NO_NODE for an item of a list and for the document
    node: int  # of the value
    value: object
    is_whole: bool  # nothing of the path is missing


class Document:
    """A parsed YAML file: its values with their source locations.

    `value` is plain data: dict, list, str, int, float, bool, None.
    """

    __slots__ = ("_at", "_places", "name", "text", "value")

    def __init__(self, name: str, text: str, value: Tree, places: Places, at: Locate) -> None:
        self.name, self.text, self.value = name, text, value
        self._places, self._at = places, at

    def locate(
        self,
        path: tuple[str | int, ...],
        *,
        key: bool = False,
        offset: int | None = None,
        length: int | None = None,
    ) -> Location:
        """Return the location of the value at `path`, or of its deepest existing part.

        With `key`, the location is that of the value's key. `offset` and `length` count characters
        of the parsed scalar and are mapped back through escapes and folds.
        """
        places = self._places
        found = self._walk(path)
        if not found.is_whole:
            # A reader looks for the name of the mapping that lacks the part.
            key, offset = True, None
        if key and found.key != NO_NODE:
            return self._at(places.starts[found.key], places.ends[found.key])
        if offset is None or not isinstance(found.value, str):
            return self._at(places.starts[found.node], places.ends[found.node])
        node = places.target(found.node)
        start, end = places.starts[node], places.ends[node]
        return self._at(*inside(self.text[start:end], start, found.value, offset, length))

    def source_text(self, path: tuple[str | int, ...]) -> str:
        """Return the source text of the scalar at `path`, with quotes, or "" without a scalar."""
        found = self._walk(path)
        if not found.is_whole or isinstance(found.value, (dict, list)):
            return ""
        node = self._places.target(found.node)
        return self.text[self._places.starts[node] : self._places.ends[node]].rstrip()

    def _walk(self, path: tuple[str | int, ...]) -> _Found:
        places = self._places
        value: object = self.value
        key, node = NO_NODE, 0
        for part in path:
            child = places.children(places.target(node), value).get(part)
            if child is None:
                return _Found(key, node, value, is_whole=False)
            key, node = child
            value = value[part]  # type: ignore[index]
        return _Found(key, node, value, is_whole=True)

    def problem(
        self,
        code: str,
        message: str,
        path: tuple[str | int, ...],
        *,
        fix: str = "",
        key: bool = False,
        offset: int | None = None,
        length: int | None = None,
        severity: str = "error",
    ) -> Problem:
        """Build a problem located at `path` of the document. Arguments are as in `locate`."""
        where = self.locate(path, key=key, offset=offset, length=length)
        return Problem(code, message, where, fix, severity)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Warnings about valid YAML scalars that are probably mistakes."""
        found = islice(find_doubtful_scalars(self.text, self._places), MAX_PROBLEMS)
        problems: list[Problem] = []
        for code, message, start, end, fix in found:
            problems.append(Problem(code, message, self._at(start, end), fix, "warning"))
        return tuple(problems)


def read(path: Path) -> Document:
    """Parse a YAML file to a document.

    Raises NotFound, or Invalid with every problem.
    """
    name = str(path)
    try:
        if not path.is_file():
            if path.exists():
                raise Invalid([Problem("unreadable", f"{name} is not a file")])
            raise NotFound(f"there is no file {name}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"{name} cannot be read: {error.strerror or error}"
        raise Invalid([Problem("unreadable", message)]) from error
    return parse(data, name)


def parse(text: str | bytes, name: str) -> Document:
    """Parse YAML text to a document. Messages call it `name`.

    Raises Invalid with every problem.
    """
    if len(text) > MAX_BYTES:
        raise Invalid([Problem("too-large", f"{name} is larger than {MAX_BYTES // 1_000_000} MB")])
    if isinstance(text, bytes):
        text = _decode(text, name)
    text = text.removeprefix("\ufeff")
    locate = LineTable(name, text).location
    _refuse_control_characters(text, locate)
    reader = YamlReader(text, locate)
    try:
        value = reader.read()
    except LimitError as limit:
        reader.problems.append(_limit_problem(limit, name, text))
    if reader.problems:
        raise Invalid(reader.problems)
    return Document(name, text, value, reader.places, locate)


def _limit_problem(limit: LimitError, name: str, text: str) -> Problem:
    """Return the problem of an exceeded size limit, without scanning the remaining lines."""
    end_of_line = text.find("\n", limit.index) + 1
    known = text[:end_of_line] if end_of_line else text
    lines = LineTable(name, known)
    where = lines.location(limit.index, limit.index + 1)
    return Problem(limit.code, limit.message, where, limit.fix)


# -- characters --

_ASCII_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r") + b"\x7f"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Invalid([_not_utf8(data, name, error.start)]) from None


def _not_utf8(data: bytes, name: str, index: int) -> Problem:
    """Return the problem for the first invalid UTF-8 byte, at `index`."""
    line = data.count(b"\n", 0, index) + 1
    start = data.rfind(b"\n", 0, index) + 1
    before = data[start:index].decode("utf-8")
    after = data[index : index + 80].split(b"\n")[0].decode("utf-8", "replace")
    where = Location(name, line, len(before) + 1, 1, (before + after).rstrip("\r"))
    message = f"not UTF-8: byte 0x{data[index]:02x} at offset {index} (line {line})"
    fix = "save the file as UTF-8"
    if data[:2] in _UTF16_MARKS:
        fix = "the file is UTF-16: save it as UTF-8"
    return Problem("not-utf8", message, where, fix)


def _refuse_control_characters(text: str, locate: Locate) -> None:
    if text.isascii():
        data = text.encode()
        if len(data.translate(None, _ASCII_CONTROLS)) == len(data):
            return
    found = REFUSED_CHARACTERS.search(text)
    if found is None:
        return
    code = ord(found.group())
    name = f"the control character U+{code:04X}" if code else "a NUL byte"
    # Half of a surrogate pair is no character, and a NUL byte cannot be in a command or a path.
    is_useless = code == 0 or 0xD800 <= code <= 0xDFFF
    fix = "" if is_useless else f'write it in double quotes as "\\u{code:04x}"'
    where = locate(found.start(), found.end())
    raise Invalid(
        [Problem("control-character", f"{name} is not allowed in a recipe file", where, fix)]
    )
