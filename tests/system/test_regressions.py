"""Bugs that other tools had, each asked of this one.

What must not change a key is in test_keys, and that a preemption does not use up the retries is in test_schedule.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.errors import CannotRun, Invalid
from runner.execution.session import preview
from runner.execution.terms import Choice, Settings
from runner.interface.cli.targets import open_for_run
from runner.language import document
from runner.storage.content import tiny
from runner.storage.records import database
from runner.storage.records.store import Store
from runner.survey.request import Request
from tests.support import Space, until

NAMED = {
    name
    for path in Path(runner.__file__).parent.rglob("*.py")
    for name in re.findall(r'crashpoint\("([\w-]+)"\)', path.read_text())
}
POINTS = sorted(
    name for name in NAMED if not name.startswith(("lease-", "release-"))
)  # those are tried with rented machines


def store(space: Space) -> Store:
    return Store.open(space.root / ".recipe", read_only=True)


GATED = """
steps:
  gated:
    run: |
      echo gated >> {log}
      cat in.txt > out.txt
      : > {here}
      read line < {gate}
    deps: [in.txt]
    outputs: {{o: out.txt}}
  after: {{run: "echo after >> {log}; cat {{{{ steps.gated.o }}}} > after.txt", outputs: {{o: after.txt}}}}
"""


class Gate:
    """A step that says when it is there, and goes on when it is let."""

    def __init__(self, space: Space) -> None:
        base = space.root.parent
        self.log, self.here, self.gate = base / "ran", base / "here", base / "gate"
        self.log.touch()
        os.mkfifo(self.gate)
        space.write("in.txt", "1\n")
        space.recipe(GATED.format(log=self.log, here=self.here, gate=self.gate))

    def reached(self) -> None:
        until(self.here.exists)

    def open(self) -> None:
        with self.gate.open("w") as file:
            file.write("go\n")

    def ran(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def gate(space: Space) -> Gate:
    return Gate(space)


# -- crashes and interrupts -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_any_named_point_is_taken_up_and_leaves_nothing(
    space: Space, point: str
) -> None:
    log = space.root.parent / "ran"
    space.write("in.txt", "1\n")
    words = ("run", "--driver", "loopback") if point == "attempt-carried" else ("run",)
    if point.startswith("remote-"):  # on the way into a store that is shared
        (space.root.parent / "store").mkdir()
        space.write(
            "recipe.toml",
            f'store = "team"\n[stores.team]\nurl = "{space.root.parent}/store"\npush = true\n',
        )
    if point in ("points-due", "letter-sent"):  # while somebody is told of the run
        space.write("recipe.toml", '[hooks]\nspend = ["true"]\n')
    space.recipe(f"""
steps:
  a: {{run: "echo a >> {log}; cat in.txt > a.txt", deps: [in.txt], outputs: {{o: a.txt}}}}
  b: {{run: "echo b >> {log}; cat {{{{ steps.a.o }}}} > d/b.txt", outputs: {{o: d/}}}}
