"""Keep content by its name: put files and trees away once, give them out as copies or links.  Knows nothing of steps, traces or SQL.

Under `objects/ab/`, for a SHA-256 that begins with `ab`: `<sha256>` is a plain file, `<sha256>.x` an executable one, `<sha256>.t` a tree and
`<sha256>.t.json` its manifest, whose digest the tree's name is.  Everything is read-only and appears by one rename.

A file of a few bytes may be a row of a table instead, stored together with the trace that names it: making a file of it costs more than the rest.
Until then it is a record in a log below `partial/`, so that whoever comes after a kill knows it for ours, and takes it over.

Up to `SMALL` bytes a file is hashed every time it is given out: that costs less than remembering.  Larger files and trees have a seal: what the file
system said about them after their last change of ours.  A seal that does not match, or none, means that the object is hashed before it is used; so an
edit is never taken for the result, not even one by root through a hard link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from ..errors import Corrupt, Infrastructure
from . import files
from .crash import crashpoint
from .files import Content, Entry

TINY = 4 << 10  # bytes; up to it a row costs less than a file
SMALL = 64 << 10  # bytes; below it copying beats every kind of link
SYNCED = 1 << 20  # bytes; from here on an object is on the disk before anybody hears of it
RECENT = 8 << 20  # bytes of small contents kept in memory
_CHUNK = 1 << 20
_FICLONE = 0x40049409
_BACKDATE_NS = 2 * files.SLACK_NS  # see DigestCache.note
_SUFFIX = {"f": "", "x": ".x", "t": ".t"}
_MODE = {"f": 0o444, "x": 0o555}
_LOG = ".tiny"  # how logs of tiny contents end
_count = itertools.count(1)


class Seal(NamedTuple):
    """What the file system says about an intact object, and the boot in which we saw that."""

    content: Content
    mark: str
    boot: str
    size: int
    at: float


class Table(Protocol):
    """Where tiny contents lie: see `store.Store`."""

    def tiny(self, contents: Sequence[Content]) -> dict[Content, bytes]:
        """The bytes of those that are there."""
        ...

    def tinies(self) -> dict[Content, float]:
        """All that are there, and when each was put there last."""
        ...

    def forget_tiny(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete those that were put there last before then, and say which."""
        ...


