"""The environment of a platform's pod, where JOB_ID is set: it gives the inputs of a recipe that the command line does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..language.recipe import Recipe

JOB: Final = "JOB_ID"
"""What marks a pod."""
MODEL: Final = ("model",)
DATASET: Final = ("dataset", "file")
_TAKEN: Final[Mapping[str, tuple[str, ...]]] = {"MODEL_NAME": MODEL, "DATASET_URL": DATASET}
_REPOSITORY: Final = ("HF_REPO_NAME", "push_to")


def first_input(recipe: Recipe, kinds: tuple[str, ...]) -> str | None:
    """The first input of a recipe of the first of these types that it has one of."""
    return next(
        (spec.name for kind in kinds for spec in recipe.inputs.values() if spec.type == kind), None
    )


def inputs(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """What a pod's environment says of the inputs of a recipe; empty where this is no pod."""
    if not environ.get(JOB):
        return {}
    found = {
        name: environ[variable]
        for variable, kinds in _TAKEN.items()
        if environ.get(variable) and (name := first_input(recipe, kinds))
    }
    variable, name = _REPOSITORY
    return found | (
        {name: environ[variable]} if environ.get(variable) and name in recipe.inputs else {}
    )
