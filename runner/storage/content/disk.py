"""File system operations: copy, link, rename, delete, sync to disk, and detect changes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from ...agent import sparse
from ...errors import Corrupt
from . import files
from .files import Entry

_NETWORK = (
    *(
        "nfs",
        "cifs",
        "smb",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "gluster",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.s3fs",
    ),
    *("9p", "afs", "orangefs", "pvfs2"),
)
"""Name prefixes of network file systems."""
SYNCED = 1 << 20
"""Minimum size of files that are synced to disk before use, in bytes."""
MODE = {"f": 0o444, "x": 0o555}
"""File modes of stored objects, by kind."""
WRITABLE = 0o222
"""Write permission bits of a mode."""
MakeFile: TypeAlias = Callable[[str, str, str], object]
"""Function that creates a file from another: source, target, kind."""
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""Error codes of file systems that refuse a hard link."""
_NO_CLONE = (
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTTY,
    errno.EOPNOTSUPP,
    errno.EPERM,
)
"""Error codes of file systems that refuse a clone."""
_FICLONE = 0x40049409
"""Linux ioctl that clones a file (shared blocks)."""
_BACKDATE_NS = 2 * files.SLACK_NS  # see DigestCache.note
_count = itertools.count(1)


class Disk:
    """Creator of files and trees below `root`, or next to the replaced file."""

    def __init__(self, root: str) -> None:
        self._root = root

    def temporary(self) -> str:
        """Return a unique path in `partial/`, on the file system of the objects.

        Garbage collection deletes leftovers of dead processes.
        """
        return f"{self._root}/partial/{os.getpid()}-{time.time_ns():x}-{next(_count)}"

    def place(self, source: str, target: str) -> None:
        """Rename a file or tree, creating missing parent directories and replacing the target."""
        aside: list[str] = []
        while True:
            try:
                os.rename(source, target)
                break
            except FileNotFoundError:
                if not os.path.lexists(source) or os.path.isdir(os.path.dirname(target)):
                    raise
                os.makedirs(os.path.dirname(target), exist_ok=True)
            except OSError as error:
                if error.errno in (
                    errno.EISDIR,
                    errno.ENOTDIR,
                    errno.ENOTEMPTY,
                    errno.EEXIST,
                ) and os.path.lexists(target):
                    aside += self._set_aside(target)
                    continue
                if error.errno != errno.EXDEV:
                    raise
                near = self._beside(target)
                self._copy_across(source, near)
                unlink(source)
                source = near
        for name in aside:
            unlink(name)

    def _set_aside(self, target: str) -> list[str]:
        """Rename an existing target so that it can be replaced, and return its new name.

        The list is empty if another process was faster.
        """
        aside = f"{self._beside(target)}.old"
        try:
            if os.path.isdir(target) and not os.path.islink(target):
                os.chmod(target, 0o700)
            os.rename(target, aside)
        except FileNotFoundError:
            return []
        return [aside]

    def _beside(self, target: str) -> str:
        return f"{os.path.dirname(target)}/.recipe-{os.getpid()}-{next(_count)}"

    def _copy_across(self, source: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(source):
            self.copy_tree(files.entries(source), source, target, self.copy_file)
        else:
            mode = os.stat(source).st_mode
            self.copy_file(source, target, "x" if mode & stat.S_IXUSR else "f")
            if not mode & stat.S_IWUSR:
                os.chmod(target, stat.S_IMODE(mode))

    def copy_tree(
        self, manifest: Sequence[Entry], source: str, target: str, make_file: MakeFile
    ) -> None:
        """Copy a directory tree, with `make_file` for its files.

        Symbolic links are kept.
        """
        os.makedirs(target)
        made = {""}
        for entry in manifest:
            folder = entry.path if entry.kind == "d" else os.path.dirname(entry.path)
            if folder not in made:
                os.makedirs(f"{target}/{folder}", exist_ok=True)
                made.add(folder)
            if entry.kind == "l":
                os.symlink(entry.value, f"{target}/{entry.path}")
            elif entry.kind != "d":
                make_file(f"{source}/{entry.path}", f"{target}/{entry.path}", entry.kind)

    def copy_file(self, source: str, target: str, kind: str) -> None:
        """Copy a file's bytes to a new file."""
        with open(source, "rb", buffering=0) as origin:
            handle = create(target, kind)
            try:
                sparse.copy(origin.fileno(), handle, os.fstat(origin.fileno()).st_size)
                _backdate(handle)
            finally:
                os.close(handle)

    def link_file(self, source: str, target: str, kind: str) -> None:
        """Create a hard link, or a copy if the file system refuses hard links."""
        if not link(source, target):
            self.copy_file(source, target, kind)

    def clone_file(self, source: str, target: str, kind: str) -> None:
        """Clone a file, so that both share their disk blocks until one changes.

        Raises OSError.
        """
        if sys.platform == "darwin":
            _clone_on_apfs(source, target)
            os.chmod(target, 0o755 if kind == "x" else 0o644)
            os.utime(target, ns=backdated_times())
            return
        with open(source, "rb", buffering=0) as origin:
            handle = create(target, kind)
            try:
                fcntl.ioctl(handle, _FICLONE, origin.fileno())
                _backdate(handle)
            finally:
                os.close(handle)

    def clones(self, source: str) -> bool:
        """Return True if the file can be cloned to the object store."""
        trial = self.temporary()
        try:
            self.clone_file(source, trial, "f")
        except OSError as error:
            if error.errno not in _NO_CLONE:
                raise
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(trial)
        return True


def link(source: str, target: str) -> bool:
    """Create a hard link and missing parent directories.

    Returns False if the file system refuses the link.
    """
    while True:
        try:
            os.link(source, target)
            return True
        except FileNotFoundError:
            if not os.path.lexists(source) or os.path.isdir(os.path.dirname(target)):
                raise
            os.makedirs(os.path.dirname(target))
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False


def _clone_on_apfs(source: str, target: str) -> None:
    """Clone a file with macOS `clonefile`, which Python lacks.

    Raises OSError.
    """
    import ctypes

    system = ctypes.CDLL(None, use_errno=True)
    if system.clonefile(os.fsencode(source), os.fsencode(target), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def delete(path: Path) -> None:
    """Delete a file or tree if it exists, even a read-only one."""
    try:
        unlink(str(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        fail(str(path), error)


def delete_whole(path: Path) -> None:
    """Delete a file or tree after renaming it.

    An interrupted deletion then leaves no partial tree under the original name.
    """
    gone = path.with_name(f"{path.name}.gone")
    delete(gone)
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
    delete(gone)


def overwrite(path: str, data: bytes, mode: int = 0o644) -> os.stat_result:
    """Overwrite an existing file with `data`, without truncating it first.

    File systems flush a truncated file at once.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except PermissionError:  # the file was an input, which is read-only
        os.chmod(path, 0o600)
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, data)
        found = os.fstat(handle)
        if found.st_size != len(data):
            os.ftruncate(handle, len(data))
            found = os.fstat(handle)
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(handle, mode)
        return found
    finally:
        os.close(handle)


def sync_one(path: str) -> None:
    """Sync a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(name: str) -> None:
    """Sync large files and all directories below a path to disk."""
    for path, found in below(name):
        if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size >= SYNCED):
            sync_one(path)


def unlink(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    folders = []
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        folders.append(folder)
        os.chmod(folder, 0o700)
        waiting.extend(f"{folder}/{name}" for name in _unlink_files(folder))
    for folder in reversed(folders):
        os.rmdir(folder)


def _unlink_files(folder: str) -> list[str]:
    """Delete all files directly in a directory, and return the names of its subdirectories.

    In the order of names, in which recipe creates files, ext4 deletes 100,000 hard links 30 %
    faster than in the order of the directory.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(handle) as items:
            found = sorted((item.name, item.is_dir(follow_symlinks=False)) for item in items)
        for name, is_dir in found:
            if not is_dir:
                os.unlink(name, dir_fd=handle)
    finally:
        os.close(handle)
    return [name for name, is_dir in found if is_dir]


def create(path: str, kind: str) -> int:
    while True:
        try:
            return os.open(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o777 if kind == "x" else 0o666,
            )
        except FileNotFoundError:
            folder = os.path.dirname(path)
            if os.path.isdir(folder):
                raise
            os.makedirs(folder, exist_ok=True)


def write(path: str, data: bytes | memoryview, kind: str) -> None:
    handle = create(path, kind)
    try:
        pour(handle, data)
        _backdate(handle)
    finally:
        os.close(handle)


def pour(handle: int, data: bytes | memoryview) -> None:
    """Write all bytes to a file descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _backdate(handle: int) -> None:
    os.utime(handle, ns=backdated_times())


def backdated_times() -> tuple[int, int]:
    """Return access and modification times in nanoseconds for a new file written by recipe.

    The mtime is in the recent past.
    """
    now = time.time_ns()
    mtime = now - _BACKDATE_NS
    return now, mtime + 1 if mtime % 1_000_000 == 0 else mtime


def below(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a path and all paths below it, directories before their contents."""
    waiting = [path]
    while waiting:
        name = waiting.pop()
        found = os.lstat(name)
        yield name, found
        if stat.S_ISDIR(found.st_mode):
            waiting.extend(f"{name}/{item}" for item in os.listdir(name))


def alone(name: str, device: int) -> bool:
    """Return True if a path is on the device `device`, and its files have no other hard links.

    Return False for a symbolic link.
    """
    if os.path.islink(name):
        return False
    for _, found in below(name):
        if found.st_dev != device:
            return False
        if stat.S_ISREG(found.st_mode) and found.st_nlink != 1:
            return False
    return True


def protect(name: str) -> None:
    for path, found in below(name):
        if stat.S_ISREG(found.st_mode):
            os.chmod(path, MODE["x" if found.st_mode & stat.S_IXUSR else "f"])
        # the top directory must stay writable for the rename
        elif stat.S_ISDIR(found.st_mode) and path != name:
            os.chmod(path, MODE["x"])


def total(path: str | Path) -> int:
    """Return the size in bytes of a file or of all files in a directory.

    Return 0 if missing or unreadable.
    """
    try:
        return sum(found.st_size for _, found in below(str(path)) if stat.S_ISREG(found.st_mode))
    except OSError:
        return 0


def mark(name: str, *, moves: bool = False) -> tuple[int, str]:
    """Return the size in bytes and a status fingerprint of a file or tree, to detect changes.

    The fingerprint is empty if nothing exists.

    A symbolic link is identified by its inode, a read-only file also by its mode, and other files
    by their ctime. Hard links for attempts change a read-only file's ctime. With `moves`, the
    fingerprint survives chmod and rename.
    """
    size, marks = 0, []
    try:
        for path, found in below(name):
            if not stat.S_ISDIR(found.st_mode):
                size += found.st_size
                last = "0" if moves else _last(found)
                marks.append(
                    f"{path[len(name) :]}\0{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{last}"
                )
            else:
                marks.append(path[len(name) :])
    except FileNotFoundError:
        return 0, ""
    if len(marks) == 1 and "\0" in marks[0]:
        return size, marks[0][1:]
    return size, hashlib.sha256(
        "\n".join(sorted(marks)).encode("utf-8", "surrogateescape")
    ).hexdigest()


def _last(found: os.stat_result) -> str:
    """Return the file status, apart from size and mtime, that changes on a write."""
    if stat.S_ISLNK(found.st_mode):
        return "l"  # symbolic links cannot be written to
    if found.st_mode & WRITABLE or not stat.S_ISREG(found.st_mode):
        return str(found.st_ctime_ns)
    return f"{stat.S_IMODE(found.st_mode):o}"


def fail(path: str, error: OSError) -> NoReturn:
    raise files.no_space(error, str(error.filename or path)) from error


def raise_changed(path: str) -> NoReturn:
    raise Corrupt(
        f"{path} changed while recipe stored it",
        fix="do not modify the file during a run, and run again",
    )


def file_system(folder: Path) -> tuple[str, bool]:
    """Return the file system type of a directory, and whether it is a network file system.

    The directory must exist. Locks and SQLite are unsafe on network file systems.
    """
    path = os.path.realpath(folder)
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return kind, False
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(
            best
        ):  # the last of several stacked mounts
            best, kind = point, after.split()[0]
    return kind, kind.startswith(_NETWORK)
