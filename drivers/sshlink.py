"""A persistent SSH connection to one login, and commands run over it.

`Link.call` has the signature of `Host.call`.  A `Route` says how to reach the login and which host
keys are trusted.  Nothing is sent to a machine with an unknown host key, no agent is forwarded, and
no password is requested.  `~/.ssh/config` is not read here: `Route` holds its settings.  All
failures are `DriverError`s.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import socket
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import asyncssh

from .base import NOTHING, Argv, Denied, DriverError, Rejected, Unreachable

PORT = 22
CHANNELS = 8  # per connection: OpenSSH's MaxSessions is 10
CONNECTIONS = 3  # per login: TCP's window and some servers limit a single connection
FAR = 0.25  # seconds: connections that took longer to open get a larger window
PIECE = 1 << 18  # bytes per write
WAITING = 1 << 20  # bytes of output buffered for a slow reader, beyond the window
# Bytes that a server may send ahead on one channel: twice the bandwidth-delay product of a fast
# link.
WINDOW, FAR_WINDOW = 4 << 20, 16 << 20
PACKET = 1 << 17
LONGEST = 120_000  # bytes of a command: the kernel limits one argument to 128 KiB
LOGIN = 6.0  # timeout for a login's start-up files, in seconds
NOISE = 1 << 20  # bytes of login output allowed before the command starts
WORDS = 4096  # bytes of stderr kept for an error
AGAIN = 0.1  # seconds until the next attempt after a refused channel
REFUSALS = 8  # refused channels in a row, with none open, before giving up
# Signals sent from outside, which are no fault of the program.
ENDED = ("HUP", "INT", "KILL", "TERM")
KILLING = 3.0  # timeout for killing an abandoned command, in seconds
SLOWEST_RETRY = 5.0  # longest wait between attempts to connect, in seconds
CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes256-ctr",
    "aes128-ctr",
    "chacha20-poly1305@openssh.com",
)
# Added after the known key types of a host.  A key of another type is then reported and rejected,
# instead of a failed key exchange.
HOST_KEYS = "+ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,rsa-sha2-512,rsa-sha2-256"
# Equal for all routes. asyncssh reads no configuration: `SshConfig` has read it into the route.
_LOGIN_OPTIONS: Mapping[str, Any] = {
    "ignore_encrypted": True,
    "agent_identities": None,
    "agent_forwarding": False,
    "config": None,
    "preferred_auth": ("publickey",),
    "gss_host": None,
    "x509_trusted_certs": None,
    "send_env": None,
    "server_host_key_algs": HOST_KEYS,
    "encryption_algs": CIPHERS,
    "compression_algs": None,
    "keepalive_count_max": 4,
}
KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
# Characters that every shell passes on unchanged between single quotes: csh expands "!", fish "\\".
PLAIN = re.compile(rb"[ \"-&(-\[\]-~]*")
UNSAFE = re.compile(rb"[^A-Za-z0-9 _./=,:@%+\"$*?<>|&;(){}\[\]#~^-]")

_Trusted: TypeAlias = "asyncssh.SSHKnownHosts | tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]"


@dataclass(frozen=True, slots=True)
class Route:
    """The SSH route to one login.

    `host_key` is the only accepted host key, as `ssh-ed25519 AAAA…`.  Without it, the files
    `known_hosts` decide.
    """

    user: str
    host: str
    port: int = 22
    host_key: str | None = None
    known_hosts: tuple[str, ...] = KNOWN_HOSTS
    identity: tuple[
        str, ...
    ] = ()  # private key files; if empty, the keys in ~/.ssh and of the agent
    identities_only: bool = True  # offer only agent keys that `identity` names
    lenient: bool = (
        False  # allow missing files in `identity`: a configuration names keys for many machines
    )
    certificates: tuple[str, ...] = ()  # files
    login: bytes | None = field(default=None, repr=False)  # a private key itself, instead of files
    agent: str | None = None  # path of the agent's socket
    jump: Route | None = None
    proxy: str = ""  # a command for /bin/sh that connects, instead of TCP
    alias: str = ""  # name of the host key in known_hosts
    family: int = 0  # address family; 0: any
    keep_alive: float = (
        15.0  # seconds of silence until a keepalive; four unanswered ones close the connection
    )
    patience: float = 20.0  # login timeout, in seconds

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port != 22 else ""
        return f"{self.user}@{host}{port}"


def client(route: Route, folder: Path, n: int = 0) -> tuple[str, ...]:
    """Return the command line of OpenSSH's client for a route.

    Keys that are not files are written below `folder`.  `n` numbers the servers of the route, for
    the names of these files.
    """
    options = {
        "StrictHostKeyChecking": "yes",
        "ServerAliveInterval": f"{max(1, round(route.keep_alive))}",
        "IdentityAgent": route.agent or "none",
    }
    known = [f'"{Path(each).expanduser()}"' for each in route.known_hosts]
    identity = list(route.identity)
    if route.host_key is not None:
        (folder / f"known_hosts.{n}").write_text(f"{_known_as(route)} {route.host_key}\n", "utf-8")
        known = [f'"{folder}/known_hosts.{n}"']
        options["GlobalKnownHostsFile"] = "none"
    if route.login is not None:
        file = folder / f"login.{n}"
        file.touch(0o600)
        file.write_bytes(route.login)
        identity = [str(file)]
    if identity and route.identities_only:
        options["IdentitiesOnly"] = "yes"
    if route.alias:
        options["HostKeyAlias"] = route.alias
    if route.proxy:
        options["ProxyCommand"] = route.proxy.replace("%", "%%")
    if route.jump is not None:
        options["ProxyCommand"] = shlex.join([*client(route.jump, folder, n + 1), "-W", "[%h]:%p"])
    options["UserKnownHostsFile"] = " ".join(known)
    command = ["ssh", "-F", "none"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    for each in identity:
        command += ["-i", each]
    for each in route.certificates:
        command += ["-o", f"CertificateFile={each}"]
    return (*command, "-p", f"{route.port}", "-l", route.user, route.host)


class NotLetIn(Denied):
    """Error for a login that accepts none of our keys."""


class StuckLogin(Denied):
    """Error for a login that starts no command, because its start-up files do not finish."""


class SshLink:
    """An SSH connection, opened on demand and reopened after a failure.

    Belongs to one event loop at a time.
    """

    def __init__(self, route: Route, besides: int = CONNECTIONS - 1) -> None:
        self.route = route
        self._besides = besides  # limit of additional connections
        self._through = SshLink(route.jump) if route.jump else None
        self._beside: SshLink | None = None  # takes calls beyond this connection's room
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting, self._killing = asyncio.Lock(), asyncio.Lock()
        self._room = _ChannelLimit()
        self._window = WINDOW
        self._failures = 0
        self._not_before = 0.0
        self._logged_in = False  # whether a command has started, so the start-up files do finish

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        """Run `argv` on the host and stream its output.

        Raises Rejected with the end of stderr if the command fails, Unreachable if the connection
        breaks.
        """
        mark, command = _frame_command(argv)
        try:
            session = await self._session(command)
        except _Full:
            self._beside = self._beside or SshLink(self.route, max(0, self._besides - 1))
            self._beside._logged_in = True
            async for data in self._beside.call(argv, stdin):
                yield data
            return
        noise = b""
        login = asyncio.get_running_loop().time() + LOGIN
        try:
            while data := await _await_beginning(session, login):
                if session.pid:
                    yield data
                    continue
                noise, found, rest = (noise + data).partition(mark)
                pid, ended, rest = rest.partition(b"\n")
                if not ended:
                    noise += found + pid
                elif not pid.isdigit():
                    raise Rejected(f"{self.route} did not report the process ID of a command")
                else:
                    session.pid = int(pid)
                    self._logged_in = True
                    session.feed(stdin)  # not earlier, because start-up files may read input
                    if rest:
                        yield rest
                if not session.pid and len(noise) > NOISE:
                    raise Rejected(
                        f"{self.route} prints {NOISE >> 20} MB and more at login, before any command: silence its start-up files"
                    )
        except TimeoutError:
            kind = Unreachable if self._logged_in else StuckLogin
            raise kind(_explain_stuck(self.route, noise + bytes(session.words))) from None
        finally:
            await session.leave()
            if session.pid > 1 and not session.over:  # -1 would address all processes
                await self._kill(session.pid)
            session.give_room()
        if session.failure is not None:
            raise session.failure
        _check_end(session, noise, mark, argv, self.route)

    async def aclose(self) -> None:
        """Close the connection.  The next call opens another."""
        connection, self._connection = self._connection, None
        self._room.left = True
        if connection is not None and self._loop is asyncio.get_running_loop():
            connection.close()
            with suppress(asyncssh.Error, OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await connection.wait_closed()
        for other in (self._through, self._beside):
            if other is not None:
                await other.aclose()

    # --- connecting

    @property
    def is_connected(self) -> bool:
        """Return True if there is an open connection, as far as is known."""
        return self._connection is not None and not self._connection.is_closed()

    async def connection(self) -> asyncssh.SSHClientConnection:
        """Return the open connection, or open one.

        After a failure, each further attempt waits longer, up to SLOWEST_RETRY seconds.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connection, self._room = loop, None, _ChannelLimit()
            self._connecting, self._killing = asyncio.Lock(), asyncio.Lock()
            self._failures, self._not_before = 0, 0.0
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            await asyncio.sleep(self._not_before - loop.time())
            began = loop.time()
            try:
                self._connection = await self._connect()
            except DriverError:
                self._failures += 1
                self._not_before = loop.time() + min(SLOWEST_RETRY, 0.05 * 2**self._failures)
                raise
            far = loop.time() - began > FAR
            self._failures, self._room = 0, _ChannelLimit()
            self._window = FAR_WINDOW if far else WINDOW
            return self._connection

    async def _connect(self) -> asyncssh.SSHClientConnection:
        """Open a connection.  Raises DriverError with a remedy."""
        route, greeter = self.route, _Greeter()
        trusted = _trusted_keys(route)
        keys = _Keys(route)
        tunnel = await self._through.connection() if self._through is not None else ()
        proxy = ("/bin/sh", "-c", f"exec {route.proxy}") if route.proxy else ()
        # With named keys, `_Keys` asks the agent itself, so that their order is kept.
        agent = None if route.login or route.identity else route.agent
        try:
            async with asyncio.timeout(route.patience), keys.offer() as offered:
                return await asyncssh.connect(
                    route.host,
                    route.port,
                    username=route.user,
                    tunnel=tunnel,
                    proxy_command=proxy,
                    family=route.family or (),
                    host_key_alias=route.alias or None,
                    client_factory=lambda: greeter,
                    known_hosts=trusted,
                    client_keys=offered,
                    client_certs=keys.certificates,
                    agent_path=agent,
                    keepalive_interval=route.keep_alive,
                    **_LOGIN_OPTIONS,
                )
        except TimeoutError as error:
            raise Unreachable(
                f"{route} timed out after {route.patience:g} s while logging in"
            ) from error
        except (asyncssh.Error, OSError, ValueError) as error:
            raise _explain_login_error(error, route, greeter.shown, trusted) from error

    # --- channels

    async def _kill(self, pid: int) -> None:
        """Kill the process group of an abandoned command, through a channel of its own.

        OpenSSH passes on no signals in root's sessions.  The channel is not counted as used room,
        because waiting callers here may hold all the room.
        """
        connection, session = self._connection, _Session(_ChannelLimit())
        if connection is None or connection.is_closed():
            return
        with suppress(asyncssh.Error, OSError, TimeoutError):
            async with self._killing, asyncio.timeout(KILLING):
                kill = f"exec /bin/sh -c 'kill -9 -{pid} || kill -9 {pid}'"
                await connection.create_session(session.itself, kill, encoding=None)
                while await session.read():
                    pass

    async def _session(self, command: bytes) -> _Session:
        """Open a channel that runs `command`, as soon as the connection allows another channel.

        Raises _Full if another connection should be used.
        """
        refused = 0
        while True:
            connection = await self.connection()
            room = self._room
            if self._besides and room.taken >= int(room.limit):
                raise _Full
            await room.take()
            session = _Session(room)
            opening = asyncio.ensure_future(
                connection.create_session(
                    session.itself,
                    command.decode(),
                    encoding=None,
                    window=self._window,
                    max_pktsize=PACKET,
                )
            )
            try:
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(session.drop_opening)
                raise
            except asyncssh.ChannelOpenError as error:
                session.give_room()
                if connection.is_closed():
                    raise Unreachable(f"lost the connection to {self.route}") from error
                room.refuse()
                if room.taken:
                    raise _Full from error
                refused += 1
                if refused > REFUSALS:
                    raise Denied(f"{self.route} does not allow commands: {error}") from error
                await asyncio.sleep(0.02 * refused)
            except (asyncssh.Error, OSError, ValueError) as error:
                session.give_room()
                raise _foreign(error, self.route) from error
            else:
                return session


