"""Runs of `recipe worker` in PostgreSQL beside the jobs of procrastinate and dbos: the same server, fsync on, one after the other in each round.

usage: durable.py --peers VENV/bin/python [--count 300] [--workers 1,4,8] [--rounds 3] [--rows protocol,true,submit,idle,recovery,request]

`protocol`: runs whose one step is fresh, against jobs that do nothing; `true`: one step that runs /bin/true, against subprocess.run of it.
A rate counts from the first end that was seen to the last; `with start` from the start of the worker processes.  Peers come from PyPI:
    python3 -m venv peers && peers/bin/pip install procrastinate==3.10.0 dbos==3.4.0 'psycopg[binary]'
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import psycopg

from runner.api.submitting import QueueSettings, submit
from runner.execution.terms import Choice, Settings
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.servers.postgres import Postgres

RECIPE = """\
recipe: bench@1
inputs: {n: {type: integer}}
steps: {s: {run: [/bin/true, "{{ inputs.n }}"]}}
"""
FRESH = """\
recipe: fresh@1
inputs: {n: {type: integer}}
steps: {s: {run: 'echo one > o', outputs: {o: o}}}
"""
LONG = """\
recipe: long@1
steps: {s: {run: 'trap "date +%s.%N > FOLDER/ended; exit 0" TERM; touch FOLDER/begun; while :; do sleep 0.02; done', outputs: {o: o}}}
"""
PATIENCE = 300.0


class Durable(Postgres):
    """The server with fsync on, as people have it."""

    def start(self) -> None:
        settings = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1"
        self._do(
            "pg_ctl",
            "-D",
            str(self._folder / "data"),
            "-w",
            "-l",
            str(self._folder / "log"),
            "-o",
            settings,
            "start",
        )


class Rate(NamedTuple):
    """Jobs a second."""

    submitted: float
    done: float
    with_start: float


def measured(
    url: str, over: str, count: int, start: Callable[[], contextlib.AbstractContextManager[object]]
) -> tuple[float, float]:
    """Jobs a second after the first end, and with the start of the processes.  `over` counts those that are over."""
    with psycopg.connect(url, autocommit=True) as db:
        begun = time.perf_counter()
        first, at_first, seen = 0.0, 0, 0
        with start():
            while seen < count:
                row = db.execute(over.encode()).fetchone()
                assert row is not None
                seen = int(row[0])
                if seen and not first:
                    first, at_first = time.perf_counter(), seen
                if time.perf_counter() - begun > PATIENCE:
                    sys.exit(f"{seen} of {count} after {PATIENCE:.0f} s")
                time.sleep(0.01)
            last = time.perf_counter()
    return (count - at_first) / max(last - first, 1e-3), count / (last - begun)


@contextlib.contextmanager
def workers(
    count: int, argv: list[str], cwd: Path, environ: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that work, each until its standard input ends."""
    log = (cwd / "workers.log").open("ab")
    running = [
        subprocess.Popen(argv, cwd=cwd, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log)
        for _ in range(count)
    ]
    try:
        yield running
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait(60)
        log.close()


class Ours:
    """A workspace whose runs are in PostgreSQL."""

    def __init__(self, folder: Path, url: str, text: str) -> None:
        self.root, self.url = folder, url
        self.environ = {**os.environ, "RECIPE_RUNS": url}
        (folder / "recipe.yaml").write_text(text)

    def submit(self, count: int) -> float:
        with Workspace.open(self.root, environ=self.environ) as ws:
            begun = time.perf_counter()
            for n in range(count):
                inputs = {"n": n} if "inputs:" in (self.root / "recipe.yaml").read_text() else {}
                submit(
                    ws,
                    Request("./recipe.yaml", inputs),
                    Choice(),
                    Settings(),
                    QueueSettings(here=True),
                )
            return count / (time.perf_counter() - begun)

    def worker(self) -> list[str]:
        return [sys.executable, "-m", "runner.interface.cli.main", "worker", "-q", "--tied"]

    def rate(
        self,
        count: int,
        width: int,
        over: str = "SELECT count(*) FROM runs WHERE state = 'COMPLETED'",
    ) -> Rate:
        submitted = self.submit(count)
        return Rate(
            submitted,
            *measured(
                self.url,
                over,
                count,
                lambda: workers(width, self.worker(), self.root, self.environ),
            ),
        )


def of_ours(url: str, kind: str, count: int, width: int) -> Rate:
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Path(folder), url, FRESH if kind == "noop" else RECIPE)
        if kind == "noop":
            subprocess.run(
                [*ours.worker()[:-3], "run", "-q", "n=0"],
                cwd=folder,
                env={**os.environ},
                check=True,
                stdout=subprocess.DEVNULL,
            )
        return ours.rate(count, width)


def of_peer(python: str, peer: str, url: str, kind: str, count: int, width: int) -> Rate:
    words = [python, str(Path(__file__).with_name("durable_peers.py")), peer]
    if peer == "dbos":
        url = url.partition("?")[0].rpartition("/")[0] + "/bench"
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [*words, "submit", url, str(count), kind],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        over = (
            "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"
            if peer == "procrastinate"
            else "SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'"
        )
        begin = lambda: workers(  # noqa: E731
            width, [*words, "work", url, str(count), kind], Path(folder), {**os.environ}
        )
        return Rate(float(told.split()[-1]), *measured(url, over, count, begin))


def fresh_url(server: Durable) -> str:
    """A new schema, and an empty database for dbos, which wants one of its own."""
    url = server.url()
    with psycopg.connect(
        url.partition("?")[0].rpartition("/")[0] + "/postgres", autocommit=True
    ) as db:
        db.execute("DROP DATABASE IF EXISTS bench WITH (FORCE)")
        db.execute("CREATE DATABASE bench")
    return url


