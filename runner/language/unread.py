"""Find inputs that nothing in a recipe reads, so that their values have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from runner.errors import Problem

from . import presets
from .inputs import NOWHERE
from .recipe import Recipe
from .template import TemplateError, has, references
from .values import Where

_PROSE_KEYS = frozenset({"doc", "summary"})
"""Keys whose text is for people."""


def find_unread(recipe: Recipe) -> list[str]:
    """Return the inputs that no template, `secret`, `secrets` or `retries` of a recipe reads."""
    names = set(recipe.inputs) - _named_by_keys(recipe)
    for leaf in _texts(recipe.document.value):
        if not names:
            break
        found = _inputs_read(leaf)
        if found is None:
            return []
        names -= found
    return [name for name in recipe.inputs if name in names]


def _named_by_keys(recipe: Recipe) -> set[str]:
    """Return the inputs that keys of a recipe name outside of templates."""
    names = {spec.secret for spec in recipe.inputs.values() if spec.secret}
    names.update(recipe.secrets)
    for step in recipe.steps.values():
        names.update(step.secrets or ())
        names.update(step.options.oom)
    return names


def warnings(recipe: Recipe) -> Iterator[Problem]:
    """Yield a warning for each unused input."""
    for name in find_unread(recipe):
        yield _problem(recipe, name, ("inputs", name), key=True, severity="warning")


def find_refused(
    recipe: Recipe,
    given: Iterable[str],
    preset: str | None,
    origins: Mapping[str, str] = NOWHERE,
) -> list[Problem]:
    """Return the problems of values for unused inputs, given or from presets."""
    given = list(given)
    chosen = presets.combine(recipe, preset)
    preset_inputs = chosen.inputs if chosen is not None else {}
    if not given and not preset_inputs:
        return []
    found = []
    idle = set(find_unread(recipe))
    for name in given:
        whole = name.partition(".")[0]
        if whole in idle:
            found.append(_problem(recipe, whole, None, origin=origins.get(name, "")))
    for name in preset_inputs:
        if name in idle:
            place = ("presets", presets.of_input(recipe, preset, name), name)
            found.append(_problem(recipe, name, place, key=True))
    return found


def _problem(
    recipe: Recipe,
    name: str,
    where: Where | None,
    *,
    key: bool = False,
    severity: str = "error",
    origin: str = "",
) -> Problem:
    message = f'the input "{name}" of {recipe.id} is never used'
    if origin:
        message += f" ({origin})"
    use = f"use {{{{ inputs.{name} }}}} in a step"
    if recipe.inputs[name].type == "secret":
        use = f"list it in `secrets: [{name}]`"
    fix = f"{use}, or remove the input"
    if where is None:
        return Problem("unread-input", message, None, fix, input=name)
    problem = recipe.document.problem(
        "unread-input", message, where, fix=fix, key=key, severity=severity
    )
    return problem._replace(input=name)


def _texts(tree: Any) -> Iterator[str]:
    """Yield every text with a template in a recipe."""
    if isinstance(tree, str):
        if has(tree):
            yield tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            if key not in _PROSE_KEYS:
                yield from _texts(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _texts(item)


def _inputs_read(leaf: str) -> set[str] | None:
    """Return the inputs that a text reads; None if it may read any input."""
    try:
        paths = [found.path for found in references(leaf) if found.path[0] == "inputs"]
    except TemplateError:
        # An invalid template is reported elsewhere, and its inputs count as used.
        return None if "inputs[" in leaf else set(re.findall(r"inputs\.(\w+)", leaf))
    if any(len(path) == 1 for path in paths):
        return None
    return {path[1] for path in paths}
