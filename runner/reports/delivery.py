"""A thread that delivers the outbox of one workspace, beside whatever its process does.  At least once, in order for each run and receiver."""

from __future__ import annotations

import queue
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Final, NamedTuple

from ..errors import NotFound, RecipeError
from ..failures import DeliveryFailure, of_answer
from ..logs import Log
from ..storage.crash import crashpoint
from ..storage.records.outbox import HOLD, Outbox, Waiting
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from .receivers import Receivers, Try
from .rules import Watch
from .sending import PATIENCE, Answer

BACKOFF: Final = (5.0, 30.0, 300.0, 1800.0, 7200.0, 28800.0, 86400.0)
"""Seconds before the second try, and each one after it."""
JITTER: Final = 0.2
GIVE_UP: Final = sum(BACKOFF)
"""Seconds after which a receiver that always asks for later is given up."""
LOOK: Final = 1.0
FAR_LOOK: Final = 3.0
"""Seconds between two looks where the runs are in a database that many share."""
SOON: Final = 0.05
"""Seconds between two looks while letters are due."""
AT_ONCE: Final = 8
"""Receivers that are served at the same time."""

_log = Log("reports")


class Verdict(NamedTuple):
    """What becomes of a letter after a try: `wait` is None where it is not tried again."""

    delivered: bool = False
    wait: float | None = None
    counts: bool = True
    stops: bool = False
    """All that waits for the receiver is given up."""
    reason: str = ""
    failure: str = ""
    """The kind of what `reason` says."""


def judge_answer(answer: Answer, letter: Waiting, now: float, chance: float) -> Verdict:
    """What an answer means.  `chance` is between 0 and 1."""
    if 200 <= answer.status < 300:
        return Verdict(delivered=True)
    reason = f"HTTP {answer.status} {answer.words}".strip() if answer.status else answer.words
    failure = of_answer(answer.status)
    if failure == DeliveryFailure.GONE:
        return Verdict(stops=True, reason=reason, failure=failure)
    if (
        answer.status in (429, 503)
        and answer.retry_after is not None
        and now - letter.created < GIVE_UP
    ):
        wait = min(answer.retry_after, BACKOFF[-1])
        return Verdict(wait=wait, counts=False, reason=reason, failure=failure)
    if letter.tries >= len(BACKOFF):
        return Verdict(reason=reason, failure=failure)
    wait = BACKOFF[letter.tries] * (1 - JITTER / 2 + JITTER * chance)
    return Verdict(wait=wait, reason=reason, failure=failure)


class _FinishedTry(NamedTuple):
    letter: Waiting
    answer: Answer | None  # None: there was no time left for it


class Delivery(Thread):
    """Delivers until `end` is called.  It has a connection of its own to the store of the workspace at `root`."""

    def __init__(
        self,
        root: Path,
        environ: Mapping[str, str],
        backoff: Callable[[Answer, Waiting, float, float], Verdict] = judge_answer,
    ) -> None:
        super().__init__(name="delivery", daemon=True)
        self._root, self._environ, self._verdict = root, environ, backoff
        self._over = Event()
        self._drain_until = 0.0
        self._tried: queue.SimpleQueue[_FinishedTry | str | None] = queue.SimpleQueue()
        self._busy: set[str] = set()

    def end(self, seconds: float = 0.0) -> None:
        """Stop, when nothing is due any more, or after so many seconds."""
        self._drain_until = time.monotonic() + seconds
        self._over.set()
        self._tried.put(None)
        self.join(seconds + 1.0)

    def run(self) -> None:
        while True:
            try:
                with Workspace.open(self._root, environ=self._environ) as ws:
                    self._deliver(ws)
                return
            except RecipeError as error:
                _log.info("deliveries are waiting: %s", error)
                if self._over.wait(FAR_LOOK):
                    return

    def _deliver(self, ws: Workspace) -> None:
        """Send what is due and store what comes of it, until nothing is left to do at the end."""
        receivers, outbox = Receivers(ws), ws.store.runs.outbox
        watch = Watch(ws) if ws.letters is not None else None
        look = FAR_LOOK if ws.store.runs.shared else LOOK
        self._busy.clear()
        while True:
            if watch is not None and not self._over.is_set():
                watch.look()
            due = outbox.due(receivers.known, self._busy)
            is_due = due is not None and due <= 0
            if is_due and len(self._busy) < AT_ONCE:
                self._send(ws, receivers, outbox)
            if self._over.is_set():
                is_late = time.monotonic() > self._drain_until
                if is_late or not (is_due or self._busy):
                    return
            if is_due or self._over.is_set():
                wait = SOON
            else:
                wait = look if due is None else min(look, due)
            self._settle(outbox, wait)

    def _send(self, ws: Workspace, receivers: Receivers, outbox: Outbox) -> None:
        """Send what is due to the receivers that are free."""
        by_receiver: dict[str, list[tuple[Waiting, Try]]] = defaultdict(list)
        rows: dict[str, RunRow | None] = {}
        for letter in outbox.take(receivers.known, self._busy):
            if letter.run not in rows:
                rows[letter.run] = _run_row(ws, letter.run)
            by_receiver[letter.receiver].append(
                (letter, receivers.to_send(letter, rows[letter.run]))
            )
        for receiver, letters in by_receiver.items():
            self._busy.add(receiver)
            Thread(
                target=self._try, args=(receiver, letters), name="delivery", daemon=True
            ).start()  # a process does not wait for it at its end

    def _try(self, receiver: str, letters: Sequence[tuple[Waiting, Try]]) -> None:
        """In a thread of its own: one receiver, one letter after another."""
        deadline = time.monotonic() + HOLD - 2 * PATIENCE
        for letter, attempt in letters:
            answer: Answer | None = None
            if time.monotonic() < deadline:
                try:
                    answer = attempt()
                except Exception as error:  # what a library of others raises is this receiver's trouble alone; its words may have a secret
                    answer = Answer(0, f"sending failed: {type(error).__name__}")
            self._tried.put(_FinishedTry(letter, answer))
        self._tried.put(receiver)

    def _settle(self, outbox: Outbox, wait: float) -> None:
        """Store what came of the tries that are over; wait for one at most so long."""
        try:
            done = self._tried.get(timeout=wait)
            while True:
                if isinstance(done, str):
                    self._busy.discard(done)
                elif done is not None:
                    self._store(outbox, done)
                done = self._tried.get_nowait()
        except queue.Empty:
            return

    def _store(self, outbox: Outbox, tried: _FinishedTry) -> None:
        letter, answer = tried
        if answer is None:
            outbox.put_off(letter, 0.0, letter.reason, letter.failure, counts=False)
            return
        found = self._verdict(answer, letter, time.time(), random.random())  # noqa: S311
        if found.delivered:
            crashpoint("letter-sent")
            outbox.mark_delivered(letter)
            return
        _log.info("%s %s: %s", letter.type, letter.receiver, found.reason)
        if found.wait is not None:
            outbox.put_off(letter, found.wait, found.reason, found.failure, counts=found.counts)
            return
        outbox.give_up(letter, found.reason, found.failure)
        if found.stops:
            outbox.stop(letter.receiver, found.reason, found.failure)


def deliver(root: Path, environ: Mapping[str, str]) -> None:
    """Send what is due, until nothing is."""
    delivery = Delivery(root, environ)
    delivery.start()
    delivery.end(HOLD)


def _run_row(ws: Workspace, run: str) -> RunRow | None:
    try:
        return ws.store.runs.get(run)
    except NotFound:
        return None
