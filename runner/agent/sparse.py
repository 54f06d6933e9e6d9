"""Sparse files: copying them, and writing holes in place of zeros.

Copies then take no more disk space than the original.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 1 << 20
LEAST = 4096
"""Minimum number of zero bytes for a hole, a usual block size of file systems."""
_ZEROS = bytes(BLOCK)
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of file systems that cannot copy ranges."""


def copy(source: int, target: int, size: int) -> None:
    """Copy the first `size` bytes of a file to the new, empty file `target`, with holes.

    Raises OSError.

    The file system copies the data itself if possible. A shorter source is copied completely.
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
    """Yield start and end of each data range in the first `size` bytes of a file."""
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
    """Write data at the current file position, but skip blocks of zeros where the file has a hole.

    Call `extend` afterwards to include a hole at the end.
    """
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
    """Extend a file to at least `size` bytes.

    It is never truncated, because others may write to it.
    """
    if os.fstat(fd).st_size < size:
        os.pwrite(fd, b"\0", size - 1)


def is_zero(data: bytes | memoryview) -> bool:
    """Return True if the data consists of zeros only."""
    if data and (data[0] or data[-1]):
        return False
    blocks = (bytes(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return all(block == _ZEROS[: len(block)] for block in blocks)


def _is_hole(fd: int, size: int) -> bool:
    """Return True if the next `size` bytes of a file contain no data to overwrite."""
    at = os.lseek(fd, 0, os.SEEK_CUR)
    if at >= os.fstat(fd).st_size:
        return True
    begin = _seek(fd, at, "SEEK_DATA", at + size)
    os.lseek(fd, at, os.SEEK_SET)
    return begin >= at + size


def _seek(fd: int, start: int, whence: str, last: int) -> int:
    """Return the offset of the next data or hole from `start`, at most `last`.

    If the system cannot tell, everything counts as data.
    """
    if not hasattr(os, whence):
        return start if whence == "SEEK_DATA" else last
    try:
        return min(os.lseek(fd, start, getattr(os, whence)), last)
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: only a hole follows
            return start if whence == "SEEK_DATA" else last
        return last
