"""Several presets as one: `a,b` is what `a` says, and what `b` says where both say something."""

from __future__ import annotations

from .recipe import Preset, Recipe, Resources


def split(word: str | None) -> list[str]:
    """The names in a choice of presets."""
    return [name.strip() for name in word.split(",")] if word else []


def known(recipe: Recipe, word: str | None) -> str | None:
    """Those that a recipe has; None where it has none of them."""
    return ",".join(name for name in split(word) if name in recipe.presets) or None


def chosen(recipe: Recipe, word: str | None) -> Preset | None:
    """All presets of a choice that the recipe has, the later ones over the earlier; None where it has none of them."""
    parts = [recipe.presets[name] for name in split(known(recipe, word))]
    if len(parts) < 2:
        return parts[0] if parts else None
    resources = None
    for part in parts:
        if part.resources is not None:
            resources = part.resources.over(resources or Resources())
    return Preset(
        ",".join(part.name for part in parts),
        {name: value for part in parts for name, value in part.inputs.items()},
        resources,
        next((part.limits for part in reversed(parts) if part.limits), None),
        next((part.image for part in reversed(parts) if part.image), None),
        next((part.python for part in reversed(parts) if part.python), None),
        {name: value for part in parts for name, value in (part.env or {}).items()} or None,
    )


def of_input(recipe: Recipe, word: str | None, name: str) -> str:
    """Which preset of a choice gives an input its value; empty where none does."""
    return next(
        (
            each
            for each in reversed(split(word))
            if each in recipe.presets and name in recipe.presets[each].inputs
        ),
        "",
    )
