"""`recipe outbox`: list pending and failed webhook deliveries, or retry them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import Invalid, Problem
from ...storage.workspace import Workspace
from .flags import JSON_HELP

if TYPE_CHECKING:
    from ...storage.records.outbox import PendingDelivery

REASON = 60
"""Maximum number of characters printed of the last failure's reason."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=["list", "retry", "deliver"],
        default="list",
        help="Action (default: list)",
    )
    parser.add_argument(
        "numbers",
        nargs="*",
        type=int,
        metavar="NUMBER",
        help="Deliveries to retry (default: all dead deliveries)",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.description = (
        "List webhook deliveries that are pending or dead. A delivery is dead after "
        "eight attempts in 34 hours, or if its endpoint is no longer configured. `retry` "
        "schedules dead deliveries again. `deliver` sends pending deliveries now, on a machine without a worker or server."
    )
    parser.epilog = "Examples:\n  recipe outbox\n  recipe outbox retry\n  recipe outbox deliver"


def run(args: argparse.Namespace) -> int:
    if args.numbers and args.what != "retry":
        raise Invalid(
            [
                Problem(
                    "bad-request",
                    f"`recipe outbox {args.what}` takes no delivery number",
                    fix="recipe outbox retry NUMBER",
                )
            ]
        )
    if args.what == "deliver":
        from ...reports.delivery import deliver

        deliver(args.workspace, os.environ)
    with Workspace.open(args.workspace, read_only=args.what == "list") as ws:
        outbox = ws.store.runs.outbox
        if args.what == "retry":
            print(f"{outbox.retry(args.numbers)} deliveries will be retried", file=sys.stderr)
        found = outbox.list_letters()
    if args.json:
        letters = [each._asdict() | {"body": json.loads(each.body)} for each in found]
        print(json.dumps(letters, indent=1))
        return 0
    _print_deliveries(found)
    return 0


def _print_deliveries(found: Sequence[PendingDelivery]) -> None:
    now = time.time()
    if found:
        print(f"{'NUMBER':>6}  {'STATE':<7}  TRIES  {'NEXT':>7}  TYPE, RUN, RECEIVER")
    for each in found:
        wait = _time_to_next_try(each, now)
        print(
            f"{each.number:>6}  {each.state:<7}  {each.tries:>5}  {wait:>7}  {each.type}  {each.run}  {each.receiver}"
        )
        if each.reason:
            print(f"{'':>8}{each.reason[:REASON]}")


def _time_to_next_try(delivery: PendingDelivery, now: float) -> str:
    """Format the time until the next try; empty for a dead delivery, which has none."""
    if delivery.state == "dead":
        return ""
    if delivery.due <= now:
        return "now"
    return f"{delivery.due - now:.0f} s"
