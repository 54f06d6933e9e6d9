"""Write which input of each library recipe a name of Hugging Face is, as a table of Markdown."""

from __future__ import annotations

from typing import Final

from runner.language import library, parse
from runner.language.recipe import Recipe
from runner.server.hugging_face import ACCUMULATED, NAMES, NO_COUNTERPART, input_of

BEGIN: Final = "<!-- hugging-face:begin -->"
END: Final = "<!-- hugging-face:end -->"


def recipes() -> list[Recipe]:
    """The newest version of each recipe of the library that trains."""
    found: dict[str, Recipe] = {}
    for entry in library.entries():
        recipe = parse.load(entry.path)
        if not entry.origin and "max_steps" in recipe.inputs:
            found.setdefault(entry.name, recipe)
    return list(found.values())


def refreshed(text: str) -> str:
    """Return `text` with the table between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    known = recipes()
    lines = ["| name | input | recipes |", "|---|---|---|"]
    for name, meant in NAMES.items():
        taking = [recipe.id for recipe in known if input_of(recipe, name)]
        words = f"`{meant.input}`" + (f"; {meant.words}" if meant.words else "")
        lines.append(f"| `{name}` | {words} | {_named(taking, known)} |")
    taking = [recipe.id for recipe in known if "global_batch" in recipe.inputs]
    lines.append(
        f"| `{ACCUMULATED}` | `global_batch` = this value × batch size per device × number of GPUs | {_named(taking, known)} |"
    )
    lines.append(
        "| `logging_steps` | interval of metric reports: the platform gets the metrics of every Nth step, and of the last | all |"
    )
    ignored = " ".join(f"`{name}`" for name in NO_COUNTERPART)
    lines += ["", f"recipe has no inputs for these names, and ignores them: {ignored}."]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{rest.partition(END)[2]}"])


def _named(taking: list[str], known: list[Recipe]) -> str:
    """The recipes by their names, the shorter way."""
    others = [recipe.id for recipe in known if recipe.id not in taking]
    if not others:
        return "all"
    names = ", ".join(id.partition("@")[0] for id in min(taking, others, key=len))
    return f"all but {names}" if len(others) < len(taking) else names
