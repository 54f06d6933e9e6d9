"""A stream to the agent of one host over `Host.call`.

The same call uploads the agent's program if it is missing.

See `agent/attach.py` for the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import os
import secrets
import zipfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast

from drivers.base import Denied, DriverError, Host, Rejected, Unreachable

from ... import agent
from ...agent.frames import BadFrame, FrameParser, frame

Part: TypeAlias = Literal["jobs", "files"]

AHEAD = 8
"""Frames in the send queue before a sender must wait."""
SMALL = 1 << 14
"""Bytes up to which several frames are sent as one write."""
PATIENCE = 60.0
"""Seconds until the program on the host must have answered."""
FAREWELL = 2.0
"""Seconds for the program on the host to exit."""
NOISE = 1 << 16
"""Bytes that a login may print before the program starts."""
PYTHONS = (
    "python3",
    *(f"python3.{minor}" for minor in range(14, 8, -1)),
    "/usr/local/bin/python3",
    "/opt/conda/bin/python3",
    "/venv/main/bin/python3",
)
"""Python interpreters to try if the configured one is missing or too old."""
OWN = "python/bin/python3"
"""Path below the root of a Python that a user may have unpacked there.  It is tried last."""
TOO_OLD = 93
"""Exit code of the loader under an old Python or another implementation than CPython.

