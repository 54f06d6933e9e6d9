"""What a run does with its steps: room, retries, limits, floods, full disks, changed inputs, publishing, late decisions."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import runner
from runner.errors import CannotRun
from runner.execution.terms import Choice, Settings
from runner.language import library
from runner.paths import shipped
from runner.storage.workspace import Workspace
from tests.support import RECIPE, Space
from tests.tools import needs

FLOOD = int(os.environ.get("RECIPE_TEST_FLOOD_MB", "100"))
"""Megabytes that a step prints; 1024 by hand."""


def failure(space: Space, id: str = "") -> str:
    """What is said about the one step that failed."""
    assert space.summary is not None and space.summary.state == "FAILED", space.summary
    (found,) = [failure for failure in space.summary.failed if not id or failure.id == id]
    return f"{found.reason}\n{found.hint}\n{found.tail.decode(errors='replace')}"


def reasons(space: Space, id: str) -> list[str]:
    """Why each attempt of a step ended badly."""
    return [
        event.reason
        for event in space.events
        if event.id == id and event.before == "RUNNING" and event.after in ("QUEUED", "FAILED")
    ]


def together(space: Space) -> int:
    """The most steps that ran at once, by what they noted when they began and ended."""
    now = most = 0
    for line in space.read("notes").split():
        now += 1 if line == "+" else -1
        most = max(most, now)
    return most


def noting(space: Space, *, extra: str = "") -> str:
    """Six steps that meet where they can: each waits a little for company that does not come when there is no room."""
    notes = space.root / "notes"
    steps = "".join(
        f"  s{n}:\n    run: printf '+\\n' >> {notes}; sleep 0.1; printf -- '-\\n' >> {notes}\n{extra}"
        for n in range(6)
    )
    return f"steps:\n{steps}"


# -- room


def test_no_more_steps_run_at_once_than_jobs(space: Space) -> None:
    space.recipe(noting(space))
    space.run(settings=Settings(jobs=2))
    assert together(space) == 2


def test_a_named_pool_has_room_for_one_unless_it_is_given_more(space: Space) -> None:
    space.recipe(noting(space, extra="    resources: {pools: {disk_io: 1}}\n"))
    space.run(settings=Settings(jobs=6))
    assert together(space) == 1
    (space.root / "notes").unlink()
    space.run(settings=Settings(jobs=6, pools={"disk_io": 3}), choice=Choice(all=True))
    assert 1 < together(space) <= 3


def test_a_failure_stops_what_has_not_started_unless_keep_going_is_set(space: Space) -> None:
    space.recipe(
        "steps:\n  bad: {run: exit 1}\n  below: {needs: [bad], run: 'true'}\n  beside: {run: 'true'}\n  other: {run: 'true'}\n"
    )
    assert space.attempt(settings=Settings(jobs=1)) == ["bad"]
    assert space.attempt(settings=Settings(jobs=1, keep_going=True)) == ["bad", "beside", "other"]
    assert space.summary is not None and space.summary.counts["BLOCKED"] == 1


# -- ends and tries


@pytest.mark.parametrize(
    ("step", "reason", "words"),
    [
        ("run: exit 3", "exit", "exit 3"),
        ("run: kill -SEGV $$", "signal", "SIGSEGV"),
        ("run: sleep 60\n    timeout: 1s", "timeout", "ran longer than 1 s"),
        ("run: echo one; sleep 60\n    idle_timeout: 1s", "idle", "had no output for 1 s"),
        (
            "run: 'true'\n    outputs: {o: made.txt}",
            "output",
            "declared output made.txt was not created",
        ),
        ("run: [no-such-program]", "exit", "no such program in PATH"),
        (
            "run: touch made.txt\n    outputs: {o: {path: made.txt, nonempty: true}}",
            "output",
            "is empty",
        ),
        ("run: mkfifo pipe\n    outputs: {o: pipe}", "output", "pipe"),
        ("run: 'read x'", "exit", "exit 1"),
    ],
)
def test_an_attempt_that_ends_badly_says_how(
    space: Space, step: str, reason: str, words: str
) -> None:
    space.recipe(f"steps:\n  one:\n    {step}\n")
    space.attempt()
    assert reasons(space, "one") == [reason]
    assert words in failure(space)


def test_a_failed_step_is_tried_as_often_as_it_may_be_and_then_again_by_the_next_run(
    space: Space,
) -> None:
    count = space.root / "count"
    space.recipe(
        f"steps:\n  one: {{retries: 1, run: 'echo x >> {count}; test $(wc -l < {count}) -ge 4'}}\n"
    )
    space.attempt()
    assert reasons(space, "one") == ["exit", "exit"]
    space.run()
    assert space.read("count").count("x") == 4
    waits = [
        event.data["wait"]
        for event in space.events
        if event.after == "QUEUED" and event.before == "RUNNING"
    ]
    assert waits == [0.5]


def test_what_a_step_leaves_behind_is_ended_and_counted(space: Space) -> None:
    space.recipe(
        "steps:\n  one:\n    run: sleep 600 & (setsid sleep 600 &) ; echo out > o\n    outputs: {o: o}\n"
    )
    space.run()
    (done,) = [event for event in space.events if event.after == "DONE"]
    assert done.data["strays"] == 2


IN_A_NOTEBOOK = """
import asyncio, os, runner, signal
async def cell():
    assert runner.run("./recipe.yaml", {"n": 0}).state == "COMPLETED"
    assert "no input" in str(failed(lambda: runner.run("./recipe.yaml", {"m": 0})))
    runner.run("./recipe.yaml", {"n": 60}, on_event=lambda event: event.after == "RUNNING" and os.kill(os.getpid(), signal.SIGINT))
