"""Ctrl-C once, twice, three times, and SIGTERM: what runs, what is stopped, what is left running, and how the next run goes on."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from runner.storage.workspace import Workspace
from tests.support import RECIPE, Space, until


def waiting(space: Space, *, deaf: str = "") -> None:
    """Two steps, of which the first waits for somebody to open a gate."""
    os.mkfifo(space.root / "gate")
    space.recipe(
        f"steps:\n  one: {{run: '{deaf} echo one >> {space.root}/starts; read go < {space.root}/gate; echo x > o.txt', outputs: {{o: o.txt}}}}\n"
        f"  two: {{run: 'echo two >> {space.root}/starts; cat {{{{ steps.one.o }}}} > p.txt', outputs: {{p: p.txt}}}}\n"
    )


def starts(space: Space) -> list[str]:
    path = space.root / "starts"
    return path.read_text().split() if path.exists() else []


def open_gate(space: Space, *, times: int = 1) -> int:
    gate = os.open(space.root / "gate", os.O_RDWR)
    os.write(gate, b"go\n" * times)
    return gate


def finish(worker: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = worker.communicate(timeout=60)
    return worker.returncode, said


def hear(worker: subprocess.Popen[str], words: str) -> str:
    assert worker.stderr is not None
    for line in worker.stderr:
        if words in line:
            return line
    raise AssertionError(f"never said {words!r}")


def waits(pid: int) -> bool:
    """Whether a worker whose words nobody hears has dealt with every signal, and waits for what is next."""
    status = Path(f"/proc/{pid}/status").read_text()
    heard = not re.search(r"(SigPnd|ShdPnd):\s*\S*[1-9a-f]", status)
    where = Path(f"/proc/{pid}/wchan").read_text()  # 0 where the kernel does not tell
    return heard and "State:\tS" in status and ("poll" in where or where == "0")


def test_one_interrupt_finishes_what_runs_and_starts_nothing(space: Space) -> None:
    waiting(space)
    worker = space.start("run")
    until(lambda: starts(space) == ["one"])
    worker.send_signal(signal.SIGINT)
    hear(worker, "finishing 1 running step")
    gate = open_gate(space)
    assert finish(worker)[0] == 130
    os.close(gate)
    assert starts(space) == ["one"] and space.read("o.txt") == "x\n"
    assert space.run() == ["two"]


def test_an_interrupt_that_came_while_the_last_step_ended_left_nothing_out(space: Space) -> None:
    waiting(space)
    worker = space.start("run", "--until", "one", "-v")
    until(lambda: starts(space) == ["one"])
    worker.send_signal(signal.SIGINT)
    hear(worker, "finishing 1 running step")
    gate = open_gate(space)
    assert worker.wait(timeout=60) == 0
    os.close(gate)
    assert worker.stdout is not None and "interrupted" not in worker.stdout.read()
    assert "COMPLETED" in (runs := space.command("runs")[1]) and "interrupted" not in runs


def test_an_interrupt_ends_a_watch_though_its_run_completed(space: Space) -> None:
    waiting(space)
    worker = space.start("watch", "--until", "one")
    until(lambda: starts(space) == ["one"])
    worker.send_signal(signal.SIGINT)
    hear(worker, "finishing 1 running step")
    gate = open_gate(space)
    assert finish(worker)[0] == 130
    os.close(gate)


def test_two_interrupts_stop_what_runs(space: Space) -> None:
    waiting(space)
    worker = space.start("run")
    until(lambda: starts(space) == ["one"])
    worker.send_signal(signal.SIGINT)
    hear(worker, "press Ctrl-C again to stop")
    worker.send_signal(signal.SIGINT)
    assert finish(worker)[0] == 130
    assert not (space.root / "o.txt").exists()
    gate = open_gate(space)
    assert space.run() == ["one", "two"]
    os.close(gate)
    assert starts(space) == ["one", "one", "two"]


def test_sigterm_stops_what_runs(space: Space) -> None:
    waiting(space)
    worker = space.start("run")
    until(lambda: starts(space) == ["one"])
    worker.terminate()
    assert finish(worker)[0] == 130
    assert "CANCELLED" in space.command("runs")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_interrupts_a_run_that_still_connects_is_said(
    space: Space, number: signal.Signals
) -> None:
    space.recipe("steps: {s: {run: 'echo x'}}")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        worker = space.start(
            "run", "--driver", "ssh", "--host", f"somebody@127.0.0.1:{mute.getsockname()[1]}"
        )
        mute.settimeout(30)
        with mute.accept()[0]:
            worker.send_signal(number)
            assert finish(worker) == (130, "interrupted before any step started\n")
    with Workspace.open(space.root) as ws:
        assert ws.store.runs.latest() == []


def test_three_interrupts_go_without_waiting_and_the_next_run_is_clean(space: Space) -> None:
    waiting(space, deaf='trap "" TERM;')
    worker = space.start("run")
    until(lambda: starts(space) == ["one"])
    for words in ("press Ctrl-C again to stop", "quit immediately"):
        worker.send_signal(signal.SIGINT)
        hear(worker, words)
    worker.send_signal(signal.SIGINT)
    assert finish(worker)[0] == 130
    gate = open_gate(space, times=2)
    space.run()
    os.close(gate)
    # It had been told to stop: whatever it still did does not count.
    assert starts(space) == ["one", "one", "two"]
    assert space.read("p.txt") == "x\n"


def test_an_interrupt_of_a_pipeline_drains_though_its_reader_is_gone(space: Space) -> None:
    waiting(space)
    done = space.root / "done"
    words = " ".join(RECIPE)
    pipeline = subprocess.Popen(
        [
            "bash",
            "-c",
            f"trap : INT; ((echo $BASHPID > worker; exec {words} run 2>&1); echo $? > {done}) | cat",
        ],
        cwd=space.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    until(lambda: starts(space) == ["one"])
    os.killpg(pipeline.pid, signal.SIGINT)
    until(lambda: waits(int(space.read("worker"))))
    gate = open_gate(space)
    pipeline.wait(timeout=60)
    os.close(gate)
    until(lambda: (space.root / "p.txt").exists() or (space.root / "o.txt").exists())
    assert space.read("o.txt") == "x\n"
    assert not (space.root / "p.txt").exists()


def test_ctrl_c_on_a_terminal_drains_and_leaves_the_terminal_in_order(space: Space) -> None:
    waiting(space)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(space.root)
        os.environ["TERM"] = "xterm"
        os.execv(RECIPE[0], [*RECIPE, "run"])
    try:
        until(lambda: starts(space) == ["one"])
        os.write(terminal, b"\x03")
        said = b""
        while b"press Ctrl-C again" not in said:
            said += os.read(terminal, 65536)
        gate = open_gate(space)
        try:
            while data := os.read(terminal, 65536):
                said += data
        except OSError:
            pass  # the other side is closed
        os.close(gate)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert said.rstrip().count(b"\x1b[?25l") <= said.count(b"\x1b[?25h"), (
        "the cursor is shown at the end"
    )
    assert starts(space) == ["one"]


def test_an_interrupt_says_which_checkpoint_a_second_one_keeps(space: Space) -> None:
    os.mkfifo(space.root / "gate")
    space.recipe(f"""
steps:
  train:
    run: 'touch {{{{ state.kept }}}}/step-34.json && echo "{{}}" > {{{{ state.kept }}}}/step-34.json && cat {space.root}/gate > {{{{ outputs.o }}}}'
    state: {{kept: {{checkpoint: "step-*.json"}}}}
    outputs: {{o: o.txt}}
  plain: {{run: "cat {space.root}/gate > {{{{ outputs.o }}}}", outputs: {{o: p.txt}}}}
""")
    worker = space.start("run", "-j", "2")
    until(
        lambda: any(
            path.stat().st_size for path in space.root.glob(".recipe/states/*/1/kept/step-34.json")
        )
    )
    worker.send_signal(signal.SIGINT)
    said = hear(worker, "press Ctrl-C again to stop now")
    assert "train keeps step-34.json" in said and "plain starts over next time" in said
    worker.send_signal(signal.SIGINT)
    assert finish(worker)[0] == 130
