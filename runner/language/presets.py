"""Combine several presets: in `a,b`, the values of `b` take precedence."""

from __future__ import annotations

from .recipe import Preset, Recipe, Resources


def split(word: str | None) -> list[str]:
    """Return the preset names in `a,b`."""
    return [name.strip() for name in word.split(",")] if word else []


def filter_known(recipe: Recipe, word: str | None) -> str | None:
    """Return `word` without presets that the recipe lacks; None if none is left."""
    return ",".join(preset.name for preset in _presets(recipe, word)) or None


def combine(recipe: Recipe, word: str | None) -> Preset | None:
    """Return the presets in `word` as one preset; None if the recipe has none of them."""
    presets = _presets(recipe, word)
    if len(presets) < 2:
        return presets[0] if presets else None
    merged = presets[0]
    for preset in presets[1:]:
        merged = _merge(preset, merged)
    return merged


def _presets(recipe: Recipe, word: str | None) -> list[Preset]:
    """Return the existing presets among the names in `word`."""
    return [recipe.presets[name] for name in split(word) if name in recipe.presets]


def _merge(preset: Preset, base: Preset) -> Preset:
    """Return a preset with missing values filled from `base`."""
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
    """Return the preset in `word` that sets an input; empty if none does."""
    for preset in reversed(_presets(recipe, word)):
        if name in preset.inputs:
            return preset.name
    return ""