""")
    code, _, err = space.command(*words, env={"RECIPE_CRASH_AT": point})
    assert code == -signal.SIGKILL, (code, err)
    code, _, err = space.command(*words)
    assert code == 0, err
    assert space.read("a.txt") == space.read("d/b.txt") == "1\n"
    assert log.read_text().split() == ["a", "b"]
    assert space.run() == []
    space.run(
        choice=Choice(again=("b",))
    )  # all may have been stored: only a run that does something looks around
    left = [path.name for path in (space.root / ".recipe" / "attempts").iterdir()]
    # What goes into a shared store goes beside everything else: the kill may come when all is stored and not yet tidied, and then `gc` does that.
    assert not left or point.startswith("remote-"), left
    assert space.command("gc")[0] == 0
    assert not list((space.root / ".recipe" / "partial").iterdir())


def test_a_client_killed_while_a_step_runs_finds_its_result_again(space: Space, gate: Gate) -> None:
    process = space.start("run")
    gate.reached()
    process.kill()
    process.wait()
    again = space.start("run")
    until(lambda: store(space).runs.latest()[0].fence == 2)
    gate.open()
    said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert gate.ran() == ["gated", "after"]
    process.communicate()


def test_ctrl_c_through_a_pipe_still_cleans_up(space: Space, gate: Gate) -> None:
    said = space.root.parent / "said"
    with said.open("w") as file:
        process = space.start("run", stderr=file, start_new_session=True)
    gate.reached()
    assert process.stdout is not None
    process.stdout.close()  # `recipe run | head`: the same Ctrl-C has ended the other side of the pipe
    for word in ("finishing", "stopping"):
        os.killpg(process.pid, signal.SIGINT)
        until(lambda word=word: word in said.read_text())
    assert process.wait(timeout=60) == 130
    with store(space) as history:
        assert [row.state for row in history.runs.latest()] == ["CANCELLED"]
    with pytest.raises(OSError, match="No such device"):
        os.close(
            os.open(gate.gate, os.O_WRONLY | os.O_NONBLOCK)
        )  # nobody reads it any more: the step is gone
    assert not (space.root / "out.txt").exists()


# -- two at once ------------------------------------------------------------------------------------------------------------------------------------


def test_two_runs_at_once_do_the_work_once(space: Space, gate: Gate) -> None:
    one = space.start("run")
    gate.reached()
    two = space.start("run")
    until(lambda: len(store(space).runs.latest()) == 2)
    gate.open()
    assert (one.wait(timeout=60), two.wait(timeout=60)) == (0, 0), (
        one.communicate(),
        two.communicate(),
    )
    assert sorted(gate.ran()) == ["after", "gated"]
    assert space.read("after.txt") == "1\n"
    for process in (one, two):
        process.communicate()


def test_history_is_read_while_a_run_is_in_progress(space: Space, gate: Gate) -> None:
    process = space.start("run")
    gate.reached()
    with store(space) as history:
        until(
            lambda: [row.state for row in history.runs.latest()] == ["ACTIVE"]
        )  # moves are stored in groups, a little later
        (row,) = history.runs.latest()
        assert history.runs.live(row.id) and history.database.check() == ""
        until(
            lambda: any(
                event.id == "gated" and event.after == "RUNNING"
                for event in history.runs.events(row.id)
            )
        )
    gate.open()
    assert process.wait(timeout=60) == 0
    process.communicate()


# -- files that change ------------------------------------------------------------------------------------------------------------------------------


def test_an_input_edited_while_its_step_ran_is_not_remembered(space: Space, gate: Gate) -> None:
    process = space.start("run")
    gate.reached()
    space.write("in.txt", "2\n")
    gate.open()
    assert process.wait(timeout=60) == 0
    process.communicate()
    assert space.answers()["gated"] == "run"
    space.write("in.txt", "1\n")
    assert (
        space.answers()["gated"] == "run"
    )  # neither content has a trace: which of them was read is not certain


def test_an_input_edited_before_its_step_began_is_not_taken_for_the_old_one(
    space: Space, gate: Gate
) -> None:
    text = (
        space.read(space.file)
        + "  late: {run: 'cat late.txt > o.txt', deps: [late.txt], needs: [gated], outputs: {o: o.txt}}\n"
    )
    space.write(space.file, text)
    space.write("late.txt", "old\n")
    process = space.start("run")
    gate.reached()
    space.write("late.txt", "new\n")
    gate.open()
    assert process.wait(timeout=60) == 0
    process.communicate()
    space.write("late.txt", "old\n")
    space.run()
    assert space.read("o.txt") == "old\n"


def test_a_file_deep_in_a_tree_edited_while_its_step_ran_is_noticed(
    space: Space, gate: Gate
) -> None:
    text = space.read(space.file).replace("deps: [in.txt]", "deps: [in.txt, tree]")
    space.write(space.file, text)
    space.write("tree/deep/x", "1")
    process = space.start("run")
    gate.reached()
    space.write("tree/deep/x", "2")
    gate.open()
    process.communicate(timeout=60)
    assert space.answers()["gated"] == "run"
    space.write("tree/deep/x", "1")
    assert space.answers()["gated"] == "fresh", "it was given what stands in its key"


ONE = """
steps:
  a: {run: "cat in.txt > out/a.txt", deps: [in.txt], outputs: {o: out/a.txt}}
  b: {run: "cat {{ steps.a.o }} > b.txt", outputs: {o: b.txt}}
