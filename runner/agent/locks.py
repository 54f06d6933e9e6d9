"""Locks of jobs. On a machine, one job of a user holds a name, whichever agent started the job.

The lock is held while any process of the job lives.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def take_locks(names: Iterable[str]) -> list[int] | None:
    """Lock these names and return the descriptors, or None if another process holds a name.

    Raises OSError.
    """
    held: list[int] = []
    # Sorted, so that of two jobs with the same locks, one gets all of them.
    for name in sorted(names):
        fd = _lock(name, shared=False)
        if fd is None:
            for other in held:
                os.close(other)
            return None
        held.append(fd)
    return held


def free_locks(names: Iterable[str]) -> list[str]:
    """Return the lock names that no process holds. Raises OSError."""
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
            os.utime(fd)  # cleaners of /tmp spare new files
            if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                # A high number, which no script's `exec 3>` replaces.
                return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
        except BlockingIOError:
            return None
        except FileNotFoundError:
            continue  # deleted in the meantime
        finally:
            os.close(fd)


PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  # owners are checked
"""Directories in which each user can create a subdirectory that other users cannot delete."""


def _lock_folder() -> str:
    """Return the lock directory of this user. Raises PermissionError if none can be created.

    If another user owns the name in one directory, all agents of this user use the same next
    directory. `$XDG_RUNTIME_DIR` is unsuitable, because not all sessions of a user have it, and it
    is deleted after the last session.
    """
    taken = []
    for place in PLACES:
        folder = f"{place}/recipe-{os.geteuid()}"
        try:
            _own_folder(folder)
            _own_folder(f"{folder}/gpus")
        except (PermissionError, FileNotFoundError):
            taken.append(folder)
        else:
            return f"{folder}/gpus"
    raise PermissionError(
        13, "at least one of these must be a private directory of this user", ", ".join(taken)
    )


def _own_folder(path: str) -> None:
    """Create a private directory.

    Raises PermissionError if it exists and other users may enter it.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        there = os.stat(path, follow_symlinks=False)
        if there.st_uid != os.geteuid() or there.st_mode & 0o170077 != 0o040000:
            raise PermissionError(13, "the directory is accessible to other users", path) from None
