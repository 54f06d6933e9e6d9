"""What the console says of a run: which moves have a line, what it counts, and what it lets through to a terminal."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TextIO, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.execution.steps.failing import FailureDetails
from runner.execution.terms import Overview, Summary
from runner.interface import console
from runner.interface.tail import SafeTerminal, fit, lines, safe_line, span, sparkline, width
from runner.storage.records.runs import Event
from tests.support import calls


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def overview(
    total: int = 3, fresh: int = 1, to_run: tuple[str, ...] = ("tokens", "train"), **more: Any
) -> Overview:
    return Overview(
        "r1", "sft@1", total, fresh, to_run, more.pop("expected", {}), 2, "/nowhere", **more
    )


def move(id: str, before: str, after: str, reason: str = "", **data: object) -> Event:
    return Event("r1", 1, 1.0, "step", id, before, after, reason, data)  # type: ignore[arg-type]


def summary(
    state: str = "COMPLETED", counts: Mapping[str, int] | None = None, **more: Any
) -> Summary:
    return Summary(state, {"DONE": 2, "FRESH": 1} if counts is None else counts, 4.3, **more)


@pytest.fixture
def err() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def told(
    *events: Event, verbose: int = 0, commands: bool = False, before: Overview | None = None
) -> list[str]:
    """The plain lines for some moves."""
    err = io.StringIO()
    plain = console.Plain(err, io.StringIO(), verbose=verbose, commands=commands)
    plain.begin(before or overview())
    plain.events(events)
    return err.getvalue().splitlines()


# --- plain lines -----------------------------------------------------------------------------------------------------------------------------------


def test_each_step_has_a_line_as_it_ends_counted_among_all_steps() -> None:
    assert told(
        move("tokens", "RUNNING", "DONE", seconds=4.2),
        move("train", "RUNNING", "DONE", seconds=725.0),
    ) == [
        "[2/3] tokens  4.2s",
        "[3/3] train  12m05s",
    ]


def test_steps_that_a_matrix_becomes_are_counted_when_they_are_known() -> None:
    grown = move("r1", "ACTIVE", "ACTIVE", "expanded", globs={}, steps=5)._replace(subject="run")
    lines = told(
        move("make", "RUNNING", "DONE", seconds=1.0),
        grown,
        move("each[f=1]", "RUNNING", "DONE", seconds=1.0),
        before=overview(1, 0),
    )
    assert lines == ["[1/1] make  1.0s", "[2/6] each[f=1]  1.0s"]


def test_a_retry_says_which_one_and_why() -> None:
    again = move("train", "RUNNING", "QUEUED", "exit", detail="exit 1", retries=3)
    assert told(again, again) == ["train: retry 1 of 3 (exit 1)", "train: retry 2 of 3 (exit 1)"]
    assert told(move("train", "RUNNING", "QUEUED", "lost")) == ["train: retry 1 (lost)"]


def test_a_step_whose_bytes_are_gone_is_counted_back() -> None:
    assert told(
        move("tokens", "RUNNING", "DONE", seconds=1.0),
        move("tokens", "DONE", "QUEUED", "its output is no longer stored"),
        move("tokens", "RUNNING", "DONE", seconds=1.0),
    ) == [
        "[2/3] tokens  1.0s",
        "tokens: runs again (its output is no longer stored)",
        "[2/3] tokens  1.0s",
    ]


def test_what_was_found_fresh_or_never_ran_is_silent_unless_asked_for() -> None:
    moves = [
        move("a", "READY", "FRESH"),
        move("b", "WAITING", "BLOCKED", "needs a"),
        move("c", "QUEUED", "CANCELLED", "interrupted"),
    ]
    assert told(*moves) == []
    assert told(*moves, verbose=1) == [
        "[2/3] a  fresh",
        "[3/3] b  blocked (needs a)",
        "[4/4] c  cancelled (interrupted)",
    ]


def test_what_was_restored_skipped_or_stopped_has_a_line() -> None:
    moves = [
        move("a", "READY", "FRESH", restored=True),
        move("b", "READY", "SKIPPED", "when is false"),
        move("c", "RUNNING", "CANCELLED"),
    ]
    assert told(*moves, before=overview(4)) == [
        "[2/4] a  restored",
        "[3/4] b  skipped (when is false)",
        "[4/4] c  cancelled",
    ]


def test_a_note_on_a_start_is_said_and_a_command_when_asked_for() -> None:
    start = move("train", "QUEUED", "RUNNING", note="continues from step 1000")
    assert told(start) == ["train: continues from step 1000"]
    before = overview(command={"train": "python 'a b.py'\necho done"}.__getitem__)
    assert told(start, commands=True, before=before)[1:] == [
        "train: $ python 'a b.py'",
        "train: $ echo done",
    ]
    assert told(start, verbose=1)[1:] == ["train: started"]
    assert told(move("train", "QUEUED", "RUNNING", site="ssh me@gpu1"), verbose=1) == [
        "train: started on ssh me@gpu1"
    ]


def test_why_a_step_runs_is_said_when_asked_for() -> None:
    assert told(move("train", "READY", "QUEUED", "code changed: train.py"), verbose=1) == [
        "train: runs because code changed: train.py"
    ]


def test_a_failure_ends_with_the_last_lines_of_its_log(err: io.StringIO, out: io.StringIO) -> None:
    plain = console.Plain(err, out)
    plain.begin(overview())
    log = b"".join(b"line %d\n" % n for n in range(50))
    failure = FailureDetails(
        "train", "exit 1", log, "runs/r1/train.1", "add it to `deps`", left="attempts/failed-1"
    )
    plain.end(summary("FAILED", {"DONE": 1, "FRESH": 1, "FAILED": 1}, failed=[failure]))
    said = err.getvalue().splitlines()
    assert said[0] == "train: failed: exit 1"
    assert said[1:21] == [f"  train | line {n}" for n in range(30, 50)]
    assert said[21:] == [
        "  log: runs/r1/train.1",
        "  kept for debugging: attempts/failed-1",
        "  fix: add it to `deps`",
        "3 steps: 1 ran, 1 fresh, 1 failed in 4.3s",
    ]


def test_of_many_failures_the_first_are_shown_whole(err: io.StringIO, out: io.StringIO) -> None:
    plain = console.Plain(err, out)
    plain.begin(overview())
    plain.end(
        summary(
            "FAILED",
            {"FAILED": 300},
            failed=[FailureDetails(f"s{n}", "exit 1", b"no", "", "") for n in range(300)],
        )
    )
    said = err.getvalue().splitlines()
    assert len(said) == 22
    assert said[20].startswith("290 more failed: s10, s11, ")


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (summary(), "3 steps: 2 ran, 1 fresh, 0 failed in 4.3s"),
        (summary(counts={"FRESH": 12}), "everything is fresh (12 steps)"),
        (summary(counts={"FRESH": 1}), "everything is fresh (1 step)"),
        (summary(counts={}), "nothing to run: every step is skipped"),
        (summary(counts={"FRESH": 11, "SKIPPED": 1}), "everything is fresh (12 steps, 1 skipped)"),
        (
            summary("CANCELLED", {"DONE": 1, "CANCELLED": 2}),
            "cancelled: 3 steps: 1 ran, 0 fresh, 0 failed, 2 cancelled in 4.3s",
        ),
        (
            summary("CANCELLED", {"CANCELLED": 2}, interrupted=True),
            "interrupted: 2 steps: 0 ran, 0 fresh, 0 failed, 2 cancelled in 4.3s",
        ),
        (
            summary("FAILED", {"FAILED": 1, "BLOCKED": 2}),
            "3 steps: 0 ran, 0 fresh, 1 failed, 2 blocked in 4.3s",
        ),
    ],
)
def test_the_last_line_counts_every_step(
    err: io.StringIO, out: io.StringIO, end: Summary, line: str
) -> None:
    plain = console.Plain(err, out)
    plain.begin(overview())
    plain.end(end)
    assert err.getvalue() == line + "\n"


def test_results_go_to_stdout_and_nothing_else_does(err: io.StringIO, out: io.StringIO) -> None:
    plain = console.Plain(err, out)
    plain.begin(overview())
    plain.events([move("train", "RUNNING", "DONE", seconds=1.0)])
    plain.end(summary(results=[("lora", "out/a.safetensors"), ("plot", "out/loss.png")]))
    assert out.getvalue() == "lora  out/a.safetensors\nplot  out/loss.png\n"


def test_quiet_says_only_what_failed(err: io.StringIO, out: io.StringIO) -> None:
    plain = console.Plain(err, out, quiet=1)
    plain.begin(overview())
    plain.events(
        [move("tokens", "RUNNING", "DONE", seconds=1.0), move("train", "RUNNING", "FAILED", "exit")]
    )
    plain.end(
        summary(
            "FAILED",
            {"FAILED": 1},
            failed=[FailureDetails("train", "exit 1", b"no\n", "", "")],
            results=[("a", "b")],
        )
    )
    assert err.getvalue().splitlines() == ["train: failed: exit 1", "  train | no"]
    assert out.getvalue() == ""


def test_many_quick_steps_share_about_twenty_lines_a_second_but_a_failure_is_never_dropped(
    err: io.StringIO, out: io.StringIO
) -> None:
    clock = Clock()
    plain = console.Plain(err, out, clock=clock)
    plain.begin(overview(5001, 0, tuple(map(str, range(5000)))))
    for n in range(50):
        clock.now += 0.1
        plain.events([move(str(n * 100 + k), "RUNNING", "DONE", seconds=0.0) for k in range(100)])
    plain.events([move("last", "RUNNING", "FAILED", "exit")])
    said = err.getvalue().splitlines()
    assert 100 <= len(said) <= 122
    assert said[-1] == "[5001/5001] last  failed: exit"


@pytest.mark.slow
def test_a_step_costs_a_few_calls_of_functions(err: io.StringIO, out: io.StringIO) -> None:
    plain = console.Plain(err, out)
    ids = [f"step-{n}" for n in range(5000)]
    plain.begin(overview(5000, 0, tuple(ids)))
    path = ("WAITING", "READY", "QUEUED", "RUNNING", "DONE")
    moves = [
        move(id, a, b, log="x.log") if b == "RUNNING" else move(id, a, b)
        for id in ids
        for a, b in pairwise(path)
    ]

    assert calls(
        lambda: [plain.events(moves[n : n + 256]) for n in range(0, len(moves), 256)]
    ) < 30 * len(ids)


def test_a_reader_that_went_away_does_not_stop_the_run(out: io.StringIO) -> None:
    class Gone(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise BrokenPipeError

    gone = Gone()
    for listener in (console.Plain(gone, gone), console.JsonLines(gone), console.Live(gone, gone)):
        gone.tries = 0
        listener.begin(overview())
        listener.say("hello")
        listener.events([move("train", "RUNNING", "DONE", seconds=1.0)])
        listener.end(summary(results=[("a", "b")]))
        assert 1 <= gone.tries <= 2  # once for each stream


def test_a_stream_that_cannot_spell_a_character_still_gets_the_line() -> None:
    raw = io.BytesIO()
    plain = console.Plain(io.TextIOWrapper(raw, encoding="ascii"), io.StringIO())
    plain.begin(overview())
    plain.events([move("日本", "RUNNING", "DONE", seconds=1.0)])
    assert raw.getvalue() == rb"[2/3] \u65e5\u672c  1.0s" + b"\n"


# --- JSON ------------------------------------------------------------------------------------------------------------------------------------------


def test_json_has_the_plan_then_every_move_as_it_was_stored_then_a_summary(
    out: io.StringIO,
) -> None:
    listener = console.JsonLines(out)
    listener.begin(overview(expected={"train": 2.0}))
    listener.events(
        [Event("r1", 7, 12.5, "step", "train", "RUNNING", "DONE", "", {"seconds": 1.5})]
    )
    listener.say("finishing")
    listener.end(
        summary(
            "FAILED",
            failed=[FailureDetails("train", "exit 1", b"\xffno\x1b[2J", "l", "h")],
            results=[("a", "b")],
        )
    )
    first, event, note, last = map(json.loads, out.getvalue().splitlines())
    assert first == {
        "subject": "plan",
        "run": "r1",
        "recipe": "sft@1",
        "workspace": "/nowhere",
        "total": 3,
        "fresh": 1,
        "to_run": ["tokens", "train"],
        "expected": {"train": 2.0},
        "jobs": 2,
    }
    assert event == {
        "seq": 7,
        "at": 12.5,
        "subject": "step",
        "id": "train",
        "before": "RUNNING",
        "after": "DONE",
        "reason": "",
        "data": {"seconds": 1.5},
    }
    assert note == {"subject": "note", "text": "finishing"}
    assert last["failed"] == [
        {"id": "train", "reason": "exit 1", "tail": "\ufffdno\x1b[2J", "log": "l", "hint": "h"}
    ]
    assert (
        last["results"] == [{"name": "a", "path": "b"}]
        and last["state"] == "FAILED"
        and last["counts"] == {"DONE": 2, "FRESH": 1}
    )


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.floats() | st.text(max_size=5) | st.lists(st.floats(), max_size=2),
        max_size=3,
    )
)
def test_every_move_is_one_line_of_strict_json_in_ascii(data: dict[str, Any]) -> None:
    out = io.StringIO()
    console.JsonLines(out).events([move("a", "RUNNING", "DONE", **{"data": data})])
    (line,) = out.getvalue().splitlines()
    assert line.isascii() and line.isprintable()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# --- which one -------------------------------------------------------------------------------------------------------------------------------------


def chosen(stdout: io.StringIO, stderr: io.StringIO, json: bool = False, quiet: int = 0) -> type:
    return type(
        console.for_stream(stdout, stderr, json=json, quiet=quiet, verbose=0, commands=False)
    )


def test_the_display_is_live_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert chosen(io.StringIO(), Terminal()) is console.Live
    assert chosen(Terminal(), io.StringIO()) is console.Plain
    assert chosen(Terminal(), Terminal(), json=True) is console.JsonLines
    assert chosen(Terminal(), Terminal(), quiet=1) is console.Plain
    for term in ("dumb", None):
        monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM")
        assert chosen(io.StringIO(), Terminal()) is console.Plain


def test_no_color_leaves_the_colours_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for value, colored in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        err = Terminal()
        listener = console.for_stream(
            io.StringIO(), err, json=False, quiet=0, verbose=0, commands=False
        )
        listener.begin(overview())
        listener.end(summary())
        assert ("\x1b[32m" in err.getvalue()) is colored


# --- text ------------------------------------------------------------------------------------------------------------------------------------------


@given(st.text() | st.text("\x1b[]0;?\r\n\t\x07\x9b\u202e\u200d2Jmh", max_size=30))
def test_what_is_shown_can_do_nothing_to_a_terminal(text: str) -> None:
    assert safe_line(text).isprintable()


@given(
    st.binary()
    | st.lists(
        st.sampled_from(
            [b"\x1b", b"[", b"31m", b"]0;", b"\r", b"\n", b"\x9b", b"\xc2", b"a", b"\x00"]
        )
    ).map(b"".join)
)
def test_any_bytes_of_a_log_are_lines_that_can_do_nothing_to_a_terminal(data: bytes) -> None:
    assert all(line.isprintable() for line in lines(data))


PRINTED = st.text() | st.text(
    "\x1b[]0;?\r\n\t\x07\x9b\u202e\u200d2Jmh\\PX^_\x90\x9c\x9d1", max_size=30
)
COLOURS = re.compile(r"\x1b\[(?:[012]|(?:1;)?3[1-6])m|\n")


@given(st.lists(PRINTED, max_size=6))
@example(["\x1b", "]0;title", "\x07"])
@example(["\x1b[31m red \x1b[0m", "\x1b[8m", "\x1b[2J"])
def test_a_guarded_terminal_gets_text_line_ends_and_our_colours_however_it_is_cut(
    texts: list[str],
) -> None:
    terminal = Terminal()
    for text in texts:
        print(text, end="", file=cast(TextIO, SafeTerminal(terminal)))
    assert COLOURS.sub("", terminal.getvalue()).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "text",
    ["\x9d" * 50_000, "\x1b]" * 50_000, "\x1b[" * 50_000, "\x1b]" + "a" * 50_000, "\x1b " * 50_000],
)
def test_hostile_text_is_shown_at_once(text: str) -> None:
    began = time.process_time()
    safe_line(text)
    assert time.process_time() - began < 1


@given(st.text(st.characters(categories=["L", "N", "P", "S", "M"])))
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert safe_line(text) == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;aGk=\x1b\\b", "ab"),
        ("a\x9d0;title\x9cb", "ab"),
        ("a\x1bP1$q\x1b\\b\x1b_x\x1b\\c\x1b^x\x1b\\d\x1bXx\x1b\\e", "abcde"),
        ("a\x1bPq", "a^[Pq"),
        ("a\x1b]0;no end", "a^[]0;no end"),
        ("\x1b(Btext\x1b[m", "text"),
        ("\x9b2Ja", "a"),
        ("a\tb\x00\x7f", "a    b^@^?"),
        ("user\u202egnp.exe", "usergnp.exe"),
        ("a\u2028b", "a b"),
    ],
)
def test_controls_are_neutralised(text: str, seen: str) -> None:
    assert safe_line(text) == seen


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert lines(b" 0%|\r 50%|#\r100%|##\r\nnext\r\n") == ["100%|##", "next"]


@given(st.text(st.characters(categories=["L", "N", "P", "M", "S"])), st.integers(0, 40))
def test_cut_text_never_takes_more_columns_than_there_are(text: str, columns: int) -> None:
    cut = fit(text, columns)
    assert width(cut) <= columns
    assert cut == text or (width(text) > columns and text.startswith(cut.removesuffix("…")))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
@example([0.0, -2.225073858507e-311])
@example([-1.7e308, 1.7e308])
def test_a_sparkline_is_lowest_at_the_lowest_and_highest_at_the_highest(
    points: list[float],
) -> None:
    line = sparkline(points)
    assert len(line) == len(points)
    assert line[points.index(min(points))] == "▁"
    if max(points) - min(points) > 1e-6:
        assert line[points.index(max(points))] == "█"


def test_durations_read_as_people_write_them() -> None:
    assert [span(s) for s in (0, 4.24, 9.96, 59.4, 59.6, 725, 11100, 97200)] == [
        "0.0s",
        "4.2s",
        "10s",
        "59s",
        "1m00s",
        "12m05s",
        "3h05m",
        "1d03h",
    ]
