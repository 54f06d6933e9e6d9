"""The journal: one JSON line for the start and one for the end of each job, append-only.

An incomplete last line is ignored.
"""

from __future__ import annotations

import os

from .processes import read

LIMIT = 8 << 20
"""Size in bytes above which the journal is compacted."""


def end_line(
    name: bytes,
    code: int | None,
    number: int | None,
    reason: bytes,
    started: float = 0.0,
    ended: float = 0.0,
    cpu: float = 0.0,
    peak: int = 0,
    strays: int = 0,
    detail: bytes = b"",
    printed: int = -1,
) -> bytes:
    ends = [b"null" if each is None else b"%d" % each for each in (code, number)]
    more = b""
    if detail:
        more += b', "detail": "%s"' % escape(detail)
    if printed >= 0:
        more += b', "printed": %d' % printed
    form = (
        b'{"job": "%s", "code": %s, "signal": %s, "reason": "%s", "started": %.6f, '
        b'"ended": %.6f, "cpu": %.6f, "peak_memory": %d, "strays": %d%s}\n'
    )
    return form % (name, *ends, reason, started, ended, cpu, peak, strays, more)


def escape(text: bytes, errors: str = "replace") -> bytes:
    """Escape a text for a JSON string."""
    return "".join(map(_escape_character, text.decode("utf-8", errors))).encode()


def _escape_character(character: str) -> str:
    if " " <= character <= "~" and character not in '"\\':
        return character
    number = ord(character)
    if number < 0x10000:
        return f"\\u{number:04x}"
    # Two surrogates (RFC 8259, section 7).
    return f"\\u{0xD7C0 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"


def start_line(
    now: float, name: bytes, slot: int, log: bytes, timeout: bytes, idle: bytes
) -> bytes:
    """Return the journal line for the start of a job.

    For a job with a slot, which outlives this agent, it includes the data that the next agent
    needs.
    """
    more = (
        b', "slot": %d, "log": "%s", "timeout": "%s", "idle": "%s"'
        % (slot, escape(log, "surrogateescape"), timeout, idle)
        if slot >= 0
        else b""
    )
    return b'{"job": "%s", "began": %.3f%s}\n' % (name, now, more)


def open_journal(over: dict[bytes, bytes], remembered: int) -> tuple[int, dict[bytes, bytes]]:
    """Open the agent's journal file for appending.

    Return its descriptor and the start lines of unfinished jobs.

    The last `remembered` ends are added to `over`.
    """
    try:
        data = read("journal")
    except FileNotFoundError:
        data = b""
    open_jobs: dict[bytes, bytes] = {}
    for line in data.split(b"\n")[:-1]:
        if not (line.startswith(b'{"job": "') and line.endswith(b"}")):
            continue
        name, _, rest = line[9:].partition(b'"')
        if rest.startswith(b', "began"'):
            open_jobs[name] = line
        else:
            open_jobs.pop(name, None)
            over[name] = line + b"\n"
    for name in list(over)[:-remembered]:
        del over[name]
    if len(data) > LIMIT:
        fd = os.open("journal.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(b"".join([*over.values(), *(line + b"\n" for line in open_jobs.values())]))
        os.rename("journal.new", "journal")
    fd = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if data and not data.endswith(b"\n"):
        os.write(fd, b"\n")
    # The working directory changes with every job, so relative paths must be opened before the
    # first job.
    return fd, open_jobs
