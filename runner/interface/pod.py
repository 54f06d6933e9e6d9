"""Read recipe inputs from the environment variables of a platform's pod.

A pod is recognised by `JOB_ID`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..language.recipe import Recipe

JOB: Final = "JOB_ID"
"""The environment variable that identifies a pod."""
MODEL: Final = ("model",)
DATASET: Final = ("dataset", "file")
_TAKEN: Final[Mapping[str, tuple[str, ...]]] = {"MODEL_NAME": MODEL, "DATASET_URL": DATASET}
_REPOSITORY: Final = ("HF_REPO_NAME", "push_to")


def first_input(recipe: Recipe, kinds: tuple[str, ...]) -> str | None:
    """Return the name of the first input with a type in `kinds`; None without such an input.

    Earlier types take precedence.
    """
    for kind in kinds:
        for spec in recipe.inputs.values():
            if spec.type == kind:
                return spec.name
    return None


def inputs(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the recipe inputs that a pod's environment sets; empty outside a pod."""
    if not environ.get(JOB):
        return {}
    found: dict[str, str] = {}
    for variable, kinds in _TAKEN.items():
        name = first_input(recipe, kinds)
        if name and environ.get(variable):
            found[name] = environ[variable]
    variable, name = _REPOSITORY
    if name in recipe.inputs and environ.get(variable):
        found[name] = environ[variable]
    return found
