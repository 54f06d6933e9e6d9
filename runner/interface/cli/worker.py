"""`recipe worker`: execute queued runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ...execution.queue import serve
from ...execution.steps.control import Handover
from ...execution.terms import Listener
from ...paths import data_folder
from ...storage.records.runs import LIMITED, ClaimCriteria
from ..console import for_stream
from .flags import EVENTS_HELP, check_driver, parse_label, positive

ENDS = (signal.SIGTERM, signal.SIGINT)
END_WITHIN = 28
"""Seconds from the first signal until the worker exits, even if it has not handed over its run."""
AGAIN = 2
"""Seconds from the second signal until the worker exits."""
OWN = ""
"""Value of `--workspace` without a directory."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "--once",
        action="store_true",
        help="Exit when the queue is empty instead of waiting",
    )
    words = (
        "Number of parallel runs, each in its own process (default: "
        "$MAX_CONCURRENT_JOBS, otherwise 1)"
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=os.environ.get("MAX_CONCURRENT_JOBS") or 1,
        metavar="N",
        help=words,
    )
    parser.add_argument(
        "--driver",
        default="",
        metavar="NAME",
        help="Execute only runs submitted for this driver",
    )
    parser.add_argument(
        "--label",
        type=parse_label,
        action="append",
        default=[],
        metavar="K=V",
        help="Label of this worker, which runs can require",
    )
    parser.add_argument(
        "--tied",
        action="store_true",
        help="Exit when stdin closes (for use as a child process)",
    )
    parser.add_argument(
        "--workspace",
        dest="own",
        nargs="?",
        const=OWN,
        metavar="DIR",
        help=(
            "Execute runs submitted from any directory or machine with the same shared store. DIR is "
            "the working directory (default: $RECIPE_HOME/worker)"
        ),
    )
    parser.add_argument(
        "--store",
        default="",
        metavar="NAME",
        help="Shared store for --workspace, by its name or URL (default: the store in recipe.toml)",
    )
    words = (
        "Limit concurrent runs per `user`, `recipe` or `driver` across all workers, for "
        "example user=2. Repeatable"
    )
    parser.add_argument(
        "--at-most",
        type=_parse_limit,
        action="append",
        default=[],
        metavar="WHAT=N",
        help=words,
    )
    parser.add_argument("--json", action="store_true", help=EVENTS_HELP)
    parser.description = (
        "Execute the runs queued in this workspace, by priority and then by age. If a "
        "run's worker has exited, this worker resumes the run.\n\n"
        "On SIGTERM or Ctrl-C, the worker stops claiming runs and hands over the current "
        "run within 30 seconds. A second signal stops it immediately. Started jobs "
        "continue, and the next worker takes them over."
    )
    parser.epilog = "Examples:\n  recipe worker\n  recipe worker --once\n  recipe worker --concurrency 2 --label gpu=a100"


def run(args: argparse.Namespace) -> int:
    if args.driver:
        check_driver(args.driver)
    if args.concurrency > 1:
        return _supervise_workers(args)
    handover = Handover()
    _handle_signals(handover)
    if args.tied:
        _terminate_on_close(sys.stdin.fileno())

    def listener() -> Listener:
        return for_stream(
            sys.stdout,
            sys.stderr,
            json=args.json,
            quiet=args.quiet,
            verbose=args.verbose,
            commands=False,
        )

    root = args.workspace if args.own is None else _worker_directory(args.own)
    if not args.quiet and not args.once:
        sys.stderr.write(f"recipe: process {os.getpid()} waits for runs in {root}\n")
    store = None if args.own is None else args.store
    serve(
        root,
        ClaimCriteria(args.driver, dict(args.label), dict(args.at_most)),
        listener,
        handover,
        os.environ,
        once=args.once,
        store=store,
    )
    return 0


def _handle_signals(handover: Handover) -> None:
    """Hand over the run on a signal of ENDS, and end the process if that takes too long."""

    def handle_signal(number: int, frame: object) -> None:
        handover(number, frame)
        seconds = END_WITHIN if handover.asked == 1 else AGAIN
        # The default action of SIGALRM ends the process, and the kernel releases the lock on its
        # run.
        signal.alarm(seconds)

    for each in ENDS:
        signal.signal(each, handle_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)  # blocked by `_fork`


def _terminate_on_close(handle: int) -> None:
    """Send SIGTERM to this process when all writers of the pipe `handle` have closed it."""

    def watch() -> None:
        while os.read(handle, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="tied", daemon=True).start()


def _worker_directory(named: str) -> Path:
    """Return the directory of a worker for several workspaces; create it if missing."""
    base = os.environ.get("RECIPE_HOME") or str(data_folder(os.environ))
    root = Path(os.path.abspath(named or f"{base}/worker"))
    root.mkdir(parents=True, exist_ok=True)
    return root


def _supervise_workers(args: argparse.Namespace) -> int:
    """Start `--concurrency` worker processes, replace those killed by a signal, and wait for all.

    The workers exit when this process ends, even by SIGKILL, so that no worker claims runs without
    a supervisor: the kernel then closes the pipe that the workers watch.
    """
    handover, workers = Handover(), set[int]()
    tie = os.pipe()

    def handle_signal(number: int, frame: object) -> None:
        handover(number, frame)
        _terminate(workers)

    for each in ENDS:
        signal.signal(each, handle_signal)
    bad = 0
    for _ in range(args.concurrency):
        _fork(args, workers, tie)
    while workers:
        pid, status = os.wait()
        workers.discard(pid)
        died = os.WIFSIGNALED(status)
        bad = bad or os.waitstatus_to_exitcode(status)
        if died and not handover.asked:
            print(
                f"recipe: worker process {pid} died ({signal.Signals(os.WTERMSIG(status)).name}); a new worker process replaces it",
                file=sys.stderr,
            )
            time.sleep(1.0)
            _fork(args, workers, tie)
    return 1 if bad > 0 else 0


def _terminate(workers: set[int]) -> None:
    for pid in list(workers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _fork(args: argparse.Namespace, workers: set[int], tie: tuple[int, int]) -> None:
    """Fork a worker process and add its pid to `workers`.

    Signals are blocked until the pid is added here, and until the handlers are set in the worker.
    `tie` is a pipe whose write end only this process keeps open.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    pid = os.fork()
    if pid:
        workers.add(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        return
    code = 1
    os.setpgrp()  # so that Ctrl-C reaches the workers only once, through `_terminate`
    kept, ours = tie
    os.close(ours)
    try:
        _terminate_on_close(kept)
        code = run(argparse.Namespace(**{**vars(args), "concurrency": 1}))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _parse_limit(text: str) -> tuple[str, int]:
    kind, number = parse_label(text)
    if kind not in LIMITED:
        raise argparse.ArgumentTypeError(f'"{kind}" is not one of {", ".join(LIMITED)}')
    return kind, positive(number)
