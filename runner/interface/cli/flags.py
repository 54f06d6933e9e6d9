"""Flags and help texts shared by several commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ... import settings
from ...errors import Invalid, NotFound, Problem, RecipeError, did_you_mean
from ...settings import ANY
from ..pairs import parse_pairs

RECIPE: Final = "Library recipe such as sft@1, NAME for ./NAME.yaml, or a path such as ./pipeline.yaml (default: recipe.yaml)"
"""Help text of RECIPE arguments."""

RUN: Final = r"last(~[0-9]+)?|[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"
"""Regular expression of run IDs, `last` and `last~N`, which are never recipe names."""


REQUEST: Final = "Recipe and inputs"
STEPS: Final = "Step selection"
EXECUTION: Final = "Execution"
WHERE: Final = "Where to run"
COST: Final = "Cost and rentals"
RESULTS: Final = "Results"
OUTPUT: Final = "Output"
GLOBAL: Final = "Global options"
SECTIONS: Final = (REQUEST, STEPS, EXECUTION, WHERE, COST, RESULTS, OUTPUT, GLOBAL)
"""Titles of the flag groups in help, in order."""

RUN_HELP: Final = "Run ID or a unique part of it, a run name, `last` or `last~1`"
"""Help text of RUN arguments."""
JSON_HELP: Final = "Print JSON"
EVENTS_HELP: Final = "Print one JSON event per line"


def section(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the parser's argument group `title`; create the group if missing."""
    for group in parser._action_groups:
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def hide(parser: argparse.ArgumentParser, *names: str) -> None:
    """Remove flags, given by their argparse names, from the help of a command that ignores or
    refuses the flags.
    """
    for action in parser._actions:
        if action.dest in names:
            action.help = argparse.SUPPRESS


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse_label(text: str) -> tuple[str, str]:
    """Return the name and value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f'"{text}" is not NAME=VALUE')
    return name, value


def add_request(
    parser: argparse.ArgumentParser, *, also_updates: str = "", all_drivers: bool = False
) -> None:
    """Add the recipe, its inputs, and the flags for the driver, hosts, outputs and store.

    `also_updates` is appended to the help of `--update`. With `all_drivers`, the verb asks all
    providers by default.
    """
    from ...storage.workspace import results_place

    request = section(parser, REQUEST)
    request.add_argument("recipe", nargs="?", metavar="RECIPE", help=RECIPE)
    request.add_argument("inputs", nargs="*", metavar="INPUT=VALUE", help="Input values")
    request.add_argument(
        "-f", "--file", metavar="FILE", help="Path of the recipe file, instead of RECIPE"
    )
    add_values(parser)
    request.add_argument(
        "--update",
        action="store_true",
        help=f"Resolve branches, tags and URLs of inputs again, and update recipe.lock{also_updates}",
    )
    section(parser, EXECUTION).add_argument(
        "--python",
        default="",
        metavar="PYTHON",
        help="Python for steps without a lock file: a path, a virtual environment or a command (default: "
        ".venv, $VIRTUAL_ENV, python3 on PATH). `current` uses the Python environment of recipe itself "
        "and ignores locks and images",
    )
    where = section(parser, WHERE)
    driver, default = "local", "local"
    if all_drivers:
        driver, default = "all", "all providers with credentials"
    where.add_argument(
        "--driver",
        default=driver,
        metavar="NAME",
        help="Driver for the run, or any:NAME,NAME for the cheapest of several drivers (default: "
        f"{default})",
    )
    where.add_argument(
        "--host",
        dest="hosts",
        metavar="HOST",
        action="append",
        default=[],
        help="Server for --driver ssh, as USER@NAME:PORT; overrides the hosts in recipe.toml",
    )
    results = section(parser, RESULTS)
    results.add_argument(
        "--out",
        type=results_place,
        metavar="PLACE",
        help="Place for the published outputs: a directory, or an s3://, gs:// or hf:// address",
    )
    results.add_argument(
        "--store",
        metavar="NAME",
        help="Shared store, by its name in recipe.toml or its URL; `none` uses no store",
    )


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a stack and filter offers."""
    section(parser, WHERE).add_argument(
        "--stack",
        default="",
        metavar="NAME",
        help="Use the driver, filters and limits of [stacks.NAME] in recipe.toml; other flags override these settings",
    )
    section(parser, COST).add_argument(
        "--where",
        action="append",
        default=[],
        metavar="K=V",
        help="Filter offers, for example gpu=4090 or max_price=0.5; keys: gpu gpu_memory regions reliability inet cuda max_price …",
    )


def recipe_and_values(args: argparse.Namespace) -> tuple[str, dict[str, object], dict[str, str]]:
    """Return the recipe, the input values, and the file of each value that comes from a file.

    Raises NotFound, Invalid.
    """
    from ...language import library

    words, name = list(args.inputs), args.recipe
    # argparse takes the first word for the recipe, even if that is an input value.
    if name is not None:
        is_value = args.file is not None or _is_input_value(name)
        if is_value:
            words.insert(0, name)
            name = None
    if args.file is not None:
        recipe = library.resolve_path(args.location, args.file)
    else:
        recipe = library.resolve(args.location, name)
    return recipe, *values_of(args, parse_pairs(words))


