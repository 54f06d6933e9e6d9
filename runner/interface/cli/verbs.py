"""Table of commands, and the command-line parser.

A command module defines `arguments(parser, verb)` and `run(args) -> int`. It is imported only when
its command is used.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ...errors import RecipeError, did_you_mean
from ...paths import VERSION, CallerLocation, location
from . import flags
from .flags import RUN

if TYPE_CHECKING:
    from ...language.recipe import Recipe

GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Write recipes": {
        "new": ("new", "Create a recipe, from scratch or from a script"),
        "import": ("import_verb", "Convert a dvc.yaml or SkyPilot task"),
        "validate": ("catalog", "Check recipe files for errors"),
        "check": ("check", "Find known problems with these inputs"),
        "lock": ("lock", "Lock Python dependencies"),
        "schema": ("catalog", "Print the JSON Schema for editors"),
        "list": ("catalog", "List library and local recipes"),
    },
    "Run": {
        "plan": ("run", "Show which steps would run, and why"),
        "run": ("run", "Run the steps that are out of date"),
        "watch": ("watch", "Rerun when files change"),
        "sweep": ("sweep", "Run all combinations of input values"),
    },
    "Inspect": {
        "status": ("status", "Show up-to-date, outdated and stale outputs"),
        "why": ("why", "Explain why a step would rerun"),
        "show": ("show", "Show a recipe's inputs and outputs, or a run"),
        "graph": ("graph", "Print the step graph"),
        "runs": ("history", "List past runs"),
        "logs": ("history", "Show the log of a run or step"),
        "results": ("results", "Compare runs and sweep results in a table"),
        "diff": ("history", "Compare two runs"),
        "report": ("report", "Summarize a run: time, bottlenecks, cost"),
    },
    "Control runs": {
        "pause": ("control", "Stop a run and save a checkpoint"),
        "resume": ("control", "Resume a paused or interrupted run"),
        "cancel": ("control", "Cancel a run"),
        "retry": ("control", "Rerun a finished run"),
        "prioritize": ("control", "Change the priority of a run"),
        "checkpoints": ("checkpoints", "List, export or roll back checkpoints"),
        "ssh": ("ssh", "Open a shell or forward a port to a running step"),
    },
    "Results and storage": {
        "path": ("path", "Print the path of an output"),
        "adopt": ("upkeep", "Accept edited files as a step's outputs"),
        "clean": ("upkeep", "Remove published outputs"),
        "gc": ("upkeep", "Delete unused cached data"),
        "rm": ("upkeep", "Delete run history"),
        "push": ("stores", "Upload results to a shared store"),
        "pull": ("stores", "Download results from a shared store"),
        "fetch": ("stores", "Download results of a remote run"),
        "pack": ("pack", "Fingerprint, archive or verify a dataset"),
    },
    "Machines": {
        "doctor": ("doctor", "Check this machine, a host or a provider account"),
        "offers": ("offers", "List matching GPU offers with prices"),
        "stack": ("stack", "Manage a named machine and its settings"),
        "reap": ("reap", "List rented machines and terminate unused ones"),
    },
    "Queue and server": {
        "submit": ("submit", "Queue a run for a worker"),
        "worker": ("worker", "Execute queued runs"),
        "queue": ("queue", "Show waiting runs and workers"),
        "serve": ("serve", "Start the HTTP API"),
        "ui": ("serve", "Open the web interface"),
        "outbox": ("outbox", "List or retry webhook deliveries"),
    },
    "Other": {
        "config": ("stores", "Show settings; save and restore inputs"),
        "completion": ("completion", "Generate shell completion"),
        "fake-provider": ("fake_provider", "Start a fake GPU provider for tests"),
    },
}
"""Verbs by group title: verb -> (name of its module, line in `recipe --help`)."""

VERBS: Final[dict[str, tuple[str, str]]] = {}
for _group in GROUPS.values():
    VERBS.update(_group)

REMOTE_VERBS: Final = frozenset(
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
        "prioritize",
        "queue",
    }
)
"""Verbs that take `--to`, which selects the runs of this workspace, a database or a server."""

_ALIKE: Final = 0.8
"""Similarity from 0 to 1, from which an unknown flag counts as misspelled, not as an input."""
EPILOG: Final = """Examples:
  recipe run sft@1 dataset=data.jsonl --preset smoke
  recipe plan ./pipeline.yaml --print-commands
  recipe why train