"""


@pytest.fixture(params=["rows", "files"])
def done(space: Space, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Space:
    """A run that is over; what it made is kept as rows of a table, or as files."""
    if request.param == "files":
        monkeypatch.setattr(tiny, "TINY", -1)
    space.write("in.txt", "1\n")
    space.recipe(ONE)
    assert space.run() == ["a", "b"]
    return space


def test_a_deleted_output_is_put_back_without_running(done: Space) -> None:
    (done.root / "out/a.txt").unlink()
    assert done.answers() == {"a": "restore", "b": "fresh"}
    assert done.run() == [] and done.read("out/a.txt") == "1\n"


def test_an_edited_output_is_noticed_not_used_and_not_replaced_unasked(done: Space) -> None:
    done.write("out/a.txt", "mine\n")
    done.write("in.txt", "2\n")
    with pytest.raises(CannotRun, match=r"out/a\.txt"):
        done.run()
    assert done.read("out/a.txt") == "mine\n" and done.read("b.txt") == "1\n"
    assert done.run(settings=Settings(overwrite=True)) == ["a", "b"]
    assert done.read("out/a.txt") == done.read("b.txt") == "2\n"


def _forget_bytes(space: Space) -> None:
    for path in (space.root / ".recipe" / "objects").rglob("*"):
        if path.is_file():
            path.unlink()
    with sqlite3.connect(space.root / ".recipe/recipe.db") as db:
        db.execute("DELETE FROM tiny")


def test_bytes_that_are_gone_are_made_again_when_somebody_needs_them(done: Space) -> None:
    _forget_bytes(done)
    assert done.run() == []  # the published files are right, and nobody needs more
    (done.root / "out/a.txt").unlink()
    assert done.run() == ["a"]
    assert done.read("out/a.txt") == "1\n"


def test_a_published_copy_stands_in_for_bytes_that_are_gone(done: Space) -> None:
    _forget_bytes(done)
    done.recipe(ONE.replace("> b.txt", "> b.txt; true"))
    assert done.run() == ["b"]


def test_bytes_that_are_gone_everywhere_are_made_again_for_a_later_step(done: Space) -> None:
    _forget_bytes(done)
    (done.root / "out/a.txt").unlink()
    done.recipe(ONE.replace("> b.txt", "> b.txt; true"))
    assert done.run() == ["a", "b"]


def test_a_damaged_object_is_not_given_out(done: Space) -> None:
    for path in (done.root / ".recipe" / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_text("0\n")
    with sqlite3.connect(done.root / ".recipe/recipe.db") as db:
        db.execute("UPDATE tiny SET data = CAST('0' || char(10) AS BLOB)")
    (done.root / "out/a.txt").unlink()
    done.run()
    assert done.read("out/a.txt") == "1\n"


# -- the truth about what ran -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        'run: [echo, "{{ 1 // inputs.zero }}"]',
        'run: "echo {{ 1 // inputs.zero }} > o"',
        'run: x, env: {A: "{{ 1 // inputs.zero }}"}',
        'run: x, files: {c.json: {a: "{{ 1 // inputs.zero }}"}}',
    ],
)
def test_an_error_in_an_expression_is_never_swallowed(space: Space, how: str) -> None:
    text = "inputs: {zero: {type: integer, default: %d}}\nsteps: {a: {%s, outputs: {o: {path: o, optional: true}}}}"
    space.recipe(text % (0, how))
    with pytest.raises(Invalid) as found:
        space.attempt(settings=Settings(overwrite=True))
    assert "division by zero" in found.value.problems[0].message


SPLIT = """
steps:
  split: {run: "for p in $(cat list); do echo $p > parts/$p; done", deps: [list], outputs: {parts: parts/}}
  each:
    matrix: {p: {glob: "{{ steps.split.parts }}/*"}}
    run: "test $(cat {{ matrix.p }}) != bad; cat {{ matrix.p }} > {{ outputs.o }}"
    outputs: {o: "made/{{ matrix.p | name }}"}
  all: {run: ["sh", "-c", "cat \\"$@\\" > all.txt", "-", "{{ steps.each.o }}"], outputs: {o: all.txt}}
"""


def test_steps_that_are_found_on_the_way_all_run_and_only_what_is_new_runs_next_time(
    space: Space,
) -> None:
    space.recipe(SPLIT)
    space.write("list", "x y z")
    assert sorted(space.run()) == [
        "all",
        "each[p=parts%2Fx]",
        "each[p=parts%2Fy]",
        "each[p=parts%2Fz]",
        "split",
    ]
    assert space.read("all.txt") == "x\ny\nz\n" and space.run() == []
    space.write("list", "x w z")
    assert sorted(space.run()) == ["all", "each[p=parts%2Fw]", "split"]
    assert space.read("all.txt") == "w\nx\nz\n"
    space.write("list", "z")
    assert sorted(space.run()) == ["all", "split"] and space.read("all.txt") == "z\n"


def test_one_of_the_steps_found_on_the_way_fails_and_the_run_is_not_green(space: Space) -> None:
    space.recipe(SPLIT)
    space.write("list", "x bad z")
    ran = space.attempt(settings=Settings(keep_going=True))
    assert space.summary is not None and space.summary.state == "FAILED"
    assert (
        sorted(ran) == ["each[p=parts%2Fbad]", "each[p=parts%2Fx]", "each[p=parts%2Fz]", "split"]
        and not (space.root / "all.txt").exists()
    )


def test_a_failed_step_runs_again_and_a_forced_one_too(space: Space) -> None:
    flag = space.root.parent / "flag"
    space.recipe(f"steps: {{a: {{run: 'test -e {flag}; echo 1 > o', outputs: {{o: o}}}}}}")
    for _ in range(2):
        assert space.attempt() == ["a"]
        assert space.summary is not None and space.summary.state == "FAILED"
    flag.touch()
    assert space.run() == ["a"] and space.run() == []
    from runner.execution.terms import Choice

    assert space.run(choice=Choice(all=True)) == ["a"] and space.run(
        choice=Choice(again=("a",))
    ) == ["a"]


def test_a_step_that_says_cache_false_runs_every_time_and_cuts_off_below(space: Space) -> None:
    space.recipe(
        "steps: {a: {run: 'echo 1 > o', cache: false, outputs: {o: o}}, b: {run: 'cat {{ steps.a.o }} > p', outputs: {o: p}}}"
    )
    assert space.run() == ["a", "b"] and space.run() == ["a"]


def test_a_step_stopped_by_its_time_limit_keeps_its_state(space: Space) -> None:
    space.recipe("""