def _is_input_value(word: str) -> bool:
    """Return True for INPUT=VALUE; False for a path such as `./a=b.yaml`."""
    name, equals, _ = word.partition("=")
    return bool(equals) and "/" not in name


def request_of(args: argparse.Namespace) -> Any:
    """Return the Request of the command line; apply `--stack` to `args` first.

    Raises NotFound, Invalid.
    """
    from ...language import library
    from ...survey.request import Request

    take_stack(args)
    check_driver(args.driver)
    recipe, given, origins = recipe_and_values(args)
    if os.environ.get("JOB_ID"):  # set in the pod of a training platform
        from ...language import parse
        from .. import pod

        given = pod.inputs(parse.load(library.find(recipe, args.location.root)), os.environ) | given
    out, folders = published_below(args), args.location.folders(given)
    return Request(
        recipe,
        given,
        args.preset,
        out,
        args.python == "current",
        args.update,
        folders,
        origins,
        getattr(args, "nodes", 0),
    )


def take_stack(args: argparse.Namespace) -> None:
    """Set the driver, store and node count of `--stack` in `args`; other flags take precedence.

    Raises NotFound, and Invalid if `--driver` or `--host` contradicts the stack's driver.
    """
    if not getattr(args, "stack", ""):
        return

    stack = settings.load(Path(os.path.abspath(args.workspace)), os.environ).stack(args.stack)
    named = any(word.partition("=")[0] == "--driver" for word in args.line)
    if named and args.driver != stack.driver:
        words = (
            f"the stack {stack.name} uses the driver {stack.driver}, but --driver is {args.driver}"
        )
        raise Invalid([Problem("clash", words, fix="remove `--driver`, or choose another stack")])
    if args.hosts and stack.driver != "ssh":
        words = f"--host requires the driver ssh, but the stack {stack.name} uses {stack.driver}"
        raise Invalid([Problem("clash", words, fix="remove `--host`, or choose another stack")])
    args.driver, args.store = stack.driver, args.store or stack.store or None
    if hasattr(args, "nodes"):
        args.nodes = args.nodes or stack.nodes


def add_values(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set input values."""
    request = section(parser, REQUEST)
    request.add_argument(
        "--preset",
        metavar="NAMES",
        help="Preset to apply; separate several with commas, later presets take precedence",
    )
    request.add_argument(
        "-i",
        "--inputs",
        dest="values_files",
        metavar="FILE",
        action="append",
        default=[],
        help="Read input values from a YAML, JSON or TOML file. Repeatable: later files take precedence, and INPUT=VALUE overrides files",
    )
    request.add_argument(
        "--set",
        dest="parts",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="Set an input, or one key of an object input with `a.b=1`",
    )


def values_of(
    args: argparse.Namespace, typed: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the input values from files, words and `--set`, and the file of each value from a
    file.

    Words and `--set` take precedence over files. Raises Invalid, NotFound.
    """
    words: dict[str, object] = {
        **typed,
        **parse_pairs(
            args.parts, 'invalid --set "{}": expected NAME=VALUE', "write --set name=value"
        ),
    }
    if not args.values_files:
        return words, {}
    from ...survey.values_files import read_values

    files = [(name, args.location.here / Path(name).expanduser()) for name in args.values_files]
    read, origins = read_values(files)
    from_files = {name: origin for name, origin in origins.items() if name not in words}
    return {**read, **words}, from_files


def published_below(args: argparse.Namespace) -> Path | None:
    """Return the `--out` directory relative to the workspace; None without a local `--out`."""
    if not isinstance(args.out, Path):
        return None
    return Path(args.location.typed(str(args.out)))


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split words into recipes and INPUT=VALUE pairs.  Paths such as `./a=b.yaml` are recipes."""
    names: list[str] = []
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        is_file = "/" in name or name.endswith((".yaml", ".yml"))
        if equals and not is_file:
            given[name] = value
        else:
            names.append(word)
    return names, given


def check_driver(name: str) -> None:
    """Check that the driver is installed; `any:…` is checked later.  Raises NotFound."""
    # The drivers of `any` are checked with the settings.
    if name == "local" or name.partition(":")[0] == ANY:
        return
    from ... import extensions

    known = extensions.drivers(name)
    if name not in known:
        raise NotFound(
            f'unknown driver "{name}"',
            fix=did_you_mean(name, known) or f"known: {', '.join(sorted(known))}",
        )


def color(stream: Any) -> bool:
    """Return True if colors may be written to the stream."""
    is_refused = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return bool(stream.isatty()) and not is_refused


def ask_consent(question: str, unasked: RecipeError) -> bool:
    """Ask the user a yes-or-no question.  Raises `unasked` if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise unasked
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
