"""A long wire on loopback: what is written at one end comes out of the other half a round trip later, and no faster than its rate.

    with LongWire(sshd.port, rtt=0.1, rate=125e6) as wire:
        wire.port         # leads to sshd.port

Each connection has the rate for itself, and each direction; TCP's own windows do not limit what is on the way.
usage: python -m tests.servers.long_wire TARGET_PORT RTT_SECONDS BYTES_PER_SECOND   (prints the port that it listens on)
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Self

READ = 1 << 18
ON_THE_WAY = 64 << 20
"""Bytes, far above what a rate and a round trip need."""


class LongWire:
    """A process that forwards a port."""

    def __init__(self, target: int, *, rtt: float, rate: float = 0.0) -> None:
        self._argv = [
            sys.executable,
            "-m",
            "tests.servers.long_wire",
            str(target),
            str(rtt),
            str(rate),
        ]
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent.parent
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


class _End(asyncio.Protocol):
    """One end of one connection: what it reads leaves at the other end when it is due."""

    def __init__(self, rtt: float, rate: float) -> None:
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None
        self._rtt, self._rate = rtt, rate
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._blocked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(1 << 20)
        if self.other is not None:
            self.other.deliver()

    def data_received(self, data: bytes) -> None:
        self._put(data)
        self._size += len(data)
        if self._size > ON_THE_WAY and self.transport is not None:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self._put(b"")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(b"")

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._blocked = True

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other._blocked = False
            self.other.deliver()

    def _put(self, data: bytes) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + (len(data) / self._rate if self._rate else 0.0)
        self._waiting.append((self._free_at + self._rtt / 2, data))
        if self._timer is None:
            self.deliver()

    def deliver(self) -> None:
        """Hand over what is due."""
        self._timer = None
        out = self.other.transport if self.other is not None else None
        if out is None or self._blocked:
            return
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now and not self._blocked:
            data = self._waiting.popleft()[1]
            if data:
                out.write(data)
                self._size -= len(data)
            elif out.can_write_eof():
                out.write_eof()
        if self._size < ON_THE_WAY and self.transport is not None:
            self.transport.resume_reading()
        if self._waiting and not self._blocked:
            self._timer = asyncio.get_running_loop().call_at(self._waiting[0][0], self.deliver)


async def forward(target: int, rtt: float, rate: float) -> None:
    """Listen and forward, for ever."""
    loop = asyncio.get_running_loop()
    dialling: set[asyncio.Task[object]] = set()

    def accepted() -> _End:
        near, far = _End(rtt, rate), _End(rtt, rate)
        near.other, far.other = far, near
        task: asyncio.Task[object] = loop.create_task(
            loop.create_connection(lambda: far, "127.0.0.1", target)
        )
        dialling.add(task)
        task.add_done_callback(dialling.discard)
        return near

    server = await loop.create_server(accepted, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
