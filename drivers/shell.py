"""A host over "run this argv there": jobs that outlive the connection and us, on anything with POSIX sh and coreutils.  Knows no transport.

What stays there is `supervisor.sh`, installed under its digest at first use.  A start is one call, whose input is a shell program that is nothing but
one compound command: half of it does nothing at all.  All waits share one call that streams the names of jobs as they end.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias, TypeVar

from .base import NOTHING, Argv, Command, Denied, DriverError, Exit, Job, Rejected, Unreachable

Call: TypeAlias = Callable[[Argv, AsyncIterable[bytes]], AsyncIterator[bytes]]
"""`Host.call` of whatever carries the bytes.  Raises Unreachable when the connection went, HostLost when the host did."""
_T = TypeVar("_T")

ROOT = ".recipe-host"
"""Where we are at home there, unless a setting says otherwise."""
SCRIPT = Path(__file__).with_name("supervisor.sh")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/current-system/sw/bin"
ROOM = 4 << 20  # bytes of log in one answer
LINE = 1 << 16  # bytes; no answer but a log is longer
LINGER = 5.0  # seconds that the shared call stays open after the last wait
FAREWELL = 1.0  # seconds for the shared call to end by itself
PING = 2.0  # seconds between signs of life while we wait
SILENCE = 20.0  # seconds without an answer after which a connection is taken for dead
BACKOFF = (0.1, 0.3, 1.0, 3.0)
REMEMBERED = 10_000
SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+=,")
NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
SHELL_OWN = frozenset(
    (
        *(
            "BASHOPTS",
            "BASHPID",
            "BASH_ARGC",
            "BASH_ARGV",
            "BASH_ARGV0",
            "BASH_COMMAND",
            "BASH_COMPAT",
            "BASH_LINENO",
            "BASH_SOURCE",
            "BASH_SUBSHELL",
        ),
        *("BASH_VERSINFO", "BASH_VERSION", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD"),
        *("IFS", "LINENO", "OPTARG", "OPTERR", "OPTIND", "POSIXLY_CORRECT", "PPID", "PS1", "PS2", "PS4", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM"),
        *("UID", "_"),
    )
)
"""Variables that a shell gives a meaning or forbids to set: they reach the job as arguments of `env`, which no secret may."""

BOOT = f"""\
PATH={PATH}
printf '\\n%s ' "$3"
cd -P -- "$1" 2>/dev/null && [ -f "bin/$2" ] || {{ echo missing; exit 0; }}
true 2>/dev/null >contact
echo here
digest=$2 boot_id=$4 shell=$5
shift 5
if [ "$1" = start ]; then
    for place in /usr/bin /bin /usr/local/bin /run/current-system/sw/bin; do
        [ ! -x "$place/setsid" ] || {{ "$place/setsid" $shell -s; exit; }}
    done
    exec $shell -s
fi
. "./bin/$digest"
"$@"
"""
INSTALL = f"""\
PATH={PATH}
printf '\\n%s here\\n' "$3"
umask 077
mkdir -p -- "$1" && cd -- "$1" && mkdir -p bin && cat >"bin/.$2.$$" || exit
[ "$(wc -c <"bin/.$2.$$")" -eq "$4" ] || {{ rm -f "bin/.$2.$$"; exit 1; }}
# Only some can have a program hear SIGINT again that a shell began in the background.
able=--default-signal=INT,QUIT
/usr/bin/env $able true 2>/dev/null || able=
echo "$able" | cat >"bin/.able.$$" && mv "bin/.able.$$" bin/able && mv "bin/.$2.$$" "bin/$2"
"""
PLAIN = """printf '\\n%s here\\n' "$1"; shift; exec "$@\""""


