"""Dependencies between the inputs of a recipe, and the order of binding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from runner.errors import Problem

from . import presets
from .recipe import Recipe
from .template import TemplateError, has, references
from .values import Tree, Where

if TYPE_CHECKING:
    from .document import Document


def leaves(tree: Tree, path: Where = ()) -> Iterator[tuple[str, Where]]:
    """Yield each text in `tree` that contains a template, with the path of the text."""
    match tree:
        case str() if has(tree):
            yield tree, path
        case list():
            for index, item in enumerate(tree):
                yield from leaves(item, (*path, index))
        case dict():
            for key, item in tree.items():
                yield from leaves(item, (*path, key))


def find_inputs(tree: Tree) -> Iterator[str]:
    """Yield the names of inputs read by the templates in `tree`. Raises TemplateError."""
    for leaf, _ in leaves(tree):
        for reference in references(leaf):
            if reference.path[0] == "inputs" and len(reference.path) > 1:
                yield reference.path[1]


def find_dependents(
    recipe: Recipe, given: Collection[str], preset: str | None, names: Collection[str]
) -> set[str]:
    """Return `names` and all inputs whose presets or defaults depend on them."""
    found = set(names)
    while True:
        more = _find_readers(recipe, given, preset, found)
        if not more:
            return found
        found |= more


def _find_readers(
    recipe: Recipe, given: Collection[str], preset: str | None, names: Collection[str]
) -> set[str]:
    """Return the inputs without a given value whose presets or defaults read one of `names`."""
    readers = set()
    for name in recipe.inputs:
        if name not in given and name not in names:
            tree = _value_in_recipe(recipe, preset, name)
            if _reads_any(tree, names):
                readers.add(name)
    return readers


def _value_in_recipe(recipe: Recipe, preset: str | None, name: str) -> Tree:
    """Return an input's preset value, or else its default."""
    chosen = presets.of_input(recipe, preset, name)
    return recipe.presets[chosen].inputs[name] if chosen else recipe.inputs[name].default


def _reads_any(tree: Tree, names: Collection[str]) -> bool:
    """Return True if a value's templates read one of these inputs. Invalid templates read none."""
    try:
        return any(name in names for name in find_inputs(tree))
    except TemplateError:
        return False  # reported when the value is made


def sort_dependencies(needs: Mapping[str, set[str]]) -> tuple[list[str], tuple[str, ...]]:
    """Sort names in dependency order, and return them with a cycle (empty if none exists).

    The cycle starts and ends with the same name. Names that depend on it are left out.
    """
    from graphlib import CycleError, TopologicalSorter

    sorter = TopologicalSorter(needs)
    circle: tuple[str, ...] = ()
    found: list[str] = []
    try:
        sorter.prepare()
    except CycleError as error:
        circle = tuple(reversed(error.args[1]))
    while ready := sorter.get_ready():
        found += ready
        sorter.done(*ready)
    return found, circle


def template_problem(document: Document, path: Where, error: TemplateError) -> Problem:
    """Convert a template error to a problem located inside the value at `path`."""
    return document.problem(
        "template", str(error), path, fix=error.fix, offset=error.offset, length=error.length
    )
