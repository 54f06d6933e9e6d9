"""A step whose command has ended well never begins again, at whatever moment the worker is killed: the next run takes what it made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.execution.terms import Choice, Settings
from tests.support import Space

RECIPE = """
steps:
  many:
    run: |
      echo many >> {starts}
      echo tiny > tiny; head -c 20000 /dev/zero > small; head -c 1000000 /dev/zero > large
      echo 1 > tree/one; mkdir tree/deep; head -c 100000 /dev/zero > tree/deep/two; ln -s one tree/link
      printf '#!/bin/sh\\necho run\\n' > program; chmod +x program
      echo 5 > states/count; echo '{{"loss": 0.5}}' > measured.json
    outputs:
      tiny: tiny
      small: small
      large: large
      tree: tree/
      program: program
      measured: measured.json
      absent: {{path: absent, optional: true}}
      count: states/count
      passing: {{path: passing, temporary: true, optional: true}}
    state: {{states: {{path: states, checkpoint: "count"}}}}
    metrics: {{file: measured.json}}
  log:
    run: |
      echo log >> {starts}; echo "accuracy: {{{{ steps.many.metrics.loss }}}}"
      echo 1 > log.txt
    outputs: {{o: log.txt}}
    metrics: {{pattern: 'accuracy: (?P<accuracy>[0-9.]+)'}}
  told:
    run: |
      echo told >> {starts}; printf '{{"f1": %s}}\\n' {{{{ steps.log.metrics.accuracy }}}} >> $RECIPE_METRICS
      cat {{{{ steps.many.tree }}}}/one {{{{ steps.many.tiny }}}} > told.txt
    outputs: {{o: told.txt}}
    metrics: true
  last:
    run: |
      echo last >> {starts}; echo {{{{ steps.told.metrics.f1 }}}} > last.txt; cat {{{{ steps.told.o }}}} >> last.txt
    outputs: {{o: last.txt}}
"""
STEPS = ["many", "log", "told", "last"]


def varied(space: Space) -> None:
    """Outputs of every size and kind, metrics from every source; each step needs the one before it."""
    space.recipe(RECIPE.format(starts=space.root / "starts"))


def starts(space: Space) -> list[str]:
    path = space.root / "starts"
    return path.read_text().split() if path.exists() else []


def is_whole(space: Space) -> bool:
    sizes = [(space.root / name).stat().st_size for name in ("small", "large", "tree/deep/two")]
    assert (
        os.access(space.root / "program", os.X_OK)
        and os.readlink(space.root / "tree/link") == "one"
        and space.read("states/count") == "5\n"
    )
    return sizes == [20_000, 1_000_000, 100_000] and space.read("last.txt") == "0.5\n1\ntiny\n"


def left(space: Space) -> list[str]:
    return os.listdir(space.root / ".recipe/attempts")


NEAR = (
    *(
        "job-over:1",
        "outputs-stored:1",
        "published:1",
        "outputs-stored:2",
        "published:3",
        "group-written:2",
        "group-committed:2",
    ),
    *("object-put:2", "object-put:4", "object-put:7", "copy-written:1", "copy-written:4"),
)


@pytest.mark.parametrize("point", NEAR)
def test_a_finished_step_does_not_run_again_wherever_its_worker_was_killed(
    space: Space, point: str
) -> None:
    varied(space)
    code, _, said = space.command("run", env={"RECIPE_CRASH_AT": point})
    assert code == -signal.SIGKILL, said
    space.run()
    assert starts(space) == STEPS and is_whole(space)
    assert space.run() == []
    space.run(choice=Choice(again=("last",)))
    assert not left(space)


@pytest.mark.parametrize("point", ["object-put:4", "job-over:1", "outputs-stored:3"])
def test_the_same_on_another_machine(space: Space, point: str) -> None:
    varied(space)
    code, _, said = space.command("run", "--driver", "loopback", env={"RECIPE_CRASH_AT": point})
    assert code == -signal.SIGKILL, said
    space.run(settings=Settings(driver="loopback"))
    assert starts(space) == STEPS and is_whole(space)
    assert space.run() == []


def test_a_finished_step_waits_for_the_run_that_takes_it_though_the_next_one_fails_before(
    space: Space,
) -> None:
    space.recipe(
        f"steps:\n  bad: {{run: 'test -e {space.root}/mended'}}\n"
        f"  good: {{run: 'echo good >> {space.root}/starts; echo 1 > good.txt', outputs: {{o: good.txt}}}}\n"
    )
    code, _, said = space.command("run", "-j1", "--keep-going", env={"RECIPE_CRASH_AT": "job-over"})
    assert code == -signal.SIGKILL, said
    assert space.attempt(settings=Settings(jobs=1)) == ["bad"]
    (space.root / "mended").touch()
    space.run()
    assert starts(space) == ["good"] and space.read("good.txt") == "1\n" and not left(space)


def test_no_step_begins_twice_in_a_graph_whose_worker_is_killed_at_any_moment(
    tmp_path: Path,
) -> None:
    words = [
        sys.executable,
        "benchmarks/kills.py",
        "--kills",
        "4",
        "--steps",
        "10",
        "--root",
        str(tmp_path),
    ]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("4 kills")
