"""What `runs`, `logs` and `diff` tell of earlier runs is what happened; nothing that a step printed acts on a terminal, and no secret is shown."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.api.logs import AttemptLog, open_tail
from runner.execution.terms import Choice
from runner.interface.logs import Raw, Safe
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace
from tests.support import RECIPE, Space, until
from tests.system.test_cli_why import LETTERS, Recipe, letters, recipe

__all__ = ["letters", "recipe"]

SECRET = "correct-horse-battery"

TALK = """
inputs:
  gate: {type: string, default: ""}
  token: {type: secret, env: TALK_TOKEN, required: false}
steps:
  talk:
    run: |
      echo "one ${TALK_TOKEN-}"
      printf '\\033[31mred\\007\\n'
      cat "{{ inputs.gate }}" >/dev/null
      echo two
      touch {{ outputs.o }}
    secrets: [token]
    outputs: {o: o.txt}
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe that a step waits at until somebody writes to it."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def started(space: Space, gate: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    """A run whose step has printed its first lines and waits."""
    space.recipe(TALK)
    process = space.start("run", f"gate={gate}", env=env)

    def printed() -> bool:
        logs = list((space.root / ".recipe" / "attempts").glob("*.log"))
        with Workspace.open(space.root, read_only=True) as ws:
            rows = ws.store.runs.latest()
            heard = bool(rows) and any(
                event.after == "RUNNING" for event in ws.store.runs.events(rows[0].id)
            )
        return heard and any(
            log.read_bytes().endswith(b"\n") and b"red" in log.read_bytes() for log in logs
        )

    until(printed)
    return process


def followed(space: Space, *words: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*RECIPE, *words],
        cwd=space.root,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )


def test_runs_lists_what_was_run_newest_first(letters: Space, recipe: Recipe) -> None:
    letters.run({"word": "bye"})
    letters.recipe("steps: {a: {run: 'exit 1', outputs: {o: o}}}")
    letters.attempt()
    told = json.loads(recipe("runs", "--json").out)
    assert [run["state"] for run in told] == ["FAILED", "COMPLETED", "COMPLETED"]
    assert [
        (run["steps"]["ran"], run["steps"]["fresh"], run["steps"]["failed"]) for run in told
    ] == [(0, 0, 1), (2, 0, 0), (2, 0, 0)]
    assert told[1]["given"] == {"word": "bye"} and told[1]["seconds"] > 0
    table = recipe("runs", "-n", "2").out.splitlines()
    assert len(table) == 3 and table[2].endswith("t@1     word=bye")


def test_a_run_whose_worker_died_needs_recovery_and_one_at_work_executes(
    space: Space, recipe: Recipe
) -> None:
    with Workspace.open(space.root) as ws:
        ws.store.runs.submit(RunRow("20260101-000000-aaaaa1", "t@1", "", {}, ""))
        fence = ws.store.runs.claim("20260101-000000-aaaaa1", "a test")
        assert fence is not None
        ws.store.runs.group("20260101-000000-aaaaa1", fence, run_state=("ACTIVE", ""))
        assert "EXECUTING" in recipe("runs").out
    assert "NEEDS_RECOVERY" in recipe("runs").out
    assert "20260101-000000-aaaaa1 died" in recipe("logs", "20260101-000000-aaaaa1", "-f").err


def test_a_log_is_given_by_run_and_step(space: Space, recipe: Recipe) -> None:
    space.recipe(
        "steps: {a: {run: 'echo from a', outputs: {}}, b: {run: 'echo from b', needs: [a]}, c: {run: 'true', needs: [b]}}"
    )
    space.run()
    run = json.loads(recipe("runs", "--json").out)[0]["id"]
    assert recipe("logs").out == "==> a <==\nfrom a\n==> b <==\nfrom b\n"
    assert (
        recipe("logs", "last/a").out
        == "from a\n"
        == recipe("logs", f"{run[-6:]}/a").out
        == recipe("logs", f"{run[:-2]}/a", "-f").out
    )
    said = recipe("logs", "last/c")
    assert said.out == "" and said.code == 0 and "no output" in said.err
    said = recipe("logs", "last/d")
    assert said.code == 3 and "its steps: a, b, c" in said.err
    assert (
        recipe("logs", "nope/a").code == 3
        and recipe("logs", "last~7").code == 3
        and recipe("logs", "last/a", "--attempt", "2").code == 3
    )


def test_a_step_alone_is_one_of_the_last_run(space: Space, recipe: Recipe) -> None:
    space.recipe(
        "steps: {a: {run: 'echo from a', outputs: {}}, m: {run: 'echo of {{ matrix.k }}', matrix: {k: [1, 2]}}}"
    )
    space.run()
    assert recipe("logs", "a").out == "from a\n" == recipe("logs", "a", "-f").out
    assert recipe("logs", "m[k=2]").out == "of 2\n"
    assert recipe("logs", "m").out == "==> m[k=1] <==\nof 1\n==> m[k=2] <==\nof 2\n"
    said = recipe("logs", "ma")
    assert said.code == 3 and "did you mean" in said.err
    run = json.loads(recipe("runs", "--json").out)[0]["id"]
    space.run(choice=Choice(only="m", again=("m",)))
    said = recipe("logs", "a")
    assert said.out == "from a\n" and said.err.startswith(f"from run {run}, ")


def test_every_attempt_has_its_log(space: Space, recipe: Recipe) -> None:
    space.recipe(
        "steps: {a: {run: 'echo tried in $(basename $PWD); exit 1', outputs: {o: o}, retries: {failure: 1}}}"
    )
    space.attempt()
    first, last = recipe("logs", "last/a", "--attempt", "1").out, recipe("logs", "last/a").out
    assert first.startswith("tried in") and last.startswith("tried in") and first != last
    assert recipe("logs", "-f").out == f"==> a <==\n{first}==> a, attempt 2 <==\n{last}"


def test_a_step_that_was_fresh_has_its_log_where_it_ran(letters: Space, recipe: Recipe) -> None:
    first = json.loads(recipe("runs", "--json").out)[0]["id"]
    letters.recipe(LETTERS.replace("wc -c", "wc -l"))
    letters.run()
    said = recipe("logs", "last/make")
    assert said.code == 0 and said.err.startswith(f"from run {first}, ")
    said = recipe("logs", "last/make", "-f")
    assert said.code == 3 and f"recipe logs {first}/make" in said.err


def test_a_running_step_is_followed_to_its_end_with_its_secrets_masked(
    space: Space, gate: Path
) -> None:
    env = {"TALK_TOKEN": SECRET}
    process = started(space, gate, env)
    follower = followed(space, "logs", "last/talk", "-f", env=env)
    assert follower.stdout is not None
    begun = follower.stdout.read(3)  # it shows what is there before the step continues
    stranger = followed(space, "logs", "last/talk", env={"TALK_TOKEN": ""})
    out, err = stranger.communicate(timeout=60)
    assert out == b"" and b"TALK_TOKEN is not set here" in err
    gate.write_bytes(b"go")
    rest, err = follower.communicate(timeout=60)
    assert (
        begun + rest == b"one ***\n\x1b[31mred\x07\ntwo\n"
        and err == b""
        and follower.returncode == 0
    )
    assert process.wait(60) == 0


def test_who_cannot_mask_a_log_sees_it_when_it_is_over(space: Space, gate: Path) -> None:
    process = started(space, gate, {"TALK_TOKEN": SECRET})
    follower = followed(space, "logs", "-f", env={"TALK_TOKEN": ""})
    assert follower.stderr is not None
    assert b"hidden until the step finishes" in follower.stderr.readline()
    gate.write_bytes(b"go")
    out, _ = follower.communicate(timeout=60)
    assert out == b"==> talk <==\none ***\n\x1b[31mred\x07\ntwo\n" and process.wait(60) == 0


def test_following_ends_when_the_worker_is_killed(space: Space, gate: Path) -> None:
    process = started(space, gate, {})
    follower = followed(space, "logs", "-f", env={})
    assert follower.stdout is not None
    follower.stdout.read(1)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    _, err = follower.communicate(timeout=60)
    assert b"lost its worker" in err and follower.returncode == 0
    again = space.start(
        "run", f"gate={gate}"
    )  # the step is still there, and the next run takes it over: with the log that it began

    def taken_over() -> bool:
        with Workspace.open(space.root, read_only=True) as ws:
            (row,) = ws.store.runs.latest()
            return (
                row.fence == 2
                and [event.after for event in ws.store.runs.events(row.id)].count("RUNNING") == 2
            )

    until(taken_over)
    follower = followed(space, "logs", "last/talk", "-f", env={})
    assert follower.stdout is not None and follower.stdout.read(3) == b"one"
    gate.write_bytes(b"go")
    rest, _ = follower.communicate(timeout=60)
    assert rest.endswith(b"two\n") and again.wait(60) == 0


def on_a_terminal(space: Space, *words: str) -> bytes:
    """What a terminal gets of a command."""
    master, slave = pty.openpty()
    subprocess.run([*RECIPE, *words], cwd=space.root, stdout=slave, stderr=slave, check=False)
    os.close(slave)
    seen = b""
    try:
        while data := os.read(master, 4096):
            seen += data
    except OSError:  # the terminal's end
        pass
    os.close(master)
    return seen


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9d0;t\x9c"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", f"./{HOSTILE}.yaml"),
        ("plan", f"{HOSTILE}=1"),
        ("logs", HOSTILE),
        (HOSTILE,),
        ("gc", "-C", HOSTILE),
        ("run",),
    ],
)
def test_no_message_acts_on_a_terminal(space: Space, words: tuple[str, ...]) -> None:
    space.recipe(
        {
            "inputs": {"a": {"type": "string", "default": HOSTILE}},
            "steps": {"a": {"run": "printf %s {{ inputs.a }}; exit 3"}},
        }
    )
    seen = on_a_terminal(space, *words).decode()
    assert seen and not [
        bad for bad in ("\x1b]", "\x07", "\x9d", "\x9c", "\x1b[2J") if bad in seen
    ], seen


def test_nothing_that_a_step_printed_acts_on_a_terminal(space: Space) -> None:
    space.recipe(
        {"steps": {"a": {"run": "printf 'x\\033]0;title\\007y\\033[2J\\n50%%\\r100%%\\nend'"}}}
    )
    space.run()
    seen = on_a_terminal(space, "logs", "last/a")
    assert seen == b"xy\x1b[K\r\n50%\x1b[K\r100%\x1b[K\r\nend\x1b[K\r\n"


def test_a_line_without_end_is_shown_in_pieces() -> None:
    out = io.StringIO()
    writer = Safe(out, 80)
    for _ in range(40):
        writer.write(b"x" * 10_000)
    assert len(out.getvalue()) > 300_000
    writer.end()
    assert out.getvalue().count("x") == 400_000


def test_a_secret_is_masked_across_reads(tmp_path: Path) -> None:
    raw = tmp_path / "a.log"
    raw.write_bytes(b"a" * ((1 << 18) - 5) + SECRET.encode() + b"b")
    out = io.BytesIO()
    with Workspace.open(tmp_path, environ={**os.environ, "T": SECRET}) as ws:
        tail = open_tail(ws, "r", AttemptLog("a", 1, str(raw), ("T",)))
        assert tail is not None
        tail.rest(Raw(out).write)
    assert out.getvalue() == b"a" * ((1 << 18) - 5) + b"***b"


def test_two_runs_differ_in_inputs_data_metrics_and_outputs(space: Space, recipe: Recipe) -> None:
    count = """
    metrics: true
    run: |
      wc -c < {{ steps.make.text }} > {{ outputs.n }}
      echo "{\\"loss\\": $(cat {{ outputs.n }})}" > $RECIPE_METRICS
