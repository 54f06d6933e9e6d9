"""Say what a path holds, as a content id, without reading it twice.  Knows stat and SHA-256, not what a path is for.

A content id is `f:<sha256>` for a plain file, `x:<sha256>` for an executable one, `t:<sha256>` for a tree.  A tree's digest is that of its
sorted entries: files, links that stay inside it, and empty directories; owners, times and other permissions are not content.

A digest is remembered with the identity (device, inode, size, mtime, ctime) that the file had *before* it was read, and only when that identity was
already old: a change in the same tick of the file system's clock would not show in it.  Those of a large tree lie in a file of its own, the listing,
so that whoever does not look at that tree does not pay for it, and a tree that looks the same costs its walk and nothing per file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, NewType, TypeAlias, cast

from .. import digest
from ..errors import CannotRun, Infrastructure

Content = NewType("Content", str)
"""`f:`, `x:` or `t:` and 64 lowercase hex digits."""

Progress: TypeAlias = "Callable[[int, int], None]"
"""Told the bytes that are done and those that there are, now and then, from any thread but never from two at once."""

FileRow: TypeAlias = "tuple[str, int, int, int, int, int, str]"
"""path, dev, ino, size, mtime_ns, ctime_ns, content: a remembered digest."""

SLACK_NS = 20_000_000  # more than a tick of any kernel's file clock
COARSE_SLACK_NS = 2_000_000_000  # FAT counts two seconds
FEW = 1000  # files; a tree of more has a listing instead of a row for each
_CHUNK = 1 << 20
_WORTH_THREADS = 4 << 20
_TRIES = 3
_SQLITE_MAX = 1 << 63
_STATS = Struct("<QQqqqq")  # device, inode, size, mtime, ctime, 64 if executable
_FILE, _DIRECTORY, _LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK
_MANY = 100  # files
_UNKNOWN = bytes(32)
_UNKNOWN_HEX = _UNKNOWN.hex()
_ZEROS = bytes(_CHUNK)


class Unhashable(CannotRun):
    """This has no content that could be hashed."""

    def __init__(self, path: str, why: str, *, fix: str = "") -> None:
        super().__init__(f"{path}: {why}", fix=fix)
        self.path = path


class Changed(Unhashable):
    """This did not hold still while it was read."""

    def __init__(self, path: str, why: str = "it changes while it is read") -> None:
        super().__init__(path, why, fix="leave it alone while recipe reads it, and try again")


class Identity(NamedTuple):
    """What a file system says about a file, which changes whenever the bytes do."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Entry(NamedTuple):
    """One line of a tree's manifest.  `kind`: f plain, x executable, l link, d empty directory; `value`: the SHA-256, or where a link points."""

    path: str
    kind: str
    size: int
    value: str


