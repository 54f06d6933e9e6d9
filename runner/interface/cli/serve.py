"""`recipe serve`: the REST server of a workspace."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress

from ...errors import Infrastructure


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("--host", dest="address", default="127.0.0.1", metavar="ADDRESS", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8765, metavar="N", help="the port; 0 takes a free one (default: 8765)")
    parser.add_argument("--with-worker", action="store_true", help="also carry the runs out, by a worker that ends with the server")
    parser.add_argument("--new-token", action="store_true", help="make another token for everything, and show it")
    parser.add_argument("--certificate", default="", metavar="FILE", help="serve HTTPS with this certificate chain (PEM)")
    parser.add_argument("--key", default="", metavar="FILE", help="the private key of the certificate (PEM)")
    parser.add_argument("--insecure", action="store_true", help="listen on an address that is not loopback without HTTPS")
    parser.description = (
        "Serve the runs of this workspace over HTTP: store, list, watch, cancel.  Needs the extra `server`.  Nothing is carried out by the server"
        " itself; `recipe worker` does, or --with-worker.  The first start makes a token and shows it once."
    )
    parser.epilog = "examples:\n  recipe serve --with-worker\n  recipe serve --host 0.0.0.0 --certificate chain.pem --key key.pem"


def run(args: argparse.Namespace) -> int:
    try:
        from ...server.serving import Listening, serve
    except ModuleNotFoundError as error:
        fix = "pip install 'recipe-runner[server]'"
        raise Infrastructure(f"the server needs {error.name}, which is not installed", fix=fix) from error
    where = Listening(args.address, args.port, args.certificate, args.key, args.insecure)
    signal.signal(signal.SIGTERM, _end)
    with suppress(KeyboardInterrupt):
        serve(args.workspace, where, _ready, with_worker=args.with_worker, new_token=args.new_token)
    return 0


def _end(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _ready(address: str, token: str) -> None:
    if token:
        print(f"token: {token}", flush=True)
        print("recipe: this token is shown once; clients send it as `Authorization: Bearer TOKEN`", file=sys.stderr)
    print(f"serving: {address}", flush=True)
    print("recipe: Ctrl-C ends it", file=sys.stderr, flush=True)
