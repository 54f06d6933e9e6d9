"""Whether a host answers: what is asked of it is asked again until it does, or until it is given up for lost."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from drivers.base import Argv, HostLost, Throttled, Unreachable

from ...retry import Policy, pause, retry_async

_T = TypeVar("_T")
OUT_OF_SIGHT: Final = 900.0
"""Seconds without a word from a host after which what runs there is given up for lost."""
SOON: Final = 3
"""Tries of a driver or a host that cannot be reached while somebody waits at the prompt: a few seconds."""
LONG: Final = 40
"""Tries where a lease hangs on the answer: a quarter of an hour."""


class Contact:
    """Of a host that always answers: this machine, and what shares its disk."""

    silent = False
    """Whether it does not answer now; what runs there may go on, but there are better places to start something."""

    @property
    def silent_for(self) -> float:
        """Seconds since it did not answer for the first time; 0 where it answers."""
        return 0.0

    async def insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask until the host answers."""
        return await ask()


class RemoteContact(Contact):
    """Of a host that may be out of sight for a while: unreachable is not failed."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self.name, self._say = name, say
        self._silent_since = 0.0

    @property
    def silent_for(self) -> float:
        return time.monotonic() - self._silent_since if self.silent else 0.0

    async def insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask again while the host cannot be seen.  Raises HostLost when that takes too long."""

        async def once() -> _T:
            try:
                answer = await ask()
            except Unreachable as error:
                self._unseen(error)
                raise
            if self.silent:
                self._say(f"{self.name} answers again")
                self.silent = False
            return answer

        return await retry_async(once, patient())

    def _unseen(self, error: Unreachable) -> None:
        """The host could not be reached.  Raises HostLost when that takes too long."""
        now = time.monotonic()
        if not self.silent:
            self.silent, self._silent_since = True, now
            self._say(
                f"{self.name} cannot be reached ({error}); what runs there continues, and is asked for again"
            )
        if now - self._silent_since > OUT_OF_SIGHT:
            raise HostLost(
                f"{self.name} could not be reached for {OUT_OF_SIGHT / 60:.0f} minutes: {error}"
            ) from error


def patient(tries: float = math.inf) -> Policy:
    """A policy for calls of a driver: what was throttled waits as long as the provider says, what did not get through waits longer each time."""

    def policy(error: Exception, tried: int) -> float | None:
        if isinstance(error, Throttled):
            return error.after.total_seconds()
        return pause(tried, 0.5, 30.0) if isinstance(error, Unreachable) and tried < tries else None

    return policy


async def ask_program(call: Callable[[Argv], AsyncIterator[bytes]], argv: Argv) -> bytes:
    """What a program prints on the host of `call`, asked again where the connection breaks: it may run twice.  Raises what `Host.call` raises."""

    async def once() -> bytes:
        return b"".join([data async for data in call(argv)])

    return await retry_async(once, patient(SOON))
