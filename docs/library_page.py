"""Write the datasheets of the library as one page of Markdown, from its recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from runner.interface.cli.show import data, describe_locks
from runner.interface.datasheet import (
    BARE,
    Sheet,
    choices,
    input_text,
    locks,
    machine_text,
    output_path,
    preset_text,
    results,
)
from runner.language import library, parse
from runner.language.recipe import Input, Preset, Recipe

BEGIN: Final = "<!-- library:begin -->"
END: Final = "<!-- library:end -->"
_SHARED: Final = "In several recipes"
_GOT: Final = "output"
_GIVEN: Final = "input"
_USED: Final = "Used"
_PLURAL: Final = {_GOT: "outputs", "preset": "presets", _GIVEN: "inputs"}

_Row = tuple[str, str, str]
"""A name, what it is, and more about it."""


def markdown(sheet: Sheet, shared: Collection[_Row]) -> list[str]:
    """A section of a page that shows several: what a reader chooses by.  Of outputs and inputs that are `shared`, the names."""
    recipe = sheet.recipe
    lines = [f"## {recipe.id}", "", f"**{_cell(recipe.summary)}.**"]
    if recipe.doc:
        lines += ["", *recipe.doc.rstrip().splitlines()]
    presets = [
        (name or BARE, machine_text(recipe, preset), _chosen(preset))
        for name, preset in choices(recipe)
    ]
    for title, rows in ((_GOT, _outputs(recipe)), ("preset", presets), (_GIVEN, _inputs(recipe))):
        lines += ["", *_table(title, (row for row in rows if row not in shared))]
        if names := [f"`{row[0]}`" for row in rows if row in shared]:
            lines += [
                "",
                f"This recipe also has {_PLURAL[title]} from the section "
                f"[In several recipes](#{_SHARED.lower().replace(' ', '-')}): {' '.join(names)}",
            ]
    used = [*locks(recipe), *(data.folder for data in sheet.data)]
    lines += ["", f"This recipe has the steps {' '.join(f'`{id}`' for id in recipe.steps)}."]
    return (
        [
            *lines,
            "",
            f"This recipe uses {' and '.join(f'`{each}`' for each in used)}. See [packages and licences](#{_USED.lower()}).",
        ]
        if used
        else lines
    )


def _table(title: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [
        f"| `{_cell(name)}` | {'<br>'.join(_cell(text) for text in (head, *more) if text)} |"
        for name, head, *more in rows
    ]
    return [f"| {title} | |", "|---|---|", *lines] if lines else []


def _outputs(recipe: Recipe) -> list[_Row]:
    rows: list[_Row] = []
    for name, step, output in results(recipe):
        when = recipe.steps[step].when if step in recipe.steps else None
        head = (output_path(output) if output else step) + (
            f", when {' '.join(str(when).strip('{} ').split())}" if when is not None else ""
        )
        rows.append((name, head, output.doc if output else ""))
    return rows


def _chosen(preset: Preset | None) -> str:
    """What a preset sets; of one for a try nothing, since its values say nothing of yours."""
    return (
        preset_text(preset)
        if preset is not None and preset.inputs and preset.name != "smoke"
        else ""
    )


def _inputs(recipe: Recipe) -> list[_Row]:
    return [(spec.name, _briefly(spec), spec.doc) for spec in recipe.inputs.values()]


def _briefly(spec: Input) -> str:
    """Its type, default and choices; `recipe show` has its bounds."""
    head, *_ = input_text(spec).split("; ")
    if (
        spec.has_default
        and isinstance(spec.default, str)
        and "{{" in spec.default
        and len(spec.default) > 40
    ):
        head = f"{spec.type}, by default from other inputs"
    among = spec.limits.get("choices")
    notes = [
        " | ".join(map(str, among)) if isinstance(among, list) else "",
        "raising it continues training" if spec.continues else "",
    ]
    return "; ".join([head, *(note for note in notes if note)])


def sheets() -> list[Sheet]:
    """The datasheet of every recipe that is ours, without what any run took."""
    recipes = [parse.load(entry.path) for entry in library.entries() if not entry.origin]
    return [Sheet(recipe, {}, data(recipe), describe_locks(recipe)) for recipe in recipes]


def refreshed(page: str, sheets: Sequence[Sheet]) -> str:
    """`page` with what stands between its markers written anew: a table of the recipes, the inputs of several of them, and a section for each."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    recipes = [sheet.recipe for sheet in sheets]
    lines = [
        "| recipe | purpose |",
        "|---|---|",
        *(
            f"| [{each.id}](#{each.id.replace('@', '')}) | {_cell(each.summary)} |"
            for each in recipes
        ),
    ]
    lines += [
        "",
        f"## {_SHARED}",
        "",
        "This section explains outputs and inputs that several recipes have. "
        "If a recipe has a different default or meaning, the recipe's own section explains it.",
        "",
    ]
    shared: set[_Row] = set()
    for title, rows_of in ((_GOT, _outputs), (_GIVEN, _inputs)):
        having = Counter(row for each in recipes for row in rows_of(each))
        common = {
            row[0]: row
            for row, count in sorted(having.items(), key=lambda item: (item[1], item[0]))
            if count > 1
        }
        lines += [*_table(title, sorted(common.values())), ""]
        shared |= {*common.values()}
    for sheet in sheets:
        lines += [*markdown(sheet, shared), ""]
    found = {each for sheet in sheets for each in sheet.locks.items()}
    found |= {(data.folder, data.licence) for sheet in sheets for data in sheet.data}
    lines += [
        f"## {_USED}",
        "",
        "This section lists the main packages in the lock files of the recipes, and the licences of the included datasets.",
        "",
        *_table("lock file or dataset", sorted(found)),
    ]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
