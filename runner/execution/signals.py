"""What happens when the user presses Ctrl-C or this process is asked to end: the loop is called, or what goes before it is left."""

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
"""Seconds between two looks whether an import is over, or an event loop made."""


@contextlib.contextmanager
def signals(interrupt: Callable[[], None], terminate: Callable[[], None]) -> Iterator[None]:
    """Have SIGINT call `interrupt` and SIGTERM `terminate`, where signals are ours."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
        loop.add_signal_handler(signal.SIGTERM, terminate)
    except (ValueError, RuntimeError, NotImplementedError):
        yield  # not the main thread: signals are the caller's
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def preparing(say: Callable[[str], None]) -> Iterator[None]:
    """Until a loop is called by them, have SIGINT and SIGTERM raise KeyboardInterrupt, and say so.

    One that comes during an import waits for its end: Python would keep its import lock, and what connects in another thread wait for that for ever.
    So does one that comes while an event loop is being made: half a loop has a traceback for its user when it is deleted.
    """
    here, around = (
        threading.get_ident(),
        _unbroken(sys._getframe()),
    )  # a program may call this while it is imported itself

    def again(number: int) -> None:
        time.sleep(IMPORTS)
        signal.pthread_kill(here, number)

    def end(number: int, frame: FrameType | None) -> None:
        if _unbroken(frame) > around:
            _thread.start_new_thread(
                again, (number,)
            )  # without the locks of `threading`, which this thread may hold
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
        yield  # not the main thread: signals are the caller's
        return
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _unbroken(frame: FrameType | None) -> int:
    """How many frames there are from this one outwards that no interrupt may leave: of imports, and of event loops that are being made."""
    count = 0
    while frame is not None:
        module = frame.f_globals.get("__name__")
        count += module == "importlib._bootstrap" or (
            module == "asyncio.events" and frame.f_code.co_name == "new_event_loop"
        )
        frame = frame.f_back
    return count


def apart(call: Callable[[], T], interrupted: Callable[[], object]) -> T:
    """Call it, in another thread where this one has an event loop, as in a notebook: Ctrl-C calls `interrupted` then, and is raised at the end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    answers: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()  # an interrupted `join` takes the thread for ended

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