class _Full(Exception):
    """Raised if the server allows no further channels on this connection now."""


class _ChannelLimit:
    """Counter of the channels open on one connection, with a limit."""

    def __init__(self) -> None:
        self.limit, self.taken = float(CHANNELS), 0
        self.left = False  # the connection is not needed any more
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        while self.taken >= int(self.limit):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    # Its turn had come already: the next one takes it.
                    self._wake()
                raise
        self.taken += 1

    def give(self) -> None:
        self.taken -= 1
        self.limit = min(CHANNELS, self.limit + 1 / 16)  # after a refusal, slowly up again
        self._wake()

    def refuse(self) -> None:
        """Lower the channel limit after a refusal, and raise it again soon.

        The server allows fewer channels than usual, or has not noticed that a channel has closed.
        Without the retry, one long channel would block all others.
        """
        self.limit = max(1.0, self.taken)
        asyncio.get_running_loop().call_later(AGAIN, self._more)

    def _more(self) -> None:
        self.limit = min(CHANNELS, self.limit + 1)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class _Greeter(asyncssh.SSHClient):
    """SSH client that records a host key that does not match the trusted keys."""

    shown: asyncssh.SSHKey | None = None

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        self.shown = key
        return False


class _Session(asyncssh.SSHClientSession[bytes]):
    """SSH channel of one command, with flow control for its output and input."""

    def __init__(self, room: _ChannelLimit) -> None:
        self.pid = 0  # process id and group of the command, known when its own output starts
        self.failure: BaseException | None = None  # error of the input's producer
        self.whole = False  # the output is complete
        self.code: int | None = None
        self.signal = ""
        self.words = bytearray()
        self._room = room
        self._has_room = True
        self._channel: asyncssh.SSHClientChannel[bytes] | None = None
        self._feeding: asyncio.Future[None] | None = None
        self.over = self._left = self._unwanted = self._paused = False
        self._printed: list[bytes] = []
        self._size = 0
        self._news, self._may_write = asyncio.Event(), asyncio.Event()
        self._may_write.set()

    def itself(self) -> _Session:
        return self

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._channel = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if datatype is not None:
            self.words += data
            del self.words[: -2 * WORDS]
            return
        self._printed.append(data)
        self._size += len(data)
        if self._size > WAITING and not self._paused and self._channel is not None:
            self._paused = True
            self._channel.pause_reading()
        self._news.set()

    def eof_received(self) -> bool:
        self.whole = True
        return True  # the command may still read input

    def exit_status_received(self, status: int) -> None:
        self.code = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self.signal = signal

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        # Some servers close a channel without an end of output before it; a connection that we
        # close looks the same.
        self.whole = self.whole or (exc is None and not self._room.left)
        self.note_closed()

    def note_closed(self) -> None:
        """Handle the closing of the channel."""
        if not self.over:
            self.over = True
            if self._unwanted:
                self.give_room()
            self._news.set()
            self._may_write.set()
            if self._feeding is not None:
                self._feeding.cancel()  # the input's producer may be busy for long, or never return

    async def read(self) -> bytes:
        """Return new output of the command, or b"" after the end."""
        while not self._printed and not self.over and not self._left:
            self._news.clear()
            await self._news.wait()
        data = self._printed[0] if len(self._printed) == 1 else b"".join(self._printed)
        self._printed.clear()
        self._size = 0
        if self._paused and self._channel is not None:
            self._paused = False
            self._channel.resume_reading()
        return data

    def feed(self, stdin: AsyncIterable[bytes]) -> None:
        """Start sending `stdin` to the command."""
        if stdin is NOTHING:
            self._end()
        else:
            self._feeding = asyncio.ensure_future(self._feed(stdin))

    async def leave(self) -> None:
        """Kill the command if it still runs, because its output is no longer read."""
        self._abandon()
        if self._feeding is not None:
            self._feeding.cancel()
            with suppress(asyncio.CancelledError):
                await self._feeding

    def drop_opening(self, opening: asyncio.Task[Any]) -> None:
        """Abandon a channel whose caller was cancelled while the channel was opening."""
        if opening.cancelled() or opening.exception() is not None or self.over:
            self.give_room()
        else:
            self._unwanted = True
            self._abandon()

    def give_room(self) -> None:
        """Release this channel's share of the connection's channel limit."""
        if self._has_room:
            self._has_room = False
            self._room.give()

    def _abandon(self) -> None:
        self._left = True
        self._news.set()
        self._may_write.set()
        if not self.over and self._channel is not None:
            with suppress(OSError):
                self._channel.send_signal("KILL")
            self._channel.abort()

    def _end(self) -> None:
        if not self.over and self._channel is not None:
            with suppress(OSError):
                self._channel.write_eof()

    async def _feed(self, stdin: AsyncIterable[bytes]) -> None:
        assert self._channel is not None
        try:
            async for data in stdin:
                for begin in range(0, len(data), PIECE):
                    await self._may_write.wait()
                    if self.over or self._left:
                        return  # the exit code tells whether unread input matters
                    piece = data if len(data) <= PIECE else memoryview(data)[begin : begin + PIECE]
                    self._channel.write(piece)
            self._end()
        except BrokenPipeError:
            pass  # the command closed its input; the exit code tells whether that matters
        except Exception as error:
            # Any error of the input's producer goes to the reader of the output.
            self.failure = error
            self._abandon()
        finally:
            aclose = getattr(stdin, "aclose", None)
            if aclose is not None:
                await aclose()