def identity(path: str | Path) -> Identity | None:
    """The identity of what `path` leads to, or None when there is nothing."""
    try:
        return _identity(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def scan(path: str | Path) -> Content:
    """What is at `path`, read now.  Links at the top are followed."""
    name = str(path)
    found = _stat(name)
    if found is None:
        raise Unhashable(name, "there is nothing here")
    if stat.S_ISDIR(found.st_mode):
        return tree_id(entries(name))
    return _content(*_hash(name, _regular(name, found)))


def entries(path: str | Path) -> list[Entry]:
    """The manifest of the tree at `path`, read now."""
    top = str(path)
    return _manifest(top, _see(top), {})[0]


def tree_id(manifest: Sequence[Entry]) -> Content:
    """The content id of a tree with these entries, sorted as `entries` gives them."""
    return Content("t:" + digest.of_value("tree/1", manifest))


def settled(found: Identity, at_ns: int) -> bool:
    """Whether a digest begun at `at_ns` may be remembered under this identity: no later change can look the same."""
    return at_ns - max(found.mtime_ns, found.ctime_ns) > _slack(found.mtime_ns)


class DigestCache:
    """What the files of a workspace hold.  Paths are relative to `root`, or absolute, and are remembered as they were given.

    `rows` are those of the store's `files` table, `listings` is the folder in which the listings of large trees are; without it they are forgotten.
    """

    told: Progress | None
    """Hears how far hashing is."""

    def __init__(self, root: str | Path, rows: Iterable[FileRow] = (), listings: str | Path | None = None) -> None:
        self._prefix = str(root).rstrip("/") + "/"
        self._rows: dict[str, FileRow] = {row[0]: row for row in rows}
        self._new: dict[str, FileRow] = {}
        self._folder = None if listings is None else str(listings)
        self._listings: dict[str, _Listing] = {}
        self.told: Progress | None = None
        self._unsaved: set[str] = set()

    def content_of(self, path: str) -> Content | None:
        """What `path` holds, hashed only in doubt; None when there is nothing."""
        return self.contents((path,))[path]

    def contents(self, paths: Iterable[str]) -> dict[str, Content | None]:
        """What each of `paths` holds.  Doubtful files are hashed together, large ones on two threads."""
        answer: dict[str, Content | None] = {}
        doubtful: list[tuple[str, os.stat_result]] = []
        known, prefix, look, is_dir = self._rows.get, self._prefix, os.stat, stat.S_ISDIR
        for path in paths:
            try:
                found = look(path if path[:1] == "/" else prefix + path)
            except OSError as error:
                self._absent(path, error)
                answer[path] = None
                continue
            row = known(path)
            if (
                row is not None
                and row[5] == found.st_ctime_ns
                and row[4] == found.st_mtime_ns
                and row[2] == found.st_ino
                and row[3] == found.st_size
                and row[1] == found.st_dev
            ):
                answer[path] = Content(row[6])
            elif is_dir(found.st_mode):
                answer[path] = self._tree(path)
            else:
                doubtful.append((path, found))
        if doubtful:
            begun = time.time_ns()
            digests = _hash_all([(self._full(path), _regular(self._full(path), found)) for path, found in doubtful], self.told)
            for (path, _), (found, value) in zip(doubtful, digests, strict=True):
                answer[path] = self._remember(path, found, _content(found, value), begun)
        return answer

    def entries(self, path: str) -> list[Entry]:
        """The manifest of the tree at `path`; its files are remembered."""
        sight = _see(self._full(path))
        return self._rowed(path, sight) if sight.files <= FEW else self._listed(path, sight)

    def note(self, path: str, content: Content) -> None:
        """Remember the file we have just put at `path`.

        A file of our making carries an mtime older than the tick in which it appeared (`artifacts` dates it back), so that any later write shows;
        without that it is too young to be believed, and is read when somebody asks.
        """
        found = _stat(self._full(path))
        if found is not None and stat.S_ISREG(found.st_mode):
            self._note(path, found, content)

    def note_tree(self, path: str, manifest: Sequence[Entry]) -> None:
        """Remember the files of a tree we have just put at `path`."""
        if len(manifest) <= FEW:
            for entry in manifest:
                if entry.kind in "fx":
                    self.note(f"{path}/{entry.path}", Content(f"{entry.kind}:{entry.value}"))
            return
        try:
            sight = _see(self._full(path))
        except Unhashable:
            return  # somebody was quick; whoever asks for it will hear
        values = {entry.path: bytes.fromhex(entry.value) for entry in manifest if entry.kind in "fx"}
        digests: dict[str, bytes] = {}
        for folder, seen in sight.folders.items():
            prefix = f"{folder}/" if folder else ""
            rows = zip(seen.names, seen.rows, strict=True)
            # Dated back, as `note` demands, or not believed.
            digests[folder] = b"".join(values.get(prefix + name, _UNKNOWN) if row[4] - row[3] > _slack(row[3]) else _UNKNOWN for name, row in rows)
        self._keep(path, _Listing("", _packed(sight), sight.links, sight.empty, digests))

    def changes(self) -> list[FileRow]:
        """What was learned since the last call, for the store's `files` table.  Listings are written by this."""
        rows = [row for row in self._new.values() if row[2] < _SQLITE_MAX and row[1] < _SQLITE_MAX and row[0].isprintable()]
        self._new = {}
        if self._folder is not None:
            for path in self._unsaved:
                _save_listing(self._folder, path, self._listings[path])
        self._unsaved = set()
        return rows

    def _tree(self, path: str) -> Content:
        """The content of the tree at `path`, without its manifest where it looks as it did."""
        sight = _see(self._full(path))
        if sight.files <= FEW:
            return tree_id(self._rowed(path, sight))
        listing = self._listing(path)
        if listing is not None and listing.content and _shows(listing, sight, _packed(sight)):
            return Content(listing.content)
        content = tree_id(self._listed(path, sight))
        listing = self._listings[path]
        if not any(_UNKNOWN in column for column in listing.digests.values()):
            self._keep(path, listing._replace(content=content))
        return content

    def _rowed(self, path: str, sight: _Sight) -> list[Entry]:
        """The manifest of a tree with a row for each file."""
        known: dict[str, list[str]] = {}
        recall = self._rows.get
        for folder, seen in sight.folders.items():
            prefix = f"{path}/{folder}/" if folder else f"{path}/"
            known[folder] = column = []
            for name, now in zip(seen.names, seen.rows, strict=True):
                row = recall(prefix + name)
                column.append(row[6][2:] if row is not None and row[1:6] == now[:5] else "")
        manifest, reads, begun = _manifest(self._full(path), sight, known, self.told)
        for folder, n, found, value in reads:
            name = sight.folders[folder].names[n]
            self._remember(f"{path}/{folder}/{name}" if folder else f"{path}/{name}", found, _content(found, value), begun)
        return manifest

    def _listed(self, path: str, sight: _Sight) -> list[Entry]:
        """The manifest of a tree with a listing, which is brought up to date."""
        old, packed = self._listing(path), _packed(sight)
        digests = {folder: _recalled(old, folder, seen) for folder, seen in packed.items()}
        manifest, reads, begun = _manifest(self._full(path), sight, {folder: _hexes(column) for folder, column in digests.items()}, self.told)
        columns = {folder: bytearray(digests[folder]) for folder in {read[0] for read in reads}}
        for folder, n, found, value in reads:
            now = _identity(found)
            if settled(now, begun) and now == sight.folders[folder].rows[n][:5]:
                columns[folder][32 * n : 32 * n + 32] = bytes.fromhex(value)
        if reads or old is None or not _shows(old, sight, packed):
            digests |= {folder: bytes(column) for folder, column in columns.items()}
            self._keep(path, _Listing("", packed, sight.links, sight.empty, digests))
        return manifest

    def _listing(self, path: str) -> _Listing | None:
        listing = self._listings.get(path)
        if listing is None and self._folder is not None:
            listing = _load_listing(self._folder, path)
            if listing is not None:
                self._listings[path] = listing
        return listing

    def _keep(self, path: str, listing: _Listing) -> None:
        self._listings[path] = listing
        self._unsaved.add(path)

    def _note(self, path: str, found: os.stat_result, content: Content) -> None:
        if found.st_ctime_ns - found.st_mtime_ns > _slack(found.st_mtime_ns):
            self._rows[path] = self._new[path] = (path, *_identity(found), content)
        else:
            self._rows.pop(path, None)

    def _remember(self, path: str, found: os.stat_result, content: Content, begun: int) -> Content:
        if settled(_identity(found), begun):
            self._rows[path] = self._new[path] = (path, *_identity(found), content)
        return content

    def _absent(self, path: str, error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise _unreadable(path, error) from error

    def _full(self, path: str) -> str:
        return path if path[:1] == "/" else self._prefix + path


def _identity(found: os.stat_result) -> Identity:
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _slack(mtime_ns: int) -> int:
    return SLACK_NS if mtime_ns % 1_000_000 else COARSE_SLACK_NS


def _content(found: os.stat_result, sha256: str) -> Content:
    return Content(("x:" if found.st_mode & stat.S_IXUSR else "f:") + sha256)


def _unreadable(path: str, error: OSError) -> Unhashable:
    if isinstance(error, FileNotFoundError):
        return Changed(path, "it vanishes while it is looked at")
    return Unhashable(path, f"cannot be read: {error.strerror}")


def _regular(path: str, found: os.stat_result) -> Identity:
    if not stat.S_ISREG(found.st_mode):
        raise Unhashable(path, f"{_kind(found.st_mode)} has no content to hash", fix="name a file or a directory")
    return _identity(found)


def _hash(path: str, found: Identity, done: Callable[[int], None] = lambda _count: None) -> tuple[os.stat_result, str]:
    """SHA-256 of a regular file that was `found` there, and what it was when that was read: it did not change meanwhile, or this raises Changed."""
    try:
        # A link that is swapped for a pipe after the stat must not hang us.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size, mtime_ns, ctime_ns = found.size, found.mtime_ns, found.ctime_ns
            for _ in range(_TRIES):
                if size < _CHUNK:
                    value = hashlib.sha256(os.read(handle, size + 1)).hexdigest()
                    done(size)
                else:
                    value = _hash_large(handle, size, done)
                now = os.fstat(handle)
                if now.st_ctime_ns == ctime_ns and now.st_mtime_ns == mtime_ns and now.st_size == size:
                    return now, value
                _regular(path, now)
                size, mtime_ns, ctime_ns = now.st_size, now.st_mtime_ns, now.st_ctime_ns
                os.lseek(handle, 0, os.SEEK_SET)
        finally:
            os.close(handle)
    except OSError as error:
        raise _unreadable(path, error) from error
    raise Changed(path)


def _hash_large(handle: int, size: int, done: Callable[[int], None]) -> str:
    """Block by block; the holes of a sparse file are hashed, not read."""
    hasher = hashlib.sha256()
    if os.fstat(handle).st_blocks * 512 < size:
        end = 0
        while end < size:
            begin = _seek(handle, end, os.SEEK_DATA, size)
            for left in range(begin - end, 0, -_CHUNK):
                hasher.update(_ZEROS[: min(left, _CHUNK)])
                done(min(left, _CHUNK))
            end = _seek(handle, begin, os.SEEK_HOLE, size)
            os.lseek(handle, begin, os.SEEK_SET)
            while begin < end and (data := os.read(handle, min(_CHUNK, end - begin))):
                hasher.update(data)
                begin += len(data)
                done(len(data))
    else:
        while data := os.read(handle, _CHUNK):
            hasher.update(data)
            done(len(data))
    return hasher.hexdigest()


def _seek(handle: int, at: int, whence: int, size: int) -> int:
    """Where the next data or hole begins, at most `size`."""
    try:
        return min(size, os.lseek(handle, at, whence))
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data behind this
            return size
        raise


def _hash_all(files: Sequence[tuple[str, Identity]], told: Progress | None = None) -> list[tuple[os.stat_result, str]]:
    """The digests of many files, in order; on two threads where that helps (hashing lets go of the interpreter)."""
    total = sum(found.size for _, found in files)
    if total < _WORTH_THREADS:
        return [_hash(path, found) for path, found in files]
    import threading

    counter = 0
    counting = threading.Lock()
    failures: list[BaseException] = []

    def done(count: int) -> None:
        nonlocal counter
        with counting:
            counter += count
            if told is not None:
                told(counter, total)
        if failures:
            raise failures[0]  # the other thread has given up: whoever waits shall not wait for a large file

    if len(files) < 2:
        return [_hash(path, found, done) for path, found in files]
    answer: list[tuple[os.stat_result, str] | None] = [None] * len(files)
    queue = _batches(files)
    turn = threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with turn:
                    batch = next(queue, None)
                if batch is None:
                    return
                for index in batch:
                    answer[index] = _hash(*files[index], done)
        except BaseException as error:
            failures.append(error)

    helper = threading.Thread(target=work, name="hash", daemon=True)
    helper.start()
    work()
    helper.join()
    if failures:
        raise failures[0]
    return cast("list[tuple[os.stat_result, str]]", answer)


def _batches(files: Sequence[tuple[str, Identity]]) -> Iterator[range]:
    """Runs of about a mebibyte: a lock per small file costs more than the file."""
    first = size = 0
    for n, (_, found) in enumerate(files):
        size += found.size + 4096
        if size >= _CHUNK:
            yield range(first, n + 1)
            first, size = n + 1, 0
    yield range(first, len(files))


# -- trees -------------------------------------------------------------------------------------------------------------------------------------------


_Row: TypeAlias = "tuple[int, int, int, int, int, int]"
"""What `_STATS` packs."""

_Read: TypeAlias = "tuple[str, int, os.stat_result, str]"
"""A file that had to be read: its folder, its number there, what it was then, its SHA-256."""


class _Folder(NamedTuple):
    """The files of one directory, as the file system lists them."""

    names: list[str]
    rows: list[_Row]


class _Sight(NamedTuple):
    """A tree as the file system shows it, before any file is opened.  `files` says how many."""

    folders: dict[str, _Folder]
    links: dict[str, str]
    empty: set[str]
    files: int


def _see(top: str) -> _Sight:
    if sys.getfilesystemencoding() != "utf-8":
        raise CannotRun(
            f"file names are read as {sys.getfilesystemencoding()} here: a tree would get another id than elsewhere", fix="set PYTHONUTF8=1"
        )
    folders: dict[str, _Folder] = {}
    links: dict[str, str] = {}
    empty: set[str] = set()
    count = 0
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        prefix, here = (f"{folder}/", f"{top}/{folder}") if folder else ("", top)
        names: list[str] = []
        rows: list[_Row] = []
        try:
            # By a handle each stat is spared the way from the root; for a few files that is less than the handle costs.
            handle = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if count > _MANY else None
            try:
                with os.scandir(here if handle is None else handle) as listing:
                    item = None
                    for item in listing:
                        found = item.stat(follow_symlinks=False)
                        mode = found.st_mode
                        kind = mode & 0o170000
                        if kind == _FILE:
                            names.append(item.name)
                            rows.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, mode & 0o100))
                        elif kind == _DIRECTORY:
                            waiting.append(prefix + item.name)
                        elif kind == _LINK:
                            links[prefix + item.name] = os.readlink(f"{here}/{item.name}")
                        else:
                            raise Unhashable(f"{here}/{item.name}", f"{_kind(mode)} has no content to hash", fix="keep it out of this directory")
            finally:
                if handle is not None:
                    os.close(handle)
        except OSError as error:
            raise _unreadable(here if error.filename is None else os.path.join(here, str(error.filename)), error) from error
        if names:
            folders[folder] = _Folder(names, rows)
            count += len(names)
        elif item is None and folder:
            empty.add(folder)
    for name, target in links.items():
        if link_leads_out(top, name, target, links):
            raise Unhashable(
                f"{top}/{name}", f"a link to {target} leads out of {top}", fix="replace it by what it points to, or declare that as well"
            )
    return _Sight(folders, links, empty, count)


