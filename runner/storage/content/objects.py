"""Keep content by its name: put files and trees away once, give them out as copies or links.

Under `objects/ab/`, for a SHA-256 that begins with `ab`: `<sha256>` is a plain file, `<sha256>.x` an executable one, `<sha256>.t` a tree and
`<sha256>.t.json` its manifest, whose digest the tree's name is.  Everything is read-only and appears by one rename.

A file of a few bytes may be a row of a table instead, stored together with the trace that names it: making a file of it costs more than the rest.
Until then it is a record in a log below `partial/`, so that after a kill the next process knows it for ours, and takes it over.

Up to `SMALL` bytes a file is hashed every time it is given out: that costs less than remembering.  Larger files and trees have a seal: what the file
system said about them after their last change of ours.  A seal that does not match, or none, means that the object is hashed before it is used; so an
edit is never taken for the result, not even one by root through a hard link.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ...errors import Corrupt
from ..crash import crashpoint
from . import files
from .disk import (
    MODE,
    SYNCED,
    Disk,
    MakeFile,
    alone,
    backdated_times,
    delete,
    fail,
    mark,
    overwrite,
    protect,
    raise_changed,
    sync,
    sync_one,
    total,
    unlink,
    write,
)
from .files import Content, Entry
from .giving import give_file, give_tree
from .manifests import SUFFIX, Manifests, place
from .seals import Seal, Seals
from .tiny import Table, TinyContents

SMALL = 64 << 10
"""Bytes; below it copying beats every kind of link."""


class Objects:
    """The local content store below `root` (`.recipe`).  Without a table every content is a file."""

    def __init__(
        self,
        root: Path,
        recall: Callable[[Content], Seal | None] = lambda _content: None,
        table: Table | None = None,
    ) -> None:
        self.root, self._root = root, str(root)
        self.disk = Disk(self._root)
        self.manifests = Manifests(self._root, self.disk)
        self.tiny = TinyContents(self._root, self.disk, table)
        self.seals = Seals(recall)
        if table is not None:  # the umask cannot be asked for, and setting it is not for threads
            mask = os.umask(0o22)
            os.umask(mask)
            self._mode = 0o666 & ~mask

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
            fail(name, error)
        before = mark(name, moves=True)
        manifest = files.entries(name) if os.path.isdir(name) else None
        content = files.scan(name) if manifest is None else files.tree_id(manifest)
        self._put(name, content, manifest, before, stays=True)
        return content

    def keep_copy(
        self,
        name: str,
        content: Content,
        manifest: Sequence[Entry] | None,
        make_file: MakeFile,
        is_right: Callable[[str], bool],
    ) -> None:
        """Put away what is at `name`, its files made by `make_file`; `is_right` is asked of what was made.  Raises Changed and OSError."""
        temporary, target = self.disk.temporary(), self._path(content)
        try:
            if manifest is None:
                make_file(name, temporary, content[0])
            else:
                self.disk.copy_tree(manifest, name, temporary, make_file)
            protect(temporary)
            if not is_right(temporary):
                raise files.Changed(name)
            self._name(temporary, target, content, manifest)
        except BaseException:
            delete(Path(temporary))
            raise

    def put(self, path: Path, content: Content, *, move: bool) -> None:
        """Put away what is at `path`, which holds `content`.  With `move` the path may be gone afterwards."""
        name = str(path)
        manifest = files.entries(name) if content[0] == "t" else None
        if manifest is not None and files.tree_id(manifest) != content:
            raise_changed(name)
        self._put(name, content, manifest, mark(name, moves=True) if move else None)

    def _put(
        self,
        name: str,
        content: Content,
        manifest: list[Entry] | None,
        before: tuple[int, str] | None,
        *,
        stays: bool = False,
    ) -> None:
        """`before` is what the file system said before the bytes were hashed: they are moved, or linked where `name` stays.  Without it, copied."""
        target = self._path(content)
        try:
            if self._keep(content, target):
                return
            ours = before is not None and alone(name, os.stat(f"{self._root}/objects").st_dev)
            source = (
                name if ours and not stays else self._copy_in(name, content, manifest, link=ours)
            )
            protect(source)
            if ours and mark(name, moves=True) != before:
                raise_changed(name)
            self._name(source, target, content, manifest)
        except OSError as error:
            fail(name, error)

    def _name(
        self, source: str, target: str, content: Content, manifest: Sequence[Entry] | None
    ) -> None:
        """Give a read-only file or tree of `partial`, or of an attempt, its name as an object.  Raises OSError."""
        size = total(source)
        if size >= SYNCED:
            sync(source)
        if manifest is None:
            self.disk.place(source, target)
        else:
            self.manifests.write(target, manifest)
            self._place_tree(source, target, content)
        if size >= SYNCED:
            sync_one(os.path.dirname(target))
        crashpoint("object-put")
        self._seal(content, target, size)

    # -- asking

    def path(self, content: Content) -> Path:
        """Where `content` is, if it does.  One that had no file of its own has one from now on."""
        target = self._path(content)
        if (
            content[0] != "t"
            and not os.path.lexists(target)
            and (data := self.tiny.row(content)) is not None
        ):
            temporary = self.disk.temporary()
            try:
                write(temporary, data, content[0])
                os.chmod(temporary, MODE[content[0]])
                self.disk.place(temporary, target)
            except OSError as error:
                fail(target, error)
        return Path(target)

    def entries(self, content: Content) -> list[Entry]:
        """The manifest of a tree."""
        return self.manifests.entries(content)

    def has(self, content: Content) -> bool:
        return (
            self.tiny.is_known(content)
            or os.path.lexists(self._path(content))
            or self.tiny.row(content) is not None
        )

    def all(self, before: float = math.inf) -> Iterator[Content]:
        """Every object that is here, and was put away last before then: seconds since the epoch."""
        tiny = self.tiny.all()
        for path, content in self._files():
            # One that is in the table, too, was put away when its row says.
            at = tiny.pop(content, -math.inf)
            if at < before and (before == math.inf or os.lstat(path).st_ctime < before):
                yield content
        yield from sorted(content for content, at in tiny.items() if at < before)

    def _files(self) -> Iterator[tuple[str, Content]]:
        """The files of objects, in the order of their digests."""
        kinds = {suffix: kind for kind, suffix in SUFFIX.items()}
        folder = f"{self._root}/objects"
        for prefix in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if len(prefix) != 2:
                continue
            for name in sorted(os.listdir(f"{folder}/{prefix}")):
                digest, kind = name[:64], kinds.get(name[64:])
                if kind is not None and len(digest) == 64:
                    yield f"{folder}/{prefix}/{name}", Content(f"{kind}:{digest}")

    def size(self, content: Content) -> int:
        """Bytes of content, without hashing."""
        target = self._path(content)
        return len(self.tiny.row(content) or b"") if not os.path.lexists(target) else total(target)

    def verify(self, content: Content) -> bool:
        """Whether the object is here and its bytes are what its name says; reads all of it."""
        try:
            return files.scan(self._path(content)) == content
        except files.Unhashable:
            return self.tiny.row(content) is not None

    def intact(self, content: Content) -> bool:
        """Whether the object may be used: its seal holds, or else its bytes were hashed just now and are right."""
        target = self._path(content)
        size, found = mark(target)
        if not found:
            return self.tiny.row(content) is not None
        seal = self.seals.of(content)
        holds = seal is not None and seal.mark == found
        if (
            holds
            and seal is not None
            and (self.seals.of_this_boot(seal) or (content[0] != "t" and size >= SYNCED))
        ):
            return True
        if holds and content[0] == "t":
            good = _verify_unsynced(self.manifests, content, target)
        else:
            self._restore_modes(content, target)
            good = self.verify(content)
        if good:
            self._seal(content, target, size)
        return good

    # -- giving out

    def copy_to(
        self,
        content: Content,
        target: str | Path,
        *,
        link: bool = False,
        spare: Callable[[str], bool] = lambda _path: False,
    ) -> None:
        """Make `target` hold `content`, replacing what is there at once.  `link`: as a read-only hard link, where the file system can.

        `spare` puts a plain file that may be written over at a path, and answers whether it had one.
        """
        name, source = str(target), self._path(content) if not link else str(self.path(content))
        try:
            small = None if content[0] == "t" or link else self._read_small(content, source)
            if small is None:
                self._demand(content)
            temporary = self.disk.temporary()
            if small is not None and content[0] == "f" and spare(temporary):
                overwrite(temporary, small, self._mode)
                os.utime(temporary, ns=backdated_times())
            elif small is not None:
                write(temporary, small, content[0])
            else:
                make_file = self.disk.link_file if link else self.disk.copy_file
                if content[0] == "t":
                    manifest = self.manifests.entries(content)
                    self.disk.copy_tree(manifest, source, temporary, make_file)
                else:
                    make_file(source, temporary, content[0])
            crashpoint("copy-written")
            self.disk.place(temporary, name)
            # A rename of one name of a file to another does nothing.
            if link and os.path.lexists(temporary):
                os.unlink(temporary)
        except OSError as error:
            fail(name, error)

    def small(self, content: Content) -> bytes | None:
        """The bytes of a small file, verified; None for a tree or anything larger."""
        return None if content[0] == "t" else self._read_small(content, self._path(content))

    def demand(self, content: Content) -> None:
        """Check that the object is here and what its name says.  Raises Corrupt."""
        self._demand(content)

    def give(self, content: Content, target: str, below: str = "") -> str:
        """Make `target`, where nothing is yet, of an object that `demand` has found good, or of a part of it, at `below`.

        Its folders are new, its files other names of the object's, which are read-only.  Answers why some are not: empty when all are.
        """
        top = self._path(content)
        source = f"{top}/{below}" if below else top
        try:
            with contextlib.suppress(PermissionError):  # of somebody else, who shares the workspace
                # A `gc` that has decided before we came leaves what is young.
                os.chmod(top, MODE["x" if content[0] == "t" else content[0]])
            if content[0] == "t" and os.path.isdir(source):
                return give_tree(
                    self.disk, _rows_below(self.entries(content), below), source, target
                )
            return give_file(self.disk, source, target)
        except OSError as error:
            fail(target, error)

    # -- throwing away

    def remove(self, content: Content, *, before: float = math.inf) -> bool:
        """Delete an object, unless it was put (again) since `before`.  Delete traces first."""
        target = self._path(content)
        row = content in self.tiny.forget([content], before)
        try:
            with _Turn(f"{self._root}/objects"):
                if os.lstat(target).st_ctime >= before:
                    return False
                aside = self.disk.temporary()
                if stat.S_ISDIR(os.lstat(target).st_mode):
                    os.chmod(target, 0o700)
                os.rename(target, aside)
            self.seals.forget(content)
            unlink(aside)
            if content[0] == "t" and os.path.lexists(f"{target}.json"):
                os.unlink(f"{target}.json")
        except FileNotFoundError:
            return row
        except OSError as error:
            fail(target, error)
        return True

    def sweep(self, *, before: float) -> None:
        """Delete what processes that are dead by now were writing, if they began before then: no run that lives on another machine did."""
        folder = f"{self._root}/partial"
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            maker = name.split("-")[0]
            if maker.isdecimal() and os.path.exists(f"/proc/{maker}"):
                continue
            with contextlib.suppress(FileNotFoundError):  # it was not dead, and is done
                if os.lstat(f"{folder}/{name}").st_ctime < before:
                    unlink(f"{folder}/{name}")
        self.manifests.forget(before)

    # -- below

    def _path(self, content: Content) -> str:
        return place(self._root, content)

    def _take_small(self, name: str, found: os.stat_result) -> Content:
        kind = "x" if found.st_mode & stat.S_IXUSR else "f"
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = os.read(handle, found.st_size + 1)
            if len(data) != found.st_size:
                raise_changed(name)
            os.fchmod(handle, MODE[kind])
        finally:
            os.close(handle)
        content = Content(f"{kind}:{hashlib.sha256(data).hexdigest()}")
        try:
            os.link(name, self._path(content))
        except OSError:  # it is there, or its folder is not, or there are no links here
            self._put(name, content, None, mark(name, moves=True), stays=True)
        else:
            crashpoint("object-put")
        self.tiny.keep_recent(content, data)
        return content

    def _seal(self, content: Content, target: str, size: int) -> None:
        if content[0] == "t" or size > SMALL:
            self.seals.make(content, target, size)

    def _keep(self, content: Content, target: str) -> bool:
        """Whether a good object is here already; if so it is young again, so that a gc that has decided otherwise leaves it."""
        if not os.path.lexists(target) or not self.intact(content):
            return False
        with _Turn(f"{self._root}/objects"):
            try:
                # That moves its ctime, by which `remove` goes, and nothing that a seal holds.
                os.chmod(target, MODE["x" if content[0] == "t" else content[0]])
            except FileNotFoundError:
                return False
        return True

    def _copy_in(
        self, name: str, content: Content, manifest: list[Entry] | None, *, link: bool
    ) -> str:
        """A copy below `partial`, verified; with `link` its files are links, which hold what `name` does."""
        temporary = self.disk.temporary()
        make_file = self.disk.link_file if link else self.disk.copy_file
        if manifest is not None:
            self.disk.copy_tree(manifest, name, temporary, make_file)
        else:
            make_file(name, temporary, content[0])
        if not link and files.scan(temporary) != content:
            unlink(temporary)
            raise_changed(name)
        return temporary

    def _place_tree(self, source: str, target: str, content: Content) -> None:
        """Give a tree its name as an object.  A good one that another process put there meanwhile stays: somebody may be reading it."""
        with _Turn(f"{self._root}/objects"):
            if os.path.lexists(target) and self.intact(content):
                unlink(source)
            else:
                self.disk.place(source, target)
                os.chmod(target, MODE["x"])

    def _restore_modes(self, content: Content, target: str) -> None:
        """Have files of an object as read-only as they were: a step may have changed the mode of what it was given."""
        if content[0] != "t":
            kinds = {target: content[0]}
        else:
            try:
                kinds = {
                    f"{target}/{entry.path}": entry.kind
                    for entry in self.manifests.entries(content)
                    if entry.kind in MODE
                }
            except Corrupt:
                return
        for path, kind in kinds.items():
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != MODE[kind]:
                    os.chmod(path, MODE[kind])

    def _read_small(self, content: Content, source: str) -> bytes | None:
        """The bytes, verified, if they are few."""
        recent = self.tiny.recent(content)
        if recent is not None:
            return recent
        try:
            handle = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if (row := self.tiny.row(content)) is None:
                _raise_missing(content, source)
            return row
        try:
            data = os.read(handle, SMALL + 1)
        finally:
            os.close(handle)
        if len(data) > SMALL:
            return None
        if hashlib.sha256(data).hexdigest() != content[2:]:
            _raise_damaged(source)
        return data

    def _demand(self, content: Content) -> None:
        if not self.has(content):
            _raise_missing(content, self._path(content))
        if not self.intact(content):
            _raise_damaged(self._path(content))


def _rows_below(manifest: Sequence[Entry], below: str) -> Sequence[Entry]:
    """What a manifest has in a folder of its tree, named from there; all of it where that is empty."""
    if not below:
        return manifest
    start = f"{below}/"
    return [
        entry._replace(path=entry.path[len(start) :])
        for entry in manifest
        if entry.path.startswith(start)
    ]


class _Turn:
    """Putting an object that exists and removing one take turns, across processes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def _verify_unsynced(manifests: Manifests, content: Content, target: str) -> bool:
    """After a power cut: a tree whose seal holds, but whose small files were perhaps never written out."""
    try:
        for entry in manifests.entries(content):
            if (
                entry.kind in "fx"
                and entry.size < SYNCED
                and files.scan(f"{target}/{entry.path}") != f"{entry.kind}:{entry.value}"
            ):
                return False
    except (Corrupt, files.Unhashable):
        return False
    return True


def _raise_missing(content: Content, path: str) -> NoReturn:
    raise Corrupt(
        f"{path}: {content[:14]}… is not in the store",
        fix="run again to recreate it: its step will run",
    )


def _raise_damaged(path: str) -> NoReturn:
    raise Corrupt(
        f"{path}: the stored file is damaged: its content does not match its digest",
        fix="run again to recreate it: its step will run",
    )