# --- commands and error messages


def _frame_command(argv: Argv) -> tuple[bytes, bytes]:
    """Return the mark printed before the command's own output, and the command for a login shell.

    The command is ASCII text that every kind of shell passes on unchanged.
    """
    one, other = secrets.token_hex(4), secrets.token_hex(4)
    say = f'printf "\\036%s%s %s\\n" {one} {other} $$'
    begin = f'{say}; {say} >&2; unset CDPATH ENV BASH_ENV TAR_OPTIONS; LC_ALL=C; export LC_ALL; exec "$@"'.encode()
    words = [word.encode("utf-8", "surrogateescape") for word in argv]
    if any(b"\0" in word for word in words):
        raise Rejected("a command's arguments cannot contain a NUL character")
    if all(PLAIN.fullmatch(word) for word in words):
        command = (
            b"exec /bin/sh -c '" + begin + b"' sh" + b"".join(b" '" + word + b"'" for word in words)
        )
    else:
        script = (
            b"set -- "
            + b" ".join(b"'" + word.replace(b"'", b"'\\''") + b"'" for word in words)
            + b"\n"
            + begin
        )
        coded = UNSAFE.sub(lambda match: b"\\0%03o" % ord(match[0]), script)
        command = b"""exec /bin/sh -c 'eval "$(printf %b "$1")"' sh '""" + coded + b"'"
    if len(command) > LONGEST:
        raise Rejected(
            f"{argv[0][:100]} has {len(command)} bytes of arguments, but at most {LONGEST} are possible: send them on standard input"
        )
    return f"\x1e{one}{other} ".encode(), command