class Objects:
    """The local content store below `root` (`.recipe`).  Without a table every content is a file."""

    def __init__(self, root: Path, recall: Callable[[Content], Seal | None] = lambda _content: None, table: Table | None = None) -> None:
        self._root = str(root)
        self._recall = recall
        self._table = table
        self._tiny: dict[Content, bytes] = {}  # not stored yet
        self._tiny_lock = threading.Lock()  # large outputs are taken in a thread, tiny ones beside them, too
        self._logs: list[str] = []  # where those are written meanwhile
        self._log = -1  # descriptor of the last of them, if it is ours and open
        self._rows: set[Content] = set()  # known to be in the table
        if table is not None:  # the umask cannot be asked for, and setting it is not for threads
            mask = os.umask(0o22)
            os.umask(mask)
            self._mode = 0o666 & ~mask
        self._seals: dict[Content, Seal] = {}
        self._new: dict[Content, Seal] = {}
        self._cloning: dict[tuple[int, int], bool] = {}
        self._recent: dict[str, bytes] = {}  # small contents that were taken lately: the next step will ask for them
        self._recent_size = 0
        self._boot = _boot_id()

    # -- putting away

    def take(self, path: str | Path, found: os.stat_result | None = None) -> Content:
        """Put away what is at `path`, and answer what it is.  It stays there, read-only: files become links to the object where that is possible.

        `found` is what the file system says of it, if that was asked already.  Delete it with `release`.
        """
        name = str(path)
        try:
            found = found or os.lstat(name)
            if stat.S_ISREG(found.st_mode) and found.st_size <= SMALL and found.st_nlink == 1:
                return self._take_small(name, found)
        except OSError as error:
            _fail(name, error)
        before = _mark(name, moves=True)
        manifest = files.entries(name) if os.path.isdir(name) else None
        content = files.scan(name) if manifest is None else files.tree_id(manifest)
        self._put(name, content, manifest, before, stays=True)
        return content

    def release(self, content: Content, path: str) -> None:
        """Delete `path`, from which `content` was taken.  Its files are links to the object, whose seal must not break by that."""
        target, seal = self._path(content), self._sealed(content)
        sealed = seal is not None and seal.boot == self._boot and seal.mark == _mark(target)[1]
        before = _mark(target, moves=True) if sealed else (0, "")
        delete(Path(path))
        if sealed and _mark(target, moves=True) == before:
            self._seal(content, target, before[0])

    def remember(self, path: str, found: os.stat_result) -> Content | None:
        """What the plain file at `path` is, if it is so small that its bytes are remembered, and it stays where it is: see `unstored`.

        `found` is what the file system says of it.
        """
        if self._table is None or found.st_size > TINY or found.st_nlink != 1 or not found.st_mode & stat.S_IWUSR:
            return None
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read(TINY + 1)
        except OSError as error:
            _fail(path, error)
        if len(data) != found.st_size:
            _changed(path)
        content = Content(f"{'x' if found.st_mode & stat.S_IXUSR else 'f'}:{hashlib.sha256(data).hexdigest()}")
        with self._tiny_lock:
            self._write_log(content, data)
            self._tiny[content] = data
        self._rows.add(content)
        self._keep_recent(content, data)
        crashpoint("object-put")
        return content

    def unstored(self) -> tuple[dict[Content, bytes], list[str]]:
        """The tiny contents that came since the last call, to be stored with the first mention of them, and the logs to be deleted after that."""
        with self._tiny_lock:
            tiny, self._tiny = self._tiny, {}
            logs, self._logs = self._logs, []
            if self._log >= 0:
                os.close(self._log)
                self._log = -1
        return tiny, logs

    def inherit(self) -> None:
        """Take over the tiny contents that a process had when it was killed."""
        for path in self._tiny_logs():
            maker = os.path.basename(path).split("-")[0]
            if not os.path.exists(f"/proc/{maker}"):
                for content, data in _records(path):
                    self._tiny[content] = data
                self._logs.append(path)

    def _write_log(self, content: Content, data: bytes) -> None:
        record = b"%s %d\n%s\n" % (content.encode(), len(data), data)
        try:
            if self._log < 0:
                self._logs.append(f"{self._temporary()}{_LOG}")
                self._log = os.open(self._logs[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if os.write(self._log, record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._logs[-1])
        except OSError as error:
            _fail(f"{self._root}/partial", error)

    def _logged(self, content: Content) -> bytes | None:
        """What a process, alive or dead, has written down of a content and not stored yet."""
        return next((data for path in self._tiny_logs() for name, data in _records(path) if name == content), None)

    def _tiny_logs(self) -> list[str]:
        folder = f"{self._root}/partial"
        return [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(_LOG)] if os.path.isdir(folder) else []

    def expect(self, contents: Sequence[Content]) -> None:
        """These will be asked for: read in one go what is tiny of them."""
        if self._table is not None:
            for content, data in self._table.tiny(contents).items():
                if hashlib.sha256(data).hexdigest() == content[2:]:
                    self._rows.add(content)
                    self._keep_recent(content, data)

    def put(self, path: Path, content: Content, *, move: bool) -> None:
        """Put away what is at `path`, which holds `content`.  With `move` the path may be gone afterwards."""
        name = str(path)
        manifest = files.entries(name) if content[0] == "t" else None
        if manifest is not None and files.tree_id(manifest) != content:
            _changed(name)
        self._put(name, content, manifest, _mark(name, moves=True) if move else None)

    def _put(self, name: str, content: Content, manifest: list[Entry] | None, before: tuple[int, str] | None, *, stays: bool = False) -> None:
        """`before` is what the file system said before the bytes were hashed: they are moved, or linked where `name` stays.  Without it, copied."""
        target = self._path(content)
        try:
            if self._keep(content, target):
                return
            alone = before is not None and _alone(name, os.stat(f"{self._root}/objects").st_dev)
            source = name if alone and not stays else self._copy_in(name, content, manifest, link=alone)
            _protect(source)
            if alone and _mark(name, moves=True) != before:
                _changed(name)
            size = _total(source)
            if size >= SYNCED:
                _sync(source)
            if manifest is None:
                self._place(source, target)
            else:
                self._put_manifest(target, manifest)
                self._place_tree(source, target, content)
            if size >= SYNCED:
                sync_one(os.path.dirname(target))
            crashpoint("object-put")
            self._seal(content, target, size)
        except OSError as error:
            _fail(name, error)

    # -- asking

    def path(self, content: Content) -> Path:
        """Where `content` lies, if it does.  One that had no file of its own has one from now on."""
        target = self._path(content)
        if content[0] != "t" and not os.path.lexists(target) and (data := self._row(content)) is not None:
            temporary = self._temporary()
            try:
                _write(temporary, data, content[0])
                os.chmod(temporary, _MODE[content[0]])
                self._place(temporary, target)
            except OSError as error:
                _fail(target, error)
        return Path(target)

    def has(self, content: Content) -> bool:
        return content in self._rows or os.path.lexists(self._path(content)) or self._row(content) is not None

    def all(self, before: float = math.inf) -> Iterator[Content]:
        """Every object that is here, and was put away last before then: seconds since the epoch."""
        rows = self._table.tinies() if self._table is not None else {}
        kinds = {suffix: kind for kind, suffix in _SUFFIX.items()}
        folder = f"{self._root}/objects"
        for prefix in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if len(prefix) == 2:
                for name in sorted(os.listdir(f"{folder}/{prefix}")):
                    if (kind := kinds.get(name[64:])) is not None and len(name) >= 64:
                        content = Content(f"{kind}:{name[:64]}")
                        row = rows.pop(content, -math.inf)
                        if row < before and (before == math.inf or os.lstat(f"{folder}/{prefix}/{name}").st_ctime < before):
                            yield content
        yield from sorted(content for content, at in rows.items() if at < before)

    def size(self, content: Content) -> int:
        """Bytes of content, without hashing."""
        target = self._path(content)
        return len(self._row(content) or b"") if not os.path.lexists(target) else _total(target)

    def verify(self, content: Content) -> bool:
        """Whether the object is here and its bytes are what its name says; reads all of it."""
        try:
            return files.scan(self._path(content)) == content
        except files.Unhashable:
            return self._row(content) is not None

    def intact(self, content: Content) -> bool:
        """Whether the object may be used: its seal holds, or else its bytes were hashed just now and are right."""
        target = self._path(content)
        size, mark = _mark(target)
        if not mark:
            return self._row(content) is not None
        seal = self._sealed(content)
        holds = seal is not None and seal.mark == mark
        if holds and seal is not None and (seal.boot == self._boot or (content[0] != "t" and size >= SYNCED)):
            return True
        good = self._verify_unsynced(content, target) if holds and content[0] == "t" else self.verify(content)
        if good:
            self._seal(content, target, size)
        return good

    def entries(self, content: Content) -> list[Entry]:
        """The manifest of a tree."""
        target = self._path(content)
        try:
            with open(f"{target}.json", encoding="utf-8", errors="surrogateescape") as file:
                manifest = [Entry(*row) for row in json.load(file)]
            if files.tree_id(manifest) == content:
                return manifest
        except (OSError, ValueError, TypeError):
            pass
        # The manifest is only a shortcut; the tree itself says the same.
        try:
            manifest = files.entries(target)
        except files.Unhashable as error:
            raise Corrupt(str(error)) from error
        if files.tree_id(manifest) != content:
            raise Corrupt(f"{target}: the stored tree is not what its name says", fix="run again: the step that makes it will be run")
        return manifest

    def outlined(self, content: Content) -> bool:
        """Whether the manifest of a tree can be read, though the tree may not be here."""
        target = self._path(content)
        return os.path.lexists(f"{target}.json") or os.path.lexists(target)

    def outline(self, content: Content, manifest: Sequence[Entry]) -> None:
        """Put away the manifest of a tree that is not here."""
        try:
            self._put_manifest(self._path(content), manifest)
        except OSError as error:
            _fail(self._path(content), error)

    def matching(self, content: Content, pattern: str) -> list[Entry]:
        """The files of a tree that match a glob: `*` and `?` stay within a name, `**` does not."""
        fits = glob(pattern)
        return [entry for entry in self.entries(content) if entry.kind != "d" and fits(entry.path)]

    # -- giving out

    def copy_to(self, content: Content, target: str | Path, *, link: bool = False, spare: Callable[[str], bool] = lambda _path: False) -> None:
        """Make `target` hold `content`, replacing what is there at once.  `link`: as a read-only hard link, where the file system can.

        `spare` puts a plain file that may be written over at a path, and answers whether it had one.
        """
        name, source = str(target), self._path(content) if not link else str(self.path(content))
        try:
            small = None if content[0] == "t" or link else self._read_small(content, source)
            if small is None:
                self._demand(content)
            temporary = self._temporary()
            if small is not None and content[0] == "f" and spare(temporary):
                overwrite(temporary, small, self._mode)
                os.utime(temporary, ns=_backdated())
            elif small is not None:
                _write(temporary, small, content[0])
            elif content[0] == "t":
                self._copy_tree(self.entries(content), source, temporary, link=link)
            else:
                self._copy_file(source, temporary, content[0], link=link)
            crashpoint("copy-written")
            self._place(temporary, name)
            if link:
                if os.path.lexists(temporary):  # both were names of one file: a rename does nothing then
                    os.unlink(temporary)
                self._seal(content, source, _total(source))
        except OSError as error:
            _fail(name, error)

    def small(self, content: Content) -> bytes | None:
        """The bytes of a small file, verified; None for a tree or anything larger."""
        return None if content[0] == "t" else self._read_small(content, self._path(content))

    def stage(self, content: Content, target: Path) -> None:
        """Put `content` into an attempt directory, where nothing is yet: a small file as a writable copy, the rest as a link to the object."""
        name, source = str(target), self._path(content)
        try:
            small = None if content[0] == "t" else self._read_small(content, source)
            if small is None:
                self._demand(content)
            if small is not None:
                _write(name, small, content[0])
                return
            if not os.path.isdir(folder := os.path.dirname(name)):
                os.makedirs(folder, exist_ok=True)
            os.symlink(source, name)
        except OSError as error:
            _fail(name, error)

    # -- throwing away

    def remove(self, content: Content, *, before: float = math.inf) -> bool:
        """Delete an object, unless it was put (again) since `before`.  Whoever deletes traces does that first."""
        target = self._path(content)
        row = content in self.remove_rows([content], before=before)
        try:
            with self._turn():
                if os.lstat(target).st_ctime >= before:
                    return False
                aside = self._temporary()
                if stat.S_ISDIR(os.lstat(target).st_mode):
                    os.chmod(target, 0o700)
                os.rename(target, aside)
            self._seals.pop(content, None)
            self._new.pop(content, None)
            _delete(aside)
            if content[0] == "t" and os.path.lexists(f"{target}.json"):
                os.unlink(f"{target}.json")
        except FileNotFoundError:
            return row
        except OSError as error:
            _fail(target, error)
        return True

    def remove_rows(self, contents: Sequence[Content], *, before: float = math.inf) -> set[Content]:
        """The same for many at once, as far as they are rows and no files: those of them that were."""
        gone = self._table.forget_tiny(contents, before) if self._table is not None else set()
        for content in gone:
            self._rows.discard(content)
            self._recent.pop(content[2:], None)
        return gone

    def sweep(self, *, before: float) -> None:
        """Delete what processes that are dead by now were writing, if they began before then: no run that lives on another machine did."""
        folder = f"{self._root}/partial"
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            maker = name.split("-")[0]
            if maker.isdecimal() and os.path.exists(f"/proc/{maker}"):
                continue
            with contextlib.suppress(FileNotFoundError):  # it was not dead, and is done
                if os.lstat(f"{folder}/{name}").st_ctime < before:
                    _delete(f"{folder}/{name}")
        self._forget_outlines(before)

    def _forget_outlines(self, before: float) -> None:
        """Delete manifests of trees that are not here: they came from a store, and come again."""
        for prefix in os.listdir(f"{self._root}/objects"):
            for name in os.listdir(f"{self._root}/objects/{prefix}"):
                path = f"{self._root}/objects/{prefix}/{name}"
                if name.endswith(".t.json") and not os.path.lexists(path[: -len(".json")]) and os.lstat(path).st_ctime < before:
                    os.unlink(path)

    def learned(self, seals: Iterable[Seal]) -> None:
        """Take over the seals that another store over the same folder has made."""
        for seal in seals:
            self._seals[seal.content] = self._new[seal.content] = seal

    def changes(self) -> list[Seal]:
        """The seals made since the last call, for the store's `objects` table."""
        seals, self._new = list(self._new.values()), {}
        return seals

    # -- below

    def _path(self, content: Content) -> str:
        return f"{self._root}/objects/{content[2:4]}/{content[2:]}{_SUFFIX[content[0]]}"

    def _take_small(self, name: str, found: os.stat_result) -> Content:
        kind = "x" if found.st_mode & stat.S_IXUSR else "f"
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = os.read(handle, found.st_size + 1)
            if len(data) != found.st_size:
                _changed(name)
            os.fchmod(handle, _MODE[kind])
        finally:
            os.close(handle)
        content = Content(f"{kind}:{hashlib.sha256(data).hexdigest()}")
        try:
            os.link(name, self._path(content))
        except OSError:  # it is there, or its folder is not, or there are no links here
            self._put(name, content, None, _mark(name, moves=True), stays=True)
        else:
            crashpoint("object-put")
        self._keep_recent(content, data)
        return content

    def _keep_recent(self, content: Content, data: bytes) -> None:
        if self._recent_size > RECENT:
            self._recent.clear()
            self._recent_size = 0
        self._recent[content[2:]] = data
        self._recent_size += len(data) + 200

    def _row(self, content: Content) -> bytes | None:
        """The bytes of a tiny content that are in the table, or will be, if they are sound."""
        data = self._tiny.get(content) or (self._recent.get(content[2:]) if content in self._rows else None)
        if data is None and self._table is not None and content[0] != "t":
            data = self._table.tiny([content]).get(content)
            if data is None or hashlib.sha256(data).hexdigest() != content[2:]:
                return self._logged(content)
        return data

    def _keep(self, content: Content, target: str) -> bool:
        """Whether a good object is here already; if so it is young again, so that a gc that has decided otherwise leaves it."""
        if not os.path.lexists(target) or not self.intact(content):
            return False
        with self._turn():
            try:
                os.utime(target, follow_symlinks=False)
            except FileNotFoundError:
                return False
        self._seal(content, target, _total(target))
        return True

    def _turn(self) -> _Turn:
        return _Turn(f"{self._root}/objects")

    def temporary(self) -> str:
        """A path below `partial/` that nobody else uses: on the file system of the objects, and swept up if we die."""
        return self._temporary()

    def _temporary(self) -> str:
        return f"{self._root}/partial/{os.getpid()}-{time.time_ns():x}-{next(_count)}"

    def _copy_in(self, name: str, content: Content, manifest: list[Entry] | None, *, link: bool) -> str:
        """A copy below `partial`, verified; with `link` its files are links, which hold what `name` does."""
        temporary = self._temporary()
        if manifest is not None:
            self._copy_tree(manifest, name, temporary, link=link)
        else:
            self._copy_file(name, temporary, content[0], link=link)
        if not link and files.scan(temporary) != content:
            _delete(temporary)
            _changed(name)
        return temporary

    def _put_manifest(self, target: str, manifest: Sequence[Entry]) -> None:
        temporary = self._temporary()
        text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":"))
        _write(temporary, text.encode("utf-8", "surrogateescape"), "f")
        self._place(temporary, f"{target}.json")

    def _place_tree(self, source: str, target: str, content: Content) -> None:
        """Give a tree its name as an object.  A good one that another process put there meanwhile stays: somebody may be reading it."""
        with self._turn():
            if os.path.lexists(target) and self.intact(content):
                _delete(source)
            else:
                self._place(source, target)
                os.chmod(target, _MODE["x"])

    def _place(self, source: str, target: str) -> None:
        """Rename, making what is missing above and moving away what is in the way."""
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
                if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST) and os.path.lexists(target):
                    aside += self._set_aside(target)
                    continue
                if error.errno != errno.EXDEV:
                    raise
                near = self._beside(target)
                self._copy_across(source, near)
                _delete(source)
                source = near
        for name in aside:
            _delete(name)

    def _set_aside(self, target: str) -> list[str]:
        """The new name of what was at `target`; none when another process was faster."""
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
            self._copy_tree(files.entries(source), source, target, link=False)
        else:
            mode = os.stat(source).st_mode
            self._copy_file(source, target, "x" if mode & stat.S_IXUSR else "f", link=False)
            if not mode & stat.S_IWUSR:
                os.chmod(target, stat.S_IMODE(mode))

    def _read_small(self, content: Content, source: str) -> bytes | None:
        """The bytes, verified, if they are few."""
        recent = self._recent.get(content[2:])
        if recent is not None:
            return recent
        try:
            handle = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if (row := self._row(content)) is None:
                _missing(content, source)
            return row
        try:
            data = os.read(handle, SMALL + 1)
        finally:
            os.close(handle)
        if len(data) > SMALL:
            return None
        if hashlib.sha256(data).hexdigest() != content[2:]:
            _damaged(source)
        return data

    def _demand(self, content: Content) -> None:
        if not self.has(content):
            _missing(content, self._path(content))
        if not self.intact(content):
            _damaged(self._path(content))

    def _copy_tree(self, manifest: Sequence[Entry], source: str, target: str, *, link: bool) -> None:
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
                self._copy_file(f"{source}/{entry.path}", f"{target}/{entry.path}", entry.kind, link=link)

    def _copy_file(self, source: str, target: str, kind: str, *, link: bool) -> None:
        if link and self._link(source, target):
            return
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            handle = _create(target, kind)
            try:
                if not self._clone(origin, handle):
                    _pour(origin, handle)
                _backdate(handle)
            finally:
                os.close(handle)
        finally:
            os.close(origin)

    def _link(self, source: str, target: str) -> bool:
        while True:
            try:
                os.link(source, target)
                return True
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target))
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                return False

    def _clone(self, origin: int, handle: int) -> bool:
        """Share the blocks, where the file system can."""
        pair = (os.fstat(origin).st_dev, os.fstat(handle).st_dev)
        if not self._cloning.get(pair, True):
            return False
        try:
            fcntl.ioctl(handle, _FICLONE, origin)
        except OSError:
            self._cloning[pair] = False
            return False
        return True

    def _sealed(self, content: Content) -> Seal | None:
        seal = self._seals.get(content)
        if seal is None and (seal := self._recall(content)) is not None:
            self._seals[content] = seal
        return seal

    def _seal(self, content: Content, target: str, size: int) -> None:
        if content[0] == "t" or size > SMALL:
            self._seals[content] = self._new[content] = Seal(content, _mark(target)[1], self._boot, size, time.time())

    def _verify_unsynced(self, content: Content, target: str) -> bool:
        """After a power cut: a tree whose seal holds, but whose small files were perhaps never written out."""
        try:
            for entry in self.entries(content):
                if entry.kind in "fx" and entry.size < SYNCED and files.scan(f"{target}/{entry.path}") != f"{entry.kind}:{entry.value}":
                    return False
        except (Corrupt, files.Unhashable):
            return False
        return True


