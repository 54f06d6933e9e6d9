"""A run whose worker was killed goes on under its own id, when the same is asked for again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.storage.records.runs import Event, RunRow
from runner.storage.records.store import Store

RECIPE = """\
recipe: r@1
inputs: {lr: {type: number, default: 0.1}}
steps:
  a: {run: "cat in.txt > {{ outputs.o }}", deps: [in.txt], outputs: {o: a.txt}}
  b:
    run: |
      : {{ inputs.lr }} {{ steps.a.o }}
      echo begun >> "$COUNT"
      while [ ! -e "$GATE" ]; do sleep 0.05; done
      echo b > {{ outputs.o }}
    pass_env: [COUNT, GATE]
    retries: 1
    outputs: {o: b.txt}
  c: {run: "cat {{ steps.b.o }} > {{ outputs.o }}", outputs: {o: c.txt}}
"""


@pytest.fixture
def space(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws/recipe.yaml").write_text(RECIPE)
    (tmp_path / "ws/in.txt").write_text("one")
    return tmp_path


def start(space: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "COUNT": str(space / "count"), "GATE": str(space / "gate")}
    command = [sys.executable, "-m", "runner.interface.cli.main", "run", *words]
    return subprocess.Popen(
        command, cwd=space / "ws", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(space: Path, *words: str) -> tuple[int, str]:
    process = start(space, *words)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.decode()


def begun(space: Path) -> int:
    count = space / "count"
    return len(count.read_text().split()) if count.exists() else 0


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_for_begun(space: Path, number: int) -> None:
    wait_for(lambda: begun(space) >= number)


def killed_in_b(space: Path, *words: str) -> None:
    process = start(space, *words)
    wait_for_begun(space, 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def runs(space: Path) -> list[RunRow]:
    with Store.open(space / "ws/.recipe", read_only=True) as store:
        return store.runs.latest()


def events(space: Path, id: str) -> list[Event]:
    with Store.open(space / "ws/.recipe", read_only=True) as store:
        return store.runs.events(id)


def test_a_run_whose_worker_was_killed_goes_on_under_its_own_id(space: Path) -> None:
    killed_in_b(space)
    (dead,) = runs(space)
    (space / "gate").touch()
    code, out = run(space)
    (row,) = runs(space)
    assert (code, row.id, row.state) == (0, dead.id, "COMPLETED") and row.fence == 2
    assert f"resuming run {dead.id}" in out and "retry" not in out
    told = events(space, dead.id)
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    assert begun(space) == 1, "the step that was running was taken up, not begun again"
    moves = [(event.before, event.after) for event in told if event.id == "b"]
    assert (
        all(before == after for (_, before), (after, _) in itertools.pairwise(moves))
        and moves[-1][1] == "DONE"
    )
    assert not list((space / "ws/.recipe/attempts").iterdir())


@pytest.mark.parametrize("change", ["input", "file", "choice"])
def test_another_request_is_a_new_run_and_the_old_one_is_over(space: Path, change: str) -> None:
    killed_in_b(space)
    (dead,) = runs(space)
    (space / "gate").touch()
    if change == "file":
        (space / "ws/in.txt").write_text("two")
    code, _ = run(space, *{"input": ["lr=0.2"], "choice": ["--until", "b"]}.get(change, []))
    new, old = runs(space)
    assert code == 0 and old.id == dead.id != new.id
    assert (old.state, old.reason, new.state) == ("FAILED", "its worker is gone", "COMPLETED")


def test_a_run_of_another_file_with_the_same_name_leaves_it_to_be_resumed(space: Path) -> None:
    killed_in_b(space)
    (space / "ws/other").mkdir()
    (space / "ws/other/recipe.yaml").write_text("recipe: r@1\nsteps: {z: {run: 'true'}}\n")
    code, said = run(space, "other/recipe.yaml")
    assert code == 0 and "resuming" not in said, said
    (space / "gate").touch()
    code, said = run(space, "recipe.yaml")
    assert code == 0 and "resuming run" in said and begun(space) == 1, said


def test_a_resumed_run_has_the_retries_that_were_left(space: Path) -> None:
    first_fails = '[ "$(wc -l < "$COUNT")" -gt 1 ] || exit 1'
    (space / "ws/recipe.yaml").write_text(
        RECIPE.replace("      while", f"      {first_fails}\n      while").replace(
            "      echo b >", "      exit 1 #"
        )
    )
    first = start(space)
    wait_for_begun(space, 2)  # the second and last try
    wait_for(lambda: any(event.reason == "exit" for event in events(space, runs(space)[0].id)))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (space / "gate").touch()
    code, _ = run(space)
    (row,) = runs(space)
    assert (code, row.state, begun(space)) == (1, "FAILED", 2), (
        "its last try failed, also if no worker saw it"
    )


def test_a_failure_that_no_worker_saw_costs_a_retry(space: Path) -> None:
    (space / "ws/recipe.yaml").write_text(
        RECIPE.replace("      echo b >", '      echo $$ > "$GATE.pid"\n      exit 3 #')
    )
    killed_in_b(space)
    (space / "gate").touch()
    pid = space / "gate.pid"
    wait_for(lambda: pid.exists() and bool(pid.read_text()))
    wait_for(lambda: not Path("/proc", pid.read_text().strip()).exists())
    code, _ = run(space)
    assert (code, begun(space)) == (1, 2), "one retry"


def test_what_was_forced_and_done_is_not_forced_again(space: Path) -> None:
    (space / "gate").touch()
    assert run(space)[0] == 0
    (space / "gate").unlink()
    (space / "count").unlink()
    killed_in_b(space, "-B")
    (space / "gate").touch()
    assert run(space, "-B")[0] == 0
    row = runs(space)[0]
    done = [event.id for event in events(space, row.id) if event.after == "DONE"]
    assert row.fence == 2 and done == ["a", "b", "c"], "each step ran once in the resumed run"


def test_a_run_whose_worker_died_behind_its_last_step_is_over_when_nothing_is_left_to_do(
    space: Path,
) -> None:
    (space / "gate").touch()
    assert run(space)[0] == 0
    id = runs(space)[0].id
    with Store.open(space / "ws/.recipe") as store:  # as a kill there leaves it
        store.database.connection.execute(
            "UPDATE runs SET state = 'ACTIVE', ended = NULL, claim = '' WHERE id = ?", (id,)
        )
    assert run(space)[0] == 0
    assert [(row.id, row.state) for row in runs(space)] == [(id, "COMPLETED")]
    assert events(space, id)[-1].reason == "resumed"
