"""What a condition of an expression says of the values in it: `x == null` that x is null wherever it holds.

By it a branch that reads what its own condition says is empty is found: most often the branches are swapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import nodes

    from .template_chains import Chain, Reference

Facts = Mapping[tuple[str, ...], object]
"""Values by the paths of what has them."""
_NOTHING: Facts = {}
EMPTY = (None, "")
"""Values that are of no use to a reader."""


class EmptyRead(NamedTuple):
    """A name that is read where its value is known, by the condition of the branch or of the step."""

    reference: Reference
    value: object


def facts(node: nodes.Node, chains: Mapping[nodes.Node, Chain], *, holds: bool) -> Facts:
    """What is known of values where a condition holds, or where it does not."""
    part: Any = node
    kind = type(node).__name__
    if kind == "Not":
        return facts(part.node, chains, holds=not holds)
    if kind in ("And", "Or"):
        if holds is (kind == "And"):
            left = facts(part.left, chains, holds=holds)
            return {**left, **facts(part.right, chains, holds=holds)}
        return _NOTHING
    if kind == "Test":
        chain = chains.get(part.node)
        known = part.name == "none" and holds and chain is not None and chain.root is None
        return {chain.reference().path: None} if known and chain is not None else _NOTHING
    if kind == "Compare" and len(part.ops) == 1 and part.ops[0].op == ("eq" if holds else "ne"):
        return _equal(part.expr, part.ops[0].expr, chains)
    return _NOTHING


def _equal(one: Any, other: Any, chains: Mapping[nodes.Node, Chain]) -> Facts:
    for name, value in ((one, other), (other, one)):
        chain = chains.get(name)
        if chain is not None and chain.root is None and type(value).__name__ == "Const":
            return {chain.reference().path: value.value}
    return _NOTHING


def empty_reads(
    node: nodes.Node, chains: Mapping[nodes.Node, Chain], known: Facts = _NOTHING
) -> Iterator[EmptyRead]:
    """Each name that an expression reads where it is empty, or where a branch is one value under another name.

    `known` holds wherever the expression is evaluated.
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
            here = facts(part.test, chains, holds=holds)
            yield from empty_reads(branch, chains, {**known, **here})
            yield from _renamed(branch, other, chains, here)
    elif kind not in ("Test", "Compare"):  # which ask for a value, and may know it
        for child in node.iter_child_nodes():
            yield from empty_reads(child, chains, known)


def _read_of(chain: Chain, known: Facts) -> Iterator[EmptyRead]:
    if chain.root is None:
        reference = chain.reference()
        for path, value in known.items():
            if value in EMPTY and reference.path[: len(path)] == path:
                yield EmptyRead(reference, value)


def _renamed(
    branch: Any, other: Any, chains: Mapping[nodes.Node, Chain], here: Facts
) -> Iterator[EmptyRead]:
    """`x if x == "a" else "b"`: a branch of one value, where the value is known, beside a constant."""
    chain = chains.get(branch)
    if chain is None or chain.root is not None or type(other).__name__ != "Const":
        return
    reference = chain.reference()
    value = here.get(reference.path)
    if reference.path in here and value not in EMPTY:
        yield EmptyRead(reference, value)
