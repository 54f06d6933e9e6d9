"""Delivery thread for a workspace's outbox. At least once, in order for each run and receiver."""

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
from ..storage.records.outbox import HOLD, Outbox, PendingDelivery
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from .receivers import Receivers, Try
from .rules import Watch
from .sending import PATIENCE, ReceiverResponse

BACKOFF: Final = (5.0, 30.0, 300.0, 1800.0, 7200.0, 28800.0, 86400.0)
"""Seconds before the second and each further attempt."""
JITTER: Final = 0.2
GIVE_UP: Final = sum(BACKOFF)
"""Seconds after which a receiver that always asks to retry later is abandoned."""
LOOK: Final = 1.0
FAR_LOOK: Final = 3.0
"""Seconds between polls of a shared run database."""
SOON: Final = 0.05
"""Seconds between polls while deliveries are due."""
AT_ONCE: Final = 8
"""Maximum receivers served concurrently."""

_log = Log("reports")


class DeliveryOutcome(NamedTuple):
    """Outcome of an attempt: `wait` is None if the delivery is not retried."""

    delivered: bool = False
    wait: float | None = None
    counts: bool = True
    stops: bool = False
    """All deliveries to the receiver are abandoned."""
    reason: str = ""
    failure: str = ""
    """Kind of failure for `reason`."""


def judge_answer(
    answer: ReceiverResponse, letter: PendingDelivery, now: float, chance: float
) -> DeliveryOutcome:
    """Return the outcome of a response. `chance` is a random number from 0 to 1."""
    if 200 <= answer.status < 300:
        return DeliveryOutcome(delivered=True)
    reason = f"HTTP {answer.status} {answer.words}".strip() if answer.status else answer.words
    failure = of_answer(answer.status)
    if failure == DeliveryFailure.GONE:
        return DeliveryOutcome(stops=True, reason=reason, failure=failure)
    retry_after = answer.retry_after if answer.status in (429, 503) else None
    if retry_after is not None and now - letter.created < GIVE_UP:
        wait = min(retry_after, BACKOFF[-1])
        return DeliveryOutcome(wait=wait, counts=False, reason=reason, failure=failure)
    if letter.tries >= len(BACKOFF):
        return DeliveryOutcome(reason=reason, failure=failure)
    wait = BACKOFF[letter.tries] * (1 - JITTER / 2 + JITTER * chance)
    return DeliveryOutcome(wait=wait, reason=reason, failure=failure)


class _FinishedTry(NamedTuple):
    letter: PendingDelivery
    answer: ReceiverResponse | None  # None if the time ran out


class Delivery(Thread):
    """Delivers until `end` is called, with its own connection to the store of the workspace at
    `root`.
    """

    def __init__(
        self,
        root: Path,
        environ: Mapping[str, str],
        backoff: Callable[
            [ReceiverResponse, PendingDelivery, float, float], DeliveryOutcome
        ] = judge_answer,
    ) -> None:
        super().__init__(name="delivery", daemon=True)
        self._root, self._environ, self._verdict = root, environ, backoff
        self._over = Event()
        self._drain_until = 0.0
        self._tried: queue.SimpleQueue[_FinishedTry | str | None] = queue.SimpleQueue()
        self._busy: set[str] = set()

    def end(self, seconds: float = 0.0) -> None:
        """Stop when nothing is due, or after `seconds`."""
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
        """Send due deliveries and store the outcomes, until stopped and finished."""
        receivers, outbox = Receivers(ws), ws.store.runs.outbox
        watch = Watch(ws) if ws.letters is not None else None
        poll = FAR_LOOK if ws.store.runs.shared else LOOK
        self._busy.clear()
        while True:
            if watch is not None and not self._over.is_set():
                watch.look()
            seconds = outbox.due(receivers.known, self._busy)
            is_due = seconds is not None and seconds <= 0
            if is_due and len(self._busy) < AT_ONCE:
                self._send(ws, receivers, outbox)
            if self._is_finished(is_due):
                return
            self._settle(outbox, self._wait_time(seconds, poll))

    def _wait_time(self, seconds: float | None, poll: float) -> float:
        """Return how long to wait for finished attempts, in seconds.

        `seconds` remain until the next delivery (None: there is none), and `poll` until the next
        look at the outbox.
        """
        if self._over.is_set():
            return SOON
        if seconds is None:
            return poll
        if seconds <= 0:
            return SOON
        return min(poll, seconds)

    def _is_finished(self, is_due: bool) -> bool:
        """Return True once the thread was stopped and has sent everything, or has no time left."""
        if not self._over.is_set():
            return False
        is_late = time.monotonic() > self._drain_until
        has_work = is_due or bool(self._busy)
        return is_late or not has_work

    def _send(self, ws: Workspace, receivers: Receivers, outbox: Outbox) -> None:
        """Send due deliveries to free receivers."""
        by_receiver: dict[str, list[tuple[PendingDelivery, Try]]] = defaultdict(list)
        rows: dict[str, RunRow | None] = {}
        for letter in outbox.take(receivers.known, self._busy):
            if letter.run not in rows:
                rows[letter.run] = _run_row(ws, letter.run)
            attempt = receivers.to_send(letter, rows[letter.run])
            by_receiver[letter.receiver].append((letter, attempt))
        for receiver, letters in by_receiver.items():
            self._busy.add(receiver)
            # A daemon thread: the process does not wait for it at exit.
            args = (receiver, letters)
            Thread(target=self._try, args=args, name="delivery", daemon=True).start()

    def _try(self, receiver: str, letters: Sequence[tuple[PendingDelivery, Try]]) -> None:
        """Send the deliveries of one receiver in order, in a separate thread."""
        deadline = time.monotonic() + HOLD - 2 * PATIENCE
        for letter, attempt in letters:
            answer: ReceiverResponse | None = None
            if time.monotonic() < deadline:
                try:
                    answer = attempt()
                # errors of third-party libraries affect only this receiver; their text may contain
                # a secret
                except Exception as error:
                    answer = ReceiverResponse(0, f"sending failed: {type(error).__name__}")
            self._tried.put(_FinishedTry(letter, answer))
        self._tried.put(receiver)

    def _settle(self, outbox: Outbox, wait: float) -> None:
        """Store finished attempts, waiting at most `wait` seconds for the first."""
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
    """Send all due deliveries, and return."""
    delivery = Delivery(root, environ)
    delivery.start()
    delivery.end(HOLD)


def _run_row(ws: Workspace, run: str) -> RunRow | None:
    try:
        return ws.store.runs.get(run)
    except NotFound:
        return None