def _check_end(session: _Session, noise: bytes, mark: bytes, argv: Argv, route: Route) -> None:
    """Raise DriverError if the connection was lost or the command failed."""
    before, found, words = bytes(session.words).rpartition(mark)
    has_ended = session.code is not None or session.signal
    # The code often arrives before the last of the output.
    if not session.whole or not has_ended:
        raise Unreachable(f"lost the connection to {route} while {argv[0]} ran")
    if not session.pid:
        message = f"{route} does not run commands in a POSIX shell"
        raise Denied(_quote_output(message, "; its output: ", noise + before + words))
    said = words.partition(b"\n")[2] if found else words
    if session.signal:
        kind = Unreachable if session.signal in ENDED else Rejected
        message = f"{argv[0]} was ended by SIG{_readable(session.signal.encode())}"
        raise kind(_quote_output(message, ": ", said))
    if session.code:
        raise Rejected(_quote_output(f"{argv[0]} ended with {session.code}", ": ", said))


def _quote_output(message: str, joint: str, words: bytes) -> str:
    """Add a host's own words to a message, unless the host said nothing."""
    told = _readable(words)
    return f"{message}{joint}{told}" if told else message


async def _await_beginning(session: _Session, login: float) -> bytes:
    """Return new output of a command that may not have started yet.

    Raises TimeoutError if the command has not started by `login`, in the event loop's time.
    """
    async with asyncio.timeout_at(None if session.pid else login):
        return await session.read()


