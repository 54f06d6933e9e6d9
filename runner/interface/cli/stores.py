"""`recipe push`, `pull` and `config`: transfer results to and from a shared store, and show
settings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ...api.finding import find_run
from ...errors import CannotRun, NotFound
from ...execution.results import collect
from ...execution.session import preview
from ...execution.terms import request_of_run
from ...language.units import about, count_text
from ...paths import is_path, settings_files
from ...settings import list_settings
from ...storage.records.runs import FINAL
from ...storage.remote.cache import RemoteCache, Tally, push
from ...storage.workspace import Workspace, local_folder
from ...survey.remote_results import local_traces, pull
from ..tail import canvas, safe_ids, safe_line
from . import saved_inputs
from .flags import JSON_HELP, RUN_HELP
from .targets import add_request_words, open_for_reading, resolve_requests

if TYPE_CHECKING:
    from threading import Event

    from ...storage.records.index import Trace
    from ...storage.records.runs import RunRow


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    if verb == "config":
        parser.add_argument(
            "what",
            nargs="?",
            choices=saved_inputs.VERBS,
            help="Action for saved inputs (default: show the settings)",
        )
        add_request_words(parser)
        parser.add_argument(
            "--note", default="", metavar="TEXT", help="Note to store with the saved inputs"
        )
        parser.add_argument(
            "--replace",
            action="store_true",
            help="Overwrite an existing name or file, with save and restore",
        )
        parser.add_argument(
            "-o",
            dest="output",
            metavar="FILE",
            help="File to write, with restore (default: NAME.json)",
        )
        parser.epilog = (
            "Settings never contain credentials. recipe reads those from AWS_* and GOOGLE_* "
            "variables, ~/.aws and gcloud.\n\n"
            "Examples:\n  recipe config\n  recipe config save base sft@1 dataset=data.jsonl "
            'rank=16 --note "before the new data"\n  recipe config diff base wide\n  recipe '
            "config restore base"
        )
        return
    if verb == "fetch":
        parser.add_argument(
            "run",
            nargs="?",
            default="last",
            metavar="RUN",
            help=f"{RUN_HELP} (default: last)",
        )
        parser.add_argument(
            "--out",
            type=local_folder,
            metavar="DIR",
            help="Target directory (default: where `recipe run` would publish)",
        )
        parser.add_argument(
            "--overwrite",
            action="store_true",
            help="Replace existing files that were not created by recipe",
        )
        parser.epilog = "Examples:\n  recipe fetch\n  recipe fetch 3f1035 --out ./results"
    else:
        add_request_words(parser)
    parser.add_argument(
        "--store",
        metavar="NAME",
        help=(
            "Shared store, by its name in recipe.toml or its URL (default: the store in "
            "recipe.toml)"
        ),
    )
    if verb == "push":
        parser.add_argument(
            "--all", action="store_true", help="Upload all cached results of every recipe"
        )
        parser.epilog = "Examples:\n  recipe push\n  recipe push ./pipeline.yaml lr=0.2 --store team\n  recipe push --all"
    elif verb == "pull":
        parser.epilog = (
            "Downloads the outputs of every step whose result is in the cache or the store, "
            "so that `recipe run` needs no network.\n\n"
            "Examples:\n  recipe pull\n  recipe pull sft@1 dataset=data.jsonl --store "
            "s3://our-bucket/recipes"
        )


def run(args: argparse.Namespace) -> int:
    if args.verb == "fetch" and args.server:
        from . import downloads

        return downloads.run(args)
    if args.verb == "config":
        return saved_inputs.run(args) if args.what is not None else _config(args)
    with Workspace.open(args.workspace) as ws:
        if args.verb == "fetch":
            return _fetch(ws, args)
        if args.verb == "push":
            return _push(ws, args)
        return _pull(ws, args)


def open_store(ws: Workspace, name: str | None) -> RemoteCache:
    """Open the shared store `name`, by default the store of recipe.toml.

    Raises NotFound without a store.
    """
    found = ws.share(name or ws.config.store or None)
    if found is None:
        raise NotFound(
            "no store given, and recipe.toml sets none",
            fix='pass `--store NAME`, or set `store = "NAME"` and [stores.NAME] with a `url` in recipe.toml',
        )
    return found


def _push(ws: Workspace, args: argparse.Namespace) -> int:
    traces: dict[str, tuple[Trace, frozenset[str]]] = {}
    if args.all:
        traces = {trace.key: (trace, frozenset()) for trace in ws.store.index.every_trace()}
    else:
        for request in resolve_requests(ws, args):
            for trace, kept in local_traces(ws, preview(ws, request)):
                traces[trace.key] = (trace, kept)
    remote_cache = open_store(ws, args.store)
    with _show_progress(args, lambda: remote_cache.remote.sent) as progress:
        tally = push(ws.objects, remote_cache, list(traces.values()), progress)
    return _summary(args, remote_cache, tally, "put", "into")


def _pull(ws: Workspace, args: argparse.Namespace) -> int:
    remote_cache = open_store(ws, args.store)
    remote_cache.remote.check()
    tally = Tally()
    with _show_progress(args, lambda: remote_cache.remote.received) as progress:
        for request in resolve_requests(ws, args):
            found = preview(ws, request)
            tally += pull(ws, remote_cache, found, progress)
    ws.save_cache()
    return _summary(args, remote_cache, tally, "brought", "from")


def _fetch(ws: Workspace, args: argparse.Namespace) -> int:
    row = find_run(ws.store, args.run)
    if row.state != "COMPLETED" or not row.bundle:
        raise _nothing_to_fetch(row)
    request = request_of_run(row)
    base = ws.root
    if args.out is not None:
        base = ws.absolute(args.out)
    elif request is not None and request.out is not None:
        base = ws.absolute(str(request.out))
    elif request is not None and not is_path(request.recipe):
        base = ws.root / "out" / row.recipe / row.plan[:12]
    cache = open_store(ws, args.store or row.store)
    paths = collect(ws, row, base, overwrite=args.overwrite)
    shown_paths = [os.path.relpath(path) for path in paths]
    if args.json:
        outputs = []
        for each, path in zip(row.outputs, shown_paths, strict=True):
            outputs.append({**each._asdict(), "path": path})
        print(json.dumps({"run": row.id, "store": cache.remote.url, "outputs": outputs}, indent=2))
    elif not args.quiet:
        for each, path in zip(row.outputs, shown_paths, strict=True):
            print(safe_line(f"{each.name}  {path}  {about(each.size)}"))
    return 0


def _nothing_to_fetch(row: RunRow) -> CannotRun:
    """Return the error for a run that is not complete, or that has no outputs elsewhere."""
    if row.state in FINAL:
        fix = f"see its log with `recipe logs {row.id}`"
    else:
        fix = f"follow it with `recipe logs -f {row.id}`"
    words = f"is {row.state}"
    if not row.bundle:
        words = "ran in this directory; its outputs are already here"
    return CannotRun(f"run {row.id} {words}", fix=fix)


def _summary(
    args: argparse.Namespace, remote_cache: RemoteCache, tally: Tally, did: str, where: str
) -> int:
    problems = [*remote_cache.pop_notices(), *tally.problems]
    if args.json:
        facts = {
            "store": remote_cache.name,
            "url": remote_cache.remote.url,
            "steps": tally.steps,
            "contents": tally.contents,
            "bytes": tally.bytes,
        }
        print(json.dumps({**facts, "problems": problems}, indent=2))
    else:
        for problem in problems:
            print(f"recipe: {problem}", file=sys.stderr)
        if not args.quiet:
            steps = count_text(tally.steps, "step")
            outputs = count_text(tally.contents, "output")
            size = about(tally.bytes)
            print(f"{did} {size} {where} {remote_cache.name}: {steps}, {outputs}")
    return 5 if problems else 0


_CLEAR_LINE: Final = "\r\x1b[K"


class _TransferMeter:
    """The transfer of each step's results and, on a terminal, the live total.

    `count` returns the transferred bytes.
    """

    def __init__(self, args: argparse.Namespace, count: Callable[[], int]) -> None:
        self._count = count
        self._is_silent = bool(args.json or args.quiet)
        self._lists_stored = bool(args.verbose)
        self.is_live = sys.stderr.isatty() and not self._is_silent
        self._begun = time.monotonic()
        self._last = self._begun

    def draw_until(self, over: Event) -> None:
        """Redraw the total until `over` is set."""
        while not over.wait(0.2):
            done = self._count()
            seconds = time.monotonic() - self._begun
            total = f"{about(done)}  {about(int(done / seconds))}/s"
            print(f"{_CLEAR_LINE}{total}", end="", file=canvas(sys.stderr), flush=True)

    def clear(self) -> None:
        print(_CLEAR_LINE, end="", file=canvas(sys.stderr), flush=True)

    def report(self, step: str, moved: int) -> None:
        """Print the bytes that a step moved since the last report, and their rate."""
        now = time.monotonic()
        seconds = max(now - self._last, 1e-6)
        self._last = now
        if self._is_silent or not (moved or self._lists_stored):
            return
        start = _CLEAR_LINE if self.is_live else ""
        rate = f"{about(int(moved / seconds))}/s" if moved else "already stored"
        print(f"{start}{safe_ids(step)}  {about(moved)}  {rate}", file=canvas(sys.stderr))


@contextmanager
def _show_progress(
    args: argparse.Namespace, count: Callable[[], int]
) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that prints each step's transfer; on a terminal, also show the total live.

    `count` returns the transferred bytes.
    """
    meter = _TransferMeter(args, count)
    over = threading.Event()
    drawing = threading.Thread(target=meter.draw_until, args=(over,), daemon=True)
    if meter.is_live:
        drawing.start()
    try:
        yield meter.report
    finally:
        over.set()
        if meter.is_live:
            drawing.join()
            meter.clear()


# -- config ----------------------------------------------------------------------------------------


def _config(args: argparse.Namespace) -> int:
    with open_for_reading(args.workspace) as ws:
        config = ws.config
        files = settings_files(ws.root, os.environ)
    rows = list_settings(config)
    if args.json:
        read = [{"path": path, "exists": os.path.exists(path)} for path in files]
        facts: dict[str, object] = {
            "files": read,
            "settings": [
                {"name": name, "value": value, "from": origin} for name, value, origin in rows
            ],
        }
        print(json.dumps(facts, indent=2))
        return 0
    names = max((len(name) for name, _, _ in rows), default=0)
    values = max((len(_plain(value)) for _, value, _ in rows), default=0)
    for name, value, origin in rows:
        print(f"{name:<{names}}  {_plain(value):<{min(values, 60)}}  {safe_line(origin)}")
    if not rows:
        print("no settings")
    if not args.quiet:
        for path in files:
            state = "read" if os.path.exists(path) else "does not exist"
            print(f"{path}: {state}", file=sys.stderr)
    return 0


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return safe_line(text)
