"""`recipe fake-provider`: serve a provider of rented GPUs that costs nothing, with faults to order and a ledger of what it would have cost."""

from __future__ import annotations

import argparse
import sys

from drivers import fakes

from ...errors import Infrastructure, Invalid, NotFound, Problem, did_you_mean


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "provider", metavar="PROVIDER", help=f"which one: {', '.join(fakes.WORLDS)}"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="the port on 127.0.0.1 (default: a free one)",
    )
    parser.add_argument(
        "--faults",
        default="",
        metavar="FAULTS",
        help="what goes wrong, as NAME[@OPERATION]=CHANCE|once|AMOUNT,…; docs/fakes.md lists them",
    )
    parser.add_argument(
        "--clock",
        choices=("real", "virtual"),
        default="real",
        help="whose time it keeps: this machine's, or one that only POST /_clock moves (default: real)",
    )
    parser.add_argument(
        "--hosts",
        choices=("none", "real"),
        default="none",
        help="what its machines are: none, so nothing can log in (the default), or real: processes of this machine behind SSH on 127.0.0.1, "
        "which execute what they are sent as you",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="what is offered, and when a fault happens (default: 0)",
    )
    parser.epilog = (
        "Needs the extra `fakes`. Prints the lines to export, then serves until Ctrl-C.\n"
        'GET /_ledger: what was rented and billed, as JSON lines. POST /_clock: {"advance": SECONDS}. POST /_faults: FAULTS.\n'
        "POST /_preempt: take every spot machine away.\n\n"
        "examples:\n  recipe fake-provider vastai --port 8099\n  recipe fake-provider vastai --faults lost@create=once,late=90 --clock virtual"
    )


def run(args: argparse.Namespace) -> int:
    if args.provider not in fakes.WORLDS:
        raise NotFound(
            f'there is no fake provider "{args.provider}"',
            fix=did_you_mean(args.provider, fakes.WORLDS) or f"known: {', '.join(fakes.WORLDS)}",
        )
    try:
        fakes.serve(
            args.provider,
            args.port,
            args.faults,
            args.seed,
            args.clock == "virtual",
            args.hosts == "real",
            _ready,
        )
    except ModuleNotFoundError as error:
        raise Infrastructure(
            f"a fake provider needs {error.name}, which is not installed", fix=fakes.INSTALL
        ) from error
    except ValueError as error:
        raise Invalid(
            [Problem("bad-request", str(error), fix="docs/fakes.md lists the faults")]
        ) from error
    except (OSError, OverflowError) as error:
        raise Infrastructure(
            f"cannot listen on 127.0.0.1:{args.port}: {error}",
            fix="give another --port, or none for a free one",
        ) from error
    except KeyboardInterrupt:
        return 0
    return 0


def _ready(lines: str) -> None:
    print(lines, end="", flush=True)
    print("Ctrl-C ends it", file=sys.stderr, flush=True)
