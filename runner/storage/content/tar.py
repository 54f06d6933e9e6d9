"""Deterministic tar archives of trees.

The output of `tar_stream` depends only on the entries and the files' bytes. `docs/packs.md`
documents the format: ustar with GNU long names and GNU base-256 sizes, which GNU tar, bsdtar,
Python and busybox all read. busybox silently ignores pax headers and extracts wrong names.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .files import Changed, Entry

BLOCK = 512
END = bytes(2 * BLOCK)
"""End of a tar archive: two empty blocks."""

_BATCH = 1 << 20  # bytes per yielded piece
_OCTAL_MAX = 0o77777777777
_MTIME = 315532800  # 1980-01-01: GNU tar warns about 1970, and zip supports no earlier date
_PADDING = tuple(bytes(-n % BLOCK) for n in range(BLOCK))
_KIND = 0o170000 | stat.S_IXUSR
_REGULAR = {"f": stat.S_IFREG, "x": stat.S_IFREG | stat.S_IXUSR}
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def member_size(entry: Entry) -> int:
    """Return the size of a manifest entry in a tar archive in bytes, including its headers."""
    if (
        len(entry.path) <= 24 and entry.kind != "l"
    ):  # at most 97 bytes of UTF-8 and a slash, so one header block
        heads = BLOCK
    else:
        heads = len(member_header(entry))
    return heads + (entry.size + -entry.size % BLOCK if entry.kind in "fx" else 0)


def member(entry: Entry, data: bytes, *, read_only: bool = False) -> bytes:
    """Return the tar member of a small file from memory.

    An archive ends with `END`.
    """
    return member_header(entry, read_only=read_only) + data + _PADDING[len(data) % BLOCK]


def tar_stream(
    root: str | Path, entries: Iterable[Entry], *, check: bool = False
) -> Iterator[bytes]:
    """Yield a tar archive of these entries of the tree at `root`, in the given order.

    Each piece has about a mebibyte.

    Raises Changed with the file's path if a file does not match the manifest (kind, size, unchanged
    during the read, and with `check` its SHA-256). The output is then invalid.
    """
    top = os.fspath(root)
    parts: list[bytes] = []
    held = 0
    for entry in entries:
        if held >= _BATCH:
            yield b"".join(parts)
            parts, held = [], 0
        parts.append(member_header(entry))
        held += BLOCK
        if entry.kind not in _REGULAR:
            continue
        path, size = f"{top}/{entry.path}", entry.size
        try:
            handle = os.open(path, _READ)
            try:
                before = os.fstat(handle)
                if before.st_size != size or before.st_mode & _KIND != _REGULAR[entry.kind]:
                    raise Changed(path)
                hasher, left = hashlib.sha256(), size
                while left:
                    data = os.read(handle, min(left, _BATCH))
                    if not data:
                        raise Changed(path)
                    if check:
                        hasher.update(data)
                    left -= len(data)
                    held += len(data)
                    parts.append(data)
                    if left:
                        yield b"".join(parts)
                        parts, held = [], 0
                after = os.fstat(handle)
                same = (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == (
                    size,
                    before.st_mtime_ns,
                    before.st_ctime_ns,
                )
                if not same or (check and hasher.hexdigest() != entry.value):
                    raise Changed(path)
            finally:
                os.close(handle)
        except OSError as error:
            raise Changed(path, f"cannot be read any more: {error.strerror}") from error
        parts.append(_PADDING[size % BLOCK])
    yield b"".join((*parts, END))


_TYPES = {"f": b"0", "x": b"0", "l": b"2", "d": b"5", "L": b"L", "K": b"K"}
_MODES = {"x": b"0000755\0", "d": b"0000755\0", "l": b"0000777\0"}
_OWNERS = b"0000000\0" * 2
_HEADS = {kind: _MODES.get(kind, b"0000644\0") + _OWNERS for kind in _TYPES}
_READ_ONLY_HEADS = _HEADS | {"f": b"0000444\0" + _OWNERS, "x": b"0000555\0" + _OWNERS}
_TIME = b"%011o\0" % _MTIME
_MAGIC = b"ustar\x0000" + bytes(64) + b"0000000\0" * 2


def member_header(entry: Entry, *, read_only: bool = False) -> bytes:
    """Return the tar header blocks of a manifest entry."""
    path, kind, size, value = entry
    name = path.encode("utf-8", "surrogateescape")
    link = b""
    if kind == "d":
        name += b"/"
        size = 0
    elif kind == "l":
        link = value.encode("utf-8", "surrogateescape")
        size = 0
    before = b""
    prefix = b""
    if len(link) > 100:
        before = _long("K", link)
        link = link[:100]
    if len(name) > 100:
        prefix, name, fits = _split(name)
        if not fits:
            before += _long("L", name)
            name = name[:100]
    heads = _READ_ONLY_HEADS if read_only else _HEADS
    return before + _block(name, kind, size, link, prefix, heads=heads)


def _split(name: bytes) -> tuple[bytes, bytes, bool]:
    """Split a long path into tar prefix and name; the flag is False if it does not fit."""
    at = name.rfind(b"/", 0, 156)
    if at > 0 and 0 < len(name) - at - 1 <= 100:
        return name[:at], name[at + 1 :], True
    return b"", name, False


def _long(kind: str, text: bytes) -> bytes:
    text += b"\0"
    return _block(b"././@LongLink", kind, len(text)) + text + _PADDING[len(text) % BLOCK]


def _block(
    name: bytes,
    kind: str,
    size: int,
    link: bytes = b"",
    prefix: bytes = b"",
    *,
    heads: Mapping[str, bytes] = _HEADS,
) -> bytes:
    length = b"%011o\0" % size if size <= _OCTAL_MAX else (size | 1 << 95).to_bytes(12, "big")
    head = name.ljust(100, b"\0") + heads[kind] + length + _TIME
    tail = _TYPES[kind] + link.ljust(100, b"\0") + _MAGIC + prefix.ljust(167, b"\0")
    return head + b"%06o\0 " % (sum(head) + 8 * ord(" ") + sum(tail)) + tail
