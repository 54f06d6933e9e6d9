"""Find `{{ expression }}` in leaves and say what it reads and what it is worth.  Knows values and names, not what a step, an input or a file is.

The syntax is jinja2's: its lexer and parser read an expression.  The meaning is the closed set of operations in this module: nothing is compiled to
Python, a dot and a subscript read mappings and lists only, there are no calls and no Python attributes, so there is nothing to escape from; every
operation that makes something longer is bounded.  `{% %}` and `{# #}` are plain text, and a rendered value is never looked at again.

A scope may hold `Unknown` values: then an expression is worth what can be said of it, and fails only if it would whatever they are.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from runner.errors import RecipeError, did_you_mean

from .unknowns import (
    A_BOOLEAN,
    A_TEXT,
    FRACTION,
    INTEGER,
    LIST,
    MAPPING,
    NULL,
    NUMBERS,
    TEXT,
    Unknown,
    holds_unknown,
    item_of,
    kinds_of,
    one_of,
    truth_of,
)

if TYPE_CHECKING:
    from jinja2 import Environment, nodes

    from .values import Tree

Scope: TypeAlias = Mapping[str, object]
Reads: TypeAlias = dict[str, object]

FILTERS = ("stem", "name", "suffix", "parent", "join", "tojson", "default")
TESTS = ("defined", "none")
ABSENT = {"absent": True}
"""What `reads` holds for a name that was asked for, guarded, and not there.  No value looks like it: mappings are recorded name by name."""

LONGEST_TEXT = 1_000_000
_LONGEST_EXPRESSION = 4_000
_WIDEST_INTEGER = 128  # bits


class TemplateError(RecipeError):
    """A template cannot be read or has no value.  `offset` and `length` are characters inside the leaf."""

    exit_code = 3

    def __init__(self, message: str, offset: int = 0, length: int = 1, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.offset = offset
        self.length = length


@dataclass(frozen=True, slots=True)
class Reference:
    """A dotted name that an expression reads.  `names` places each part of the path, so that the wrong one can be underlined."""

    path: tuple[str, ...]
    offset: int
    length: int
    names: tuple[tuple[int, int], ...]  # (offset, length) of each part


@dataclass(frozen=True, slots=True)
class Expression:
    """One `{{ … }}` of a leaf, braces included in its span."""

    offset: int
    length: int
    references: tuple[Reference, ...]
    _run: _Run

    def value(self, scope: Scope, reads: Reads | None = None) -> object:
        """What it is worth, typed."""
        try:
            return self._run(_World(scope, reads))
        except RecursionError:
            raise TemplateError(
                "this expression is nested too deeply", self.offset, self.length
            ) from None

    def text(self, value: object) -> str:
        """Its value as it stands inside longer text."""
        try:
            return text_of(value)
        except _NoText as error:
            raise TemplateError(str(error), self.offset, self.length, error.fix) from None


class StatePath(str):
    """A path of which parts can be asked too: `{{ state.checkpoints }}` is text, `{{ state.checkpoints.latest }}` a part of it."""

    parts: Mapping[str, object]

    def __new__(cls, path: str, parts: Mapping[str, object]) -> StatePath:
        made = super().__new__(cls, path)
        made.parts = parts
        return made


def has(text: str) -> bool:
    """Whether `text` holds a template at all."""
    return "{{" in text


@lru_cache(maxsize=1 << 16)
def expressions(text: str) -> tuple[Expression, ...]:
    """The expressions of a leaf, in order.  The first thing wrong with any of them is raised."""
    return tuple(_parse(text, start, end) for start, end in _spans(text))


@lru_cache(maxsize=1 << 16)
def references(text: str) -> tuple[Reference, ...]:
    """Every name that `text` may read.  A subscript known only later gives the part in front of it."""
    return tuple(
        reference for expression in expressions(text) for reference in expression.references
    )


def evaluate(text: str, scope: Scope, reads: Reads | None = None) -> object:
    """The value of a leaf: typed where the leaf is one expression, else text.  `reads` gains every name that was read, with its value."""
    if not has(text):
        return text
    found = expressions(text)
    if len(found) == 1 and found[0].length == len(text):
        return found[0].value(scope, reads)
    parts: list[str] = []
    size = end = 0
    unknown = False
    for expression in found:
        value = expression.value(scope, reads)
        unknown |= isinstance(value, Unknown)
        for part in (text[end : expression.offset], expression.text(value)):
            parts.append(part)
            size += len(part)
        if size > LONGEST_TEXT:
            raise _too_long(expression.offset, expression.length)
        end = expression.offset + expression.length
    parts.append(text[end:])
    return A_TEXT if unknown else "".join(parts)


UNKNOWN_TEXT = "…"
"""What stands for the text of an unknown value, where nothing depends on it."""


def text_of(value: object) -> str:
    """The one text of a typed value.  Numbers are Python's shortest round-trip decimals: `4`, `2.0`, `0.0001`, `1e-05`."""
    if isinstance(value, str):
        return value
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _NoText(f"{value} is not a number that can be written")
        return float.__repr__(value)
    if isinstance(value, Unknown):
        return _text_of_unknown(value)
    if value is None:
        raise _NoText(
            "null cannot stand inside text", fix="let it be the whole value, or say `| default(…)`"
        )
    if isinstance(value, Mapping):
        raise _NoText(
            "a mapping cannot stand inside text", fix="read one name of it, or say `| tojson`"
        )
    if isinstance(value, (list, tuple)):
        raise _NoText(
            "a list cannot stand inside text", fix="let it be the whole value, or say `| join(' ')`"
        )
    raise TypeError(f"BUG: {type(value).__name__} is not a value of the recipe language")


