"""Find step dependencies in a recipe's text before rendering: mentioned steps and shared paths."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import did_you_mean
from ..language.template import TemplateError, references
from ..paths import is_path

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step, Uses
    from ..language.values import Where

T = TypeVar("T")


def templates(step: Step, env: Mapping[str, Any]) -> list[tuple[Where, str]]:
    """Return every template of a step with its location in the recipe."""
    origin = step.origin
    given = step.uses.given if step.uses else None
    trees: tuple[tuple[str, Any], ...] = (
        ("run", step.run),
        ("accelerate", step.accelerate),
        ("files", step.files),
        ("env", env),
        ("with", given),
        ("when", step.when),
        ("nodes", step.nodes),
    )
    found: list[tuple[Where, str]] = []
    for name, tree in trees:
        if isinstance(tree, str):
            if "{{" in tree:
                found.append(((*origin, name), tree))
        elif tree:
            found += [leaf for leaf in walk(tree, (*origin, name)) if is_template(leaf[1])]
    for output in step.outputs:
        if "{{" in output.path:
            found.append(((*origin, "outputs", output.name), output.path))
    for n, dep in enumerate(step.reads):
        if "{{" in dep:
            where = (*origin, "deps", n)
            if not isinstance(step.deps[n], str):
                where += ("glob",)
            found.append((where, dep))
    return found


def is_template(leaf: object) -> bool:
    return isinstance(leaf, str) and "{{" in leaf


def find_templates(tree: Any) -> list[str]:
    """Return all templates in a tree of values."""
    return [leaf for _, leaf in walk(tree, ()) if is_template(leaf)]


def walk(tree: Any, where: Where) -> Iterable[tuple[Where, Any]]:
    if isinstance(tree, Mapping):
        for name, inner in tree.items():
            yield from walk(inner, (*where, name))
    elif isinstance(tree, (list, tuple)):
        for n, inner in enumerate(tree):
            yield from walk(inner, (*where, n))
    else:
        yield where, tree


def mentions_step(leaf: str) -> bool:
    """Return whether a template may read a result of another step."""
    return "{{" in leaf and "steps" in leaf


def steps_of(step: Step) -> list[str]:
    """Return the ids of the steps that a step mentions, needs or selects from.

    Invalid templates are ignored here and reported elsewhere.
    """
    found = list(step.needs)
    if step.select:
        found.append(step.select.source)
    leaves = [leaf for _, leaf in templates(step, step.env)]
    for leaf in [*leaves, *find_templates(step.matrix or {})]:
        found += _steps_in(leaf)
    return found


def _steps_in(template: str) -> list[str]:
    try:
        return steps_among(reference.path for reference in references(template))
    except TemplateError:
        return []


def steps_among(paths: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the ids of the steps that the names in templates begin with: x of `steps.x.y`."""
    return [path[1] for path in paths if path[0] == "steps" and len(path) > 1]


class TargetProblem(NamedTuple):
    """Problem with the target of a `select`, and its fix."""

    code: str
    message: str
    fix: str


def resolve_recipe(recipe: Recipe, uses: Uses) -> str:
    """Return the library name or the normalized path of the recipe in a `uses`.

    A path is relative to the directory of the using recipe.
    """
    if not is_path(uses.recipe):
        return uses.recipe
    folder = posixpath.dirname(recipe.document.name) or "."
    return posixpath.normpath(f"{folder}/{uses.recipe}")


def find_selected(
    recipe: Recipe, used: Mapping[str, Recipe], path: str
) -> Step | TargetProblem | None:
    """Return the step named by `select: path`, in this recipe or in a used one.

    If no such step can be compared, return a Misnamed problem.  If a used recipe is unknown, return
    None: its `uses` is reported elsewhere.
    """
    above, many = "", False
    for id in path.split("/"):
        if id not in recipe.steps:
            fix = did_you_mean(id, recipe.steps) or _choices(recipe, used, above)
            return TargetProblem(
                "unknown-step", f'{recipe.id}, which "{above}" uses, has no step "{id}"', fix
            )
        step = recipe.steps[id]
        here = f"{above}/{id}" if above else id
        many |= step.matrix is not None
        if here == path and not step.uses:
            if many:
                return step
            return TargetProblem(
                "not-a-matrix",
                f'step "{path}" has no `matrix` to select from',
                "use the step's outputs directly",
            )
        if not step.uses:
            return TargetProblem("unknown-step", f'"{here}" contains no steps', f"select: {here}")
        place = resolve_recipe(recipe, step.uses)
        if place not in used:
            return None
        recipe, above = used[place], here
    return TargetProblem(
        "not-a-step",
        f'"{path}" is a recipe, {recipe.id}: which of its steps?',
        _choices(recipe, used, path),
    )


def _choices(recipe: Recipe, used: Mapping[str, Recipe], prefix: str) -> str:
    """Return a hint with the possible `select` targets in a recipe and the recipes it uses.

    Targets are steps that report metrics.
    """

    found = list(_find_selectable(recipe, used, prefix, ()))
    if not found:
        return "no step reports metrics: add `metrics: true` to one"
    return " or ".join(found[:8])


def _find_selectable(
    recipe: Recipe, used: Mapping[str, Recipe], prefix: str, above: tuple[str, ...]
) -> Iterator[str]:
    """Yield a `select` entry for each step with metrics, also in used recipes.

    `above` are the ids of the recipes around `recipe`.
    """
    for step in recipe.steps.values():
        if step.metrics or step.select:
            yield f"select: {prefix}/{step.id}"
            continue
        other = used.get(resolve_recipe(recipe, step.uses)) if step.uses else None
        # Recipes that use each other would never end; the cycle is reported elsewhere.
        if other is not None and other.id not in above:
            yield from _find_selectable(other, used, f"{prefix}/{step.id}", (*above, recipe.id))
