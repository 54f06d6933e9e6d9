"""`recipe serve`, the REST server of a workspace, and `recipe ui`, its web interface."""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from drivers import install_line

from ...errors import CannotRun, Infrastructure


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    port = 8765 if verb == "serve" else 0
    known = os.environ if verb == "serve" else {}
    default = f"$PORT, otherwise {port}" if verb == "serve" else f"{port}"
    parser.add_argument(
        "--port",
        type=int,
        default=known.get("PORT") or port,
        metavar="N",
        help=f"Port to listen on; 0 picks a free port (default: {default})",
    )
    if verb == "ui":
        parser.add_argument(
            "run",
            nargs="?",
            default="",
            metavar="RUN",
            help="Run to show: a run ID, or `last` (default: the list of runs)",
        )
        parser.add_argument(
            "--no-open",
            dest="opens",
            action="store_false",
            help="Print the URL without opening a browser",
        )
        parser.description = (
            "Open the web interface, to start, watch, pause and cancel runs of this "
            "workspace. Requires the extra `server`.\n\n"
            "If a server for this workspace is running, the command opens its page. Otherwise the "
            "command starts a server with a worker on a loopback address, until Ctrl-C. The URL "
            "contains an access token that expires after a day."
        )
        parser.epilog = "Examples:\n  recipe ui\n  recipe ui last --no-open"
        return
    words = "Address to listen on (default: $HOST, otherwise 127.0.0.1)"
    parser.add_argument(
        "--host",
        dest="address",
        default=known.get("HOST") or "127.0.0.1",
        metavar="ADDRESS",
        help=words,
    )
    parser.add_argument(
        "--with-worker",
        action="store_true",
        help="Also execute runs, with a worker that stops with the server",
    )
    parser.add_argument(
        "--new-token",
        action="store_true",
        help="Create and print another access token with all permissions",
    )
    parser.add_argument(
        "--certificate",
        default="",
        metavar="FILE",
        help="Certificate chain for HTTPS (PEM)",
    )
    parser.add_argument(
        "--key", default="", metavar="FILE", help="Private key of the certificate (PEM)"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="Allow plain HTTP on an address other than loopback",
    )
    parser.description = (
        "Start the HTTP API of this workspace, to submit, list, watch and cancel runs. "
        "Requires the extra `server`.\n\n"
        "The server does not execute runs. Start a worker with `recipe worker`, or pass "
        "--with-worker. The first start creates an access token and prints it once."
    )
    parser.epilog = "Examples:\n  recipe serve --with-worker\n  recipe serve --host 0.0.0.0 --certificate chain.pem --key key.pem"


def run(args: argparse.Namespace) -> int:
    if args.verb == "ui":
        return page(args.workspace, _run_fragment(args), port=args.port, opens=args.opens)
    _require_server()
    from ...server import serving

    where = serving.ServerAddress(
        args.address, args.port, args.certificate, args.key, args.insecure
    )
    with suppress(KeyboardInterrupt):
        serving.serve(
            args.workspace,
            where,
            _print_address,
            with_worker=args.with_worker,
            new_token=args.new_token,
        )
    return 0


def _require_server() -> None:
    """Import the server and handle SIGTERM like Ctrl-C.  Raises Infrastructure without the server."""
    try:
        from ...server import serving  # noqa: F401  (checked here, used by the callers)
    except ModuleNotFoundError as error:
        raise Infrastructure(
            f"the server requires {error.name}, which is not installed", fix=install_line("server")
        ) from error
    signal.signal(signal.SIGTERM, _raise_interrupt)


def page(workspace: Path, place: str, *, port: int = 0, opens: bool = True) -> int:
    """Open the web interface at the running server, or start a server that stops on Ctrl-C.

    `place` is appended to the page's address, for example `&run=ID`.
    """
    _require_server()
    from ...server import serving

    found = serving.find_server(workspace)
    if found is not None:
        address, token = found
        _open_page(address, token, place, opens)
        return 0

    def ready(address: str, _token: str) -> None:
        address, token = serving.find_server(workspace) or (address, "")
        _open_page(address, token, place, opens)
        print(
            "recipe: press Ctrl-C to stop the server of this page; queued runs then wait for the next worker",
            file=sys.stderr,
            flush=True,
        )

    where = serving.ServerAddress("127.0.0.1", port)
    with suppress(KeyboardInterrupt):
        serving.serve(workspace, where, ready, with_worker=True, for_owner=True)
    return 0


def _run_fragment(args: argparse.Namespace) -> str:
    """Return the part of the page's address that selects `args.run`, if given.  Raises NotFound."""
    if not args.run:
        return ""
    from ...api.finding import find_run
    from .targets import open_for_reading

    with open_for_reading(args.workspace) as ws:
        return f"&run={find_run(ws.store, args.run).id}"


def _open_page(address: str, token: str, place: str, opens: bool) -> None:
    """Print the page's address with its token, and open the page in the browser of a desktop."""
    url = f"{address}/#token={token}{place}"
    _restrict_to_owner(sys.stdout)
    print(f"page: {url}", flush=True)
    if opens and _has_desktop() and sys.stdout.isatty():
        webbrowser.open(url)


def _has_desktop() -> bool:
    if sys.platform == "darwin":
        return True
    # Without a display, `webbrowser` would start a text browser in this terminal.
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _restrict_to_owner(stream: TextIO) -> None:
    """If the output goes to a file, restrict the file to its owner before a token is written.

    Raises CannotRun if the file belongs to another user.
    """
    found = os.fstat(stream.fileno())
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    try:
        os.fchmod(stream.fileno(), stat.S_IMODE(found.st_mode) & stat.S_IRWXU)
    except PermissionError as error:
        raise CannotRun(
            "the token would be written to a file that other users can read",
            fix="write to a file with mode 0600: run `umask 077` before the command",
        ) from error
    print(
        "recipe: the token is written to a file; its mode is now 0600",
        file=sys.stderr,
    )


def _raise_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _print_address(address: str, token: str) -> None:
    if token:
        _restrict_to_owner(sys.stdout)
        print(f"token: {token}", flush=True)
        print(
            "recipe: this token is shown once; clients send it as `Authorization: Bearer TOKEN`",
            file=sys.stderr,
        )
    print(f"serving: {address}", flush=True)
    print("recipe: press Ctrl-C to stop", file=sys.stderr, flush=True)
