"""`recipe run --in-cluster`: the worker of a run as a job of the cluster, for login nodes that end long processes and laptops that are closed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from drivers.base import DriverError, Working

from ...errors import CannotRun, Infrastructure

if TYPE_CHECKING:
    import argparse

    from ...storage.workspace import Workspace


def submitted(ws: Workspace, args: argparse.Namespace) -> int:
    """Have the cluster carry out this command line; print what follows it.  Raises CannotRun, Infrastructure."""
    from ...hosts.leases import driver_of

    driver = driver_of(args.driver, ws.config.driver(args.driver), args.hosts, str(ws.home))
    if not isinstance(driver, Working):
        raise CannotRun(f"the driver {args.driver} has no jobs for a worker", fix="--in-cluster goes with --driver slurm")
    folder = ws.home / "in-cluster"
    folder.mkdir(exist_ok=True)
    log = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    words = [word for word in args.line if word != "--in-cluster"]
    command = (sys.executable, "-m", "runner.interface.cli.main", *words)
    try:
        job = asyncio.run(driver.work(command, os.getcwd(), str(log)))
    except DriverError as error:
        raise Infrastructure(str(error), fix=f"`recipe doctor --driver {args.driver}` looks at each part of the way there") from error
    print(f"job {job} works on this run")
    print(f"  follow it: tail -F {log}\n  its steps: recipe status\n  end it:    recipe cancel")
    return 0
