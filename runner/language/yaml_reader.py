"""Read YAML 1.2 (core schema) in one pass over parser events: values, positions, mistakes.

Stricter than YAML: no tags, no merge keys, no duplicate keys, only text keys, one document, finite
numbers. Aliases are expanded up to a limit.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from runner.errors import Location, Problem

from .node_places import NO_NODE, Places
from .scalar_places import inside
from .yaml_mistakes import Mistake, explain, quote, rest_of_value, unquoted_expression
from .yaml_scalars import FIRST_OF_NO_STRING, plain_value

if TYPE_CHECKING:
    from .values import Tree

MAX_SCALAR = 1_000_000  # characters
MAX_NODES = 2_000_000
MAX_WIDTH = 150_000  # entries of one list or mapping
MAX_DEPTH = 64
MAX_EXPANDED = 100_000  # nodes made by aliases
MAX_PROBLEMS = 100

Locate = Callable[[int, int], Location]


class LimitError(Exception):
    """Raised if a YAML text exceeds a limit at `index`."""

    def __init__(self, code: str, message: str, index: int, fix: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.index, self.fix = code, message, index, fix


def _scalar_too_long(index: int) -> LimitError:
    return LimitError(
        "too-large",
        f"a value or comment near here is longer than {MAX_SCALAR:,} characters",
        index,
        "move long text to its own file",
    )


class _Feed:
    """A YAML text that the parser reads in chunks.

    `check` is called with the index of each chunk before it is read, and may raise LimitError.
    """

    def __init__(self, text: str, check: Callable[[int], None]) -> None:
        self._text, self._check = text, check
        self._done = 0

    def read(self, size: int = -1) -> str:
        self._check(self._done)
        piece = self._text[self._done : self._done + size]
        self._done += len(piece)
        return piece


class _Parser(Protocol):
    def get_event(self) -> Any: ...


def _parser(feed: _Feed) -> _Parser:
    import yaml

    if yaml.__with_libyaml__:
        from yaml.cyaml import CSafeLoader

        return CSafeLoader(feed)
    return yaml.SafeLoader(feed)


_NO_KEY = object()  # a key comes next
_REFUSED_KEY = object()  # stands for a key that is no text


@dataclass(slots=True)
class _Level:
    """State of a YAML list or mapping that is being read."""

    node: int
    is_flow: bool
    value: Any  # the list or dict so far
    keys: dict[str, int] | None  # of a mapping: key -> index of its text
    key: object  # of a mapping: the key whose value comes next

    def check_width(self, index: int) -> None:
        if len(self.value) > MAX_WIDTH:
            message = f"more than {MAX_WIDTH:,} entries in one list or mapping"
            raise LimitError("too-large", message, index)


class YamlReader:
    """Reader of one YAML text.  `locate` converts two indices to a location."""

    def __init__(self, text: str, locate: Locate) -> None:
        self.text, self.locate = text, locate
        self.places = Places()
        self.problems: list[Problem] = []
        # The innermost collection; the outermost level holds the document.
        self._level = _Level(NO_NODE, False, [], None, None)
        self._outer: list[_Level] = []  # enclosing collections
        self._anchors: dict[str, tuple[int, object]] = {}
        self._names: dict[str, str] = {}  # mappings share the strings of their keys
        self._expanded = 0  # nodes made by aliases
        self._refused_depth = 0  # inside a key that is refused already: its level
        self._last_count = 0  # nodes at the last check of limits
        self._quiet_since = 0  # index of the last new node in the text

    def read(self) -> Tree:
        """Return the value of the text, which is invalid if there are problems.

        Raises LimitError.
        """
        import yaml

        # Collecting garbage while hundreds of thousands of containers are made, all of them kept,
        # takes most of the time and frees nothing.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._walk()
        except yaml.MarkedYAMLError as error:
            self._refused_depth = 0
            self._report_syntax(explain(self.text, error))
        except yaml.YAMLError as error:
            self._refused_depth = 0
            self._report("syntax", f"this is not YAML: {error}", 0, 1)
        finally:
            if collecting:
                gc.enable()
        if self.problems:
            return None
        return cast("Tree", self._level.value[0])

    def _walk(self) -> None:
        import yaml

        parser = _parser(_Feed(self.text, self._check_limits))
        handlers: dict[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: self._open_mapping,
            yaml.SequenceStartEvent: self._open_list,
            yaml.MappingEndEvent: self._close,
            yaml.SequenceEndEvent: self._close,
            yaml.AliasEvent: self._alias,
        }
        documents = 0
        while len(self.problems) < MAX_PROBLEMS:
            event = parser.get_event()
            kind = type(event)
            handle = handlers.get(kind)
            if handle is not None:
                handle(event)
            elif kind is yaml.DocumentStartEvent:
                documents += 1
                if documents > 1:
                    self._report_second_document(event.start_mark.index)
                    break
            elif kind is yaml.StreamEndEvent:
                break
        if not documents and not self.problems:
            self._report("empty", "the file is empty", 0, 1)

    def _check_limits(self, index: int) -> None:
        """Raise LimitError for too many nodes before `index`, or a long text without a node.

        So a huge value is never held in full.
        """
        count = len(self.places.starts)
        if count > MAX_NODES:
            raise LimitError("too-large", f"more than {MAX_NODES:,} values in one file", index)
        for level in (*self._outer, self._level):
            level.check_width(index)
        if count != self._last_count:
            self._last_count, self._quiet_since = count, index
        elif index - self._quiet_since > 2 * MAX_SCALAR:
            raise _scalar_too_long(self._quiet_since)

    # -- scalars --

    def _scalar(self, event: Any) -> None:
        start, end = event.start_mark.index, event.end_mark.index
        text: str = event.value
        is_plain = not event.style
        if len(text) > MAX_SCALAR:
            raise _scalar_too_long(start)
        if event.anchor or event.tag:
            start = self._start_of_content(event, end)
        value: object = text
        if is_plain:
            if text[:1] in FIRST_OF_NO_STRING:
                value = self._plain_value(text, start, end)
        elif event.style == ">":
            self.places.folded[len(self.places.starts)] = text
        if event.anchor:
            self._anchors[event.anchor] = (len(self.places.starts), value)
        self.places.add(start, end)
        level = self._level
        if level.key is _NO_KEY:
            self._put_key(event, value, start, end)
        elif level.keys is None:
            level.value.append(value)
        else:
            is_empty = is_plain and not text
            if is_empty and _lacks_colon(self.text, event.start_mark.index):
                self._report_key_without_colon(level)
            level.value[level.key] = value
            level.key = _NO_KEY

    def _plain_value(self, text: str, start: int, end: int) -> object:
        try:
            return plain_value(text)
        except ValueError:
            message = "a number must be finite and of reasonable length"
            fix = f"if this is text, quote it: {quote(text)}"
            self._report("number", message, start, end, fix)
            return text

    def _put_key(self, event: Any, value: object, start: int, end: int) -> None:
        """Set the mapping key for the next value."""
        level = self._level
        keys = cast("dict[str, int]", level.keys)
        is_merge = value == "<<" and not event.style
        # One condition, because it is checked for every key of a file.
        if type(value) is str and value not in keys and not event.anchor and not is_merge:
            keys[value] = start
            level.key = self._names.setdefault(value, value)
        else:
            self._report_key(event, value, start, end, keys)
            level.key = value

    def _start_of_content(self, event: Any, end: int) -> int:
        """Return the index of a node after its anchor and tag; report a tag."""
        start: int = event.start_mark.index
        if event.tag:
            self._report_tag(start)
        return start + _length_of_properties(self.text[start:end])

    # -- collections and aliases --

    def _open_mapping(self, event: Any) -> None:
        self._open(event, {}, {})

    def _open_list(self, event: Any) -> None:
        self._open(event, [], None)

    def _open(self, event: Any, value: object, keys: dict[str, int] | None) -> None:
        """Open a list, or a mapping if it has `keys`."""
        start = event.start_mark.index
        if len(self._outer) >= MAX_DEPTH:
            raise LimitError("too-deep", f"nested deeper than {MAX_DEPTH} levels", start)
        node = len(self.places.starts)
        if event.anchor or event.tag:
            start = self._start_of_content(event, start + MAX_SCALAR)
        if event.anchor:
            self._anchors[event.anchor] = (node, value)
        self.places.add(start, start)
        self._outer.append(self._level)
        if self._level.key is _NO_KEY and not self._refused_depth:
            self._report_collection_as_key(start)
            self._refused_depth = len(self._outer)
        key = _NO_KEY if keys is not None else None
        self._level = _Level(node, bool(event.flow_style), value, keys, key)

    def _close(self, event: Any) -> None:
        """Close the innermost list or mapping, and add it to its parent."""
        places, level = self.places, self._level
        # A block ends with its last node: the parser has read on to the next token.
        end = event.end_mark.index if level.is_flow else places.ends[-1]
        places.ends[level.node] = max(end, places.starts[level.node])
        places.after[level.node] = len(places.starts)
        level.check_width(places.starts[-1])
        if self._refused_depth == len(self._outer):
            self._refused_depth = 0
        self._level = self._outer.pop()
        self._put(level.value)

    def _alias(self, event: Any) -> None:
        start, end = event.start_mark.index, event.end_mark.index
        node = len(self.places.starts)
        self.places.add(start, end)
        target, anchored = self._anchors.get(event.anchor, (NO_NODE, None))
        value: object = None
        if target == NO_NODE:
            message = f"`*{event.anchor}` refers to an anchor that nothing defines"
            fix = f"if this is text, quote it: {quote(rest_of_value(self.text, start))}"
            self._report("alias", message, start, end, fix)
        elif any(level.node == target for level in (*self._outer, self._level)):
            self._report("alias", f"`*{event.anchor}` contains itself", start, end)
        elif self._level.key is _NO_KEY:
            self._report("key", "a key must be a plain word, not an alias", start, end)
        else:
            self.places.targets[node] = target
            value = self._copy(anchored, start)
        self._put(value)

    def _copy(self, value: object, index: int) -> object:
        """Return a copy of the value of the alias at `index`.  Raises LimitError."""
        self._expanded += 1
        if self._expanded >= MAX_EXPANDED:
            message = f"aliases expand to more than {MAX_EXPANDED:,} values"
            raise LimitError("too-large", message, index)
        if isinstance(value, dict):
            return {key: self._copy(part, index) for key, part in value.items()}
        if isinstance(value, list):
            return [self._copy(part, index) for part in value]
        return value

    def _put(self, value: object) -> None:
        """Add a list, mapping or alias to the innermost open collection."""
        level = self._level
        if level.keys is None:
            level.value.append(value)
        elif level.key is _NO_KEY:
            level.key = _REFUSED_KEY
        else:
            level.value[level.key] = value
            level.key = _NO_KEY

    # -- problems --

    def _report(self, code: str, message: str, start: int, end: int, fix: str = "") -> None:
        if not self._refused_depth:
            self.problems.append(Problem(code, message, self.locate(start, end), fix))

    def _report_syntax(self, mistake: Mistake) -> None:
        """Report a syntax mistake, once per kind and line."""
        line = self.locate(mistake.start, mistake.end).line
        reported = {(known.code, known.where.line) for known in self.problems if known.where}
        if (mistake.code, line) not in reported:
            self._report(*mistake)

    def _report_second_document(self, start: int) -> None:
        message = "a second document starts here; a file holds one"
        self._report("many-documents", message, start, start + 3, "remove the line `---`")

    def _report_tag(self, start: int) -> None:
        found = re.compile(r"(?:&\S+\s+)?(![^\s,\[\]{}]*)").match(self.text, start)
        first, last = found.span(1) if found else (start, start + 1)
        message = f"`{self.text[first:last]}` is a YAML tag, and tags are not allowed in recipes"
        fix = f"if this is text, quote it: {quote(rest_of_value(self.text, first))}"
        self._report("tag", message, first, last, fix)

    def _report_collection_as_key(self, start: int) -> None:
        for braces in (start - 1, start):
            if self.text.startswith("{{", braces):
                self._report(*unquoted_expression(self.text, braces))
                return
        message = "a key must be a plain word, not a list or a mapping"
        self._report("key", message, start, start + 1)

    def _report_key(
        self, event: Any, value: object, start: int, end: int, keys: dict[str, int]
    ) -> None:
        """Report why a scalar cannot be a key."""
        if not isinstance(value, str):
            message = f"a key must be text; this one is {_describe_key(event.value, value)}"
            fix = f'quote it: "{event.value}"' if event.value else ""
            self._report("key", message, start, max(end, start + 1), fix)
        elif value == "<<" and not event.style:
            message = "merge keys (`<<`) are not allowed in recipes"
            self._report("merge-key", message, start, end, "write out each key")
        elif event.anchor:
            self._report("key", "a key may not have an anchor", event.start_mark.index, end)
        else:
            first = self.locate(keys[value], keys[value] + 1)
            message = f"`{value}` is given twice; the first is on line {first.line}"
            self._report("duplicate-key", message, start, end, "keep one of them")

    def _report_key_without_colon(self, level: _Level) -> None:
        start, end = self.places.starts[-2], self.places.ends[-2]
        if level.key is _REFUSED_KEY or start == end:
            return
        written = self.text[start:end]
        name, colon, rest = written.partition(":")
        fix = "quote a value that contains a comma, and write a colon and a space after a key"
        if colon and written[0] not in "\"'":
            fix = f"put a space after the colon: {name}: {rest}"
        self._report("no-value", f"`{written}` has no value", start, end, fix)


def _describe_key(text: str, value: object) -> str:
    """Return a description of a key that is not text."""
    if not text:
        return "empty"
    if value is None:
        return "null"
    return "true or false" if isinstance(value, bool) else "a number"


def _lacks_colon(text: str, index: int) -> bool:
    """Return whether the empty value at `index` follows no colon, as `y` in `{a: x,y}`."""
    return not text[max(0, index - 200) : index].rstrip().endswith(":")


def _length_of_properties(source: str) -> int:
    """Return the length of a node's anchor and tag in characters."""
    found = re.match(r"(?:[&!][^\s,\[\]{}]*(?:\s+|$)|#[^\r\n]*\s*)*", source)
    return found.end() if found else 0


