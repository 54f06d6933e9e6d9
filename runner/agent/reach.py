"""Connect to the agent of a root, or start one. The lock of the root decides, never a PID.

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
"""File in a root with the identity of its agent and the PID namespace that the agent sees.

It does not exist if all clients are alike.
"""


def reach(root: str, context: str = "", *, own: bool = False) -> socket.socket | None:
    """Connect to the agent of the directory `root`, and start the agent if it is not running.

    None while an agent exits or another process starts one. With `own`, None also if the agent was
    not started with the identity `context` of this process. Raises OSError.
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
    """Return True if an agent of `root` accepts connections."""
    try:
        connection = _dial(root)
    except OSError:
        return False
    if connection is None:
        return False
    connection.close()
    return True


def context_of(root: str) -> str:
    """Return the identity of the current or last agent of `root`, or "" if unknown."""
    return _read_context(root)[0]


def _read_context(root: str) -> list[str]:
    try:
        with open(f"{root}/{CONTEXT}", encoding="ascii") as file:
            return [*file.read().split("\n"), "", ""][:2]
    except FileNotFoundError:
        return ["", ""]


def _write_context(root: str, context: str) -> bool:
    """Write the identity of the new agent to a file.

    Returns True if the previous agent saw other processes, in another container or on another
    machine.
    """
    if not context:
        return False
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            seen = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        seen = "unknown"
    before = _read_context(root)[1]
    with open(f"{root}/{CONTEXT}", "w", encoding="ascii") as file:
        file.write(f"{context}\n{seen}\n")
    return before not in ("", seen)


def _is_there(fd: int, path: str) -> bool:
    """Return True if an open file is still the file at `path`.

    An unneeded root is deleted with its lock held.
    """
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def make_private(folder: str) -> None:
    """Create a directory whose parent only the owner may enter, because logs may contain secrets."""
    parent = os.path.dirname(folder)
    os.makedirs(parent, exist_ok=True)
    os.chmod(parent, 0o700)
    os.makedirs(folder, mode=0o700, exist_ok=True)


def _open_lock(root: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(f"{root}/lock", flags, 0o600)
    except FileNotFoundError:
        make_private(f"{root}/logs")  # creates the parent, too
        return os.open(f"{root}/lock", flags, 0o600)


@contextmanager
def _address(root: str) -> Iterator[str]:
    """Provide a short address of the socket, because the kernel limits addresses to 107 bytes.

    Without /proc, the path of `root` itself must be short.
    """
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
    """Create the socket, and start an agent that inherits the socket and the lock.

    Return a connection to the agent.

    Data can be sent immediately. It waits until the agent is ready.
    """
    make_private(f"{root}/logs")
    blind = _write_context(
        root, context
    )  # before the socket exists, so that clients know the identity
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
        # A directory, or on a host the transferred archive.
        ours_is = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
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
