"""Parse and evaluate the expressions of a leaf: `{{ … }}` with jinja2's syntax.

jinja2 only parses. Evaluation is limited to the operations in `_EVALUATE`: nothing is compiled to
Python and no function can be called, so templates cannot run code. `{% %}` and `{# #}` are plain
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from runner.errors import did_you_mean

from . import template_operations as operations
from .template_chains import (
    DOTTED_NAME,
    Chain,
    ChainPart,
    Deferred,
    Evaluation,
    Reads,
    Reference,
    Scope,
    Slice,
)
from .template_choices import ReferencedNames, chooses, needs_of
from .template_conditions import EmptyRead, Facts, empty_reads, known_values
from .template_values import (
    LONGEST_TEXT,
    NoTextError,
    TemplateError,
    check_size,
    describe_type,
    text_at,
    text_of,
    too_long,
)
from .unknowns import (
    A_BOOLEAN,
    A_TEXT,
    MAPPING,
    NULL,
    TEXT,
    Unknown,
    kinds_of,
    one_of,
    truth_of,
)

if TYPE_CHECKING:
    from jinja2 import Environment, nodes

FILTERS = ("stem", "name", "suffix", "parent", "join", "tojson", "default", "length", "range")
TESTS = ("defined", "none")
_CALLS: Mapping[str, str] = {**{name: name for name in FILTERS}, "len": "length"}
"""Function name -> the filter for the same purpose."""

_LONGEST_EXPRESSION = 4_000  # characters
_ARGUMENTS: Mapping[str, tuple[int, int]] = {"default": (1, 1), "join": (0, 1)}
"""The least and greatest number of arguments of the filters that take any."""

_CHAIN_NODES = ("Name", "Getattr", "Getitem")
_NULL = "null"
"""Another word for jinja2's `none`, as messages and YAML have it."""
_NOT_EVALUATED_ALONE = ("Pair", "Operand")


@dataclass(frozen=True, slots=True)
class Expression:
    """One `{{ … }}` of a leaf.  Its offset and length include the braces."""

    offset: int
    length: int
    references: tuple[Reference, ...]
    _evaluate: Deferred
    _choice: Callable[[Scope], ReferencedNames] | None = None
    """Returns the needed names, if they depend on values."""

    @property
    def chooses(self) -> bool:
        """Whether values decide which of its references are read."""
        return self._choice is not None

    def needs(self, scope: Scope) -> ReferencedNames:
        """Return the names that are read with these values, some of which may be unknown."""
        if self._choice is None:
            return ReferencedNames({reference.path for reference in self.references})
        try:
            return self._choice(scope)
        except RecursionError:
            raise _nested_too_deeply(self.offset, self.length) from None

    def value(self, scope: Scope, reads: Reads | None = None) -> object:
        """Return the typed value; `reads` collects each name read.  Raises TemplateError."""
        try:
            return self._evaluate(Evaluation(scope, reads))
        except RecursionError:
            raise _nested_too_deeply(self.offset, self.length) from None

    def text(self, value: object) -> str:
        """Return the text of a value of this expression.  Raises TemplateError."""
        try:
            return text_of(value)
        except NoTextError as error:
            raise TemplateError(str(error), self.offset, self.length, error.fix) from None


# -- finding expressions --

