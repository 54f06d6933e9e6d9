"""`recipe list`, `validate` and `schema`: list and check recipes, and print their JSON Schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import Invalid, NotFound, Problem
from ...language import library
from ...paths import TAGS, beside, is_path, temporary_name
from ..tail import safe_line
from .flags import JSON_HELP, color, split_words

SCHEMA = Path(".recipe", "recipe.schema.json")
"""Path of the JSON Schema for editors, relative to the workspace."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "list":
        parser.add_argument("--json", action="store_true", help=JSON_HELP)
    elif verb == "validate":
        parser.add_argument(
            "words",
            nargs="*",
            metavar="FILE|NAME|INPUT=VALUE",
            help="Recipes (default: recipe.yaml), `-` for standard input, and input values to try",
        )
        parser.add_argument(
            "--format",
            default="text",
            choices=["text", "json", "github", "sarif"],
            help="Output format: text, json, or github and sarif for CI (default: text)",
        )
    elif verb == "schema":
        parser.add_argument(
            "--markdown",
            action="store_true",
            help="Print the language reference as Markdown instead",
        )
        parser.add_argument(
            "--write",
            action="store_true",
            help="Write the schema to .recipe/recipe.schema.json, where new recipes refer to it",
        )


def run(args: argparse.Namespace) -> int:
    verbs = {"list": _list, "validate": _validate, "schema": _schema}
    return verbs[args.verb](args)


# -- list ------------------------------------------------------------------------------------------


class _ListedRecipe(NamedTuple):
    """A recipe of `recipe list`, with the name to type and the title of its group."""

    name: str
    entry: library.LibraryEntry
    origin: str
    title: str


def _list(args: argparse.Namespace) -> int:
    known = [_listed_from_library(entry) for entry in library.entries()]
    here = [_listed_from_folder(entry) for entry in library.list_recipes(args.location.here)]
    faults = library.faults()
    if args.json:
        print(json.dumps([_listed_as_json(row) for row in [*known, *here]], indent=2))
    else:
        _print_groups([*here, *known])
        if not args.quiet:
            hint = "no recipes; create one with `recipe new NAME`"
            if known or here:
                hint = "Run `recipe show NAME` for the inputs of a recipe, `recipe new NAME` to create your own."
            print(hint)
    if faults:
        raise Invalid(faults)
    return 0


def _listed_from_library(entry: library.LibraryEntry) -> _ListedRecipe:
    """Return a recipe of the library or of an installed package."""
    title = f"from {entry.origin}" if entry.origin else "library"
    return _ListedRecipe(entry.id, entry, entry.origin or "library", title)


def _listed_from_folder(entry: library.LibraryEntry) -> _ListedRecipe:
    return _ListedRecipe(f"./{entry.path.name}", entry, "folder", "in this directory")


def _listed_as_json(row: _ListedRecipe) -> dict[str, str]:
    return {
        "recipe": row.entry.id,
        "name": row.name,
        "summary": row.entry.summary,
        "from": row.origin,
    }


def _print_groups(rows: Sequence[_ListedRecipe]) -> None:
    """Print the names and summaries of recipes, grouped by their titles."""
    width = max((len(row.name) for row in rows), default=0)
    groups: dict[str, list[_ListedRecipe]] = {}
    for row in rows:
        groups.setdefault(row.title, []).append(row)
    for title, members in groups.items():
        print(f"{title}:")
        for row in members:
            print(f"  {safe_line(row.name):{width}}  {safe_line(row.entry.summary)}".rstrip())
        print()


# -- validate --------------------------------------------------------------------------------------


def _validate(args: argparse.Namespace) -> int:
    from ...language.document import MAX_BYTES
    from ...survey import validation
    from ..diagnostics import render

    names, given = split_words(args.words)
    reports_valid = args.format == "text" and not args.quiet
    found: list[Problem] = []
    for name in dict.fromkeys(names or ["./recipe.yaml"]):
        mine: list[Problem]
        try:
            if name == "-":
                mine = validation.check_bytes(
                    sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>", args.workspace, given
                )
            else:
                word = name if names else None
                meant = library.resolve(args.location, word)
                path = library.find(meant, args.workspace)
                mine = validation.check_file(
                    Path(beside(str(path))), args.workspace, given, own=is_path(meant)
                )
        except NotFound as error:
            mine = [Problem("not-found", str(error), fix=error.fix)]
        found += mine
        if reports_valid and not _errors_in(mine):
            print(f"{name}: valid", file=sys.stderr)
    errors = _errors_in(found)
    shown = errors if args.quiet else found
    sys.stdout.write(render(shown, args.format, color(sys.stdout)))
    return Invalid.exit_code if errors else 0


def _errors_in(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems that make a recipe invalid, without warnings."""
    return [problem for problem in problems if problem.severity == "error"]


# -- schema ----------------------------------------------------------------------------------------


def write_schema(workspace: Path) -> Path:
    """Write the JSON Schema for editors into `.recipe`, which git ignores, and return its path.

    Raises OSError.
    """
    target = workspace / SCHEMA
    target.parent.mkdir(exist_ok=True)
    for name, text in {**TAGS, target.name: library.schema_text()}.items():
        path = target.parent / name
        new = path.with_name(temporary_name(path.name))
        new.write_text(text, "utf-8")
        new.replace(path)
    return target


def _schema(args: argparse.Namespace) -> int:
    if args.write:
        print(os.path.relpath(write_schema(args.workspace), args.location.here))
        return 0
    text = library.schema_text()
    if args.markdown:
        from ...language.reference import markdown

        text = markdown(json.loads(text))
    if not text.endswith("\n"):
        text += "\n"
    sys.stdout.write(text)
    return 0
