"""Warn about values that are known to be empty where a template reads them.

Usually the branches of the expression, or the condition in `when`, are swapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .bad_values import show
from .input_references import leaves
from .template import TemplateError
from .template_conditions import EMPTY, Facts
from .template_syntax import empty_reads_of, facts_of, find_expressions
from .values import Tree, Where

if TYPE_CHECKING:
    from runner.errors import Problem

    from .recipe import Recipe, Step
    from .template_chains import Reference

_PARTS = ("run", "accelerate", "env", "files", "deps", "outputs", "with")


def warnings(recipe: Recipe) -> Iterator[Problem]:
    """Yield a warning for each template that reads a value known to be empty."""
    for name in recipe.inputs:
        yield from _of_part(recipe, None, ("inputs", name, "default"), {})
    for step in recipe.steps.values():
        certain = _certain_values(step)
        known = {path: value for path, value in certain.items() if value in EMPTY}
        for part in _PARTS:
            yield from _of_part(recipe, step, (*step.origin, part), known)


def _certain_values(step: Step) -> Facts:
    """Return values that a step's `when` condition makes certain while the step runs."""
    if not isinstance(step.when, str):
        return {}
    text = step.when.strip()
    try:
        found = list(find_expressions(text))
        return facts_of(text, *found[0]) if found == [(0, len(text))] else {}
    except TemplateError:
        return {}  # said elsewhere


def _of_part(recipe: Recipe, step: Step | None, where: Where, known: Facts) -> Iterator[Problem]:
    for leaf, path in leaves(_value_at(recipe.document.value, where), where):
        if not known and " if " not in leaf:
            continue
        try:
            found = list(_find_empty_reads(leaf, known))
        except TemplateError:
            continue  # said elsewhere
        for reference, value in found:
            message, fix = _describe_read(step, known, reference, value)
            yield recipe.document.problem(
                "empty-read",
                message,
                path,
                fix=fix,
                offset=reference.offset,
                length=reference.length,
                severity="warning",
            )


def _find_empty_reads(leaf: str, known: Facts) -> Iterator[tuple[Reference, object]]:
    """Yield each name in a text that has an empty value, with the value. Raises TemplateError."""
    for start, end in find_expressions(leaf):
        yield from empty_reads_of(leaf, start, end, known)


def _describe_read(
    step: Step | None, known: Facts, reference: Reference, value: object
) -> tuple[str, str]:
    """Return the message and the fix for a template that reads an empty value."""
    name = ".".join(reference.path)
    shown = show(value)
    if step is not None and any(reference.path[: len(path)] == path for path in known):
        message = f'{name} is {shown} whenever "{step.id}" runs, as its `when` says'
        return message, "invert the `when` condition, or remove the value"
    message = f"{name} is {shown} in this branch, as its condition says"
    return message, f"swap the branches, or write {shown}"


def _value_at(tree: Any, where: Where) -> Tree:
    """Return the value at a path of a document, or None if the path does not exist."""
    for key in where:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    value: Tree = tree
    return value
