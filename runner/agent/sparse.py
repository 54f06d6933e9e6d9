"""Files with holes: copied with them, and written with holes where zeros come.

So a file takes no more of a disk than it did where it was made."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 1 << 20
LEAST = 4096
"""Bytes of zeros from which on a hole is left: what file systems allocate at once."""
_ZEROS = bytes(BLOCK)
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of a file system that does not copy by itself."""


def copy(source: int, target: int, size: int) -> None:
    """Give the new, empty file `target` the first `size` bytes of another; by the file system alone, where that can.  Raises OSError.

    Of a source that is shorter, it has what there is.
    """
    size = min(size, os.fstat(source).st_size)
    at_once = hasattr(os, "copy_file_range")  # not on macOS
    for begin, end in runs_of_data(source, size):
        at = begin
        while at_once and at < end:
            try:
                got = os.copy_file_range(source, target, end - at, at, at)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                at_once = False
                break
            if not got:
                break
            at += got
        os.lseek(target, at, os.SEEK_SET)
        while at < end and (data := os.pread(source, min(BLOCK, end - at), at)):
            write(target, data)
            at += len(data)
    os.ftruncate(target, size)


def runs_of_data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where there is data in the first `size` bytes of a file: begin and end of each run."""
    if os.fstat(fd).st_blocks * 512 >= size:
        if size:
            yield 0, size
        return
    end = 0
    while end < size:
        begin = _seek(fd, end, "SEEK_DATA", size)
        if begin >= size:
            return
        end = _seek(fd, begin, "SEEK_HOLE", size)
        yield begin, end


def write(fd: int, data: bytes | memoryview) -> None:
    """Write all of it where the file stands; leave a hole for blocks of zeros where nothing is yet.  `extend` makes a hole at the end count."""
    view = memoryview(data)
    while view:
        block = view[:BLOCK]
        if len(block) >= LEAST and is_zero(block) and _is_hole(fd, len(block)):
            done = len(block)
            os.lseek(fd, done, os.SEEK_CUR)
        else:
            done = os.write(fd, block)
        view = view[done:]


def extend(fd: int, size: int) -> None:
    """Have a file at least `size` bytes.  Others may write to it at the same time: it is never cut."""
    if os.fstat(fd).st_size < size:
        os.pwrite(fd, b"\0", size - 1)


def is_zero(data: bytes | memoryview) -> bool:
    """Whether it is nothing but zeros."""
    if data and (data[0] or data[-1]):
        return False
    blocks = (bytes(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return all(block == _ZEROS[: len(block)] for block in blocks)


def _is_hole(fd: int, size: int) -> bool:
    """Whether there is no data in the next bytes of a file: what stands there from before must be written over."""
    at = os.lseek(fd, 0, os.SEEK_CUR)
    if at >= os.fstat(fd).st_size:
        return True
    begin = _seek(fd, at, "SEEK_DATA", at + size)
    os.lseek(fd, at, os.SEEK_SET)
    return begin >= at + size


def _seek(fd: int, start: int, whence: str, last: int) -> int:
    """Where data, or a hole, begins from `start` on: at `last` where there is none before.  A system that cannot tell has data everywhere."""
    if not hasattr(os, whence):
        return start if whence == "SEEK_DATA" else last
    try:
        return min(os.lseek(fd, start, getattr(os, whence)), last)
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is nothing but a hole
            return start if whence == "SEEK_DATA" else last
        return last