"""
    body = LETTERS.replace('\n    run: "wc -c < {{ steps.make.text }} > {{ outputs.n }}"\n', count)
    assert body != LETTERS
    space.recipe(body)
    for name in ("data.txt", "set/a", "set/b"):
        space.write(name, "data\n")
    space.run()
    space.write("set/b", "other\n")
    space.write("set/c", "c\n")
    space.run({"word": "bye"})
    out = recipe("diff", "last~1").out
    assert (
        "  word: hello -> bye" in out
        and "      ~ b\n      + c\n" in out
        and "    loss: 21 -> 22" in out
    )
    assert "    text.txt: f:" in out and "only in" not in out
    told = json.loads(recipe("diff", "last~1", "last", "--json").out)
    steps: dict[str, Any] = {step["id"]: step for step in told["steps"]}
    assert told["inputs"] == [{"part": "word", "before": "hello", "after": "bye"}]
    assert {change["part"] for change in steps["count"]["changes"]["metrics"]} == {"loss"}
    assert recipe("diff").out == recipe("diff", "last").out == out
    assert recipe("diff", "last", "last").out.endswith(
        "no differences in the steps that both ran\n"
    )


def test_a_changed_command_is_shown_by_its_lines(letters: Space, recipe: Recipe) -> None:
    letters.recipe(LETTERS.replace("wc -c", "wc -l"))
    letters.run()
    assert "only in A, cached in B or not part of it: make" in recipe("diff", "last~1").out
    letters.recipe(LETTERS.replace("echo {{", "echo -n {{"))
    letters.run()
    out = recipe("diff", "last~2", "last").out
    assert "  command\n" in out and "      + echo -n {{ inputs.word }} >> {{ outputs.text }}" in out


def test_bad_words_end_with_3(letters: Space, recipe: Recipe) -> None:
    for words in (
        ("diff", "last~9"),
        ("diff", "last", "x y"),
        ("runs", "-n", "0"),
        ("logs", "nope"),
        ("logs", "last", "--attempt", "x"),
    ):
        said = recipe(*words)
        assert (said.code, said.out) == (3, "") and said.err, words


def test_a_part_of_an_id_that_two_runs_have_is_not_taken_for_either(
    letters: Space, recipe: Recipe
) -> None:
    letters.run({"word": "bye"})
    said = recipe("logs", "20")
    assert said.code == 3 and "matches several runs" in said.err
