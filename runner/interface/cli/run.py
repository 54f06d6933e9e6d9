"""`recipe run` and `recipe plan`: show the plan with its reasons, and execute it."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import CannotRun, Infrastructure, Invalid, Problem
from ...execution.refusals import find_sent_secrets, find_signed_addresses, nodes_to_check
from ...execution.session import preview
from ...execution.session import run as run_session
from ...execution.terms import (
    Choice,
    Label,
    Settings,
    Summary,
    apply_stack,
    limits_asked,
    lower_limits,
)
from ...language.units import money_text, size
from ...logs import redirect_lines
from ...planning.ids import stored_form
from ...survey.empty_globs import warn_of_empty_globs
from ...survey.imports import ImportCache
from ...survey.recipes import place_recipe
from ..pairs import filters
from ..tail import safe_ids, safe_line, span
from .flags import (
    COST,
    EVENTS_HELP,
    EXECUTION,
    JSON_HELP,
    OUTPUT,
    RESULTS,
    STEPS,
    WHERE,
    add_request,
    add_where,
    ask_consent,
    color,
    positive,
    request_of,
    section,
)
from .targets import count_verdicts, describe_counts, open_for_run, pending_as_json

if TYPE_CHECKING:
    from drivers.base import Driver

    from ...advice.estimates import StepEstimate
    from ...advice.rules import RuleFindings
    from ...hosts.renting.offering import Shelf
    from ...settings import Head
    from ...storage.workspace import Workspace
    from ...survey.request import Request
    from ...survey.survey import Survey
    from ..shelves import OfferRequest


LINES = 20
"""Maximum number of printed lines of a file that a step writes before its command."""
LARGE = 1 << 20
"""Maximum size in bytes of a recipe that `plan` checks for suspicious parts, as `validate` does."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_request(parser)
    steps = section(parser, STEPS)
    steps.add_argument(
        "-B",
        "--force",
        action="store_true",
        help="Treat every step as out of date, ignoring cached results",
    )
    steps.add_argument(
        "-R",
        dest="again",
        type=stored_form,
        metavar="STEP",
        action="append",
        default=[],
        help="Treat STEP as out of date; downstream steps rerun if the outputs of STEP change",
    )
    steps.add_argument(
        "--until", type=stored_form, metavar="STEP", help="Include only STEP and its dependencies"
    )
    steps.add_argument(
        "--from",
        dest="begin",
        type=stored_form,
        metavar="STEP",
        help="Treat STEP and all downstream steps as out of date, ignoring cached results",
    )
    steps.add_argument(
        "--only",
        type=stored_form,
        metavar="STEP",
        help="Include only STEP; its dependencies must be up to date",
    )
    execution = section(parser, EXECUTION)
    execution.add_argument(
        "--allow",
        metavar="RULE",
        action="append",
        default=[],
        help="Ignore errors of this `recipe check` rule; `all` ignores every rule",
    )
    execution.add_argument(
        "--nodes",
        type=positive,
        default=0,
        metavar="N",
        help="Number of nodes for `accelerate` steps without `nodes`; a new number does not rerun steps",
    )
    output = section(parser, OUTPUT)
    output.add_argument(
        "-p",
        "--print-commands",
        action="store_true",
        help="Show each command, and the files written for it",
    )
    json_help = f"{EVENTS_HELP}; with -n, print the plan as JSON"
    if verb == "plan":
        json_help = JSON_HELP
    output.add_argument("--json", action="store_true", help=json_help)
    output.add_argument(
        "--format",
        default="text",
        choices=["text", "json", "github", "sarif"],
        help="Format of errors in the recipe: text, json, or github and sarif for CI (default: text)",
    )
    if verb == "run":
        section(parser, WHERE).add_argument(
            "--in-cluster",
            action="store_true",
            help="With --driver slurm, submit a Slurm job that executes the run, and return; see docs/clusters.md",
        )
        execution.add_argument(
            "-n", "--dry-run", action="store_true", help="Show the plan without running it"
        )
    add_where(parser)
    section(parser, COST).add_argument(
        "--max-cost",
        type=usd,
        metavar="USD",
        help="Cost limit of the run in US dollars; recipe stops the run before its rented machines cost more. "
        "If the recipe has a lower limit, that limit applies",
    )
    if verb in ("run", "submit"):
        _add_execution(parser, verb)


