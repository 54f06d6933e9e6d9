"""Ctrl-C: what it says of the steps that run, and what it leaves whole."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Unreachable
from runner.execution.signals import raise_on_signals
from runner.execution.steps.attempt import GRACE, Attempt
from runner.execution.steps.bell import Bell
from runner.execution.steps.control import Stopper
from tests.virtual import virtual


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [("ssh me@gpu1", "keeps its saved checkpoints on the host"), ("", "starts over next time")],
)
def test_of_a_step_elsewhere_it_is_not_known_which_checkpoint_is_kept(
    elsewhere: str, words: str
) -> None:
    running = Of(id="train", state=None, place=Of(elsewhere=elsewhere))
    none: Any = None
    attempts: Any = {"train": running}
    steps: Any = Of(spec=lambda _id: Of(state=[Of(name="kept", checkpoint="step-*")]))
    said: list[str] = []
    schedule: Any = Of(disturb=lambda: None, drain=lambda: None)
    commits: Any = Of(say=said.append)
    Stopper(none, steps, schedule, commits, attempts, (), Bell(), None).interrupt()  # type: ignore[arg-type]
    assert said[0].endswith(f"press Ctrl-C again to stop now (train {words})")


def test_an_interrupt_waits_for_the_end_of_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), raise_on_signals(said.append):
        import interrupted  # type: ignore[import-not-found]

        assert said == []
        while True:
            signal.pause()
    assert said == ["interrupted before any step started"] and "interrupted" in sys.modules
    del sys.modules["interrupted"], interrupted


def test_an_interrupt_waits_for_an_event_loop_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python printed a traceback of the half that was deleted."""
    made: list[asyncio.AbstractEventLoop] = []
    whole = asyncio.SelectorEventLoop.__init__

    def interrupted(loop: asyncio.SelectorEventLoop) -> None:
        signal.raise_signal(signal.SIGINT)
        whole(loop)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt), raise_on_signals(lambda _words: None):
        made.append(asyncio.new_event_loop())
        while True:
            signal.pause()
    made[0].close()


def test_a_program_that_runs_a_recipe_while_it_is_imported_is_interrupted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "import signal",
        "from runner.execution.signals import raise_on_signals",
        "with raise_on_signals(print):",
        "    signal.raise_signal(signal.SIGINT)",
    ]
    (tmp_path / "running.py").write_text("\n".join([*words, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        import running  # type: ignore[import-not-found]  # noqa: F401


def test_an_interrupt_that_strikes_an_exec_is_an_exit_code(tmp_path: Path) -> None:
    lines = [
        "import sys",
        "from runner.interface.cli import main, verbs",
        "verbs.run = lambda words: exec('raise KeyboardInterrupt')",
    ]
    (tmp_path / "struck.py").write_text("\n".join([*lines, "sys.exit(main.main([]))", ""]))
    path = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    assert (
        subprocess.run(
            [sys.executable, "-m", "struck"], env=path, stdin=subprocess.DEVNULL, check=False
        ).returncode
        == 130
    )


@pytest.mark.parametrize("rented", [True, False])
@pytest.mark.parametrize("answers", ["unreachable", "silent"])
def test_a_run_that_is_ended_waits_for_no_rented_machine_that_cannot_be_reached(
    rented: bool, answers: str
) -> None:
    """It is given back, and what runs there ends with it.  On a host of one's own the job is waited for as before."""

    async def asked(*_: object) -> None:
        pass

    async def waited(*_: object) -> None:
        if answers == "unreachable":
            raise Unreachable("no route to host")
        await asyncio.sleep(3600)

    async def ended() -> None:
        carried = asyncio.ensure_future(asyncio.sleep(36000))
        place = Of(
            is_rented=rented, lost="", stop=asked, wait=waited, paths=lambda _attempt: Of(cwd="/")
        )
        task = Of(job=object(), states=())
        none: Any = None
        attempt = Attempt(0, none, none, None, {}, place)  # type: ignore[arg-type]
        attempt.directory, attempt.task, attempt.execution = none, task, carried  # type: ignore[assignment]
        began = asyncio.get_running_loop().time()
        await attempt.stop()
        took = asyncio.get_running_loop().time() - began
        assert took == pytest.approx(2 * GRACE.total_seconds() if rented else 0, abs=1)
        await asyncio.wait({carried}, timeout=0.01)
        assert carried.cancelled() is rented and bool(place.lost) is rented
        carried.cancel()

    with virtual() as loop:
        loop.run_until_complete(ended())
