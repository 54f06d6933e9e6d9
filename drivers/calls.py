"""Run a program of this machine and stream its output: the `call` of hosts that are processes here."""

from __future__ import annotations

import asyncio
import os
import tempfile
from asyncio import subprocess
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .base import NOTHING, Argv, DriverError, Rejected, Unreachable

CHUNK = 1 << 20
ENDED = (-1, -2, -9, -15)  # signals of who ends a program from outside: it did nothing wrong
SAID = 4096  # bytes of its last words


async def call(
    argv: Argv, stdin: AsyncIterable[bytes], env: Mapping[str, str], cwd: Path | None = None
) -> AsyncGenerator[bytes, None]:
    """Run the program `argv` and yield its output as it arrives.

    Raises Rejected with its stderr if it fails, and Unreachable if it was killed.  If the caller
    gives up or the input breaks off, the process group is killed, so that half of an input is never
    taken for the whole.
    """
    async with _outputs() as (written, printed, said):
        given = subprocess.DEVNULL if stdin is NOTHING else subprocess.PIPE
        making = asyncio.ensure_future(
            subprocess.create_subprocess_exec(
                *argv,
                stdin=given,
                stdout=written,
                stderr=said,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        )
        try:
            # asyncio waits for ever for a process that is given up while it begins.
            process = await asyncio.shield(making)
        except asyncio.CancelledError:
            with suppress(OSError, ValueError):
                await _end(await making)
            raise
        except (OSError, ValueError) as error:
            raise Rejected(f"cannot run {argv[0]}: {error}") from error
        written.close()
        feeding = asyncio.ensure_future(_feed(process, stdin))
        try:
            while data := await printed.read(CHUNK):
                yield data
            code = await process.wait()
            if not feeding.done():
                feeding.cancel()  # it did not want the rest
            with suppress(asyncio.CancelledError):
                await feeding
        finally:
            feeding.cancel()
            if process.returncode is None:
                await _end(process)
        if code:
            said.seek(max(0, said.seek(0, os.SEEK_END) - SAID))
            raise explain_failure(argv[0], code, said.read())


def explain_failure(program: str, code: int, said: bytes) -> DriverError:
    """Return the error of a program that ended with a code other than 0, with its last words.

    Unreachable if the program was ended from outside.
    """
    words = said.decode("utf-8", "replace").strip()
    why = f": {words}" if words else ""
    if code in ENDED:
        return Unreachable(f"{program} ended with {code}{why}")
    return Rejected(f"{program} ended with {code}{why}")


@asynccontextmanager
async def _outputs() -> AsyncIterator[tuple[BinaryIO, asyncio.StreamReader, BinaryIO]]:
    """Provide a pipe for stdout with its reader, and a temporary file for stderr.

    The file need not be read while output streams.
    """
    ours, theirs = os.pipe()
    printed = asyncio.StreamReader()
    with os.fdopen(theirs, "wb", 0) as written, tempfile.TemporaryFile() as said:
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(printed), os.fdopen(ours, "rb", 0)
        )
        try:
            yield written, printed, said
        finally:
            pipe.close()  # whatever is still in it


async def _feed(process: asyncio.subprocess.Process, stdin: AsyncIterable[bytes]) -> None:
    pipe = process.stdin
    if pipe is None:
        return
    try:
        async for data in stdin:
            pipe.write(data)
            await pipe.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # its exit code says whether that matters
    except Exception:
        _kill(process)
        raise
    finally:
        pipe.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process)
    # Its end is known when its input is closed.
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.transport.abort()
    await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