def _explain_stuck(route: Route, words: bytes) -> str:
    told = _readable(words)
    output = f"; their output: {told[-200:]}" if told else ""
    return (
        f"{route} started no command within {LOGIN:g} s after login: its start-up files (~/.bashrc, ~/.profile) wait, read input or print"
        f"{output}; make the first line of ~/.bashrc `case $- in *i*) ;; *) return ;; esac`"
    )


def _readable(words: bytes) -> str:
    """Return the last part of untrusted output, without terminal control characters."""
    text = words.decode("utf-8", "replace")[-WORDS:].strip()
    return "".join(map(_replace_control, text))


def _replace_control(character: str) -> str:
    return character if character.isprintable() or character in "\n\t" else "\ufffd"


# --- login keys and host keys


class _Keys:
    """The SSH keys to offer to a login. Raises Denied for a named key that cannot be used."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.certificates = [each for each in route.certificates if Path(each).is_file()]
        self._files: list[str] = []
        self._of_agent: list[bytes] = []  # named public keys, which the agent may hold
        if route.login is None:
            for name in route.identity:
                self._add_named_key(Path(name).expanduser())

    @asynccontextmanager
    async def offer(self) -> AsyncIterator[Any]:
        """Provide the SSH keys to offer, in order.

        An empty tuple stands for the keys in ~/.ssh.
        """
        route = self._route
        if route.login is not None:
            yield [asyncssh.import_private_key(route.login)]
        elif not route.identity:
            yield ()
        else:
            agent = await self._connect_agent()
            if agent is None:
                yield self._files or None
                return
            try:
                of_agent = self._choose_agent_keys(await agent.get_keys())
                yield [*of_agent, *self._files] or None
            finally:
                agent.close()

    async def _connect_agent(self) -> asyncssh.SSHAgentClient | None:
        """Connect to the agent if its keys are to be offered.  None if it cannot be reached."""
        route = self._route
        if not route.agent or (route.identities_only and not self._of_agent):
            return None
        try:
            return await asyncssh.connect_agent(route.agent)
        except (OSError, asyncssh.Error):
            return None  # like ssh, fall back to the files

    def _choose_agent_keys(self, held: Sequence[Any]) -> list[Any]:
        """Return the agent's keys to offer: first the named ones."""
        named = [key for key in held if key.public_data in self._of_agent]
        if self._route.identities_only:
            return named
        return [*named, *(key for key in held if key not in named)]

    def _add_named_key(self, path: Path) -> None:
        """Read a named key file: a private key, or a public key held by an SSH agent."""
        route = self._route
        public = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
        try:
            asyncssh.read_private_key(path)
        except OSError as error:
            if not self._ask_agent(public) and not route.lenient:
                raise Denied(f"cannot read the key {path} for {route}: {error.strerror}") from error
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            self._replace_by_agent_key(path, public, error)
        else:
            self._files.append(str(path))

    def _replace_by_agent_key(self, path: Path, public: Path, error: Exception) -> None:
        """Request the key of a locked or public key file from the agent.

        Raises Denied if the file is unusable. A lenient route skips a locked key.
        """
        route = self._route
        is_locked = "passphrase" in str(error).lower()
        may_be_in_agent = route.agent and (is_locked or public == path)
        if may_be_in_agent and self._ask_agent(public):
            return
        if not is_locked:
            raise Denied(f"{path} is not a usable private key for {route}: {error}") from error
        if not route.lenient:
            raise Denied(
                f"the key {path} for {route} has a passphrase: add the key to the agent first (ssh-add {shlex.quote(str(path))})"
            ) from error

    def _ask_agent(self, public: Path) -> bool:
        """Record a public key to request from the agent. Return False if its file is unreadable."""
        try:
            self._of_agent.append(asyncssh.read_public_key(public).public_data)
        except (OSError, asyncssh.KeyImportError):
            return False
        return True


