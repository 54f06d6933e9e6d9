"""`--notify` shows the end of a run on the desktop, and says so where there is none; the run is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.interface import desktop
from tests.support import Space


def test_the_end_of_a_run_is_shown_on_the_desktop(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "shown"
    program = tmp_path / "bin" / "notify-send"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >> {shown}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    space.recipe("steps: {s: {run: 'true'}}")
    assert space.command("run", "--notify")[0] == 0
    assert "./recipe.yaml: COMPLETED|1 done in" in shown.read_text()


def test_without_a_desktop_the_run_is_the_same_and_it_is_said(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not desktop.notify("a", "b")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(desktop, "_command", lambda title, text: ("no-such-program",))
    space.recipe("steps: {s: {run: 'true'}}")
    code, _, err = space.command("run", "--notify")
    assert code == 0 and "notify-send (package libnotify) is not installed" in err


def test_on_a_mac_the_words_are_no_part_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    command = desktop._command('a" & do shell script "x', "b")
    assert command[0] == "osascript" and command[-2:] == ('a" & do shell script "x', "b")
    assert all("shell" not in each for each in command[:-2])
