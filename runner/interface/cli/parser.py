"""The table of verbs, and the command line read by it.  A verb is a module with `arguments(parser, verb)` and `run(args) -> int`, imported late."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from ...errors import did_you_mean
from ...paths import VERSION, Standing, standing

VERBS: Final[dict[str, tuple[str, str]]] = {
    "list": ("catalog", "recipes of the library and of this folder"),
    "show": ("show", "what a recipe does, takes and gives; or how a run stands"),
    "new": ("new", "write a first recipe to start from"),
    "import": ("imported", "draft a recipe from a dvc.yaml or a task of SkyPilot"),
    "validate": ("catalog", "every problem of a recipe file, with its place and what to do"),
    "check": ("check", "what is known to go wrong with these inputs, on this machine or host, and what to do"),
    "schema": ("catalog", "the JSON Schema of recipe files, for editors"),
    "lock": ("lock", "write the lock of requirements.txt or pyproject.toml, for `python: {lock: …}`"),
    "plan": ("run", "what a run would do, and every reason (= run -n)"),
    "run": ("run", "run what is not fresh"),
    "watch": ("watch", "run a recipe, and again whenever something that it reads has changed"),
    "sweep": ("sweep", "run a recipe for each combination of values, and compare what came of it"),
    "why": ("why", "why a step would run, or what changed between two runs of it"),
    "status": ("status", "what is fresh, what is not, and files of earlier runs that are not made now"),
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
    "results": ("results", "the instances and runs of a recipe in one table: inputs that differ, metrics, time; the best is marked"),
    "report": ("report", "how a run went, where the time of its trainings went, and what to change"),
    "diff": ("history", "what differs between two runs: inputs, data, code, environment, metrics, time"),
    "checkpoints": ("kept", "the checkpoints of a step: list them, copy one out, resume from one"),
    "path": ("kept", "where an output of a step is"),
    "adopt": ("upkeep", "accept edited files as the output of a step"),
    "clean": ("upkeep", "remove published results"),
    "gc": ("upkeep", "remove what is stored and no longer needed"),
    "rm": ("upkeep", "forget runs: their logs, metrics and what failed attempts left"),
    "push": ("stores", "put results into a shared store"),
    "pull": ("stores", "bring results from a shared store"),
    "fetch": ("stores", "bring what a run made that a worker of another machine carried out"),
    "config": ("stores", "the settings in force, and where each comes from; inputs that are kept under a name"),
    "pack": ("pack", "what a dataset is called by its content; write it as tar shards, check it"),
    "offers": ("offers", "machines that could be rented now, and what each would cost"),
    "stack": ("stack", "what a stack is, and the machine that it keeps: make, start, stop, end it; what it costs"),
    "reap": ("reap", "rented machines, what they cost, and the end of unused ones"),
    "doctor": ("doctor", "what this machine has, what is missing, what to do"),
    "fake-provider": ("fake_provider", "a provider of rented GPUs that costs nothing, on this machine, to try and test against"),
    "completion": ("completion", "shell completion for bash, zsh or fish"),
}

KEPT_ELSEWHERE: Final = frozenset({"submit", "runs", "show", "logs", "diff", "status", "cancel", "pause", "resume", "retry", "fetch"})
"""Verbs that take `--to`: they work on the runs of this workspace, of a database, or of a server."""

RECIPE: Final = "NAME@VERSION of the library, NAME for ./NAME.yaml, or a path such as ./pipeline.yaml (default: recipe.yaml)"
"""Which recipe a word means, as help."""

EPILOG: Final = """examples:
  recipe run sft@1 dataset=data.jsonl --preset smoke
  recipe plan ./pipeline.yaml -p
  recipe why train