def _known_as(route: Route) -> str:
    """Return the host name under which known_hosts lists a route's host key."""
    if route.alias:
        return route.alias
    return route.host if route.port == PORT else f"[{route.host}]:{route.port}"


def _read_known_hosts(path: Path) -> tuple[list[str], list[int]]:
    """Return the valid lines of a known_hosts file, and the numbers of the invalid lines.

    Raises OSError.
    """
    lines = path.read_text("utf-8", "replace").splitlines()
    try:
        asyncssh.import_known_hosts("\n".join(lines))
    except ValueError:
        return _separate_odd_lines(lines)
    return lines, []


def _separate_odd_lines(lines: Sequence[str]) -> tuple[list[str], list[int]]:
    valid: list[str] = []
    odd: list[int] = []
    for number, line in enumerate(lines, 1):
        if _readable_line(line):
            valid.append(line)
        else:
            odd.append(number)
    return valid, odd


def _readable_line(line: str) -> bool:
    try:
        asyncssh.import_known_hosts(line)
    except ValueError:
        return False
    return True


def odd_lines(routes: Iterable[Route]) -> list[str]:
    """Return a warning for each known_hosts file of these routes that has ignored lines."""
    files: dict[str, None] = {}
    for route in routes:
        files.update(dict.fromkeys(_files_on(route)))
    notices = []
    for name in files:
        try:
            _, odd = _read_known_hosts(Path(name).expanduser())
        except OSError:
            continue
        if odd:
            notices.append(_describe_odd_lines(name, odd))
    return notices


