"""Select the run storage of a command with `--to` and `RECIPE_SERVER`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import Invalid, Problem
from .targets import find_recipe, open_for_changes, open_for_reading

if TYPE_CHECKING:
    from ...storage.workspace import Workspace
    from ..handle.transport import Transport

HERE: Final = "here"
"""Value of `--to` that selects this workspace even if RECIPE_SERVER is set."""
SERVER_ARGUMENTS: Final[Mapping[str, frozenset[str]]] = {
    "submit": frozenset(
        {
            "recipe",
            "inputs",
            "values_files",
            "parts",
            "preset",
            "driver",
            "priority",
            "not_before",
            "key",
            "label",
            "user",
            "file",
            "json",
        }
    ),
    "runs": frozenset({"last", "recipe", "failed", "tag", "json"}),
    "show": frozenset({"recipe", "json"}),
    "status": frozenset({"json"}),
    "logs": frozenset({"run", "follow", "attempt", "node"}),
    "diff": frozenset({"a", "b", "json"}),
    "cancel": frozenset({"run", "no_wait"}),
    "pause": frozenset({"run", "no_wait"}),
    "resume": frozenset({"run", "queue"}),
    "retry": frozenset({"run", "begin", "queue"}),
    "prioritize": frozenset({"run", "priority"}),
    "queue": frozenset({"json"}),
    "fetch": frozenset({"run", "out", "overwrite", "json"}),
}
"""Arguments of each verb that apply to runs on a server."""
_ALWAYS: Final = frozenset({"to", "quiet", "verbose", "workspace", "help"})


def choose_server(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Set `args.server` to the URL of `--to` or RECIPE_SERVER; empty for a workspace or database.

    A database URL is stored in RECIPE_RUNS, which selects the database for runs.

    Raises Invalid for other addresses, and if the command line has arguments that a server ignores.
    """
    address = args.to or os.environ.get("RECIPE_SERVER", "")
    args.server = ""
    if not address or address == HERE:
        return
    if address.startswith(("http://", "https://")):
        args.server = address
        _refuse_ignored_arguments(args, parser)
    elif address.startswith(("postgresql://", "postgres://")):
        os.environ["RECIPE_RUNS"] = address
    else:
        fix = "use https://HOST:PORT of a server, postgresql://USER@HOST/DATABASE, or `here`"
        raise Invalid([Problem("bad-address", "--to is neither a server nor a database", fix=fix)])


def transport_for_changes(args: argparse.Namespace) -> Transport:
    """Return a Transport to the server `args.server` or the workspace, for changes.

    Raises RecipeError.
    """
    return _open_transport(args, open_for_changes)


def transport_for_reading(args: argparse.Namespace) -> Transport:
    """Return a Transport to the server `args.server` or the workspace, for reading.

    Raises RecipeError.
    """
    return _open_transport(args, open_for_reading)


def _open_transport(
    args: argparse.Namespace, open_workspace: Callable[[Path], Workspace]
) -> Transport:
    from ..handle.http_transport import HttpTransport
    from ..handle.local_transport import LocalTransport

    if args.server:
        return HttpTransport(args.server)
    return LocalTransport(open_workspace(args.workspace))


def resolve_recipe(transport: Transport, args: argparse.Namespace) -> str:
    """Return the recipe id for `args.recipe`; a name that the server does not know is unchanged.

    Raises NotFound, Invalid.
    """
    from ..handle.local_transport import LocalTransport

    if isinstance(transport, LocalTransport):
        return find_recipe(transport.ws, args.location, args.recipe)
    for each in transport.recipes():
        if args.recipe in (each.id, each.id.partition("@")[0]):
            return each.id
    return str(args.recipe)


def describe_transport(transport: Transport) -> str:
    """Describe the searched run storage in a message: `at NAME` or `in this workspace`."""
    return f"at {transport.name}" if transport.name else "in this workspace"


def _refuse_ignored_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise Invalid if the command line has arguments that a server ignores."""
    accepted = SERVER_ARGUMENTS[args.verb] | _ALWAYS
    fix = "remove it, or pass `--to here` or `--to postgresql://…`"
    problems = []
    for action in parser._actions:
        if action.dest not in accepted and _is_given(args, action):
            words = f"{_name_of(action)} does not apply to runs on a server"
            problems.append(Problem("only-here", words, fix=fix))
    if problems:
        raise Invalid(problems)


def _is_given(args: argparse.Namespace, action: argparse.Action) -> bool:
    return getattr(args, action.dest, action.default) not in (action.default, [], None)


def _name_of(action: argparse.Action) -> str:
    """Return a flag in its long form, or the name of a positional argument as in the help."""
    if action.option_strings:
        return action.option_strings[-1]
    return str(action.metavar or action.dest)