The next interpreter is tried.
"""
_FULL = (
    "Permission denied",
    "No space left on device",
    "Read-only file system",
    "Disk quota exceeded",
    "Not a directory",
)

# A Python may be given as the directory of an environment, and may start with `~/`.
PROGRAM = r"""program() {
  case $1 in "~/"*) set -- "${HOME:-.}/${1#"~/"}" ;; esac
  for each in "$1/bin/python" "$1/bin/python3"; do
    if [ -d "$1" ] && [ -x "$each" ]; then set -- "$each"; fi
  done
  printf '%s\n' "$1"
}
"""
# $1: the root, $2: the mark, $3: the loader below, $4-$6: its arguments, then interpreters to try.
_FIND = f"""\
{PROGRAM}
PATH=$PATH:/usr/local/bin:/usr/bin:/bin
case $1 in /*) root=$1 ;; *) root=${{HOME:-.}}/$1 ;; esac
mark=$2 load=$3 digest=$4 size=$5 part=$6
shift 6
for python in "$@" "$root/{OWN}"; do
  python=$(program "$python")
  [ ! -d "$python" ] && command -v "$python" >/dev/null 2>&1 || continue
  "$python" -I -S -X utf8 -c "$load" "$root" "$mark" "$digest" "$size" "$part"
  end=$?
  [ $end = {TOO_OLD} ] || exit $end
done
printf '\\n%s python\\n' "$mark"
"""
_LOAD = f"""\
import sys
if sys.version_info < (3, 9) or sys.implementation.name != "cpython": # PyPy has no posix_spawn, pidfd_open, readv
    sys.exit({TOO_OLD})
import os
root, mark, digest, size, part = sys.argv[1:]
def say(word):
    os.write(1, ("\\n%s %s\\n" % (mark, word)).encode("utf-8", "surrogateescape"))
try:
    os.umask(0o77)
    os.makedirs(root + "/agent", exist_ok=True)
    root = os.path.realpath(root)
    program = root + "/agent/" + digest
    if not os.path.exists(program):
        say("need")
        data = bytearray()
        while len(data) < int(size):
            more = os.read(0, int(size) - len(data))
            if not more:
                break
            data += more
        import hashlib
        if hashlib.sha256(data).hexdigest() != digest:
            say("cut") # the way broke it, not the host: to be sent again
            sys.exit(0)
        import io, shutil, zipfile
        new = program + ".%d" % os.getpid()
        zipfile.ZipFile(io.BytesIO(data)).extractall(new)
        try:
            os.rename(new, program)
        except OSError:
            if not os.path.isdir(program):
                raise
            shutil.rmtree(new) # somebody else was faster
except OSError as error:
    say("no %s" % error)
    sys.exit(0)
say("here")
sys.path.insert(0, program)
from agent import attach
attach.main(root, part)
"""


class Program(NamedTuple):
    """The agent as one zip file."""

    data: bytes
    digest: str


@functools.cache
def agent_program() -> Program:
    """Return the agent of this version, always with the same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(Path(agent.__file__).parent.glob("*.py")):
            archive.writestr(
                zipfile.ZipInfo(f"agent/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED
            )
    return Program(made.getvalue(), hashlib.sha256(made.getvalue()).hexdigest())


class Stream:
    """One of the agent's two programs, running on a host.

    `root` is its absolute root directory there.
    """

    def __init__(
        self, call: AsyncGenerator[bytes, None], sent: asyncio.Queue[bytes], received: bytes
    ) -> None:
        self.root = ""
        self._call, self._sent = call, sent
        self._frames = FrameParser()
        self._payloads = deque(self._frames.feed(received))

    @classmethod
    async def open(cls, host: Host, root: str, part: Part) -> Stream:
        """Start `part` in `root`, which is created if missing; a relative root starts at the
        login's home.

        Raises the errors of `Host.call`.  The messages of Denied and Rejected say what the host
        lacks.
        """
        output, program = _LoaderOutput(secrets.token_hex(8)), agent_program()
        argv = _loader_argv(host, root, output.mark, part, program)
        sent: asyncio.Queue[bytes] = asyncio.Queue(AHEAD)
        call = cast("AsyncGenerator[bytes, None]", host.call(argv, _drain_queue(sent)))
        try:
            async with asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(call.aclose)
                received = await _wait_for_program(call, sent, output, program, root)
                stream = cls(call, sent, received)
                stream.root = os.fsdecode((await stream.receive())[1:])
                stack.pop_all()
                return stream
        except Rejected as error:
            raise _refusal(str(error)) from error
        except BadFrame as error:
            raise Unreachable("the agent's output arrived incomplete") from error
        except TimeoutError as error:
            raise Unreachable(f"cannot start the agent within {PATIENCE:g} s") from error

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send one frame; wait while the queue is full."""
        await self._sent.put(frame(*parts))

    async def finish(self) -> None:
        """Close the sending direction.

        The program on the host exits when it has read everything.
        """
        await self._sent.put(b"")

    async def receive(self) -> bytes:
        """Return the next payload.

        Raises Unreachable if the stream ended or the data is damaged, and the errors of
        `Host.call`.
        """
        while not self._payloads:
            if self._frames.broken:
                raise Unreachable("the agent's output arrived incomplete")
            try:
                self._payloads += self._frames.feed(await anext(self._call))
            except StopAsyncIteration:
                raise Unreachable("the agent exited") from None
            except Rejected as error:
                raise Unreachable(f"the agent exited: {error}") from error
            except BadFrame as error:
                raise Unreachable("the agent's output arrived incomplete") from error
        return self._payloads.popleft()

    async def aclose(self) -> None:
        """Stop the program on the host.  Jobs continue."""
        await self._call.aclose()

    async def leave(self) -> None:
        """End the idle program on the host, and wait briefly for its exit."""
        with contextlib.suppress(TimeoutError, DriverError):
            async with asyncio.timeout(FAREWELL):
                await self.finish()
                async for _ in self._call:
                    break  # no more output is expected
        await self._call.aclose()


def _loader_argv(host: Host, root: str, mark: str, part: Part, program: Program) -> tuple[str, ...]:
    """Return the command that finds a Python on the host, and loads and starts the agent."""
    pythons = dict.fromkeys(filter(None, (host.python, *PYTHONS)))
    size = str(len(program.data))
    return ("/bin/sh", "-c", _FIND, "sh", root, mark, _LOAD, program.digest, size, part, *pythons)


async def _wait_for_program(
    call: AsyncGenerator[bytes, None],
    sent: asyncio.Queue[bytes],
    output: _LoaderOutput,
    program: Program,
    root: str,
) -> bytes:
    """Wait until the agent's program runs on the host, and send the program if it is missing.

    Returns the program's first output.  Raises Denied, Rejected, Unreachable.
    """
    async for data in call:
        for word in output.feed(data):
            if word != "need":
                raise _loader_error(word, root)
            await sent.put(program.data)
        if output.rest is not None:
            return output.rest
    raise Unreachable("the host sent no valid reply")


def _loader_error(word: str, root: str) -> DriverError:
    """Return the error for a word of the loader."""
    if word == "python":
        fix = f"install Python on the host, set `python` in the driver's settings, or unpack a Python to {root}/python"
        return Denied(f"no CPython 3.9 or later on the host: {fix}")
    if word.startswith("no "):
        return _refusal(word[3:])
    if word == "cut":
        return Unreachable("the agent program was damaged in transfer")
    return Unreachable("the host sent an unexpected reply")


class _LoaderOutput:
    """Parses the loader's words in the output of a login.

    Their lines start with the random `mark`.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.rest: bytes | None = None
        """The data after the last word, `here`; None before it."""
        self._line_start = f"\n{mark} ".encode()
        self._unparsed = b""

    def feed(self, data: bytes) -> Sequence[str]:
        """Return the words that `data` completes, without `here`."""
        self._unparsed += data
        words: list[str] = []
        while self.rest is None:
            before, marked, after = self._unparsed.partition(self._line_start)
            word, ended, rest = after.partition(b"\n")
            if not ended:
                if not marked and len(before) > NOISE:
                    # Only the start of a line with the mark may matter.
                    self._unparsed = before[-len(self._line_start) :]
                break
            if word == b"here":
                self.rest = rest
            else:
                words.append(word.decode("utf-8", "surrogateescape"))
                # The end of this line may be the start of the next line with the mark.
                self._unparsed = b"\n" + rest if rest.startswith(self._line_start[1:]) else rest
        return words


async def _drain_queue(sent: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of the send queue.

    Small frames are joined: some connections delay a second small packet by 40 ms.
    """
    while data := await sent.get():
        while len(data) < SMALL and not sent.empty():
            more = sent.get_nowait()
            if not more:
                yield data
                return
            data += more
        yield data


def _refusal(message: str) -> Denied | Rejected:
    """Return Denied if a host's error message says that its disk is full or cannot be written,
    otherwise Rejected.
    """
    if any(sign in message for sign in _FULL):
        return Denied(message)
    return Rejected(message)
