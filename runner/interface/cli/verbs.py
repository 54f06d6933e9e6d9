"""The table of verbs, and the command line read by it.  A verb is a module with `arguments(parser, verb)` and `run(args) -> int`, imported late."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from ...errors import did_you_mean
from ...paths import VERSION, Location, location
from .flags import RUN

VERBS: Final[dict[str, tuple[str, str]]] = {
    "list": ("catalog", "recipes of the library and of this folder"),
    "show": ("show", "what a recipe does, takes and gives; or how a run stands"),
    "new": ("new", "write a first recipe to start from"),
    "import": ("imported", "draft a recipe from a dvc.yaml or a task of SkyPilot"),
    "validate": ("catalog", "every problem of a recipe file, with its place and what to do"),
    "check": (
        "check",
        "what is known to go wrong with these inputs, on this machine or host, and what to do",
    ),
    "schema": ("catalog", "the JSON Schema of recipe files, for editors"),
    "lock": (
        "lock",
        "write the lock of requirements.txt or pyproject.toml, for `python: {lock: …}`",
    ),
    "plan": ("run", "what a run would do, and every reason (= run -n)"),
    "run": ("run", "run what is not fresh"),
    "watch": ("watch", "run a recipe, and again whenever something that it reads has changed"),
    "sweep": ("sweep", "run a recipe for each combination of values, and compare what came of it"),
    "why": ("why", "why a step would run, or what changed between two runs of it"),
    "status": (
        "status",
        "what is fresh, what is not, and files of earlier runs that are not made now",
    ),
    "graph": ("graph", "the steps and what they need: tree, mermaid, dot or json"),
    "runs": ("history", "earlier runs"),
    "submit": ("queue", "store a run for the workers of this workspace, and print its id"),
    "worker": ("queue", "carry out the runs that were submitted here, one after another"),
    "serve": ("serve", "serve runs over HTTP: store, list, watch, cancel"),
    "outbox": ("outbox", "reports that were not delivered yet; try failed ones again"),
    "ui": ("serve", "show runs in a browser: start, watch, pause, cancel"),
    "cancel": ("control", "end a run, wherever it was started"),
    "pause": ("control", "stop a run so that it can be resumed; trainings save a checkpoint first"),
    "resume": ("control", "continue a run that was paused, or whose worker died"),
    "retry": ("control", "run what an ended run was asked for once more"),
    "logs": ("history", "what a run or one of its steps printed"),
    "ssh": ("ssh", "a shell where a step runs, or a port of it here"),
    "results": (
        "results",
        "the instances and runs of a recipe in one table: inputs that differ, metrics, time; the best is marked",
    ),
    "report": (
        "report",
        "how a run went, where the time of its trainings went, and what to change",
    ),
    "diff": (
        "history",
        "what differs between two runs: inputs, data, code, environment, metrics, time",
    ),
    "checkpoints": ("kept", "the checkpoints of a step: list them, copy one out, resume from one"),
    "path": ("kept", "where an output of a step is"),
    "adopt": ("upkeep", "accept edited files as the output of a step"),
    "clean": ("upkeep", "remove published results"),
    "gc": ("upkeep", "remove what is stored and no longer needed"),
    "rm": ("upkeep", "forget runs: their logs, metrics and what failed attempts left"),
    "push": ("stores", "put results into a shared store"),
    "pull": ("stores", "bring results from a shared store"),
    "fetch": ("stores", "bring what a run made that a worker of another machine carried out"),
    "config": (
        "stores",
        "the settings in force, and where each comes from; inputs that are kept under a name",
    ),
    "pack": ("pack", "what a dataset is called by its content; write it as tar shards, check it"),
    "offers": ("offers", "machines that could be rented now, and what each would cost"),
    "stack": (
        "stack",
        "what a stack is, and the machine that it keeps: make, start, stop, end it; what it costs",
    ),
    "reap": ("reap", "rented machines, what they cost, and the end of unused ones"),
    "doctor": ("doctor", "what this machine has, what is missing, what to do"),
    "fake-provider": (
        "fake_provider",
        "a provider of rented GPUs that costs nothing, on this machine, to try and test against",
    ),
    "completion": ("completion", "shell completion for bash, zsh or fish"),
}

KEPT_ELSEWHERE: Final = frozenset(
    {
        "submit",
        "runs",
        "show",
        "logs",
        "diff",
        "status",
        "cancel",
        "pause",
        "resume",
        "retry",
        "fetch",
    }
)
"""Verbs that take `--to`: they work on the runs of this workspace, of a database, or of a server."""

EPILOG: Final = """examples:
  recipe run sft@1 dataset=data.jsonl --preset smoke
  recipe plan ./pipeline.yaml -p
  recipe why train

