"""Logs of recipe itself: who asked has them, no secret is in them, and a live display stays whole."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import logs
from runner.errors import NotFound
from runner.secrets import Masker, Secret


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins without handlers, and leaves none."""
    monkeypatch.setattr(logs, "_maskers", [])
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before, level
    for name in logs.ROOTS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def test_verbose_shows_info_and_twice_debug(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, lines in (
        (1, "recipe.hosts: one 1\n"),
        (2, "recipe.hosts: one 1\nrecipe.hosts: two\n"),
    ):
        logs.begin(verbose, "")
        logs.Log("hosts").info("one %d", 1)
        logs.Log("hosts").debug("two")
        assert capsys.readouterr().err == lines


def test_a_file_gets_its_level_and_stderr_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.begin(0, f"debug:{tmp_path}/log")
    logging.getLogger("drivers.ssh").debug("asked")
    (line,) = lines(tmp_path / "log")
    assert line.pop("at").endswith("Z") and capsys.readouterr().err == ""
    assert line == {"level": "debug", "logger": "drivers.ssh", "message": "asked"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_of_the_file_is_an_object_also_those_of_other_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.begin(0, f"info:{tmp_path}/log")
    logs.mask(Masker([Secret("token", "hunter2-hunter2")]))
    logs.Log("hosts").info("two\nlines of hunter2-hunter2")
    logs.Log(logs.REMOTE).event("up", run="r1", instanceId="hunter2-hunter2")
    logging.getLogger("urllib3").info("another library")
    logging.getLogger("botocore").debug("its headers")
    try:
        raise ValueError("deep")
    except ValueError:
        logging.getLogger("recipe.loop").exception("failed")
    one, event, other, trace = lines(tmp_path / "log")
    assert one["message"] == "two\nlines of ***"
    assert event.pop("at") and event == {
        "level": "info", "logger": "recipe.training.remote", "event": "training.remote.up", "run": "r1", "instanceId": "***",
    }  # fmt: skip
    assert other["message"] == "another library" and "ValueError: deep" in trace["message"]


def test_a_warning_of_another_library_is_on_stderr_as_it_was_without_a_file(
    tmp_path: Path,
) -> None:
    code = "import logging; from runner import logs; logs.begin(0, 'info:log'); logging.getLogger('x').warning('loud'); logging.getLogger('x').info('soft')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "loud\n"
    assert [line["message"] for line in lines(tmp_path / "log")] == ["loud", "soft"]


def test_no_secret_is_in_a_record_or_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin(2, "")
    logs.mask(Masker([Secret("token", "hunter2-hunter2")]))
    logs.Log("loop").debug("%s", {"token": "hunter2-hunter2"})
    try:
        raise ValueError("hunter2-hunter2")
    except ValueError:
        logging.getLogger("drivers.local").exception("failed")
    err = capsys.readouterr().err
    assert "hunter2" not in err and err.count("***") >= 2 and "ValueError" in err


def test_an_unknown_level_is_a_sentence() -> None:
    with pytest.raises(NotFound, match='RECIPE_LOG: unknown level "loud"') as refused:
        logs.begin(0, "loud")
    assert refused.value.exit_code == 3


def test_lines_go_through_a_live_display_while_there_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: list[str] = []
    logs.begin(1, "")
    with logs.redirect_lines(shown.append):
        logs.Log("loop").info("inside")
    logs.Log("loop").info("outside")
    assert shown == ["recipe.loop: inside"] and capsys.readouterr().err == "recipe.loop: outside\n"