def _describe_odd_lines(name: str, odd: Sequence[int]) -> str:
    if len(odd) == 1:
        return f"{name}: line {odd[0]} cannot be parsed and is ignored"
    numbers = ", ".join(map(str, odd[:5]))
    if len(odd) > 5:
        numbers += ", …"
    return f"{name}: lines {numbers} cannot be parsed and are ignored"


def _files_on(route: Route | None) -> Iterator[str]:
    while route is not None:
        if route.host_key is None:
            yield from route.known_hosts
        route = route.jump


def _trusted_keys(route: Route) -> _Trusted:
    """Return the trusted host keys of a route.  Raises Denied."""
    if route.host_key is not None:
        try:
            return [asyncssh.import_public_key(route.host_key)], [], []
        except (asyncssh.KeyImportError, ValueError) as error:
            raise Denied(
                f'the pinned host key of {route} is invalid: expected the form "ssh-ed25519 AAAA…"'
            ) from error
    lines = []
    for name in route.known_hosts:
        try:
            lines += _read_known_hosts(Path(name).expanduser())[0]
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Denied(f"cannot read {name}: {error.strerror}") from error
    return asyncssh.import_known_hosts("\n".join(lines))


def _explain_unverified(
    route: Route, shown: asyncssh.SSHKey | None, trusted: _Trusted, why: str
) -> str:
    """Explain why a host key was not accepted, and how to verify and trust the key."""
    name = _known_as(route)
    known = _known_keys(route, trusted)
    if shown is None:
        return f"the host key of {name} is not accepted, and nothing was sent: {why}"
    shows = f"it shows {shown.get_algorithm()} {shown.get_fingerprint()}"
    check = f"On the machine itself, `ssh-keygen -lf /etc/ssh/ssh_host_{_kind(shown)}_key.pub` prints the real host key"
    if not known:
        file = route.known_hosts[0] if route.known_hosts else "known_hosts"
        scan = f"ssh-keyscan -p {route.port} -t {_kind(shown)} {route.host} >> {file}"
        return f"the host key of {name} is not known here, and nothing was sent: {shows}.\n{check}; if the keys match, trust it with: {scan}"
    was = ", ".join(f"{key.get_algorithm()} {key.get_fingerprint()}" for key in known)
    forget = (
        "change `host_key`"
        if route.host_key is not None
        else f"ssh-keygen -R '{name}', then trust the new key"
    )
    return f"the host key of {name} has changed, and nothing was sent: {shows}; known is {was}.\n{check}; if the machine was reinstalled: {forget}"


