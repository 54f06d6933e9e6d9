"""Signal handlers for Ctrl-C and SIGTERM, before and during a run."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, TypeVar

T = TypeVar("T")
IMPORTS: Final = 0.01
"""Interval between checks for the end of an import, in seconds."""


@contextlib.contextmanager
def handle_signals(interrupt: Callable[[], None], terminate: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` on SIGINT and `terminate` on SIGTERM during the block.

    Outside the main thread, the caller handles signals.
    """
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
        loop.add_signal_handler(signal.SIGTERM, terminate)
    except (ValueError, RuntimeError, NotImplementedError):
        yield  # outside the main thread, the caller handles signals
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def raise_on_signals(say: Callable[[str], None]) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT or SIGTERM during the block, with a message to `say`.

    A signal during an import waits until the import ends: Python would not release the import lock,
    and a connecting thread would wait for it forever. A signal during the creation of an event
    loop also waits, because deleting a half-made loop prints a traceback.
    """
    here, around = (
        threading.get_ident(),
        _count_uninterruptible(sys._getframe()),
    )  # the caller may be in an import itself

    def again(number: int) -> None:
        time.sleep(IMPORTS)
        signal.pthread_kill(here, number)

    def end(number: int, frame: FrameType | None) -> None:
        if _count_uninterruptible(frame) > around:
            _thread.start_new_thread(
                again, (number,)
            )  # `threading` uses locks that this thread may hold
            return
        say("interrupted before any step started")
        raise KeyboardInterrupt

    try:
        ours = [
            each
            for each in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(each) != signal.SIG_IGN
        ]
        before = {each: signal.signal(each, end) for each in ours}
    except ValueError:
        yield  # outside the main thread, the caller handles signals
        return
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _count_uninterruptible(frame: FrameType | None) -> int:
    """Count the stack frames that a signal must not interrupt.

    These are imports and the creation of event loops.
    """
    count = 0
    while frame is not None:
        module = frame.f_globals.get("__name__")
        count += module == "importlib._bootstrap" or (
            module == "asyncio.events" and frame.f_code.co_name == "new_event_loop"
        )
        frame = frame.f_back
    return count


def call_beside_loop(call: Callable[[], T], interrupted: Callable[[], object]) -> T:
    """Call a function, in another thread if this thread runs an event loop, as in a notebook.

    In a notebook, Ctrl-C calls `interrupted`, waits for the function and raises KeyboardInterrupt.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    answers: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()  # an interrupted `join` marks the thread as ended

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    try:
        threading.Thread(target=work, name="recipe").start()
        over.wait()
    except KeyboardInterrupt:
        interrupted()
        over.wait()
        raise
    if errors:
        raise errors[0]
    return answers[0]
