"""`recipe watch`: run a recipe again whenever its files change."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from ...errors import CannotRun, RecipeError
from ...execution.session import preview
from . import run as running
from .flags import hide, request_of
from .main import explain
from .targets import open_for_run

if TYPE_CHECKING:
    from ...execution.terms import Choice
    from ...survey.request import Request

_Seen: TypeAlias = "tuple[tuple[str, str | None], ...] | str"
"""Result of a poll: verdict and cache key of each step, or the recipe's error message."""

LEAST: Final = 0.5
"""Minimum pause between two polls, in seconds."""
SHARE: Final = 10.0
"""Minimum pause between two polls, as a multiple of a poll's duration, to limit the load."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    running.arguments(parser, "run")
    hide(parser, "in_cluster", "dry_run")
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
    if args.dry_run:
        raise CannotRun("`recipe watch` does not support --dry-run", fix="use `recipe plan`")
    request, choice = request_of(args), running.choice_of(args)
    try:
        while True:
            before = _survey(args, request, choice)[0]
            if _run_once(args, request) == 130:
                return 130
            seen = _survey(args, request, choice)[0]
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


def _run_once(args: argparse.Namespace, request: Request) -> int:
    """Execute the recipe as `recipe run` does, also its question about the cost of rentals."""
    try:
        with open_for_run(args.workspace, request) as ws:
            ws.share(args.store)
            return running.execute_request(ws, request, args, more=True)
    except RecipeError as error:
        return explain(error)


def _was_edited(before: _Seen, after: _Seen) -> bool:
    """Return True if inputs changed during the run: a known cache key, the steps or the error
    differ.
    """
    if isinstance(before, str) or isinstance(after, str) or len(before) != len(after):
        return before != after
    pairs = zip(before, after, strict=True)
    return any(_has_changed(old, new) for (_, old), (_, new) in pairs)


def _has_changed(old: str | None, new: str | None) -> bool:
    """Return True if both cache keys are known and differ."""
    return None not in (old, new) and old != new


def _await_change(
    args: argparse.Namespace, request: Request, choice: Choice, before: _Seen
) -> None:
    """Wait until a poll differs from `before` and the next one is equal, as editors may still
    write.
    """
    found, seconds = before, 0.0
    while found == before:
        time.sleep(max(LEAST, SHARE * seconds))
        found, seconds = _survey(args, request, choice)
    while (again := _survey(args, request, choice)[0]) != found:
        found = again
        time.sleep(LEAST / 5)


def _survey(args: argparse.Namespace, request: Request, choice: Choice) -> tuple[_Seen, float]:
    """Return the verdicts and cache keys of the recipe or its error, and the elapsed seconds."""
    began = time.monotonic()
    try:
        with open_for_run(args.workspace, request) as ws:
            ws.share(args.store)
            found: _Seen = tuple(
                (verdict.answer, verdict.key) for verdict in preview(ws, request, choice).verdicts
            )
    except RecipeError as error:
        found = str(error)
    return found, time.monotonic() - began
