"""`recipe check`: find known problems of a recipe with its inputs and host, and suggest fixes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from drivers.base import DriverError

from ...advice.findings import list_remedies, problems
from ...execution.results import warnings_of
from ...language.units import money_text
from ...paths import from_here, is_path
from ...planning.judge import FRESH, RESTORE
from ...storage.workspace import Workspace
from ...survey.survey import Survey, survey
from ...survey.templates import refuse_unrenderable
from ..diagnostics import render
from ..tail import safe_line
from .flags import add_request, color, request_of
from .targets import open_for_run

if TYPE_CHECKING:
    from ...advice.rules import Finding, RuleFindings
    from ...survey.request import Request


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_request(parser)
    parser.add_argument(
        "--format",
        default="text",
        choices=["text", "json", "github", "sarif"],
        help="Output format: text, json, or github and sarif for CI (default: text)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="Treat warnings as errors: exit with 3"
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="Show the changes that fix the findings, and the findings that would remain",
    )
    parser.add_argument(
        "--allow",
        metavar="RULE",
        action="append",
        default=[],
        help="Skip RULE. Repeatable",
    )


def run(args: argparse.Namespace) -> int:
    request = request_of(args)
    with open_for_run(args.workspace, request) as ws:
        ws.share(args.store)
        host = _host_facts(ws, args)
        found, verdict = _check_request(ws, request, args, host)
        _print(found, verdict, args)
        if args.format == "text" and not args.quiet:
            _print_warnings(ws, found)
        if args.fix and verdict.findings:
            verdict = _fix_and_check(ws, request, args, host, found, verdict)
    bad = ("error", "warning") if args.strict else ("error",)
    if any(finding.rule.severity in bad for finding in verdict.findings):
        return 3
    return 0


def _check_request(
    ws: Workspace, request: Request, args: argparse.Namespace, host: dict[str, object] | None
) -> tuple[Survey, RuleFindings]:
    from ...advice import preflight

    found = survey(ws, request)
    refuse_unrenderable(ws, found)
    return found, preflight.check(
        ws,
        found,
        range(len(found.plan.nodes)),
        driver=_driver(args),
        host=host,
        python=args.python,
        allow=args.allow,
    )


def _argument_of(ws: Workspace, request: Request) -> str:
    """Return the recipe of a request as a word of a command line."""
    path = request.recipe
    if is_path(path):
        path = from_here(ws.root, path)
    if is_path(path) and "/" not in path:
        return f"./{path}"
    return path


def _driver(args: argparse.Namespace) -> str:
    return "ssh" if args.driver == "local" and args.hosts else str(args.driver)


def _host_facts(ws: Workspace, args: argparse.Namespace) -> dict[str, object] | None:
    """Return facts about the selected host: {} if the host fails to answer, None for this machine."""
    name = _driver(args)
    if name == "local":
        return None
    import asyncio

    from ...advice.facts import machine
    from ...hosts.renting.leases import create_driver

    try:
        return asyncio.run(
            machine.ask(create_driver(name, ws.config.driver(name), args.hosts, str(ws.home)))
        )
    except DriverError as error:
        print(f"recipe: cannot get facts from the host: {error}", file=sys.stderr)
        return {}


def _print_warnings(ws: Workspace, found: Survey) -> None:
    """Print stored warnings of up-to-date and restorable steps, for example disabled packing."""
    for line in warnings_of(ws, found, FRESH, RESTORE):
        print(safe_line(line))


def _print(found: Survey, verdict: RuleFindings, args: argparse.Namespace) -> None:
    shown: Sequence[Finding] = verdict.findings
    missing = len(verdict.unchecked)
    if args.quiet:
        shown = [finding for finding in verdict.findings if finding.rule.severity == "error"]
        missing = 0
    print(render(problems(shown, found), args.format, color(sys.stdout), unchecked=missing), end="")
    if args.format != "text":
        if missing:
            print(
                f"recipe: {missing} rules were not checked; {_describe_missing_facts(verdict)}",
                file=sys.stderr,
            )
        return
    if not verdict.findings and not args.quiet:
        result = "no known problems found"
        if missing:
            result = f"no problems found, {missing} rules not checked"
        print(f"{found.plan.recipe}: {result}")
    if args.verbose:
        for each in verdict.unchecked:
            print(f"not checked: {each.rule.id}: {safe_line(each.why)}")
    elif missing:
        print(f"{_describe_missing_facts(verdict)}; -v lists the rules")
    cost = found.plan.settings.limits.cost
    if cost is not None and not args.quiet:
        print(f"limits: cost {money_text(cost)}")


def _describe_missing_facts(verdict: RuleFindings) -> str:
    """Return a line that lists the facts missing for unchecked rules, most wanted first."""
    counts = Counter(each.why.removeprefix("needs ") for each in verdict.unchecked)
    return "to check them, provide: " + "; ".join(
        f"{safe_line(what)} ({count})" for what, count in counts.most_common()
    )


def _fix_and_check(
    ws: Workspace,
    request: Request,
    args: argparse.Namespace,
    host: dict[str, object] | None,
    found: Survey,
    verdict: RuleFindings,
) -> RuleFindings:
    """Print the input values and recipe edits that fix the findings, and check again with the
    inputs.

    Return the second verdict, or `verdict` if no input value fixes a finding.
    """
    typed: dict[str, object] = {}
    written: list[str] = []
    for finding in verdict.findings:
        more, rest = list_remedies(finding, found)
        typed |= more
        written += rest
    out = sys.stdout if args.format == "text" else sys.stderr
    for line in dict.fromkeys(written):
        print(f"write: {safe_line(line)}", file=out)
    if not typed:
        if not written:
            print("no setting fixes these problems", file=out)
        return verdict
    changed = {**request.inputs, **typed}
    print(f"type: {safe_line(_run_command(ws, request, changed, args))}", file=out)
    fixed = {name: _plain(value) for name, value in typed.items()}
    again = replace(request, inputs={**request.inputs, **fixed})
    after, left = _check_request(ws, again, args, host)
    if left.findings:
        print("with these changes, these problems remain:", file=out)
        if args.format == "text":
            _print(after, left, args)
    else:
        unchecked = f", {len(left.unchecked)} rules not checked" if left.unchecked else ""
        print(f"with these changes, no problems remain{unchecked}", file=out)
    return left


def _run_command(
    ws: Workspace, request: Request, inputs: Mapping[str, object], args: argparse.Namespace
) -> str:
    """Return the `recipe run` command line with these inputs and the flags of `recipe check`."""
    words = ["recipe run", shlex.quote(_argument_of(ws, request))]
    if request.preset:
        words.append(f"--preset {request.preset}")
    if args.python:
        words.append(f"--python {shlex.quote(args.python)}")
    if args.driver != "local":
        words.append(f"--driver {args.driver}")
    words += [f"--host {shlex.quote(host)}" for host in args.hosts or ()]
    words += [f"--allow {rule}" for rule in args.allow]
    words += [shlex.quote(f"{name}={_plain(value)}") for name, value in inputs.items()]
    return " ".join(words)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
