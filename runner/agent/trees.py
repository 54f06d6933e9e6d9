"""Directory trees on a host: walking, copying and unpacking."""

from __future__ import annotations

import hashlib
import os
import stat

from . import sparse
from .tree_hash import kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BLOCK = 1 << 18
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def below(top: str) -> Iterator[tuple[str, str]]:
    """Yield path and file type of all entries below a directory, directories before their content.

    Raises OSError.
    """
    for path, found in walk(top):
        if isinstance(found, OSError):
            raise found
        yield path, kind_of(found.st_mode)


def walk(top: str) -> Iterator[tuple[str, os.stat_result | OSError]]:
    """Yield the path and `stat` result, or error, of all entries below a directory."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            items = os.scandir(f"{top}/{folder}")
        except OSError as error:
            yield folder, error
            continue
        with items:
            for item in items:
                path = f"{folder}/{item.name}" if folder else item.name
                try:
                    found = item.stat(follow_symlinks=False)
                except OSError as error:
                    yield path, error
                    continue
                yield path, found
                if stat.S_ISDIR(found.st_mode):
                    waiting.append(path)


def stamp(found: Iterable[tuple[str, str]], links: Iterable[tuple[str, str]]) -> str:
    """Return a digest of a tree's paths, file types (including directories) and link targets."""
    hasher = hashlib.sha256()
    for path, kind in sorted((os.fsencode(path), kind) for path, kind in found):
        hasher.update(kind.encode() + path + b"\0")
    for path, target in sorted((os.fsencode(path), os.fsencode(target)) for path, target in links):
        hasher.update(path + b"\0" + target + b"\0")
    return hasher.hexdigest()


def stamp_of(top: str) -> str:
    """Return the `stamp` digest of a directory on disk. Raises OSError."""
    found = list(below(top))
    return stamp(
        found, [(path, os.readlink(f"{top}/{path}")) for path, kind in found if kind == "l"]
    )


def touch(path: str) -> None:
    """Create a file, or set its modification time to now."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    os.utime(path)


def open_up(top: str) -> None:
    """Make a directory and its subdirectories writable."""
    if os.path.islink(top) or not os.path.isdir(top):
        return
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        mode = os.lstat(folder).st_mode
        if mode & 0o700 != 0o700:
            os.chmod(folder, mode & 0o7777 | 0o700)
        with os.scandir(folder) as items:
            waiting += [item.path for item in items if item.is_dir(follow_symlinks=False)]


def remove(path: str) -> None:
    """Delete a file, link or directory of any mode, if it exists. Raises OSError."""
    try:
        os.unlink(path)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path) or os.path.islink(path):
            raise
    try:
        open_up(path)
        for folder, folders, names in os.walk(path, topdown=False):
            for name in names:
                os.unlink(f"{folder}/{name}")
            for name in folders:
                under = f"{folder}/{name}"
                os.unlink(under) if os.path.islink(under) else os.rmdir(under)
        os.rmdir(path)
    except FileNotFoundError:
        remove(path)  # deleted concurrently


def newest(path: str) -> int:
    """Return the latest modification time of a path and all entries below it, in nanoseconds.

    Raises OSError.
    """
    found = os.lstat(path)
    latest = found.st_mtime_ns
    if stat.S_ISDIR(found.st_mode):
        latest = max([latest, *(os.lstat(f"{path}/{each}").st_mtime_ns for each, _ in below(path))])
    return latest


def unpack(read: Callable[[int], bytes], into: Callable[[memoryview], int], mask: int) -> list[str]:
    """Unpack a tar into the working directory, and return the digests of its files in order.

    File modes are limited by `mask`. Supported are ustar and GNU long names, as written by `tar` of
    this product. Raises OSError, and ValueError for an invalid tar.
    """
    view = memoryview(bytearray(BLOCK))
    found: list[str] = []
    long: dict[bytes, bytes] = {}
    while len(head := read(512)) == 512 and head[0]:
        kind, size = head[156:157], _number(head[124:136])
        padding = -size % 512
        if kind in (b"L", b"K"):
            long[kind] = read(size + padding)[: size - 1]
            continue
        before, last = head[345:500].rstrip(b"\0"), head[:100].rstrip(b"\0")
        name = long.pop(b"L", before + b"/" + last if before else last)
        if kind == b"5":
            os.makedirs(name, exist_ok=True)
        elif kind == b"2":
            target = long.pop(b"K", head[157:257].rstrip(b"\0"))
            try:
                os.symlink(target, name)
            except (FileExistsError, FileNotFoundError):
                _make_way(name)
                os.symlink(target, name)
        else:
            mode = int(head[100:107], 8) & mask
            try:
                fd = os.open(name, _NEW, mode)
            except (FileExistsError, FileNotFoundError):
                _make_way(name)
                fd = os.open(name, _NEW, mode)
            hasher = hashlib.sha256()
            try:
                left = size
                while left:
                    count = into(view[: min(left, BLOCK)])
                    if not count:
                        raise ValueError("the archive is truncated")
                    hasher.update(view[:count])
                    sparse.write(fd, view[:count])
                    left -= count
                sparse.extend(fd, size)
            finally:
                os.close(fd)
            found.append(hasher.hexdigest())
            read(padding)
    return found


def put(fd: int, data: memoryview | bytes) -> None:
    """Write all data to a file descriptor."""
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data) :]


def copy(source: str, target: str, most: int = 1 << 62) -> int:
    """Copy the first `most` bytes of a file to a new file, and return the mode of the source.

    The file system copies the data itself if possible. Raises OSError.
    """
    with open(source, "rb", buffering=0) as file, open(target, "xb", buffering=0) as other:
        found = os.fstat(file.fileno())
        sparse.copy(file.fileno(), other.fileno(), most)
    return found.st_mode


def copy_with_mode(source: str, target: str) -> None:
    """Copy a file with its permissions and times, for `shutil.copytree`."""
    import shutil

    copy(source, target)
    shutil.copystat(source, target)


def make_real(at: str, is_object: bool) -> bool:
    """Replace a symbolic link by the target's content. Return False if its files are still links.

    Files of an object become hard links. Other files remain links, because hard links would change
    them.
    """
    top = os.readlink(at)
    os.unlink(at)
    if not os.path.isdir(top):
        return _link(top, at, is_object)
    os.mkdir(at)
    real = True
    for path, kind in below(top):
        if kind == "d":
            os.mkdir(f"{at}/{path}")
        elif kind == "l":
            os.symlink(os.readlink(f"{top}/{path}"), f"{at}/{path}")
        else:
            real = _link(f"{top}/{path}", f"{at}/{path}", is_object) and real
    return real


def _link(source: str, target: str, is_object: bool) -> bool:
    """Create a hard link to a file of an object, or a symbolic link to another file.

    Returns False for the latter.
    """
    if is_object:
        try:
            os.link(source, target)
            return True
        except OSError:
            pass  # another file system, no hard links, or too many links
    os.symlink(source, target)
    return False


def _make_way(name: bytes) -> None:
    """Prepare a path for a new file: delete an existing file, or create the parent directory."""
    if os.path.lexists(name):
        os.unlink(name)
    else:
        os.makedirs(os.path.dirname(name), exist_ok=True)


def _number(field: bytes) -> int:
    return (
        int.from_bytes(field[1:], "big")
        if field[0] & 0x80
        else int(field.rstrip(b"\0 ") or b"0", 8)
    )
