"""Results of an attempt apart from its outputs: exit message, log and metrics."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from drivers.base import Exit

from ...agent.regular import is_regular, open_regular
from ...hosts.place.host_task import replaced_message
from ...hosts.place.spare_dirs import SparePool
from ...planning.fingerprint import World
from ...planning.step import MetricsSpec, StepSpec
from ...secrets import Masker, StreamMasker
from ...storage import metrics
from ...storage.content.disk import delete_whole
from ...storage.records import links

TAIL = 8 << 10
NOTHING_LEFT = 16 << 10
"""Minimum free bytes of a disk; below, logs cannot grow and the disk counts as full."""
_MEANT = {
    126: "the program is not executable",
    127: "program not found",
    137: "the program was killed (SIGKILL), possibly out of memory",
}
LOG_CAP = 64 << 20
"""Maximum size of a stored log in bytes; a longer log loses its middle, with a note."""


def reason_of(exit: Exit) -> str:
    """Return the exit reason in one word."""
    return exit.reason if exit.reason != "exit" or exit.signal is None else "signal"


def describe_exit(exit: Exit, spec: StepSpec, image: str, tail: bytes) -> str:
    """Describe in words why an attempt's command exited.

    `image` is its container image, or "". If the container engine failed, the description comes
    from the end of the log.
    """
    if image:
        from ...hosts.containers import explain

        if words := explain(exit, tail, image):
            return words
    if exit.reason == "timeout":
        return f"ran longer than {spec.options.timeout:g} s and was stopped"
    if exit.reason == "idle":
        return f"had no output for {spec.options.idle_timeout:g} s and was stopped"
    if exit.reason == "oom":
        return "killed by the kernel: out of memory (SIGKILL)"
    if exit.reason == "stopped":
        return "stopped"
    if exit.reason == "lost":
        return "the exit status is unknown: the agent was killed"
    if exit.signal is not None:
        try:
            name = signal.Signals(exit.signal).name
        except ValueError:
            name = f"signal {exit.signal}"
        return f"killed by {name}" + (
            ", possibly out of memory" if exit.signal == signal.SIGKILL else ""
        )
    if exit.code in _MEANT:
        return f"exit {exit.code}: {_MEANT[exit.code]}"
    return f"exit {exit.code}"


def describe_full_disk(said: bytes, room: tuple[int, int | None], host: str) -> str:
    """Describe a full disk, if the command reported one or if no space is left; otherwise "".

    `room` is the free bytes and inodes, `host` the name of another host.
    """
    free, inodes = room
    says_full = (
        os.strerror(errno.ENOSPC).encode() in said or os.strerror(errno.EDQUOT).encode() in said
    )
    if not says_full and free > NOTHING_LEFT and inodes != 0:
        return ""
    left = (
        f"{free} bytes are free" if inodes is None else f"{free} bytes and {inodes} inodes are free"
    )
    return f"no space left on a disk{f' of {host}' if host else ''} ({left} for attempts)"


def read_tail(path: str, masker: Masker) -> bytes:
    """Read the end of a log, with secrets masked; return b"" if there is no log."""
    try:
        with open_regular(path) as file:
            stream = _masking_stream(file, max(0, os.fstat(file.fileno()).st_size - TAIL), masker)
            return stream.feed(file.read()) + stream.end()
    except OSError:
        return b""


def read_head_and_tail(path: str, masker: Masker) -> bytes:
    """Read the start and the end of a log, with secrets masked; return b"" if there is no log.

    Experiment trackers print their links there.
    """
    try:
        with open_regular(path) as file:
            stream, size = masker.stream(), os.fstat(file.fileno()).st_size
            head = stream.feed(file.read(links.HEAD)) + (
                stream.end() if size <= links.HEAD else b"\n"
            )
            return head if size <= links.HEAD else head + read_tail(path, masker)
    except OSError:
        return b""


def without_launcher(tail: bytes) -> bytes:
    """Remove the traceback of the `accelerate` launcher from the end of a log.

    It follows the error of the launched program and adds only that the program failed.
    """
    # Compiled only after a failure, because compiling takes longer than many runs.
    launcher = re.compile(
        rb'^Traceback \(most recent call last\):\n(?:  .*\n)*?  File "[^"\n]*/accelerate/commands/launch\.py".*\n(?:  .*\n)*'
        rb"(?:subprocess\.CalledProcessError: |torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError: )(?s:.*)",
        re.MULTILINE,
    )
    return launcher.sub(b"", tail)


def is_executable(path: Path) -> bool:
    """Return True if the mode of the file has an execute bit, even on a noexec disk."""
    try:
        return path.is_file() and bool(path.stat().st_mode & 0o111)
    except OSError:
        return False


def remove_replaced(attempt: str, logs: Sequence[str]) -> list[str]:
    """Delete log, metrics and host files that the step replaced by a pipe, device or directory.

    A later reader would wait forever. Returns a message for each deleted file.
    """
    metrics_file = f"{attempt}.metrics"
    losses = {metrics_file: "$RECIPE_METRICS", **dict.fromkeys(logs, "its log")}
    losses[f"{attempt}.host"] = "the record of its machine"
    removed = []
    for path, name in losses.items():
        if not os.path.lexists(path) or is_regular(path):
            continue
        delete_whole(Path(path))
        removed.append(replaced_message(name))
    return removed


def copy_log(log: str, measured: str, kept: str, masker: Masker) -> str:
    """Copy or link the log, metrics and host files of an attempt to `kept`, with secrets masked.

    The originals remain. Returns the path of the copied log, or "" if the log is empty.
    """
    for source in (measured, _host_file(log)):
        if source and os.path.exists(source):
            _copy_or_link(source, f"{kept}{os.path.splitext(source)[1]}", masker, 0)
    try:
        size = os.stat(log).st_size
    except OSError:
        return ""
    if size == 0:
        return ""
    _copy_or_link(log, f"{kept}.log", masker, size)
    return f"{kept}.log"


def _copy_or_link(source: str, target: str, masker: Masker, size: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if not masker and size <= LOG_CAP:
        try:
            _link(source, target)
            return
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
    with contextlib.suppress(FileNotFoundError):  # a killed worker may have linked the source here
        os.unlink(target)
    _copy_masked(source, target, masker, size)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:  # kept by a killed worker of this run, but not recorded
        os.unlink(target)
        os.link(source, target)


def preimage_of(spec: StepSpec, world: World) -> dict[str, object]:
    """Return the cache key content of an attempt, in its stored form.

    The metrics rule is included if the key does not contain it.
    """
    rule = (
        {"metrics": list(spec.metrics)}
        if spec.metrics is not None and not spec.metrics.in_environment
        else {}
    )
    return {"author": spec.author, "world": world, **rule}


def append_to_log(log: str, text: str) -> None:
    """Append a message from recipe to an attempt's log."""
    with open(log, "ab") as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def discard_log(log: str, measured: str, scrap: SparePool) -> None:
    """Delete the original log, metrics and host files of an attempt after they were stored."""
    with contextlib.suppress(FileNotFoundError):
        if os.stat(log).st_size:
            os.unlink(log)
        else:
            scrap.add_log(log)
    for source in (measured, _host_file(log)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(source)


def _host_file(log: str) -> str:
    """Return the path of the file with the agent's measurements of the host."""
    return f"{log.removesuffix('.log')}.host"


def read_metrics(attempt: str, log: str, how: MetricsSpec | None, masker: Masker) -> dict[str, Any]:
    """Read the metrics of an attempt, with secrets masked.

    They come from files that match a pattern, from lines of the log, or from the RECIPE_METRICS
    file.
    """
    if how is None:
        return {}
    file, pattern = how
    values: dict[str, Any] = {}
    if pattern:
        values = metrics.match(Path(log), pattern, masker)
    elif file:
        for path in sorted(path for path in Path(attempt).glob(file) if path.is_file()):
            values |= metrics.read(path)
    else:
        values = metrics.read(Path(attempt + ".metrics"))
    return dict(masker.value(values))


def explain_no_metrics(attempt: str, how: MetricsSpec) -> str:
    """Return a warning for an attempt whose metrics have no values.

    Empty if the step simply reported none: its $RECIPE_METRICS file is empty or has warnings only.
    """
    if how.pattern:
        return f"no metrics: the pattern `{how.pattern}` matches no line of the log"
    if how.file and not any(path.is_file() for path in Path(attempt).glob(how.file)):
        return f"no metrics: there is no file `{how.file}`"
    if how.file:
        return f"no metrics: `{how.file}` has no line that is a JSON object with numbers"
    reported = Path(attempt + ".metrics")
    is_silent = not reported.exists() or not reported.stat().st_size
    if is_silent or read_warnings(attempt, how, Masker()):
        return ""
    return "no metrics: no line in $RECIPE_METRICS is a JSON object with numbers"


def read_warnings(attempt: str, how: MetricsSpec | None, masker: Masker) -> list[str]:
    """Read the warnings that a step wrote to its RECIPE_METRICS file."""
    if how is None or not how.in_environment:
        return []
    return metrics.warnings(Path(attempt + ".metrics"), masker)


def _copy_masked(source: str, target: str, masker: Masker, size: int) -> None:
    with open_regular(source) as origin, open(target, "wb") as kept:
        stream = masker.stream()
        if size > LOG_CAP:
            left = LOG_CAP // 2
            while left > 0 and (data := origin.read(min(1 << 20, left))):
                left -= len(data)
                kept.write(stream.feed(data))
            # The stream may hold back the beginning of a secret; it is dropped, too.
            kept.write(f"\n… {size - LOG_CAP} bytes dropped …\n".encode())
            stream = _masking_stream(origin, size - LOG_CAP // 2, masker)
        while data := origin.read(1 << 20):
            kept.write(stream.feed(data))
        kept.write(stream.end())


def _masking_stream(file: BinaryIO, start: int, masker: Masker) -> StreamMasker:
    """Return a secret-masking stream for the rest of a file from position `start`.

    The stream has read the bytes before. A secret that crosses `start` is masked, too.
    """
    stream = masker.stream()
    file.seek(max(0, start - masker.margin))
    stream.feed(file.read(start - file.tell()))
    return stream
