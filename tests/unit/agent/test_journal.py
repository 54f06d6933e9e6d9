"""Journal lines of the agent are JSON whatever their texts are, and a torn one loses only itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.agent import journal as module
from runner.agent.journal import end_line, escape, open_journal, start_line


def opened(remembered: int = 100) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Open the journal of the working directory, and return its ends and unfinished starts."""
    over: dict[bytes, bytes] = {}
    handle, unfinished = open_journal(over, remembered)
    os.close(handle)
    return over, unfinished


@given(st.text())
def test_any_text_is_a_json_string(text: str) -> None:
    encoded = text.encode("utf-8", "replace")
    assert json.loads(b'"' + escape(encoded) + b'"') == encoded.decode("utf-8", "replace")


@given(st.binary())
def test_any_path_is_read_back_from_its_start(path: bytes) -> None:
    line = start_line(1.0, b"job", 3, path, b"60", b"")
    assert os.fsencode(json.loads(line)["log"]) == path


def test_an_end_has_all_that_is_known_of_a_job() -> None:
    line = end_line(b"job", 3, None, b"exit", 1.5, 2.5, 0.25, 4096, 2, b'say "why"\n', 7)
    assert json.loads(line) == {
        "job": "job", "code": 3, "signal": None, "reason": "exit", "started": 1.5, "ended": 2.5,
        "cpu": 0.25, "peak_memory": 4096, "strays": 2, "detail": 'say "why"\n', "printed": 7,
    }  # fmt: skip
    assert json.loads(end_line(b"job", None, 9, b"signal")).keys() >= {"code", "signal"}
    assert "detail" not in json.loads(end_line(b"job", 0, None, b"exit"))
    assert "printed" not in json.loads(end_line(b"job", 0, None, b"exit"))
    assert json.loads(end_line(b"job", 0, None, b"exit", printed=0))["printed"] == 0


def test_only_a_job_that_outlives_its_agent_has_what_the_next_agent_needs() -> None:
    short = json.loads(start_line(1.0, b"job", -1, b"/log", b"60", b"5"))
    long = json.loads(start_line(1.0, b"job", 0, b"/log", b"60", b"5"))
    assert short == {"job": "job", "began": 1.0}
    assert long == short | {"slot": 0, "log": "/log", "timeout": "60", "idle": "5"}


def test_a_start_without_an_end_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert opened() == ({}, {})
    starts = [start_line(1.0, name, -1, b"", b"", b"") for name in (b"a", b"b")]
    end = end_line(b"a", 0, None, b"exit")
    Path("journal").write_bytes(b"".join([*starts, end]))
    assert opened() == ({b"a": end}, {b"b": starts[1].rstrip()})
    again = start_line(2.0, b"a", -1, b"", b"", b"")
    Path("journal").write_bytes(b"".join([*starts, end, again]))
    assert opened()[1].keys() == {b"a", b"b"}


def test_damaged_lines_are_left_out_and_the_next_line_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    end = end_line(b"a", 0, None, b"exit")
    Path("journal").write_bytes(b"noise\n" + end + b'{"job": "torn", "co')
    assert opened()[0] == {b"a": end}
    with open("journal", "ab") as file:
        file.write(end_line(b"b", 0, None, b"exit"))
    assert list(opened()[0]) == [b"a", b"b"]
    assert opened(1)[0].keys() == {b"b"}  # the latest are remembered


def test_a_large_journal_keeps_only_the_latest_ends_and_unfinished_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ends = [end_line(b"%d" % number, 0, None, b"exit") for number in range(4)]
    start = start_line(1.0, b"b", -1, b"", b"", b"")
    lines = b"".join([start, *ends])
    Path("journal").write_bytes(lines)
    monkeypatch.setattr(module, "LIMIT", len(lines))
    opened(2)
    assert Path("journal").read_bytes() == lines
    monkeypatch.setattr(module, "LIMIT", len(lines) - 1)
    assert opened(2) == ({b"2": ends[2], b"3": ends[3]}, {b"b": start.rstrip()})
    assert Path("journal").read_bytes() == b"".join([*ends[2:], start])
    assert os.listdir() == ["journal"]
