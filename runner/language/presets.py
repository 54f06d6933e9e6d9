"""Combine several presets: in `a,b`, the values of `b` take precedence."""

from __future__ import annotations

from .recipe import Preset, Recipe, Resources


def split(word: str | None) -> list[str]:
    """Split a preset list such as `a,b` to names."""
    if not word:
        return []
    return [name.strip() for name in word.split(",")]


def filter_known(recipe: Recipe, word: str | None) -> str | None:
    """Drop unknown presets from the list `word`. None if no preset remains."""
    return ",".join(preset.name for preset in _presets(recipe, word)) or None


def combine(recipe: Recipe, word: str | None) -> Preset | None:
    """Merge the presets listed in `word` into one, or return None if the recipe has none of them."""
    presets = _presets(recipe, word)
    if len(presets) < 2:
        return presets[0] if presets else None
    merged = presets[0]
    for preset in presets[1:]:
        merged = _merge(preset, merged)
    return merged


def _presets(recipe: Recipe, word: str | None) -> list[Preset]:
    """Return the recipe's presets listed in `word`."""
    return [recipe.presets[name] for name in split(word) if name in recipe.presets]


def _merge(preset: Preset, base: Preset) -> Preset:
    """Return a preset with missing values filled from `base`."""
    env = {**(base.env or {}), **(preset.env or {})}
    return Preset(
        name=f"{base.name},{preset.name}",
        inputs={**base.inputs, **preset.inputs},
        resources=_merge_resources(preset.resources, base.resources),
        limits=preset.limits or base.limits,
        image=preset.image or base.image,
        python=preset.python or base.python,
        env=env or None,
    )


def _merge_resources(resources: Resources | None, base: Resources | None) -> Resources | None:
    if resources is None:
        return base
    return resources.over(base or Resources())


def of_input(recipe: Recipe, word: str | None, name: str) -> str:
    """Return the last preset in `word` that sets an input, or ""."""
    for preset in reversed(_presets(recipe, word)):
        if name in preset.inputs:
            return preset.name
    return ""
