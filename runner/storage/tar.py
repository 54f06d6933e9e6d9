"""Write trees as tar, and read tar from anywhere.  Knows manifests (`files.Entry`), not shards, hosts or stores.

What `tar_stream` writes follows from the entries and the files' bytes alone; `docs/packs.md` has the format.  It uses what GNU tar, bsdtar, Python
and busybox all read: ustar, GNU long names, GNU base-256 sizes (busybox skips pax headers without a word, and gives long names other ones).

`unpack` trusts no archive: `tarfile` parses it, every name, kind and size is checked here before anything is written, and the tree gets its name by
one rename after every file on the disk was hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import adler32

from ..errors import Corrupt, Infrastructure
from . import objects
from .files import Changed, Entry, entries, link_leads_out

if TYPE_CHECKING:
    import tarfile

BLOCK = 512
END = bytes(2 * BLOCK)
"""Two empty blocks end an archive."""

_BATCH = 1 << 20  # bytes handed on at once
_OCTAL_MAX = 0o77777777777
_MTIME = 315532800  # 1980-01-01: GNU tar warns of 1970, and zip knows nothing older
_HEADS_MAX = 16 << 10  # bytes of headers in front of a member; its name and link take at most 10 KiB
_PATH_MAX = 4095
_NAME_MAX = 255
_ZEROS_MAX = 8 << 20  # bytes behind the last member; `tar -b` may ask for many
_PADDING = tuple(bytes(-n % BLOCK) for n in range(BLOCK))
_KIND = 0o170000 | stat.S_IXUSR
_REGULAR = {"f": stat.S_IFREG, "x": stat.S_IFREG | stat.S_IXUSR}
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_count = itertools.count(1)


class BadArchive(Corrupt):
    """An archive is damaged, or holds what it should not."""


class Budget(NamedTuple):
    """What an archive without a manifest may hold at most."""

    bytes: int
    members: int


# -- writing -----------------------------------------------------------------------------------------------------------------------------------------


def member_size(entry: Entry) -> int:
    """How many bytes of a tar one entry takes."""
    if len(entry.path) <= 24 and entry.kind != "l":  # at most 97 bytes of UTF-8 and a slash: one header block
        heads = BLOCK
    else:
        heads = len(member_header(entry))
    return heads + (entry.size + -entry.size % BLOCK if entry.kind in "fx" else 0)


def member(entry: Entry, data: bytes) -> bytes:
    """One small file of a tar, from memory; `END` ends the tar."""
    return member_header(entry) + data + _PADDING[len(data) % BLOCK]


def tar_stream(root: str | Path, entries: Iterable[Entry], *, check: bool = False) -> Iterator[bytes]:
    """The tar of these entries of the tree at `root`, in the order given, in pieces of about a mebibyte.

    Raises Changed, naming the file, when one is not what the manifest says: its kind, its size, that it stays the same while it is read, and with
    `check` its SHA-256.  What was given until then is of no use.
    """
    top = os.fspath(root)
    parts: list[bytes] = []
    held = 0
    folder, at = None, -1
    sha256, join, fstat, opened, read, close = hashlib.sha256, b"".join, os.fstat, os.open, os.read, os.close
    try:
        for entry in entries:
            if held >= _BATCH:
                yield join(parts)
                parts.clear()
                held = 0
            path, kind, size, value = entry
            parts.append(member_header(entry))
            held += BLOCK
            if kind not in _REGULAR:
                continue
            parent, _, name = path.rpartition("/")
            try:
                if parent != folder:
                    if at >= 0:
                        os.close(at)
                        at = -1
                    at = os.open(f"{top}/{parent}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    folder = parent
                handle = opened(name, _READ, dir_fd=at)
                try:
                    before = fstat(handle)
                    if before.st_size != size or before.st_mode & _KIND != _REGULAR[kind]:
                        raise Changed(f"{top}/{path}")
                    if size <= _BATCH:
                        data = read(handle, size + 1)
                        if len(data) != size or (check and sha256(data).hexdigest() != value):
                            raise Changed(f"{top}/{path}")
                        parts.append(data)
                        held += size
                    else:
                        yield b"".join(parts)
                        parts.clear()
                        held = 0
                        hasher = sha256() if check else None
                        left = size
                        while left:
                            data = os.read(handle, min(left, _BATCH))
                            if not data:
                                raise Changed(f"{top}/{path}")
                            if hasher is not None:
                                hasher.update(data)
                            left -= len(data)
                            yield data
                        if hasher is not None and hasher.hexdigest() != value:
                            raise Changed(f"{top}/{path}")
                    after = fstat(handle)
                    if after.st_size != size or after.st_mtime_ns != before.st_mtime_ns or after.st_ctime_ns != before.st_ctime_ns:
                        raise Changed(f"{top}/{path}")
                finally:
                    close(handle)
            except OSError as error:
                raise Changed(f"{top}/{path}", f"cannot be read any more: {error.strerror}") from error
            parts.append(_PADDING[size % BLOCK])
        parts.append(END)
        yield b"".join(parts)
    finally:
        if at >= 0:
            os.close(at)


_TYPES = {"f": b"0", "x": b"0", "l": b"2", "d": b"5", "L": b"L", "K": b"K"}
_MODES = {"x": b"0000755\0", "d": b"0000755\0", "l": b"0000777\0"}
_HEADS = {kind: _MODES.get(kind, b"0000644\0") + b"0000000\0" * 2 for kind in _TYPES}
_TIME = b"%011o\0" % _MTIME
_MAGIC = b"ustar\x0000" + bytes(64) + b"0000000\0" * 2
_TAILS = {kind: _TYPES[kind] + bytes(100) + _MAGIC + bytes(167) for kind in _TYPES}
_SUMS = {kind: sum(_HEADS[kind] + _TIME + b" " * 8 + _TYPES[kind] + _MAGIC) for kind in _TYPES}


def member_header(entry: Entry) -> bytes:
    """The blocks in front of an entry's bytes."""
    path, kind, size, value = entry
    name = path.encode("utf-8", "surrogateescape")
    link = b""
    if kind == "d":
        name += b"/"
        size = 0
    elif kind == "l":
        link = value.encode("utf-8", "surrogateescape")
        size = 0
    if len(name) <= 100 and not link:
        return _block(name, kind, size)
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
    return before + _block(name, kind, size, link, prefix)


