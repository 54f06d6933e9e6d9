"""What happens when the user presses Ctrl-C or this process is asked to end: the loop is called, or what goes before it is left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


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
    """Until a loop is called by them, have SIGINT and SIGTERM raise KeyboardInterrupt, and say so."""

    def end(*_: object) -> None:
        say("interrupted before any step began")
        raise KeyboardInterrupt

    try:
        ours = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, end) for each in ours}
    except ValueError:
        yield  # not the main thread: signals are the caller's
        return
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
