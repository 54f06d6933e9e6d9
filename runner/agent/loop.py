"""The event loop of the agent: descriptors that are waited for, and what is called when one is ready."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT


class Loop:
    """Calls functions with the descriptors that are ready."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._acts: dict[int, Callable[[int], None]] = {}
        self.stirred = False
        """Whether a process that is watched has ended; the next look at the processes sets it back."""

    def watch(self, fd: int, act: Callable[[int], None]) -> None:
        """Call `act` whenever something can be read from `fd`.  Raises OSError."""
        self._poll.register(fd, _READ)
        self._acts[fd] = act

    def until_writable(self, fd: int, wanted: bool) -> None:
        """Call its function also when bytes can be written to `fd`, or no more then."""
        self._poll.modify(fd, _READ | _WRITE if wanted else _READ)

    def close(self, fd: int) -> None:
        del self._acts[fd]
        self._poll.unregister(
            fd
        )  # closing is not enough while a process between fork and exec still has a copy
        os.close(fd)

    def watch_process(self, pid: int) -> None:
        """Wake up when `pid` ends.  Raises OSError when it is gone, or no descriptor is left."""
        fd = os.pidfd_open(pid)
        try:
            self.watch(fd, self._ended)
        except OSError:
            os.close(fd)
            raise

    def _ended(self, fd: int) -> None:
        self.close(fd)
        self.stirred = True

    def turn(self, patience: float | None) -> None:
        """Wait so many seconds at most, None for as long as it takes, and call what is ready."""
        for fd, _ in self._poll.poll(patience):
            act = self._acts.get(fd)
            if act is not None:
                act(fd)
