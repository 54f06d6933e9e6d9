"""Locks that jobs hold: a name is held by one job of this login on this machine, whatever agent began it, while any process of the job lives."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def take_locks(names: Iterable[str]) -> list[int] | None:
    """Descriptors that hold all these locks; None where another process holds one.  Raises OSError."""
    held: list[int] = []
    for name in sorted(
        names
    ):  # in one order: of two jobs that want the same several locks, one gets them
        fd = _lock(name, shared=False)
        if fd is None:
            for other in held:
                os.close(other)
            return None
        held.append(fd)
    return held


def free_locks(names: Iterable[str]) -> list[str]:
    """Those that no process holds.  Raises OSError."""
    free = []
    for name in names:
        fd = _lock(name, shared=True)
        if fd is not None:
            os.close(fd)
            free.append(name)
    return free


def _lock(name: str, *, shared: bool) -> int | None:
    import fcntl

    path = f"{_lock_folder()}/{name}.lock"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            os.utime(fd)  # programs that clean /tmp leave new files
            if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                return fcntl.fcntl(
                    fd, fcntl.F_DUPFD_CLOEXEC, 64
                )  # a number that no script's `exec 3>` replaces
        except BlockingIOError:
            return None
        except FileNotFoundError:
            continue  # removed meanwhile
        finally:
            os.close(fd)


def _lock_folder() -> str:
    """Where the locks of this login are.  Raises PermissionError where the folder is not its own.

    Not below `$XDG_RUNTIME_DIR`, which one login may have in one session and not in the next, and which goes with the last session.
    """
    folder = f"/tmp/recipe-{os.geteuid()}"  # noqa: S108  # the owner is checked
    for path in (folder, f"{folder}/gpus"):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            there = os.stat(path, follow_symlinks=False)
            if there.st_uid != os.geteuid() or there.st_mode & 0o170077 != 0o040000:
                raise PermissionError(
                    13, "it must be a folder of this login's own that no other may enter", path
                ) from None
    return f"{folder}/gpus"
