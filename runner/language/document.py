"""Read YAML 1.2 (core) into plain values, and say where in the file each of them stands.  Does not know what a recipe is.

Reading is one walk over the parser's events: it makes the values, notes their places and words what is wrong.  Stricter than YAML where YAML
surprises: no tags, no merge keys, no duplicate keys, keys are strings, one document, finite numbers; aliases are expanded, within a budget.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from runner.errors import Invalid, Location, NotFound, Problem

from .scalar_places import inside
from .values import is_finite
from .yaml_mistakes import Mistake, explain, quoted, rest_of_value, unquoted_expression

if TYPE_CHECKING:
    from .values import Leaf, Tree

MAX_BYTES = 24_000_000  # 100,000 steps are 15 MB; in memory a file with one emoji takes four bytes a character
MAX_SCALAR = 1_000_000
MAX_NODES = 2_000_000
MAX_WIDTH = 150_000  # entries of one list or mapping
MAX_DEPTH = 64
MAX_EXPANDED = 100_000  # nodes made by aliases
MAX_DIGITS = 400
MAX_PROBLEMS = 100


class Document:
    """A file as values, with the places they came from.  `value` is plain: dict, list, str, int, float, bool, None."""

    __slots__ = ("_at", "_places", "name", "text", "value")

    def __init__(self, name: str, text: str, value: Tree, places: _Places, at: _At) -> None:
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
        """Where the value at `path` stands, or the deepest part of the path that exists.

        `key` points at its key instead.  `offset` and `length` count characters of the parsed scalar and are mapped back through escapes and folds.
        """
        places = self._places
        name, node, value, whole = self._walk(path)
        if not whole:
            # What lacks a part is pointed at by its own name where it has one: that is what a reader looks for.
            key, offset = True, None
        if key and name != _NOWHERE:
            return self._at(places.starts[name], places.ends[name])
        start, end = places.starts[node], places.ends[node]
        if offset is not None and isinstance(value, str):
            node = places.target(node)
            start, end = inside(
                self.text[places.starts[node] : places.ends[node]],
                places.starts[node],
                value,
                offset,
                length,
            )
        return self._at(start, end)

    def written(self, path: tuple[str | int, ...]) -> str:
        """The scalar at `path` as it stands in the file, quotes included; empty where there is none."""
        _, node, value, whole = self._walk(path)
        if not whole or isinstance(value, (dict, list)):
            return ""
        node = self._places.target(node)
        return self.text[self._places.starts[node] : self._places.ends[node]].rstrip()

    def _walk(self, path: tuple[str | int, ...]) -> tuple[int, int, object, bool]:
        """The nodes of the key and of the value at `path`, that value, and whether the whole path exists: else, of the deepest part that does."""
        places = self._places
        value: object = self.value
        name, node = _NOWHERE, 0
        for part in path:
            child = places.children(places.target(node), value).get(part)
            if child is None:
                return name, node, value, False
            name, node = child
            value = value[part]  # type: ignore[index]
        return name, node, value, True

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
        """A Problem at `path`, see `locate`."""
        return Problem(
            code, message, self.locate(path, key=key, offset=offset, length=length), fix, severity
        )

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is valid YAML and probably not what was meant."""
        found = islice(_warnings(self.text, self._places), MAX_PROBLEMS)
        return tuple(
            Problem(code, message, self._at(start, end), fix, "warning")
            for code, message, start, end, fix in found
        )


def read(path: Path) -> Document:
    """The document in the file at `path`.  Raises NotFound, or Invalid with every problem that can be found."""
    name = str(path)
    try:
        if not path.is_file():
            if path.exists():
                raise Invalid([Problem("unreadable", f"{name} is not a file")])
            raise NotFound(f"there is no file {name}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Invalid(
            [Problem("unreadable", f"{name} cannot be read: {error.strerror or error}")]
        ) from error
    return parse(data, name)


