"""The program of `[hooks] spend`: asked before a run costs anything, and given what it cost.  JSON on its standard input, an exit status back.

It may be asked twice for the same `id`, which is its key: what was reserved, charged or refunded under it already is not done again.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..failures import DeliveryFailure
from ..storage.crash import crashpoint
from ..storage.workspace import Workspace
from .sending import Answer

PATIENCE: Final = 30.0
"""Seconds that the program may take."""
GIVEN: Final = 200
REFUSED: Final = 402
_WORDS: Final = 300


RESERVE: Final = "points.reserve"
LOOK: Final = 0.05


def refusal(ws: Workspace, run: str) -> str:
    """Ask for what a new run may cost, once, before it works; why nothing was given, or empty.

    A program that cannot be asked gives nothing.
    """
    outbox = ws.store.runs.outbox
    with ws.locks.hold(
        "points"
    ):  # of this machine one asks at a time; what another does, the letter says
        while (letter := outbox.of(run, RESERVE)) is not None:
            if letter.state == "dead":
                return letter.reason
            crashpoint("points-due")
            if ws.store.runs.shared and not outbox.hold(letter):
                time.sleep(LOOK)
                continue
            answer = ask(ws.spend, letter.body, ws.own, ws.environ)
            if answer.status == GIVEN:
                outbox.mark_delivered(letter)
            else:
                outbox.give_up(letter, answer.words, DeliveryFailure.REFUSED)
    return ""


def receiver(argv: Sequence[str]) -> str:
    """The program, as the outbox has it."""
    return f"spend {shlex.join(argv)}"


def ask(argv: Sequence[str], body: str, root: Path, environ: Mapping[str, str]) -> Answer:
    """Ask the program, in the folder `root`.  A status that is not 0 is a refusal, with what it printed."""
    try:
        done = subprocess.run(
            argv, input=body, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=PATIENCE, cwd=root,
            env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(0, f"the command did not finish within {PATIENCE:g} s")
    except OSError as error:
        return Answer(0, f"cannot start {argv[0]}: {error.strerror}")
    words = " ".join(done.stdout.split())[:_WORDS]
    return (
        Answer(GIVEN)
        if done.returncode == 0
        else Answer(REFUSED, words or f"the command exited with {done.returncode}")
    )