# -- warnings --

_COMMENT = re.compile(r"[ \t]+(#(?=[^\s#!])[^\r\n]*)")
_DEEPER = re.compile(r"(?m)^[ \t]+(?=\S)")


def find_doubtful_scalars(text: str, places: Places) -> Iterator[Mistake]:
    """Yield valid YAML scalars that probably mean something else."""
    for node, (start, end) in enumerate(zip(places.starts, places.ends, strict=True)):
        if node in places.folded:
            yield from _kept_line_break(text, start, end, places.folded[node])
            continue
        is_scalar = not places.after[node] and start < end
        if is_scalar and text[start] not in "'\"|>*[{":
            yield from _cut_by_comment(text, start, end)


def _kept_line_break(text: str, start: int, end: int, value: str) -> Iterator[Mistake]:
    deeper = _DEEPER.search(value)
    if deeper is None:
        return
    length = len(value[deeper.end() :].split("\n", 1)[0])
    first, last = inside(text[start:end], start, value, deeper.end(), length)
    message = "a deeper-indented line in a folded (`>`) text keeps its line break"
    fix = "indent all lines alike to join them, or write `|` to keep every line break"
    yield Mistake("folded", message, first, last, fix)


def _cut_by_comment(text: str, start: int, end: int) -> Iterator[Mistake]:
    comment = _COMMENT.match(text, end)
    if comment is None:
        return
    line = quote(rest_of_value(text, start, comments=True))
    message = "the text after ` #` is a comment, not part of the value"
    fix = f"to keep it, quote the value: {line}; for a comment, put a space after `#`"
    yield Mistake("comment", message, comment.start(1), comment.end(1), fix)