def parse(text: str | bytes, name: str) -> Document:
    """The document in `text`, shown to people as `name`.  Raises Invalid with every problem that can be found."""
    if len(text) > MAX_BYTES:
        raise Invalid([Problem("too-large", f"{name} is larger than {MAX_BYTES // 1_000_000} MB")])
    if isinstance(text, bytes):
        text = _decode(text, name)
    text = text.removeprefix("\ufeff")
    at = _Lines(name, text).location
    _refuse_control_characters(text, at)
    reader = _Reader(text, at)
    try:
        value = reader.read()
    except _Limit as limit:
        # Lines are counted as far as that one: those behind it may be millions.
        where = _Lines(name, text[: text.find("\n", limit.index) + 1 or None]).location(
            limit.index, limit.index + 1
        )
        reader.problems.append(Problem(limit.code, limit.message, where, limit.fix))
    if reader.problems:
        raise Invalid(reader.problems)
    return Document(name, text, value, reader.places, at)


# --- characters ---

_ASCII_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r") + b"\x7f"
# NEL, LS and PS break lines for YAML 1.1 parsers and not for YAML 1.2 or an editor: no two readers would agree on a line number.
REFUSED_CHARACTERS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]"
)


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        before = data[start : error.start].decode("utf-8")
        after = data[error.start : error.start + 80].split(b"\n")[0].decode("utf-8", "replace")
        fix = (
            "the file is UTF-16: save it as UTF-8"
            if data[:2] in (b"\xff\xfe", b"\xfe\xff")
            else "save the file as UTF-8"
        )
        where = Location(name, line, len(before) + 1, 1, (before + after).rstrip("\r"))
        message = f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} (line {line})"
        raise Invalid([Problem("not-utf8", message, where, fix)]) from None


def _refuse_control_characters(text: str, at: _At) -> None:
    if text.isascii():
        data = text.encode()
        if len(data.translate(None, _ASCII_CONTROLS)) == len(data):
            return
    found = REFUSED_CHARACTERS.search(text)
    if found:
        code = ord(found.group())
        what = "a NUL byte" if code == 0 else f"the control character U+{code:04X}"
        fix = (
            ""
            if code == 0 or 0xD800 <= code <= 0xDFFF
            else f'in double quotes it can be written as "\\u{code:04x}"'
        )
        raise Invalid(
            [
                Problem(
                    "control-character",
                    f"{what} may not stand in a file",
                    at(found.start(), found.end()),
                    fix,
                )
            ]
        )


class _Lines:
    """Positions in a text as lines and columns."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    @cached_property
    def starts(self) -> list[int]:
        return [
            0,
            *(
                found.end()
                for found in re.finditer(r"\r\n?|\n" if "\r" in self.text else r"\n", self.text)
            ),
        ]

    def location(self, start: int, end: int) -> Location:
        start = min(start, len(self.text))
        row = bisect_right(self.starts, start) - 1
        if start == len(self.text) and start == self.starts[row] and row:
            # The end of the file is shown at the end of its last line: the empty line after it is not in any editor's mind.
            row -= 1
            start = self._stop(row)
        first, stop = self.starts[row], self._stop(row)
        text = self.text[first:stop] if stop - first <= MAX_SCALAR else ""
        return Location(self.name, row + 1, start - first + 1, max(1, min(end, stop) - start), text)

    def _stop(self, row: int) -> int:
        """Where the text of a line ends, before its break."""
        if row + 1 == len(self.starts):
            return len(self.text)
        stop = self.starts[row + 1] - 1
        return stop - 1 if self.text[stop - 1 : stop + 1] == "\r\n" else stop


_At = Callable[[int, int], Location]


# --- scalars ---

_WORDS: dict[str, Leaf] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# The first characters of everything that is not a string, and the first and last of a number; most strings are settled by one look.
_STARTS = frozenset(["", *"~nNtTfF+-.0123456789"])
_NUMBER_STARTS, _NUMBER_ENDS = frozenset("+-.0123456789"), frozenset(".0123456789abcdefABCDEFnN")
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INFINITY = float("inf")


def plain_value(text: str) -> Leaf:
    """What a plain scalar means in the YAML 1.2 core schema.  Raises ValueError for numbers that are not finite or not sensible."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_STARTS or text[-1] not in _NUMBER_ENDS:
        return text
    if _INTEGER.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(text)
        base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
        whole = int(text[2:] if base != 10 else text, base)
        if not is_finite(whole):
            raise ValueError(text)
        return whole
    if _FLOAT.fullmatch(text):
        number = float(text) if len(text) <= MAX_DIGITS else _INFINITY
        if number in (_INFINITY, -_INFINITY):
            raise ValueError(text)
        return number
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(text)
    return text


