"""`recipe fetch --to SERVER`: download a run's outputs over the server's API.

Without a server, `stores.py` fetches the outputs from the shared store into their published paths.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from pathlib import Path

from ...language.units import about
from ...paths import beside
from ...storage.records.runs import FINAL
from ..handle.http_transport import HttpTransport
from ..handle.shells import Run
from ..tail import safe_line


def run(args: argparse.Namespace) -> int:
    """Download a run's outputs from the server `args.server`.  Raises RecipeError."""
    with closing(HttpTransport(args.server)) as there:
        return _fetch(there, args)


def _fetch(there: HttpTransport, args: argparse.Namespace) -> int:
    run = Run(there, there.find(args.run))
    now = run.status()
    folder = Path("out") / now.recipe / run.id
    if args.out is not None:
        folder = Path(args.location.typed(str(args.out)))
    folder = args.workspace / folder
    paths = run.download(folder, overwrite=args.overwrite)
    names = {path: path.relative_to(os.path.abspath(folder)).as_posix() for path in paths}
    if args.json:
        files = []
        for path in paths:
            size = path.lstat().st_size
            files.append({"name": names[path], "path": beside(str(path)), "bytes": size})
        facts = {"run": run.id, "server": there.name, "state": now.state, "files": files}
        print(json.dumps(facts, indent=2))
    elif not args.quiet:
        for path in paths:
            print(safe_line(f"{names[path]}  {beside(str(path))}  {about(path.lstat().st_size)}"))
    if now.state not in FINAL and not args.quiet:
        print(f"recipe: run {run.id} has not finished: more outputs may follow", file=sys.stderr)
    return 0