exit codes: 0 ok · 1 a step failed · 2 could not run · 3 bad recipe or inputs · 4 busy · 5 driver or infrastructure · 130 interrupted"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors suggest what was meant, and exit with 3: nothing was started."""

    words: Sequence[str] = ()
    """What it was given."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.split(": ", 1)[1].split()[0]
            inputs = any("INPUT=VALUE" in str(action.metavar) for action in self._actions)
            if inputs and word in self.words and (said := _input_of(self.words, word)):
                print(f"{self.prog}: {said}", file=sys.stderr)
                raise SystemExit(3)
            if word.startswith("-"):
                hint = did_you_mean(word.partition("=")[0], self._option_string_actions)
                message = f'unknown flag "{word}"' + (f"; {hint}" if hint else "")
            else:
                hint = f"; `recipe show {word}` shows a run" if re.fullmatch(RUN, word) else ""
                message = f'there is no place for "{word}"{hint}'
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(3)


def run(words: Sequence[str]) -> int:
    """Find the verb, read its flags, and do it."""
    words = list(words)
    place = next(
        (
            n
            for n, word in enumerate(words)
            if not word.startswith("-") and words[n - 1 : n] != ["-C"]
        ),
        len(words),
    )
    verb = words.pop(place) if place < len(words) else None
    before = words[:place]
    if "--version" in before:
        print(f"recipe {VERSION}")
        return 0
    if verb is None:
        if any(word in ("-h", "--help") for word in words):
            print(overview())
            return 0
        if words and words[0] not in ("-C", "-q", "-v"):
            print(f'recipe: unknown flag "{words[0]}"; see recipe --help', file=sys.stderr)
            return 3
        verb = "list"
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS)
        if not hint and ("@" in verb or verb.endswith((".yaml", ".yml"))):
            hint = f"to run a recipe: recipe run {verb}"
        print(
            f'recipe: there is no verb "{verb}"' + (f"; {hint}" if hint else "; see recipe --help"),
            file=sys.stderr,
        )
        return 3
    parser, module = parser_of(verb)
    parser.words = words
    args = parser.parse_intermixed_args(words)
    args.line = [verb, *words]
    args.verb = verb
    args.location = (
        location(os.environ, words) if args.workspace is None else Location(Path(args.workspace))
    )
    args.workspace = args.location.root
    if args.verbose or os.environ.get("RECIPE_LOG"):
        from ...logs import begin

        begin(args.verbose, os.environ.get("RECIPE_LOG", ""))
    if verb in KEPT_ELSEWHERE and (args.to or os.environ.get("RECIPE_SERVER")):
        at = import_module(".at", __package__)
        if at.chosen(args):
            return int(at.run(args, parser))
    return int(module.run(args))


def _input_of(words: Sequence[str], flag: str) -> str:
    """That what was typed as a flag is an input of the recipe that was named, or of recipe.yaml; empty when it is none."""
    from ...errors import RecipeError
    from ...language import parse
    from ...language.library import find

    given, equals, value = flag.lstrip("-").partition("=")
    name = given.replace("-", "_")
    after = list(words[words.index(flag) + 1 :][:1])
    root = Path(next((words[n + 1] for n, word in enumerate(words[:-1]) if word == "-C"), "."))
    for named in [
        *(word for word in words if not word.startswith("-") and "=" not in word),
        "./recipe.yaml",
    ]:
        with suppress(RecipeError, OSError):
            recipe = parse.load(find(named, root))
            if name in recipe.inputs:
                shown = (
                    value
                    if equals
                    else after[0]
                    if after and not after[0].startswith("-")
                    else "true"
                )
                return f"{name} is an input of {recipe.id}: write {name}={shlex.quote(shown)}"
    return ""


def parser_of(verb: str) -> tuple[Parser, Any]:
    """The flags of a verb, and its module."""
    module = import_module(f".{VERBS[verb][0]}", __package__)
    parser = Parser(
        prog=f"recipe {verb}",
        description=VERBS[verb][1].capitalize() + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-C",
        dest="workspace",
        metavar="DIR",
        help="the workspace; typed paths begin there (default: the nearest one upwards)",
    )
    parser.add_argument(
        "-q", "--quiet", action="count", default=0, help="say less; twice, only errors"
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="say more, with the logs of recipe itself; twice, all of them",
    )
    if verb in KEPT_ELSEWHERE:
        words = "where the runs are kept: https://… of a server, postgresql://… or `here` (default: $RECIPE_SERVER, else here)"
        parser.add_argument("--to", default="", metavar="URL", help=words)
    module.arguments(parser, verb)
    return parser, module


def overview() -> str:
    """The text of `recipe --help`."""
    lines = [
        "usage: recipe VERB …",
        "",
        "Make for ML training: run versioned recipes, and only what changed.",
        "",
        "verbs:",
    ]
    lines += [f"  {verb:<13} {words}" for verb, (_, words) in VERBS.items()]
    lines += [
        "",
        "recipe VERB --help lists the flags of a verb; recipe alone lists recipes.",
        "",
        EPILOG,
    ]
    return "\n".join(lines)