Run `recipe VERB --help` for the options of a verb. Run `recipe` alone to list recipes.
Exit codes: 0 success, 1 step failed, 2 cannot run, 3 invalid recipe or inputs, 4 busy,
5 driver or infrastructure, 130 interrupted."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that wraps paragraphs but keeps indented lines, such as commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            if not line.startswith(" "):
                line = textwrap.fill(line, width)
            lines.append(line)
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Argument parser with spelling suggestions.  Errors exit with code 3."""

    words: Sequence[str] = ()
    """Words of the command line, without the verb."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.split(": ", 1)[1].split()[0]
            hint = self._hint_at_input(word)
            if hint:
                print(f"{self.prog}: {hint}", file=sys.stderr)
                raise SystemExit(3)
            message = self._describe_unrecognized(word)
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(3)

    def _hint_at_input(self, word: str) -> str:
        """Return a hint if `word` looks like an input that is written as a flag; otherwise empty."""
        takes_inputs = any("INPUT=VALUE" in str(action.metavar) for action in self._actions)
        if not takes_inputs or word not in self.words:
            return ""
        return _input_of(self.words, word, self._option_string_actions)

    def _describe_unrecognized(self, word: str) -> str:
        if not word.startswith("-"):
            hint = f"; `recipe show {word}` shows a run" if re.fullmatch(RUN, word) else ""
            return f'unexpected argument "{word}"{hint}'
        near = did_you_mean(word.partition("=")[0], self._option_string_actions)
        hint = f"; {near}" if near else ""
        return f'unknown flag "{word}"{hint}'


def run(words: Sequence[str]) -> int:
    """Parse a command line and execute its command."""
    index = _index_of_verb(words)
    before, after = words[:index], words[index + 1 :]
    if "--version" in before:
        print(f"recipe {VERSION}")
        return 0
    if index < len(words):
        verb = words[index]
    elif "-h" in before or "--help" in before:
        print(overview())
        return 0
    elif before and before[0] not in ("-C", "-q", "-v"):
        print(f'recipe: unknown flag "{before[0]}"; see recipe --help', file=sys.stderr)
        return 3
    else:
        verb = "list"
    if verb not in VERBS:
        print(_describe_unknown_verb(verb), file=sys.stderr)
        return 3
    return _execute(verb, [*before, *after])


def _index_of_verb(words: Sequence[str]) -> int:
    """Return the index of the first word that is no flag and no value of `-C`; without it, the number of words."""
    for n, word in enumerate(words):
        is_workspace = n > 0 and words[n - 1] == "-C"
        if not word.startswith("-") and not is_workspace:
            return n
    return len(words)


def _describe_unknown_verb(verb: str) -> str:
    hint = did_you_mean(verb, VERBS)
    is_recipe = "@" in verb or verb.endswith((".yaml", ".yml"))
    if is_recipe and not hint:
        hint = f"to run a recipe, use `recipe run {verb}`"
    return f'recipe: unknown verb "{verb}"; {hint or "see recipe --help"}'


def _execute(verb: str, words: list[str]) -> int:
    """Execute a command with the other words of the command line, and return its exit code."""
    parser, module = parser_of(verb)
    parser.words = words
    args = parser.parse_intermixed_args(words)
    args.line = [verb, *words]
    args.verb = verb
    if args.workspace is None:
        args.location = location(os.environ, words)
    else:
        args.location = CallerLocation(Path(args.workspace))
    args.workspace = args.location.root
    if args.verbose or os.environ.get("RECIPE_LOG"):
        from ...logs import begin

        begin(args.verbose, os.environ.get("RECIPE_LOG", ""))
    if verb in REMOTE_VERBS:
        from . import transports

        transports.choose_server(args, parser)
    return int(module.run(args))


