"""This machine as a driver: nothing to rent, and one host."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from .base import (
    NOTHING,
    Argv,
    Denied,
    HostLost,
    Lease,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unreachable,
    Wish,
    file_name,
)


class Local:
    """This machine.  `root` is the directory, ours alone, where the agent and the logs of its jobs live."""

    traits = Traits(replays=True, comes_up=timedelta(0))

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._host = LocalHost(self._root)

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        from . import machine

        have = await _machine(self._root)
        return (Offer("local", "local", have),) if machine.enough(have, wish) else ()

    async def acquire(self, order: Order) -> Lease:
        lease = Lease("local", file_name(order.key), order.key)
        with _translated(self._root):
            _make_private(self._root / "leases")
            (self._root / "leases" / lease.id).write_text(order.key, encoding="utf-8")
        return lease

    async def hosts(self, lease: Lease) -> Sequence[LocalHost] | None:
        if not (self._root / "leases" / lease.id).exists():
            raise HostLost(f'the lease "{lease.key}" of this machine was given back')
        return (self._host,)

    async def release(self, lease: Lease) -> bool:
        with _translated(self._root):
            (self._root / "leases" / lease.id).unlink(missing_ok=True)
        return True

    async def leases(self) -> Sequence[Lease]:
        with _translated(self._root), suppress(FileNotFoundError):
            return [Lease("local", path.name, path.read_text(encoding="utf-8")) for path in sorted((self._root / "leases").iterdir())]
        return ()


class LocalHost:
    """This machine.  `root` is a folder of ours."""

    def __init__(self, root: Path) -> None:
        self.root = str(root.absolute())
        self.python = sys.executable
        self.deadman: float | None = None

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        from . import calls

        return calls.call(argv, stdin, {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"})

    async def aclose(self) -> None:
        """There is no connection."""


def _make_private(directory: Path) -> None:
    """What is below may hold secrets that a step printed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.parent.chmod(0o700)
    directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _translated(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _foreign(error, root) from error


def _foreign(error: OSError, root: Path) -> Denied | Unreachable:
    words = f"{error.filename or root}: {error.strerror or error}"
    return Denied(words) if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR) else Unreachable(words)


async def _machine(root: Path) -> Resources:
    names, sizes = await _gpus()
    return Resources(
        cpus=float(len(os.sched_getaffinity(0))),
        memory=_memory(),
        gpus=len(names),
        gpu=names[0] if names else None,
        gpu_memory=min(sizes, default=None),
        disk=_free(root),
    )


def _memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path(limit).read_text()))
    return memory


def _free(root: Path) -> int:
    import shutil

    return shutil.disk_usage(next(directory for directory in (root, *root.parents) if directory.exists())).free


async def _gpus() -> tuple[list[str], list[int]]:
    """Names and bytes of memory, as the vendor's tool tells them; no tool is no GPU."""
    import shutil

    if shutil.which("nvidia-smi") is None:
        return [], []
    host = LocalHost(Path())
    try:
        told = b"".join([data async for data in host.call(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))])
    except Rejected:
        return [], []
    rows = [row.rpartition(",") for row in told.decode().splitlines() if row.strip()]
    return [name.strip() for name, _, _ in rows], [int(size) << 20 for _, _, size in rows if size.strip().isdigit()]