exit codes: 0 ok · 1 a step failed · 2 could not run · 3 bad recipe or inputs · 4 busy · 5 driver or infrastructure · 130 interrupted"""


RUN: Final = r"last(~[0-9]+)?|[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"
"""What is the name of a run, and of no recipe."""


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
    place = next((n for n, word in enumerate(words) if not word.startswith("-") and words[n - 1 : n] != ["-C"]), len(words))
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
        print(f'recipe: there is no verb "{verb}"' + (f"; {hint}" if hint else "; see recipe --help"), file=sys.stderr)
        return 3
    parser, module = parser_of(verb)
    parser.words = words
    args = parser.parse_intermixed_args(words)
    args.line = [verb, *words]
    args.verb = verb
    args.standing = standing(os.environ, words) if args.workspace is None else Standing(Path(args.workspace))
    args.workspace = args.standing.root
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
    for named in [*(word for word in words if not word.startswith("-") and "=" not in word), "./recipe.yaml"]:
        with suppress(RecipeError, OSError):
            recipe = parse.load(find(named, root))
            if name in recipe.inputs:
                shown = value if equals else after[0] if after and not after[0].startswith("-") else "true"
                return f"{name} is an input of {recipe.id}: write {name}={shlex.quote(shown)}"
    return ""


def parser_of(verb: str) -> tuple[Parser, Any]:
    """The flags of a verb, and its module."""
    module = import_module(f".{VERBS[verb][0]}", __package__)
    parser = Parser(
        prog=f"recipe {verb}", description=VERBS[verb][1].capitalize() + ".", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-C", dest="workspace", metavar="DIR", help="the workspace; typed paths begin there (default: the nearest one upwards)")
    parser.add_argument("-q", "--quiet", action="count", default=0, help="say less; twice, only errors")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="say more, with the logs of recipe itself; twice, all of them")
    if verb in KEPT_ELSEWHERE:
        words = "where the runs are kept: https://… of a server, postgresql://… or `here` (default: $RECIPE_SERVER, else here)"
        parser.add_argument("--to", default="", metavar="URL", help=words)
    module.arguments(parser, verb)
    return parser, module


def overview() -> str:
    """The text of `recipe --help`."""
    lines = ["usage: recipe VERB …", "", "Make for ML training: run versioned recipes, and only what changed.", "", "verbs:"]
    lines += [f"  {verb:<13} {words}" for verb, (_, words) in VERBS.items()]
    lines += ["", "recipe VERB --help lists the flags of a verb; recipe alone lists recipes.", "", EPILOG]
    return "\n".join(lines)


def out_folder(text: str) -> Path:
    """The value of --out.  Raises Invalid for an address such as s3://…"""
    from ...storage.workspace import local_folder

    return local_folder(text)


def results_place(text: str) -> Path | str:
    """The value of --out where it may be an address, which is text.  Raises Invalid."""
    from ...storage import workspace

    return workspace.results_place(text)


def add_request(parser: argparse.ArgumentParser) -> None:
    """The words that say what to run."""
    parser.add_argument("recipe", nargs="?", help=RECIPE)
    parser.add_argument("inputs", nargs="*", metavar="INPUT=VALUE", help="values for the recipe's inputs")
    parser.add_argument("-f", "--file", metavar="FILE", help="the recipe, by path")
    add_values(parser)
    parser.add_argument(
        "--out",
        type=results_place,
        metavar="PLACE",
        help="publish the recipe's outputs below this folder; or upload them to s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or hf://ORG/NAME, too",
    )
    parser.add_argument(
        "--python",
        default="",
        metavar="PYTHON",
        help="the Python of steps without a lock: a path, a virtual environment, a name (default: .venv here, $VIRTUAL_ENV, python3 of PATH); "
        "`current`: the packages of the Python that runs recipe, instead of locks and images",
    )
    parser.add_argument("--driver", default="local", metavar="NAME", help="where to run (default: local)")
    parser.add_argument("--store", metavar="NAME", help="the shared store to use, by its name in recipe.toml or its address; `none`: none")
    parser.add_argument(
        "--host",
        dest="hosts",
        metavar="HOST",
        action="append",
        default=[],
        help="a server for the driver `ssh`, as user@name:port, instead of those in the settings",
    )
    parser.add_argument("--update", action="store_true", help="resolve moving revisions again and write them to recipe.lock")


def add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stack", default="", metavar="NAME", help="driver, filters and limits of [stacks.NAME] in recipe.toml; other flags win")
    parser.add_argument(
        "--where", action="append", default=[], metavar="K=V", help="only offers like this: gpu gpu_memory regions reliability inet cuda max_price …"
    )


def filters(words: Sequence[str]) -> dict[str, str]:
    """The filters of `--where`.  Raises Invalid."""
    from ...errors import Invalid, Problem

    if bad := [word for word in words if "=" not in word]:
        raise Invalid([Problem("bad-input", f'--where "{bad[0]}" is not NAME=VALUE', fix="such as --where gpu=4090")])
    return dict(word.split("=", 1) for word in words)


