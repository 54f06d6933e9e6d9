"""One rented machine of a fake provider: an SSH server on loopback, in a process of its own.

usage: python -m drivers.fakes.sshd DIR ADDRESS PORT

DIR/keys and DIR/home/.ssh/authorized_keys contain the public keys that may log in.  DIR/env is the
environment as JSON, with the login name as USER.  DIR/boot is executed at the start.  The server
generates a host key.  If the boot script writes a host key to $RECIPE_SSHD_KEYS, which stands for
the directory /etc/ssh, the server changes to that key.  It prints its port. When stdin closes, the
server and all processes started on the machine end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import asyncssh

PR_SET_CHILD_SUBREAPER: Final = 36
PIECE: Final = 1 << 18
GLANCE: Final = 0.05
"""Seconds between two checks for a host key file."""


class _Door(asyncssh.SSHServer):
    def __init__(self, place: Path) -> None:
        self._place = place

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        known = [line.split()[:2] for line in _keys(self._place)]
        if username != environment(self._place)["USER"]:
            return False
        return key.export_public_key().split()[:2] in known


def _keys(place: Path) -> list[bytes]:
    found: list[bytes] = []
    for path in (place / "keys", place / "home" / ".ssh" / "authorized_keys"):
        if path.exists():
            found += path.read_bytes().splitlines()
    return found


def environment(place: Path) -> dict[str, str]:
    """Return the environment variables of a login, with a home directory below `place`."""
    home = str(place / "home")
    given: dict[str, str] = json.loads((place / "env").read_text("utf-8"))
    own = {
        "PATH": f"{place}/bin:{os.environ['PATH']}",
        "HOME": home,
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/sh",
    }
    return {**own, "RECIPE_SSHD_KEYS": f"{place}/etc", **given}


async def serve(place: Path, address: str, port: int) -> None:
    """Serve SSH and run the boot script until stdin closes. Prints the port."""
    env, home = environment(place), place / "home"

    async def session(process: asyncssh.SSHServerProcess[bytes]) -> None:
        words = ["sh", "-c", process.command] if process.command is not None else ["sh"]
        begun = await asyncio.create_subprocess_exec(
            *words,
            cwd=home,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert begun.stdin is not None and begun.stdout is not None and begun.stderr is not None
        feeding = asyncio.create_task(_feed(process, begun.stdin))
        with suppress(BrokenPipeError, ConnectionError):
            await asyncio.gather(
                _pour(begun.stdout, process.stdout), _pour(begun.stderr, process.stderr)
            )
        code = await begun.wait()
        feeding.cancel()
        process.exit(code if code >= 0 else 128 - code)

    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(
        lambda: _Door(place),
        address,
        port,
        server_host_keys=[key],
        process_factory=session,
        encoding=None,
        line_editor=False,
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    if (place / "boot").exists():
        with (place / "boot.log").open("ab") as log:
            await asyncio.create_subprocess_exec(
                "sh",
                place / "boot",
                cwd=home,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    showing = asyncio.create_task(_show(server, place / "etc" / "ssh_host_ed25519_key"))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    showing.cancel()


async def _feed(process: asyncssh.SSHServerProcess[bytes], stdin: asyncio.StreamWriter) -> None:
    """Copy the client's input to the command, which may exit before reading all input."""
    with suppress(
        BrokenPipeError, ConnectionError, asyncssh.SignalReceived, asyncssh.BreakReceived
    ):
        while data := await process.stdin.read(PIECE):
            stdin.write(data)
            await stdin.drain()
    stdin.close()


async def _pour(source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
    while data := await source.read(PIECE):
        target.write(data)
        await target.drain()


async def _show(server: asyncssh.SSHAcceptor, path: Path) -> None:
    """Switch to the host key in a file as soon as the file exists."""
    while not path.exists():  # noqa: ASYNC110, ASYNC240  # another program writes it
        await asyncio.sleep(GLANCE)
    server.update(server_host_keys=[asyncssh.read_private_key(path)])


def descendants(root: int) -> list[int]:
    """Return the PIDs of all living descendants of the process `root`, from /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found, front = [], [root]
    while front:
        front = [pid for pid, parent in parents.items() if parent in front]
        found += front
    return found


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        place, address, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        # No orderly shutdown: remaining processes are killed below.
        asyncio.new_event_loop().run_until_complete(serve(place, address, port))
    finally:
        while left := descendants(os.getpid()):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
