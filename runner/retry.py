"""Do something again that may go right next time.  What to do about an error is a policy, a pure function; only `retry` and `retry_async` wait."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Policy: TypeAlias = "Callable[[Exception, int], float | None]"
"""(what went wrong, how often it was tried) -> seconds until the next try, or None: give up."""
OnRetry: TypeAlias = "Callable[[Exception], object]"
"""Called with what went wrong before each further try."""


def nothing(_error: Exception) -> None:
    """Of a caller that need not know."""


def pause(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after so many failures, at least one: `first`, doubled each time, at most `longest`."""
    return min(longest, first * 2.0 ** min(failures - 1, 60))


def backoff(
    on: type[Exception] | tuple[type[Exception], ...],
    tries: int,
    first: float,
    longest: float,
    chance: Callable[[], float] | None = None,
) -> Policy:
    """The usual policy: `tries` in all where the error is one of `on`, with pauses that double.

    `chance` gives numbers from 0 to 1, which keep several callers apart: a pause is then between half of its length and all of it.
    """

    def policy(error: Exception, tried: int) -> float | None:
        if tried >= tries or not isinstance(error, on):
            return None
        return pause(tried, first, longest) * (1.0 if chance is None else 0.5 + chance() / 2)

    return policy


def retry(
    do: Callable[[], T],
    policy: Policy,
    sleep: Callable[[float], object] = time.sleep,
    on_retry: OnRetry = nothing,
) -> T:
    """The answer of `do`.  Raises its error when the policy gives up."""
    tried = 0
    while True:
        try:
            return do()
        except Exception as error:
            tried += 1
            if (wait := policy(error, tried)) is None:
                raise
            on_retry(error)
        sleep(wait)


async def retry_async(
    ask: Callable[[], Awaitable[T]],
    policy: Policy,
    sleep: Callable[[float], Awaitable[object]] | None = None,
    on_retry: OnRetry = nothing,
) -> T:
    """The same for a coroutine function."""
    import asyncio

    tried = 0
    while True:
        try:
            return await ask()
        except Exception as error:
            tried += 1
            if (wait := policy(error, tried)) is None:
                raise
            on_retry(error)
        await (sleep or asyncio.sleep)(wait)
