"""Say what a path holds, as a content id, without reading it twice.  Knows stat and SHA-256, not what a path is for.

A content id is `f:<sha256>` for a plain file, `x:<sha256>` for an executable one, `t:<sha256>` for a tree.  A tree's digest is that of its
sorted entries: files, links that stay inside it, and empty directories; owners, times and other permissions are not content.

A digest is remembered with the identity (device, inode, size, mtime, ctime) that the file had *before* it was read, and only when that identity was
already old: a change in the same tick of the file system's clock would not show in it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NewType, TypeAlias

from .. import digest
from ..errors import CannotRun

Content = NewType("Content", str)
"""`f:`, `x:` or `t:` and 64 lowercase hex digits."""

FileRow: TypeAlias = "tuple[str, int, int, int, int, int, str]"
"""path, dev, ino, size, mtime_ns, ctime_ns, content: a remembered digest."""

SLACK_NS = 20_000_000  # more than a tick of any kernel's file clock
COARSE_SLACK_NS = 2_000_000_000  # FAT counts two seconds
_CHUNK = 1 << 20
_WORTH_THREADS = 4 << 20
_SQLITE_MAX = 1 << 63


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
    return _content(found.st_mode, _hash(name, found))


def entries(path: str | Path) -> list[Entry]:
    """The manifest of the tree at `path`, read now."""
    return _entries(str(path), lambda _name, _found: None, lambda _name, _found, _content, _at: None)


def tree_id(manifest: Sequence[Entry]) -> Content:
    """The content id of a tree with these entries, sorted as `entries` gives them."""
    return Content("t:" + digest.of_value("tree/1", manifest))


def settled(found: Identity, at_ns: int) -> bool:
    """Whether a digest begun at `at_ns` may be remembered under this identity: no later change can look the same."""
    slack = SLACK_NS if found.mtime_ns % 1_000_000 else COARSE_SLACK_NS
    return at_ns - max(found.mtime_ns, found.ctime_ns) > slack


class DigestCache:
    """What the files of a workspace hold.  Paths are relative to `root`, or absolute, and are remembered as they were given."""

    def __init__(self, root: str | Path, rows: Iterable[FileRow] = ()) -> None:
        self._prefix = str(root).rstrip("/") + "/"
        self._rows: dict[str, FileRow] = {row[0]: row for row in rows}
        self._new: dict[str, FileRow] = {}

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
                answer[path] = tree_id(self.entries(path))
            else:
                doubtful.append((path, found))
        if doubtful:
            begun = time.time_ns()
            digests = _hash_all([(self._full(path), found) for path, found in doubtful])
            for (path, found), value in zip(doubtful, digests, strict=True):
                answer[path] = self._remember(path, found, _content(found.st_mode, value), begun)
        return answer

    def entries(self, path: str) -> list[Entry]:
        """The manifest of the tree at `path`; its files are remembered one by one."""

        def known(name: str, found: os.stat_result) -> str | None:
            row = self._rows.get(f"{path}/{name}")
            return row[6][2:] if row is not None and row[1:6] == _identity(found) else None

        def learned(name: str, found: os.stat_result, content: Content, at_ns: int) -> None:
            self._remember(f"{path}/{name}", found, content, at_ns)

        return _entries(self._full(path), known, learned)

    def note(self, path: str, content: Content) -> None:
        """Remember the file we have just put at `path`.

        A file of our making carries an mtime older than the tick in which it appeared (`artifacts` dates it back), so that any later write shows;
        without that it is too young to be believed, and is read when somebody asks.
        """
        found = _stat(self._full(path))
        if found is not None and stat.S_ISREG(found.st_mode):
            self._note(path, found, content)

    def note_tree(self, path: str, manifest: Iterable[Entry]) -> None:
        """Remember the files of a tree we have just put at `path`."""
        for entry in manifest:
            if entry.kind in "fx":
                self.note(f"{path}/{entry.path}", Content(f"{entry.kind}:{entry.value}"))

    def changes(self) -> list[FileRow]:
        """What was learned since the last call, for the store's `files` table."""
        rows = [row for row in self._new.values() if row[2] < _SQLITE_MAX and row[1] < _SQLITE_MAX and row[0].isprintable()]
        self._new = {}
        return rows

    def _note(self, path: str, found: os.stat_result, content: Content) -> None:
        slack = SLACK_NS if found.st_mtime_ns % 1_000_000 else COARSE_SLACK_NS
        if found.st_ctime_ns - found.st_mtime_ns > slack:
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


def _content(mode: int, sha256: str) -> Content:
    return Content(("x:" if mode & stat.S_IXUSR else "f:") + sha256)


