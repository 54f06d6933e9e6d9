"""Keeper and relay programs for the nodes of a Slurm allocation.

At the end of a step, `proctrack/cgroup` kills all its remaining processes.  So programs are started
by a keeper, a step that lasts as long as the allocation.  A relay is the step of one call.  It
hands the keeper a program with the relay's own input and output, and waits for the end.  The agent
that such a program starts then belongs to the keeper's step.

Imports only the standard library of Python 3.9, no module of this project.  Sent as text: `python
-c TEXT keep NAME IDLE FOLDER LEAVE GRACE BEGAN` and `python -c TEXT call NAME MARK PROGRAM...`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

COMES_UP = 10.0
"""Seconds that a relay waits for a started allocation's keeper."""
LOOK = 1.0
"""Interval between checks for running programs, in seconds."""
WORDS = 4096
"""Bytes of stderr to keep for error messages."""
DRAIN = 1
"""Seconds for which a relay reads input that its program no longer wants."""
FOLDER = "recipe:folder"
"""Argument in place of a program: print the allocation's work directory on this node."""
SUBREAPER = 36
DESCRIPTORS = 3


def keep(name: str, idle: float, folder: str, leave_at: float, grace: float) -> None:
    """Start programs for this login's relays, until no program has run for `idle` seconds.

    With `idle` 0 there is no limit. The first of several allocations on this node uses `folder`,
    the second `folder.2`, so that an agent and its jobs belong to one allocation. At `leave_at`
    (seconds since the epoch, 0: never) the agent gets `leave` and ends all jobs, which have `grace`
    seconds to save.
    """
    import ctypes
    import subprocess  # noqa: F401  # imported once for all forks; a relay needs neither module
    import threading  # noqa: F401

    os.chdir(os.path.expanduser("~"))
    folder, taken = _take(folder)
    # Orphans of a call then become children of the keeper.
    reaps = ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0
    with taken, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        quiet_since = time.monotonic()
        while not (idle and reaps) or time.monotonic() - quiet_since < idle:
            if select.select([listener], [], [], LOOK)[0]:
                with contextlib.suppress(ConnectionError):
                    _begin(listener, folder)
            if _children():
                quiet_since = time.monotonic()
            if leave_at and time.time() >= leave_at:
                leave_at = 0.0
                _leave(f"{folder}/agent", grace)


def _take(folder: str) -> tuple[str, socket.socket]:
    """Claim the first of `folder`, `folder.2`, … that no other keeper on this node holds.

    Return the folder and its lock.
    """
    mark, number = hashlib.sha256(folder.encode("utf-8", "surrogateescape")).hexdigest()[:16], 1
    while True:
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0recipe-{os.getuid()}-{mark}-{number}")
            return folder if number == 1 else f"{folder}.{number}", held
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
            number += 1


def _leave(folder: str, grace: float) -> None:
    """Make the node's agent end its jobs. Without an agent, no job runs."""
    body = b"leave\0%f\0the walltime of its allocation ends" % grace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as agent:
        os.chdir(folder)  # a socket address is limited to 107 bytes
        agent.connect("socket")
        agent.sendall(len(body).to_bytes(4, "little") + body)


def _begin(listener: socket.socket, folder: str) -> None:
    """Serve the next relay connection in a separate process."""
    connection, _ = listener.accept()
    with connection:
        if os.fork() == 0:
            try:
                listener.close()
                _serve(connection, folder)
            finally:
                os._exit(0)


def _children() -> bool:
    """Reap exited child processes. Return True if any child remains."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _serve(connection: socket.socket, folder: str) -> None:
    """Run the program that a relay requests, and report its end to the relay.

    When the relay disconnects, the program's process group is killed.
    """
    import subprocess
    import threading

    if _read_peer_user(connection) != os.getuid():
        return
    room = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
    size, control, _, _ = connection.recvmsg(4, room)
    given = array.array("i")
    for _level, _kind, data in control:
        given.frombytes(data[: len(data) - len(data) % given.itemsize])
    wanted, body = int.from_bytes(size, "little"), b""
    while len(body) < wanted:
        more = connection.recv(wanted - len(body))
        if not more:
            return
        body += more
    argv = [os.fsencode(word) for word in json.loads(body)]
    if argv == [FOLDER.encode()]:
        os.write(given[1], os.fsencode(folder))
        connection.sendall(b"ended with 0")
        return
    # With these variables, MPI or srun in a program would join the keeper's own step.
    theirs = ("SLURM_", "SRUN_", "PMI")
    env = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    try:
        program = subprocess.Popen(
            argv, stdin=given[0], stdout=given[1], stderr=given[2], env=env, start_new_session=True
        )
    except (OSError, ValueError) as error:
        connection.sendall(f"cannot be run: {error}".encode())
        return
    for fd in given:
        os.close(fd)

    def watch() -> None:
        connection.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = program.wait()
    with contextlib.suppress(OSError):
        end = f"ended with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        connection.sendall(end.encode())


def call(name: str, mark: str, argv: list[str]) -> None:
    """Make the keeper run a program with this process's input and output.

    The last output is a report between two marks: how the program ended, and the end of its stderr.
    """
    give_up_at = time.monotonic() + COMES_UP
    printed, out = os.pipe()  # `srun --unbuffered` gives the relay a terminal as stdout
    said, err = os.pipe()
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                connection.connect(f"\0{name}")
                break
            except ConnectionRefusedError:
                if time.monotonic() > give_up_at:
                    sys.exit(
                        "the allocation cannot start programs: its batch script has not started yet, or has ended"
                    )
                time.sleep(0.02)
        if _read_peer_user(connection) != os.getuid():
            sys.exit("the process in this allocation belongs to another user")
        body = json.dumps(argv).encode()
        given = array.array("i", (0, out, err))
        connection.sendmsg(
            [len(body).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)]
        )
        connection.sendall(body)
        os.close(out)
        os.close(err)
        words, end = _relay_output(connection.fileno(), printed, said)
    if not end:
        sys.exit("the allocation ended")
    _write(f"{mark}{end}\n".encode() + words + f"\n{mark}".encode())
    signal.alarm(DRAIN)  # srun loses the last output if it has input for an exited program
    while os.read(0, 1 << 16):
        pass


def _relay_output(connection: int, printed: int, said: int) -> tuple[bytes, str]:
    """Print a program's output.  Return the end of its stderr and how the program ended.

    The second value is empty if the keeper disconnected.
    """
    words, end = b"", ""
    open_ = [connection, printed, said]
    while connection in open_ or (end and open_):
        # Once the program has ended, read only existing output: its child processes may keep the
        # outputs open.
        patience = None if connection in open_ else 0
        ready, _, _ = select.select(open_, [], [], patience)
        if not ready:
            break
        for fd in ready:
            more = os.read(fd, 1 << 17)
            if fd == connection:
                end = more.decode()
            elif fd == printed:
                _write(more)
            else:
                words = (words + more)[-WORDS:]
            if not more or fd == connection:
                open_.remove(fd)
    return words, end


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


def _read_peer_user(connection: socket.socket) -> int:
    """Return the user id of the socket's peer, because any user can claim such a socket's name."""
    _pid, uid, _gid = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(uid)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        _, _, name, idle, folder, leave, grace, began = sys.argv
        until = float(began) + float(leave) if float(leave) else 0.0
        keep(name, float(idle), folder, until, float(grace))
    else:
        call(sys.argv[2], sys.argv[3], sys.argv[4:])