def delete(path: Path) -> None:
    """Delete a file or a tree, read-only or not, if it is there."""
    try:
        _delete(str(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        _fail(str(path), error)


def delete_whole(path: Path) -> None:
    """The same; `path` goes first, so that a kill leaves half of it only under another name."""
    gone = path.with_name(f"{path.name}.gone")
    delete(gone)
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
    delete(gone)


def overwrite(path: str, data: bytes, mode: int = 0o644) -> os.stat_result:
    """Make an existing file hold `data`.  Never truncated to nothing first: file systems take that for a replacement and write it out at once."""
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


def _records(log: str) -> Iterator[tuple[Content, bytes]]:
    """The sound records of a log of tiny contents; it ends where the first is damaged."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        while len(words := file.readline().split()) == 2 and words[1].isdigit() and int(words[1]) <= TINY:
            data = file.read(int(words[1]))
            content = Content(words[0].decode("ascii", "replace"))
            if hashlib.sha256(data).hexdigest() != content[2:] or file.read(1) != b"\n":
                return
            yield content, data


class _Turn:
    """Putting an object that exists and removing one take turns, across processes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _create(path: str, kind: str) -> int:
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o777 if kind == "x" else 0o666)
        except FileNotFoundError:
            folder = os.path.dirname(path)
            if os.path.isdir(folder):
                raise
            os.makedirs(folder, exist_ok=True)


def _write(path: str, data: bytes, kind: str) -> None:
    handle = _create(path, kind)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        _backdate(handle)
    finally:
        os.close(handle)


def _backdate(handle: int) -> None:
    os.utime(handle, ns=_backdated())


def _backdated() -> tuple[int, int]:
    """Times of access and change for a file of our making."""
    now = time.time_ns()
    mtime = now - _BACKDATE_NS
    return now, mtime + 1 if mtime % 1_000_000 == 0 else mtime


def _pour(origin: int, handle: int) -> None:
    try:
        while os.copy_file_range(origin, handle, 1 << 30):
            pass
        return
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
    while data := os.read(origin, _CHUNK):
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]