# --- limits ---


class _Limit(Exception):
    """Too much of something: reading ends where it was noticed."""

    def __init__(self, code: str, message: str, index: int, fix: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.index, self.fix = code, message, index, fix


class _Feed:
    """A text handed to the parser in pieces.  Before each, `look` is called with where it begins: it raises _Limit for a file with too much in it."""

    def __init__(self, text: str, look: Callable[[int], None]) -> None:
        self._text, self._look = text, look
        self._done = 0

    def read(self, size: int = -1) -> str:
        self._look(self._done)
        piece = self._text[self._done : self._done + size]
        self._done += len(piece)
        return piece


def _too_long(index: int) -> _Limit:
    return _Limit(
        "too-large",
        f"a value or comment near here is longer than {MAX_SCALAR:,} characters",
        index,
        "keep long text in a file of its own",
    )


# --- places ---

_NOWHERE = -1


class _Places:
    """Where every node stands, in the order of the text.  Flat arrays: 12 bytes a node."""

    __slots__ = ("_children", "after", "ends", "folded", "starts", "targets")

    def __init__(self) -> None:
        self.starts, self.ends = array("I"), array("I")
        self.after = array(
            "I"
        )  # of a collection, the node that follows it and all within it; 0 of what has no parts
        self.targets: dict[int, int] = {}  # alias -> what it stands for
        self.folded: dict[int, str] = {}  # texts written with `>`
        self._children: dict[int, dict[str | int, tuple[int, int]]] = {}

    def add(self, start: int, end: int) -> None:
        """A new node, which ends at `end` as far as is known."""
        self.starts.append(start)
        self.ends.append(end)
        self.after.append(0)

    def target(self, node: int) -> int:
        """The node itself, or the one that it is an alias of."""
        while node in self.targets:
            node = self.targets[node]
        return node

    def children(self, node: int, value: object) -> dict[str | int, tuple[int, int]]:
        """Key or index -> (node of the key, node of the value).  A dict keeps the order of the text, so no key is read twice."""
        known = self._children.get(node)
        if known is None:
            known = self._children[node] = {}
            child = node + 1
            keyed = isinstance(value, dict)
            for part in (
                value
                if isinstance(value, dict)
                else range(len(value))
                if isinstance(value, list)
                else ()
            ):
                known[part] = (child, child + 1) if keyed else (_NOWHERE, child)
                child += keyed
                child = self.after[child] or child + 1
        return known


# --- the walk ---

_NO_KEY = object()  # a key comes next
_REFUSED = object()  # a key that is no text


@dataclass(slots=True)
class _Level:
    """A collection that is being read."""

    node: int
    flow: bool
    box: Any  # the list or dict that it becomes
    keys: dict[str, int] | None  # of a mapping: key -> where it stands
    key: object  # of a mapping: whose value comes next

    def check(self, index: int) -> None:
        if len(self.box) > MAX_WIDTH:
            raise _Limit(
                "too-large", f"more than {MAX_WIDTH:,} entries in one list or mapping", index
            )


class _Reader:
    """One walk over the events of a text."""

    def __init__(self, text: str, at: _At) -> None:
        self.text, self.at = text, at
        self.places = _Places()
        self.problems: list[Problem] = []
        self._level = _Level(
            _NOWHERE, False, [], None, None
        )  # what is being read; the outermost holds the document
        self._outer: list[_Level] = []  # what that is in
        self._anchors: dict[str, tuple[int, object]] = {}
        self._names: dict[str, str] = {}  # mappings share their keys' strings
        self._expanded = 0
        self._silent = 0  # within a key that is refused already, its level
        self._seen = self._quiet = 0  # how many nodes there were, and since which place of the text

    def read(self) -> Tree:
        """The value of the text, worth something if there are no problems.  Raises _Limit."""
        import gc

        import yaml

        # Hundreds of thousands of young containers, all of them kept: collecting while they are made is most of the time and frees nothing.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._walk()
        except yaml.MarkedYAMLError as error:
            self._silent = 0
            mistake = explain(self.text, error)
            line = self.at(mistake.start, mistake.end).line
            if all(
                (mistake.code, line) != (known.code, known.where and known.where.line)
                for known in self.problems
            ):
                self._problem(*mistake)
        except yaml.YAMLError as error:
            self._silent = 0
            self._problem("syntax", f"this is not YAML: {error}", 0, 1)
        finally:
            if collecting:
                gc.enable()
        return cast("Tree", self._level.box[0] if not self.problems else None)

    def _walk(self) -> None:
        import yaml

        parser = _parser(_Feed(self.text, self._look))
        kinds: dict[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: lambda event: self._open(event, {}, {}),
            yaml.SequenceStartEvent: lambda event: self._open(event, [], None),
            yaml.MappingEndEvent: self._close,
            yaml.SequenceEndEvent: self._close,
            yaml.AliasEvent: self._alias,
        }
        documents = 0
        while len(self.problems) < MAX_PROBLEMS:
            event = parser.get_event()
            kind = type(event)
            if (handle := kinds.get(kind)) is not None:
                handle(event)
            elif kind is yaml.DocumentStartEvent:
                documents += 1
                if documents > 1:
                    start = event.start_mark.index
                    self._problem(
                        "many-documents",
                        "a second document starts here; a file holds one",
                        start,
                        start + 3,
                        "remove the line `---`",
                    )
                    break
            elif kind is yaml.StreamEndEvent:
                break
        if not documents and not self.problems:
            self._problem("empty", "the file is empty", 0, 1)

    def _look(self, index: int) -> None:
        """Refuse a text that has too much before `index`, or nothing in a long stretch of it: a huge value is never held whole."""
        nodes = len(self.places.starts)
        if nodes > MAX_NODES:
            raise _Limit("too-large", f"more than {MAX_NODES:,} values in one file", index)
        for level in (*self._outer, self._level):
            level.check(index)
        if nodes != self._seen:
            self._seen, self._quiet = nodes, index
        elif index - self._quiet > 2 * MAX_SCALAR:
            raise _too_long(self._quiet)

    def _scalar(self, event: Any) -> None:
        start, end, text, plain = (
            event.start_mark.index,
            event.end_mark.index,
            event.value,
            not event.style,
        )
        places = self.places
        if len(text) > MAX_SCALAR:
            raise _too_long(start)
        if event.anchor or event.tag:
            start = self._adorned(event, end)
        value: object = text
        if plain:
            if text[:1] in _STARTS:
                try:
                    value = plain_value(text)
                except ValueError:
                    self._problem(
                        "number",
                        "a number must be finite and of reasonable length",
                        start,
                        end,
                        f"if it is text, quote it: {quoted(text)}",
                    )
        elif event.style == ">":
            places.folded[len(places.starts)] = text
        if event.anchor:
            self._anchors[event.anchor] = (len(places.starts), value)
        places.starts.append(start)
        places.ends.append(end)
        places.after.append(0)
        level = self._level
        if level.key is _NO_KEY:
            keys = cast("dict[str, int]", level.keys)
            if (
                type(value) is str
                and value not in keys
                and not event.anchor
                and (value != "<<" or not plain)
            ):
                keys[value] = start
                level.key = self._names.setdefault(value, value)
            else:
                self._refused_key(event, value, start, end, keys)
                level.key = value
        elif level.keys is None:
            level.box.append(value)
        else:
            if plain and not text and _lacks_colon(self.text, event.start_mark.index):
                self._lonely_key(level)
            level.box[level.key] = value
            level.key = _NO_KEY

    def _adorned(self, event: Any, end: int) -> int:
        """Where the content of a node begins that has an anchor or a tag."""
        start: int = event.start_mark.index
        if event.tag:
            self._tag(start)
        return start + _skip_properties(self.text[start:end])

    def _open(self, event: Any, box: object, keys: dict[str, int] | None) -> None:
        start = event.start_mark.index
        if len(self._outer) >= MAX_DEPTH:
            raise _Limit("too-deep", f"nested deeper than {MAX_DEPTH} levels", start)
        node = len(self.places.starts)
        if event.anchor or event.tag:
            start = self._adorned(event, start + MAX_SCALAR)
        if event.anchor:
            self._anchors[event.anchor] = (node, box)
        self.places.add(start, start)
        self._outer.append(self._level)
        if self._level.key is _NO_KEY and not self._silent:
            self._collection_as_key(start)
            self._silent = len(self._outer)
        self._level = _Level(
            node, bool(event.flow_style), box, keys, _NO_KEY if keys is not None else None
        )

    def _close(self, event: Any) -> None:
        places, level = self.places, self._level
        # A block ends with the last thing in it: the parser has read on to the next token.
        places.ends[level.node] = max(
            event.end_mark.index if level.flow else places.ends[-1], places.starts[level.node]
        )
        places.after[level.node] = len(places.starts)
        level.check(places.starts[-1])
        if self._silent == len(self._outer):
            self._silent = 0
        self._level = self._outer.pop()
        self._put(level.box)

    def _alias(self, event: Any) -> None:
        start, end = event.start_mark.index, event.end_mark.index
        node = len(self.places.starts)
        self.places.add(start, end)
        target, named = self._anchors.get(event.anchor, (_NOWHERE, None))
        value: object = None
        if target == _NOWHERE:
            fix = f"if it is text, quote it: {quoted(rest_of_value(self.text, start))}"
            self._problem(
                "alias",
                f"`*{event.anchor}` refers to an anchor that nothing defines",
                start,
                end,
                fix,
            )
        elif any(level.node == target for level in (*self._outer, self._level)):
            self._problem("alias", f"`*{event.anchor}` contains itself", start, end)
        elif self._level.key is _NO_KEY:
            self._problem("key", "a key must be a plain word, not an alias", start, end)
        else:
            self.places.targets[node] = target
            value = self._copy(named, start)
        self._put(value)

    def _copy(self, value: object, index: int) -> object:
        """What an alias at `index` stands for, as values of its own."""
        self._expanded += 1
        if self._expanded >= MAX_EXPANDED:
            raise _Limit("too-large", f"aliases expand to more than {MAX_EXPANDED:,} values", index)
        if isinstance(value, dict):
            return {key: self._copy(part, index) for key, part in value.items()}
        if isinstance(value, list):
            return [self._copy(part, index) for part in value]
        return value

    def _put(self, value: object) -> None:
        level = self._level
        if level.keys is None:
            level.box.append(value)
        elif level.key is _NO_KEY:
            level.key = _REFUSED
        else:
            level.box[level.key] = value
            level.key = _NO_KEY

    # -- what is wrong --

    def _problem(self, code: str, message: str, start: int, end: int, fix: str = "") -> None:
        if not self._silent:
            self.problems.append(Problem(code, message, self.at(start, end), fix))

    def _tag(self, start: int) -> None:
        found = re.compile(r"(?:&\S+\s+)?(![^\s,\[\]{}]*)").match(self.text, start)
        first, last = found.span(1) if found else (start, start + 1)
        fix = f"if it is text, quote it: {quoted(rest_of_value(self.text, first))}"
        self._problem(
            "tag",
            f"`{self.text[first:last]}` is a YAML tag, and tags are not used here",
            first,
            last,
            fix,
        )

    def _collection_as_key(self, start: int) -> None:
        for braces in (start - 1, start):
            if self.text.startswith("{{", braces):
                self._problem(*unquoted_expression(self.text, braces))
                return
        self._problem(
            "key", "a key must be a plain word, not a list or a mapping", start, start + 1
        )

    def _refused_key(
        self, event: Any, value: object, start: int, end: int, keys: dict[str, int]
    ) -> None:
        if not isinstance(value, str):
            what = (
                "empty"
                if not event.value
                else "null"
                if value is None
                else "true or false"
                if isinstance(value, bool)
                else "a number"
            )
            fix = f'quote it: "{event.value}"' if event.value else ""
            self._problem(
                "key", f"a key must be text; this one is {what}", start, max(end, start + 1), fix
            )
        elif value == "<<" and not event.style:
            self._problem(
                "merge-key", "merge keys (`<<`) are not used here", start, end, "write the keys out"
            )
        elif event.anchor:
            self._problem("key", "a key may not have an anchor", event.start_mark.index, end)
        else:
            first = self.at(keys[value], keys[value] + 1)
            self._problem(
                "duplicate-key",
                f"`{value}` is given twice; the first is on line {first.line}",
                start,
                end,
                "keep one of them",
            )

    def _lonely_key(self, level: _Level) -> None:
        start, end = self.places.starts[-2], self.places.ends[-2]
        if level.key is _REFUSED or start == end:
            return
        written = self.text[start:end]
        name, colon, rest = written.partition(":")
        fix = "a value with a comma in it is quoted; a key is followed by a colon and a space"
        if colon and written[0] not in "\"'":
            fix = f"put a space after the colon: {name}: {rest}"
        self._problem("no-value", f"`{written}` has no value", start, end, fix)


def _parser(feed: _Feed) -> _Events:
    import yaml

    if yaml.__with_libyaml__:
        from yaml.cyaml import CSafeLoader

        return CSafeLoader(feed)
    return yaml.SafeLoader(feed)


class _Events(Protocol):
    def get_event(self) -> Any: ...


def _lacks_colon(text: str, index: int) -> bool:
    """Whether the empty value at `index` of a mapping follows no colon: `{a: x,y}` says `y` and nothing about it."""
    return not text[max(0, index - 200) : index].rstrip().endswith(":")


_COMMENT = re.compile(r"[ \t]+(#(?=[^\s#!])[^\r\n]*)")
_DEEPER = re.compile(r"(?m)^[ \t]+(?=\S)")


def _warnings(text: str, places: _Places) -> Iterator[Mistake]:
    """What was probably meant otherwise."""
    for node, (start, end) in enumerate(zip(places.starts, places.ends, strict=True)):
        if node in places.folded:
            value = places.folded[node]
            if deeper := _DEEPER.search(value):
                length = len(value[deeper.end() :].split("\n", 1)[0])
                first, last = inside(text[start:end], start, value, deeper.end(), length)
                message = "a deeper-indented line in a folded (`>`) text keeps its line break"
                yield Mistake(
                    "folded",
                    message,
                    first,
                    last,
                    "indent all lines alike to join them, or write `|` to keep every line break",
                )
        elif (
            start < end
            and not places.after[node]
            and text[start] not in "'\"|>*[{"
            and (cut := _COMMENT.match(text, end))
        ):
            line = rest_of_value(text, start, comments=True)
            fix = (
                f"to keep it, quote the value: {quoted(line)}; for a comment, put a space after `#`"
            )
            yield Mistake(
                "comment",
                "what follows ` #` is a comment, not part of the value",
                cut.start(1),
                cut.end(1),
                fix,
            )


def _skip_properties(source: str) -> int:
    """How far a node's content is from its anchor or tag."""
    found = re.match(r"(?:[&!][^\s,\[\]{}]*(?:\s+|$)|#[^\r\n]*\s*)*", source)
    return found.end() if found else 0