def _manifest(top: str, sight: _Sight, known: Mapping[str, Sequence[str]], told: Progress | None = None) -> tuple[list[Entry], list[_Read], int]:
    """The entries of a tree, what had to be read for them, and when reading began.  `known` has the SHA-256 of the files of a folder, or ""."""
    manifest: list[Entry] = []
    doubtful: list[tuple[str, int, str, Identity]] = []
    for folder, (names, rows) in sight.folders.items():
        prefix = f"{folder}/" if folder else ""
        for n, (name, row, value) in enumerate(zip(names, rows, known.get(folder) or [""] * len(names), strict=True)):
            if value:
                manifest.append(Entry(prefix + name, "x" if row[5] else "f", row[2], value))
            else:
                doubtful.append((folder, n, prefix + name, Identity(*row[:5])))
    begun = time.time_ns()
    reads: list[_Read] = []
    if doubtful:
        digests = _hash_all([(f"{top}/{name}", found) for _, _, name, found in doubtful], told)
        for (folder, n, name, _), (found, value) in zip(doubtful, digests, strict=True):
            manifest.append(Entry(name, "x" if found.st_mode & stat.S_IXUSR else "f", found.st_size, value))
            reads.append((folder, n, found, value))
    manifest += [Entry(name, "l", len(os.fsencode(target)), target) for name, target in sight.links.items()]
    manifest += [Entry(name, "d", 0, "") for name in sight.empty]
    return sort(manifest), reads, begun