def _below(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """`path` and everything below it, a directory before what it holds."""
    waiting = [path]
    while waiting:
        name = waiting.pop()
        found = os.lstat(name)
        yield name, found
        if stat.S_ISDIR(found.st_mode):
            waiting.extend(f"{name}/{item}" for item in os.listdir(name))


def _alone(name: str, device: int) -> bool:
    """On our file system, not through a link, and nobody else has another name for these bytes."""
    if os.path.islink(name):
        return False
    return all(found.st_dev == device and (not stat.S_ISREG(found.st_mode) or found.st_nlink == 1) for _, found in _below(name))


def _protect(name: str) -> None:
    for path, found in _below(name):
        if stat.S_ISREG(found.st_mode):
            os.chmod(path, _MODE["x" if found.st_mode & stat.S_IXUSR else "f"])
        elif stat.S_ISDIR(found.st_mode) and path != name:  # the top must still be renamed
            os.chmod(path, _MODE["x"])


def _total(name: str) -> int:
    try:
        return sum(found.st_size for _, found in _below(name) if stat.S_ISREG(found.st_mode))
    except FileNotFoundError:
        return 0


def _mark(name: str, *, moves: bool = False) -> tuple[int, str]:
    """Bytes, and what the file system says in one string; empty when there is nothing.  `moves`: only what a chmod and a rename leave as it is."""
    size, marks = 0, []
    try:
        for path, found in _below(name):
            if not stat.S_ISDIR(found.st_mode):
                size += found.st_size
                ctime = 0 if moves else found.st_ctime_ns
                marks.append(f"{path[len(name) :]}\0{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{ctime}")
            else:
                marks.append(path[len(name) :])
    except FileNotFoundError:
        return 0, ""
    if len(marks) == 1 and "\0" in marks[0]:
        return size, marks[0][1:]
    return size, hashlib.sha256("\n".join(sorted(marks)).encode("utf-8", "surrogateescape")).hexdigest()


def _sync(name: str) -> None:
    """Write out the large files and every directory."""
    for path, found in _below(name):
        if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size >= SYNCED):
            sync_one(path)


