"""Workers of runs in PostgreSQL while the server is restarted and workers stand still: what began twice, was lost, or was stored twice.

usage: faults.py [--minutes 10] [--workers 4] [--restarts 5-40] [--zombies 0] [--seed 1] [--runs N] [--even]

Runs of two steps are submitted, each with a key of its own, until the minutes are over or there are N, as fast as they are done or, with `--even`,
spread over the minutes; `recipe worker` processes of one folder carry them out.  Meanwhile the server is ended at once (`pg_ctl stop -m immediate`)
and started again every 5 to 40 seconds (`--restarts 0`: never), and `--zombies` times a worker is stopped (SIGSTOP) for three times as long as a
claim lasts, and goes on then.  Each step writes a line to a file of its own when it begins.  At the end everything is looked at.  Exit code 1:
something began twice, was lost, or has a gap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psycopg
from durable import Durable

from runner.api.submitting import QueueSettings, submit
from runner.errors import RecipeError
from runner.execution.terms import Choice, Settings
from runner.storage.records.postgres_runs import CLAIM
from runner.storage.workspace import Workspace
from runner.survey.request import Request

RECIPE = """\
recipe: fault@1
inputs: {n: {type: integer}}
steps:
  a: {run: 'echo {{ inputs.n }} >> BEGAN/a{{ inputs.n }}; sleep 0.1; echo {{ inputs.n }} > a.txt', outputs: {o: a.txt}}
  b: {run: 'echo {{ inputs.n }} >> BEGAN/b{{ inputs.n }}; cp {{ steps.a.o }} b.txt', outputs: {o: b.txt}}