def sort(manifest: list[Entry]) -> list[Entry]:
    """Sorted by the bytes of the paths, in place."""
    try:
        for entry in manifest:
            entry.path.encode()  # text sorts as its UTF-8 does, as long as it is text
        manifest.sort(key=itemgetter(0))
    except UnicodeEncodeError:
        manifest.sort(key=lambda entry: entry.path.encode("utf-8", "surrogateescape"))
    return manifest


# -- listings ----------------------------------------------------------------------------------------------------------------------------------------

_Packed: TypeAlias = "tuple[bytes, bytes]"
"""The files of a directory: names with NUL between them, and as many records of `_STATS`."""


class _Listing(NamedTuple):
    """What is remembered of a large tree: `digests` has 32 bytes for each file of a folder, zeros where none may be believed.

    `content` is the tree's, where it is known and every file of it is."""

    content: str
    folders: dict[str, _Packed]
    links: dict[str, str]
    empty: set[str]
    digests: dict[str, bytes]


def _packed(sight: _Sight) -> dict[str, _Packed]:
    pack = _STATS.pack
    return {
        folder: ("\0".join(names).encode("utf-8", "surrogateescape"), b"".join(starmap(pack, rows)))
        for folder, (names, rows) in sight.folders.items()
    }


def _shows(listing: _Listing, sight: _Sight, packed: dict[str, _Packed]) -> bool:
    """Whether the tree looks exactly as it did: no file of it was touched in between."""
    return listing.folders == packed and listing.links == sight.links and listing.empty == sight.empty


