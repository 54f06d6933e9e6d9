"""Run a function on many items in a few threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Late(Exception):
    """Error for a passed deadline."""


class Crew:
    """Group of `width` threads for parallel work.

    `progress` receives the finished bytes and the total, from any thread but never concurrently.
    """

    def __init__(
        self, width: int, progress: Callable[[int, int], None] | None = None, total: int = 0
    ) -> None:
        self._width, self._progress, self._total = width, progress, total
        self._failures: list[BaseException] = []
        self._done = 0
        self._turn = threading.Lock()

    def done(self, count: int) -> None:
        """Add `count` finished bytes to the progress.

        Raises the error of a failed thread, so that the caller does not continue a large transfer.
        """
        with self._turn:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)
        if self._failures:
            raise self._failures[0]

    def map(
        self, do: Callable[[T], U], items: Sequence[T], deadline: float | None = None
    ) -> list[U]:
        """Return the results of `do` for all items, computed in parallel, in order.

        The first error stops all threads. Raises Late after `deadline` (monotonic) without waiting
        for the remaining items.
        """
        if (len(items) <= 1 or self._width <= 1) and deadline is None:
            return [do(item) for item in items]

        answers: list[Any] = [None] * len(items)
        queue = iter(range(len(items)))

        def work() -> None:
            try:
                while not self._failures:
                    with self._turn:
                        index = next(queue, None)
                    if index is None:
                        return
                    answers[index] = do(items[index])
            except BaseException as error:
                self._failures.append(error)

        # Not a thread pool: a pool waits for its threads at exit, even for threads that hang on an
        # unresponsive server.
        helpers = [
            threading.Thread(target=work, name="crew", daemon=True)
            for _ in range(min(self._width, len(items)))
        ]
        for helper in helpers:
            helper.start()
        try:
            for helper in helpers:
                helper.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if helper.is_alive():
                    raise Late
        except BaseException as error:
            self._failures.append(error)
            raise
        if self._failures:
            raise self._failures[0]
        return answers
