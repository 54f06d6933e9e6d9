"""A running job, and the signals that end it."""

from __future__ import annotations

import time

SIGKILL, SIGTERM, SIGCONT = 9, 15, 18


class Job:
    """State of a job.

    `started` and `ended` are seconds since the epoch, other times are monotonic.
    """

    __slots__ = (
        *(
            "code",
            "cpu",
            "deadline",
            "detail",
            "ended",
            "held",
            "idle",
            "idle_at",
            "kill_at",
            "killed",
            "log",
            "name",
            "orphaned",
            "outlives",
        ),
        *(
            "peak",
            "pid",
            "reason",
            "session",
            "signal",
            "slot",
            "started",
            "strays",
            "termed",
            "sampled",
            "word",
        ),
    )

    def __init__(self, name: bytes, log: bytes) -> None:
        self.name = name
        self.log = log
        self.pid = 0  # 0: the first process has ended, or was started by another agent
        self.session = 0
        self.termed = False  # SIGTERM was sent to its process group
        self.orphaned = False  # started by an agent that was killed
        self.outlives = False  # runs below a shell that records its exit status
        self.slot = -1
        self.started = 0.0
        self.ended = 0.0
        self.deadline: float | None = None
        self.idle: float | None = None
        self.idle_at: float | None = None
        self.kill_at: float | None = None
        self.killed = False  # SIGKILL is sent to all remaining processes
        self.reason = b""
        self.detail = b""
        self.code: int | None = None
        self.signal: int | None = None
        self.cpu = 0.0
        self.peak = 0
        self.strays: set[int] = set()
        self.held: list[int] = []  # descriptors that hold its locks
        self.word = time.monotonic()  # last sign of life of a client of this job
        self.sampled = b"", b"", b""  # for the sampler: names of locks, total steps, PATH


def signal_of(code: int) -> int | None:
    """Return the signal number in a shell's exit code (128 + signal), or None."""
    return code - 128 if 128 < code <= 128 + 64 else None