"""
AHEAD = 50
"""Runs that wait at most."""
PATIENCE = 900.0
"""Seconds for what is under way when the minutes are over."""


class Workers:
    """Worker processes of one folder.  One that ends by itself is counted and replaced."""

    def __init__(self, count: int, root: Path, environ: dict[str, str]) -> None:
        self._root, self._environ, self.ended = root, environ, 0
        self._log = (root / "workers.log").open("ab")
        self.running = [self._begun() for _ in range(count)]

    def _begun(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "runner.interface.cli.main", "worker", "-q"]
        return subprocess.Popen(
            argv,
            cwd=self._root,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def tend(self) -> None:
        for n, each in enumerate(self.running):
            if each.poll() is not None:
                self.ended += 1
                self.running[n] = self._begun()

    def end(self) -> None:
        for each in self.running:
            each.send_signal(signal.SIGCONT)
            each.terminate()
        for each in self.running:
            each.wait(60)


class Faults:
    """What goes wrong meanwhile, in threads."""

    def __init__(self, server: Durable, workers: Workers, seed: int) -> None:
        self._server, self._workers, self._random = server, workers, random.Random(seed)
        self._over, self.restarts, self.zombies = threading.Event(), 0, 0
        self._threads: list[threading.Thread] = []

    def restart(self, least: float, most: float) -> None:
        def act() -> None:
            while not self._over.wait(self._random.uniform(least, most)):
                self._server.stop()
                self._server.start()
                self.restarts += 1

        self._begin(act)

    def stop(self, count: int, minutes: float) -> None:
        """Stop a worker so often, spread over the minutes."""
        free = list(range(len(self._workers.running) - 1))  # one is never stopped

        def one(n: int) -> None:
            worker = self._workers.running[n]
            worker.send_signal(signal.SIGSTOP)
            self._over.wait(3 * CLAIM)
            worker.send_signal(signal.SIGCONT)
            self.zombies += 1
            free.append(n)

        def act() -> None:
            pause = max(0.1, (60 * minutes - 3 * CLAIM) / max(1, count))
            for _ in range(count):
                if self._over.wait(pause):
                    return
                if free:
                    self._begin(partial(one, free.pop(self._random.randrange(len(free)))))

        self._begin(act)

    def _begin(self, act: Callable[[], None]) -> None:
        thread = threading.Thread(target=act, daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def submitted(root: Path, environ: dict[str, str], n: int) -> int:
    """Submit one run, again and again under its key while the database does not answer.  Answers how often it did not."""
    failed = 0
    while True:
        try:
            with Workspace.open(root, environ=environ) as ws:
                submit(
                    ws,
                    Request("./recipe.yaml", {"n": n}),
                    Choice(),
                    Settings(),
                    QueueSettings(idempotency=f"k{n}", here=True),
                )
            return failed
        except (RecipeError, psycopg.Error):
            failed += 1
            time.sleep(0.2)


def asked(url: str, statement: str) -> list[tuple[object, ...]]:
    """What the database says, once it answers."""
    while True:
        try:
            with psycopg.connect(url, autocommit=True) as db:
                return db.execute(statement.encode()).fetchall()
        except psycopg.Error:
            time.sleep(0.2)


def faults_of(url: str, root: Path, count: int) -> list[str]:
    """Everything that must not be."""
    states = dict(asked(url, "SELECT state, count(*) FROM runs GROUP BY state"))
    found = [] if states == {"COMPLETED": count} else [f"of {count} runs: {states}"]
    for step in "ab":
        lines = [
            len((root / "began" / f"{step}{n}").read_text().split())
            if (root / "began" / f"{step}{n}").exists()
            else 0
            for n in range(count)
        ]
        found += (
            [f"{sum(each > 1 for each in lines)} steps {step} began twice, {lines.count(0)} never"]
            if set(lines) != {1}
            else []
        )
    whole = "HAVING count(*) <> r.next_event - 1 OR max(e.seq) <> count(*)"
    gaps = asked(
        url,
        f"SELECT r.id FROM runs r JOIN events e ON e.run = r.id GROUP BY r.id, r.next_event {whole}",
    )
    found += [f"{len(gaps)} runs have events with a gap"] if gaps else []
    twice = asked(
        url,
        "SELECT run, step FROM attempts WHERE outcome = 'done' GROUP BY run, step HAVING count(*) > 1",
    )
    ends = asked(
        url,
        "SELECT run, id FROM events WHERE subject = 'step' AND after = 'DONE' GROUP BY run, id HAVING count(*) > 1",
    )
    return found + [
        f"{len(rows)} {words}"
        for rows, words in (
            (twice, "steps have two attempts that are done"),
            (ends, "steps ended twice"),
        )
        if rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--restarts",
        default="5-40",
        help="seconds between two restarts of the server, LEAST-MOST; 0: none",
    )
    parser.add_argument(
        "--zombies",
        type=int,
        default=0,
        help="how often a worker is stopped for three times a claim",
    )
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--even", action="store_true", help="spread the runs over the minutes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recipe-faults") as folder, Durable() as server:
        root, url = Path(folder), server.url()
        (root / "began").mkdir()
        (root / "recipe.yaml").write_text(RECIPE.replace("BEGAN", f"{root}/began"))
        environ = {**os.environ, "RECIPE_RUNS": url, "PYTHONPATH": str(Path(__file__).parents[1])}
        submitted(root, environ, 0)
        workers = Workers(args.workers, root, environ)
        faults, begun, count, unanswered = (
            Faults(server, workers, args.seed),
            time.monotonic(),
            1,
            0,
        )
        if args.restarts != "0":
            least, _, most = args.restarts.partition("-")
            faults.restart(float(least), float(most or least))
        faults.stop(args.zombies, args.minutes)
        try:
            while count < args.runs and time.monotonic() - begun < 60 * args.minutes:
                workers.tend()
                waiting = int(
                    str(
                        asked(url, "SELECT count(*) FROM runs WHERE state IN ('QUEUED', 'ACTIVE')")[
                            0
                        ][0]
                    )
                )
                due = (
                    args.runs * (time.monotonic() - begun) / (60 * args.minutes)
                    if args.even
                    else args.runs
                )
                for _ in range(min(AHEAD - waiting, int(due) - count)):
                    unanswered += submitted(root, environ, count)
                    count += 1
                time.sleep(0.2)
            faults.end()
            until = time.monotonic() + PATIENCE
            while (
                asked(url, "SELECT 1 FROM runs WHERE state IN ('QUEUED', 'ACTIVE') LIMIT 1")
                and time.monotonic() < until
            ):
                workers.tend()
                time.sleep(0.2)
            found = faults_of(url, root, count)
        finally:
            faults.end()
            workers.end()
        recovered = asked(url, "SELECT count(*) FROM runs WHERE fence > 1")[0][0]
        print(
            f"{count} runs by {args.workers} workers in {time.monotonic() - begun:.0f} s; {faults.restarts} restarts, {faults.zombies} zombies"
        )
        print(
            f"{recovered} runs were taken over; {unanswered} submits asked again; {workers.ended} workers ended by themselves"
        )
        print("\n".join(found) if found else "nothing began twice, nothing was lost, no gap")
        if found or workers.ended:
            with contextlib.suppress(OSError):
                print((root / "workers.log").read_text()[-4000:], file=sys.stderr)
        return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
