"""Contact with a host.  Requests are repeated until the host answers or is considered lost."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from drivers.base import Argv, HostLost, Throttled, Unreachable

from ...retry import Policy, pause, retry_async

_T = TypeVar("_T")
LOST_AFTER: Final = 900.0
"""Seconds without an answer after which a host and its jobs are considered lost."""
SOON: Final = 3
"""Attempts to reach a driver or a host while a person waits: a few seconds."""
LONG: Final = 40
"""Attempts if a lease depends on the answer: a quarter of an hour."""


class HostContact:
    """Contact with this machine or a machine with the same disk, which always answers."""

    silent = False
    """Whether the host does not answer now.

    Its jobs may continue, but new jobs should start elsewhere.
    """

    @property
    def silent_for(self) -> float:
        """Seconds since the first missing answer; 0 if the host answers."""
        return 0.0

    async def insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a request until the host answers."""
        return await ask()


class RemoteContact(HostContact):
    """Contact with a remote host, which may be unreachable for a while without a failure of its
    jobs.
    """

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self.name, self._say = name, say
        self._silent_since = 0.0

    @property
    def silent_for(self) -> float:
        return time.monotonic() - self._silent_since if self.silent else 0.0

    async def insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a request while the host is unreachable.

        Raises HostLost after `LOST_AFTER` seconds.
        """

        async def once() -> _T:
            try:
                answer = await ask()
            except Unreachable as error:
                self._note_silence(error)
                raise
            if self.silent:
                self._say(f"{self.name} responds again")
                self.silent = False
            return answer

        return await retry_async(once, retry_policy())

    def _note_silence(self, error: Unreachable) -> None:
        """Record that the host is unreachable.  Raises HostLost after `LOST_AFTER` seconds."""
        now = time.monotonic()
        if not self.silent:
            self.silent, self._silent_since = True, now
            self._say(f"cannot reach {self.name} ({error}); its jobs continue, trying again")
        if now - self._silent_since > LOST_AFTER:
            raise HostLost(
                f"cannot reach {self.name} for {LOST_AFTER / 60:.0f} minutes: {error}"
            ) from error


def retry_policy(tries: float = math.inf) -> Policy:
    """Return a policy for at most `tries` attempts of a driver call or a request to a host.

    After throttling, the provider sets the wait, and the attempts are not limited.  Otherwise the
    wait grows with each attempt.
    """

    def policy(error: Exception, tried: int) -> float | None:
        if isinstance(error, Throttled):
            return error.after.total_seconds()
        if isinstance(error, Unreachable) and tried < tries:
            return pause(tried, 0.5, 30.0)
        return None

    return policy


async def ask_program(call: Callable[[Argv], AsyncIterator[bytes]], argv: Argv) -> bytes:
    """Run a program through `call` and return its output.

    After a broken connection it runs again.  Raises the errors of `Host.call`.
    """

    async def once() -> bytes:
        return b"".join([data async for data in call(argv)])

    return await retry_async(once, retry_policy(SOON))