def table(server: Durable, args: argparse.Namespace, kind: str) -> None:
    for width in map(int, args.workers.split(",")):
        found: dict[str, list[Rate]] = {}
        for _ in range(args.rounds):
            found.setdefault("recipe", []).append(
                of_ours(fresh_url(server), kind, args.count, width)
            )
            for peer in args.against.split(","):
                found.setdefault(peer, []).append(
                    of_peer(args.peers, peer, fresh_url(server), kind, args.count, width)
                )
        for name, rates in found.items():
            submitted, done, start = (statistics.median(each) for each in zip(*rates, strict=True))
            told = f"{done:7.1f} /s  with start {start:7.1f} /s  submit {submitted:7.1f} /s  load {os.getloadavg()[0]:.1f}"
            print(f"{kind:5} {width} workers  {name:14} {told}", flush=True)


def idle(server: Durable, seconds: float = 20.0) -> None:
    """What a worker takes while nothing is due."""
    url = fresh_url(server)
    with tempfile.TemporaryDirectory() as folder, psycopg.connect(url, autocommit=True) as db:
        ours = Ours(Path(folder), url, RECIPE)
        ours.submit(1)
        with workers(1, ours.worker(), ours.root, ours.environ) as (worker,):
            time.sleep(8)
            count = "SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database WHERE datname = current_database()"
            stat = Path(f"/proc/{worker.pid}/stat")
            ticks = lambda: sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))  # noqa: E731
            cpu, before = ticks(), db.execute(count).fetchone()
            time.sleep(seconds)
            used, after = ticks() - cpu, db.execute(count).fetchone()
            assert before is not None and after is not None
            hz = os.sysconf("SC_CLK_TCK")
            print(
                f"idle: {100 * used / hz / seconds:.2f} % CPU, {(int(after[0]) - int(before[0]) - 1) / seconds:.2f} transactions/s of the server",
                flush=True,
            )


def recovery(server: Durable, rounds: int) -> None:
    """Seconds from the kill of a worker to the claim of the next, which waits on the same machine."""
    url = fresh_url(server)
    with tempfile.TemporaryDirectory() as folder, psycopg.connect(url, autocommit=True) as db:
        ours = Ours(Path(folder), url, LONG.replace("FOLDER", folder))
        shown("recovery on the same machine", [recovered(ours, db) for _ in range(rounds)])


def recovered(ours: Ours, db: psycopg.Connection[tuple[object, ...]]) -> float:
    with workers(1, ours.worker(), ours.root, ours.environ) as (first,):
        ours.submit(1)
        wait(lambda: db.execute("SELECT 1 FROM steps WHERE state = 'RUNNING'").fetchone())
        with workers(1, ours.worker(), ours.root, ours.environ):
            time.sleep(2)
            row = db.execute("SELECT id, fence FROM runs ORDER BY created DESC LIMIT 1").fetchone()
            assert row is not None
            first.kill()
            begun = time.perf_counter()
            wait(
                lambda: db.execute(
                    "SELECT 1 FROM runs WHERE id = %s AND fence > %s", row
                ).fetchone()
            )
            took = time.perf_counter() - begun
            cancelled(ours, db, str(row[0]))
    return took


def cancelled(ours: Ours, db: psycopg.Connection[tuple[object, ...]], run: str) -> None:
    with Workspace.open(ours.root, environ=ours.environ) as ws:
        ws.store.runs.request(run, "cancel")
    wait(
        lambda: db.execute(
            "SELECT 1 FROM runs WHERE id = %s AND state = 'CANCELLED'", (run,)
        ).fetchone()
    )


def request(server: Durable, rounds: int) -> None:
    """Seconds from the row of a cancel to SIGTERM in the step."""
    url, took = fresh_url(server), []
    with tempfile.TemporaryDirectory() as folder, psycopg.connect(url, autocommit=True) as db:
        ours = Ours(Path(folder), url, LONG.replace("FOLDER", folder))
        with workers(1, ours.worker(), ours.root, ours.environ):
            for _ in range(rounds):
                for name in ("begun", "ended"):
                    (ours.root / name).unlink(missing_ok=True)
                ours.submit(1)
                wait((ours.root / "begun").exists)
                row = db.execute("SELECT id FROM runs ORDER BY created DESC LIMIT 1").fetchone()
                assert row is not None
                begun = time.time()
                cancelled(ours, db, str(row[0]))
                wait(
                    lambda: (
                        (ours.root / "ended").exists() and (ours.root / "ended").read_text().strip()
                    )
                )
                took.append(float((ours.root / "ended").read_text()) - begun)
    shown("request to SIGTERM", took)


def wait(what: Callable[[], object]) -> object:
    deadline = time.monotonic() + 120
    while not (found := what()):
        if time.monotonic() > deadline:
            sys.exit("nothing came in 120 s")
        time.sleep(0.01)
    return found


def shown(what: str, took: list[float]) -> None:
    took.sort()
    p99 = took[min(len(took) - 1, round(0.99 * (len(took) - 1)))]
    print(
        f"{what}: median {statistics.median(took):.2f} s, p99 {p99:.2f} s of {len(took)}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", default=sys.executable, help="a Python with procrastinate and dbos"
    )
    parser.add_argument("--against", default="procrastinate,dbos")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--workers", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="protocol,true,idle,recovery,request")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Durable() as server:
        for row in args.rows.split(","):
            if row in ("protocol", "true"):
                table(server, args, "noop" if row == "protocol" else "true")
            elif row == "idle":
                idle(server)
            else:
                {"recovery": recovery, "request": request}[row](server, 10 * args.rounds)


if __name__ == "__main__":
    main()
