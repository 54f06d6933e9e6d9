"""`recipe show`: print a recipe's inputs, outputs and typical duration, or the state of a run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import Invalid, Problem, RecipeError
from ...language import library
from ...paths import is_path
from ...reading import whole
from ..tables import align
from ..tail import safe_line
from .flags import JSON_HELP, RECIPE, RUN, add_values, split_words, values_of

if TYPE_CHECKING:
    from ...advice.estimates import StepEstimate
    from ...language.recipe import Input, Preset, Recipe
    from ...language.values import Tree
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace
    from ..datasheet import Data, RunDurations

_LICENCES: Final = {
    "SIL OPEN FONT LICENSE Version 1.1": "SIL Open Font License 1.1",
    "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2": "Python Software Foundation License 2",
    "Apache License": "Apache License 2.0",
    "Creative Commons": "Creative Commons",
    "MIT License": "MIT License",
}
_PACKAGES: Final = (
    "torch",
    "transformers",
    "diffusers",
    "accelerate",
    "peft",
    "trl",
    "axolotl",
    "unsloth",
    "prime-rl",
    "vllm",
)
_LISTED: Final = 500  # maximum number of runs to read
_LOOKED_AT: Final = 50  # maximum number of complete runs among them to measure
_LONGEST: Final = 70  # maximum number of characters of a value


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        help=f"{RECIPE}; or a run: its ID, `last` or `last~1`",
        metavar="RECIPE|RUN",
    )
    parser.add_argument(
        "words", nargs="*", metavar="INPUT=VALUE", help="Input values, with --values"
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="Show the value of each input and its source",
    )
    add_values(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "Examples:\n  recipe show sft@1\n  recipe show last\n"
        "  recipe show ./pipeline.yaml --json\n  recipe show sft@1 -i params.yaml --values rank=4"
    )


def run(args: argparse.Namespace) -> int:
    from ...language import parse
    from ...survey.recipes import place_recipe
    from .. import datasheet

    if args.server:
        return _run(args, args.recipe or "last")
    word, typed = _recipe_and_inputs(args)
    if word is not None and _names_run(word, args):
        return _run(args, word)
    meant = library.resolve(args.location, word)
    path = library.find(meant, args.workspace)
    recipe = parse.load(path)
    if args.values or _gives_inputs(args, typed):
        return _values(recipe, args, typed)
    if is_path(meant):
        recipe = place_recipe(recipe, path, args.workspace)
    sheet = datasheet.Sheet(
        recipe,
        took(args.workspace, recipe.id),
        data(recipe),
        describe_locks(recipe),
        estimate_presets(args.workspace, recipe),
    )
    if args.json:
        print(json.dumps(datasheet.describe_sheet(sheet), indent=2))
    else:
        print("\n".join(safe_line(line) for line in datasheet.text(sheet, _width())))
    return 0


def _recipe_and_inputs(args: argparse.Namespace) -> tuple[str | None, dict[str, str]]:
    """Return the word for the recipe or run, None without one, and the input values.

    Raises Invalid for further words.
    """
    first = [args.recipe] if args.recipe is not None else []
    names, typed = split_words([*first, *args.words])
    if len(names) > 1:
        fix = "write inputs as name=value"
        raise Invalid(
            [Problem("bad-input", f'"{name}" is not INPUT=VALUE', fix=fix) for name in names[1:]]
        )
    return next(iter(names), None), typed


def _gives_inputs(args: argparse.Namespace, typed: Mapping[str, str]) -> bool:
    return bool(typed or args.parts or args.values_files) or args.preset is not None


def _names_run(word: str, args: argparse.Namespace) -> bool:
    """Return True for the ID of a run, unless a recipe file has this name."""
    if not re.fullmatch(RUN, word):
        return False
    return not os.path.lexists(args.location.here / f"{word}.yaml")


def _width() -> int:
    """Return the width of the datasheet. Longer lines are hard to read. A pipe has no width."""
    if not sys.stdout.isatty():
        return 80
    return min(100, max(40, shutil.get_terminal_size((80, 24)).columns))


def _run(args: argparse.Namespace, word: str) -> int:
    """Print the state of a run from the workspace, a database or a server."""
    from . import one_run
    from .transports import transport_for_changes

    with closing(transport_for_changes(args)) as transport:
        return one_run.print_run(transport.run(transport.find(word)), args)


def _values(recipe: Recipe, args: argparse.Namespace, typed: Mapping[str, str]) -> int:
    """Print the value of each input and its source.

    Raises Invalid if inputs have no valid value.
    """
    from ...language import inputs

    given, origins = values_of(args, typed)
    values, problems = inputs.try_bind(recipe, given, preset=args.preset, origins=origins)
    whence = inputs.provenance(recipe, given, preset=args.preset, origins=origins)
    if args.json:
        facts = {name: {"value": values.get(name), "from": where} for name, where in whence.items()}
        print(json.dumps(facts, indent=2))
    else:
        table = [["INPUT", "VALUE", "FROM"]]
        for name, where in whence.items():
            if name in values:
                table.append([name, _show_value(values[name]), where])
            else:
                table.append([name, "?", "nowhere"])
        print("\n".join(align(table, ())))
    if problems:
        raise Invalid(problems)
    return 0


def _show_value(value: Tree) -> str:
    """Format a value as YAML, which quotes text that looks like a number; shorten long values."""
    from ...language.yaml_text import scalar

    text = scalar(value)
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 1] + "…"
    return safe_line(text)


def took(root: Path, recipe: str) -> dict[str | None, RunDurations]:
    """Return durations and peak memory of complete runs by preset, without runs with cached steps."""
    from ...survey.results import peak_memory
    from ..datasheet import RunDurations
    from .targets import open_for_reading

    seconds: dict[str | None, list[float]] = {}
    memory: dict[str | None, int] = {}
    try:
        with open_for_reading(root) as ws:
            for row in reversed(_list_full_runs(ws, recipe)):
                asked = row.data.get("asked")
                if row.ended is None or not isinstance(asked, dict):
                    continue
                preset = asked.get("preset")
                seconds.setdefault(preset, []).append(row.ended - row.created)
                peak = peak_memory(ws.store.runs.attempts(row.id))
                memory[preset] = max(memory.get(preset, 0), peak or 0)
    except (RecipeError, OSError):
        return {}  # the recipe is shown even if the store cannot be read
    return {preset: RunDurations(tuple(times), memory[preset]) for preset, times in seconds.items()}


def _list_full_runs(ws: Workspace, recipe: str) -> list[RunRow]:
    """Return the last complete runs of a recipe that executed all their steps, newest first."""
    rows = ws.store.runs.latest(recipe=recipe, last=_LISTED)
    complete = [row for row in rows if row.state == "COMPLETED" and row.data.get("fresh") == 0]
    newest = complete[:_LOOKED_AT]
    tallies = ws.store.runs.tallies([row.id for row in newest])
    found = []
    for row in newest:
        # A complete run may have failed steps, if the recipe allows them to fail.
        states = {state for state, _ in tallies[row.id]}
        if states <= {"DONE", "SKIPPED"}:
            found.append(row)
    return found


def estimate_presets(root: Path, recipe: Recipe) -> dict[str | None, list[str]]:
    """Estimate memory and time of the training on the GPUs of each preset (None: without preset).

    Presets without GPUs, without the required inputs, or without an estimate are left out.
    """
    from ...advice.estimates import estimate_values, find_gpus
    from ...language import inputs
    from ...storage.workspace import Workspace
    from .. import datasheet

    found: dict[str | None, list[str]] = {}
    for name, preset in datasheet.choices(recipe):
        wants = datasheet.machine(recipe, preset)
        missing = _missing_inputs(recipe, preset)
        if wants.gpus == 0 or any(spec.type not in _STAND_INS for spec in missing):
            continue
        # Any path will do for the data: the estimate does not depend on the path.
        stand_ins = {spec.name: "./data" for spec in missing if spec.type != "secret"}
        try:
            values = inputs.bind(recipe, stand_ins, preset=name)
            with Workspace.open(root, read_only=True) as ws:
                kinds = [
                    estimate_values(ws, recipe.id, values, gpu, wants.gpus or 1)
                    for gpu in find_gpus(wants.gpu, wants.gpu_memory)
                ]
        except (RecipeError, OSError):
            continue  # `recipe validate` and `recipe plan` report the error
        lines = [each.brief for each in kinds if _is_known(each)]
        if lines:
            found[name] = lines
    return found


_STAND_INS: Final = ("file", "dataset", "secret")
"""Types of inputs whose values an estimate does not depend on."""


def _missing_inputs(recipe: Recipe, preset: Preset | None) -> list[Input]:
    """Return the required inputs that neither a default nor the preset sets."""
    set_there = {} if preset is None else preset.inputs
    missing = []
    for spec in recipe.inputs.values():
        is_set = spec.has_default or spec.name in set_there
        if spec.required and not is_set:
            missing.append(spec)
    return missing


def _is_known(estimate: StepEstimate) -> bool:
    return estimate.found is not None or estimate.seconds is not None


def data(recipe: Recipe) -> list[Data]:
    """Return the bundled datasets in the recipe's presets and input defaults, with their licenses."""
    from ..datasheet import Data, fixtures

    found = {}
    for path in fixtures(recipe):
        folder = library.fixtures() / path
        if not folder.is_dir():
            folder = folder.parent
        name = folder.relative_to(library.fixtures()).as_posix()
        if name == "." or name in found:
            continue
        for paper in ("LICENSE", "README.md"):
            if (folder / paper).is_file():
                licence = _licence_of((folder / paper).read_text("utf-8", "replace"))
                found[name] = Data(f"fixtures/{name}", f"{licence}, in {paper}")
                break
    return list(found.values())


def _licence_of(text: str) -> str:
    """Return the name of the licence whose words the text has."""
    text = text.lower()
    for words, name in _LICENCES.items():
        if words.lower() in text:
            return name
    return "its own"


def describe_locks(recipe: Recipe) -> dict[str, str]:
    """Summarize each lock file: versions of the main training packages, and the package count."""
    from ..datasheet import locks

    found = {}
    for name in locks(recipe):
        try:
            text = whole(Path(recipe.home or os.path.dirname(recipe.document.name), name)).decode(
                "utf-8"
            )
        except (OSError, UnicodeDecodeError):
            continue  # `recipe plan` reports the error
        pins = dict(re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\\\]+)", text, re.MULTILINE))
        if pins:
            main = [f"{package} {pins[package]}" for package in _PACKAGES if package in pins]
            found[name] = ", ".join([*main, f"{len(pins)} packages in all"])
    return found