def request_of(args: argparse.Namespace) -> Any:
    """The Request that the words make.  Raises NotFound, Invalid."""
    from ...errors import Invalid, Problem
    from ...language import library
    from ...survey.survey import Request

    take_stack(args)
    check_driver(args.driver)
    words = list(args.inputs)
    name = args.recipe
    if name is not None and (args.file is not None or ("=" in name and "/" not in name.partition("=")[0])):
        words.insert(0, name)
        name = None
    recipe = library.path(args.standing, args.file) if args.file is not None else library.meant(args.standing, name)
    bad = [word for word in words if "=" not in word]
    if bad:
        raise Invalid([Problem("bad-input", f'"{word}" is not INPUT=VALUE', fix="write inputs as name=value") for word in bad])
    given, origins = values_of(args, dict(word.split("=", 1) for word in words))
    if os.environ.get("JOB_ID"):  # a platform's pod
        from ...language import parse
        from .. import pod

        given = pod.inputs(parse.load(library.find(recipe, args.standing.root)), os.environ) | given
    out, folders = published_below(args), args.standing.folders(given)
    return Request(recipe, given, args.preset, out, args.python == "current", args.update, folders, origins, getattr(args, "nodes", 0))


def take_stack(args: argparse.Namespace) -> None:
    """Take what `--stack` says where no flag says otherwise.  Raises NotFound, and Invalid where a flag names another driver."""
    if not getattr(args, "stack", ""):
        return
    from ... import settings
    from ...errors import Invalid, Problem

    stack = settings.load(Path(os.path.abspath(args.workspace)), os.environ).stack(args.stack)
    named = any(word.partition("=")[0] == "--driver" for word in args.line)
    if named and args.driver != stack.driver:
        words = f"the stack {stack.name} is of the driver {stack.driver}, and --driver names {args.driver}"
        raise Invalid([Problem("clash", words, fix="leave --driver out, or take another stack")])
    if args.hosts and stack.driver != "ssh":
        words = f"--host names a server for the driver ssh, and the stack {stack.name} is of {stack.driver}"
        raise Invalid([Problem("clash", words, fix="leave --host out, or take another stack")])
    args.driver, args.store = stack.driver, args.store or stack.store or None
    if hasattr(args, "nodes"):
        args.nodes = args.nodes or stack.nodes


def add_values(parser: argparse.ArgumentParser) -> None:
    """The flags that give values to inputs, beside INPUT=VALUE."""
    parser.add_argument("--preset", metavar="NAMES", help="a named set of input values that the recipe brings, or several: a,b; later ones win")
    parser.add_argument(
        "-i",
        "--inputs",
        dest="values_files",
        metavar="FILE",
        action="append",
        default=[],
        help="values for inputs from a file of YAML, JSON or TOML; may be given several times, later files win, and INPUT=VALUE wins over files",
    )
    parser.add_argument(
        "--set", dest="parts", metavar="NAME=VALUE", action="append", default=[], help="the same as INPUT=VALUE; a.b=1 sets b in the object input a"
    )


def values_of(args: argparse.Namespace, typed: Mapping[str, str]) -> tuple[dict[str, object], dict[str, str]]:
    """The values that files and words give, and the files of those that words do not replace.  Raises Invalid, NotFound."""
    from ...errors import Invalid, Problem

    bad = [word for word in args.parts if "=" not in word]
    if bad:
        raise Invalid([Problem("bad-input", f'--set "{word}" is not NAME=VALUE', fix="write --set name=value") for word in bad])
    words = {**typed, **dict(word.split("=", 1) for word in args.parts)}
    if not args.values_files:
        return words, {}
    from ...survey.values_files import values

    read, origins = values([(name, args.standing.here / Path(name).expanduser()) for name in args.values_files])
    return {**read, **words}, {name: origin for name, origin in origins.items() if name not in words}


def published_below(args: argparse.Namespace) -> Path | None:
    """The value of --out, from the workspace."""
    return Path(args.standing.typed(str(args.out))) if isinstance(args.out, Path) else None


def told_apart(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Recipes and INPUT=VALUE pairs among words that may be either."""
    names: list[str] = []
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and "/" not in name and not name.endswith((".yaml", ".yml")):
            given[name] = value
        else:
            names.append(word)
    return names, given


def check_driver(name: str) -> None:
    """That there is a driver of this name.  Raises NotFound."""
    if name == "local":
        return
    from ... import extensions
    from ...errors import NotFound

    known = extensions.drivers(name)
    if name not in known:
        raise NotFound(f'there is no driver "{name}"', fix=did_you_mean(name, known) or f"known: {', '.join(sorted(known))}")


def color(stream: Any) -> bool:
    """Whether colours may be written there."""
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
