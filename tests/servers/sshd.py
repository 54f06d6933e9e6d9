"""A machine with OpenSSH's own server on a loopback port, which can be broken like a real one.  Knows nothing of the driver that talks to it.

    with Sshd(tmp_path / "sshd") as sshd:
        sshd.address      # "user@127.0.0.1:port"; also .user, .port
        sshd.home         # the login's home ($HOME): empty, ours alone; put a .bashrc there
        sshd.settings()   # keyword arguments of drivers.ssh.Ssh that reach it: hosts, known_hosts, identity, agent
        sshd.stop()       # the server and its connections die (kill -9); jobs that were started over them go on
        sshd.start()      # again, on the same port
        sshd.reboot()     # everything that was ever started there dies (kill -9), then the server starts again
        sshd.swap_host_key()

`options` are further lines of its configuration and win over ours (`["MaxSessions 2"]`).  The login is the user who runs the tests.  The fixture is
`sshd` (`from tests.servers.sshd import sshd`); a module that wants one server for all its tests makes a fixture of its own around the class.

A process of its own stands in for the machine: everything that is started there stays its descendant, and it kills them all when we leave or die.
"""

from __future__ import annotations

import getpass
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.tools import needs

# Orphans come to it and not to init: whatever detached itself is still found.  `stop` spares what is not sshd's own.
MACHINE = r"""
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)
argv, server = sys.argv[1:], None
def stat(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        return name, int(rest.split()[1]), rest.split()[0]
    except (OSError, IndexError, ValueError):
        return b"", 0, b"Z"
def below():
    told = {int(name): stat(name) for name in os.listdir("/proc") if name.isdigit()}
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, (_, parent, _) in told.items() if parent in found}
    return {pid: told[pid] for pid in found - {os.getpid()}}
def end(only):
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        victims = [pid for pid, (name, _, state) in below().items() if state != b"Z" and (only is None or name == only)]
        if not victims:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: nobody may see how another ended
            for pid in victims:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        time.sleep(0.002)
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
try:
    for line in sys.stdin:
        word = line.strip()
        if word == "start":
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            end(b"sshd" if word == "stop" else None)
        print("done", flush=True)
finally:
    end(None)
"""


class Sshd:
    """OpenSSH's server, and the machine it runs on."""

    def __init__(
        self, place: Path, *, options: Sequence[str] = (), user: str | None = None
    ) -> None:
        self.place = place
        self.home = place / "home"
        self.user = user or getpass.getuser()
        self.identity = place / "client"
        self.known_hosts = place / "known_hosts"
        self.authorized_keys = place / "authorized_keys"
        self.log = place / "sshd.log"
        self.port = 0
        self._options = tuple(options)
        self._machine: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"{self.user}@127.0.0.1:{self.port}"

    @property
    def host_key(self) -> str:
        """The public host key, as a line of authorized_keys has it."""
        return " ".join((self.place / "host_key.pub").read_text().split()[:2])

    def settings(self, **others: Any) -> dict[str, Any]:
        """Keyword arguments of the ssh driver that reach this server, `others` on top."""
        return {
            "hosts": [self.address],
            "known_hosts": str(self.known_hosts),
            "identity": str(self.identity),
            "use_config": False,  # that of who runs the tests
            "agent": False,
            **others,
        }

    def __enter__(self) -> Self:
        sshd = needs("sshd")
        self.home.mkdir(parents=True)
        self.place.chmod(0o700)
        for name in ("host_key", "client"):
            make_key(self.place / name)
        shutil.copy(self.place / "client.pub", self.authorized_keys)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(
                mode=0o755, exist_ok=True
            )  # the server of root insists on it; packages make it at boot
        for _ in range(20):
            self.port = free_port()
            self._configure()
            argv = [
                sys.executable,
                "-I",
                "-S",
                "-c",
                MACHINE,
                sshd,
                "-D",
                "-f",
                str(self.place / "sshd_config"),
                "-E",
                str(self.log),
            ]
            with (self.place / "machine.log").open("ab") as said:
                self._machine = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    start_new_session=True,
                )
            try:
                self.start()
            except OSError:
                self.__exit__()
                if "Address already in use" not in self.log.read_text():
                    raise
                continue
            return self
        raise RuntimeError("no free port for sshd")

    def __exit__(self, *_: object) -> None:
        if self._machine is not None:
            assert self._machine.stdin is not None and self._machine.stdout is not None
            self._machine.stdin.close()
            self._machine.wait(20)
            self._machine.stdout.close()
            self._machine = None

    def start(self) -> None:
        """The server listens.  Raises OSError, with what it said, when it does not come up."""
        said = self.log.stat().st_size if self.log.exists() else 0
        self._tell("start")
        give_up_at = time.monotonic() + 10
        while time.monotonic() < give_up_at:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                words = (
                    self.log.read_bytes()[said:].decode("utf-8", "replace")
                    if self.log.exists()
                    else ""
                )
                if "Address already in use" in words or "fatal" in words or "Missing" in words:
                    raise OSError(words) from None
                select.select([], [], [], 0.01)
        raise OSError(
            f"sshd did not come up: {self.log.read_text() if self.log.exists() else 'it left no log'}"
        )

    def stop(self) -> None:
        """Kill the server and all its connections.  Jobs live on."""
        self._tell("stop")

    def kill_everything(self) -> None:
        """Kill all that was ever started there, the server too."""
        self._tell("kill")

    def reboot(self) -> None:
        self.kill_everything()
        self.start()

    def swap_host_key(self) -> None:
        """Answer with another host key from now on; `known_hosts` still names the old one."""
        self.stop()
        for name in ("host_key", "host_key.pub"):
            (self.place / name).unlink()
        make_key(self.place / "host_key")
        self.start()

    def trust(self, public_key: str) -> None:
        """Let this key log in, too."""
        with self.authorized_keys.open("a") as file:
            file.write(public_key.strip() + "\n")

    def _tell(self, word: str) -> None:
        assert (
            self._machine is not None
            and self._machine.stdin is not None
            and self._machine.stdout is not None
        )
        self._machine.stdin.write(word + "\n")
        self._machine.stdin.flush()
        assert self._machine.stdout.readline() == "done\n"

    def _configure(self) -> None:
        kind, key = self.host_key.split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")
        lines = (
            *self._options,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.place / 'host_key'}",
            f"AuthorizedKeysFile {self.authorized_keys}",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxSessions 10",
            "MaxStartups 100:30:200",
            "PrintMotd no",
            "UseDNS no",
            f"SetEnv HOME={self.home}",
            "Subsystem sftp internal-sftp",
            "LogLevel VERBOSE",
        )
        (self.place / "sshd_config").write_text("".join(f"{line}\n" for line in lines))


def make_key(path: Path) -> None:
    """A new ed25519 key pair at `path` and `path.pub`."""
    subprocess.run(
        [needs("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)],
        check=True,
    )


def free_port() -> int:
    """A port that nobody listens on now, below those that the kernel hands out: it can be taken again after a restart."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """A machine to log in to."""
    with Sshd(tmp_path / "sshd") as server:
        yield server