def _text_of_unknown(value: Unknown) -> str:
    if not value.textless:
        return UNKNOWN_TEXT
    examples: dict[str, object] = {LIST: [], MAPPING: {}, NULL: None}
    return text_of(next(example for kind, example in examples.items() if kind in value.kinds))


def render(tree: Tree, scope: Scope, reads: Reads | None = None) -> Tree:
    """`tree` with its leaves rendered, types kept."""
    if isinstance(tree, str):
        return evaluate(tree, scope, reads)  # type: ignore[return-value]  # the scope holds trees
    if isinstance(tree, Mapping):
        return {key: render(item, scope, reads) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [render(item, scope, reads) for item in tree]
    return tree


def argv(items: Sequence[Tree], scope: Scope, reads: Reads | None = None) -> list[str]:
    """A command's arguments: a value is one, null is none, a list is several, and a nested list goes whole if a leaf of it is null."""
    out: list[str] = []
    for item in items:
        words = _words(item, scope, reads)
        out.extend(words if words is not None else ())
    return out


def args(mapping: Mapping[str, Tree], scope: Scope, reads: Reads | None = None) -> list[str]:
    """`{k: v}` as `--k v`; true is `--k`; false, null and an empty list are nothing; a list is `--k a b`."""
    out: list[str] = []
    for key, item in mapping.items():
        value: object = render(item, scope, reads)
        if isinstance(value, Unknown):
            value = _fitting(value)
        if value is True:
            out.append(f"--{key}")
        elif isinstance(value, (list, tuple)):
            if value and None not in value:
                out += [f"--{key}", *(_argument(each, item) for each in value)]
        elif value is not None and value is not False:
            out += [f"--{key}", _argument(value, item)]
    return out


class _NoText(TemplateError):
    pass


class _Missing(TemplateError):
    """A name that is not there; `path` is what `reads` should say is absent, None where that is said already."""

    def __init__(
        self, message: str, offset: int, length: int, fix: str, path: tuple[str, ...] | None
    ) -> None:
        super().__init__(message, offset, length, fix)
        self.path = path


def _words(item: Tree, scope: Scope, reads: Reads | None) -> list[str] | None:
    """The arguments that one item of an argv becomes; None for null."""
    if isinstance(item, (list, tuple)):
        parts = [(each, _words(each, scope, reads)) for each in item]
        # A list inside a list decides for itself; a leaf of this one that is null takes the whole of it away.
        if any(words is None and not isinstance(each, (list, tuple)) for each, words in parts):
            return None
        return [word for _, words in parts for word in words or ()]
    value = evaluate(item, scope, reads) if isinstance(item, str) else item
    if isinstance(value, Unknown):
        value = _fitting(value)
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_argument(each, item) for each in value]
    return [_argument(value, item)]


def _fitting(value: Unknown) -> object:
    """A value of these types that a command can take, if there is one."""
    if not value.textless:
        return UNKNOWN_TEXT
    if LIST in value.kinds:
        return [UNKNOWN_TEXT]
    return None if NULL in value.kinds else {}


def _argument(value: object, leaf: Tree) -> str:
    length = len(leaf) if isinstance(leaf, str) else 1
    try:
        text = text_of(value)
    except _NoText as error:
        raise TemplateError(str(error), 0, length, error.fix) from None
    if "\0" in text:
        raise TemplateError("a NUL character cannot be in an argument", 0, length)
    return text


def _too_long(offset: int, length: int) -> TemplateError:
    return TemplateError(
        f"this text is longer than {LONGEST_TEXT:,} characters",
        offset,
        length,
        "hand it over in a file: `files: {list.json: …}`",
    )


# ---- finding expressions ----

