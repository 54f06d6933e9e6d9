"""One job that is not over yet, and the signals that end one."""

from __future__ import annotations

import time

SIGKILL, SIGTERM, SIGCONT = 9, 15, 18


class Job:
    """What the agent knows of a job.  Times are in seconds: `started`, `ended` since the epoch, the others of the monotonic clock."""

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
        self.pid = 0  # 0: its first process is gone, or never was ours
        self.session = 0
        self.termed = False  # its group has been asked to end
        self.orphaned = False  # its parent was an agent that is dead
        self.outlives = False  # it runs below a shell that writes its exit down
        self.slot = -1
        self.started = 0.0
        self.ended = 0.0
        self.deadline: float | None = None
        self.idle: float | None = None
        self.idle_at: float | None = None
        self.kill_at: float | None = None
        self.killed = False  # no patience left: whatever appears now gets SIGKILL
        self.reason = b""
        self.detail = b""
        self.code: int | None = None
        self.signal: int | None = None
        self.cpu = 0.0
        self.peak = 0
        self.strays: set[int] = set()
        self.held: list[int] = []  # descriptors of its locks
        self.word = time.monotonic()  # when a client that began it or asked after it was heard last
        self.sampled = (
            b"",
            b"",
            b"",
        )  # for the sampler: the names of its locks, of how many steps it is, its PATH


def signal_of(code: int) -> int | None:
    """The signal that ended a command, as its shell reports it."""
    return code - 128 if 128 < code <= 128 + 64 else None