def _split(name: bytes) -> tuple[bytes, bytes, bool]:
    """A long name as prefix and name, and whether that could be done."""
    at = name.rfind(b"/", 0, 156)
    if at > 0 and 0 < len(name) - at - 1 <= 100:
        return name[:at], name[at + 1 :], True
    return b"", name, False


def _long(kind: str, text: bytes) -> bytes:
    text += b"\0"
    return _block(b"././@LongLink", kind, len(text)) + text + _PADDING[len(text) % BLOCK]


def _block(name: bytes, kind: str, size: int, link: bytes = b"", prefix: bytes = b"") -> bytes:
    length = b"%011o\0" % size if size <= _OCTAL_MAX else (size | 1 << 95).to_bytes(12, "big")
    # The low half of an Adler-32 is one more than the sum of the bytes, exactly so up to 256 of them.
    total = _SUMS[kind] + (adler32(name) & 0xFFFF) - 1 + (adler32(length) & 0xFFFF) - 1
    if link or prefix:
        total += sum(link) + sum(prefix)
    start = name.ljust(100, b"\0") + _HEADS[kind] + length + _TIME + b"%06o\0 " % total
    if link or prefix:
        return b"".join((start, _TYPES[kind], link.ljust(100, b"\0"), _MAGIC, prefix.ljust(167, b"\0")))
    return start + _TAILS[kind]


# -- reading -----------------------------------------------------------------------------------------------------------------------------------------