def _known_keys(route: Route, trusted: _Trusted) -> Sequence[asyncssh.SSHKey]:
    """Return the host keys that are trusted for a route."""
    if isinstance(trusted, tuple):
        return trusted[0]
    # Lines of known_hosts name the port only if it is not 22.
    port = route.port if route.port != 22 else None
    return trusted.match(route.alias or route.host, "", port)[0]


def _kind(key: asyncssh.SSHKey) -> str:
    algorithm = key.get_algorithm()
    return "ecdsa" if algorithm.startswith("ecdsa") else algorithm.removeprefix("ssh-")


def _not_let_in(route: Route) -> str:
    tried = ", ".join(route.identity)
    if not tried:
        tried = "the keys in ~/.ssh"
        if route.agent:
            tried += " and the keys of the agent"
    return f"{route} rejected {tried}: add the public key to ~/.ssh/authorized_keys on that host, or set `identity` to another key"


def _explain_login_error(
    error: Exception, route: Route, shown: asyncssh.SSHKey | None, trusted: _Trusted
) -> DriverError:
    """Convert an error of a login to a driver error with a remedy.

    `shown` is the server's host key if it is not among the `trusted` keys.
    """
    match error:
        case asyncssh.PermissionDenied():
            return NotLetIn(_not_let_in(route))
        case asyncssh.HostKeyNotVerifiable():
            return Denied(_explain_unverified(route, shown, trusted, str(error)))
        # A host key of a type that is not in known_hosts ends the key exchange.
        case asyncssh.KeyExchangeFailed() if "host key" in str(error).lower():
            return Denied(_explain_unverified(route, shown, trusted, str(error)))
        case asyncssh.KeyExchangeFailed() if "matching" in str(error):
            return Denied(f"{route} and recipe have no cipher or key exchange in common: {error}")
        case asyncssh.KeyExchangeFailed():
            return Unreachable(f"{route}: the key exchange failed ({error})")
        case _:
            return _foreign(error, route)


def _foreign(error: Exception, route: Route) -> DriverError:
    """Convert an asyncssh or system error to a driver error with a remedy."""
    match error:
        case (
            asyncssh.KeyImportError()
            | asyncssh.KeyEncryptionError()
            | asyncssh.IllegalUserName()
            | asyncssh.ProtocolNotSupported()
            | ValueError()
        ):
            return Denied(f"{route}: {error}")
        case socket.gaierror():
            return Unreachable(
                f'cannot resolve the name "{route.host}" of {route}: {error.strerror}'
            )
        case asyncssh.DisconnectError() if "authentication failures" in str(error):
            return Denied(
                f"{route} rejected the first keys and accepts no more attempts: set `identity` to the right key"
            )
        case OSError() if error.errno:
            return Unreachable(f"cannot reach {route}: {os.strerror(error.errno)}")
        case _:
            return Unreachable(f"cannot reach {route}: {error or type(error).__name__}")
