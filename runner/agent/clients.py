"""Client connections of the agent.

A message is a length of 4 bytes, little-endian, then fields separated by NUL.
"""

from __future__ import annotations

import os

from .protocol import greeting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .contact import Contact
    from .loop import Poller

BACKLOG = 16 << 20
"""Maximum number of unread bytes of a client."""


class Clients:
    """Connected clients of the agent. `obey` is called with a client and its new messages."""

    def __init__(
        self,
        loop: Poller,
        contact: Contact,
        listener: int,
        obey: Callable[[int, list[list[bytes]]], None],
    ) -> None:
        self._loop, self._contact, self._listener, self._obey = loop, contact, listener, obey
        self._inputs: dict[int, bytearray] = {}
        self._outputs: dict[int, bytearray] = {}
        loop.watch(listener, self._accept)

    @property
    def has_clients(self) -> bool:
        return bool(self._inputs)

    def _accept(self, _: int) -> None:
        import socket

        with socket.socket(fileno=os.dup(self._listener)) as listener:
            listener.setblocking(False)
            try:
                client, _address = listener.accept()
            except OSError:
                return
            self.welcome(client.detach())

    def welcome(self, fd: int) -> None:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._inputs[fd] = bytearray()
        self._outputs[fd] = bytearray()
        self._contact.add_client(fd)
        self._loop.watch(fd, self._hear)
        self.tell(fd, greeting() + b"\n")

    def _dismiss(self, fd: int) -> None:
        if self._inputs.pop(fd, None) is not None:
            self._contact.remove_client(fd)
            del self._outputs[fd]
            self._loop.close(fd)

    def tell(self, fd: int, data: bytes) -> None:
        waiting = self._outputs.get(fd)
        if waiting is None:
            return
        waiting += data
        try:
            while waiting:
                del waiting[: os.write(fd, waiting)]
        except BlockingIOError:
            if len(waiting) > BACKLOG:
                self._dismiss(fd)  # it repeats its requests when it reconnects
            else:
                self._loop.until_writable(fd, True)
        except OSError:
            waiting.clear()  # disconnected, but its earlier requests are still read

    def tell_all(self, data: bytes) -> None:
        for fd in list(self._outputs):
            self.tell(fd, data)

    def _hear(self, fd: int) -> None:
        if self._outputs[fd]:
            self._loop.until_writable(fd, False)
            self.tell(fd, b"")
            if fd not in self._inputs:
                return
        try:
            data = os.read(fd, 1 << 15)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(fd)
            return
        buffer = self._inputs[fd]
        buffer += data
        begin = 0
        messages: list[list[bytes]] = []
        while len(buffer) - begin >= 4:
            end = begin + 4 + int.from_bytes(buffer[begin : begin + 4], "little")
            if end > len(buffer):
                break
            message = bytes(buffer[begin + 4 : end]).split(b"\0")
            if not _is_valid(message):
                self._obey(fd, messages)
                self._dismiss(fd)  # an invalid client must not affect the jobs of others
                return
            messages.append(message)
            begin = end
        del buffer[:begin]
        self._obey(fd, messages)
        self._contact.record_sign_of_life(fd)


def _is_valid(fields: list[bytes]) -> bool:
    """Return True if a client's message is valid."""
    try:
        kind, first, *rest = fields
        if kind == b"start":
            return _is_valid_start(rest)
        if kind == b"stop":
            return float(rest[0]) >= 0
        if kind == b"arm":
            return float(first) >= 0
        if kind == b"leave":
            return float(first) >= 0 and len(rest) == 1
        if kind == b"free":
            return int(first) >= 0 and rest[0].isascii()
        return kind == b"wait"
    except (ValueError, IndexError):
        return False


def _is_valid_start(fields: list[bytes]) -> bool:
    """Return True if a `start` message has valid limits, locks, arguments and environment
    variables.

    Raises ValueError for fields that are missing or not numbers.
    """
    _cwd, _log, timeout, idle, locks, _outlives, count, *words = fields
    arguments = int(count)
    variables = len(words) - arguments
    has_limits = all(not limit or float(limit) > 0 for limit in (timeout, idle))
    has_command = arguments > 0 and variables >= 0 and variables % 2 == 0
    return has_limits and locks.isascii() and has_command
