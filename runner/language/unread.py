"""Inputs that nothing in a recipe reads: a value of one would change nothing, in silence."""

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

_WORDS = frozenset({"doc", "summary"})
"""Keys whose text is for people."""


def unread(recipe: Recipe) -> list[str]:
    """The inputs that no template, no `secret`, no `secrets` and no `retries` of a recipe names."""
    names = set(recipe.inputs)
    names -= {spec.secret for spec in recipe.inputs.values() if spec.secret}
    names -= set(recipe.secrets)
    for step in recipe.steps.values():
        names -= {*(step.secrets or ()), *step.oom}
    if not names:
        return []
    for leaf in _texts(recipe.document.value):
        found = _named(leaf)
        if found is None:
            return []
        names -= found
        if not names:
            return []
    return [name for name in recipe.inputs if name in names]


def warnings(recipe: Recipe) -> Iterator[Problem]:
    """A warning for each input that nothing reads."""
    for name in unread(recipe):
        yield _problem(recipe, name, ("inputs", name), key=True, severity="warning")


def refused(
    recipe: Recipe,
    given: Iterable[str],
    preset: str | None,
    origins: Mapping[str, str] = NOWHERE,
) -> list[Problem]:
    """What is wrong with values for inputs that nothing reads: those given, and those of presets."""
    named = {name: name.partition(".")[0] for name in given}
    chosen = presets.chosen(recipe, preset)
    if not named and (chosen is None or not chosen.inputs):
        return []
    found = []
    idle = set(unread(recipe))
    for name, whole in named.items():
        if whole in idle:
            found.append(_problem(recipe, whole, None, origin=origins.get(name, "")))
    for name in chosen.inputs if chosen is not None else ():
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
    message = f'nothing in {recipe.id} reads the input "{name}"' + (
        f" ({origin})" if origin else ""
    )
    spec = recipe.inputs[name]
    use = (
        f"list it in `secrets: [{name}]`"
        if spec.type == "secret"
        else f"write {{{{ inputs.{name} }}}}"
    )
    fix = f"{use} where it is meant, or take it out"
    if where is None:
        return Problem("unread-input", message, None, fix)
    return recipe.document.problem(
        "unread-input", message, where, fix=fix, key=key, severity=severity
    )


def _texts(tree: Any) -> Iterator[str]:
    """Every text in a recipe that has a template."""
    if isinstance(tree, str):
        if has(tree):
            yield tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            if key not in _WORDS:
                yield from _texts(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _texts(item)


def _named(leaf: str) -> set[str] | None:
    """The inputs that a text reads; None where it may read any."""
    try:
        found = [ref.path for ref in references(leaf) if ref.path[0] == "inputs"]
    except TemplateError:  # reported elsewhere; what it names was meant to be read
        return set(re.findall(r"inputs\.(\w+)", leaf)) if "inputs[" not in leaf else None
    if any(len(path) == 1 for path in found):
        return None
    return {path[1] for path in found}
