"""`recipe submit`: queue a run for a worker."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from contextlib import closing
from datetime import datetime
from pathlib import Path

from ...api.submitting import QueueSettings
from ...errors import Invalid, Problem
from ...execution.terms import Settings
from ...hosts.renting.any_driver import data_notice
from ...settings import ANY, load
from ...survey.request import Request
from ..handle.http_transport import HttpTransport
from ..handle.local_transport import LocalTransport
from ..handle.transport import New, Transport
from . import run as run_verb
from .flags import hide, parse_label, request_of, split_words, values_of
from .targets import open_for_run


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    run_verb.arguments(parser, verb)
    hide(parser, "json", "print_commands", "unattended", "yes")
    parser.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="Priority of the run; workers claim runs with a higher number first (default: 0)",
    )
    parser.add_argument(
        "--not-before",
        type=_parse_time,
        metavar="TIME",
        help="Earliest start, in local time, for example 2026-12-01T20:00",
    )
    parser.add_argument(
        "--key",
        default="",
        metavar="KEY",
        help="Idempotency key; submitting again with the same key returns the existing run",
    )
    parser.add_argument(
        "--label",
        type=parse_label,
        action="append",
        default=[],
        metavar="K=V",
        help="Only workers with this label execute the run",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="Let only workers of this directory execute the run, with the files at the start of the run",
    )
    parser.add_argument(
        "--user",
        default="",
        metavar="NAME",
        help="Owner of the run, for per-user worker limits (default: your login)",
    )
    parser.epilog = (
        "Examples:\n  recipe submit sft@1 dataset=data.jsonl --preset smoke\n"
        '  RUN=$(recipe submit ./pipeline.yaml) && recipe logs "$RUN" -f'
    )


def run(args: argparse.Namespace) -> int:
    new = _new(args)
    with closing(_transport_for(new, args)) as transport:
        run = transport.submit(new, new.ticket.idempotency or uuid.uuid4().hex)
    print(run)
    if not args.quiet:
        _say_where_data_goes(args)
        to = f" --to {transport.name}" if transport.name else ""
        follows = f"follow it with `recipe logs -f {run}{to}`"
        waits = f"execute it with `recipe worker`, or cancel it with `recipe cancel {run}`"
        where = f"is queued at {transport.name}; {follows}" if to else f"is queued; {waits}"
        print(f"recipe: run {run} {where}", file=sys.stderr)
    return 0


def _say_where_data_goes(args: argparse.Namespace) -> None:
    """Print which drivers may receive the run's data, if the run may choose among several.

    Prints nothing for a run on a server, because the server's own settings apply.
    """
    has_choice = args.stack or args.driver.partition(":")[0] == ANY
    if args.server or not has_choice:
        return

    config = load(Path(os.path.abspath(args.workspace)), os.environ)
    driver = config.stack(args.stack).driver if args.stack else args.driver
    words = data_notice(config, driver)
    if words:
        print(f"recipe: {words}", file=sys.stderr)


def _new(args: argparse.Namespace) -> New:
    """Return the run to submit.  Raises Invalid, NotFound."""
    ticket = QueueSettings(
        args.priority, args.not_before, args.key, dict(args.label), args.user, here=args.here
    )
    if not args.server:
        return New(request_of(args), run_verb.choice_of(args), run_verb.settings_of(args), ticket)
    words = list(args.inputs)
    if args.recipe is not None:
        words.insert(0, args.recipe)
    names, typed = split_words(words)
    if args.file is not None:
        names.append(str(args.file))
    if len(names) != 1:
        fix = f"name one recipe of the server's catalog: recipe submit NAME INPUT=VALUE --to {args.server}"
        message = f"a server takes exactly one recipe name, but {len(names)} are given"
        raise Invalid([Problem("no-recipe", message, fix=fix)])
    given, _ = values_of(args, typed)
    request = Request(names[0], given, args.preset)
    return New(request, settings=Settings(args.driver), ticket=ticket)


def _transport_for(new: New, args: argparse.Namespace) -> Transport:
    """Return the server or workspace that stores the run; create the workspace's store if missing."""
    if args.server:
        return HttpTransport(args.server)
    secrets = args.here or not os.environ.get("RECIPE_RUNS")
    return LocalTransport(open_for_run(args.workspace, new.request, secrets=secrets))


def _parse_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a valid time; use the form 2026-12-01T20:00'
        ) from None
