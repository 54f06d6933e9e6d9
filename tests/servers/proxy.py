"""A TCP proxy that breaks connections where it is asked to, and remembers what went through.  Knows bytes, no protocol.

    with Proxy(server.port) as proxy:                    # connect to 127.0.0.1:proxy.port instead of the server
        proxy.next(Fault("cut", at=1000))                # the next connection: close both sides after 1000 bytes from the client
        proxy.next(Fault("flip", at=5, bit=3, way="down"), Fault("reset", at=99))   # the one after that; several faults, each once
        proxy.piece = 1                                  # all from now on: one byte at a time
        proxy.delay = 0.01                               # seconds before each piece
        proxy.cut(), proxy.reset(), proxy.stall(), proxy.resume()    # all connections that are open now; a stall holds new ones too
        proxy.connections[0].up, .down                   # what passed: bytes from the client, bytes from the server
        proxy.connections[0].over.wait(10)               # a threading.Event

Kinds of faults, when `at` bytes have passed one way (`up`: from the client, `down`: from the server): `cut` closes both sides in an orderly way, `reset`
sends RST, `stall` passes nothing more either way and closes nothing (half-open), `flip` inverts one bit of byte `at`, `half` closes that way only.
A fault at 0 strikes before the first byte.  Nothing is recorded beyond `record` bytes a way, and `passed_up`, `passed_down` count on.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, Self

Way = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Literal["cut", "reset", "stall", "flip", "half"]
    at: int = 0
    way: Way = "up"
    bit: int = 0


class Connection:
    """One connection: its two sockets, and what passed."""

    def __init__(
        self, client: socket.socket, server: socket.socket, faults: tuple[Fault, ...]
    ) -> None:
        self.up, self.down = bytearray(), bytearray()
        self.passed_up = self.passed_down = 0
        self.faults = faults
        self.over = threading.Event()
        self._client, self._server = client, server
        self._ended = 0
        self._lock = threading.Lock()

    def sockets(self, way: Way) -> tuple[socket.socket, socket.socket]:
        return (self._client, self._server) if way == "up" else (self._server, self._client)

    def cut(self) -> None:
        for each in (self._client, self._server):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def reset(self) -> None:
        for each in (self._client, self._server):
            try:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                duplicate = socket.socket(fileno=each.detach())
                duplicate.shutdown(socket.SHUT_RD)  # wakes its reader
                duplicate.close()
            except OSError:
                pass

    def ended(self) -> None:
        """One way is done; after both, all is closed."""
        with self._lock:
            self._ended += 1
            last = self._ended == 2
        if last:
            for each in (self._client, self._server):
                each.close()
            self.over.set()


class Proxy:
    """Between a client and the server at 127.0.0.1:`target`."""

    def __init__(self, target: int, *, record: int = 1 << 20) -> None:
        self.target = target
        self.connections: list[Connection] = []
        self.piece = 1 << 16
        self.delay = 0.0
        self._record = record
        self._armed: deque[tuple[Fault, ...]] = deque()
        self._flowing = threading.Event()
        self._flowing.set()
        self._closing = False
        self._listener = socket.socket()
        self.port = 0

    def __enter__(self) -> Self:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for connection in self.connections:
            connection.over.wait(5)

    def next(self, *faults: Fault) -> None:
        """What happens to the next connection for which nothing was said."""
        self._armed.append(faults)

    def cut(self) -> None:
        for connection in list(self.connections):
            connection.cut()

    def reset(self) -> None:
        for connection in list(self.connections):
            connection.reset()

    def stall(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()  # nobody is there: the client hears of it at once
                continue
            for each in (client, server):
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(client, server, self._armed.popleft() if self._armed else ())
            self.connections.append(connection)
            for way in ("up", "down"):
                threading.Thread(target=self._pump, args=(connection, way), daemon=True).start()

    def _pump(self, connection: Connection, way: Way) -> None:
        source, sink = connection.sockets(way)
        recorded = connection.up if way == "up" else connection.down
        due = sorted(
            (fault for fault in connection.faults if fault.way == way), key=lambda fault: fault.at
        )
        passed = 0
        try:
            while True:
                while due and due[0].at <= passed and due[0].kind != "flip":
                    if not self._strike(connection, due.pop(0), sink):
                        return
                room = min(
                    [self.piece, *(fault.at - passed for fault in due[:1] if fault.kind != "flip")]
                )
                data = bytearray(source.recv(room))
                self._flowing.wait()
                if not data:
                    break
                while due and due[0].kind == "flip" and due[0].at < passed + len(data):
                    fault = due.pop(0)
                    data[fault.at - passed] ^= 1 << fault.bit
                if self.delay:
                    time.sleep(self.delay)
                sink.sendall(data)
                passed += len(data)
                if len(recorded) < self._record:
                    recorded += data
                setattr(connection, f"passed_{way}", passed)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            connection.cut()
        finally:
            connection.ended()

    def _strike(self, connection: Connection, fault: Fault, sink: socket.socket) -> bool:
        """Whether this way goes on."""
        if fault.kind == "cut":
            connection.cut()
        elif fault.kind == "reset":
            connection.reset()
        elif fault.kind == "half":
            sink.shutdown(socket.SHUT_WR)
        else:
            self.stall()
            self._flowing.wait()
            return not self._closing
        return False
