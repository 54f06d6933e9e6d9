"""Kill `recipe run` and its agent again and again, and count the steps that began twice.

usage: kills.py [--kills 100] [--whom any] [--steps 24] [--seed 1] [--jobs 2] [--driver local] [--root DIR]

Each workspace is a graph of short steps with outputs of every size.  A step writes a line to a file of its own, outside its attempt, when its command
begins and when it ends.  The worker, the agent (the parent of steps), what carries our questions on a host (`attach`), or several are killed
(SIGKILL): at any moment, or within 200 ms of an end; where the worker was, `recipe run` is started again.  With `--driver ssh` the host is a real
sshd of this machine, with a root of its own for each workspace.  After a few kills a run may end, and everything is looked at.  Exit code 1: a step
began twice or was lost, or a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

KILLS = 8
"""In one workspace, at most."""
WHOM = ["worker", "agent", "worker agent", "attach", "attach agent", "worker attach agent"]
"""Who is killed together; the first three are all that there are on this machine."""
PATIENCE = 120.0
"""Seconds until a run that goes on by itself is taken for stuck."""
RECIPE = [
    sys.executable,
    "-c",
    "import sys; from runner.interface.cli.main import main; sys.exit(main(sys.argv[1:]))",
]

Step = dict[str, object]


def tiny(id: str) -> Step:
    return {"run": f"echo {id} > {id}.txt", "outputs": {"o": f"{id}.txt"}}


def large(id: str) -> Step:
    return {
        "run": f"head -c 1000000 /dev/zero > {id}.txt; echo {id} >> {id}.txt",
        "outputs": {"o": f"{id}.txt"},
    }


def tree(id: str) -> Step:
    make = f"mkdir {id}.d/deep; head -c 80000 /dev/zero > {id}.d/deep/zeros; for n in 1 2 3 4 5 6 7 8; do echo {id} $n > {id}.d/$n; done"
    return {"run": f"{make}; echo {id} > {id}.txt", "outputs": {"o": f"{id}.txt", "d": f"{id}.d/"}}


def several(id: str) -> Step:
    make = f"for n in 1 2 3; do head -c $((n * 30000)) /dev/zero > {id}.$n; done; printf '#!/bin/sh\\n' > {id}.sh; chmod +x {id}.sh"
    outputs = {"o": f"{id}.txt", "program": f"{id}.sh", **{f"n{n}": f"{id}.{n}" for n in (1, 2, 3)}}
    return {"run": f"{make}; echo {id} > {id}.txt", "outputs": outputs}


def measured(id: str) -> Step:
    return {
        "run": f"""echo '{{"loss": 0.5}}' >> $RECIPE_METRICS; echo {id} > {id}.txt""",
        "outputs": {"o": f"{id}.txt"},
        "metrics": True,
    }


def resumed(id: str) -> Step:
    make = f"seq 3 | while read n; do echo $n > {id}.state/step-$n; done; echo {id} > {id}.txt"
    return {
        "run": make,
        "outputs": {"o": f"{id}.txt"},
        "state": {"kept": {"path": f"{id}.state/", "checkpoint": "step-*"}},
    }


def passing(id: str) -> Step:
    outputs = {"o": f"{id}.txt", "t": {"path": f"{id}.tmp", "temporary": True}}
    return {"run": f"head -c 9000 /dev/zero > {id}.tmp; echo {id} > {id}.txt", "outputs": outputs}


KINDS: tuple[Callable[[str], Step], ...] = (tiny, large, tree, several, measured, resumed, passing)


def graph(rng: random.Random, notes: Path, count: int) -> tuple[dict[str, Step], dict[str, str]]:
    """The steps of one workspace, and the file that shows each to be done."""
    steps: dict[str, Step] = {}
    kinds: dict[str, Callable[[str], Step]] = {}
    for n in range(count):
        id = f"s{n:02}"
        kind = kinds[id] = KINDS[n % len(KINDS)] if n < len(KINDS) else rng.choice(KINDS)
        above = rng.sample(sorted(steps), min(len(steps), rng.randint(0, 2)))
        read = [f"cat {{{{ steps.{up}.o }}}} > /dev/null" for up in above]
        read += [f"test -s {{{{ steps.{up}.t }}}}" for up in above if kinds[up] is passing]
        read += [f": {{{{ steps.{up}.metrics.loss }}}}" for up in above if kinds[up] is measured]
        pause = [f"sleep {rng.choice([0.02, 0.1, 0.4])}"] if rng.random() < 0.3 else []
        step = kind(id)
        parts = [
            "set -e",
            f"echo begun >> {notes}/{id}",
            *read,
            *pause,
            str(step["run"]),
            f"echo ended >> {notes}/{id}",
        ]
        steps[id] = {**step, "run": "\n".join(parts)}
    return steps, {id: f"{id}.txt" for id in steps}


@dataclass
class Tally:
    """What became of it."""

    kills: int = 0
    workspaces: int = 0
    again: list[str] = field(default_factory=list)  # steps that had ended and began again
    doubled: list[str] = field(default_factory=list)  # steps that were running and began again
    lost: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # what runs said that did not end well

    @property
    def bad(self) -> bool:
        return bool(self.again or self.doubled or self.lost or self.failed)


class Workspace:
    """One folder, its recipe and what its steps wrote down."""

    def __init__(
        self,
        root: Path,
        rng: random.Random,
        steps: int,
        jobs: int,
        driver: str,
        whom: str,
        settings: str = "",
    ) -> None:
        self.root, self.rng, self.notes = root, rng, root / "notes"
        self.there = root / ".recipe" / "local" if driver == "local" else root / "there"
        self.choices = [whom] if whom != "any" else WHOM[: 3 if driver == "local" else None]
        self.process: subprocess.Popen[bytes] | None = None
        self.words = [*RECIPE, "run", f"-j{jobs}", "--driver", driver]
        self.notes.mkdir(parents=True)
        made, self.shown = graph(rng, self.notes, steps)
        if settings:
            (root / "recipe.toml").write_text(
                f'[drivers.{driver}]\n{settings}root = "{self.there}"\n'
            )
        (root / "recipe.yaml").write_text(
            json.dumps({"recipe": "kills@1", "summary": "Short steps", "steps": made}, indent=1)
        )

    def ends(self) -> int:
        return sum(path.read_text().count("ended") for path in self.notes.iterdir())

    def start(self) -> subprocess.Popen[bytes]:
        with (self.root / "said").open("wb") as said:
            return subprocess.Popen(
                self.words,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def killed(self) -> tuple[bool, int]:
        """Have a run under way and kill something at some moment: whether that was in time, and else its exit code."""
        process, before = self.process or self.start(), self.ends()
        self.process = process
        begun = time.monotonic()
        some_time = self.rng.choice([0.3, 1.0, 3.0]) * self.rng.random()
        after_an_end = self.rng.random() < 0.6
        while process.poll() is None and time.monotonic() - begun < PATIENCE:
            if (after_an_end and self.ends() > before) or (
                not after_an_end and time.monotonic() - begun > some_time
            ):
                time.sleep(self.rng.random() * 0.2 if after_an_end else 0.0)
                break
            time.sleep(0.002)
        whom = self.rng.choice(self.choices)
        while "worker" not in whom and process.poll() is None and not self.programs(whom):
            time.sleep(0.002)
        hit = process.poll() is None
        for pid in self.programs(whom):
            with contextlib.suppress(OSError):
                if (
                    self.kind(pid) in whom.split()
                ):  # a job that its agent is just forking looks like the agent for a moment
                    os.kill(pid, signal.SIGKILL)
        if "worker" not in whom and hit:
            return True, 0
        self.process = None
        process.kill()
        code = process.wait()
        return code == -signal.SIGKILL, code

    def programs(self, whom: str) -> list[int]:
        """What serves this workspace where its steps run: its agent, and what carries our questions to it."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if self.kind(pid) in whom.split():
                    found.append(pid)
        return found

    def kind(self, pid: int) -> str:
        """What a process is to this workspace: its agent, attach, or nothing.  Raises OSError when it is gone."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if self.there.name == "there":
            is_agent = f"{self.there}/agent".encode() in words
        else:  # one agent for each combination of limits
            is_agent = any(word.startswith(f"{self.there}/".encode()) for word in words)
        if is_agent:
            return "agent"
        return "attach" if str(self.there).encode() in words else ""

    def finish(self) -> int:
        process, self.process = self.process or self.start(), None
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def look(self, tally: Tally) -> None:
        for id, shown in self.shown.items():
            note, path = self.notes / id, self.root / shown
            lines = note.read_text().split() if note.exists() else []
            where = f"{self.root}: {id}"
            if "begun" in lines[lines.index("ended") if "ended" in lines else len(lines) :]:
                tally.again.append(where)
            elif lines.count("begun") > 1:
                tally.doubled.append(where)
            if (
                lines.count("ended") != lines.count("begun")
                or not lines
                or not path.exists()
                or not path.read_text().endswith(f"{id}\n")
            ):
                tally.lost.append(where)


def run(
    kills: int,
    seed: int,
    steps: int,
    jobs: int,
    driver: str,
    whom: str,
    top: Path,
    settings: str = "",
) -> Tally:
    """Kill so often, in as many workspaces as that takes; those in which nothing went wrong are deleted."""
    rng, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        space = Workspace(top / f"w{tally.workspaces}", rng, steps, jobs, driver, whom, settings)
        tally.workspaces += 1
        faults = Tally()
        code = 0
        for _ in range(min(rng.randint(1, KILLS), kills - tally.kills)):
            in_time, code = space.killed()
            if not in_time:
                break
            tally.kills += 1
            code = 0
        code = code or space.finish()
        if code:
            faults.failed.append(
                f"{space.root}: exit code {code}: {(space.root / 'said').read_text(errors='replace')[-600:]}"
            )
        space.look(faults)
        tally.again += faults.again
        tally.doubled += faults.doubled
        tally.lost += faults.lost
        tally.failed += faults.failed
        if not faults.bad:
            shutil.rmtree(space.root, onerror=_writable)
    return tally


def _writable(do: Callable[..., object], path: str, _error: object) -> None:
    """Folders of stored trees are read-only."""
    os.chmod(os.path.dirname(path), 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        shutil.rmtree(path, onerror=_writable)
    elif os.path.lexists(path):
        os.unlink(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="how often somebody is killed")
    parser.add_argument("--whom", choices=(*WHOM, "any"), default="any", help="who is killed")
    parser.add_argument("--steps", type=int, default=24, help="in each workspace")
    parser.add_argument("--seed", type=int, default=1, help="of the graphs and the moments")
    parser.add_argument("--jobs", type=int, default=2, help="steps at once")
    parser.add_argument(
        "--driver", default="local", choices=("local", "ssh"), help="where steps run"
    )
    parser.add_argument(
        "--root", type=Path, help="where workspaces are made; those that show a fault stay"
    )
    given = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="kills-", dir=given.root))
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        settings = ""
        if given.driver == "ssh":
            from tests.servers.sshd import Sshd

            sshd = stack.enter_context(Sshd(top / "sshd"))
            settings = (
                f'hosts = ["{sshd.address}"]\nagent = false\nknown_hosts = "{sshd.known_hosts}"\n'
                f'identity = "{sshd.identity}"\nslots = {given.jobs}\n'
            )
        tally = run(
            given.kills,
            given.seed,
            given.steps,
            given.jobs,
            given.driver,
            given.whom,
            top,
            settings,
        )
    print(
        f"{tally.kills} kills in {tally.workspaces} workspaces of {given.steps} steps, {time.monotonic() - begun:.0f} s"
    )
    for words, found in (
        ("finished steps begun twice", tally.again),
        ("running steps begun twice", tally.doubled),
        ("steps lost", tally.lost),
        ("runs that did not end well", tally.failed),
    ):
        print(f"{len(found):5} {words}", *found, sep="\n      ")
    if not tally.bad:
        shutil.rmtree(top, onerror=_writable)
    return int(tally.bad)


if __name__ == "__main__":
    sys.exit(main())
