"""The event loop of the agent."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT


class Poller:
    """Call a function for each descriptor that is ready."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._acts: dict[int, Callable[[int], None]] = {}
        self.stirred = False
        """True if a watched process has ended since the last check of processes."""

    def watch(self, fd: int, act: Callable[[int], None]) -> None:
        """Call `act` whenever `fd` is readable. Raises OSError."""
        self._poll.register(fd, _READ)
        self._acts[fd] = act

    def until_writable(self, fd: int, wanted: bool) -> None:
        """Also call the function of `fd` when `fd` is writable, or stop doing so."""
        self._poll.modify(fd, _READ | _WRITE if wanted else _READ)

    def close(self, fd: int) -> None:
        del self._acts[fd]
        # Closing is not enough while a process between fork and exec has a copy of the descriptor.
        self._poll.unregister(fd)
        os.close(fd)

    def watch_process(self, pid: int) -> None:
        """Wake the event loop when process `pid` ends.

        Raises OSError if it is gone or no descriptor is available.
        """
        fd = os.pidfd_open(pid)
        try:
            self.watch(fd, self._process_ended)
        except OSError:
            os.close(fd)
            raise

    def _process_ended(self, fd: int) -> None:
        self.close(fd)
        self.stirred = True

    def run_once(self, patience: float | None) -> None:
        """Wait at most `patience` seconds (None: indefinitely), and call the functions of ready
        descriptors.
        """
        for fd, _ in self._poll.poll(patience):
            act = self._acts.get(fd)
            if act is not None:
                act(fd)