_MARK = re.compile(r"""[{}]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"]""", re.DOTALL)
_BRACKET = re.compile(r"""[()[\]{}]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_OPENING = {")": "(", "]": "[", "}": "{"}
_WORDS = frozenset({"true", "false", "none", _NULL, "and", "or", "not", "in", "is", "if", "else"})
_SIGNS = ("-", "+")


def find_expressions(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each `{{ … }}` of a leaf.  Raises TemplateError."""
    start = text.find("{{")
    while start >= 0:
        end = _end_of_expression(text, start)
        yield start, end
        start = text.find("{{", end)


def _end_of_expression(text: str, start: int) -> int:
    """Return the index after the `}}` of the expression at `start`.

    Braces and quotes inside an expression do not end it.
    """
    position, depth = start + 2, 0
    while mark := _MARK.search(text, position):
        position = mark.end()
        char = mark.group()
        if char == "{":
            depth += 1
        elif char == "}" and depth:
            depth -= 1
        elif char == "}" and text.startswith("}", position):
            return position + 1
        elif char == "}":
            message = "one `}` alone does not close an expression"
            raise TemplateError(message, mark.start(), 1, "close it with `}}`")
        elif char in ("'", '"'):
            fix = "a literal `{{` is written `{{ '{{' }}`"
            raise TemplateError("this quote is never closed", mark.start(), 1, fix)
    fix = "close it with `}}`; a literal `{{` is written `{{ '{{' }}`"
    raise TemplateError("this `{{` is never closed", start, 2, fix)


def parse_expression(text: str, start: int, end: int) -> Expression:
    """Return the expression in a leaf between `start` and `end`.

    Raises TemplateError for invalid syntax and unsupported words.
    """
    length = end - start
    source = text[start + 2 : end - 2]
    _refuse_whitespace_control(source, start, end)
    if len(source) > _LONGEST_EXPRESSION:
        message = f"an expression may have {_LONGEST_EXPRESSION:,} characters"
        raise TemplateError(message, start, length)
    name = source.strip()
    if DOTTED_NAME.fullmatch(name) and name not in _WORDS:
        # Most expressions are plain names, and reading them here avoids importing jinja2.
        chain = Chain(tuple(_links_of_name(name, start + 2 + source.index(name))))
        return Expression(start, length, (chain.reference(),), chain.read)
    from jinja2 import TemplateSyntaxError

    try:
        reader = _ExpressionReader(source, start + 2)
        root = reader.read()
        choice = partial(_needs, root, reader.chains) if chooses(root) else None
    except TemplateSyntaxError as error:
        raise _bracket_error(source, start + 2) or _syntax_error(error, start, end) from None
    except RecursionError:
        raise _nested_too_deeply(start, length) from None
    references = sorted(reader.references, key=lambda reference: reference.offset)
    return Expression(
        start, length, tuple(references), partial(_evaluate, root, reader.chains), choice
    )


def empty_reads_of(text: str, start: int, end: int, known: Facts) -> list[EmptyRead]:
    """Return each read of a name whose value is known to be empty.  Raises TemplateError.

    `known` are values that are certain wherever the expression is evaluated.
    """
    root, chains = _syntax(text, start, end)
    return list(empty_reads(root, chains, known))


def facts_of(text: str, start: int, end: int) -> Facts:
    """Return the values that are known if an expression is true.  Raises TemplateError."""
    root, chains = _syntax(text, start, end)
    return known_values(root, chains, holds=True)


def _syntax(text: str, start: int, end: int) -> tuple[nodes.Expr, Mapping[nodes.Node, Chain]]:
    from jinja2 import TemplateSyntaxError

    reader = _ExpressionReader(text[start + 2 : end - 2], start + 2)
    try:
        return reader.read(), reader.chains
    except TemplateSyntaxError as error:
        raise _syntax_error(error, start, end) from None
    except RecursionError:
        raise _nested_too_deeply(start, end - start) from None


def _refuse_whitespace_control(source: str, start: int, end: int) -> None:
    message = "whitespace control is not available in templates"
    fix = "put a space between the braces and the sign"
    if source.startswith(_SIGNS):
        raise TemplateError(message, start + 2, 1, fix)
    if source.endswith(_SIGNS):
        raise TemplateError(message, end - 3, 1, fix)


def _links_of_name(name: str, offset: int) -> Iterator[ChainPart]:
    for part in name.split("."):
        yield ChainPart(part, offset, len(part))
        offset += len(part) + 1


def _nested_too_deeply(offset: int, length: int) -> TemplateError:
    return TemplateError("the expression is nested too deeply", offset, length)


def _bracket_error(source: str, offset: int) -> TemplateError | None:
    """Return the error of an unmatched bracket; None if all brackets match."""
    opened: list[re.Match[str]] = []
    for mark in _BRACKET.finditer(source):
        if mark[0] in _OPENING.values():
            opened.append(mark)
        elif mark[0] in _OPENING:
            if not opened:
                return TemplateError(
                    f"this `{mark[0]}` has no opening bracket", offset + mark.start(), 1
                )
            if opened[-1][0] != _OPENING[mark[0]]:
                break
            opened.pop()
    if not opened:
        return None
    last = opened[-1]
    return TemplateError(f"this `{last[0]}` is never closed", offset + last.start(), 1)


def _syntax_error(error: Exception, start: int, end: int) -> TemplateError:
    """Return a readable error for jinja2's error, located inside the expression."""
    offset = getattr(error, "lineno", start)
    message = str(getattr(error, "message", error))
    ends_early = (
        "end of print statement" in message
        or message.startswith("unexpected 'end of template'")
        or "got 'end of template'" in message
    )
    if ends_early:
        message = "the expression is incomplete"
    offset = min(max(offset, start), end - 1)
    return TemplateError(f"this is not an expression: {message}", offset, 1)


# -- reading an expression --


class _ExpressionReader:
    """Parses one expression into its syntax tree, chains and references.

    jinja2 keeps a line number with each token and node. Here the line numbers are offsets in the
    leaf, so `lineno` of a node is its position.
    """

    def __init__(self, source: str, base: int) -> None:
        self.references: list[Reference] = []
        self.chains: dict[nodes.Node, Chain] = {}  # by the outermost node of the chain
        self._source = source
        self._base = base  # offset of the source in the leaf
        self._tokens: list[tuple[int, str]] = []  # offset and text
        self._token_at: dict[int, int] = {}  # offset -> index of its token

    def read(self) -> nodes.Expr:
        """Return the syntax tree.  Raises TemplateError for syntax outside the language."""
        # jinja2 would shorten it and shift every later offset.
        carriage_return = self._source.find("\r")
        if carriage_return >= 0:
            message = "a carriage return cannot be in an expression"
            raise TemplateError(message, self._base + carriage_return, 1)
        root = self._parse()
        self._check(root)
        return root

    # -- syntax --

    def _parse(self) -> nodes.Expr:
        from jinja2 import TemplateSyntaxError
        from jinja2.lexer import TokenStream
        from jinja2.parser import Parser

        environment = _environment()
        parser = Parser(environment, "")
        tokens = self._tokenize(environment.lexer.tokeniter)
        try:
            parser.stream = TokenStream(environment.lexer.wrap(tokens), None, None)
            expression = parser.parse_expression()
        except ValueError:  # int() refuses that many digits
            offset = self._tokens[-1][0] if self._tokens else self._base
            raise TemplateSyntaxError("this number is too long", offset) from None
        if not parser.stream.eos:
            token = parser.stream.current
            raise TemplateSyntaxError(f"unexpected `{self._word(token.lineno)}`", token.lineno)
        return expression

    def _tokenize(
        self, tokeniter: Callable[..., Iterator[tuple[int, str, str]]]
    ) -> Iterator[tuple[int, str, str]]:
        from jinja2 import TemplateSyntaxError

        offset, before = self._base, ""
        try:
            for _, kind, raw in tokeniter(self._source, None, None, "variable"):
                if kind != "whitespace":
                    self._token_at[offset] = len(self._tokens)
                    self._tokens.append((offset, raw))
                is_null = kind == "name" and raw == _NULL
                # `.null` is the name of a part.
                word = "none" if is_null and before != "." else raw
                yield offset, kind, word
                offset += len(raw)
                before = raw
        except TemplateSyntaxError as error:
            message = re.sub(r" at \d+$", "", error.message or "")
            raise TemplateSyntaxError(message, offset) from None

    def _word(self, offset: int) -> str:
        """Return the token at `offset`; empty if no token starts there."""
        index = self._token_at.get(offset)
        return "" if index is None else self._tokens[index][1]

    def _token_after(self, offset: int, count: int = 1) -> tuple[int, str]:
        """Return offset and text of the token `count` places after the one at `offset`."""
        return self._tokens[min(self._token_at[offset] + count, len(self._tokens) - 1)]

    def _end_of_bracket(self, offset: int) -> int:
        """Return the offset after the `]` that closes the `[` at `offset`."""
        depth = 0
        for position, raw in islice(self._tokens, self._token_at[offset], None):
            if raw == "[":
                depth += 1
            elif raw == "]":
                depth -= 1
            if not depth:
                return position + 1
        raise AssertionError("BUG: jinja2 let an open bracket pass")

    # -- checks --

    def _check(self, node: nodes.Node) -> None:
        """Refuse nodes outside the language, and collect the chains below a node."""
        kind = type(node).__name__
        if kind in _CHAIN_NODES:
            self._collect_chain(node)
            return
        if kind == "Call":
            raise _call_error(cast("nodes.Call", node))
        self._refuse_unknown_node(kind, node.lineno)
        if kind == "Filter":
            self._check_filter(cast("nodes.Filter", node))
        elif kind == "Test":
            self._check_test(cast("nodes.Test", node))
        elif kind == "Const":
            check_size(cast("nodes.Const", node).value, node.lineno)
        for child in node.iter_child_nodes():
            self._check(child)

    def _refuse_unknown_node(self, kind: str, offset: int) -> None:
        if kind == "Pow":
            message = "`**` is not available in templates"
            raise TemplateError(message, offset, 1, "compute it in the step")
        if kind not in _EVALUATE and kind not in _NOT_EVALUATED_ALONE:
            word = self._word(offset)
            message = f"`{word}` is not available in templates"
            raise TemplateError(message, offset, len(word) or 1)

    def _check_filter(self, node: nodes.Filter) -> None:
        name, offset = node.name, node.lineno
        if name not in FILTERS:
            fix = did_you_mean(name, FILTERS) or f"available filters: {', '.join(FILTERS)}"
            raise TemplateError(f"there is no filter `{name}`", offset, len(name), fix)
        least, most = _ARGUMENTS.get(name, (0, 0))
        takes_count = least <= len(node.args) <= most
        if not takes_count or _has_special_arguments(node):
            takes = _describe_arguments(least, most)
            raise TemplateError(f"the filter `{name}` takes {takes}", offset, len(name))

    def _check_test(self, node: nodes.Test) -> None:
        offset, word = self._token_after(node.lineno)
        if word == "not":
            offset, word = self._token_after(node.lineno, 2)
        if node.name not in TESTS:
            fix = did_you_mean(node.name, TESTS) or f"available tests: {', '.join(TESTS)}"
            raise TemplateError(f"there is no test `{node.name}`", offset, len(word), fix)
        if node.args or _has_special_arguments(node):
            message = f"the test `{node.name}` takes no argument"
            raise TemplateError(message, offset, len(word))

    # -- chains --

    def _collect_chain(self, whole: nodes.Node) -> None:
        """Add the chain that ends with a node, and its reference."""
        parts: list[Any] = []
        node: Any = whole
        while type(node).__name__ in ("Getattr", "Getitem"):
            parts.append(node)
            node = node.node
        parts.reverse()
        if type(node).__name__ != "Name":
            root = self._defer(node)
            self.chains[whole] = Chain(tuple(map(self._link, parts)), root)
            return
        name: str = node.name
        if name.startswith("_"):
            message = f"`{name}`: no name begins with an underscore"
            raise TemplateError(message, node.lineno, len(name))
        first = ChainPart(name, node.lineno, len(name))
        chain = Chain((first, *map(self._link, parts)))
        self.chains[whole] = chain
        self.references.append(chain.reference())

    def _link(self, node: Any) -> ChainPart:
        """Return the link of a dot or subscript."""
        if type(node).__name__ == "Getattr":
            return self._dot(node)
        key = node.arg
        kind = type(key).__name__
        if kind == "Const" and _is_name_or_index(key.value):
            return self._fixed_subscript(node, key.value)
        if kind == "Slice":
            return self._slice(node, key)
        offset, _ = self._token_after(node.lineno)
        return ChainPart(self._defer(key), offset, self._end_of_bracket(node.lineno) - offset - 1)

    def _dot(self, node: nodes.Getattr) -> ChainPart:
        offset, word = self._token_after(node.lineno)
        if word.startswith("_"):
            message = f"`.{word}`: no name begins with an underscore"
            raise TemplateError(message, offset, len(word))
        return ChainPart(word, offset, len(word))

    def _fixed_subscript(self, node: nodes.Getitem, key: str | int) -> ChainPart:
        """Return the link of `['name']`, `[0]`, or `.0` (a subscript in jinja2)."""
        if self._word(node.lineno) == "[":
            return ChainPart(key, node.lineno, self._end_of_bracket(node.lineno) - node.lineno)
        offset, word = self._token_after(node.lineno)
        return ChainPart(key, offset, len(word))

    def _slice(self, node: nodes.Getitem, key: nodes.Slice) -> ChainPart:
        start = self._defer_bound(key.start)
        stop = self._defer_bound(key.stop)
        step = self._defer_bound(key.step)
        length = self._end_of_bracket(node.lineno) - node.lineno
        return ChainPart(Slice(start, stop, step), node.lineno, length)

    def _defer_bound(self, node: nodes.Expr | None) -> Deferred | None:
        return None if node is None else self._defer(node)

    def _defer(self, node: nodes.Expr) -> Deferred:
        self._check(node)
        return partial(_evaluate, node, self.chains)


def _has_special_arguments(node: nodes.Filter | nodes.Test) -> bool:
    """Return True if a filter or test has arguments by name, or a `*` before one."""
    return bool(node.kwargs or node.dyn_args or node.dyn_kwargs)


def _describe_arguments(least: int, most: int) -> str:
    if least:
        return "one argument"
    return "at most one argument" if most else "no argument"


def _call_error(node: nodes.Call) -> TemplateError:
    name = _CALLS.get(getattr(node.node, "name", ""), "")
    fix = f"use a filter, as in `value | name`: {', '.join(FILTERS)}"
    if name:
        fix = f"write `value | {name}`"
    return TemplateError("a template cannot call anything", node.lineno, 1, fix)


def _is_name_or_index(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


# -- evaluating an expression --


def _needs(root: nodes.Node, chains: Mapping[nodes.Node, Chain], scope: Scope) -> ReferencedNames:
    return needs_of(root, chains, _Evaluator(chains, Evaluation(scope, None)).value)


def _evaluate(
    node: nodes.Node, chains: Mapping[nodes.Node, Chain], evaluation: Evaluation
) -> object:
    return _Evaluator(chains, evaluation).value(node)


class _Evaluator:
    """Evaluates nodes of one expression in a scope.

    With an unknown operand, an operation returns the common value of all possible results, and
    fails only if every possible value fails.
    """

    __slots__ = ("_chains", "_evaluation")

    def __init__(self, chains: Mapping[nodes.Node, Chain], evaluation: Evaluation) -> None:
        self._chains = chains
        self._evaluation = evaluation

    def value(self, node: nodes.Node) -> object:
        """Return the value of a node.  Raises TemplateError."""
        return _EVALUATE[type(node).__name__](self, node)

    def _const(self, node: nodes.Const) -> object:
        return node.value

    def _list(self, node: nodes.List | nodes.Tuple) -> object:
        return [self.value(item) for item in node.items]

    def _dict(self, node: nodes.Dict) -> object:
        mapping: dict[str, object] = {}
        has_unknown_name = False
        for pair in node.items:
            key = self.value(pair.key)
            if TEXT not in kinds_of(key):
                message = f"the key of a mapping must be text, not {describe_type(key)}"
                raise TemplateError(message, pair.lineno)
            value = self.value(pair.value)
            if isinstance(key, str):
                mapping[key] = value
            else:
                has_unknown_name = True
        return Unknown(frozenset({MAPPING})) if has_unknown_name else mapping

    def _chain(self, node: nodes.Expr) -> object:
        return self._chains[node].read(self._evaluation)

    def _value_if_there(self, node: nodes.Expr) -> tuple[bool, object]:
        """Return whether a value exists, and the value; only names can be absent."""
        chain = self._chains.get(node)
        if chain is None or chain.root:
            return True, self.value(node)
        return chain.read_if_there(self._evaluation)

    # -- choices --

    def _condition(self, node: nodes.CondExpr) -> object:
        truth = truth_of(self.value(node.test))
        if truth is None:
            return self._one_of_branches([node.expr1, node.expr2], [])
        branch = node.expr1 if truth else node.expr2
        return self._one_of_branches([branch], [])

    def _and(self, node: nodes.And) -> object:
        left = self.value(node.left)
        truth = truth_of(left)
        if truth is not None:
            return self.value(node.right) if truth else left
        # An unknown boolean is the result only if it is false.
        result = False if left == A_BOOLEAN else left
        return self._one_of_branches([node.right], [result])

    def _or(self, node: nodes.Or) -> object:
        left = self.value(node.left)
        truth = truth_of(left)
        if truth is not None:
            return left if truth else self.value(node.right)
        assert isinstance(left, Unknown)
        # The left side is the result only if it is true, and null is not.
        result = True if left == A_BOOLEAN else left.without_null
        return self._one_of_branches([node.right], [result])

    def _not(self, node: nodes.Not) -> object:
        truth = truth_of(self.value(node.node))
        return A_BOOLEAN if truth is None else not truth

    def _one_of_branches(
        self, branches: Sequence[nodes.Expr | None], others: list[object]
    ) -> object:
        """Return the common value of branches if the condition is unknown.

        `others` are more possible values. Raises TemplateError only without others, if every branch
        has an error.
        """
        found = others
        errors: list[TemplateError] = []
        for branch in branches:
            if branch is None:
                found.append(None)
                continue
            try:
                found.append(self.value(branch))
            except TemplateError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return one_of(found)

    # -- operations --

    def _compare(self, node: nodes.Compare) -> object:
        """Return whether all comparisons of `a < b < c` hold."""
        left = self.value(node.expr)
        for operand in node.ops:
            right = self.value(operand.expr)
            holds = operations.compare(operand.op, left, right, node.lineno)
            if holds is None:
                return A_BOOLEAN
            if not holds:
                return False
            left = right
        return True

    def _sign(self, node: nodes.UnaryExpr) -> object:
        return operations.apply_sign(node.operator, self.value(node.node), node.lineno)

    def _calculate(self, node: nodes.BinExpr) -> object:
        left, right = self.value(node.left), self.value(node.right)
        return operations.calculate(node.operator, left, right, node.lineno)

    def _concat(self, node: nodes.Concat) -> object:
        texts: list[str] = []
        size = 0
        has_unknown = False
        for part in node.nodes:
            value = self.value(part)
            has_unknown = has_unknown or isinstance(value, Unknown)
            text = text_at(value, part.lineno)
            texts.append(text)
            size += len(text)
            if size > LONGEST_TEXT:
                raise too_long(part.lineno, 1)
        return A_TEXT if has_unknown else "".join(texts)

    # -- filters and tests --

    def _filter(self, node: nodes.Filter) -> object:
        name, offset = node.name, node.lineno
        inner = cast("nodes.Expr", node.node)
        if name == "default":
            return self._default(inner, node.args)
        value = self.value(inner)
        if name == "join":
            separator = self.value(node.args[0]) if node.args else ""
            return operations.join(value, separator, offset)
        if name == "tojson":
            return operations.to_json(value, offset)
        if name == "length":
            return operations.length(value, offset)
        if name == "range":
            return operations.numbers_below(value, offset)
        return operations.apply_path_filter(name, value, offset)

    def _default(self, inner: nodes.Expr, arguments: Sequence[nodes.Expr]) -> object:
        """Return the value, or the argument if the value is absent or null.

        An omitted optional input is null, so `default` must cover null.
        """
        _, value = self._value_if_there(inner)
        if value is None:
            return self.value(arguments[0])
        if isinstance(value, Unknown) and value.may_be_null:
            others: list[object] = [value.without_null] if value.without_null.kinds else []
            return self._one_of_branches(arguments, others)
        return value

    def _test(self, node: nodes.Test) -> object:
        if node.name == "defined":
            return self._is_defined(node.node)
        value = self.value(node.node)
        is_null = kinds_of(value) == {NULL}
        if isinstance(value, Unknown) and value.may_be_null:
            return True if is_null else A_BOOLEAN
        return is_null

    def _is_defined(self, node: nodes.Expr) -> object:
        """Return whether a name exists; outputs of skipped steps do not."""
        is_there, value = self._value_if_there(node)
        chain = self._chains.get(node)
        of_step = chain is not None and not chain.root and chain.reference().path[0] == "steps"
        if isinstance(value, Unknown):
            may_be_skipped = of_step and value.may_be_null
            if value.part or may_be_skipped:
                return A_BOOLEAN
        is_skipped = of_step and value is None
        return is_there and not is_skipped


_EVALUATE: dict[str, Callable[[_Evaluator, Any], object]] = {
    "Const": _Evaluator._const,
    "List": _Evaluator._list,
    "Tuple": _Evaluator._list,
    "Dict": _Evaluator._dict,
    **dict.fromkeys(_CHAIN_NODES, _Evaluator._chain),
    "CondExpr": _Evaluator._condition,
    "And": _Evaluator._and,
    "Or": _Evaluator._or,
    "Not": _Evaluator._not,
    "Compare": _Evaluator._compare,
    **dict.fromkeys(("Neg", "Pos"), _Evaluator._sign),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"), _Evaluator._calculate),
    "Concat": _Evaluator._concat,
    "Filter": _Evaluator._filter,
    "Test": _Evaluator._test,
}
"""The nodes of the language.  A node that is not named here does not exist in it."""
