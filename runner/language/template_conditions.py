"""Derive known values from conditions: `x == null` means that x is null where it holds.

Finds branches that read a value which their own condition says is empty. Usually the branches are
swapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import nodes

    from .template_chains import Chain, Reference

Facts = Mapping[tuple[str, ...], object]
"""Reference path -> value."""
_NOTHING: Facts = {}
EMPTY = (None, "")
"""Values that count as empty."""


class EmptyRead(NamedTuple):
    """A template name whose value is known from an enclosing condition."""

    reference: Reference
    value: object


def known_values(node: nodes.Node, chains: Mapping[nodes.Node, Chain], *, holds: bool) -> Facts:
    """Return the values that are known if a condition holds, or if it does not."""
    part: Any = node
    match type(node).__name__:
        case "Not":
            return known_values(part.node, chains, holds=not holds)
        case "And" if holds:
            return _values_of_both(part, chains, holds=True)
        case "Or" if not holds:
            return _values_of_both(part, chains, holds=False)
        case "Test" if holds and part.name == "none":
            path = _path_of(part.node, chains)
            return {path: None} if path is not None else _NOTHING
        case "Compare" if len(part.ops) == 1:
            operand = part.ops[0]
            # `x != 1` says that x is 1 where it does not hold.
            equal = "eq" if holds else "ne"
            if operand.op == equal:
                return _equal(part.expr, operand.expr, chains)
    return _NOTHING


def _values_of_both(part: Any, chains: Mapping[nodes.Node, Chain], *, holds: bool) -> Facts:
    left = known_values(part.left, chains, holds=holds)
    return {**left, **known_values(part.right, chains, holds=holds)}


def _equal(one: Any, other: Any, chains: Mapping[nodes.Node, Chain]) -> Facts:
    """Return the value of the name in an equality of a name and a constant."""
    for name, value in ((one, other), (other, one)):
        path = _path_of(name, chains)
        if path is not None and type(value).__name__ == "Const":
            return {path: value.value}
    return _NOTHING


def _path_of(node: nodes.Node, chains: Mapping[nodes.Node, Chain]) -> tuple[str, ...] | None:
    """Return the path of a node that is a name; None for other nodes."""
    chain = chains.get(node)
    if chain is None or chain.root is not None:
        return None
    return chain.reference().path


def empty_reads(
    node: nodes.Node, chains: Mapping[nodes.Node, Chain], known: Facts = _NOTHING
) -> Iterator[EmptyRead]:
    """Yield each read of a name whose value is known to be empty.

    Also yields a branch that only repeats a known value, beside a constant branch. `known` holds
    wherever the expression is evaluated.
    """
    kind = type(node).__name__
    part: Any = node
    if node in chains:
        yield from _read_of(chains[node], known)
    elif kind == "CondExpr":
        yield from empty_reads(part.test, chains, _NOTHING)
        for branch, other, holds in (
            (part.expr1, part.expr2, True),
            (part.expr2, part.expr1, False),
        ):
            if branch is None:
                continue
            here = known_values(part.test, chains, holds=holds)
            yield from empty_reads(branch, chains, {**known, **here})
            yield from _find_constant_branch(branch, other, chains, here)
    elif kind not in ("Test", "Compare"):  # these may test a known value
        for child in node.iter_child_nodes():
            yield from empty_reads(child, chains, known)


def _read_of(chain: Chain, known: Facts) -> Iterator[EmptyRead]:
    if chain.root is None:
        reference = chain.reference()
        for path, value in known.items():
            if value in EMPTY and reference.path[: len(path)] == path:
                yield EmptyRead(reference, value)


def _find_constant_branch(
    branch: Any, other: Any, chains: Mapping[nodes.Node, Chain], here: Facts
) -> Iterator[EmptyRead]:
    """Yield the read of a known value in a branch beside a constant: `x if x == "a" else "b"`."""
    path = _path_of(branch, chains)
    if path is None or path not in here:
        return
    # An empty value is reported where the branch reads it.
    if type(other).__name__ == "Const" and here[path] not in EMPTY:
        yield EmptyRead(chains[branch].reference(), here[path])