_MARK = re.compile(r"""[{}]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"]""", re.DOTALL)
_BRACKET = re.compile(r"""[()[\]{}]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_CLOSING = {")": "(", "]": "[", "}": "{"}
_PLAIN = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*")
_WORDS = frozenset({"true", "false", "none", "and", "or", "not", "in", "is", "if", "else"})


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where each `{{ … }}` begins and ends: braces and quotes inside an expression are its own."""
    position = 0
    while (start := text.find("{{", position)) >= 0:
        position, depth = start + 2, 0
        while True:
            mark = _MARK.search(text, position)
            if mark is None:
                raise TemplateError(
                    "this `{{` is never closed",
                    start,
                    2,
                    "close it with `}}`; a literal `{{` is written `{{ '{{' }}`",
                )
            position = mark.end()
            match mark.group():
                case "{":
                    depth += 1
                case "}" if depth:
                    depth -= 1
                case "}" if text.startswith("}", position):
                    position += 1
                    break
                case "}":
                    raise TemplateError(
                        "one `}` alone does not close an expression",
                        mark.start(),
                        1,
                        "close it with `}}`",
                    )
                case "'" | '"':
                    raise TemplateError(
                        "this quote is never closed",
                        mark.start(),
                        1,
                        "a literal `{{` is written `{{ '{{' }}`",
                    )
        yield start, position


def _parse(text: str, start: int, end: int) -> Expression:
    source = text[start + 2 : end - 2]
    if source[:1] in ("-", "+") or source[-1:] in ("-", "+"):
        at = start + 2 if source[:1] in ("-", "+") else end - 3
        raise TemplateError(
            "there is no whitespace control in templates",
            at,
            1,
            "put a space between the braces and the sign",
        )
    if len(source) > _LONGEST_EXPRESSION:
        raise TemplateError(
            f"an expression may have {_LONGEST_EXPRESSION:,} characters", start, end - start
        )
    name = source.strip()
    if (
        _PLAIN.fullmatch(name) and name not in _WORDS
    ):  # most expressions, and then jinja2 need not be imported
        chain = _Chain(tuple(_dots(name, start + 2 + source.index(name))))
        return Expression(start, end - start, (chain.reference(),), chain.read)
    from jinja2 import TemplateSyntaxError

    try:
        tree = _Tree(source, start + 2)
    except TemplateSyntaxError as error:
        raise _unbalanced(source, start + 2) or _reworded(error, start, end) from None
    except RecursionError:
        raise TemplateError("this expression is nested too deeply", start, end - start) from None
    return Expression(
        start,
        end - start,
        tuple(sorted(tree.references, key=lambda each: each.offset)),
        partial(tree.value, tree.root),
    )


def _dots(name: str, offset: int) -> Iterator[_Link]:
    for part in name.split("."):
        yield _Link(part, offset, len(part))
        offset += len(part) + 1


def _unbalanced(source: str, offset: int) -> TemplateError | None:
    """What to say of an expression that is none because of a bracket."""
    opened: list[re.Match[str]] = []
    for mark in _BRACKET.finditer(source):
        if mark[0] in _CLOSING.values():
            opened.append(mark)
        elif mark[0] in _CLOSING:
            if not opened:
                return TemplateError(f"this `{mark[0]}` closes nothing", offset + mark.start(), 1)
            if opened[-1][0] != _CLOSING[mark[0]]:
                break
            opened.pop()
    return (
        TemplateError(f"this `{opened[-1][0]}` is never closed", offset + opened[-1].start(), 1)
        if opened
        else None
    )


def _reworded(error: Exception, start: int, end: int) -> TemplateError:
    at = getattr(error, "lineno", start)
    message = str(getattr(error, "message", error))
    if (
        "end of print statement" in message
        or message.startswith("unexpected 'end of template'")
        or "got 'end of template'" in message
    ):
        message = "something is missing at the end of this expression"
    return TemplateError(f"this is not an expression: {message}", min(max(at, start), end - 1), 1)


# ---- what an expression does ----


@dataclass(frozen=True, slots=True)
class _World:
    scope: Scope
    reads: Reads | None

    def record(self, path: tuple[str, ...], value: object) -> None:
        if self.reads is None:
            return
        if isinstance(value, Mapping) and value:
            for key in value:
                self.record((*path, key), value[key])
        else:
            self.reads[dotted(path)] = {} if isinstance(value, Mapping) else value


_Run: TypeAlias = Callable[[_World], object]


def dotted(path: Sequence[str]) -> str:
    """The text of a path; parts that are not names are quoted, so that two paths never look the same."""
    first, *rest = path
    return first + "".join(
        f".{part}" if _PLAIN.fullmatch(part) and "." not in part else f"[{json.dumps(part)}]"
        for part in rest
    )


@dataclass(frozen=True, slots=True)
class _Slice:
    start: _Run | None
    stop: _Run | None
    step: _Run | None


@dataclass(frozen=True, slots=True)
class _Link:
    """One part of a chain: a name or number known now, or an expression, or a slice."""

    key: str | int | _Run | _Slice
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """`a.b['c'][0]`: followed through mappings, its path is what is recorded; parts of a value that `root` makes have no path."""

    links: tuple[_Link, ...]
    root: _Run | None = None

    def reference(self) -> Reference:
        known: list[_Link] = []
        for link in self.links:
            if not isinstance(link.key, str):
                break
            known.append(link)
        first, last = known[0], known[-1]
        names = tuple((each.offset, each.length) for each in known)
        return Reference(
            tuple(str(each.key) for each in known),
            first.offset,
            last.offset + last.length - first.offset,
            names,
        )

    def read(self, world: _World) -> object:
        if self.root is not None:
            return self._part_of(self.root(world), world)
        value: object = world.scope
        path: tuple[str, ...] = ()
        recorded = False
        for link in self.links:
            key = link.key(world) if callable(link.key) else link.key
            if isinstance(value, Unknown) or isinstance(key, Unknown):
                value = _item(value, key, path, link, world)
                continue
            if isinstance(value, (Mapping, StatePath)):
                known: Mapping[str, object] = value.parts if isinstance(value, StatePath) else value
                if not isinstance(key, str):
                    raise TemplateError(
                        f"{_called(path)} is read by name, not by {_kind(key)}",
                        link.offset,
                        link.length,
                    )
                try:
                    value = known[key]
                except KeyError:
                    raise _Missing(
                        *_unknown(path, key, list(known), link), None if recorded else (*path, key)
                    ) from None
                path = (*path, key)
                continue
            if (
                not recorded
            ):  # from here on the path says nothing: what is read is this value, whole
                world.record(path, value)
                recorded = True
            if value is None:
                raise _Missing(
                    f"{_called(path)} is null",
                    link.offset,
                    link.length,
                    "guard it with `| default(…)`",
                    None,
                )
            value = _item(value, key, path, link, world)
        if recorded:
            return value
        world.record(path, value)
        return _ordered(value)

    def _part_of(self, value: object, world: _World) -> object:
        for link in self.links:
            key = link.key(world) if callable(link.key) else link.key
            if isinstance(value, Mapping) and isinstance(key, str) and key in value:
                value = value[key]
            else:
                value = _item(value, key, (), link, world)
        return value

    def guarded(self, world: _World) -> tuple[bool, object]:
        """Whether it is there, and what it is; an absence is a read too."""
        try:
            return True, self.read(world)
        except _Missing as error:
            if world.reads is not None and error.path is not None:
                world.reads[dotted(error.path)] = dict(ABSENT)
            return False, None


def _ordered(value: object) -> object:
    """A mapping by name: the key of a step cannot tell one order from another, so nothing rendered may."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return value


def _called(path: tuple[str, ...]) -> str:
    return f"`{dotted(path)}`" if path else "this value"


def _unknown(
    path: tuple[str, ...], key: str, names: Sequence[str], link: _Link
) -> tuple[str, int, int, str]:
    fix = did_you_mean(key, names) or (
        f"there is: {', '.join(sorted(names)[:12])}" if names else ""
    )
    return (
        (f"{_called(path)} has no `{key}`" if path else f"there is no `{key}`"),
        link.offset,
        link.length,
        fix,
    )


def _item(value: object, key: object, path: tuple[str, ...], link: _Link, world: _World) -> object:
    if isinstance(value, Unknown) or isinstance(key, Unknown):
        return _unknown_item(value, key, path, link, world)
    if isinstance(value, (str, list, tuple)):
        try:
            if isinstance(key, _Slice):
                bounds = [each(world) if each else None for each in (key.start, key.stop, key.step)]
                whole = [_whole(each, link) for each in bounds]
                if holds_unknown(bounds):
                    return Unknown(kinds_of(value))
                return value[slice(*whole)]
            if isinstance(key, int) and not isinstance(key, bool):
                return value[key]
        except IndexError:
            raise TemplateError(
                f"{_called(path)} has {len(value)} items, and none at {key}",
                link.offset,
                link.length,
            ) from None
        except ValueError:
            raise TemplateError("a slice cannot step by 0", link.offset, link.length) from None
    raise _partless(value, path, link)


def _partless(value: object, path: tuple[str, ...], link: _Link) -> TemplateError:
    message = f"{_called(path)} is {_kind(value)}: it has no such part"
    if isinstance(value, Unknown) and value.may_be_null:  # null is what `default` is for
        return _Missing(message, link.offset, link.length, "", None)
    return TemplateError(message, link.offset, link.length)


def _unknown_item(
    value: object, key: object, path: tuple[str, ...], link: _Link, world: _World
) -> object:
    """A part of a value where the value or the key is unknown."""
    kinds = kinds_of(value)
    if isinstance(key, _Slice):
        for each in (key.start, key.stop, key.step):
            _whole(each(world) if each else None, link)
        if not kinds & {LIST, TEXT}:
            raise _partless(value, path, link)
        items = value.items if isinstance(value, Unknown) else None
        return Unknown(kinds & {LIST, TEXT}, items, part=NULL in kinds)
    found: list[object] = []
    if INTEGER in kinds_of(key):
        found += [A_TEXT] if TEXT in kinds else []
        found += [item_of(value)] if LIST in kinds else []
    if MAPPING in kinds and TEXT in kinds_of(key):
        found.append(item_of(value))
    empty = isinstance(value, (str, list, tuple, Mapping)) and not value
    if not found or empty:
        raise _partless(value, path, link)
    part = one_of(found)
    if isinstance(part, Unknown) and NULL in kinds:  # then it is not there, as `default` notices
        return replace(part, part=True)
    return part


def _whole(value: object, link: _Link) -> int | None:
    if isinstance(value, Unknown):
        if value.kinds & {INTEGER, NULL}:
            return None
    elif value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TemplateError(
        f"a slice is made of whole numbers, not {_kind(value)}", link.offset, link.length
    )


def _kind(value: object) -> str:
    if isinstance(value, Unknown):
        return value.word
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a slice" if isinstance(value, _Slice) else "a list"


class _Tree:
    """An expression as jinja2 has read it.  A node that is not named here does not exist in the language."""

    def __init__(self, source: str, base: int) -> None:
        self.references: list[Reference] = []
        self._source = source
        self._base = base
        self._tokens: list[tuple[int, str]] = []
        self._indices: dict[int, int] = {}  # where a token begins -> which it is
        self._chains: dict[
            nodes.Node, _Chain
        ] = {}  # of each name, dot and subscript that begins one
        if (
            at := source.find("\r")
        ) >= 0:  # jinja2 would shorten it, and every position after it would lie
            raise TemplateError("a carriage return cannot be in an expression", base + at, 1)
        root = self._parse()
        self._check(root)
        self.root = root

    # -- reading --

    def _parse(self) -> nodes.Expr:
        from jinja2 import TemplateSyntaxError
        from jinja2.lexer import TokenStream
        from jinja2.parser import Parser

        environment = _environment()
        parser = Parser(environment, "")
        try:
            # jinja2 keeps a line number with each token and node.  It gets offsets instead: that is where our positions come from.
            parser.stream = TokenStream(
                environment.lexer.wrap(self._tokenize(environment.lexer.tokeniter)), None, None
            )
            expression = parser.parse_expression()
        except ValueError:  # digits beyond what int() takes
            at = self._tokens[-1][0] if self._tokens else self._base
            raise TemplateSyntaxError("this number is too long", at) from None
        if not parser.stream.eos:
            token = parser.stream.current
            raise TemplateSyntaxError(f"unexpected `{self._word(token.lineno)}`", token.lineno)
        return expression

    def _tokenize(
        self, tokeniter: Callable[..., Iterator[tuple[int, str, str]]]
    ) -> Iterator[tuple[int, str, str]]:
        from jinja2 import TemplateSyntaxError

        position = self._base
        try:
            for _, kind, raw in tokeniter(self._source, None, None, "variable"):
                if kind != "whitespace":
                    self._indices[position] = len(self._tokens)
                    self._tokens.append((position, raw))
                yield position, kind, raw
                position += len(raw)
        except TemplateSyntaxError as error:
            raise TemplateSyntaxError(
                re.sub(r" at \d+$", "", error.message or ""), position
            ) from None

    def _word(self, offset: int) -> str:
        index = self._indices.get(offset)
        return "" if index is None else self._tokens[index][1]

    def _after(self, offset: int, count: int = 1) -> tuple[int, str]:
        """The token `count` places after the one at `offset`."""
        return self._tokens[min(self._indices[offset] + count, len(self._tokens) - 1)]

    # -- what is not in the language --

    def _check(self, node: nodes.Node) -> None:
        """Refuse what is not in the language, wherever it stands, and note what is read."""
        kind, at = type(node).__name__, node.lineno
        if kind in ("Name", "Getattr", "Getitem"):
            self._chain(node)
            return
        if kind == "Call":
            raise TemplateError(
                "a template cannot call anything",
                at,
                1,
                f"there are filters, written `value | name`: {', '.join(FILTERS)}",
            )
        if kind == "Pow":
            raise TemplateError(
                "`**` is not available in templates", at, 1, "compute it in the step"
            )
        if kind not in _VALUES and kind not in ("Pair", "Operand"):
            raise TemplateError(
                f"`{self._word(at)}` is not available in templates", at, len(self._word(at)) or 1
            )
        if kind == "Filter":
            self._check_filter(node)  # type: ignore[arg-type]
        elif kind == "Test":
            self._check_test(node)  # type: ignore[arg-type]
        elif kind == "Const":
            _number(node.value, at)  # type: ignore[attr-defined]
        for each in node.iter_child_nodes():
            self._check(each)

    def _check_filter(self, node: nodes.Filter) -> None:
        name, at = node.name, node.lineno
        if name not in FILTERS:
            raise TemplateError(
                f"there is no filter `{name}`",
                at,
                len(name),
                did_you_mean(name, FILTERS) or f"there is: {', '.join(FILTERS)}",
            )
        least, most = {"default": (1, 1), "join": (0, 1)}.get(name, (0, 0))
        if node.kwargs or node.dyn_args or node.dyn_kwargs or not least <= len(node.args) <= most:
            takes = "one argument" if least else "at most one argument" if most else "no argument"
            raise TemplateError(f"the filter `{name}` takes {takes}", at, len(name))

    def _check_test(self, node: nodes.Test) -> None:
        at, word = self._after(node.lineno)
        if word == "not":
            at, word = self._after(node.lineno, 2)
        if node.name not in TESTS:
            raise TemplateError(
                f"there is no test `{node.name}`",
                at,
                len(word),
                did_you_mean(node.name, TESTS) or f"there is: {', '.join(TESTS)}",
            )
        if node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise TemplateError(f"the test `{node.name}` takes no argument", at, len(word))

    def _chain(self, whole: nodes.Node) -> None:
        parts: list[Any] = []
        node: Any = whole
        while type(node).__name__ in ("Getattr", "Getitem"):
            parts.append(node)
            node = node.node
        if type(node).__name__ != "Name":
            root = self._later(node)
            self._chains[whole] = _Chain(tuple(map(self._link, reversed(parts))), root)
            return
        name: str = node.name
        if name.startswith("_"):
            raise TemplateError(
                f"`{name}`: no name begins with an underscore", node.lineno, len(name)
            )
        chain = self._chains[whole] = _Chain(
            (_Link(name, node.lineno, len(name)), *map(self._link, reversed(parts)))
        )
        self.references.append(chain.reference())

    def _link(self, node: Any) -> _Link:
        at, word = self._after(node.lineno)
        if type(node).__name__ == "Getattr":
            if word.startswith("_"):
                raise TemplateError(f"`.{word}`: no name begins with an underscore", at, len(word))
            return _Link(word, at, len(word))
        key = node.arg
        kind = type(key).__name__
        if (
            kind == "Const"
            and isinstance(key.value, (str, int))
            and not isinstance(key.value, bool)
        ):
            opened = self._word(node.lineno) == "["
            close = self._close(node.lineno) if opened else at + len(word)
            start = node.lineno if opened else at
            return _Link(key.value, start, close - start)
        if kind == "Slice":
            parts = [each and self._later(each) for each in (key.start, key.stop, key.step)]
            return _Link(_Slice(*parts), node.lineno, self._close(node.lineno) - node.lineno)
        return _Link(self._later(key), at, self._close(node.lineno) - at - 1)

    def _later(self, node: nodes.Expr) -> _Run:
        self._check(node)
        return partial(self.value, node)

    def _close(self, offset: int) -> int:
        """Just behind the `]` that closes the `[` at `offset`."""
        depth = 0
        for position, raw in islice(self._tokens, self._indices[offset], None):
            depth += {"[": 1, "]": -1}.get(raw, 0)
            if not depth:
                return position + 1
        raise AssertionError("BUG: jinja2 let an open bracket pass")

    # -- what it is worth --

    def value(self, node: nodes.Node, world: _World) -> object:
        return _VALUES[type(node).__name__](self, node, world)

    def _dict(self, node: nodes.Dict, world: _World) -> object:
        made: dict[str, object] = {}
        unknown = False
        for pair in node.items:
            key = self.value(pair.key, world)
            if TEXT not in kinds_of(key):
                raise TemplateError(f"the key of a mapping is text, not {_kind(key)}", pair.lineno)
            value = self.value(pair.value, world)
            if isinstance(key, str):
                made[key] = value
            else:
                unknown = True
        return Unknown(frozenset({MAPPING})) if unknown else made

    def _read(self, node: nodes.Expr, world: _World) -> object:
        return self._chains[node].read(world)

    def _guarded(self, node: nodes.Expr, world: _World) -> tuple[bool, object]:
        chain = self._chains.get(node)
        return (
            (True, self.value(node, world)) if chain is None or chain.root else chain.guarded(world)
        )

    def _choice(self, node: nodes.CondExpr, world: _World) -> object:
        truth = truth_of(self.value(node.test, world))
        branches = (
            [node.expr1, node.expr2] if truth is None else [node.expr1 if truth else node.expr2]
        )
        return self._any_of(branches, world, [])

    def _and(self, node: nodes.And, world: _World) -> object:
        left = self.value(node.left, world)
        truth = truth_of(left)
        if truth is not None:
            return self.value(node.right, world) if truth else left
        return self._any_of([node.right], world, [False if left == A_BOOLEAN else left])

    def _or(self, node: nodes.Or, world: _World) -> object:
        left = self.value(node.left, world)
        truth = truth_of(left)
        if truth is not None:
            return left if truth else self.value(node.right, world)
        assert isinstance(left, Unknown)
        return self._any_of([node.right], world, [True if left == A_BOOLEAN else left.given])

    def _not(self, node: nodes.Not, world: _World) -> object:
        truth = truth_of(self.value(node.node, world))
        return A_BOOLEAN if truth is None else not truth

    def _any_of(
        self, branches: Sequence[nodes.Expr | None], world: _World, others: list[object]
    ) -> object:
        """The value of one of these expressions or `others`, it is not known which: an error only where there is none at all."""
        found, wrong = others, list[TemplateError]()
        for branch in branches:
            try:
                found.append(self.value(branch, world) if branch is not None else None)
            except TemplateError as error:
                wrong.append(error)
        if not found:
            raise wrong[0]
        return one_of(found)

    def _compare(self, node: nodes.Compare, world: _World) -> object:
        left = self.value(node.expr, world)
        for each in node.ops:
            right = self.value(each.expr, world)
            if holds_unknown(left) or holds_unknown(right):
                if _comparable(each.op, kinds_of(left), kinds_of(right)):
                    return A_BOOLEAN
                raise _incomparable(left, right, node)
            try:
                if not _COMPARE[each.op](left, right):
                    return False
            except TypeError:
                raise _incomparable(left, right, node) from None
            left = right
        return True

    def _sign(self, node: nodes.UnaryExpr, world: _World) -> object:
        value = self.value(node.node, world)
        if isinstance(value, Unknown) and value.kinds & NUMBERS:
            return Unknown(value.kinds & NUMBERS)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TemplateError(f"{_kind(value)} has no sign", node.lineno)
        return -value if node.operator == "-" else +value

    def _binary(self, node: nodes.BinExpr, world: _World) -> object:
        """Numbers with numbers; `+` also text with text and lists with lists: nothing is repeated or formatted."""
        left, right, at = self.value(node.left, world), self.value(node.right, world), node.lineno
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return _unknown_binary(node.operator, left, right, at)
        apply = _ARITHMETIC[node.operator]
        if node.operator == "+" and (
            (isinstance(left, str) and isinstance(right, str))
            or (isinstance(left, list) and isinstance(right, list))
        ):
            if len(left) + len(right) > LONGEST_TEXT:
                raise _too_long(at, 1)
            return apply(left, right)
        for value in (left, right):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _unworkable(node.operator, left, right, at)
        try:
            return _number(apply(left, right), at)
        except ZeroDivisionError:
            raise TemplateError("division by zero", at) from None
        except OverflowError:
            raise TemplateError("this number is too large", at) from None

    def _concat(self, node: nodes.Concat, world: _World) -> object:
        texts: list[str] = []
        size = 0
        unknown = False
        for each in node.nodes:
            value = self.value(each, world)
            unknown |= isinstance(value, Unknown)
            texts.append(_text_at(value, each.lineno))
            size += len(texts[-1])
            if size > LONGEST_TEXT:
                raise _too_long(each.lineno, 1)
        return A_TEXT if unknown else "".join(texts)

    def _filter(self, node: nodes.Filter, world: _World) -> object:
        name, at, inner = node.name, node.lineno, cast("nodes.Expr", node.node)
        if (
            name == "default"
        ):  # absent or null: an input that may be left out is null, so that is what a default is for
            value = self._guarded(inner, world)[1]
            if isinstance(value, Unknown) and value.may_be_null:
                return self._any_of(node.args, world, [value.given] if value.given.kinds else [])
            return self.value(node.args[0], world) if value is None else value
        value = self.value(inner, world)
        if name == "join":
            return _join(value, self.value(node.args[0], world) if node.args else "", at)
        if name == "tojson":
            return _json(value, at)
        if isinstance(value, Unknown) and TEXT in value.kinds:
            return A_TEXT
        if not isinstance(value, str):
            raise TemplateError(f"`{name}` works on a path, not on {_kind(value)}", at, len(name))
        return _PATHS[name](value)

    def _test(self, node: nodes.Test, world: _World) -> object:
        if node.name == "defined":
            there, value = self._guarded(node.node, world)
            return A_BOOLEAN if isinstance(value, Unknown) and value.part else there
        value = self.value(node.node, world)
        if isinstance(value, Unknown) and value.may_be_null and value.kinds != {NULL}:
            return A_BOOLEAN
        return kinds_of(value) == {NULL}


_VALUES: dict[str, Callable[[_Tree, Any, _World], object]] = {
    "Const": lambda tree, node, world: node.value,
    "List": lambda tree, node, world: [tree.value(each, world) for each in node.items],
    "Tuple": lambda tree, node, world: [tree.value(each, world) for each in node.items],
    "Dict": _Tree._dict,
    **dict.fromkeys(("Name", "Getattr", "Getitem"), _Tree._read),
    "CondExpr": _Tree._choice,
    "And": _Tree._and,
    "Or": _Tree._or,
    "Not": _Tree._not,
    "Compare": _Tree._compare,
    **dict.fromkeys(("Neg", "Pos"), _Tree._sign),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"), _Tree._binary),
    "Concat": _Tree._concat,
    "Filter": _Tree._filter,
    "Test": _Tree._test,
}

_ARITHMETIC: dict[str, Callable[[Any, Any], object]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}

_COMPARE: dict[str, Callable[[object, object], object]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,  # type: ignore[dict-item]  # a TypeError is answered where it is called
    "lteq": operator.le,  # type: ignore[dict-item]  # a TypeError is answered where it is called
    "gt": operator.gt,  # type: ignore[dict-item]  # a TypeError is answered where it is called
    "gteq": operator.ge,  # type: ignore[dict-item]  # a TypeError is answered where it is called
    "in": lambda left, right: operator.contains(right, left),  # type: ignore[arg-type]
    "notin": lambda left, right: not operator.contains(right, left),  # type: ignore[arg-type]
}


def _incomparable(left: object, right: object, node: nodes.Compare) -> TemplateError:
    return TemplateError(
        f"{_kind(left)} and {_kind(right)} cannot be compared like this", node.lineno
    )


_ORDERED = (NUMBERS | {"boolean"}, frozenset({TEXT}), frozenset({LIST}))
"""Types whose values can be put in order among each other."""


def _comparable(operator: str, left: frozenset[str], right: frozenset[str]) -> bool:
    """Whether some values of these types can be compared."""
    if operator in ("eq", "ne"):
        return True
    if operator in ("in", "notin"):
        return bool(right & {LIST, MAPPING}) or (TEXT in right and TEXT in left)
    return any(left & kinds and right & kinds for kinds in _ORDERED)


def _unworkable(operator: str, left: object, right: object, at: int) -> TemplateError:
    return TemplateError(
        f"`{operator}` does not work on {_kind(left)} and {_kind(right)}",
        at,
        1,
        "join text with `~`",
    )


def _unknown_binary(operator: str, left: object, right: object, at: int) -> object:
    """What an arithmetic operation gives where one side is unknown."""
    one, other = kinds_of(left), kinds_of(right)
    kinds = set[str]()
    if one & NUMBERS and other & NUMBERS:
        if operator in ("/", "//", "%") and isinstance(right, (int, float)) and right == 0:
            raise TemplateError("division by zero", at)
        whole = INTEGER in one and INTEGER in other and operator != "/"
        kinds |= {INTEGER} if whole else set()
        kinds |= {FRACTION} if operator == "/" or FRACTION in one | other else set()
    if operator == "+":
        kinds |= {TEXT, LIST} & one & other
    if not kinds:
        raise _unworkable(operator, left, right, at)
    return Unknown(frozenset(kinds))


def _number(value: object, at: int) -> object:
    if isinstance(value, int) and value.bit_length() > _WIDEST_INTEGER:
        raise TemplateError("this number is too large", at)
    if isinstance(value, float) and not math.isfinite(value):
        raise TemplateError("this number is too large", at)
    return value


def _text_at(value: object, at: int) -> str:
    try:
        return text_of(value)
    except _NoText as error:
        raise TemplateError(str(error), at, 1, error.fix) from None


def _join(value: object, separator: object, at: int) -> object:
    if isinstance(value, Unknown) and LIST in value.kinds:
        _text_at(separator, at)
        return A_TEXT
    if not isinstance(value, (list, tuple)):
        raise TemplateError(f"`join` works on a list, not on {_kind(value)}", at, 4)
    texts = [_text_at(each, at) for each in value]
    between = _text_at(separator, at)
    if sum(map(len, texts)) + len(between) * len(texts) > LONGEST_TEXT:
        raise _too_long(at, 4)
    if isinstance(separator, Unknown) or holds_unknown(value):
        return A_TEXT
    return between.join(texts)


def _json(value: object, at: int) -> object:
    if holds_unknown(value):
        return A_TEXT
    if (
        _weight(value, LONGEST_TEXT) < 0
    ):  # before it is written: an expression can name one long text a thousand times
        raise _too_long(at, 6)
    try:
        text = json.dumps(_ordered(value), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except ValueError:
        raise TemplateError("JSON has no such number", at, 6) from None
    if len(text) > LONGEST_TEXT:
        raise _too_long(at, 6)
    return text


def _weight(value: object, left: int) -> int:
    """What is left of a budget of characters after writing `value`, below zero as soon as it is spent."""
    if isinstance(value, str):
        return left - len(value) - 2
    if isinstance(value, Mapping):
        for key, item in value.items():
            if (left := _weight(item, left - len(key) - 4)) < 0:
                break
    elif isinstance(value, (list, tuple)):
        for item in value:
            if (left := _weight(item, left - 2)) < 0:
                break
    return left - 2


def _name_of(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _split(path: str) -> tuple[str, str]:
    """The name of a path without its last suffix, and that suffix: `.bashrc` has none."""
    name = _name_of(path)
    dot = name.rfind(".")
    return (name[:dot], name[dot:]) if 0 < dot < len(name) - 1 else (name, "")


def _parent(path: str) -> str:
    trimmed = path.rstrip("/")
    head, slash, _ = trimmed.rpartition("/")
    return head.rstrip("/") or ("/" if slash or path.startswith("/") else ".")


_PATHS: dict[str, Callable[[str], str]] = {
    "name": _name_of,
    "stem": lambda path: _split(path)[0],
    "suffix": lambda path: _split(path)[1],
    "parent": _parent,
}


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)
