"""`recipe stack`: create, start, stop and terminate a stack's machine, and show its cost."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from drivers.base import DriverError

from ...errors import Infrastructure, Invalid, Problem
from ...hosts import stacks
from ...storage.workspace import Workspace
from .flags import JSON_HELP
from .ssh import add_way, enter
from .targets import format_time

if TYPE_CHECKING:
    from ...hosts.renting.stack_leases import StackLeases
    from ...settings import Stack
    from ...storage.records.ledger import LeaseRow


ACTIONS = {
    "show": "Show the stack's settings without contacting the provider",
    "up": "Create the stack's machine and cloud resources, and start the machine",
    "down": "Terminate the machine, and delete its disk and the resources that `up` created",
    "start": "Start the machine (runs do this automatically)",
    "stop": "Stop the machine and keep its disk",
    "status": "Show the machine and the cloud resources, with their cost",
    "ssh": "Open a shell on the running machine",
    "export": "With --pulumi, print the stack's gcp resources as a Pulumi program",
}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="Action, as described above",
    )
    parser.add_argument(
        "name", metavar="NAME", help="Stack name, from [stacks.NAME] in recipe.toml"
    )
    add_way(parser)
    parser.add_argument(
        "--pulumi",
        action="store_true",
        help="Export the stack as a Pulumi program (required)",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.description = (
        "Manage the machine of a stack, which recipe.toml defines:\n\n"
        + "\n".join(f"  {name:<7} {words}" for name, words in ACTIONS.items())
    )
    parser.epilog = (
        "Examples:\n  recipe stack up tiny\n  recipe run sft dataset=data.jsonl --stack tiny --keep-alive\n  recipe stack stop tiny\n"
        "  recipe stack export tiny --pulumi > __main__.py"
    )


def run(args: argparse.Namespace) -> int:
    with Workspace.open(args.workspace) as ws:
        stack = ws.config.stack(args.name)
        if args.pulumi is not (args.action == "export"):
            words = "`recipe stack export` requires --pulumi, the only format so far"
            if args.pulumi:
                words = "--pulumi works only with `recipe stack export`"
            fix = f"recipe stack export {stack.name} --pulumi"
            raise Invalid([Problem("bad-input", words, None, fix)])
        if args.action == "export":
            print(stacks.export_program(ws, stack), end="")
            return 0
        if args.action == "show":
            if args.json:
                print(json.dumps(asdict(stack), indent=2))
            else:
                print("\n".join(_describe_stack(stack)))
            return 0
        try:
            return asyncio.run(_act(ws, stack, args))
        except DriverError as error:
            raise Infrastructure(
                str(error),
                fix=f"run `recipe doctor --driver {stack.driver}` to test the connection step by step",
            ) from error


async def _act(ws: Workspace, stack: Stack, args: argparse.Namespace) -> int:
    """Carry out an action that requires the provider.  Raises Infrastructure, DriverError."""

    def say(words: str) -> None:
        if not args.quiet:
            print(f"recipe: {words}", file=sys.stderr, flush=True)

    async with stacks.open_leases(ws, stack) as leases:
        if args.action == "status":
            state = await stacks.read_state(leases)
            text = _as_json(leases, state) if args.json else _as_text(stack, leases, state)
            print(text)
            return 0
        if args.action == "ssh":
            host = await stacks.find_host(leases)
            return enter(f"the machine of {stack.name}", host, args.forwards, args.command)
        with stacks.hold_stack(stack, ws.environ):
            if args.action == "up":
                for made in await stacks.ensure(ws, stack, leases):
                    say(f"created {made}")
                return await _start(stack, leases, say)
            if args.action == "start":
                _require_machine(stack, leases)
                return await _start(stack, leases, say)
            if args.action == "stop":
                is_confirmed = await stacks.stop_machine(leases, "`recipe stack stop`")
            else:
                is_confirmed = await _terminate(ws, stack, leases)
    if not is_confirmed:
        raise Infrastructure(
            f"{stack.driver} has not confirmed `{args.action}` of {stack.name} yet",
            fix=f"run `recipe stack {args.action} {stack.name}` again",
        )
    end = "is stopped" if args.action == "stop" else "no longer has a machine"
    print(f"{stack.name} {end}")
    return 0


def _require_machine(stack: Stack, leases: StackLeases) -> None:
    if leases.find_machine() is None:
        raise Infrastructure(
            f"the stack {stack.name} has no machine yet",
            fix=f"create it with `recipe stack up {stack.name}`",
        )


async def _start(stack: Stack, leases: StackLeases, say: Callable[[str], None]) -> int:
    row = await stacks.start_machine(leases, say)
    leases.release_hold(row)
    print(
        f"{stack.name} runs until {format_time(row.until)}; stop it with `recipe stack stop {stack.name}`"
    )
    return 0


async def _terminate(ws: Workspace, stack: Stack, leases: StackLeases) -> bool:
    """Terminate the machine, then delete its resources.

    Return False if the end of the machine is not confirmed yet.
    """
    is_confirmed = await stacks.terminate_machine(leases)
    if is_confirmed:
        for words in await stacks.drop(ws, stack, leases):
            print(words)
    return is_confirmed


def _describe_stack(stack: Stack) -> list[str]:
    """Format the settings of a stack."""
    settings = [f"{name} {value}" for name, value in stack.settings.items()]
    lines = [f"{stack.name}: {', '.join([stack.driver, *settings])}"]
    if stack.head is not None:
        lines += [
            f"  head: {stack.head}",
            f"  workers: {stack.driver}, one fewer than the step's nodes; see their cost with `recipe offers --stack {stack.name}`",
        ]
    if stack.keep:
        lines.append(
            f"  keeps one persistent machine; see its cost with `recipe stack status {stack.name}`"
        )
    limits = ", ".join(f"{name} {value}" for name, value in stack.limits.items())
    for name, value in (("limits", limits), ("store", stack.store), ("nodes", stack.nodes)):
        if value:
            lines.append(f"  {name}: {value}")
    return lines


def _as_text(stack: Stack, leases: StackLeases, found: stacks.StackState) -> str:
    """Format the state and the cost of a stack's machine as text."""
    machine = found.machine
    if machine is None:
        return f"{stack.name}: no machine; a run or `recipe stack up {stack.name}` creates it"
    disk = f"disk ${24 * machine.price:.2f} a day"
    status = found.stands or machine.state.lower()
    lines = [
        f"{stack.name}: {stack.driver} {machine.lease.get('id', 'starting')}, {status}, {disk}"
    ]
    for row in found.uses:
        user = f"run {row.run}" if row.run else "no run"
        lines.append(f"  used by {user} until {format_time(row.until)}, ${row.price:.2f} an hour")
    cost = leases.total_cost(machine)
    lines.append(f"  created {format_time(machine.asked)}, ${cost:.2f} so far")
    return "\n".join(lines)


def _as_json(leases: StackLeases, found: stacks.StackState) -> str:
    """Format the state and the cost of a stack's machine as JSON."""
    machine = found.machine
    if machine is None:
        return json.dumps({"machine": None})
    facts = {
        "machine": machine.lease.get("id"),
        "key": machine.key,
        "driver": machine.driver,
        "stands": found.stands,
        "state": machine.state,
        "usd_an_hour_stopped": machine.price,
        "usd": leases.total_cost(machine),
        "made": machine.asked,
        "uses": [_use_as_json(row) for row in found.uses],
    }
    return json.dumps(facts, indent=2)


def _use_as_json(row: LeaseRow) -> dict[str, object]:
    return {
        "key": row.key,
        "run": row.run,
        "state": row.state,
        "until": row.until,
        "usd_an_hour": row.price,
    }
