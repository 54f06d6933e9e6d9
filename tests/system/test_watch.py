"""`recipe watch` runs again when something that a step reads is another, and only then; a mistake is told, and mended while it watches."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.interface.cli import run as running
from runner.interface.cli import watch
from runner.interface.cli.main import main
from tests.support import RECIPE, Space, until


class Watched:
    """A recipe that is being watched, and what was said."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.said = space.root.parent / "said"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*RECIPE, "watch"], cwd=space.root, stdout=said, stderr=said, start_new_session=True
            )

    def count(self, words: str) -> int:
        return self.said.read_text().count(words)

    def waits(self, times: int) -> None:
        until(lambda: self.count("recipe: watching") >= times, seconds=30)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    space = Space(tmp_path / "space")
    space.write("a.txt", "1\n")
    space.recipe(
        "steps: {s: {run: grep -v bad a.txt > o.txt, deps: [a.txt], outputs: {o: o.txt}}}\n"
    )
    found = Watched(space)
    yield found
    if found.process.poll() is None:
        os.killpg(found.process.pid, signal.SIGKILL)
    found.process.wait()


def test_a_change_runs_what_reads_it_a_failure_waits_for_the_next_and_ctrl_c_ends(
    watched: Watched,
) -> None:
    gate = watched.space.root.parent / "gate"
    watched.waits(1)
    assert watched.space.read("o.txt") == "1\n"
    watched.space.write("a.txt", "2\n")
    until(lambda: watched.space.read("o.txt") == "2\n", seconds=30)
    watched.waits(2)
    watched.space.write("a.txt", "bad\n")
    until(lambda: watched.count("1 failed") == 1, seconds=30)
    watched.waits(3)
    good = watched.space.read("recipe.yaml")
    watched.space.write("recipe.yaml", good.replace("deps:", "dpes:"))
    until(lambda: watched.count('did you mean "deps"') == 1, seconds=30)
    watched.waits(4)
    watched.space.write("a.txt", "3\n")
    watched.space.write("recipe.yaml", good)
    until(lambda: watched.space.read("o.txt") == "3\n", seconds=30)
    watched.waits(5)
    command = f"while [ -e {gate} ]; do sleep 0.05; done; grep -v bad a.txt > o.txt"
    watched.space.write("recipe.yaml", good.replace("grep -v bad a.txt > o.txt", f"'{command}'"))
    gate.touch()
    watched.space.write("a.txt", "4\n")
    until(lambda: bool(list(watched.space.root.glob(".recipe/attempts/*/a.txt"))), seconds=30)
    watched.space.write("a.txt", "5\n")  # while it runs
    gate.unlink()
    until(lambda: watched.space.read("o.txt") == "5\n", seconds=30)
    watched.waits(6)
    assert watched.count("1 failed") == 1 and watched.count("1 ran, 0 fresh") >= 4
    os.kill(watched.process.pid, signal.SIGINT)
    assert watched.process.wait(20) == 130


def test_watch_refuses_a_dry_run(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.recipe("steps: {s: {run: echo 1 > o.txt, outputs: {o: o.txt}}}")
    code, _, said = space.command("watch", "-n")
    assert code == 2 and "use `recipe plan`" in said
    assert not (tmp_path / "o.txt").exists()


def test_rentals_that_nobody_agreed_to_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space(tmp_path / "space")
    space.recipe("steps: {s: {run: 'true > o.txt', outputs: {o: o.txt}}}\n")
    asked: list[str] = []

    def refuse(_ws: object, _request: object, _choice: object, args: argparse.Namespace) -> bool:
        asked.append(args.verb)
        return False

    def stop(*_words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_confirm_cost", refuse)
    monkeypatch.setattr(watch, "_await_change", stop)
    assert main(["watch", "-C", str(space.root)]) == 130
    assert asked == ["watch"] and not (space.root / "o.txt").exists()