steps:
  train:
    run: |
      if [ -e {{ state.s }}/step-1 ]; then cat {{ state.s }}/step-1 > o; exit 0; fi
      echo half > {{ state.s }}/step-1
      exec tail -f /dev/null
    state: {s: {checkpoint: "step-*"}}
    timeout: 1s
    outputs: {o: o}
""")
    assert space.attempt() == ["train"]
    assert space.summary is not None and "stopped" in space.summary.failed[0].reason
    assert space.run() == ["train"] and space.read("o") == "half\n"


# -- what it costs ----------------------------------------------------------------------------------------------------------------------------------


def test_what_is_written_to_the_database_is_constant_for_each_step(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    plain = database._connect

    def watched(*words: Any, **more: Any) -> sqlite3.Connection:
        db = plain(*words, **more)
        db.set_trace_callback(counted.append)
        return db

    monkeypatch.setattr(database, "_connect", watched)

    def cost(steps: int) -> tuple[int, int]:
        counted.clear()
        space.recipe({"steps": {f"s{steps}_{n}": {"run": ["true"]} for n in range(steps)}})
        assert len(space.run()) == steps
        writes = [
            text
            for text in counted
            if text.split(None, 1)[0].upper() in ("INSERT", "UPDATE", "DELETE", "REPLACE")
        ]
        commits = [text for text in counted if text.upper().startswith("COMMIT")]
        return len(writes), len(commits)

    cost(1)
    (small, _), (large, commits) = cost(10), cost(50)
    each = (large - small) / 40
    assert each <= 12 and large <= 50 * 12 + 40, (small, large)
    assert commits <= 50, commits


# -- secrets ----------------------------------------------------------------------------------------------------------------------------------------

CANARY = "canary-7f/3+Q=secret"
SPY = """
import base64, glob, os, sys
secret = os.environ["CANARY_TOKEN"]
print("plain", secret, "base64", base64.b64encode(secret.encode()).decode(), "hex", secret.encode().hex(), flush=True)
print("error", secret, file=sys.stderr, flush=True)
seen = 0
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        seen += secret.encode() in open(path, "rb").read()
    except OSError:
        pass
