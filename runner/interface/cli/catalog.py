"""`recipe list`, `validate` and `schema`: list and check recipes, and print their JSON Schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

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


# -- list ------------------------------------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    known = [(entry.id, entry.summary, entry) for entry in library.entries()]
    here = [
        (f"./{entry.path.name}", entry.summary, entry)
        for entry in library.list_recipes(args.location.here)
    ]
    wrong = library.faults()
    if args.json:
        rows = [(e.id, n, s, e.origin or "library") for n, s, e in known] + [
            (e.id, n, s, "folder") for n, s, e in here
        ]
        print(
            json.dumps(
                [
                    {"recipe": id, "name": name, "summary": summary, "from": origin}
                    for id, name, summary, origin in rows
                ],
                indent=2,
            )
        )
    else:
        width = max((len(name) for name, *_ in [*known, *here]), default=0)
        groups = {"in this directory": here}
        for row in known:
            groups.setdefault(f"from {row[2].origin}" if row[2].origin else "library", []).append(
                row
            )
        for title, members in groups.items():
            if members:
                print(
                    "\n".join(
                        [
                            f"{title}:",
                            *(
                                f"  {safe_line(name):{width}}  {safe_line(summary)}".rstrip()
                                for name, summary, _ in members
                            ),
                            "",
                        ]
                    )
                )
        if not args.quiet:
            print(
                "Run `recipe show NAME` for the inputs of a recipe, `recipe new NAME` to create your own."
                if known or here
                else "no recipes; create one with `recipe new NAME`"
            )
    if wrong:
        raise Invalid(wrong)
    return 0


# -- validate --------------------------------------------------------------------------------------------------------------------------------------


def _validate(args: argparse.Namespace) -> int:
    from ...language.document import MAX_BYTES
    from ...survey import validation
    from ..diagnostics import render

    names, given = split_words(args.words)
    found: list[Problem] = []
    for name in dict.fromkeys(names or ["./recipe.yaml"]):
        mine: list[Problem]
        try:
            if name == "-":
                mine = validation.check_bytes(
                    sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>", args.workspace, given
                )
            else:
                meant = library.resolve(args.location, name if names else None)
                path = library.find(meant, args.workspace)
                mine = validation.check_file(
                    Path(beside(str(path))), args.workspace, given, own=is_path(meant)
                )
        except NotFound as error:
            mine = [Problem("not-found", str(error), fix=error.fix)]
        found += mine
        if (
            args.format == "text"
            and not args.quiet
            and not any(problem.severity == "error" for problem in mine)
        ):
            print(f"{name}: valid", file=sys.stderr)
    if args.quiet:
        found = [problem for problem in found if problem.severity == "error"]
    sys.stdout.write(render(found, args.format, color(sys.stdout)))
    return Invalid.exit_code if any(problem.severity == "error" for problem in found) else 0


# -- schema ----------------------------------------------------------------------------------------------------------------------------------------


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
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    return 0