def _recalled(listing: _Listing | None, folder: str, seen: _Packed) -> bytes:
    """The digests of the files of a folder, zeros for those that do not look as they did."""
    before = listing.folders.get(folder) if listing is not None else None
    if listing is None or before is None:
        return _UNKNOWN * (len(seen[1]) // _STATS.size)
    column = listing.digests[folder]
    if before == seen:
        return column
    known = {row: column[32 * n : 32 * n + 32] for n, row in enumerate(_files(before))}
    return b"".join(known.get(row, _UNKNOWN) for row in _files(seen))


def _files(seen: _Packed) -> Iterator[tuple[bytes, bytes]]:
    """Name and record of each file."""
    names, stats = seen
    return zip(names.split(b"\0"), (stats[at : at + _STATS.size] for at in range(0, len(stats), _STATS.size)), strict=True)


def _hexes(column: bytes) -> list[str]:
    """The digests of a folder as text; empty for those that are not believed."""
    text = column.hex()
    values = [text[at : at + 64] for at in range(0, len(text), 64)]
    return ["" if value == _UNKNOWN_HEX else value for value in values] if _UNKNOWN in column else values


_HEAD = "recipe-listing 1"


def _listing_path(folder: str, path: str) -> str:
    return f"{folder}/{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _save_listing(folder: str, path: str, listing: _Listing) -> None:
    """Write it whole or not at all.  It is only a memory: a disk that is full makes the next look slow and nothing wrong."""
    table = [[name, len(names), len(stats)] for name, (names, stats) in listing.folders.items()]
    about = {"path": path, "content": listing.content, "links": listing.links, "empty": sorted(listing.empty), "folders": table}
    parts = [json.dumps(about).encode(), b"\n"]
    for name, seen in listing.folders.items():
        parts += [*seen, listing.digests[name]]
    body = b"".join(parts)
    target = _listing_path(folder, path)
    temporary = f"{target}.{os.getpid()}.new"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(f"{_HEAD} {zlib.crc32(body):08x}\n".encode())
            file.write(body)
        os.replace(temporary, target)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass


def _load_listing(folder: str, path: str) -> _Listing | None:
    """What was saved; None when that was nothing, or is damaged."""
    try:
        with open(_listing_path(folder, path), "rb") as file:
            data = file.read()
        head, about, at = _listing_head(data)
        if head != f"{_HEAD} {zlib.crc32(memoryview(data)[len(head) + 1 :]):08x}" or about["path"] != path:
            return None
        folders: dict[str, _Packed] = {}
        digests: dict[str, bytes] = {}
        for name, names, stats in about["folders"]:
            end = at + names + stats
            folders[name] = data[at : at + names], data[at + names : end]
            at = end + 32 * (stats // _STATS.size)
            digests[name] = data[end:at]
        return _Listing(about["content"], folders, about["links"], set(about["empty"]), digests)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _listing_head(data: bytes) -> tuple[str, Any, int]:
    first = data.index(b"\n")
    second = data.index(b"\n", first + 1)
    return data[:first].decode(), json.loads(data[first + 1 : second]), second + 1


def forget_listings(folder: str | Path, root: str | Path) -> None:
    """Remove the listings of trees that are not there any more.  Paths are relative to `root`."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            with open(f"{folder}/{name}", "rb") as file:
                _, about, _ = _listing_head(file.readline() + file.readline())
            gone = not os.path.isdir(os.path.join(root, about["path"]))
        except (OSError, ValueError, KeyError, TypeError):
            gone = True
        if gone:
            try:
                os.unlink(f"{folder}/{name}")
            except OSError:
                pass


def link_leads_out(top: str, name: str, target: str, links: Container[str]) -> bool:
    """Whether a link leaves the tree: by its text, since the tree can be moved, or in fact, through others of its `links`."""
    parts: list[str] = name.split("/")[:-1]
    through = False
    if target.startswith("/"):
        return True
    for part in target.split("/"):
        if part == "..":
            if not parts:
                return True
            parts.pop()
        elif part and part != ".":
            parts.append(part)
            through = through or "/".join(parts) in links
    if not through:
        return False
    real_top, real = os.path.realpath(top), os.path.realpath(f"{os.path.dirname(f'{top}/{name}')}/{target}")
    return real != real_top and not real.startswith(real_top.rstrip("/") + "/")


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def no_space(error: OSError, path: str) -> Infrastructure:
    """Words for a full disk, with what is free."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = os.statvfs(os.path.dirname(path) or "/")
        return Infrastructure(
            f"the disk is full: {path} could not be written ({free.f_bavail * free.f_frsize} bytes and {free.f_favail} inodes free)",
            fix="free some space, or run `recipe gc`",
        )
    return Infrastructure(f"{path}: {error.strerror}")
