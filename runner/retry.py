"""Retries. A policy is a pure function of the error; only `retry` and `retry_async` wait."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Policy: TypeAlias = "Callable[[Exception, int], float | None]"
"""Maps an error and the number of attempts to the wait in seconds, or None to give up."""
OnRetry: TypeAlias = "Callable[[Exception], object]"
"""Called with the error before each retry."""


def nothing(_error: Exception) -> None:
    """Ignore the error."""


def pause(failures: int, first: float, longest: float) -> float:
    """Return the wait in seconds after `failures` failures: `first`, doubled each time, at most
    `longest`.
    """
    return min(longest, first * 2.0 ** min(failures - 1, 60))


def backoff(
    on: type[Exception] | tuple[type[Exception], ...],
    tries: int,
    first: float,
    longest: float,
    chance: Callable[[], float] | None = None,
) -> Policy:
    """Return an exponential backoff policy with `tries` attempts for errors of type `on`.

    `chance` returns random numbers from 0 to 1, which reduce each wait by up to half, to spread
    several callers.
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
    """Return the result of `do`, with retries. Raises its error when the policy gives up."""
    tried = 0
    while True:
        try:
            return do()
        except Exception as error:
            tried += 1
            wait = policy(error, tried)
            if wait is None:
                raise
            on_retry(error)
        sleep(wait)


async def retry_async(
    ask: Callable[[], Awaitable[T]],
    policy: Policy,
    sleep: Callable[[float], Awaitable[object]] | None = None,
    on_retry: OnRetry = nothing,
) -> T:
    """Await a coroutine function until it succeeds, like `retry`."""
    import asyncio

    tried = 0
    while True:
        try:
            return await ask()
        except Exception as error:
            tried += 1
            wait = policy(error, tried)
            if wait is None:
                raise
            on_retry(error)
        await (sleep or asyncio.sleep)(wait)
