"""Read YAML 1.2 (core) into plain values, and say where in the file each of them stands.  Does not know what a recipe is.

Reading is one loop over the parser's events that builds values and nothing else.  Places are found by a second pass, made only when there is
something to point at, which also words what is wrong.  Stricter than YAML where YAML surprises: no tags, no merge keys, no duplicate keys, keys are
strings, one document, finite numbers; aliases are expanded, within a budget.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from runner.errors import Invalid, Location, NotFound, Problem

if TYPE_CHECKING:
    from yaml import Event, MarkedYAMLError

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

    __slots__ = ("_lines", "_places", "name", "text", "value")

    def __init__(self, name: str, text: str, value: Tree) -> None:
        self.name = name
        self.text = text
        self.value = value
        self._lines: _Lines | None = None
        self._places: _Survey | None = None

    def locate(self, path: tuple[str | int, ...], *, key: bool = False, offset: int | None = None, length: int | None = None) -> Location:
        """Where the value at `path` stands, or the deepest part of the path that exists.

        `key` points at its key instead.  `offset` and `length` count characters of the parsed scalar and are mapped back through escapes and folds.
        """
        survey = self._survey()
        value: object = self.value
        name, node = _NOWHERE, 0
        for part in path:
            child = survey.children(survey.target(node), value).get(part)
            if child is None:
                # What lacks a part is pointed at by its own name where it has one: that is what a reader looks for.
                key, offset = True, None
                break
            name, node = child
            value = value[part]  # type: ignore[index]
        if key and name != _NOWHERE:
            return self._at(survey.starts[name], survey.ends[name])
        start, end = survey.starts[node], survey.ends[node]
        if offset is not None and isinstance(value, str):
            node = survey.target(node)
            start, end = _inside(self.text[survey.starts[node] : survey.ends[node]], survey.starts[node], value, offset, length)
        return self._at(start, end)

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
        return Problem(code, message, self.locate(path, key=key, offset=offset, length=length), fix, severity)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is valid YAML and probably not what was meant.  Costs a second pass."""
        return tuple(self._survey().warnings)

    def _survey(self) -> _Survey:
        if self._places is None:
            self._places = _survey(self.text, self._at)
        return self._places

    def _at(self, start: int, end: int) -> Location:
        if self._lines is None:
            self._lines = _Lines(self.name, self.text)
        return self._lines.location(start, end)


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
        raise Invalid([Problem("unreadable", f"{name} cannot be read: {error.strerror or error}")]) from error
    return parse(data, name)


def parse(text: str | bytes, name: str) -> Document:
    """The document in `text`, shown to people as `name`."""
    if len(text) > MAX_BYTES:
        raise Invalid([Problem("too-large", f"{name} is larger than {MAX_BYTES // 1_000_000} MB")])
    if isinstance(text, bytes):
        text = _decode(text, name)
    text = text.removeprefix("\ufeff")
    document = Document(name, text, None)
    _refuse_control_characters(text, document._at)
    from yaml import YAMLError

    try:
        document.value = _load(text)
    except (_Suspect, YAMLError) as trouble:
        problems = _survey(text, document._at).problems
        if not problems:
            raise AssertionError("BUG: a document was refused and nothing is wrong with it") from trouble
        raise Invalid(problems) from None
    except _Limit as limit:
        # Lines are counted as far as that one: those behind it may be millions.
        where = _Lines(name, text[: text.find("\n", limit.index) + 1 or None]).location(limit.index, limit.index + 1)
        raise Invalid([Problem(limit.code, limit.message, where, limit.fix)]) from None
    return document


# --- characters ---