open("seen", "w").write(str(seen))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_secret_is_in_no_log_database_plan_event_or_argument(
    space: Space, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    space.write("spy.py", SPY)
    space.recipe(f"""
inputs: {{token: {{type: secret, env: CANARY_TOKEN}}}}
code: [spy.py]
steps: {{a: {{run: [python, spy.py, "{code}"], secrets: [token], outputs: {{o: {{path: seen, optional: true}}}}}}}}
""")
    rc, out, err = space.command("run")
    assert rc == code
    planned = space.command("plan", "-p", "--json")
    events = space.command("run", "--json", "-B")
    spellings = [
        CANARY.encode(),
        base64.b64encode(CANARY.encode()),
        CANARY.encode().hex().encode(),
        json.dumps(CANARY).encode()[1:-1],
    ]
    shown = "\n".join([out, err, *map(str, planned), *map(str, events)]).encode()
    assert [s for s in spellings if s in shown] == []
    found = []
    for path in (space.root / ".recipe").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            found += [(path, s) for s in spellings if s in data]
    assert found == []
    if code == 0:
        assert space.read("seen") == "0"
        logs = [path.read_text() for path in (space.root / ".recipe" / "runs").rglob("*.log")]
        assert logs and all("plain *** base64" in text for text in logs)


# -- what runs is what the plan said ----------------------------------------------------------------------------------------------------------------


def test_a_when_that_came_out_false_leaves_nothing_to_do_the_next_time(space: Space) -> None:
    space.recipe("""
inputs: {v: {type: number, default: 2}}
steps:
  a: {run: "echo loss={{ inputs.v }}", metrics: {pattern: "loss=(?P<loss>[0-9.]+)"}}
  b: {run: "echo b > b", when: "{{ steps.a.metrics.loss < 1 }}", outputs: {o: b}}
  c: {run: "cat {{ steps.b.o }} > c", outputs: {o: c}}
""")
    assert space.run() == ["a"] and not (space.root / "b").exists()
    assert space.answers() == {"a": "fresh", "b": "skip", "c": "skip"}
    assert space.run() == [] and space.events == []
    assert space.run({"v": 0.5}) == ["a", "b", "c"]
    assert space.run({"v": 0.25}) == [
        "a"
    ]  # what `when` asked is another number, and the steps are the same


def test_what_a_step_made_when_it_was_run_again_by_hand_stays(space: Space) -> None:
    space.recipe("""
steps:
  dice: {run: "date +%s.%N > dice", outputs: {o: dice}}
  use: {run: "cat {{ steps.dice.o }} > use", outputs: {o: use}}
""")
    space.run()
    first = space.read("dice")
    assert space.run(choice=Choice(again=("dice",))) == ["dice", "use"]
    second = space.read("dice")
    assert space.run() == [] and space.read("dice") == space.read("use") == second != first
    assert space.run(choice=Choice(all=True)) == ["dice", "use"] and space.run() == []
    assert space.read("dice") == space.read("use") != second


def test_a_pattern_over_what_another_step_makes_waits_for_it(space: Space) -> None:
    space.write("n", "2")
    space.recipe("""
steps:
  merge: {run: "cat raw/*.txt > all", deps: ["raw/*.txt"], outputs: {o: all}}
  make: {run: "for i in $(seq $(cat n)); do echo $i > raw/$i.txt; done", deps: [n], outputs: {raw: raw/}}
""")
    assert space.run() == ["make", "merge"] and space.read("all") == "1\n2\n"
    space.write("n", "3")
    assert space.run() == ["make", "merge"] and space.read("all") == "1\n2\n3\n"
    assert space.run() == []


def test_a_step_that_writes_into_what_it_was_given_spoils_it_for_no_other(space: Space) -> None:
    space.recipe("""
steps:
  a: {run: "echo 1 > d/f", outputs: {o: d/}}
  bad: {run: "echo 2 >> {{ steps.a.o }}/f"}
  good: {run: "cat {{ steps.a.o }}/f > g", needs: [late], outputs: {o: g}}
  late: {run: "true"}
""")
    space.attempt(settings=Settings(keep_going=True))
    assert space.summary is not None and "bad" in [failure.id for failure in space.summary.failed]
    assert space.read("d/f") == "1\n"
    assert (
        not (space.root / "g").exists() or space.read("g") == "1\n"
    )  # the superuser can spoil an object: then nobody is given it
    space.recipe(
        space.read(space.file).replace('  bad: {run: "echo 2 >> {{ steps.a.o }}/f"}\n', "")
    )
    space.run()
    assert space.read("g") == "1\n" and space.read("d/f") == "1\n"


def test_recipes_in_two_folders_each_use_the_one_beside_them(space: Space) -> None:
    for folder in ("a", "b"):
        space.recipe(
            f"recipe: x@1\nsummary: A\nsteps: {{s: {{run: 'echo {folder} > o.txt', outputs: {{o: o.txt}}}}}}",
            name=f"{folder}/x.yaml",
        )
        space.recipe(
            f"recipe: {folder}@1\nsummary: A\nsteps: {{inner: {{uses: ./x.yaml}}}}",
            name=f"{folder}/outer.yaml",
        )
    space.recipe("steps: {one: {uses: ./a/outer.yaml}, two: {uses: ./b/outer.yaml}}")
    assert sorted(space.run()) == ["one/inner/s", "two/inner/s"]
    assert [space.read(f"{step}/inner/o.txt") for step in ("one", "two")] == ["a\n", "b\n"]


def test_a_first_run_reads_its_recipe_once(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = document.parse
    monkeypatch.setattr(
        document, "parse", lambda text, name: read.append(name) or parse(text, name)
    )
    space.recipe("steps: {s: {run: 'true'}}")
    with open_for_run(space.root, Request("./recipe.yaml")) as ws:
        assert preview(ws, Request("./recipe.yaml"), Choice()).todo
    assert read == [str(space.root / "recipe.yaml")]