def failed(call):
    try:
        call()
    except Exception as error:
        return error
try:
    asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_in_a_notebook_a_run_goes_on_beside_its_event_loop_and_an_interrupt_ends_it(
    space: Space,
) -> None:
    space.recipe("inputs: {n: {type: integer}}\nsteps: {one: {run: 'sleep {{ inputs.n }}'}}\n")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NOTEBOOK],
        cwd=space.root,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
    with Workspace.open(space.root) as ws:
        assert [row.state for row in ws.store.runs.latest()] == ["CANCELLED", "COMPLETED"]


# -- logs


def test_a_flood_of_output_leaves_memory_flat_and_a_log_with_both_its_ends(space: Space) -> None:
    space.recipe(
        f'steps:\n  one: {{run: \'echo first; yes | head -c {FLOOD}000000; head -c 70000 /dev/zero | tr "\\\\0" z; echo; printf "\\\\377\\\\n"; echo last\'}}\n'
    )
    script = (
        "import runner; s = runner.run('./recipe.yaml'); assert s.state == 'COMPLETED', s\n"
        # Not ru_maxrss: that one remembers the memory of the process which forked us.
        "print(s.run, next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=space.root, capture_output=True, text=True, check=True
    )
    run, kilobytes = done.stdout.split()
    kept = space.root / ".recipe" / "runs" / run / "one.1.log"
    assert int(kilobytes) < 120_000
    assert kept.stat().st_size < 70_000_000
    with kept.open("rb") as log:
        assert log.read(6) == b"first\n"
        log.seek(-8, os.SEEK_END)
        assert log.read() == b"z\n\xff\nlast\n"[-8:]
    assert FLOOD <= 64 or b"bytes dropped" in kept.read_bytes()


def test_a_metric_is_found_in_a_log_without_newlines_in_flat_memory(space: Space) -> None:
    space.recipe(
        "steps:\n  one:\n    run: 'head -c 30000000 /dev/zero | tr \"\\\\0\" x; echo; echo loss=0.5'\n    metrics: {pattern: 'loss=(?P<loss>[0-9.]+)'}\n"
    )
    space.run()
    (done,) = [event for event in space.events if event.after == "DONE"]
    assert done.data["metrics"] == {"loss": 0.5}


# -- disks


