"""`recipe watch`: run a recipe again whenever its files change."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from ...errors import CannotRun, RecipeError
from ...execution.session import preview
from . import run as running
from .chosen import open_to_work
from .flags import request_of
from .main import explain

if TYPE_CHECKING:
    from ...execution.terms import Choice
    from ...survey.request import Request

_Seen: TypeAlias = "tuple[tuple[str, str | None], ...] | str"
"""What a look found: each step's answer and key; or what is wrong with the recipe."""

LEAST: Final = 0.5
"""Seconds between two looks."""
SHARE: Final = 10.0
"""Times that a look may take before there is another: a large recipe is looked at less often."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    running.arguments(parser, "run")
    parser.description = (
        "Run the steps that are out of date, then watch their files, code, recipe and "
        "inputs, and rerun on each change. A failed step reruns when one of its inputs "
        "changes. Press Ctrl-C to stop."
    )
    parser.epilog = "Examples:\n  recipe watch\n  recipe watch train --preset smoke"


def run(args: argparse.Namespace) -> int:
    if args.in_cluster:
        raise CannotRun(
            "`recipe watch` does not support --in-cluster", fix="use `recipe run --in-cluster`"
        )
    request, choice = request_of(args), running.choice_of(args)
    try:
        while True:
            before = _look(args, request, choice)[0]
            if _once(args, request, choice) == 130:
                return 130
            seen = _look(args, request, choice)[0]
            if _was_edited(before, seen):
                continue
            if not args.quiet:
                print(
                    "recipe: watching for changes; press Ctrl-C to stop",
                    file=sys.stderr,
                    flush=True,
                )
            _await_change(args, request, choice, seen)
    except KeyboardInterrupt:
        return 130


def _once(args: argparse.Namespace, request: Request, choice: Choice) -> int:
    try:
        with open_to_work(args.workspace, request) as ws:
            ws.share(args.store)
            return running.carried_out(
                ws, request, choice, running.settings_of(args), args, more=True
            )
    except RecipeError as error:
        return explain(error)


def _was_edited(before: _Seen, after: _Seen) -> bool:
    """Return True if a step's inputs changed during the run: a known cache key has a new value."""
    if isinstance(before, str) or isinstance(after, str) or len(before) != len(after):
        return before != after
    return any(
        old is not None and new is not None and old != new
        for (_, old), (_, new) in zip(before, after, strict=True)
    )


def _await_change(
    args: argparse.Namespace, request: Request, choice: Choice, before: _Seen
) -> None:
    """Wait for a change from `before`, then for two equal polls in a row, because an editor may still be writing."""
    found, seconds = before, 0.0
    while found == before:
        time.sleep(max(LEAST, SHARE * seconds))
        found, seconds = _look(args, request, choice)
    while (again := _look(args, request, choice)[0]) != found:
        found = again
        time.sleep(LEAST / 5)


def _look(args: argparse.Namespace, request: Request, choice: Choice) -> tuple[_Seen, float]:
    """Preview the recipe; return its verdicts with cache keys, or the error text, and the elapsed seconds."""
    began = time.monotonic()
    try:
        with open_to_work(args.workspace, request) as ws:
            ws.share(args.store)
            found: _Seen = tuple(
                (verdict.answer, verdict.key) for verdict in preview(ws, request, choice).verdicts
            )
    except RecipeError as error:
        found = str(error)
    return found, time.monotonic() - began
