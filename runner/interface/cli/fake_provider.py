"""`recipe fake-provider`: start a local fake GPU provider for tests, with faults on request."""

from __future__ import annotations

import argparse
import sys

from drivers import fakes, install_line

from ...errors import Infrastructure, Invalid, NotFound, Problem, did_you_mean


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "provider", metavar="PROVIDER", help=f"Provider to imitate: {', '.join(fakes.WORLDS)}"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="Port on 127.0.0.1 (default: a free port)",
    )
    parser.add_argument(
        "--faults",
        default="",
        metavar="FAULTS",
        help=(
            "Faults to inject, as NAME[@OPERATION]=CHANCE|once|AMOUNT,…; docs/fakes.md lists them"
        ),
    )
    parser.add_argument(
        "--clock",
        choices=("real", "virtual"),
        default="real",
        help=(
            "Clock of the provider: `real`, or `virtual`, which only POST /_clock advances "
            "(default: real)"
        ),
    )
    parser.add_argument(
        "--hosts",
        choices=("none", "real"),
        default="none",
        help=(
            "Machines of the provider: `none` accepts no logins; `real` starts local "
            "processes behind SSH on 127.0.0.1, which run commands as you (default: none)"
        ),
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Random seed of the offers and faults (default: 0)",
    )
    parser.epilog = (
        "Requires the extra `fakes`. Prints the variables to export, then serves until Ctrl-C.\n\n"
        'GET /_ledger: rentals and charges, as JSON lines. POST /_clock: {"advance": SECONDS}. POST /_faults: FAULTS.\n'
        "POST /_preempt: preempt every spot machine. POST /_exit: end every container (vastai).\n\n"
        "Examples:\n  recipe fake-provider vastai --port 8099\n  recipe fake-provider vastai --faults lost@create=once,late=90 --clock virtual"
    )


def run(args: argparse.Namespace) -> int:
    if args.provider not in fakes.WORLDS:
        raise NotFound(
            f'unknown fake provider "{args.provider}"',
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
            f"the fake provider requires {error.name}, which is not installed",
            fix=install_line("fakes"),
        ) from error
    except ValueError as error:
        raise Invalid(
            [Problem("bad-request", str(error), fix="see the list of faults in docs/fakes.md")]
        ) from error
    except (OSError, OverflowError) as error:
        raise Infrastructure(
            f"cannot listen on 127.0.0.1:{args.port}: {error}",
            fix="choose another `--port`, or omit it to get a free port",
        ) from error
    except KeyboardInterrupt:
        return 0
    return 0


def _ready(lines: str) -> None:
    print(lines, end="", flush=True)
    print("press Ctrl-C to stop", file=sys.stderr, flush=True)
