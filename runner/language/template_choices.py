"""Find the names that an expression needs, from the branches that known values select.

`x if c else y`, `and`, `or`, `default(…)`, `is none` and `== null` choose between values. A name
that is only tested may be null; a name whose value is used may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .template_values import TemplateError
from .unknowns import Unknown, truth_of

if TYPE_CHECKING:
    from jinja2 import nodes

    from .template_chains import Chain

_CHOICES = frozenset({"CondExpr", "And", "Or", "Test"})


@dataclass(slots=True)
class ReferencedNames:
    """The names that an expression reads, as reference paths.

    `certain` are names whose value is used. `possible` are names that are only tested, or that are
    in a branch that may be taken.
    """

    certain: set[tuple[str, ...]] = field(default_factory=set)
    possible: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, other: ReferencedNames) -> None:
        """Add the names of another expression."""
        self.certain |= other.certain
        self.possible |= other.possible


def chooses(node: nodes.Node) -> bool:
    """Return whether values decide which names of an expression are read."""
    kind = type(node).__name__
    if kind in _CHOICES:
        return True
    if kind == "Filter" and getattr(node, "name", "") == "default":
        return True
    if kind == "Compare" and any(map(_is_null, _operands(node))):
        return True
    return any(map(chooses, node.iter_child_nodes()))


def needs_of(
    node: nodes.Node,
    chains: Mapping[nodes.Node, Chain],
    value: Callable[[nodes.Node], object],
) -> ReferencedNames:
    """Return the names that an expression needs; `value` evaluates a part of it."""
    walk = _ExpressionVisitor(chains, value)
    walk.visit(node, certain=True)
    walk.needs.possible -= walk.needs.certain
    return walk.needs


class _ExpressionVisitor:
    """Visitor of the parts of a template expression that may be evaluated."""

    def __init__(
        self, chains: Mapping[nodes.Node, Chain], value: Callable[[nodes.Node], object]
    ) -> None:
        self._chains, self._value = chains, value
        self.needs = ReferencedNames()

    def visit(self, node: Any, *, certain: bool, asks: bool = False) -> None:
        """Record the names that a part of an expression reads.

        `certain`: the part is evaluated. `asks`: null is allowed at its position.
        """
        kind = type(node).__name__
        if node in self._chains:
            self._chain(node, certain, asks)
        elif kind == "CondExpr":
            self._branches(node.test, node.expr1, node.expr2, certain, asks)
        elif kind == "And":
            self._branches(node.left, node.right, None, certain, asks)
        elif kind == "Or":
            self._branches(node.left, None, node.right, certain, asks)
        elif kind == "Filter" and node.name == "default":
            self._default(node, certain, asks)
        elif kind == "Compare":
            self._compare(node, certain)
        else:
            for child in node.iter_child_nodes():
                self.visit(child, certain=certain, asks=kind in ("Not", "Test"))

    def _chain(self, whole: Any, certain: bool, asks: bool) -> None:
        """Record a name and the names in its subscripts."""
        chain = self._chains[whole]
        if chain.root is None:
            is_used = certain and not asks
            paths = self.needs.certain if is_used else self.needs.possible
            paths.add(chain.reference().path)
        node = whole
        while type(node).__name__ in ("Getattr", "Getitem"):
            if type(node).__name__ == "Getitem":
                self.visit(node.arg, certain=certain)
            node = node.node
        if chain.root is not None:
            self.visit(node, certain=certain)

    def _branches(self, test: Any, yes: Any, no: Any, certain: bool, asks: bool) -> None:
        self.visit(test, certain=certain, asks=True)
        known, value = self._try_value(test)
        truth = truth_of(value) if known else None
        opposite = None if truth is None else not truth
        for branch, taken in ((yes, truth), (no, opposite)):
            if branch is not None and taken is not False:
                self.visit(branch, certain=certain and taken is True, asks=asks)

    def _default(self, node: Any, certain: bool, asks: bool) -> None:
        self.visit(node.node, certain=certain, asks=True)
        known, value = self._try_value(node.node)
        is_null = known and value is None
        may_be_null = isinstance(value, Unknown) and value.may_be_null
        if value is None or may_be_null:
            for argument in node.args:
                self.visit(argument, certain=certain and is_null, asks=asks)

    def _compare(self, node: Any, certain: bool) -> None:
        operands = _operands(node)
        has_null = any(map(_is_null, operands))
        with_null = has_null and all(operand.op in ("eq", "ne") for operand in node.ops)
        for operand in operands:
            self.visit(operand, certain=certain, asks=with_null)

    def _try_value(self, node: Any) -> tuple[bool, object]:
        """Return whether a part has a value, and the value or None.

        Its error is reported elsewhere.
        """
        try:
            return True, self._value(node)
        except TemplateError:
            return False, None


def _operands(node: Any) -> list[Any]:
    return [node.expr, *(operand.expr for operand in node.ops)]


def _is_null(node: Any) -> bool:
    return type(node).__name__ == "Const" and node.value is None
