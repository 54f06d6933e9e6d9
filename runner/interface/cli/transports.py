"""Select the run storage of a command with `--to` and `RECIPE_SERVER`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ...errors import Invalid, Problem
from .targets import find_recipe, open_for_changes, open_for_reading

if TYPE_CHECKING:
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
    from ..handle.http_transport import HttpTransport
    from ..handle.local_transport import LocalTransport

    return (
        HttpTransport(args.server)
        if args.server
        else LocalTransport(open_for_changes(args.workspace))
    )


def transport_for_reading(args: argparse.Namespace) -> Transport:
    """Return a Transport to the server `args.server` or the workspace, for reading.

    Raises RecipeError.
    """
    from ..handle.http_transport import HttpTransport
    from ..handle.local_transport import LocalTransport

    return (
        HttpTransport(args.server)
        if args.server
        else LocalTransport(open_for_reading(args.workspace))
    )


def resolve_recipe(transport: Transport, args: argparse.Namespace) -> str:
    """Return the recipe id for `args.recipe`; a name that the server does not know is unchanged.

    Raises NotFound, Invalid.
    """
    from ..handle.local_transport import LocalTransport

    if isinstance(transport, LocalTransport):
        return find_recipe(transport.ws, args.location, args.recipe)
    known = [each.id for each in transport.recipes()]
    named = [id for id in known if args.recipe in (id, id.partition("@")[0])]
    return named[0] if named else str(args.recipe)


def describe_transport(transport: Transport) -> str:
    """Describe the searched run storage in a message: `at NAME` or `in this workspace`."""
    return f"at {transport.name}" if transport.name else "in this workspace"


def _refuse_ignored_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    given = [
        action
        for action in parser._actions
        if action.dest not in SERVER_ARGUMENTS[args.verb] | _ALWAYS
        and getattr(args, action.dest, action.default) not in (action.default, [], None)
    ]
    if given:
        fix = "remove it, or pass `--to here` or `--to postgresql://…`"
        words = [
            action.option_strings[-1]
            if action.option_strings
            else str(action.metavar or action.dest)
            for action in given
        ]
        raise Invalid(
            [
                Problem("only-here", f"{word} does not apply to runs on a server", fix=fix)
                for word in words
            ]
        )