def test_a_full_disk_is_called_that_and_earlier_results_stay(space: Space) -> None:
    needs("mount")
    disk = space.root / "disk"
    disk.mkdir()
    (space.root / "recipe.yaml").write_text(
        "recipe: t@1\nsummary: A test\ninputs: {size: {type: integer, default: 1}}\nsteps:\n  small: {run: echo good > small.txt, outputs: {o: small.txt}}\n"
        "  big: {needs: [small], run: 'head -c {{ inputs.size }} /dev/zero > big.bin', outputs: {o: big.bin}}\n"
    )
    recipe = " ".join(RECIPE)
    script = (
        f"mount -t tmpfs -o size=8m tmpfs {disk} && cp recipe.yaml {disk} && cd {disk} && {recipe} run >first 2>&1;"
        f" {recipe} run size=20000000 2>&1; echo code=$?; cat small.txt; stat -c %s big.bin; {recipe} run && echo healed"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=space.root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert "code=1" in done.stdout and "no space left on a disk" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "good\n1\n" in done.stdout, done.stdout
    assert "healed" in done.stdout, done.stdout + done.stderr


# -- inputs


def test_a_file_that_was_not_declared_is_named_in_the_error(space: Space) -> None:
    space.write("data/rows.csv", "1\n")
    space.write("helper.py", "")
    space.recipe("steps:\n  cat: {run: cat data/rows.csv}\n  python: {run: [python, helper.py]}\n")
    space.attempt(settings=Settings(keep_going=True, jobs=1))
    assert "add it to `deps` of cat" in failure(space, "cat") and "data/rows.csv" in failure(
        space, "cat"
    )
    assert "helper.py is in the workspace but not declared" in failure(space, "python")


def test_an_input_that_a_program_calls_by_its_last_name_is_not_taken_for_a_file_that_was_not_declared(
    space: Space,
) -> None:
    space.write("rows.csv", "1\n")
    space.recipe(
        'inputs: {rows: {type: dataset}}\nsteps:\n  read: {run: \'echo "rows.csv:1: no header" >&2; test -d "{{ inputs.rows }}"\'}\n'
    )
    space.attempt({"rows": "rows.csv"})
    assert "not declared" not in failure(space, "read")


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_step_that_changes_what_it_was_given_fails(space: Space, size: int) -> None:
    space.recipe(
        f"steps:\n  make: {{run: 'head -c {size} /dev/zero > o.bin', outputs: {{o: o.bin}}}}\n"
        "  spoil: {run: 'chmod u+w {{ steps.make.o }}; echo x >> {{ steps.make.o }}'}\n"
    )
    space.attempt()
    assert "changed its input o.bin" in failure(space, "spoil")
    assert (space.root / "o.bin").stat().st_size == size
    space.recipe(
        f"steps:\n  make: {{run: 'head -c {size} /dev/zero > o.bin', outputs: {{o: o.bin}}}}\n"
        "  look: {run: 'wc -c < {{ steps.make.o }} > n.txt', outputs: {n: n.txt}}\n"
    )
    space.run()
    assert space.read("n.txt").strip() == str(size)


def test_a_step_that_changes_its_input_fails_though_a_step_beside_it_gets_the_input_restored(
    space: Space,
) -> None:
    space.write("data.bin", "x" * 100_000)
    wait = "while [ ! -e {top}/{name} ]; do sleep 0.05; done"
    changed, restored = (wait.format(top=space.root, name=name) for name in ("changed", "restored"))
    space.recipe(
        "steps:\n"
        f"  spoil: {{deps: [data.bin], run: 'chmod u+w data.bin; echo y >> data.bin; touch {space.root}/changed; {restored}'}}\n"
        f"  wait: {{run: '{changed}; touch w', outputs: {{w: w}}}}\n"
        f"  read: {{deps: [data.bin], run: 'wc -c < data.bin > n; touch {space.root}/restored; : {{{{ steps.wait.w }}}}', outputs: {{n: n}}}}\n"
    )
    space.attempt(settings=Settings(jobs=3, keep_going=True))
    assert "changed its input data.bin" in failure(space, "spoil")
    assert space.read("n").strip() == "100000"


def test_a_step_that_changes_a_file_deep_in_its_callers_dataset_fails(space: Space) -> None:
    space.write("set/a/b/c.txt", "one")
    space.recipe(
        "inputs: {data: {type: dataset, default: ./set}}\nsteps:\n  spoil: {run: 'echo more >> {{ inputs.data }}/a/b/c.txt'}\n"
    )
    space.attempt()
    assert reasons(space, "spoil") == ["input"]


def test_an_input_that_changes_while_its_step_runs_leaves_no_trace(space: Space) -> None:
    source = space.write("in.txt", "old")
    space.recipe(
        f"steps:\n  one: {{deps: [in.txt], run: 'cp in.txt o.txt; echo new > {source}', outputs: {{o: o.txt}}}}\n"
    )
    assert space.run() == ["one"]
    assert space.read("o.txt") == "old"
    assert any("changed during the step" in str(event.data.get("note")) for event in space.events)
    assert space.run() == ["one"]
    assert space.read("o.txt") == "new\n"


def test_an_input_that_changed_between_judging_and_starting_leaves_no_trace(space: Space) -> None:
    source = space.write("in.txt", "old")
    space.recipe(
        f"steps:\n  first: {{run: 'echo new > {source}'}}\n  one: {{needs: [first], deps: [in.txt], run: cp in.txt o.txt, outputs: {{o: o.txt}}}}\n"
    )
    space.run()
    source.write_text("old")
    assert space.run() == ["one"]
    assert space.read("o.txt") == "old"


# -- publishing


def test_a_published_file_edited_by_hand_is_not_used_and_not_replaced(space: Space) -> None:
    body = "steps:\n  one: {{run: echo {0} > o.txt, outputs: {{o: o.txt}}}}\n  two: {{run: 'cat {{{{ steps.one.o }}}} > p.txt', outputs: {{p: p.txt}}}}\n"
    space.recipe(body.format("a"))
    space.run()
    space.write("o.txt", "mine")
    (space.root / "p.txt").unlink()
    with pytest.raises(CannotRun, match="edited after t@1 created it"):
        space.attempt()
    assert space.read("o.txt") == "mine"
    code, _, said = space.command("run")
    assert (code, "--overwrite" in said) == (2, True)
    assert space.command("run", "--overwrite")[0] == 0
    assert (space.read("o.txt"), space.read("p.txt")) == ("a\n", "a\n")


def test_a_file_that_appears_where_a_running_step_will_publish_is_left_alone(space: Space) -> None:
    space.recipe(
        f"steps:\n  one: {{run: 'echo mine > {space.root}/o.txt; echo theirs > o.txt', outputs: {{o: o.txt}}}}\n"
    )
    space.attempt()
    assert reasons(space, "one") == ["publish"]
    assert space.read("o.txt") == "mine\n"


def test_a_library_recipe_publishes_at_its_end_into_a_place_of_its_own(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Space(tmp_path / "shelf")
    (shelf.root / "schemas").symlink_to(shipped() / "schemas")
    shelf.recipe(
        "recipe: tool@1\nsummary: A test\ninputs: {n: {type: integer, default: 0}}\nsteps:\n"
        "  one: {run: 'echo {{ inputs.n }} > o.txt', outputs: {o: o.txt}}\n"
        "  two: {needs: [one], run: 'test {{ inputs.n }} -lt 2; echo b > p.txt', outputs: {p: p.txt}}\noutputs: {result: '{{ steps.one.o }}'}\n",
        name="recipes/tool@1.yaml",
    )
    monkeypatch.setattr(library, "shipped", lambda: shelf.root)
    monkeypatch.chdir(space.root)
    out = space.root / "out" / "tool@1"
    summary = runner.run("tool@1")
    (first,) = [path for path in out.iterdir() if path.name != "latest"]
    assert [*summary.results] == [("result", f"out/tool@1/{first.name}/o.txt")]
    assert os.listdir(first) == ["o.txt"]
    assert (out / "latest" / "o.txt").read_text() == "0\n"
    assert runner.run("tool@1", {"n": 2}).state == "FAILED"
    assert sorted(os.listdir(out)) == sorted([first.name, "latest"])
    runner.run("tool@1", {"n": 1}, out="elsewhere")
    assert space.read("elsewhere/o.txt") == "1\n"


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("how", ["until", "skipped"])
def test_a_run_that_publishes_nothing_completes_and_leaves_latest_as_it_was(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, before: bool
) -> None:
    shelf = Space(tmp_path / "shelf")
    (shelf.root / "schemas").symlink_to(shipped() / "schemas")
    shelf.recipe(
        "recipe: tool@1\nsummary: A test\ninputs: {n: {type: integer, default: 0}}\nsteps:\n"
        "  data: {run: 'echo {{ inputs.n }} > d.txt', outputs: {o: d.txt}}\n"
        "  fit: {when: '{{ inputs.n < 2 }}', run: 'cp {{ steps.data.o }} m.txt', outputs: {m: m.txt}}\noutputs: {model: '{{ steps.fit.m }}'}\n",
        name="recipes/tool@1.yaml",
    )
    monkeypatch.setattr(library, "shipped", lambda: shelf.root)
    monkeypatch.chdir(space.root)
    if before:
        assert runner.run("tool@1").results
    summary = (
        runner.run("tool@1", {"n": 2})
        if how == "skipped"
        else runner.run("tool@1", {"n": 1}, choice=Choice(until="data"))
    )
    assert summary.state == "COMPLETED" and not summary.results and summary.counts["DONE"] == 1
    latest = space.root / "out" / "tool@1" / "latest"
    assert not before or (latest / "m.txt").read_text() == "0\n"
    assert before or not os.path.lexists(latest)


# -- late decisions


def report(**values: object) -> str:
    return f"echo '{json.dumps(values)}' >> $RECIPE_METRICS"


def test_a_step_may_be_skipped_for_a_metric_that_another_reports(space: Space) -> None:
    space.recipe(
        "inputs: {loss: {type: number, default: 2}}\nsteps:\n"
        '  train: {run: \'echo "{\\"loss\\": {{ inputs.loss }}}" >> $RECIPE_METRICS\', metrics: true}\n'
        "  export: {when: '{{ steps.train.metrics.loss < 1 }}', run: echo x > x.txt, outputs: {x: x.txt}}\n"
        "  send: {run: 'cat {{ steps.export.x }}'}\n"
    )
    assert space.run() == ["train"]
    assert space.summary is not None and space.summary.counts["SKIPPED"] == 2
    assert space.run({"loss": 0.5}) == ["train", "export", "send"]


def test_what_mentions_all_instances_of_a_matrix_is_skipped_with_them_when_they_mention_a_skipped_step(
    space: Space,
) -> None:
    space.recipe(
        "inputs: {loss: {type: number, default: 2}}\nsteps:\n"
        '  train: {run: \'echo "{\\"loss\\": {{ inputs.loss }}}" >> $RECIPE_METRICS\', metrics: true}\n'
        "  export: {when: '{{ steps.train.metrics.loss < 1 }}', run: echo x > x.txt, outputs: {x: x.txt}}\n"
        "  each: {matrix: {n: [1, 2]}, run: 'cat {{ steps.export.x }} > {{ outputs.o }}', outputs: {o: '{{ matrix.n }}.txt'}}\n"
        "  all: {run: 'cat {{ steps.each.o }} /dev/null > all.txt', outputs: {o: all.txt}}\n"
    )
    assert space.run() == ["train"]
    assert space.summary is not None and space.summary.counts["SKIPPED"] == 4
    assert space.run({"loss": 0.5})[-1] == "all" and space.read("all.txt") == "x\nx\n"


TRAINS = """recipe: sub@1
summary: A test
inputs: {rank: {type: integer}}
steps:
  data: {run: 'echo {\\"good\\": {{ inputs.rank }}} > $RECIPE_METRICS; echo data > data.txt', metrics: true, outputs: {o: data.txt}}
  train:
    run: |
      echo {\\"loss\\": $((10 - {{ inputs.rank }}))} > $RECIPE_METRICS
      echo {{ inputs.rank }} | cat - {{ steps.data.o }} > m.txt
    metrics: true
    outputs: {m: m.txt}
"""


def best_of(space: Space, select: str, *, uses: str = "./sub.yaml", inner: str = TRAINS) -> None:
    """A sweep over a recipe, of which the best is published."""
    space.recipe(inner, name="sub.yaml")
    space.recipe(
        "recipe: mid@1\nsummary: A test\ninputs: {rank: {type: integer}}\nsteps: {in: {uses: ./sub.yaml, with: {rank: '{{ inputs.rank }}'}}}",
        name="mid.yaml",
    )
    space.recipe(
        f"steps:\n  s: {{matrix: {{rank: [4, 8, 2]}}, uses: {uses}, with: {{rank: '{{{{ matrix.rank }}}}'}}}}\n"
        f"  best: {{select: {select}, min: loss}}\n  use: {{run: 'cp {{{{ steps.best.m }}}} best.txt', outputs: {{b: best.txt}}}}\n"
    )


@pytest.mark.parametrize(
    ("select", "uses"), [("s/train", "./sub.yaml"), ("s/in/train", "./mid.yaml")]
)
@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_the_best_instance_of_a_recipe_is_selected_by_what_a_step_inside_reports(
    space: Space, select: str, uses: str, driver: str
) -> None:
    best_of(space, select, uses=uses)
    assert (
        "use" in space.run(settings=Settings(jobs=2, driver=driver))
        and space.read("best.txt") == "8\ndata\n"
    )
    assert space.run() == [] and space.answers()["best"] == "fresh"


def test_an_instance_whose_step_is_skipped_does_not_compete(space: Space) -> None:
    """As in a matrix: what is left out is left out, and only if nothing is left is there no best."""
    guarded = TRAINS.replace(
        "  train:\n", "  train:\n    when: '{{ steps.data.metrics.good < %d }}'\n"
    )
    best_of(space, "s/train", inner=guarded % 0)
    space.run()
    assert space.summary is not None and space.summary.counts["SKIPPED"] == 5
    best_of(space, "s/train", inner=guarded % 5)
    space.run()
    assert space.read("best.txt") == "4\ndata\n"


def test_a_condition_that_is_not_true_or_false_fails_its_step_alone(space: Space) -> None:
    space.recipe(
        f"steps:\n  a: {{run: '{report(loss=1).replace(chr(39), chr(39) * 2)}', metrics: true}}\n"
        "  b: {when: '{{ steps.a.metrics.loss }}', run: 'true'}\n  c: {run: 'true'}\n"
    )
    assert sorted(space.attempt(settings=Settings(keep_going=True))) == ["a", "b", "c"]
    assert reasons(space, "b") == ["when"]


def test_the_best_of_a_sweep_is_chosen_without_its_failures(space: Space) -> None:
    space.recipe(
        "steps:\n  train:\n    matrix: {lr: [1, 2, 3]}\n    metrics: true\n    allow_failure: true\n    outputs: {m: 'm-{{ matrix.lr }}.txt'}\n"
        '    run: |\n      echo "{\\"loss\\": $((10 - {{ matrix.lr }}))}" >> $RECIPE_METRICS\n      test {{ matrix.lr }} != 3\n      echo {{ matrix.lr }} > m-{{ matrix.lr }}.txt\n'
        "  best: {select: train, min: loss}\n  use: {run: 'cp {{ steps.best.m }} best.txt', outputs: {b: best.txt}}\n"
        "  all: {run: 'cat {{ steps.train.m }} > all.txt', outputs: {a: all.txt}}\n"
    )
    space.run()
    assert space.read("best.txt") == "2\n"
    assert space.read("all.txt") == "1\n2\n"


def test_a_condition_over_a_missing_number_fails_its_step_alone_in_every_run_and_is_shown(
    space: Space,
) -> None:
    space.recipe(
        "steps:\n  a: {run: echo 1 > a, metrics: true, outputs: [a]}\n"
        "  b: {when: '{{ steps.a.metrics.loss < 1 }}', run: 'true'}\n  c: {run: echo 1 > c, outputs: [c]}\n"
    )
    space.attempt()
    assert space.summary is not None
    words = "`when` of b: null and a number cannot be compared like this; a reported no loss"
    assert [failure.reason for failure in space.summary.failed] == [words]
    (space.root / "c").unlink()
    for verb in (("plan",), ("status",), ("why", "b")):
        code, out, err = space.command(*verb)
        assert code in (0, 1) and words in out, (verb, code, out, err)
    assert space.attempt(settings=Settings(keep_going=True)) == ["b"]
    assert [failure.reason for failure in space.summary.failed] == [words] and space.read(
        "c"
    ) == "1\n"


def test_a_glob_below_an_output_is_expanded_when_it_is_known_and_only_what_changed_runs_again(
    space: Space,
) -> None:
    names = space.write("names", "a b")
    space.recipe(
        "steps:\n  split: {deps: [names], run: 'for n in $(cat names); do echo $n > parts/$n.txt; done', outputs: {parts: parts/}}\n"
        "  up: {matrix: {part: {glob: '{{ steps.split.parts }}/*.txt'}}, run: 'tr a-z A-Z < {{ matrix.part }} > up-{{ matrix.part | stem }}.txt',"
        " outputs: {o: 'up-{{ matrix.part | stem }}.txt'}}\n"
        "  join: {run: 'cat {{ steps.up.o }} > all.txt', outputs: {all: all.txt}}\n"
    )
    assert len(space.run()) == 4
    names.write_text("a b c")
    assert sum(id.startswith("up") for id in space.run()) == 1
    assert space.read("all.txt") == "A\nB\nC\n"
    names.write_text("a c")
    assert [id for id in space.run() if id.startswith("up")] == []
    assert space.read("all.txt") == "A\nC\n"


def test_an_optional_output_may_be_missing_and_its_readers_know(space: Space) -> None:
    space.recipe(
        "inputs: {make: {type: boolean, default: false}}\nsteps:\n"
        "  one: {run: 'if {{ inputs.make }}; then echo x > o.txt; fi', outputs: {o: {path: o.txt, optional: true}}}\n"
        "  two: {run: 'ls o.txt > p.txt || echo none > p.txt', deps: [], needs: [one], outputs: {p: p.txt}}\n"
        "  three: {run: 'if [ -e {{ steps.one.o }} ]; then echo yes; else echo no; fi > q.txt', outputs: {q: q.txt}}\n"
    )
    space.run()
    assert space.read("q.txt") == "no\n"
    space.run({"make": True})
    assert space.read("q.txt") == "yes\n"


# -- composition, rendered files, code, chores


def test_a_recipe_used_by_another_runs_below_its_own_name(space: Space) -> None:
    space.recipe(
        "recipe: inner@1\nsummary: A test\ninputs: {word: {type: string}}\nsteps:\n  say: {run: 'echo {{ inputs.word }} > o.txt', outputs: {o: o.txt}}\n"
        "outputs: {said: '{{ steps.say.o }}'}\n",
        name="inner.yaml",
    )
    space.recipe(
        "steps:\n  a: {uses: ./inner.yaml, with: {word: one}}\n  b: {uses: ./inner.yaml, with: {word: two}}\n"
        "  join: {run: 'cat {{ steps.a.said }} {{ steps.b.said }} > all.txt', outputs: {all: all.txt}}\n"
    )
    assert sorted(space.run()) == ["a/say", "b/say", "join"]
    assert space.read("all.txt") == "one\ntwo\n"


def test_files_are_written_with_their_types_first(space: Space) -> None:
    tree = "{n: '{{ inputs.n }}', on: true, list: [1, '{{ inputs.name }}'], inner: {x: 1.5}}"
    space.recipe(
        "inputs: {n: {type: integer, default: 7}, name: {type: string, default: 'a: \"b\"'}}\nsteps:\n  one:\n"
        f"    files: {{c.json: {tree}, c.yaml: {tree}, c.toml: {tree}, c.txt: 'n={{{{ inputs.n }}}}'}}\n"
        "    run: for f in json yaml toml txt; do cp c.$f o/$f; done\n    outputs: {o: o/}\n"
    )
    space.run()
    wanted = {"n": 7, "on": True, "list": [1, 'a: "b"'], "inner": {"x": 1.5}}
    assert json.loads(space.read("o/json")) == wanted
    assert yaml.safe_load(space.read("o/yaml")) == wanted
    assert tomllib.loads(space.read("o/toml")) == wanted
    assert space.read("o/txt") == "n=7"


def test_code_pinned_in_git_is_there_at_its_commit(space: Space, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    git = [needs("git"), "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    (origin / "say.sh").write_text("echo first")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (origin / "say.sh").write_text("echo second")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    space.recipe(
        f"steps:\n  one:\n    code: [{{git: 'file://{origin}', commit: {commit}, at: vendor}}]\n    run: sh vendor/say.sh > o.txt\n    outputs: {{o: o.txt}}\n"
    )
    space.run()
    assert space.read("o.txt") == "first\n"
    space.recipe(
        f"steps:\n  one:\n    code: [{{git: 'file://{origin}', commit: {'a1' * 20}, at: vendor}}]\n    run: sh vendor/say.sh > o.txt\n    outputs: {{o: o.txt}}\n"
    )
    space.attempt()
    assert f"has no commit {'a1' * 20}" in failure(space)


def test_a_repository_given_as_a_path_is_found_from_the_recipe(space: Space) -> None:
    origin = space.root / "origin"
    git = [needs("git"), "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    (origin / "say.sh").write_text("echo said")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    step = f"code: [{{git: ./origin, commit: {commit}, at: vendor}}]\n    run: sh vendor/say.sh > o.txt\n    outputs: {{o: o.txt}}"
    space.recipe(f"steps:\n  one:\n    {step}\n")
    space.run()
    assert space.read("o.txt") == "said\n"


def test_a_step_runs_in_the_packages_of_its_lock_and_in_no_others(
    space: Space, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tinyword-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinyword.py", "word = 'said'\n")
        archive.writestr(
            "tinyword-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tinyword\nVersion: 1.0\n",
        )
        archive.writestr(
            "tinyword-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tinyword-1.0.dist-info/RECORD", "tinyword.py,,\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    step = "    run: [python, -c, 'import sys, tinyword; print(tinyword.word, file=open(sys.argv[1], chr(119)))', '{{ outputs.o }}']\n"
    space.recipe(
        f"python: {{lock: pylock.toml}}\nsteps:\n  one:\n{step}    outputs: {{o: o.txt}}\n"
    )
    lock = '[[packages]]\nname = "tinyword"\nversion = "1.0"\nwheels = [{{name = "w", hashes = {{sha256 = "{0}"}}}}]\n'
    space.write("pylock.toml", lock.format("0" * 64))
    code, _, said = space.command("run", env=offline)
    assert (
        code == 2
        and "cannot create the environment of " in said
        and "has other hashes than the lock" in said
    )
    space.write("pylock.toml", lock.format(digest))
    code, _, said = space.command("run", env=offline)
    assert code == 0 and "installing the packages of pylock.toml" in said
    assert space.read("o.txt") == "said\n"
    assert (
        space.command("run", "--python", "current")[0] == 1
    )  # other packages, another key: it runs, and finds no such module
    assert "everything is fresh" in space.command("run")[2]
    space.write("pylock.toml", '[[packages]]\nname = "tinyword"\ndirectory = {path = "."}\n')
    assert "cannot be pinned by hash" in space.command("run", env=offline)[2]
    assert all(name.startswith("failed-") for name in os.listdir(space.root / ".recipe/attempts"))


def test_setup_is_done_once_and_cleanup_at_every_end(space: Space) -> None:
    did = space.root / "did"
    space.recipe(
        f"setup: [echo setup >> {did}]\ncleanup: [[sh, -c, 'echo cleanup >> {did}']]\nsteps:\n  one: {{run: 'echo one >> {did}; test -e {space.root}/go'}}\n"
    )
    space.attempt()
    assert space.read("did").split() == ["setup", "one", "cleanup"]
    space.write("go", "")
    space.run()
    assert space.read("did").split()[3:] == ["one", "cleanup"]


def test_a_setup_that_fails_starts_no_step_and_shows_what_it_printed(space: Space) -> None:
    space.recipe(
        "setup: [echo the reason; exit 3]\nsteps:\n  one: {run: echo x > o.txt, outputs: {o: o.txt}}\n"
    )
    code, _, said = space.command("run")
    assert code == 2 and "the reason" in said and "exit 3" in said
    assert not (space.root / "o.txt").exists()
    assert os.listdir(space.root / ".recipe/attempts") == []


def test_what_a_failed_setup_printed_need_not_be_text(space: Space) -> None:
    space.recipe(
        "setup: [\"printf 'broken \\\\377 disk'; exit 3\"]\nsteps:\n  one: {run: echo x > o.txt, outputs: {o: o.txt}}\n"
    )
    code, out, err = space.command("run")
    assert code == 2 and "broken \ufffd disk" in out + err and "Traceback" not in out + err


def test_three_bad_looks_at_the_host_in_a_row_end_the_attempt(space: Space) -> None:
    space.recipe("health: {run: exit 1, every: 0.05s}\nsteps:\n  one: {run: sleep 60}\n")
    space.attempt()
    assert reasons(space, "one") == ["health"]


def test_a_run_that_reaches_its_time_limit_is_stopped_and_tries_nothing_again(space: Space) -> None:
    space.recipe(
        "limits: {time: 0.3s, cost: 5 USD}\nsteps:\n  one: {run: sleep 60, retries: 3}\n  two: {needs: [one], run: 'true'}\n"
    )
    space.attempt()
    assert reasons(space, "one") == ["limit"]
    assert "limits.time" in failure(space)
    assert space.summary is not None and space.summary.state == "FAILED"


def test_a_limit_that_is_reached_in_the_setup_is_reported_as_the_limit(space: Space) -> None:
    space.recipe("limits: {time: 0.3s}\nsetup: [sleep 60]\nsteps: {one: {run: touch made}}\n")
    code, out, err = space.command("run")
    assert code == 1
    assert "the run reached its limit of 0.3 s (`limits.time`)" in err
    assert "setup failed" not in out + err


def test_a_metrics_file_may_be_a_pattern(space: Space) -> None:
    made = """'mkdir -p out/x; echo "{\\\"acc\\\": 0.5}" > out/x/log.jsonl'"""
    space.recipe(f"steps:\n  one: {{run: {made}, metrics: {{file: 'out/*/log.jsonl'}}}}\n")
    space.run()
    assert any(event.data.get("metrics") == {"acc": 0.5} for event in space.events)


def test_a_run_cut_short_has_not_completed_though_its_steps_may_fail(space: Space) -> None:
    space.recipe(
        "limits: {time: 0.3s}\nsteps:\n  one: {matrix: {i: [1, 2]}, run: 'sleep 6{{ matrix.i }}', allow_failure: true}\n"
    )
    space.attempt()
    assert space.summary is not None and space.summary.state == "FAILED"


# -- secrets


def test_a_secret_reaches_its_step_and_nothing_else(space: Space) -> None:
    canary = "canary-7f3a9c51d2"
    space.recipe(
        "inputs: {token: {type: secret, env: TOKEN}}\nsteps:\n  one:\n    secrets: [token]\n    metrics: true\n    outputs: {o: o.txt}\n    run: |\n"
        '      test "$TOKEN" = canary-7f3a9c51d2 || test "$TOKEN" = other-value-1234 || exit 9\n      echo "using $TOKEN"; printf %s "$TOKEN" | base64\n'
        "      printf '{\"word\": \"%s\"}\\n' \"$TOKEN\" >> $RECIPE_METRICS\n      tr '\\0' '\\n' < /proc/$PPID/cmdline; tr '\\0' ' ' < /proc/$$/cmdline\n      echo x > o.txt; exit ${FAIL:-0}\n"
        "    pass_env: [FAIL]\n".replace("canary-7f3a9c51d2", "$(printf 'canary-%s' 7f3a9c51d2)")
    )
    for fail in ("1", "0"):
        code, out, err = space.command("run", "--json", env={"TOKEN": canary, "FAIL": fail})
        assert code == int(fail), out + err
        assert canary not in out + err and "using ***" in (
            out + err if fail == "1" else "using ***"
        )
    code, out, err = space.command("run", "-B", env={"TOKEN": canary, "FAIL": "1"})
    assert "using ***" in err and canary not in out + err
    for path in (space.root / ".recipe").rglob("*"):
        assert not path.is_file() or canary.encode() not in path.read_bytes(), path
    assert space.command("run", env={"TOKEN": "other-value-1234", "FAIL": "1"})[0] == 0, (
        "another value is not another key"
    )
    code, out, err = space.command("run", f"token={canary}")
    assert code == 3 and canary not in out + err
    code, out, err = space.command("run", "-B", env={"TOKEN": ""})
    assert code == 3 and "TOKEN" in err


def test_accelerate_demands_the_number_of_processes_that_was_asked_for(space: Space) -> None:
    space.write(
        "world.py",
        "import os\nopen(f'o/{os.environ[\"RANK\"]}', 'w').write(os.environ['WORLD_SIZE'])\n",
    )
    space.recipe(
        "steps:\n  one:\n    accelerate: {script: world.py, processes: 2}\n    code: [world.py]\n    outputs: {o: o/}\n"
    )
    space.run()
    assert {name: space.read(f"o/{name}") for name in os.listdir(space.root / "o")} == {
        "0": "2",
        "1": "2",
    }


def test_forced_all_means_every_step_whatever_comes_out_above_it(space: Space) -> None:
    space.recipe(
        "steps:\n  a: {run: 'echo 1 > a', outputs: {o: a}}\n  b: {run: 'cat {{ steps.a.o }} > b', outputs: {o: b}}\n  c: {run: 'true', needs: [b]}\n"
    )
    assert space.run() == ["a", "b", "c"]
    assert space.run(choice=Choice(all=True)) == ["a", "b", "c"]
    assert space.run(choice=Choice(begin="b")) == ["b", "c"]
    assert space.run(choice=Choice(again=("a",))) == ["a"]
