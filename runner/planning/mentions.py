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
    trees: tuple[tuple[str, Any], ...] = (
        ("run", step.run),
        ("accelerate", step.accelerate),
        ("files", step.files),
        ("env", env),
        ("with", step.uses.given if step.uses else None),
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
            is_glob_entry = not isinstance(step.deps[n], str)
            found.append(((*origin, "deps", n, *(("glob",) if is_glob_entry else ())), dep))
    return found


def is_template(leaf: object) -> bool:
    return isinstance(leaf, str) and "{{" in leaf


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
    for axis in (step.matrix or {}).values():
        leaves += [leaf for _, leaf in walk(axis, ()) if is_template(leaf)]
    for leaf in leaves:
        found += _steps_in(leaf)
    return found


def _steps_in(template: str) -> list[str]:
    try:
        paths = [reference.path for reference in references(template)]
    except TemplateError:
        return []
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
    return (
        posixpath.normpath(f"{posixpath.dirname(recipe.document.name) or '.'}/{uses.recipe}")
        if is_path(uses.recipe)
        else uses.recipe
    )


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
        step, here = recipe.steps[id], f"{above}/{id}" if above else id
        many |= step.matrix is not None
        if here == path and not step.uses:
            return (
                step
                if many
                else TargetProblem(
                    "not-a-matrix",
                    f'step "{path}" has no `matrix` to select from',
                    "use the step's outputs directly",
                )
            )
        if not step.uses:
            return TargetProblem("unknown-step", f'"{here}" contains no steps', f"select: {here}")
        if (place := resolve_recipe(recipe, step.uses)) not in used:
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

    def inside(recipe: Recipe, prefix: str, above: tuple[str, ...]) -> Iterator[str]:
        for step in recipe.steps.values():
            if step.metrics or step.select:
                yield f"select: {prefix}/{step.id}"
            elif (
                step.uses
                and (other := used.get(resolve_recipe(recipe, step.uses)))
                and other.id not in above
            ):
                yield from inside(other, f"{prefix}/{step.id}", (*above, recipe.id))

    return (
        " or ".join(list(inside(recipe, prefix, ()))[:8])
        or "no step reports metrics: add `metrics: true` to one"
    )
