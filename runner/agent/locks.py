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


PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  # the owner of what is there is checked
"""Folders in which every login can make one of its own, and none can remove that of another."""


def _lock_folder() -> str:
    """Return the folder of the locks of this login.  Raises PermissionError if it can have none.

    Somebody else may have taken its name in one place; every agent of this login then takes the
    same next one. Not below `$XDG_RUNTIME_DIR`, which one login may have in one session and not in
    the next, and which goes with the last session.
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
        13, "one must be a folder of this login that no other may enter", ", ".join(taken)
    )


def _own_folder(path: str) -> None:
    """Make a folder that only this login may enter.  Raises PermissionError if one is there that others may."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        there = os.stat(path, follow_symlinks=False)
        if there.st_uid != os.geteuid() or there.st_mode & 0o170077 != 0o040000:
            raise PermissionError(13, "another login may enter it", path) from None
