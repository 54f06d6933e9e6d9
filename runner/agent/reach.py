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
CONTEXT = "context"
"""The file of a root that says what its agent was begun with: an identity, and the processes that it can see.  None where all clients are alike."""


def reach(root: str, context: str = "", *, own: bool = False) -> socket.socket | None:
    """A connection to the live agent of `root`, or to one begun now; None while one is leaving or another process begins one.  Raises OSError.

    `context`: the identity of this process; `own`: only an agent that was begun with the same will do.
    """
    while True:
        lock = _open_lock(root)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                connection = _dial(root)
                if connection is not None and own and context_of(root) != context:
                    connection.close()
                    return None
                return connection
            if _is_there(lock, f"{root}/lock"):
                return _begin(root, lock, context)
        finally:
            os.close(lock)


def answers(root: str) -> bool:
    """Whether a live agent of `root` can be spoken to from here."""
    try:
        connection = _dial(root)
    except OSError:
        return False
    if connection is None:
        return False
    connection.close()
    return True


def context_of(root: str) -> str:
    """The identity that the agent of `root`, or the last that there was, was begun with; empty where that is not known."""
    return _noted(root)[0]


def _noted(root: str) -> list[str]:
    try:
        with open(f"{root}/{CONTEXT}", encoding="ascii") as file:
            return [*file.read().split("\n"), "", ""][:2]
    except FileNotFoundError:
        return ["", ""]


def _note(root: str, context: str) -> bool:
    """Note what the agent is begun with.  Whether the one before it saw other processes: those of another container or machine."""
    if not context:
        return False
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            seen = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        seen = "unknown"
    before = _noted(root)[1]
    with open(f"{root}/{CONTEXT}", "w", encoding="ascii") as file:
        file.write(f"{context}\n{seen}\n")
    return before not in ("", seen)


def _is_there(fd: int, path: str) -> bool:
    """Whether a file that was opened is there still: a root that is not needed is deleted, with its lock held."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


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


def _begin(root: str, lock: int, context: str) -> socket.socket:
    """Make the socket, hand it and the lock to a new process, and talk to it right away: what we write waits while it comes up."""
    make_private(f"{root}/logs")
    blind = _note(root, context)  # before the socket: who is answered there knows by whom
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
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-E",
            "-c",
            BEGIN,
            ours_is,
            root,
            *map(str, (*fds, int(blind))),
        ]
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
