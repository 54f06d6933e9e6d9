"""Call the loop when the user presses Ctrl-C or this process is asked to end."""

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
