"""Reach the agent of a root, or begin one where none lives.  The holder of the root's lock decides: nothing here depends on a pid.

Used by a client on this machine, and by `attach` on a host.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = "import sys; sys.path.append(sys.argv.pop(1)); from agent import server; server.main(sys.argv[1], *map(int, sys.argv[2:]))"


def reach(root: str) -> socket.socket | None:
    """A connection to the live agent of `root`, or to one begun now; None while one is leaving or another process begins one.  Raises OSError."""
    lock = _open_lock(root)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _dial(root)
        return _begin(root, lock)
    finally:
        os.close(lock)


def make_private(folder: str) -> None:
    """What is below may hold secrets that a step printed."""
    parent = os.path.dirname(folder)
    os.makedirs(parent, exist_ok=True)
    os.chmod(parent, 0o700)
    os.makedirs(folder, mode=0o700, exist_ok=True)


def _open_lock(root: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(f"{root}/lock", flags, 0o600)
    except FileNotFoundError:
        make_private(f"{root}/logs")  # its parent too
        return os.open(f"{root}/lock", flags, 0o600)


@contextmanager
def _address(root: str) -> Iterator[str]:
    """The socket's address: short, however long the path of `root` is (the kernel takes 107 bytes).  Where there is no /proc it must be short."""
    if not os.path.isdir("/proc/self/fd"):
        yield f"{root}/socket"
        return
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _dial(root: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        with _address(root) as address:
            connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        connection.close()
        return None
    return connection


def _begin(root: str, lock: int) -> socket.socket:
    """Make the socket, hand it and the lock to a new process, and talk to it right away: what we write waits while it comes up."""
    make_private(f"{root}/logs")
    try:
        os.unlink(f"{root}/socket")
    except FileNotFoundError:
        pass
    ours, its = socket.socketpair()
    with its, socket.socket(socket.AF_UNIX) as listener, open(f"{root}/agent.log", "ab") as said:
        with _address(root) as address:
            listener.bind(address)
        os.chmod(f"{root}/socket", 0o600)
        listener.listen(128)
        fds = (lock, listener.fileno(), its.fileno())
        ours_is = os.path.dirname(
            os.path.dirname(os.path.abspath(__file__))
        )  # a folder, or the archive that travelled to a host
        argv = [sys.executable, "-I", "-S", "-E", "-c", BEGIN, ours_is, root, *map(str, fds)]
        try:
            for fd in fds:
                os.set_inheritable(fd, True)
            null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
            quiet = ((os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, said.fileno(), 2))
            os.posix_spawn(
                sys.executable, argv, {"PATH": os.defpath}, file_actions=(null, *quiet), setsid=True
            )
        finally:
            for fd in fds:
                os.set_inheritable(fd, False)
    return ours