_ASCII_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r") + b"\x7f"
# NEL, LS and PS break lines for YAML 1.1 parsers and not for YAML 1.2 or an editor: no two readers would agree on a line number.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        before = data[start : error.start].decode("utf-8")
        after = data[error.start : error.start + 80].split(b"\n")[0].decode("utf-8", "replace")
        fix = "the file is UTF-16: save it as UTF-8" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "save the file as UTF-8"
        where = Location(name, line, len(before) + 1, 1, (before + after).rstrip("\r"))
        message = f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} (line {line})"
        raise Invalid([Problem("not-utf8", message, where, fix)]) from None


def _refuse_control_characters(text: str, at: _At) -> None:
    if text.isascii():
        data = text.encode()
        if len(data.translate(None, _ASCII_CONTROLS)) == len(data):
            return
    found = _CONTROLS.search(text)
    if found:
        code = ord(found.group())
        what = "a NUL byte" if code == 0 else f"the control character U+{code:04X}"
        fix = "" if code == 0 or 0xD800 <= code <= 0xDFFF else f'in double quotes it can be written as "\\u{code:04x}"'
        raise Invalid([Problem("control-character", f"{what} may not stand in a file", at(found.start(), found.end()), fix)])


class _Lines:
    """Positions in a text as lines and columns."""

    __slots__ = ("name", "starts", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        breaks = re.finditer(r"\r\n?|\n" if "\r" in text else r"\n", text)
        self.starts = [0, *(found.end() for found in breaks)]

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
# The first characters of everything that is not a string; most strings are settled by one look.
_STARTS = frozenset(["", *"~nNtTfF+-.0123456789"])
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INFINITY = float("inf")


def _resolve(text: str) -> Leaf:
    """What a plain scalar means in the YAML 1.2 core schema.  Raises _Suspect for numbers that are not finite or not sensible."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise _Suspect
        base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
        return int(text[2:] if base != 10 else text, base)
    if _FLOAT.fullmatch(text):
        number = float(text) if len(text) <= MAX_DIGITS else _INFINITY
        if number in (_INFINITY, -_INFINITY):
            raise _Suspect
        return number
    if _NOT_FINITE.fullmatch(text):
        raise _Suspect
    return text


# --- the fast pass ---


class _Suspect(Exception):
    """Something is wrong that the second pass words."""


class _Limit(Exception):
    """Too much of something: reported where it was noticed, without a second pass over a hostile file."""

    def __init__(self, code: str, message: str, index: int, fix: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.index, self.fix = code, message, index, fix


class _Feed:
    """A text handed to the parser in pieces, cut short when a long stretch of it brings nothing: a huge value is never held whole."""

    __slots__ = ("_done", "_nodes", "_quiet", "_seen", "_text")

    def __init__(self, text: str, nodes: Callable[[], int]) -> None:
        self._text, self._nodes = text, nodes
        self._done = self._quiet = 0
        self._seen = -1

    def read(self, size: int = -1) -> str:
        nodes = self._nodes()
        if nodes != self._seen:
            self._seen, self._quiet = nodes, self._done
        elif self._done - self._quiet > 2 * MAX_SCALAR:
            raise _too_long(self._quiet)
        piece = self._text[self._done : self._done + size]
        self._done += len(piece)
        return piece


def _too_long(index: int) -> _Limit:
    return _Limit("too-large", f"a value or comment near here is longer than {MAX_SCALAR:,} characters", index, "keep long text in a file of its own")


def _too_many(index: int) -> _Limit:
    return _Limit("too-large", f"more than {MAX_NODES:,} values in one file", index)


def _too_wide(index: int) -> _Limit:
    return _Limit("too-large", f"more than {MAX_WIDTH:,} entries in one list or mapping", index)


def _too_deep(index: int) -> _Limit:
    return _Limit("too-deep", f"nested deeper than {MAX_DEPTH} levels", index)


_OPEN = object()  # an anchor whose value is still being read
_NO_KEY = object()


def _load(text: str) -> Tree:
    import gc

    # Hundreds of thousands of young containers, all of them kept: collecting while they are made is most of the time and frees nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _build(text)
    finally:
        if collecting:
            gc.enable()


def _build(text: str) -> Tree:
    import yaml

    nodes = expanded = 0
    parser = _parser(_Feed(text, lambda: nodes))
    scalar, alias, document_start, stream_end = yaml.ScalarEvent, yaml.AliasEvent, yaml.DocumentStartEvent, yaml.StreamEndEvent
    mapping_start, mapping_end = yaml.MappingStartEvent, yaml.MappingEndEvent
    sequence_start, sequence_end = yaml.SequenceStartEvent, yaml.SequenceEndEvent
    stack: list[tuple[object, object, str | None]] = []
    names: dict[str, str] = {}  # mappings share their keys' strings
    anchors: dict[str, object] = {}
    starts, resolve = _STARTS, _resolve
    documents = 0
    anchor: str | None
    root: list[object] = []
    box: object = root
    key: object = _NO_KEY
    opened: str | None = None
    while True:
        event = parser.get_event()
        kind = type(event)
        if kind is scalar:
            nodes += 1
            value = event.value
            if len(value) > MAX_SCALAR:
                raise _too_long(event.start_mark.index)
            if not event.style and value[:1] in starts:
                value = resolve(value)
                if value is None and type(box) is dict and key is not _NO_KEY and not event.value and _lacks_colon(text, event.start_mark.index):
                    raise _Suspect
            if event.tag is not None:
                raise _Suspect
            if nodes > MAX_NODES:
                raise _too_many(event.start_mark.index)
            if type(box) is list:
                box.append(value)
                if len(box) > MAX_WIDTH:
                    raise _too_wide(event.start_mark.index)
            elif key is not _NO_KEY:
                box[key] = value  # type: ignore[index]
                key = _NO_KEY
                if len(box) > MAX_WIDTH:  # type: ignore[arg-type]
                    raise _too_wide(event.start_mark.index)
            else:
                if type(value) is not str or value in box or event.anchor or (value == "<<" and not event.style):  # type: ignore[operator]
                    raise _Suspect
                key = names.setdefault(value, value)
            if event.anchor:
                anchors[event.anchor] = value
            continue
        if kind is mapping_start or kind is sequence_start:
            nodes += 1
            if nodes > MAX_NODES:
                raise _too_many(event.start_mark.index)
            if len(stack) >= MAX_DEPTH:
                raise _too_deep(event.start_mark.index)
            if event.tag is not None or (type(box) is dict and key is _NO_KEY):
                raise _Suspect
            stack.append((box, key, opened))
            box, key, opened = ({} if kind is mapping_start else []), _NO_KEY, event.anchor
            if opened:
                anchors[opened] = _OPEN
            continue
        if kind is mapping_end or kind is sequence_end:
            value, anchor = box, opened
            box, key, opened = stack.pop()
            if anchor:
                anchors[anchor] = value
        elif kind is alias:
            nodes += 1
            found = anchors.get(event.anchor, _OPEN)
            if found is _OPEN or (type(box) is dict and key is _NO_KEY):
                raise _Suspect
            value, grown = _copy(found, MAX_EXPANDED - expanded)
            expanded += grown
            if expanded >= MAX_EXPANDED:
                raise _Limit("too-large", f"aliases expand to more than {MAX_EXPANDED:,} values", event.start_mark.index)
        elif kind is document_start:
            documents += 1
            if documents > 1:
                raise _Suspect
            continue
        elif kind is stream_end:
            break
        else:
            continue
        if type(box) is list:
            box.append(value)
        else:
            box[key] = value  # type: ignore[index]
            key = _NO_KEY
    if not documents:
        raise _Suspect
    return cast("Tree", root[0])


def _parser(feed: _Feed) -> _Events:
    import yaml

    if yaml.__with_libyaml__:
        from yaml.cyaml import CSafeLoader

        return CSafeLoader(feed)
    return yaml.SafeLoader(feed)


class _Events(Protocol):
    def get_event(self) -> Any: ...


def _copy(value: object, budget: int) -> tuple[object, int]:
    """A copy of `value` with the number of values in it; stops growing when `budget` is used up."""
    if not isinstance(value, dict | list):
        return value, 1
    used = 1
    copied: dict[str, object] | list[object]
    if isinstance(value, dict):
        copied = {}
        for key, part in value.items():
            if used >= budget:
                break
            copied[key], grown = _copy(part, budget - used)
            used += grown
    else:
        copied = []
        for part in value:
            if used >= budget:
                break
            inner, grown = _copy(part, budget - used)
            copied.append(inner)
            used += grown
    return copied, used


def _lacks_colon(text: str, index: int) -> bool:
    """Whether the empty value at `index` of a mapping follows no colon: `{a: x,y}` says `y` and nothing about it."""
    return not text[max(0, index - 200) : index].rstrip().endswith(":")


# --- the second pass ---

_NOWHERE = -1
_SCALAR, _LIST, _MAPPING, _ALIAS = range(4)


class _Survey:
    """Where every node stands, in the order of the text, and what is wrong with them.  Flat arrays: about 13 bytes a node."""

    __slots__ = ("_children", "after", "ends", "kinds", "problems", "starts", "targets", "warnings")

    def __init__(self) -> None:
        self.starts, self.ends, self.after = array("I"), array("I"), array("I")  # `after` is the node that follows this one and all within it
        self.kinds = bytearray()
        self.targets: dict[int, int] = {}
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self._children: dict[int, dict[str | int, tuple[int, int]]] = {}

    def add(self, kind: int, start: int, end: int) -> int:
        self.starts.append(start)
        self.ends.append(end)
        self.kinds.append(kind)
        self.after.append(len(self.kinds))
        return len(self.kinds) - 1

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
            if isinstance(value, dict):
                for part in value:
                    known[part] = (child, child + 1)
                    child = self.after[child + 1]
            elif isinstance(value, list):
                for index in range(len(value)):
                    known[index] = (_NOWHERE, child)
                    child = self.after[child]
        return known


@dataclass(slots=True)
class _Level:
    """A collection that is being read."""

    node: int
    flow: bool
    anchor: str | None
    keys: dict[str, int] | None  # of a mapping: key -> where it stands
    key: Event | None = None  # whose value comes next
    expects_key: bool = False
    silent: bool = False  # within a key that is refused already


class _Surveyor:
    """One walk over the events of a text that notes places, problems and warnings."""

    def __init__(self, text: str, at: _At) -> None:
        self.text, self.at = text, at
        self.survey = _Survey()
        self.levels: list[_Level] = []
        self.anchors: dict[str, int] = {}
        self.documents = 0

    def walk(self) -> _Survey:
        import yaml

        parser = _parser(_Feed(self.text, lambda: len(self.survey.kinds)))
        try:
            while len(self.survey.problems) < MAX_PROBLEMS:
                event = parser.get_event()
                if isinstance(event, yaml.StreamEndEvent):
                    break
                if isinstance(event, yaml.DocumentStartEvent):
                    self.documents += 1
                    if self.documents > 1:
                        start = event.start_mark.index if event.start_mark else 0
                        self._problem("many-documents", "a second document starts here; a file holds one", start, start + 3, "remove the line `---`")
                        break
                elif isinstance(event, yaml.NodeEvent):
                    self._node(event)
                elif isinstance(event, yaml.CollectionEndEvent):
                    self._close(event)
        except yaml.MarkedYAMLError as error:
            problem = _explain(self.text, error, self.at)
            if all((problem.code, problem.where and problem.where.line) != (p.code, p.where and p.where.line) for p in self.survey.problems):
                self.survey.problems.append(problem)
        except yaml.YAMLError as error:
            self._problem("syntax", f"this is not YAML: {error}", 0, 1)
        except _Limit as limit:
            self._problem(limit.code, limit.message, limit.index, limit.index + 1, limit.fix)
        if not self.documents and not self.survey.problems:
            self._problem("empty", "the file is empty", 0, 1)
        return self.survey

    def _node(self, event: Any) -> None:
        import yaml

        level = self.levels[-1] if self.levels else None
        start, end = event.start_mark.index, event.end_mark.index
        is_key = level is not None and level.expects_key
        silent = level is not None and level.silent
        if isinstance(event, yaml.AliasEvent):
            node = self.survey.add(_ALIAS, start, end)
            if not silent:
                self._alias(event, node, is_key)
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor or event.tag:
                start += _skip_properties(self.text[start:end])
            node = self.survey.add(_SCALAR, start, end)
            if len(event.value) > MAX_SCALAR:
                raise _too_long(start)
            if event.anchor:
                self.anchors[event.anchor] = node
            if not silent:
                self._tag(event)
                self._scalar(event, start, end, level, is_key)
        else:
            if len(self.levels) >= MAX_DEPTH:
                raise _too_deep(start)
            if len(self.survey.kinds) > MAX_NODES:
                raise _too_many(start)
            mapping = isinstance(event, yaml.MappingStartEvent)
            if event.anchor or event.tag:
                start += _skip_properties(self.text[start:])
            node = self.survey.add(_MAPPING if mapping else _LIST, start, end)
            if event.anchor:
                self.anchors[event.anchor] = node
            if not silent:
                self._tag(event)
                if is_key:
                    self._collection_as_key(start)
            self.levels.append(_Level(node, bool(event.flow_style), event.anchor, {} if mapping else None, None, mapping, silent or is_key))
            return
        self._placed(level, event if is_key else None)

    def _close(self, event: Any) -> None:
        level = self.levels.pop()
        self.survey.ends[level.node] = max(event.end_mark.index if level.flow else self.survey.ends[-1], self.survey.starts[level.node])
        self.survey.after[level.node] = len(self.survey.kinds)
        self._placed(self.levels[-1] if self.levels else None, None)

    def _placed(self, level: _Level | None, key: Event | None) -> None:
        if level is not None and level.keys is not None:
            level.key = key
            level.expects_key = not level.expects_key

    def _tag(self, event: Any) -> None:
        if event.tag is not None:
            start = event.start_mark.index
            found = re.compile(r"(?:&\S+\s+)?(![^\s,\[\]{}]*)").match(self.text, start)
            first, last = found.span(1) if found else (start, start + 1)
            word = self.text[first:last]
            rest = _rest_of_value(self.text, first)
            self._problem("tag", f"`{word}` is a YAML tag, and tags are not used here", first, last, f"if it is text, quote it: {_quoted(rest)}")

    def _alias(self, event: Any, node: int, is_key: bool) -> None:
        start, end = event.start_mark.index, event.end_mark.index
        if event.anchor not in self.anchors:
            rest = _rest_of_value(self.text, start)
            self._problem(
                "alias", f"`*{event.anchor}` refers to an anchor that nothing defines", start, end, f"if it is text, quote it: {_quoted(rest)}"
            )
        elif any(level.anchor == event.anchor and level.node == self.anchors[event.anchor] for level in self.levels):
            self._problem("alias", f"`*{event.anchor}` contains itself", start, end)
        elif is_key:
            self._problem("key", "a key must be a plain word, not an alias", start, end)
        else:
            self.survey.targets[node] = self.anchors[event.anchor]

    def _collection_as_key(self, start: int) -> None:
        if self.text.startswith("{{", start - 1):
            self.survey.problems.append(_unquoted_expression(self.text, start - 1, self.at))
        elif self.text.startswith("{{", start):
            self.survey.problems.append(_unquoted_expression(self.text, start, self.at))
        else:
            self._problem("key", "a key must be a plain word, not a list or a mapping", start, start + 1)

    def _scalar(self, event: Any, start: int, end: int, level: _Level | None, is_key: bool) -> None:
        plain = not event.style
        value: object = event.value
        if plain:
            try:
                value = _resolve(event.value)
            except _Suspect:
                fix = f"if it is text, quote it: {_quoted(event.value)}"
                self._problem("number", "a number must be finite and of reasonable length", start, end, fix)
        if level is not None and is_key:
            self._key(event, value, start, end, level)
        elif level is not None and level.key is not None and plain and event.value == "" and _lacks_colon(self.text, event.start_mark.index):
            self._lonely_key(level.key)
        if plain and event.value:
            cut = re.compile(r"[ \t]+#(?=[^\s#!])[^\r\n]*").match(self.text, end)
            if cut:
                first = cut.end() - len(cut.group().lstrip())
                line = _rest_of_value(self.text, start, comments=True)
                message = "what follows ` #` is a comment, not part of the value"
                fix = f"to keep it, quote the value: {_quoted(line)}; for a comment, put a space after `#`"
                self._warning("comment", message, first, cut.end(), fix)
        elif event.style == ">" and re.search(r"(?m)^[ \t]+\S", event.value):
            deeper = next(found.end() - 1 for found in re.finditer(r"(?m)^[ \t]+\S", event.value))
            length = len(event.value[deeper:].split("\n", 1)[0])
            first, last = _inside(self.text[start:end], start, event.value, deeper, length)
            message = "a deeper-indented line in a folded (`>`) text keeps its line break"
            fix = "indent all lines alike to join them, or write `|` to keep every line break"
            self._warning("folded", message, first, last, fix)

    def _key(self, event: Any, value: object, start: int, end: int, level: _Level) -> None:
        assert level.keys is not None
        if not isinstance(value, str):
            what = "empty" if not event.value else "null" if value is None else "true or false" if isinstance(value, bool) else "a number"
            fix = f'quote it: "{event.value}"' if event.value else ""
            self._problem("key", f"a key must be text; this one is {what}", start, max(end, start + 1), fix)
        elif value == "<<" and not event.style:
            self._problem("merge-key", "merge keys (`<<`) are not used here", start, end, "write the keys out")
        elif event.anchor:
            self._problem("key", "a key may not have an anchor", event.start_mark.index, end)
        elif value in level.keys:
            first = self.at(level.keys[value], level.keys[value] + 1)
            self._problem("duplicate-key", f"`{value}` is given twice; the first is on line {first.line}", start, end, "keep one of them")
        else:
            level.keys[value] = start

    def _lonely_key(self, key: Any) -> None:
        start, end = key.start_mark.index, key.end_mark.index
        written = self.text[start:end]
        name, colon, rest = written.partition(":")
        if colon and not key.style:
            fix = f"put a space after the colon: {name}: {rest}"
        else:
            fix = "a value with a comma in it is quoted; a key is followed by a colon and a space"
        self._problem("no-value", f"`{written}` has no value", start, end, fix)

    def _problem(self, code: str, message: str, start: int, end: int, fix: str = "") -> None:
        self.survey.problems.append(Problem(code, message, self.at(start, end), fix))

    def _warning(self, code: str, message: str, start: int, end: int, fix: str) -> None:
        if len(self.survey.warnings) < MAX_PROBLEMS:
            self.survey.warnings.append(Problem(code, message, self.at(start, end), fix, "warning"))


def _survey(text: str, at: _At) -> _Survey:
    return _Surveyor(text, at).walk()


def _skip_properties(source: str) -> int:
    """How far a node's content is from its anchor or tag."""
    found = re.match(r"(?:[&!][^\s,\[\]{}]*(?:\s+|$)|#[^\r\n]*\s*)*", source)
    return found.end() if found else 0


def _rest_of_value(text: str, start: int, *, comments: bool = False) -> str:
    """The text of a plain value as its author saw it: up to the end of the line, or of the item when a flow collection goes on."""
    line = re.compile(r"[^\r\n]*" if comments else r"(?:[^\r\n#]|(?<=\S)#)*").match(text, start)
    value = line.group().rstrip() if line else ""
    before = text[text.rfind("\n", 0, start) + 1 : start]
    if not comments and before.count("[") + before.count("{") > before.count("]") + before.count("}"):
        value = re.split(r",\s|[\]}]+\s*$", value)[0].rstrip()
    return value


def _quoted(value: str) -> str:
    if "\\" in value or '"' in value:
        return "'" + value.replace("'", "''") + "'"
    return f'"{value}"'


# --- what a parser's complaint means ---


def _unquoted_expression(text: str, index: int, at: _At) -> Problem:
    """`{{` outside quotes, at `index`: YAML reads braces as a mapping."""
    start = index
    while start and text[start - 1] not in " \t\r\n,[":
        start -= 1
    line_end = next(iter(found.start() for found in re.compile(r"\r|\n|$").finditer(text, index)))
    closed = text.find("}}", index, line_end)
    end = closed + 2 if closed != -1 else line_end
    tail = re.compile(r"[^\s,\[\]{}#]*").match(text, end)
    end = tail.end() if tail else end
    written = text[start:end]
    return Problem(
        "unquoted-expression", "an expression must be in quotes: YAML reads `{` as a mapping", at(start, end), f"quote it: {_quoted(written)}"
    )


def _explain(text: str, error: MarkedYAMLError, at: _At) -> Problem:
    """A parser's complaint as a mistake that people make, or at least as a place and a sentence."""
    problem, context = error.problem or "", error.context or ""
    mark, context_mark = error.problem_mark, error.context_mark
    index = min(mark.index, len(text)) if mark else 0
    begun = min(context_mark.index, len(text)) if context_mark else index
    line_start = text.rfind("\n", 0, index) + 1
    line = text[line_start:].split("\n", 1)[0].rstrip("\r")

    def told(code: str, message: str, start: int, end: int, fix: str = "") -> Problem:
        return Problem(code, message, at(start, end), fix)

    for start in (line_start, text.rfind("\n", 0, begun) + 1):
        braces = _bare_braces(text[start:].split("\n", 1)[0])
        if braces != -1:
            return _unquoted_expression(text, start + braces, at)
    tab = re.match(r" *\t[ \t]*", line)
    if tab and ("tab" in problem or "'\\t'" in problem or line_start + tab.end() >= index):
        first = line.index("\t")
        return told("tab", "a tab is used as indentation", line_start + first, line_start + tab.end(), "indent with spaces")
    if "alias" in context or "anchor" in context:
        what = "a pattern" if "alias" in context else "a value"
        rest = _rest_of_value(text, begun)
        return told(
            "unquoted-text",
            f"{what} that starts with {text[begun : begun + 1]} must be in quotes",
            begun,
            begun + len(rest),
            f"quote it: {_quoted(rest)}",
        )
    char = text[index : index + 1]
    if "cannot start any token" in problem and char:
        rest = _rest_of_value(text, index)
        return told("unquoted-text", f"a value that starts with {char} must be in quotes", index, index + len(rest), f"quote it: {_quoted(rest)}")
    if "mapping values are not allowed" in problem:
        if re.search(r":\s", text[line_start:index]):
            return _unquoted_colon(text, index, line_start, line, at)
        return told("indent", "this line is indented as if it belonged to the value above", index, index + 1)
    if "flow" in context and char in ("[", "{") and index and not text[index - 1].isspace():
        start = index
        while start > line_start and text[start - 1] not in " \t,[{":
            start -= 1
        closing = re.compile(r"[^\s,]*?(?=,|\s|\]\s*(?:#.*)?$|\}\s*(?:#.*)?$)", re.MULTILINE).match(text, start)
        end = closing.end() if closing else index + 1
        message = f"`{char}` inside a value within brackets starts a new {'list' if char == '[' else 'mapping'}"
        return told("unquoted-text", message, start, end, f"quote it: {_quoted(text[start:end])}")
    if "flow" in context:
        opening = text[begun : begun + 1]
        if text[index:].strip() == "" or text.count("\n", begun, index):
            return told("unclosed", f"this `{opening}` is never closed", begun, begun + 1)
        column = begun - line_start + 1
        return told("syntax", f"a comma or the closing bracket is missing before this (the `{opening}` is in column {column})", index, index + 1)
    if "quoted scalar" in context:
        if "escape" in problem:
            fix = "write it in single quotes, or with two backslashes"
            slash = text.rfind("\\", begun, index + 1)
            return told("escape", f"`{text[slash : slash + 2]}` is not an escape", slash, slash + 2, fix)
        return told("unclosed", "this quote is never closed", begun, begun + 1)
    if "block" in context and text[line_start:index].strip() == "":
        fix = "give everything of one level the same indentation"
        return told("indent", "this line does not line up with the lines above it", index, index + len(line.strip()), fix)
    if "block mapping" in context:
        return told("syntax", "nothing may follow the value here", index, line_start + len(line), "quote the whole value")
    if "simple key" in context or "expected ':'" in problem:
        rest = _rest_of_value(text, begun)
        return told("syntax", "this is neither `key: value` nor an item of a list", begun, begun + max(1, len(rest)))
    reason = f"{problem} ({context})" if context else problem
    return told("syntax", f"this is not YAML: {reason}", index, index + 1)


def _bare_braces(line: str) -> int:
    """Where `{{` stands outside quotes and comments, or -1."""
    bare = re.sub(r"(?<![^\s\[{,])(?:\"(?:\\\\.|[^\"\\\\])*\"|'(?:''|[^'])*')|(?<!\S)#.*", lambda found: " " * len(found.group()), line)
    return bare.find("{{")


def _unquoted_colon(text: str, index: int, line_start: int, line: str, at: _At) -> Problem:
    head = re.match(r"\s*(?:- +)*(?:\"[^\"]*\"|'[^']*'|[^\s:]+) *:\s+", line)
    value = line[head.end() :].rstrip() if head and line_start + head.end() <= index else ""
    fix = f"quote the whole value: {_quoted(value)}" if value else "quote the value"
    return Problem("unquoted-colon", "a colon and a space inside a value must be in quotes", at(index, index + 1), fix)


# --- from a place in a value to a place in the file ---

_LONG_ESCAPES = {"x": 2, "u": 4, "U": 8}


def _inside(source: str, base: int, value: str, offset: int, length: int | None) -> tuple[int, int]:
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
        if source[start:stop].strip(" ") and stop - start - len(source[start:stop].lstrip(" ")) < indent:
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
        deep = any(source[texts[at][0] : texts[at][0] + 1] in (" ", "\t") for at in (row, following))
        breaks = [(texts[at][1], texts[at][1] + 1) for at in range(row, following)]
        empty = start == stop
        spans += breaks if not folded or deep or empty or len(breaks) == 1 else breaks[1:]
        row = following
    ends = [(stop, stop + 1) for _, stop, following in texts[max(blank - 1, 0) :] if following > stop]
    if "+" in marks:
        spans += ends if blank else [(stop, stop + 1) for _, stop, following in texts if following > stop]
    elif "-" not in marks and blank:
        spans += ends[:1]
    return spans


def _block_indent(source: str, lines: list[tuple[int, int, int]], marks: str) -> int:
    first = next((source[start:stop] for start, stop, _ in lines if source[start:stop].strip(" ")), "")
    # With an explicit indentation the first line may be deeper than the block: then the shallowest line tells it.
    if any(mark.isdigit() for mark in marks):
        depths = [len(text) - len(text.lstrip(" ")) for start, stop, _ in lines if (text := source[start:stop]).strip(" ")]
        return min(depths, default=0)
    return len(first) - len(first.lstrip(" "))