def _input_of(words: Sequence[str], flag: str, options: Iterable[str]) -> str:
    """Return a hint if `flag` looks like an input of a named recipe or recipe.yaml; otherwise empty."""
    from difflib import get_close_matches

    written, equals, value = flag.partition("=")
    name = written.lstrip("-").replace("-", "_")
    if not equals:
        value = _value_after(words, flag)
    for recipe in _recipes_named(words):
        if name in recipe.inputs:
            return f"{name} is an input of {recipe.id}: write {name}={shlex.quote(value)}"
        may_be_input = bool(equals and recipe.inputs)
        if may_be_input and not get_close_matches(written, list(options), cutoff=_ALIKE):
            hint = did_you_mean(name, recipe.inputs) or f"it has: {', '.join(recipe.inputs)}"
            return f'{recipe.id} has no input "{name}" ({hint}); inputs are given as NAME=VALUE'
    return ""


def _value_after(words: Sequence[str], flag: str) -> str:
    """Return the word after a flag, or `true` if the next word is another flag or missing."""
    following = words[words.index(flag) + 1 :]
    if not following or following[0].startswith("-"):
        return "true"
    return following[0]


def _recipes_named(words: Sequence[str]) -> Iterator[Recipe]:
    """Yield the recipes named on the command line, then recipe.yaml.

    Unreadable recipes are skipped.
    """
    from ...language import parse
    from ...language.library import find

    root = _folder_of(words)
    for name in _possible_recipes(words):
        with suppress(RecipeError, OSError):
            yield parse.load(find(name, root))


def _folder_of(words: Sequence[str]) -> Path:
    """Return the directory of the first `-C`, otherwise the current directory."""
    for before, word in pairwise(words):
        if before == "-C":
            return Path(word)
    return Path(".")


def _possible_recipes(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that may name a recipe, NAME also as ./NAME.yaml, and ./recipe.yaml."""
    for word in words:
        if word.startswith("-") or "=" in word:
            continue
        yield word
        if "@" not in word and "." not in word:
            yield f"./{word}.yaml"
    yield "./recipe.yaml"


def parser_of(verb: str) -> tuple[Parser, Any]:
    """Return a command's parser and module."""
    module = import_module(f".{VERBS[verb][0]}", __package__)
    parser = Parser(
        prog=f"recipe {verb}",
        description=VERBS[verb][1] + ".",
        formatter_class=Help,
        allow_abbrev=False,
        add_help=False,
    )
    parser._positionals.title, parser._optionals.title = "Arguments", "Options"
    for title in flags.SECTIONS:  # in the order of help, which omits empty groups
        flags.section(parser, title)
    everywhere = flags.section(parser, flags.GLOBAL)
    everywhere.add_argument("-h", "--help", action="help", help="Show this help and exit")
    everywhere.add_argument(
        "-C",
        dest="workspace",
        metavar="DIR",
        help="Workspace directory; relative paths start here (default: nearest parent with a workspace)",
    )
    everywhere.add_argument(
        "-q",
        "--quiet",
        action="count",
        default=0,
        help="Reduce output; -qq prints only errors",
    )
    everywhere.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="Increase output; -vv includes debug logs",
    )
    if verb in REMOTE_VERBS:
        parser.add_argument(
            "--to",
            default="",
            metavar="URL",
            help="Where runs are stored: https://… (a server), postgresql://… or `here` (default: $RECIPE_SERVER, otherwise here)",
        )
    module.arguments(parser, verb)
    parser.usage = _usage(parser)
    return parser, module


def _usage(parser: Parser) -> str:
    """Return the usage line, such as `recipe run [OPTIONS] [RECIPE] [INPUT=VALUE ...]`."""
    words = []
    for action in parser._actions:
        if action.option_strings:
            continue
        word = str(action.metavar or action.dest.upper())
        if action.choices is not None:
            word = f"{{{','.join(map(str, action.choices))}}}"
        shown = {"?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}
        words.append(shown.get(str(action.nargs), word))
    return " ".join([parser.prog, "[OPTIONS]", *words]).replace("%", "%%")


def overview() -> str:
    """Return the text of `recipe --help`."""
    lines = [
        "usage: recipe VERB [OPTIONS] ...",
        "",
        "A build system for ML training: recipe reruns only what changed, resumes from",
        "checkpoints, and runs on this machine, SSH servers, clusters or rented GPUs.",
    ]
    for title, verbs in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {verb:<14} {words}" for verb, (_, words) in verbs.items()]
    return "\n".join([*lines, "", EPILOG])