def sync_one(path: str) -> None:
    """Have a file or folder on the disk, not only in memory."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    folders = []
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        folders.append(folder)
        os.chmod(folder, 0o700)
        with os.scandir(folder) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    waiting.append(item.path)
                else:
                    os.unlink(item.path)
    for folder in reversed(folders):
        os.rmdir(folder)


def glob(pattern: str) -> Callable[[str], bool]:
    """Whether a path matches: `*` and `?` stay within a name, `**` does not."""
    import re

    parts = []
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]/]+\]|.", pattern, re.S):
        if token == "**/":  # noqa: S105
            parts.append("(?:.*/)?")
        elif token == "**":  # noqa: S105
            parts.append(".*")
        elif token == "*":  # noqa: S105
            parts.append("[^/]*")
        elif token == "?":  # noqa: S105
            parts.append("[^/]")
        elif len(token) > 1:
            parts.append("[" + ("^" if token[1] == "!" else "") + re.escape(token[2 if token[1] == "!" else 1 : -1]).replace(r"\-", "-") + "]")
        else:
            parts.append(re.escape(token))
    compiled = re.compile("".join(parts), re.S)
    return lambda path: compiled.fullmatch(path) is not None


def _changed(path: str) -> NoReturn:
    raise Corrupt(f"{path}: changed while it was put away", fix="leave it alone while recipe runs, and run again")


def _missing(content: Content, path: str) -> NoReturn:
    raise Corrupt(f"{path}: {content[:14]}… is not in the store", fix="run again: the step that makes it will be run")


def _damaged(path: str) -> NoReturn:
    raise Corrupt(f"{path}: the stored bytes are not what their name says", fix="run again: the step that makes them will be run")


def _fail(path: str, error: OSError) -> NoReturn:
    where = str(error.filename or path)
    message = f"{where}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message += f", {_free(where)} bytes are free"
        raise Infrastructure(message, fix="free some space (`recipe gc` helps), and run again: finished steps are kept") from error
    raise Infrastructure(message) from error


def _free(path: str) -> int:
    while True:
        try:
            found = os.statvfs(path)
            return found.f_bavail * found.f_frsize
        except OSError:
            if path in ("", "/"):
                return 0
            path = os.path.dirname(path)