def unpack(archives: Iterable[Iterable[bytes]], target: str | Path, expect: Sequence[Entry] | Budget) -> list[Entry]:
    """Make the tree that these tars hold together at `target`, which must not exist, and return its manifest, sorted as `files.entries` does.

    `expect` is the manifest: nothing else may come, every file must have its SHA-256, and modes are those of the manifest.  Or it is a budget: then a
    file is executable if its owner's bit is set.  Raises BadArchive for an archive that is not as it should be, Infrastructure when this disk fails,
    and whatever reading an archive raises.  Then nothing is left behind.
    """
    target = os.path.abspath(target)
    parent, name = os.path.split(target)
    top = f"{parent}/.{name[:200]}.{os.getpid()}.{next(_count)}.unpacking"
    tree = _Tree(top, expect)
    try:
        os.mkdir(top, 0o700)
        for pieces in archives:
            _unpack_one(_Source(pieces), tree)
        found = tree.finish()
        os.chmod(top, 0o755)  # noqa: S103 as any directory
        os.rename(top, target)
        return found
    except _StreamFailed as failed:
        raise failed.error from None
    except OSError as error:
        raise Infrastructure(f"{target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(Infrastructure):  # what is wrong with this disk is already an error
            objects.delete(Path(top))


def _unpack_one(source: _Source, tree: _Tree) -> None:
    import tarfile

    try:
        while True:
            # One TarFile for each member: it keeps none of those before, and a damaged header is an error to it, not the end of the archive.
            source.begin()
            archive = tarfile.TarFile(fileobj=source, encoding="utf-8", errors="surrogateescape", copybufsize=_BATCH)
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # a second check, which Python 3.11.0 to 3.11.3 lack
            member = archive.next()
            if member is None:
                break
            if archive.pax_headers:
                raise BadArchive("a global pax header")
            kind = tree.add(member)
            if kind in "fx":
                padding = -member.size % BLOCK
                source.allow(member.size + padding)
                archive.extract(member, tree.top, set_attrs=False)
                os.chmod(f"{tree.top}/{member.name}", 0o755 if kind == "x" else 0o644)
                source.read(padding)
    except (tarfile.TarError, ValueError, LookupError, OverflowError) as error:
        raise BadArchive("this is no tar archive, or a damaged one") from error
    source.end()


class _StreamFailed(Exception):
    """The stream of an archive failed, not this disk."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


class _Source(io.BufferedIOBase):
    """The bytes of an archive as a file that is read once, forwards, and in which a header cannot make `tarfile` read or skip more than it may."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._at = self._room = 0

    def begin(self) -> None:
        """A member begins here: positions count from 0, and its headers have to fit into `_HEADS_MAX` bytes."""
        self._at, self._room = 0, _HEADS_MAX

    def allow(self, size: int) -> None:
        """Let the next `size` bytes be read."""
        self._room = self._at + size

    def read(self, size: int | None = -1, /) -> bytes:
        """The next `size` bytes.  Raises BadArchive if the archive has fewer."""
        assert size is not None
        if not 0 <= size <= self._room - self._at:
            raise BadArchive("a header that is too large")
        data = self._take(size)
        if len(data) < size:
            raise BadArchive("the archive ends too early")
        self._at += size
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0, /) -> int:
        if to != self._at:
            raise BadArchive("a header that leads elsewhere")
        return to

    def end(self) -> None:
        """Check what is behind the first empty block: another one, and nothing but zeros."""
        tail = self._take(_ZEROS_MAX + 1)
        if len(tail) > _ZEROS_MAX:
            raise BadArchive("the archive does not end")
        if any(tail):
            raise BadArchive("the archive goes on behind its end")
        if len(tail) < BLOCK or len(tail) % BLOCK:
            raise BadArchive("the archive ends too early")

    def _take(self, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end only."""
        parts: list[memoryview] = []
        while size:
            if not self._piece:
                try:
                    piece = next(self._pieces, None)
                except OSError as error:
                    raise _StreamFailed(error) from error
                if piece is None:
                    break
                self._piece = memoryview(piece)
            part, self._piece = self._piece[:size], self._piece[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class _Tree:
    """A tree that grows below `top`, a new directory of our own, and what may still come into it.

    Nothing is written through a link, because links are made last.
    """

    def __init__(self, top: str, expect: Sequence[Entry] | Budget) -> None:
        self.top = top
        self._kinds = {"": "d"}  # of every path that came, and of the directories above it
        self._links: dict[str, str] = {}
        if isinstance(expect, Budget):
            self._bytes, self._members = expect
            self._wanted: dict[str, Entry] | None = None
            self._parents: set[str] = set()
        else:
            self._bytes = sum(entry.size for entry in expect if entry.kind in "fx")
            self._members = 2 * len(expect) + 1_000_000  # directories in between
            self._wanted = {entry.path: entry for entry in expect}
            self._parents = _parents(expect)
        self._folders = self._members

    def add(self, member: tarfile.TarInfo) -> str:
        """Make room for a member, by its name below the top, and return its kind; the bytes of a file are the caller's.  Raises BadArchive."""
        raw = member.name.encode("utf-8", "surrogateescape")
        path = member.name = member_path(raw, folder=member.isdir())
        if len(raw) + len(os.fsencode(self.top)) + 1 > _PATH_MAX:
            raise BadArchive(f"{path[:80]!r}… is too long a path here")
        self._members -= 1
        if self._members < 0:
            raise BadArchive("more members than were announced")
        entry = _entry(member)
        if entry.kind == "d" and (self._wanted is None or path in self._parents or not path):
            self._folder(path)
            return "d"
        if self._wanted is not None:
            entry = _declared(entry, self._wanted)
        elif entry.kind in "fx":
            self._bytes -= entry.size
            if self._bytes < 0:
                raise BadArchive(f"{path!r}: more bytes than were announced")
        if path in self._kinds:
            raise BadArchive(f"{path!r} comes twice")
        if entry.kind == "d":
            self._folder(path)
        else:
            self._folder(path.rpartition("/")[0])
            self._kinds[path] = entry.kind
            if entry.kind == "l":
                self._links[path] = entry.value
        return entry.kind

    def finish(self) -> list[Entry]:
        """Make the links, and return what now lies on the disk, every file hashed.  Raises BadArchive if that is not what was expected."""
        if self._wanted is not None and (missing := [path for path in self._wanted if path not in self._kinds]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BadArchive(f"the archive lacks {missing[0]!r}{more}")
        for path, link in self._links.items():
            os.symlink(link, f"{self.top}/{path}")
        for path, link in self._links.items():
            if link_leads_out(self.top, path, link, self._links):
                raise BadArchive(f"{path!r}: a link to {link!r} leads out of the tree")
        found = entries(self.top)
        for entry in found:
            if self._wanted is not None and self._wanted.get(entry.path) != entry:
                raise BadArchive(f"{entry.path!r} does not hold the bytes that the manifest says")
        return found

    def _folder(self, path: str) -> None:
        """Make a directory and those above it, where they are missing."""
        missing: list[str] = []
        while path not in self._kinds:
            missing.append(path)
            path = path.rpartition("/")[0]
        if self._kinds[path] != "d":
            raise BadArchive(f"{path!r} is a file and a directory")
        for path in reversed(missing):
            self._folders -= 1
            if self._folders < 0:
                raise BadArchive("more directories than were announced")
            os.mkdir(f"{self.top}/{path}")
            self._kinds[path] = "d"


def _entry(member: tarfile.TarInfo) -> Entry:
    """What a member is, as far as its headers tell.  Raises BadArchive for one that has no place in a tree."""
    path = member.name
    if member.issparse() or any(key.startswith(("GNU.sparse", "SCHILY.realsize")) for key in member.pax_headers):
        raise BadArchive(f"{path!r} is a sparse file")
    if member.isreg():
        if member.size < 0:
            raise BadArchive(f"{path!r} has a negative size")
        return Entry(path, "x" if member.mode & 0o100 else "f", member.size, "")
    if not member.isdir() and not member.issym():
        raise BadArchive(f"{path!r} is {_KINDS.get(member.type, 'of an unknown kind')}")
    if member.size:
        raise BadArchive(f"{path!r} has {member.size} bytes and no room for them")
    if member.isdir():
        return Entry(path, "d", 0, "")
    link = member.linkname.encode("utf-8", "surrogateescape")
    if not link or b"\0" in link or len(link) > _PATH_MAX:
        raise BadArchive(f"{path!r}: a link to nowhere")
    return Entry(path, "l", len(link), member.linkname)


_KINDS = {b"1": "a hard link", b"3": "a device", b"4": "a device", b"6": "a named pipe"}


def _declared(entry: Entry, wanted: dict[str, Entry]) -> Entry:
    """The entry of the manifest that this member is.  Raises BadArchive if there is none."""
    path = entry.path
    declared = wanted.get(path)
    if declared is None:
        raise BadArchive(f"{path!r} is not in the manifest")
    if entry.kind != declared.kind and not {entry.kind, declared.kind} == {"f", "x"}:
        raise BadArchive(f"{path!r} is of another kind than the manifest says")
    if entry.size != declared.size:
        raise BadArchive(f"{path!r} has {entry.size} bytes, not {declared.size}")
    if entry.kind == "l" and entry.value != declared.value:
        raise BadArchive(f"{path!r} is a link to {entry.value!r}, not to {declared.value!r}")
    return declared


def _parents(expect: Iterable[Entry]) -> set[str]:
    """Every directory that something lies in."""
    parents: set[str] = set()
    for entry in expect:
        parent = entry.path.rpartition("/")[0]
        while parent and parent not in parents:
            parents.add(parent)
            parent = parent.rpartition("/")[0]
    return parents


def member_path(raw: bytes, *, folder: bool = False) -> str:
    """A member's name as a path below the top; empty for the top itself.  Raises BadArchive for a name that leads elsewhere."""
    if raw[:2] == b"./":
        raw = raw[2:]
    if folder:
        raw = raw.rstrip(b"/")
        if raw == b"" or raw == b".":
            return ""
    if len(raw) > _PATH_MAX or b"\0" in raw:
        raise BadArchive(f"{raw[:80]!r} is no name")
    for part in raw.split(b"/"):
        if part == b"" or part == b"." or part == b".." or len(part) > _NAME_MAX:
            raise BadArchive(f"{raw[:80]!r} is no name inside a tree")
    return raw.decode("utf-8", "surrogateescape")