def _add_execution(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the flags of the verbs that execute runs, `run` and `submit`."""
    results = section(parser, RESULTS)
    results.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="Name of the run, shown by `runs` and `results` and accepted in place of its ID",
    )
    results.add_argument(
        "--tag",
        metavar="TAG",
        action="append",
        default=[],
        help="Tag the run; several runs can share a tag",
    )
    results.add_argument("--note", default="", metavar="TEXT", help="Note to store with the run")
    execution = section(parser, EXECUTION)
    execution.add_argument(
        "-j",
        "--jobs",
        type=positive,
        default=0,
        metavar="N",
        help="Number of parallel steps (default: one per processor)",
    )
    execution.add_argument(
        "-k",
        "--keep-going",
        action="store_true",
        help="Keep running steps that do not depend on a failed step",
    )
    execution.add_argument(
        "--pool",
        action="append",
        default=[],
        metavar="NAME=N",
        help="Capacity of a pool that running steps share, for example licence=2 (default: 1). NAME can also be cpus, gpus or memory (memory=64GB)",
    )
    section(parser, WHERE).add_argument(
        "--everything-there",
        action="store_true",
        help="Run CPU-only steps on rented machines too",
    )
    cost = section(parser, COST)
    cost.add_argument(
        "--keep-alive",
        action="store_true",
        help="Keep the machine of --stack running after the run, until its `auto_stop`",
    )
    cost.add_argument(
        "--unattended",
        action="store_true",
        help="Outside a terminal, also rent machines that keep running if recipe is killed; see `recipe offers`",
    )
    cost.add_argument(
        "-y",
        "--yes",
        action="store_true",
        help="Skip the confirmation of rentals that cost more than the setting `confirm` (default: 2 USD)",
    )
    if verb == "run":
        section(parser, OUTPUT).add_argument(
            "--notify",
            action="store_true",
            help="Show a desktop notification when the run finishes",
        )
    results.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace output files that were edited, already existed, or belong to another recipe",
    )
    results.add_argument(
        "--link", choices=["hard"], help="Publish outputs as read-only hard links, not copies"
    )


def usd(text: str) -> float:
    amount = float(text.removesuffix("USD"))
    if not 0 < amount < 1e9:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return amount


def run(args: argparse.Namespace) -> int:
    request = request_of(args)
    with open_for_run(args.workspace, request) as ws:
        ws.share(args.store)
        return execute_request(ws, request, args)


def execute_request(
    ws: Workspace, request: Request, args: argparse.Namespace, *, more: bool = False
) -> int:
    """Execute a request, or print its plan with `--dry-run` and `plan`; return the exit code.

    Rentals above the cost setting `confirm` need the user's consent. `more` is as in
    `execute_and_print`.
    """
    if args.stack:
        ws.on(args.stack)
    choice = choice_of(args)
    if args.verb == "plan" or args.dry_run:
        from ...api.plans import plan_run

        _print_plan(ws, plan_run(ws, request, choice), args)
        return 0
    if not _confirm_cost(ws, request, choice, args):
        return 3
    settings = settings_of(args)
    if getattr(args, "in_cluster", False) and preview(ws, request, choice).todo:
        return _in_cluster(ws, args)
    return execute_and_print(ws, request, choice, settings, args, more=more)


def _in_cluster(ws: Workspace, args: argparse.Namespace) -> int:
    """Submit a cluster job that executes this command line, and print how to follow the job.

    The run then survives a login node that kills long processes, and a laptop that is closed.

    Raises CannotRun, Infrastructure.
    """
    import asyncio

    from drivers.base import DriverError

    from ...hosts.renting.leases import create_driver

    driver = create_driver(args.driver, ws.config.driver(args.driver), args.hosts, str(ws.home))
    if not driver.traits.works:
        raise CannotRun(
            f"--in-cluster requires --driver slurm (driver: {args.driver})",
            fix="pass `--driver slurm`, or remove `--in-cluster`",
        )
    folder = ws.home / "in-cluster"
    folder.mkdir(exist_ok=True)
    log = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    words = [word for word in args.line if word != "--in-cluster"]
    try:
        job = asyncio.run(
            driver.work(
                (sys.executable, "-m", "runner.interface.cli.main", *words), os.getcwd(), str(log)
            )
        )
    except DriverError as error:
        raise Infrastructure(
            str(error),
            fix=f"run `recipe doctor --driver {args.driver}` to test the connection step by step",
        ) from error
    print(
        f"job {job} executes this run\n  follow it: tail -F {log}\n  its steps: recipe status\n  cancel it: recipe cancel"
    )
    return 0


def choice_of(args: argparse.Namespace) -> Choice:
    """Return the step selection from the flags."""
    return Choice(
        args.only, args.until, args.begin, tuple(args.again), args.force, getattr(args, "leave", ())
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the execution settings from the flags.  Raises Invalid."""
    pools = dict(map(_pool, args.pool))
    python = "" if args.python == "current" else args.python
    published = args.out if isinstance(args.out, str) else ""
    return Settings(
        args.driver,
        tuple(args.hosts),
        args.jobs,
        args.keep_going,
        args.overwrite,
        args.link == "hard",
        pools,
        tuple(args.allow),
        args.everything_there,
        Label(args.name, tuple(args.tag), args.note),
        args.store or "",
        filters(args.where),
        python,
        published,
        stack=args.stack,
        keep_alive=args.keep_alive,
        limits=_limits_of(args),
        stop_early=getattr(args, "goal", None),
    )


def _limits_of(args: argparse.Namespace) -> dict[str, float]:
    """Return the limits that the flags set."""
    return {} if args.max_cost is None else {"cost": args.max_cost}


def _rental_lines(ws: Workspace, found: Survey, args: argparse.Namespace) -> list[str]:
    """Return plan lines on offers, possible recipients of data, multi-node machines and sent
    secrets.

    Empty for the driver `local` or if no step would run.
    """
    if args.driver == "local" or not found.todo:
        return []
    from ...hosts.renting.any_driver import data_notice
    from ..shelves import describe_choice

    try:
        drivers = _renting_drivers(ws, args)
        shelves = _shelves(ws, found, args, drivers)
        rented: list[int] = []
        if shelves:
            rented = [n for n in found.todo if found.plan.specs()[n].resources.gpus]
        secrets = _describe_sent_secrets(ws, found, rented, args.driver)
        lines = describe_choice(shelves)
        notice = data_notice(ws.config, args.driver)
        if notice:
            lines.append(notice)
        lines += _describe_worker_groups(ws, found, args, drivers)
        if secrets:
            lines.append(f"secrets sent to {args.driver} machines: {', '.join(sorted(secrets))}")
        return lines
    except Infrastructure as error:
        return [f"rents: {error}"]


def _describe_sent_secrets(
    ws: Workspace, found: Survey, nodes: Sequence[int], driver: str
) -> set[str]:
    """Return the names of the secrets and signed URLs that steps pass to rented machines."""
    specs = [found.plan.specs()[n] for n in nodes]
    secrets: set[str] = set()
    secrets.update(*find_sent_secrets(specs, ws.environ).values())
    for address in find_signed_addresses(ws, found, nodes, driver):
        secrets.add(f"signed URLs of the objects in {address}")
    return secrets


def _head_of_stack(ws: Workspace, args: argparse.Namespace) -> Head | None:
    return ws.config.stack(args.stack).head if args.stack else None


def _describe_worker_groups(
    ws: Workspace, found: Survey, args: argparse.Namespace, drivers: Mapping[str, Driver]
) -> list[str]:
    """Return plan lines with the number of machines of each multi-node step.

    If the stack has a head, they list the head and the number of rented workers instead. Empty if
    the machines cannot work together.
    """
    head = _head_of_stack(ws, args)
    if head is None and not any(driver.traits.joins for driver in drivers.values()):
        return []
    lines = [] if head is None else [f"head: {head}"]
    for n in found.todo:
        count = found.plan.specs()[n].node_count
        if count <= 1:
            continue
        step = safe_ids(found.plan.nodes[n].id)
        if head is None:
            words = f"{count} of these machines, in one zone, as the nodes of {step}"
        else:
            words = f"with {count - 1} {args.driver} machines as workers of {step}"
        lines.append(f"{'':9}{words}")
    return lines


def _check_multi_node(
    ws: Workspace, found: Survey, args: argparse.Namespace, drivers: Mapping[str, Driver]
) -> None:
    """Reject multi-node steps if their machines cannot work together.  Raises CannotRun."""
    from ...hosts.renting.needs import why_no_group

    has_head = is_kept = False
    if args.stack:
        stack = ws.config.stack(args.stack)
        has_head = stack.head is not None
        is_kept = bool(stack.keep)
    traits = next(iter(drivers.values())).traits
    if len(drivers) > 1:
        # The nodes of a step could come from different providers.
        traits = traits._replace(joins=False)
    most = min(traits.hosts_at_once or math.inf, ws.config.limits.get("machines", math.inf))
    reasons = [
        why_no_group(
            safe_ids(found.plan.nodes[n].id),
            found.plan.specs()[n],
            args.driver,
            traits,
            headed=has_head,
            kept=is_kept,
            most=most,
        )
        for n in found.todo
    ]
    distinct = list(dict.fromkeys(filter(None, reasons)))
    if distinct:
        fix = "choose a driver that supports several nodes (gcp), or a stack with a `head`"
        raise CannotRun("\n".join(distinct[:20]), fix=fix)


def _renting_drivers(ws: Workspace, args: argparse.Namespace) -> dict[str, Driver]:
    """Return the drivers by name that may rent machines for the run; empty if none may."""
    from ...hosts.renting import offering
    from ...hosts.renting.any_driver import driver_names

    drivers = {}
    for name in driver_names(ws.config, args.driver):
        driver = offering.create_renter(ws, name, args.hosts)
        if driver is not None:
            drivers[name] = driver
    return drivers


def _shelves(
    ws: Workspace, found: Survey, args: argparse.Namespace, drivers: Mapping[str, Driver]
) -> dict[str, list[Shelf]]:
    """Return the drivers' offers by step, for the steps that need a rented machine.

    Raises CannotRun if the machines cannot serve a multi-node step.
    """
    import asyncio

    from ...hosts.renting import offering
    from ..shelves import on_market_of, pricing_of, wishes

    where = filters(args.where)
    if not drivers:
        return {}
    _check_multi_node(ws, found, args, drivers)
    cluster = any(driver.traits.allocates for driver in drivers.values())
    asked = wishes(ws, found, args.driver, args.stack, cluster=cluster)
    asking = {}
    steps: list[str] = []  # the step of each wish, in the order of the answers
    for name, driver in drivers.items():
        served = _select_served(driver, asked, is_only=len(drivers) == 1)
        own = [on_market_of(ws, name, each.wish) for each in served.values()]
        asking[name] = (driver, [wish._replace(filters=where) for wish in own])
        steps += served
    shelves = asyncio.run(offering.ask_offers(asking, pricing_of(ws, asked.values())))
    by_step: dict[str, list[Shelf]] = {step: [] for step in asked}
    for step, shelf in zip(steps, shelves, strict=True):
        by_step[step].append(shelf)
    return {step: each for step, each in by_step.items() if each}


def _select_served(
    driver: Driver, asked: dict[str, OfferRequest], *, is_only: bool
) -> dict[str, OfferRequest]:
    """Return the wishes to ask a driver for; one of several is not asked for images it cannot run."""
    if is_only or driver.traits.images:
        return asked
    return {step: each for step, each in asked.items() if not each.wish.need.image}


def _confirm_cost(
    ws: Workspace, request: Request, choice: Choice, args: argparse.Namespace
) -> bool:
    """Return True if the run may rent; ask the user about costs above the setting `confirm`.

    Raises Invalid if the question needs a terminal, and without a terminal and `--unattended` for
    machines that nothing shuts down.
    """
    if args.driver == "local":
        return True
    from ...hosts.renting.any_driver import data_notice

    drivers = _renting_drivers(ws, args)
    _check_endless(drivers, args)
    if not drivers or args.yes:
        return True
    usd = _cost_above_limit(ws, preview(ws, request, choice), args, drivers)
    if usd is None:
        return True
    cost = f"the run would cost about ${usd:.2f}"
    notice = data_notice(ws.config, args.driver)
    if notice:
        cost += f"; {notice}"
    fix = "pass `--yes`, or raise `confirm` in the driver's settings"
    return ask_consent(f"{cost}; rent?", Invalid([Problem("bad-input", cost, fix=fix)]))


def _check_endless(drivers: Mapping[str, Driver], args: argparse.Namespace) -> None:
    """Raise Invalid if nobody may notice machines that nothing shuts down."""
    from ...hosts.renting import offering

    endless = [name for name, driver in drivers.items() if driver.traits.ends == "nothing"]
    if not endless or args.unattended:
        return
    if not sys.stdin.isatty():
        words = f"{', '.join(endless)}: {offering.ENDS['nothing']}, and stdin is not a terminal"
        fix = "pass `--unattended` and set `limits.cost` in the recipe; terminate leftover machines with `recipe reap`"
        raise Invalid([Problem("bad-input", words, fix=fix)])


def _cost_above_limit(
    ws: Workspace, found: Survey, args: argparse.Namespace, drivers: Mapping[str, Driver]
) -> float | None:
    """Return the estimated cost of the run in USD; None if the user need not confirm it."""
    from ...hosts.renting import offering
    from ...hosts.renting.offering import rank_offers

    limits = lower_limits(found.plan.settings.limits, apply_stack(ws, settings_of(args)).limits)
    if not found.todo:
        return None
    head_count = int(_head_of_stack(ws, args) is not None)
    machine_count = 1
    if head_count or any(driver.traits.joins for driver in drivers.values()):
        machine_count = max(found.plan.specs()[n].node_count - head_count for n in found.todo)
    by_step = _shelves(ws, found, args, drivers)
    ranked = [rank_offers(shelves) for shelves in by_step.values()]
    best = [offers[0][0] for offers in ranked if offers]
    return offering.cost_to_confirm(ws, best, limits.cost, max(1, machine_count), [*drivers])


def _print_plan(ws: Workspace, found: Survey, args: argparse.Namespace) -> None:
    _warn(ws, found, args)
    if ws.remote_cache is not None:
        for notice in ws.remote_cache.pop_notices():
            print(f"recipe: {notice}", file=sys.stderr)
    verdict = _run_preflight(ws, found, args)
    ids = [node.id for node in found.plan.nodes]
    expected = ws.store.index.expected_seconds(found.plan.recipe, ids)
    if args.json:
        facts = {**as_json(ws, found, expected), "findings": _findings_json(verdict, found)}
        print(json.dumps(facts, indent=2))
        return
    asked = limits_asked(ws, Settings(stack=args.stack, limits=_limits_of(args)))
    cost = lower_limits(found.plan.settings.limits, asked).cost
    print(as_text(ws, found, expected, cost, commands=args.print_commands, quiet=args.quiet))
    if not args.quiet:
        for warning in warn_of_empty_globs(ws, found):
            print(f"warning: {safe_ids(warning)}")
    _print_findings(verdict, found, args)
    for line in _rental_lines(ws, found, args):
        print(line)
    if isinstance(args.out, str):
        print(f"results will be uploaded to {safe_line(args.out)}")


def execute_and_print(
    ws: Workspace,
    request: Request,
    choice: Choice,
    settings: Settings,
    args: argparse.Namespace,
    resumed: str = "",
    *,
    more: bool = False,
) -> int:
    """Execute the run with the output that the flags select, and return the exit code.

    `resumed` is the id of a run to resume. After Ctrl-C, no more steps start. `more` announces
    further runs of the caller.
    """
    from ..console import Live, for_stream

    listener = for_stream(
        sys.stdout,
        sys.stderr,
        json=args.json,
        quiet=args.quiet,
        verbose=args.verbose,
        commands=getattr(args, "print_commands", False),
    )
    # A log line written to stderr directly would break the live display.
    log = listener.log if isinstance(listener, Live) else None
    with redirect_lines(log):
        summary = run_session(ws, request, choice, settings, listener, resumed)
    if getattr(args, "notify", False):
        _notify_of_end(request.recipe, summary)
    return _exit_code(summary, more=more)


def _notify_of_end(recipe: str, summary: Summary) -> None:
    """Show a desktop notification with the run's state, or print why that is impossible."""
    from ..desktop import notify

    counts = [f"{count} {state.lower()}" for state, count in summary.counts.items() if count]
    result = f"{', '.join(counts)} in {span(summary.seconds)}"
    if not notify(f"{recipe}: {summary.state}", result):
        print(
            "recipe: cannot show a notification: notify-send (package libnotify) is not installed",
            file=sys.stderr,
        )


def _exit_code(summary: Summary, *, more: bool) -> int:
    """Return the exit code of a run.

    If an interrupted run completes all the same, the code is 0, because the next run would find
    everything up to date. With `more`, the code is 130 so that the caller starts no further runs.
    """
    must_stop = more or summary.state != "COMPLETED"
    if summary.interrupted and must_stop:
        return 130
    if summary.state == "COMPLETED":
        return 0
    if any(failure.has_begun for failure in summary.failed) or not summary.failed:
        return 1
    if all(failure.is_unplaced for failure in summary.failed):
        return 5
    return 2


def as_text(
    ws: Workspace,
    found: Survey,
    expected: dict[str, float],
    cost: float | None,
    *,
    commands: bool,
    quiet: int,
) -> str:
    """Format the plan, one line per step followed by all reasons.

    `cost` is the cost limit in USD.
    """
    lines = []
    reasons = reasons_by_node(ws, found)
    estimated = _estimate_steps(ws, found)
    width = min(40, max((len(safe_ids(node.id)) for node in found.plan.nodes), default=0))
    for n, node in enumerate(found.plan.nodes):
        answer = found.verdicts[n].answer
        if answer == "fresh" and quiet:
            continue
        may_run = answer in ("run", "maybe")
        # GPU trainings get an estimate instead, because earlier runs may be smoke tests without a
        # GPU.
        seconds = expected.get(node.id) if n not in estimated else None
        duration = f"  ~{span(seconds)}" if may_run and seconds is not None else ""
        details = _node_details(ws, found, n, reasons[n])
        if n in estimated:
            details += estimated[n].lines
        if commands and may_run:
            details += _command_lines(found, n)
        lines.append(f"{answer:8} {safe_ids(node.id):<{width}}{duration}")
        lines += [f"{'':9}{detail}" for detail in details]
    for later in found.later:
        lines += [f"maybe    {later.shown}", f"{'':9}{later.why}"]
    if cost is not None and found.todo:
        lines.append(f"limits: cost {money_text(cost)}")
    lines.append(f"{found.plan.recipe}: {describe_counts(count_verdicts(found))}")
    return "\n".join(lines)


def _node_details(ws: Workspace, found: Survey, n: int, reasons: Sequence[str]) -> list[str]:
    """Return lines with the reasons, replaced outputs, node count and checkpoint of a step."""
    from ...survey.explain import describe_replaced, describe_resume

    verdict = found.verdicts[n]
    details = []
    for reason in reasons:
        details += [safe_ids(line) for line in reason.splitlines() if line]
    details += [f"would replace {words}" for words in describe_replaced(ws, verdict.conflicts)]
    node_count = found.plan.specs()[n].node_count
    if verdict.answer in ("run", "maybe") and node_count > 1:
        details.append(f"on {node_count} nodes")
    checkpoint = describe_resume(ws, found, n) if verdict.answer == "run" else ""
    if checkpoint:
        details.append(safe_ids(checkpoint))
    return details


def _command_lines(found: Survey, n: int) -> list[str]:
    """Return the command of a step, and the first lines of the files that it needs."""
    from ...survey.explain import shown_command

    command, files = shown_command(found, n)
    lines = [f"$ {safe_line(line)}" for line in command.splitlines()]
    for path, text in sorted(files.items()):
        lines.append(f"> {safe_line(path)}")
        lines += [f"  {line}" for line in _first_lines(text)]
    return lines


def _estimate_steps(ws: Workspace, found: Survey) -> dict[int, StepEstimate]:
    """Estimate memory and time of the GPU training steps that may run."""
    if not any(spec.resources.gpus for spec in found.plan.specs()):
        return {}
    from ...advice import estimates

    return estimates.estimate_plan(ws, found.plan, found.todo)


def _first_lines(text: str) -> list[str]:
    """Return the first LINES lines of a text, and a line with the count of the others."""
    lines = [safe_line(line) for line in text.splitlines()]
    if len(lines) <= LINES:
        return lines
    return [*lines[:LINES], f"… {len(lines) - LINES} more lines"]


def reasons_by_node(ws: Workspace, found: Survey) -> dict[int, list[str]]:
    """Return the reasons for each verdict; for a step to run, the changes since its last run here."""
    from ...survey.explain import find_changes

    to_run = [n for n, verdict in enumerate(found.verdicts) if verdict.answer == "run"]
    changed = find_changes(ws, found, to_run)
    return {n: [*verdict.reasons, *changed.get(n, ())] for n, verdict in enumerate(found.verdicts)}


def as_json(ws: Workspace, found: Survey, expected: dict[str, float]) -> Mapping[str, object]:
    why = reasons_by_node(ws, found)
    estimated = _estimate_steps(ws, found)
    steps = []
    for n, node in enumerate(found.plan.nodes):
        estimate = estimated.get(n)
        # As in `as_text`, an estimate takes the place of the earlier duration.
        seconds = expected.get(node.id) if estimate is None else None
        steps.append(_step_as_json(ws, found, n, why[n], seconds, estimate))
    return {
        "recipe": found.plan.recipe,
        "digest": found.plan.digest,
        "inputs": found.plan.inputs,
        "steps": steps,
        "pending": pending_as_json(found),
        "warnings": warn_of_empty_globs(ws, found),
    }


def _step_as_json(
    ws: Workspace,
    found: Survey,
    n: int,
    reasons: Sequence[str],
    seconds: float | None,
    estimate: StepEstimate | None,
) -> Mapping[str, object]:
    """Return a step of the plan for JSON output; `seconds` is its expected duration."""
    from ...survey.explain import describe_resume

    node, verdict = found.plan.nodes[n], found.verdicts[n]
    needs = sorted(found.plan.nodes[u].id for u in found.plan.dependencies(n))
    outputs = {output.name: output.path for output in node.outputs}
    resumes = describe_resume(ws, found, n) if verdict.answer == "run" else ""
    memory = None if estimate is None else estimate.as_json()
    return {
        "id": node.id,
        "answer": verdict.answer,
        "key": verdict.key,
        "reasons": reasons,
        "needs": needs,
        "outputs": outputs,
        "expected_seconds": seconds,
        "conflicts": list(verdict.conflicts),
        "resumes": resumes,
        "nodes": found.plan.specs()[n].node_count,
        "memory": memory,
    }


def _run_preflight(ws: Workspace, found: Survey, args: argparse.Namespace) -> RuleFindings | None:
    """Check the preflight rules for the steps to run, without contacting hosts; None without steps."""
    numbers = nodes_to_check(found)
    if not numbers:
        return None
    from ...advice import preflight

    driver = "ssh" if args.driver == "local" and args.hosts else args.driver
    return preflight.check(ws, found, numbers, driver=driver, python=args.python, allow=args.allow)


def _findings_json(verdict: RuleFindings | None, found: Survey) -> Any:
    if verdict is None:
        return []
    from ...advice.findings import problems
    from ..diagnostics import render

    return json.loads(render(problems(verdict.findings, found), "json"))


def _print_findings(verdict: RuleFindings | None, found: Survey, args: argparse.Namespace) -> None:
    if args.quiet > 1:
        return
    if verdict is None or not verdict.findings:
        return
    from ...advice.findings import problems
    from ..diagnostics import render

    print("\n" + render(problems(verdict.findings, found), "text", color(sys.stdout)), end="")


def _warn(ws: Workspace, found: Survey, args: argparse.Namespace) -> None:
    """Print warnings about suspicious parts of the recipe.

    The recipe is parsed a second time for this, so only plans print these warnings.
    """
    if args.quiet or found.source.stat().st_size > LARGE:
        return
    from ...language import document, empty_reads, parse, unread
    from ...survey import code_warnings, script_warnings

    read = document.read(found.source)
    recipe = parse.recipe(read)
    warnings = [*read.warnings, *unread.warnings(recipe), *empty_reads.warnings(recipe)]
    if not found.library:
        cache = ImportCache(ws)
        recipe = place_recipe(recipe, found.source, ws.root)
        warnings += code_warnings.warnings(recipe, cache.read)
        warnings += script_warnings.find_rejected_options(recipe, cache.read)
        cache.save()
    if warnings:
        from ..diagnostics import render

        print(render(warnings, "text", color(sys.stderr)), file=sys.stderr)


def _pool(word: str) -> tuple[str, float]:
    """Parse the capacity of a pool; that of memory may have a unit."""
    name, _, amount = word.partition("=")
    try:
        if name == "memory" and not amount.isdecimal():
            return name, float(size(amount))
        return name, float(amount)
    except ValueError:
        example = "memory=64GB" if name == "memory" else "api=2"
        fix = f"use NAME=N, for example `--pool {example}`"
        problem = Problem("bad-pool", f'"{word}" is not NAME=N', fix=fix)
        raise Invalid([problem]) from None
