"""The program of `[hooks] spend`: reserves the cost of a run and is charged afterwards.

Receives JSON on stdin, and answers by its exit status.

The program may be called twice with the same `id`, an idempotency key: it must not repeat a
completed operation.
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
from .sending import ReceiverResponse

PATIENCE: Final = 30.0
"""Timeout of the program in seconds."""
GIVEN: Final = 200
REFUSED: Final = 402
_WORDS: Final = 300


RESERVE: Final = "points.reserve"
LOOK: Final = 0.05


def refusal(ws: Workspace, run: str) -> str:
    """Reserve the cost of a new run, once, before it starts.

    Returns the reason of a refusal, or an empty text.

    A program that cannot be run refuses.
    """
    outbox = ws.store.runs.outbox
    # One process of this machine at a time. The delivery row guards against other machines.
    with ws.locks.hold("points"):
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
    """Return the program's receiver name in the outbox."""
    return f"spend {shlex.join(argv)}"


def ask(argv: Sequence[str], body: str, root: Path, environ: Mapping[str, str]) -> ReceiverResponse:
    """Call the program in the directory `root`.

    A nonzero exit status is a refusal, with the output as its reason.
    """
    try:
        done = subprocess.run(
            argv, input=body, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=PATIENCE, cwd=root,
            env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ReceiverResponse(0, f"the command did not finish within {PATIENCE:g} s")
    except OSError as error:
        return ReceiverResponse(0, f"cannot start {argv[0]}: {error.strerror}")
    words = " ".join(done.stdout.split())[:_WORDS]
    if done.returncode == 0:
        return ReceiverResponse(GIVEN)
    return ReceiverResponse(REFUSED, words or f"the command exited with {done.returncode}")
