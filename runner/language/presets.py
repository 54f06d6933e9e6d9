"""Several presets as one: in `a,b` the values of `b` win over those of `a`."""

from __future__ import annotations

from .recipe import Preset, Recipe, Resources


def split(word: str | None) -> list[str]:
    """Return the names in a choice of presets."""
    return [name.strip() for name in word.split(",")] if word else []


def known(recipe: Recipe, word: str | None) -> str | None:
    """Return the part of a choice that a recipe has; None if it has none of it."""
    return ",".join(preset.name for preset in _presets(recipe, word)) or None


def chosen(recipe: Recipe, word: str | None) -> Preset | None:
    """Return the presets of a choice as one, later over earlier; None if the recipe has none."""
    presets = _presets(recipe, word)
    if len(presets) < 2:
        return presets[0] if presets else None
    merged = presets[0]
    for preset in presets[1:]:
        merged = _merge(preset, merged)
    return merged


def _presets(recipe: Recipe, word: str | None) -> list[Preset]:
    """Return the presets of a choice that a recipe has."""
    return [recipe.presets[name] for name in split(word) if name in recipe.presets]


def _merge(preset: Preset, base: Preset) -> Preset:
    """Return a preset, and `base` for what the preset does not say."""
    return Preset(
        name=f"{base.name},{preset.name}",
        inputs={**base.inputs, **preset.inputs},
        resources=_merge_resources(preset.resources, base.resources),
        limits=preset.limits or base.limits,
        image=preset.image or base.image,
        python=preset.python or base.python,
        env={**(base.env or {}), **(preset.env or {})} or None,
    )


def _merge_resources(resources: Resources | None, base: Resources | None) -> Resources | None:
    if resources is None:
        return base
    return resources.over(base or Resources())


def of_input(recipe: Recipe, word: str | None, name: str) -> str:
    """Return the preset of a choice that gives an input its value; empty if none does."""
    for preset in reversed(_presets(recipe, word)):
        if name in preset.inputs:
            return preset.name
    return ""