def _unreadable(path: str, error: OSError) -> Unhashable:
    return Unhashable(path, f"cannot be read: {error.strerror}")


def _hash(path: str, found: os.stat_result) -> str:
    """SHA-256 of a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise Unhashable(path, f"{_kind(found.st_mode)} has no content to hash", fix="name a file or a directory")
    try:
        # A link that is swapped for a pipe after the stat must not hang us.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if found.st_size < _CHUNK:
                data = os.read(handle, found.st_size + 1)
                hasher = hashlib.sha256(data)
                if len(data) == found.st_size:
                    return hasher.hexdigest()
            else:
                hasher = hashlib.sha256()
            while data := os.read(handle, _CHUNK):
                hasher.update(data)
            return hasher.hexdigest()
        finally:
            os.close(handle)
    except OSError as error:
        raise _unreadable(path, error) from error


def _hash_all(files: Sequence[tuple[str, os.stat_result]]) -> list[str]:
    """The digests of many files, in order; on two threads where that helps (hashing lets go of the interpreter)."""
    if len(files) < 2 or sum(found.st_size for _, found in files) < _WORTH_THREADS:
        return [_hash(path, found) for path, found in files]
    import threading

    answer = [""] * len(files)
    failures: list[BaseException] = []
    queue = iter(range(len(files)))
    turn = threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with turn:
                    index = next(queue, None)
                if index is None:
                    return
                answer[index] = _hash(*files[index])
        except BaseException as error:
            failures.append(error)

    helper = threading.Thread(target=work, name="hash", daemon=True)
    helper.start()
    work()
    helper.join()
    if failures:
        raise failures[0]
    return answer


_Known: TypeAlias = "Callable[[str, os.stat_result], str | None]"
_Learned: TypeAlias = "Callable[[str, os.stat_result, Content, int], None]"


def _entries(top: str, known: _Known, learned: _Learned) -> list[Entry]:
    manifest: list[Entry] = []
    doubtful: list[tuple[str, os.stat_result]] = []
    for name, found, target in _walk(top):
        if found is None:
            manifest.append(Entry(name, "l" if target else "d", len(os.fsencode(target)), target))
        elif (value := known(name, found)) is not None:
            manifest.append(Entry(name, "x" if found.st_mode & stat.S_IXUSR else "f", found.st_size, value))
        else:
            doubtful.append((name, found))
    if doubtful:
        begun = time.time_ns()
        digests = _hash_all([(f"{top}/{name}", found) for name, found in doubtful])
        for (name, found), value in zip(doubtful, digests, strict=True):
            content = _content(found.st_mode, value)
            manifest.append(Entry(name, content[0], found.st_size, value))
            learned(name, found, content, begun)
    manifest.sort(key=lambda entry: os.fsencode(entry.path))
    return manifest


def _walk(top: str) -> Iterator[tuple[str, os.stat_result | None, str]]:
    """(relative path, stat of a file, "") · (path, None, link target) · (path, None, "") for an empty directory; in no order."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(f"{top}/{folder}" if folder else top) as listing:
                items = list(listing)
            if not items and folder:
                yield folder, None, ""
            for item in items:
                name = f"{folder}/{item.name}" if folder else item.name
                found = item.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield name, found, ""
                elif stat.S_ISDIR(found.st_mode):
                    waiting.append(name)
                elif stat.S_ISLNK(found.st_mode):
                    yield name, None, _inner_link(top, name)
                else:
                    raise Unhashable(f"{top}/{name}", f"{_kind(found.st_mode)} has no content to hash", fix="keep it out of this directory")
        except OSError as error:
            raise _unreadable(error.filename or f"{top}/{folder}", error) from error


def _inner_link(top: str, name: str) -> str:
    """Where the link points, if that is inside the tree."""
    path = f"{top}/{name}"
    target = os.readlink(path)
    if link_leads_out(top, name, target):
        raise Unhashable(path, f"a link to {target} leads out of {top}", fix="replace it by what it points to, or declare that as well")
    return target


def link_leads_out(top: str, name: str, target: str, links: Container[str] | None = None) -> bool:
    """Whether a link leaves the tree: by its text, since the tree can be moved, or in fact, through other links.

    With `links`, the paths of all links in the tree, the disk is asked only about those that lead through another."""
    parts: list[str] = name.split("/")[:-1]
    through = links is None
    if target.startswith("/"):
        return True
    for part in target.split("/"):
        if part == "..":
            if not parts:
                return True
            parts.pop()
        elif part and part != ".":
            parts.append(part)
            through = through or "/".join(parts) in (links or ())
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
