"""What is asked of a training while it runs, and how it answers.  Standard library alone: this file can be put beside any trainer.

$RECIPE_CONTROL names a file of JSON lines.  A training that listens writes the first, {"listens": ["stop", …]}; each line after that asks:

    {"ask": "checkpoint"}               save when the step that runs is over, and train on
    {"ask": "pause"}, {"ask": "stop"}   save when the step that runs is over, and end

SIGTERM asks for the same as `stop`.  A training that does not listen gets SIGTERM alone.  In a loop:

    ending = Ending()
    for step in range(done + 1, steps + 1):
        ...
        stopping = ending.asked
        if stopping or ending.checkpoint or step % every("CHECKPOINT_INTERVAL_STEPS", 100) == 0:
            save(step)
            ending.saved()
        if stopping:
            ending.end()

With the Trainer of transformers: `Trainer(..., callbacks=[trainer_callback(Ending())])`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

LISTENS = ("stop", "pause", "checkpoint")


def every(variable: str, steps: int) -> int:
    """An interval in steps: what the variable says, where it is set to a whole number above 0, else `steps`."""
    told = os.environ.get(variable, "")
    return int(told) if told.isdecimal() and int(told) > 0 else steps


class Ending:
    """Whether a checkpoint, or the end after one, is asked for: a machine that is taken away costs no finished step, where it lets us finish one."""

    def __init__(self) -> None:
        self._asked = self.checkpoint = False
        """`checkpoint`: one was asked for, and `saved` was not called since."""
        self._file = os.environ.get("RECIPE_CONTROL", "")
        self._read = 0
        if self._file and os.environ.get("RANK", "0") == "0":
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"listens": LISTENS}) + "\n")
        signal.signal(signal.SIGTERM, self._ask)
        if sys.platform == "linux":
            # A launcher that dies takes us along: torch starts us in a session of our own, where a signal to its group does not come.
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    @property
    def asked(self) -> bool:
        """Whether the training is to save and to end.  Looks at the file: also `checkpoint` is what it says from now on."""
        self._look()
        return self._asked

    def saved(self) -> None:
        """The checkpoint that was asked for is there."""
        self.checkpoint = False

    def end(self) -> NoReturn:
        """Die of SIGTERM, as the caller expects: status 0 would say that the training is finished."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("BUG: SIGTERM did not end this process")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _look(self) -> None:
        try:
            if not self._file or os.stat(self._file).st_size == self._read:
                return
            with open(self._file, "rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return  # a file that is gone asks for nothing
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                what = json.loads(line).get("ask")
            except (ValueError, AttributeError):
                continue
            self._asked |= what in ("stop", "pause")
            self.checkpoint |= what == "checkpoint"


def trainer_callback(ending: Ending) -> Any:
    """A TrainerCallback of transformers that heeds what is asked at the end of each step; CHECKPOINT_INTERVAL_STEPS, too."""
    from transformers import TrainerCallback

    class Heeds(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            state.save_steps = every("CHECKPOINT_INTERVAL_STEPS", state.save_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.stopping, checkpoint = _agreed(ending.asked, ending.checkpoint)
            if self.stopping or checkpoint:
                control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ending.saved()
            if self.stopping:
                _agreed(True, True)  # until every process has written its part
                ending.end()

        stopping = False

    return Heeds()


def _agreed(stopping: bool, checkpoint: bool) -> tuple[bool, bool]:
    """The same answer in all processes of the training: what any of them was asked."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return stopping, checkpoint
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, (stopping, checkpoint))
    return any(stop for stop, _ in answers), any(save for _, save in answers)
