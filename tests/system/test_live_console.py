"""The live display, as a terminal shows it: what it follows, how it fits, and that nothing a step does changes the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.execution.steps.failing import FailureDetails
from runner.execution.terms import Overview, Summary
from runner.interface.console import Live
from runner.interface.tail import MaskedTail, MetricsTail
from runner.secrets import Masker, Secret
from runner.storage.records.runs import Event

ROOT = Path(__file__).parents[2]


class Stage(io.StringIO):
    """A terminal that shows what is written to it, a clock, and a run to show."""

    encoding = "utf-8"

    def __init__(self, folder: Path, columns: int = 80, height: int = 12) -> None:
        super().__init__()
        self.folder = folder
        self.columns, self.height = columns, height
        self.now = 1000.0
        self.writes: list[str] = []
        self.screen = pyte.HistoryScreen(columns, height, history=1000)
        self._stream = pyte.Stream(self.screen)
        self.results = io.StringIO()
        self.live = Live(
            self, self.results, clock=lambda: self.now, size=lambda: (self.columns, self.height)
        )

    def write(self, text: str) -> int:
        self.writes.append(text)
        self._stream.feed(text)
        return len(text)

    def begin(
        self,
        total: int = 12,
        fresh: int = 9,
        to_run: tuple[str, ...] = ("tokens", "train", "export"),
        **more: Any,
    ) -> None:
        self.live.begin(
            Overview(
                "r1",
                "sft@1",
                total,
                fresh,
                to_run,
                more.pop("expected", {}),
                2,
                str(self.folder),
                **more,
            )
        )

    def move(self, id: str, before: str, after: str, reason: str = "", **data: object) -> None:
        self.live.events([Event("r1", 1, 1.0, "step", id, before, after, reason, data)])  # type: ignore[arg-type]

    def start(self, id: str, log: bytes = b"", *metrics: dict[str, float]) -> None:
        self.log(id, log)
        self.metrics(id, *metrics)
        self.move(id, "QUEUED", "RUNNING", log=f"{id}.log", metrics=f"{id}.metrics")

    def log(self, id: str, text: bytes) -> None:
        with (self.folder / f"{id}.log").open("ab") as log:
            log.write(text)

    def metrics(self, id: str, *points: dict[str, float]) -> None:
        with (self.folder / f"{id}.metrics").open("a") as file:
            file.writelines(json.dumps(point) + "\n" for point in points)

    def pass_time(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.live.tick()

    def seen(self) -> list[str]:
        """What is on the screen, down to the cursor."""
        return [line.rstrip() for line in self.screen.display[: self.screen.cursor.y]]

    def settings(self) -> tuple[object, ...]:
        """Everything about the terminal that a program can leave changed."""
        screen = self.screen
        attributes = screen.cursor.attrs._replace(data=" ")
        margins, charsets = screen.margins, (screen.charset, screen.g0_charset, screen.g1_charset)
        return (
            frozenset(screen.mode),
            screen.title,
            screen.icon_name,
            margins,
            charsets,
            attributes,
            screen.cursor.hidden,
            frozenset(screen.tabstops),
        )


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_there_is_one_bar_over_all_steps_and_a_line_for_each_running_one(stage: Stage) -> None:
    stage.begin()
    stage.start("tokens", b"reading\ntokens: 40 of 100\n")
    stage.start("train")
    stage.pass_time()
    assert stage.seen() == [
        "[======================-----   ] 9/12  2 running  0.5s",
        "  tokens    0.5s  tokens: 40 of 100",
        "  train     0.5s",
    ]


def test_what_ended_scrolls_above_the_display(stage: Stage) -> None:
    stage.begin()
    stage.start("tokens")
    stage.pass_time()
    stage.move("tokens", "RUNNING", "DONE", seconds=3.0)
    stage.start("train")
    stage.live.say("finishing 1 running step(s)")
    stage.pass_time()
    assert [line[:29] for line in stage.seen()] == [
        "[10/12] tokens  3.0s",
        "finishing 1 running step(s)",
        "[=========================---",
        "  train    0.5s",
    ]


def test_at_the_end_the_display_gives_way_to_the_count(stage: Stage) -> None:
    stage.begin()
    stage.start("train")
    stage.pass_time()
    stage.move("train", "RUNNING", "FAILED", "exit", detail="exit 1")
    failure = FailureDetails("train", "exit 1", b"no such thing\n", "", "")
    stage.live.end(
        Summary(
            "FAILED",
            {"FRESH": 9, "FAILED": 1, "BLOCKED": 2},
            4.0,
            [failure],
            [("lora", "out/lora")],
        )
    )
    assert stage.seen() == [
        "[10/12] train  failed: exit 1",
        "train: failed: exit 1",
        "  train | no such thing",
        "12 steps: 0 ran, 9 fresh, 1 failed, 2 blocked in 4.0s",
    ]
    assert stage.results.getvalue() == "lora  out/lora\n"


def test_training_metrics_stand_beside_the_step_with_their_course_and_its_end(stage: Stage) -> None:
    stage.begin(expected={"tokens": 1.0, "train": 1.0, "export": 2.0})
    stage.start(
        "train", b"", {"step": 1, "max_steps": 100, "loss": 4.0, "tokens_per_second": 1234.5}
    )
    stage.pass_time()
    stage.metrics(
        "train", {"step": 2, "loss": 3.0}, {"step": 11, "loss": 2.0, "tokens_per_second": 1500.0}
    )
    stage.pass_time(10.0)
    bar, row = stage.seen()
    assert row == "  train     10s  step 11/100 11%  loss 2 █▅▁  1.5k tokens/s  ETA 1m29s"
    # What the metrics say of `train` (89 s) goes before what it took last time (1 s).
    assert bar.endswith("1 running  10s  11%  ETA 1m32s")


def test_the_end_is_not_guessed_for_a_step_of_which_nothing_is_known(stage: Stage) -> None:
    stage.begin(expected={"tokens": 100.0, "train": 20.0})
    stage.start("tokens")
    stage.pass_time(1.0)
    assert "ETA" not in stage.seen()[0]
    stage.move("export", "READY", "FRESH")
    stage.pass_time(9.0)
    assert stage.seen()[0].endswith("ETA 1m50s")


def test_nothing_is_written_while_nothing_changes(stage: Stage) -> None:
    stage.begin()
    stage.start("train", b"one\n")
    stage.pass_time(0.1)
    assert stage.writes
    stage.writes.clear()
    for _ in range(4):
        stage.pass_time(0.1)
    assert stage.writes == []
    stage.log("train", b"two\n")
    stage.pass_time(0.1)
    assert len(stage.writes) == 1
    stage.log("train", b"three\n")
    stage.pass_time(0.05)
    assert len(stage.writes) == 1  # at most ten times a second


def test_a_step_that_ended_without_a_line_is_gone_from_the_display(stage: Stage) -> None:
    stage.begin(400, 0, tuple(f"s{n}" for n in range(400)))
    stage.start("train")
    for n in range(30):  # more than have a line of their own
        stage.move(f"s{n}", "RUNNING", "DONE", seconds=0.1)
    stage.live.say("drawn")
    assert "train" in stage.seen()[-1]
    stage.move("train", "RUNNING", "DONE", seconds=0.1)
    stage.pass_time(0.1)
    assert stage.seen()[-2] == "drawn" and "31/400  0 running" in stage.seen()[-1]
    assert not "".join(stage.screen.display[stage.screen.cursor.y :]).strip()


def test_a_run_that_is_over_at_once_shows_no_display(stage: Stage) -> None:
    stage.begin(12, 12, ())
    stage.live.end(Summary("COMPLETED", {"FRESH": 12}, 0.1))
    assert stage.seen() == ["everything is fresh (12 steps)"]
    assert "\x1b[J" not in "".join(stage.writes)


def test_a_small_terminal_gets_what_fits(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 24, 6)
    stage.begin()
    for n in range(9):
        stage.start(f"convert[file=文書{n}.txt]", b"x" * 300)
    for _ in range(3):
        stage.pass_time()
    seen = stage.seen()
    assert len(seen) == 5
    assert seen[-1] == "  … and 6 more"
    assert not stage.screen.history.top


@given(
    st.lists(st.tuples(st.text(max_size=40), st.binary(max_size=60)), max_size=4),
    st.integers(3, 60),
    st.integers(3, 9),
)
@settings(max_examples=30, deadline=None)
def test_redrawing_leaves_no_trace_of_what_was_drawn_before(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, bytes]],
    columns: int,
    height: int,
) -> None:
    stage = Stage(tmp_path_factory.mktemp("run"), columns, height)
    stage.begin()
    for n, (id, text) in enumerate(steps):
        log = stage.folder / f"{n}.log"
        log.write_bytes(text)
        stage.move(id, "QUEUED", "RUNNING", log=str(log))
    for _ in range(3):
        stage.pass_time(7.0)
    once = stage.seen()
    assert len(once) <= height - 1 and not stage.screen.history.top
    stage.pass_time(0.5)
    assert len(stage.seen()) == len(once)
    assert stage.screen.cursor.x == 0
    assert not "".join(stage.screen.display[len(once) :]).strip()
    for id, _ in steps:
        stage.move(id, "RUNNING", "CANCELLED")
    stage.live.end(Summary("CANCELLED", {"CANCELLED": len(steps)}, 1.0))
    assert " running" not in "".join(stage.screen.display)


def test_a_terminal_that_became_narrower_is_redrawn_over_the_wrapped_lines(stage: Stage) -> None:
    stage.begin()
    stage.start("train", b"y" * 70)
    stage.pass_time()
    stage.writes.clear()
    stage.columns = 40
    stage.pass_time()
    # The bar of 54 columns and the row of 79 now take two lines each.
    assert "\r\x1b[4A" in stage.writes[0]


HOSTILE = [
    b"\x1b]0;title\x07",
    b"\x1b]52;c;aGk=\x07",
    b"\x1b[2J\x1b[H",
    b"\x1b[?25l",
    b"\x1b[?1049h",
    b"\x1b[31;5m",
    b"\x1b[5;10r",
    b"\x1b(0",
    b"\x0e",
    b"\x1bc",
    b"\x1b#8",
    b"\x1bP1$q\x1b\\",
    b"\x1b[6n",
    b"\x1b[3g",
    b"\x1b[4h",
    b"\x9b2J",
    b"\xc2\x9b2J",
    b"\xc2\x9d0;x\xc2\x9c",
    b"\r\x1b[A",
    b"\x07\x08\x0b\x0c\x7f\x00",
    b"\xe2\x80\xae",
    b"\xf0\x9f",
    b"\n",
    b"ok",
]


@given(st.lists(st.sampled_from(HOSTILE) | st.binary(max_size=8), max_size=12).map(b"".join))
@settings(max_examples=60, deadline=None)
def test_no_output_of_a_step_changes_the_terminal(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    stage = Stage(tmp_path_factory.mktemp("run"))
    before = stage.settings()
    text = data.decode(errors="surrogateescape")
    stage.begin()
    stage.start("train", data, {"step": 1, text: 2.0})
    stage.move(text, "QUEUED", "RUNNING", text, note=text)
    stage.live.say(text)
    stage.pass_time()
    assert stage.settings() == before
    stage.move("train", "RUNNING", "FAILED", text)
    stage.live.end(
        Summary(
            "FAILED", {"FAILED": 1}, 1.0, [FailureDetails(text, text, data, text, text)], [], "r1"
        )
    )
    assert stage.settings() == before
    allowed = {"\r", "\n", "\x1b"}
    assert all(char.isprintable() or char in allowed for write in stage.writes for char in write)


def test_every_write_alone_leaves_the_terminal_as_it_was(stage: Stage) -> None:
    before = stage.settings()
    stage.begin()
    for n in range(5):
        stage.start(f"s{n}", b"working\n")
        stage.pass_time()
        assert stage.settings() == before


def test_a_secret_in_the_output_is_masked(stage: Stage) -> None:
    masker = Masker([Secret("token", "hunter2-hunter2")])
    stage.begin(masker=masker)
    stage.start("train", b"a" * 9000 + b"\ntoken=hunter2-hunter2")
    stage.pass_time()
    stage.live.end(Summary("COMPLETED", {"DONE": 1}, 1.0))
    assert "token=***" in "".join(stage.writes) and "hunter2" not in "".join(stage.writes)


def test_a_secret_cut_by_the_edge_of_what_is_read_is_not_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    secret = b"hunter2-" * 8
    masker = Masker([Secret("token", secret.decode())])
    for cut in range(0, 64, 7):
        log.write_bytes(secret + b"x" * (8192 - 64 + cut))
        tail = MaskedTail(str(log), masker)
        assert tail.poll()
        assert "hunter" not in tail.line


def test_a_secret_of_which_only_the_beginning_is_written_is_not_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = MaskedTail(str(log), Masker([Secret("token", "hunter2-hunter2")]))
    log.write_bytes(b"token: hunter2-hu")
    assert tail.poll() and tail.line == "token:"
    log.write_bytes(b"token: hunter2-hunter2")
    assert tail.poll() and tail.line == "token: ***"
    log.write_bytes(b"token: hunter2-hunter2\nepoch")
    assert tail.poll() and tail.line == "epoch"


def test_a_metric_named_by_a_secret_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    file.write_text('{"step": 1, "hunter2-hunter2": 0.5}\n')
    tail = MetricsTail(str(file), Masker([Secret("token", "hunter2-hunter2")]))
    assert tail.poll(0.0) and tail.text(bars=False) == "step 1  *** 0.5"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"one\ntwo\n", "two"),
        (b"one\n\n  \n", "one"),
        (b"\r 10%|#\r 20%|##", "20%|##"),
        (b" 20%|##\r", "20%|##"),
        (b"a\r\nb\r\n", "b"),
        (b"\xff\xfe caf\xc3\xa9", "\ufffd\ufffd café"),
        (b"\x1b[32mgreen\x1b[0m\x1b[K", "green"),
        (b"x" * 100_000 + b"\nlast", "last"),
    ],
)
def test_the_last_line_of_a_log_is_what_a_person_would_see(
    tmp_path: Path, text: bytes, line: str
) -> None:
    log = tmp_path / "log"
    log.write_bytes(text)
    tail = MaskedTail(str(log), Masker())
    assert tail.poll()
    assert tail.line == line
    assert not tail.poll()


def test_metrics_are_followed_by_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    tail = MetricsTail(str(file), Masker())
    assert not tail.poll(0.0)
    with file.open("wb", buffering=0) as writer:
        writer.write(b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
        assert tail.poll(0.0) and tail.text(False) == "step 1  loss 2.5"
        assert not tail.poll(0.0)
        writer.write(b'ss": 2.25}\n')
        assert tail.poll(0.0) and tail.text(False) == "step 2  loss 2.25"
        writer.write(
            b"[" * 30_000
            + b"\nnot json\n"
            + b'{"step": NaN, "loss": 1e999, "ok": true}\n{"step": 3}\n'
        )
        assert tail.poll(0.0) and tail.text(False) == "step 3  loss 2.25"


def test_numbers_that_a_log_prints_are_followed_by_the_pattern(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(
        b"hello\nstep 1 of it: loss 2.5\nnothing\nstep 2 of it: loss 2.25, hunter2-hunter2\nstep 3 of"
    )
    tail = MetricsTail(
        str(log),
        Masker([Secret("token", "hunter2-hunter2")]),
        10,
        r"step (?P<step>\d+) of it: loss (?P<loss>[\d.]+)(?:, (?P<more>\S+))?",
    )
    assert tail.poll(0.0) and tail.text(False) == "step 2/10 20%  loss 2.25"
    with log.open("ab") as writer:
        writer.write(b" it: loss 2\n")
    assert tail.poll(1.0) and tail.text(False) == "step 3/10 30%  loss 2" and tail.left(1.0) == 7.0


def test_a_pattern_that_takes_for_ever_does_not_hold_up_the_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.storage.metrics.PATIENCE", 0.01)
    log = tmp_path / "log"
    log.write_bytes(b"a" * 4000 + b"\n")
    tail = MetricsTail(str(log), Masker(), 10, r"(?P<step>(a|a)*)b")
    assert tail.poll(0.0) and tail.text(False) == ""


def test_of_long_metrics_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    file.write_text("".join(f'{{"step": {n}, "loss": {10000 - n}}}\n' for n in range(10_000)))
    tail = MetricsTail(str(file), Masker())
    assert tail.poll(0.0)
    assert tail.text(True).startswith("step 9999  loss 1 █")


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_the_course_of_a_falling_loss_falls_however_it_was_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int]
) -> None:
    file = tmp_path_factory.mktemp("m") / "metrics"
    tail = MetricsTail(str(file), Masker())
    step = 0
    for batch in batches:
        with file.open("a") as writer:
            for _ in range(batch):
                step += 1
                writer.write(f'{{"step": {step}, "loss": {5000 - step}}}\n')
        tail.poll(float(step))
    course = tail.text(True).split()[-1] if step > 1 else "█"
    assert course[0] == "█" and len(course) <= 16
    assert all(a >= b for a, b in pairwise(course))


def test_what_is_not_a_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        assert not MaskedTail(str(path), Masker()).poll()
        assert not MetricsTail(str(path), Masker()).poll(0.0)


# --- a real terminal -------------------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from runner.execution.terms import Overview
from runner.interface.console import for_stream
from runner.storage.records.runs import Event
live = for_stream(sys.stdout, sys.stderr, json=False, quiet=0, verbose=0, commands=False)
live.begin(Overview("r", "x@1", 3, 1, ("a", "b"), {}, 2, "/nowhere"))
live.events([Event("r", 1, 1.0, "step", "a", "QUEUED", "RUNNING", "", {"log": "none"})])
try:
    while True:
        live.tick()
        time.sleep(0.02)
except KeyboardInterrupt:
    sys.exit(130)  # as the command does: no traceback
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (10, 50))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_display_that_dies_leaves_the_terminal_sane(
    terminal: tuple[int, int], end: signal.Signals
) -> None:
    ours, theirs = terminal
    screen = pyte.Screen(50, 10)
    before = frozenset(screen.mode)
    stream = pyte.ByteStream(screen)
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment,
    )
    try:
        while "a    " not in screen.display[1]:
            assert select.select([ours], [], [], 60)[0], "nothing was drawn"
            stream.feed(os.read(ours, 65536))
    finally:
        process.send_signal(end)
        process.wait(60)
    while select.select([ours], [], [], 0)[0]:
        stream.feed(os.read(ours, 65536))
    assert frozenset(screen.mode) == before and not screen.cursor.hidden
    assert screen.display[0].startswith("[=")
    assert screen.cursor.y >= 2  # what the shell prints next does not go over the display


def test_percent_and_end_come_of_the_inputs_where_the_metrics_do_not_tell_them(
    stage: Stage,
) -> None:
    stage.begin(steps={"train": 200.0}.get)
    stage.start("train", b"", {"step": 0, "loss": 4.0})
    stage.pass_time()
    stage.metrics("train", {"step": 50, "loss": 3.0})
    stage.pass_time(10.0)
    assert stage.seen()[1] == "  train     10s  step 50/200 25%  loss 3 █▁  ETA 30s"


def test_percent_and_end_come_of_an_earlier_run_where_nothing_else_tells_them(stage: Stage) -> None:
    stage.begin(to_run=("train",), total=1, fresh=0, expected={"train": 40.0})
    stage.start("train", b"working\n")
    stage.pass_time(10.0)
    bar, row = stage.seen()
    assert row == "  train     10s  ~25%  ETA 30s  working"
    assert bar.startswith("[=======---") and bar.endswith("0/1  1 running  10s  25%  ETA 30s"), (
        "a single step fills the bar"
    )