class ShellHost:
    """A shell and a disk, reached through `call`.  Ours is the directory `root`, relative to where `call` runs things.  One event loop at a time.

    `reach` is how long a wait tries to get through again before it raises Unreachable.  With `deadman` the host ends all jobs in `root`, and runs
    `last_words` in a shell, once nobody has been in contact for that long; without last words only while there are jobs.
    """

    def __init__(
        self,
        call: Call,
        root: str = ROOT,
        *,
        shell: str = "/bin/sh",
        reach: timedelta = timedelta(seconds=60),
        deadman: timedelta | None = None,
        last_words: str = "",
        boot_id: str = BOOT_ID,
    ) -> None:
        self.root = root
        self._call = call
        self._shell = shell
        self._reach = reach.total_seconds()
        self._deadman = deadman
        self._last_words = last_words
        self._boot_id = boot_id
        self._script = SCRIPT.read_bytes()
        self._digest = hashlib.sha256(self._script).hexdigest()[:16]
        self._nonce = os.urandom(8).hex()
        self._over: dict[str, Exit] = {}
        self._printed: dict[str, int] = {}  # bytes, of those that are over, where we know it
        self._spare: _Spare | None = None
        self._reset()

    def _reset(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._going: set[str] = set()
        self._waiting: dict[str, list[tuple[asyncio.Future[None], float]]] = {}
        self._questions: asyncio.Queue[bytes] | None = None  # while connected; an empty one is the last
        self._watching: asyncio.Task[None] | None = None

    async def start(self, command: Command, key: str) -> Job:
        name = file_name(key)
        program = self._program(name, command)
        if name in self._over and self._over[name].reason == "busy":  # before we ask: its end may be here before the answer
            del self._over[name]
            self._printed.pop(name, None)
        answer = await (self._answer("hold", name, *sorted(command.locks), program=program) if command.locks else self._start(program))
        if answer == b"busy":
            _keep(self._over, name, Exit(None, reason="busy"))
        elif answer not in (b"new", b"old"):
            raise _refused(answer.removeprefix(b"no ").decode("utf-8", "replace"))
        return Job(key, {"log": command.log} if command.log else {})

    async def free(self, locks: Sequence[str]) -> Sequence[str]:
        answer = (await self._answer("unheld", *locks)).decode("utf-8", "replace")
        if answer.startswith("no "):
            raise _refused(answer.removeprefix("no "))
        return answer.split()

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        name = file_name(job.key)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._reset()
            self._loop = loop
        give_up_at = loop.time() + min(patience.total_seconds(), 1e8)
        while (over := self._over.get(name)) is None:
            known = name in self._going
            if known and loop.time() >= give_up_at:
                return None
            told: asyncio.Future[None] = loop.create_future()
            waiter = (told, give_up_at)
            self._waiting.setdefault(name, []).append(waiter)
            if not known:
                self._ask_about(name)
            alarm = loop.call_at(give_up_at, _resolve, told) if known else None
            try:
                await told
            finally:
                if alarm is not None:
                    alarm.cancel()
                waiting = self._waiting.get(name, [])
                if waiter in waiting:
                    waiting.remove(waiter)
                    if not waiting:
                        del self._waiting[name]
        return over

    async def log(self, job: Job, offset: int) -> bytes:
        name = file_name(job.key)
        if offset >= self._printed.get(name, offset + 1):
            return b""
        read: list[bytes] = []
        left = ROOM
        last = name in self._over
        try:
            async with aclosing(self._ask("log", name, job.data.get("log", ""), str(offset), str(ROOM))) as stream:
                async for data in stream:
                    read.append(data[:left])
                    left -= len(read[-1])
                    if not left:
                        break
        except Unreachable:
            if not read:
                raise
            last = False
        if last and left:
            _keep(self._printed, name, offset + ROOM - left)
        return b"".join(read)  # cut anywhere, it is still the beginning of the rest

    async def stop(self, job: Job, grace: timedelta) -> None:
        name = file_name(job.key)
        if name not in self._over:
            await self._answer("stop", name, str(_hundredths(grace.total_seconds())))

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        full = ("/bin/sh", "-c", PLAIN, "sh", self._nonce, *argv)
        try:
            async with aclosing(self._after_noise(full, stdin)) as stream:
                await anext(stream)
                async for data in stream:
                    yield data
        except Rejected as error:
            raise Rejected(str(error).replace("/bin/sh", argv[0], 1)) from error

    async def aclose(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None and spare.pending():
            spare.answer.cancel()
            await asyncio.wait([spare.answer])
        watching, questions = (self._watching, self._questions) if self._loop is asyncio.get_running_loop() else (None, None)
        self._fail(Unreachable("the connection was closed from here"), None)
        self._reset()
        if watching is not None:
            if questions is not None:
                questions.put_nowait(b"")
                await asyncio.wait([watching], timeout=FAREWELL)
            watching.cancel()
            await asyncio.wait([watching])

    # --- asking

    def holds_spare(self) -> bool:
        """Whether a call that waits for the next start, for a few seconds after the last, is worth what it takes."""
        return False

    async def _start(self, program: bytes) -> bytes:
        spare, self._spare = self._spare, None
        answer = b""
        if spare is not None and spare.usable():
            spare.program.set_result(program)
            answer = await spare.answer
        if not answer:  # it is not known whether it began: to begin it twice does no harm
            answer = await self._answer("start", program=program)
        if self._spare is None and self.holds_spare():
            self._spare = _Spare(self._answer)
        return answer

    async def _answer(self, *words: str, program: bytes | None = None, stdin: Callable[[], AsyncIterable[bytes]] | None = None) -> bytes:
        answer = b""
        async with aclosing(self._ask(*words, program=program, stdin=stdin)) as stream:
            async for data in stream:
                answer = (answer + data)[:LINE]
        return answer.rstrip(b"\n")

    async def _ask(
        self, *words: str, program: bytes | None = None, stdin: Callable[[], AsyncIterable[bytes]] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """What the verb in `words` answers there.  Installs what it needs there first, when it is not."""
        argv = ("env", "-i", *self._shell.split(), "-c", BOOT, "recipe", self.root, self._digest, self._nonce, self._boot_id, self._shell, *words)
        for _ in range(2):
            source = stdin() if stdin is not None else NOTHING if program is None else _once(program)
            try:
                async with aclosing(self._after_noise(argv, source)) as stream:
                    if await anext(stream) == b"here":
                        async for data in stream:
                            yield data
                        return
            except Rejected as error:
                raise _refused(str(error)) from error
            await self._install()
        raise Denied(f"{self.root} on the host does not keep what is written into it")

    async def _install(self) -> None:
        argv = ("env", "-i", *self._shell.split(), "-c", INSTALL, "recipe", self.root, self._digest, self._nonce, str(len(self._script)))
        try:
            async with aclosing(self._after_noise(argv, _once(self._script))) as stream:
                async for _ in stream:
                    pass
        except Rejected as error:
            raise _refused(str(error)) from error

    async def _after_noise(self, argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """First the word after our mark, then what follows that line; what a login shell printed before it is dropped."""
        mark = b"\n%s " % self._nonce.encode()
        held: bytes | None = b""
        async with aclosing(self._call(argv, stdin)) as stream:  # type: ignore[type-var]  # every call is a generator
            async for data in stream:
                if held is None:
                    yield data
                    continue
                held += data
                _, found, rest = held.partition(mark)
                word, ended, rest = rest.partition(b"\n")
                if found and ended:
                    held = None
                    yield word
                    if rest:
                        yield rest
                else:
                    held = (held if found else held[-len(mark) :])[-LINE:]
        if held is not None:
            raise Unreachable("the host answered nothing that we asked for")

    # --- watching

    def _ask_about(self, name: str) -> None:
        if self._watching is None or self._watching.done():
            assert self._loop is not None
            self._questions = None
            self._watching = self._loop.create_task(self._watch())
        if self._questions is not None:
            self._questions.put_nowait(f"? {name}\n".encode())

    async def _watch(self) -> None:
        """Until nobody has waited for a while: tell those who wait what became of their jobs, over as many connections as it takes."""
        loop = asyncio.get_running_loop()
        failures, failing_since = 0, 0.0
        try:
            while True:
                try:
                    await self._watch_once()
                    if not self._waiting:
                        return
                    continue  # somebody came as we were leaving
                except TimeoutError:
                    error = Unreachable(f"the host has said nothing for {SILENCE:g} seconds")
                except (Unreachable, Rejected) as broken:
                    if isinstance(broken, Rejected) and self._questions is None:
                        raise
                    error = Unreachable(str(broken))  # something ended what tells us of ends there
                if self._questions is not None or not failures:
                    failures, failing_since = 0, loop.time()  # it was connected
                self._questions = None
                self._going.clear()
                self._fail(error, None if loop.time() - failing_since >= self._reach else loop.time())
                if not self._waiting and self._deadman is None:
                    return
                await asyncio.sleep(BACKOFF[min(failures, len(BACKOFF) - 1)])
                failures += 1
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._fail(error, None)
            if not isinstance(error, DriverError):
                raise
        finally:
            if self._watching is asyncio.current_task():
                self._questions = None
                self._going.clear()

    async def _watch_once(self) -> None:
        if self._deadman is not None:  # whatever became of the timer while we were away
            await self._answer("arm", _limit(self._deadman.total_seconds()), self._last_words)
        questions: asyncio.Queue[bytes] = asyncio.Queue()
        received = b""
        idle_at: float | None = None
        leaving = False
        loop = asyncio.get_running_loop()
        async with aclosing(self._ask("watch", stdin=lambda: _spoken(questions))) as stream:
            while True:
                async with asyncio.timeout(SILENCE):
                    data = await anext(stream, b"")
                if not data:
                    if leaving:
                        return
                    raise Unreachable("the host stopped telling us of ends")
                *lines, received = (received + data).split(b"\n")
                received = received[-LINE:]
                for line in lines:
                    if line == b"ready":
                        self._questions = questions
                        for name in self._waiting:
                            questions.put_nowait(f"? {name}\n".encode())
                    elif line != b".":
                        self._hear(line.decode("utf-8", "replace"))
                if self._waiting or self._deadman is not None:
                    idle_at = None
                elif idle_at is None:
                    idle_at = loop.time() + LINGER
                elif loop.time() >= idle_at and not leaving:
                    leaving, self._questions = True, None
                    questions.put_nowait(b"")

    def _hear(self, line: str) -> None:
        word, name, *told = line.split(" ", 11)
        if word in ("over", "mute"):
            self._going.discard(name)
            try:
                _keep(self._over, name, _exit(told))
            except ValueError as error:
                raise Unreachable(f"the host does not say how a job ended, but {line!r}") from error
            if word == "mute":
                _keep(self._printed, name, 0)
        else:
            self._going.add(name)
        for future, _ in self._waiting.pop(name, ()):
            _resolve(future)

    def _fail(self, error: Exception, now: float | None) -> None:
        """Tell those who wait, or, at a time `now`, those whose patience has passed."""
        for name, waiting in list(self._waiting.items()):
            for waiter in list(waiting):
                future, give_up_at = waiter
                if now is None or give_up_at <= now:
                    waiting.remove(waiter)
                    if not future.done():
                        future.set_exception(error)
            if not waiting:
                del self._waiting[name]

    # --- writing the program

    def _program(self, name: str, command: Command) -> bytes:
        argv = list(command.argv)
        if not argv or not argv[0] or argv[0].startswith("-"):
            raise Rejected("a command needs the name of a program, which cannot begin with a dash")
        exports = []
        odd = []
        for variable, value in [*command.env.items(), *command.secrets.items()]:
            if variable in SHELL_OWN or not NAME.issuperset(variable) or not variable or variable[0].isdigit():
                if variable in command.secrets:
                    raise Rejected(f"{variable}: a secret's variable needs a name that a shell can set")
                if "=" in variable or not variable:
                    raise Rejected(f'"{variable}" cannot be the name of an environment variable')
                odd.append(f"{variable}={value}")
            else:
                exports.append(f"export {variable}={_quoted(value)}")
        if odd:
            argv = ["/usr/bin/env", *odd, *argv]
        metrics = os.path.join(command.cwd, command.env["RECIPE_METRICS"]) if "RECIPE_METRICS" in command.env else ""
        lines = (
            "{",
            f"digest={self._digest} boot_id={_quoted(self._boot_id)} shell={_quoted(self._shell)}",
            f". ./bin/{self._digest}",
            "environment() {",
            *exports,
            'export RECIPE_JOB="$cookie"',
            "}",
            f"cwd={_quoted(command.cwd)} log={_quoted(command.log or '')} metrics={_quoted(metrics)}",
            f"limit={_limit(command.timeout)} idle={_limit(command.idle_timeout)}",
            " ".join(["start", name, *map(_quoted, argv)]),
            # After the start: a keeper that is about to go sees the job, or leaves the timer alone.
            *(() if self._deadman is None else (f"arm {_limit(self._deadman.total_seconds())} {_quoted(self._last_words)}",)),
            "}",
        )
        text = "\n".join(lines) + "\n"
        if "\0" in text:
            raise Rejected("a command's arguments, environment and paths cannot contain a NUL character")
        return text.encode("utf-8", "surrogateescape")


class _Spare:
    """A start without its program: the way there, which takes longer than the start, is gone while nobody waits."""

    def __init__(self, ask: Callable[..., Coroutine[None, None, bytes]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.program: asyncio.Future[bytes] = self._loop.create_future()
        self.answer = self._loop.create_task(self._asking(ask))

    def usable(self) -> bool:
        return not self.program.done() and self.pending()

    def pending(self) -> bool:
        return self._loop is asyncio.get_running_loop() and not self.answer.done()

    async def _asking(self, ask: Callable[..., Coroutine[None, None, bytes]]) -> bytes:
        with suppress(DriverError):  # nobody has to hear why it is of no use: another call will say so
            return await ask("start", stdin=self._given)
        return b""

    async def _given(self) -> AsyncIterator[bytes]:
        await asyncio.wait([self.program], timeout=LINGER)
        if self.program.done():
            yield self.program.result()
        else:
            self.program.cancel()  # it ends, having begun nothing


def _resolve(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)


def _keep(known: dict[str, _T], name: str, value: _T) -> None:
    """Among the last that we heard of."""
    known[name] = value
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _spoken(questions: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    """Questions as they come, and a sign of life when there are none."""
    while True:
        try:
            async with asyncio.timeout(PING):
                said = await questions.get()
        except TimeoutError:
            said = b".\n"
        if not said:
            return
        yield said


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _hundredths(seconds: float) -> int:
    return max(0, -int(-seconds * 100 // 1))


def _limit(seconds: float | None) -> str:
    return "-" if seconds is None else str(_hundredths(seconds))


def file_name(key: str) -> str:
    """A key as a file name and a word."""
    if 0 < len(key) <= 150 and SAFE.issuperset(key) and key[0] not in ".-":
        return key
    return f"_{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _exit(told: list[str]) -> Exit:
    code, signal, reason, clock, lag, took, times, peak, strays, detail = told
    started = float(clock) - int(lag) / 100
    return Exit(
        code=None if code == "-" else int(code),
        signal=None if signal == "-" else int(signal),
        reason=reason,  # type: ignore[arg-type]  # our own script's words
        started=started,
        ended=started + max(0, int(took)) / 100,
        cpu=sum(map(_seconds, times.split("+"))),
        peak_memory=int(peak) << 10,
        strays=int(strays),
        detail=detail.removesuffix(".").strip(),
    )


def _seconds(text: str) -> float:
    """`0m0.012s`, as the shell's `times` says it."""
    minutes, _, seconds = text.rstrip("s").rpartition("m")
    return int(minutes or 0) * 60 + float(seconds)


def _refused(words: str) -> DriverError:
    full = ("Permission denied", "No space left on device", "Read-only file system", "Disk quota exceeded")
    return Denied(words) if any(word in words for word in full) else Rejected(words)
