"""Write trees as tar and read tar that nobody vouches for, member by member.  Knows manifests (`files.Entry`), not shards, hosts or stores.

What `tar_stream` writes follows from the entries and the files' bytes alone; `docs/packs.md` has the format.  It uses what GNU tar, bsdtar, Python
and busybox all read: ustar, GNU long names, GNU base-256 sizes (busybox skips pax headers without a word, and gives long names other ones).

`Unpacking` believes nothing: names, kinds, sizes and bytes are checked against what is expected, links come last, and the tree gets its name by one
rename when everything was right.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn
from zlib import adler32

from ..errors import Corrupt, Infrastructure
from . import objects
from .files import Changed, Entry, link_leads_out

BLOCK = 512
END = bytes(2 * BLOCK)
"""Two empty blocks end an archive."""

_BATCH = 1 << 20  # bytes handed on at once
_SMALL = 64 << 10  # bytes; up to here a file is read and written in one go
_OCTAL_MAX = 0o77777777777
_MTIME = 315532800  # 1980-01-01: GNU tar warns of 1970, and zip knows nothing older
_META_MAX = 64 << 10  # bytes of one long name or pax header
_PATH_MAX = 4095
_NAME_MAX = 255
_ZEROS = 1 << 14  # empty blocks behind the last member; `tar -b` may ask for many
_FOLDERS = 32  # directories held open
_PADDING = tuple(bytes(-n % BLOCK) for n in range(BLOCK))
_KIND = 0o170000 | stat.S_IXUSR
_REGULAR = {"f": stat.S_IFREG, "x": stat.S_IFREG | stat.S_IXUSR}
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_count = itertools.count(1)


class BadArchive(Corrupt):
    """An archive is damaged, or holds what it should not."""


class Budget(NamedTuple):
    """What an archive without a manifest may hold at most."""

    bytes: int
    members: int


# -- writing -----------------------------------------------------------------------------------------------------------------------------------------


def tar_size(entries: Iterable[Entry]) -> int:
    """How many bytes `tar_stream` gives for these entries."""
    return len(END) + sum(map(member_size, entries))


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


def unpack(stream: Iterable[bytes], target: str | Path, expect: Sequence[Entry] | Budget) -> list[Entry]:
    """Make the tree that one tar holds at `target`, which must not exist, and answer its manifest.  See `Unpacking`."""
    with Unpacking(target, expect) as unpacking:
        for data in stream:
            unpacking.feed(data)
        unpacking.end()
        return unpacking.finish()


class Unpacking:
    """One tree, made from the tars that are fed to it, whole or not at all.

    `expect` is the manifest, then nothing else may come, every byte is compared with it, and modes are those of the manifest; or it is a budget, then
    what came is answered, executable where the owner's bit says so.  Raises BadArchive for everything that is not as it should be, and Infrastructure
    when this disk fails.  Leaving it without `finish` leaves nothing behind.
    """

    def __init__(self, target: str | Path, expect: Sequence[Entry] | Budget) -> None:
        self._target = os.path.abspath(target)
        self._wanted = {entry.path: entry for entry in expect} if not isinstance(expect, Budget) else None
        if isinstance(expect, Budget):
            self._bytes, self._members = expect
            self._parents: set[str] = set()
        else:
            self._bytes = sum(entry.size for entry in expect if entry.kind in "fx")
            self._members = 2 * len(expect) + 1_000_000  # directories in between
            self._parents = _parents(expect)
        self._deepest = self._members
        self._found: dict[str, Entry] = {}
        self._rest = bytearray()
        self._need = BLOCK
        self._left = self._padding = self._handle = 0
        self._current = Entry("", "f", 0, "")
        self._hasher = hashlib.sha256()
        self._long: dict[str, bytes] = {}
        self._size: int | None = None
        self._zeros = self._metas = self._archives = 0
        self._folders: dict[str, int] = {}
        self._made: set[str] = set()
        folder, name = os.path.split(self._target)
        self._folder = f"{folder}/.{name[:200]}.{os.getpid()}.{next(_count)}.unpacking"
        self._longest = _PATH_MAX - len(os.fsencode(self._folder)) - 1
        self._done = False
        try:
            os.mkdir(self._folder, 0o700)
            self._folders[""] = os.open(self._folder, _FOLDER)
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Unpacking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up, unless it is finished."""
        if self._handle:
            os.close(self._handle)
            self._handle = 0
        for handle in self._folders.values():
            os.close(handle)
        self._folders.clear()
        if not self._done:
            try:
                objects.delete(Path(self._folder))
            except Infrastructure:
                pass  # whatever went wrong with this disk has been said

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes of an archive."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data, self._rest = self._rest, bytearray()
        with memoryview(data) as view:
            try:
                at = self._eat(view)
            except OSError as error:
                self._fail(error)
            if at < len(view):
                self._rest += view[at:]

    def end(self) -> None:
        """The archive is over: two empty blocks have come, or it was cut.  Another may follow."""
        if self._zeros < 2 or self._rest or self._left or self._padding:
            raise BadArchive(f"the archive ends too early, after {self._count()}")
        self._zeros = 0
        self._archives += 1

    def finish(self) -> list[Entry]:
        """The tree gets its name.  Answers its manifest, sorted as `files.entries` does."""
        if self._zeros or self._rest or self._left or self._padding or (not self._archives and self._wanted != {}):
            raise BadArchive(f"the archive ends too early, after {self._count()}")
        if self._wanted is not None and len(self._found) < len(self._wanted):
            missing = [path for path in self._wanted if path not in self._found]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BadArchive(f"the archive lacks {missing[0]!r}{more}")
        try:
            found = self._links_and_folders()
            for handle in self._folders.values():
                os.close(handle)
            self._folders.clear()
            os.chmod(self._folder, 0o755)  # noqa: S103 as any directory; nobody could look in while it was made
            os.rename(self._folder, self._target)
        except OSError as error:
            self._fail(error)
        self._done = True
        return found

    # -- members

    def _eat(self, view: memoryview) -> int:
        """Take in what is complete; answer how many bytes that was."""
        at, end = 0, len(view)
        while True:
            if self._left:
                piece = view[at : at + self._left]
                self._hasher.update(piece)
                _write(self._handle, piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    return at
                os.close(self._handle)
                self._handle = 0
                self._accept(self._current, self._hasher.hexdigest())
            if self._padding:
                step = min(self._padding, end - at)
                at += step
                self._padding -= step
                if self._padding:
                    return at
            if end - at < BLOCK:
                self._need = BLOCK
                return at
            header = bytes(view[at : at + BLOCK])
            if header.count(0) == BLOCK:
                self._zeros += 1
                if self._zeros > _ZEROS:
                    raise BadArchive("the archive does not end")
                at += BLOCK
                continue
            if self._zeros:
                raise BadArchive("the archive goes on behind its end")
            kind, size = _kind_and_size(header)
            if kind in b"LKx":
                self._metas += 1
                if self._metas > 4:
                    raise BadArchive("headers without a member")
                if size > _META_MAX:
                    raise BadArchive(f"a name of {size} bytes")
                whole = BLOCK + size + -size % BLOCK
                if end - at < whole:
                    self._need = whole
                    return at
                self._meta(kind, bytes(view[at + BLOCK : at + BLOCK + size]))
                at += whole
                continue
            if self._size is not None:
                size = self._size
            whole = BLOCK + size + -size % BLOCK
            small = size <= _SMALL
            if small and end - at < whole:
                self._need = whole
                return at
            self._metas = 0
            entry, name = self._member(header, kind, size)
            if entry is None:
                at += BLOCK
            elif small:
                data = view[at + BLOCK : at + BLOCK + size]
                digest = hashlib.sha256(data).hexdigest()
                handle = self._create(entry, name)
                try:
                    if size:
                        _write(handle, data)
                finally:
                    os.close(handle)
                self._accept(entry, digest)
                at += whole
            else:
                self._handle = self._create(entry, name)
                self._current, self._hasher = entry, hashlib.sha256()
                self._left, self._padding = size, -size % BLOCK
                at += BLOCK

    def _meta(self, kind: bytes, data: bytes) -> None:
        """A long name or link, in GNU's way or that of pax."""
        if kind == b"x":
            for key, value in _records(data):
                if key == b"path":
                    self._long["L"] = value
                elif key == b"linkpath":
                    self._long["K"] = value
                elif key == b"size":
                    self._size = _decimal(value)
                elif key.startswith((b"GNU.sparse", b"SCHILY.realsize")):
                    raise BadArchive("a sparse file")
        else:
            self._long[kind.decode()] = data.split(b"\0", 1)[0]

    def _member(self, header: bytes, kind: bytes, size: int) -> tuple[Entry | None, str]:
        """The file that a header announces, and its name in its directory; None for everything that has no bytes: that is done."""
        raw = self._long.get("L")
        if raw is None:
            raw = header[:100].split(b"\0", 1)[0]
            if header[345] and header[257:263] == b"ustar\0":
                raw = header[345:500].split(b"\0", 1)[0] + b"/" + raw
        link = self._long.get("K")
        if self._long or self._size is not None:
            self._long = {}
            self._size = None
        path = member_path(raw, folder=kind == b"5")
        if len(raw) > self._longest:
            raise BadArchive(f"{path[:80]!r}… is too long a path here")
        self._members -= 1
        if self._members < 0:
            raise BadArchive("more members than were announced")
        if kind == b"0" or kind == b"\0" or kind == b"7":
            if self._wanted is None:
                self._bytes -= size
                if self._bytes < 0:
                    raise BadArchive(f"{path!r}: more bytes than were announced")
                entry = Entry(path, "x" if _number(header[100:108]) & 0o100 else "f", size, "")
            else:
                entry = self._declared(path, "fx", size)
            if path in self._found:
                raise BadArchive(f"{path!r} comes twice")
            return entry, path.rpartition("/")[2]
        if kind != b"5" and kind != b"2":
            raise BadArchive(f"{path!r} is {_KINDS.get(kind, 'of an unknown kind')}")
        if size:
            raise BadArchive(f"{path!r} has {size} bytes and no room for them")
        if kind == b"2":
            target = header[157:257].split(b"\0", 1)[0] if link is None else link
            self._link(path, target)
        elif path:
            self._directory(path)
        return None, ""

    def _link(self, path: str, target: bytes) -> None:
        text = target.decode("utf-8", "surrogateescape")
        if not target or b"\0" in target or len(target) > _PATH_MAX:
            raise BadArchive(f"{path!r}: a link to nowhere")
        if self._wanted is not None and self._declared(path, "l", len(target)).value != text:
            raise BadArchive(f"{path!r} is a link to {text!r}, not to {self._wanted[path].value!r}")
        if path in self._found:
            raise BadArchive(f"{path!r} comes twice")
        self._found[path] = Entry(path, "l", len(target), text)

    def _directory(self, path: str) -> None:
        """Parents come along in most tars; they are content only when they stay empty."""
        if self._wanted is None:
            if path in self._found and self._found[path].kind != "d":
                raise BadArchive(f"{path!r} comes twice")
            self._found[path] = Entry(path, "d", 0, "")
        elif path not in self._parents:
            self._declared(path, "d", 0)
            if path in self._found:
                raise BadArchive(f"{path!r} comes twice")
            self._found[path] = Entry(path, "d", 0, "")
        self._open(path)

    def _declared(self, path: str, kinds: str, size: int) -> Entry:
        assert self._wanted is not None
        entry = self._wanted.get(path)
        if entry is None:
            raise BadArchive(f"{path!r} is not in the manifest")
        if entry.kind not in kinds:
            raise BadArchive(f"{path!r} is of another kind than the manifest says")
        if entry.size != size:
            raise BadArchive(f"{path!r} has {size} bytes, not {entry.size}")
        return entry

    def _accept(self, entry: Entry, digest: str) -> None:
        if self._wanted is None:
            entry = entry._replace(value=digest)
        elif entry.value != digest:
            raise BadArchive(f"{entry.path!r} does not hold the bytes that the manifest says")
        self._found[entry.path] = entry

    # -- on the disk

    def _create(self, entry: Entry, name: str) -> int:
        parent = entry.path.rpartition("/")[0]
        folder = self._folders.get(parent)
        if folder is None:
            folder = self._open(parent)
        try:
            return os.open(name, _WRITE, 0o755 if entry.kind == "x" else 0o644, dir_fd=folder)
        except FileExistsError:
            raise BadArchive(f"{entry.path!r} comes twice") from None

    def _open(self, path: str) -> int:
        """A handle on a directory, made where it is missing, reached from the top without following a link."""
        names: list[str] = []
        above = path
        while (handle := self._folders.get(above)) is None:
            above, _, name = above.rpartition("/")
            names.append(name)
        while names:
            name = names.pop()
            above = f"{above}/{name}" if above else name
            if above not in self._made:
                try:
                    os.mkdir(name, dir_fd=handle)
                except FileExistsError:
                    raise BadArchive(f"{above!r} is a file and a directory") from None
                self._made.add(above)
                if len(self._made) > self._deepest:
                    raise BadArchive("more directories than were announced")
            handle = os.open(name, _FOLDER, dir_fd=handle)
            if len(self._folders) >= _FOLDERS:
                oldest = next(itertools.islice(self._folders, 1, None))  # the first one is the top
                os.close(self._folders.pop(oldest))
            self._folders[above] = handle
        return handle

    def _links_and_folders(self) -> list[Entry]:
        """Make the links, now that nothing can be written through them, and answer the manifest."""
        links = {path: entry.value for path, entry in self._found.items() if entry.kind == "l"}
        for path, target in links.items():
            parent, _, name = path.rpartition("/")
            try:
                os.symlink(target, name, dir_fd=self._open(parent))
            except FileExistsError:
                raise BadArchive(f"{path!r} comes twice") from None
        for path, target in links.items():
            if link_leads_out(self._folder, path, target, links):
                raise BadArchive(f"{path!r}: a link to {target!r} leads out of the tree")
        if self._wanted is None:
            self._parents = _parents(self._found.values())
        found = [entry for path, entry in self._found.items() if entry.kind != "d" or path not in self._parents]
        found.sort(key=lambda entry: entry.path.encode("utf-8", "surrogateescape"))
        return found

    def _count(self) -> str:
        return f"{len(self._found)} member{'' if len(self._found) == 1 else 's'}"

    def _fail(self, error: OSError) -> NoReturn:
        self.close()
        raise Infrastructure(f"{self._target}: {error.strerror}") from error


_KINDS = {
    b"1": "a hard link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a named pipe",
    b"S": "a sparse file",
    b"g": "a global pax header",
}


def _parents(entries: Iterable[Entry]) -> set[str]:
    """Every directory that something lies in."""
    parents: set[str] = set()
    for entry in entries:
        parent = entry.path.rpartition("/")[0]
        while parent and parent not in parents:
            parents.add(parent)
            parent = parent.rpartition("/")[0]
    return parents


def _write(handle: int, data: memoryview) -> None:
    while (done := os.write(handle, data)) < len(data):
        data = data[done:]


def _kind_and_size(header: bytes) -> tuple[bytes, int]:
    """What a header is about.  Its sum must be right."""
    if header[257:262] != b"ustar":
        raise BadArchive("this is no tar archive, or a damaged one")
    total = adler32(header[156:], adler32(header[:148])) - 1 & 0xFFFF
    if total != (_number(header[148:156]) - 8 * 32) % 65521:
        raise BadArchive("a damaged header")
    return header[156:157], _number(header[124:136])


def _number(field: bytes) -> int:
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise BadArchive("a negative size, or one beyond all disks")
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0")
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        raise BadArchive("a number that is none")
    return int(text, 8)


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise BadArchive("a number that is none")
    return int(text)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a pax header: length, blank, key, `=`, value, newline."""
    at = 0
    while at < len(data):
        blank = data.find(b" ", at, at + 8)
        if blank < 0:
            raise BadArchive("a damaged pax header")
        length = _decimal(data[at:blank])
        record = data[blank + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        if length > len(data) - at or record[-1:] != b"\n" or not equals:
            raise BadArchive("a damaged pax header")
        yield key, value
        at += length


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
