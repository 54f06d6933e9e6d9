"""Content-addressed store: add files and trees, and provide them as copies or links.

Below `objects/ab/`, for a SHA-256 that starts with `ab`: `<sha256>` is a plain file, `<sha256>.x`
an executable file, `<sha256>.t` a tree, and `<sha256>.t.json` its manifest. A tree is named by the
digest of its manifest. Objects are read-only and appear by one rename.

A file of a few bytes may be a table row instead, stored in the transaction of its trace, because a
separate file would cost more. Until that transaction, the content is a record in a log below
`partial/`. After a kill, the next process takes over the log.

A file of up to `SMALL` bytes is hashed on every use, which is cheaper than a stored status. Larger
files and trees have a seal: the file status after recipe's last change. An object without a
matching seal is hashed before use, so that an edited object never passes as a result, not even
after an edit by root through a hard link.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import stat
from collections import Counter
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
"""Maximum size of a small file in bytes. Copying a small file is faster than any link."""


class Objects:
    """Local object store below `root` (`.recipe`).

    Without a table, every content is a file.
    """

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
        self._damages = Counter[Content]()
        # the umask can only be read by setting it, which is unsafe with threads
        if table is not None:
            mask = os.umask(0o22)
            os.umask(mask)
            self._mode = 0o666 & ~mask

    # -- adding

    def take(self, path: str | Path, found: os.stat_result | None = None) -> Content:
        """Store the file or tree at `path`, and return its content id.

        The path stays, read-only, hard-linked to the object if possible.

        `found` is the path's status, if known. Delete the path with `release`.
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
        """Store a copy of `name`, created with `make_file` and checked with `is_right`.

        Raises Changed and OSError.
        """
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
        """Store the file or tree at `path`, whose content id is known.

        With `move`, the path may disappear.
        """
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
        """Move, link or copy a path into the object store.

        `before` is its fingerprint from before the hashing: the files are moved, or linked if
        `name` stays. Without `before`, the files are copied.
        """
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
        """Rename a read-only file or tree to its object path.

        Raises OSError.
        """
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

    # -- lookup

    def path(self, content: Content) -> Path:
        """Return the path of a stored object, first writing a tiny file from its table row."""
        target = self._path(content)
        if content[0] != "t" and not os.path.lexists(target):
            data = self.tiny.row(content)
            if data is not None:
                self._write_tiny(data, content[0], target)
        return Path(target)

    def _write_tiny(self, data: bytes, kind: str, target: str) -> None:
        temporary = self.disk.temporary()
        try:
            write(temporary, data, kind)
            os.chmod(temporary, MODE[kind])
            self.disk.place(temporary, target)
        except OSError as error:
            fail(target, error)

    def entries(self, content: Content) -> list[Entry]:
        """Return the manifest of a stored tree."""
        return self.manifests.entries(content)

    def has(self, content: Content) -> bool:
        if self.tiny.is_known(content) or os.path.lexists(self._path(content)):
            return True
        return self.tiny.row(content) is not None

    def all(self, before: float = math.inf) -> Iterator[Content]:
        """Yield all objects that were last stored before `before`, in seconds since the epoch."""
        tiny = self.tiny.all()
        for path, content in self._files():
            # An object that is also a table row was stored at the row's time.
            at = tiny.pop(content, -math.inf)
            if at < before and (before == math.inf or os.lstat(path).st_ctime < before):
                yield content
        yield from sorted(content for content, at in tiny.items() if at < before)

    def _files(self) -> Iterator[tuple[str, Content]]:
        """Yield the path and content id of all object files, ordered by digest."""
        kinds = {suffix: kind for kind, suffix in SUFFIX.items()}
        folder = f"{self._root}/objects"
        if not os.path.isdir(folder):
            return
        for prefix in sorted(os.listdir(folder)):
            if len(prefix) != 2:
                continue
            for name in sorted(os.listdir(f"{folder}/{prefix}")):
                digest, kind = name[:64], kinds.get(name[64:])
                if kind is not None and len(digest) == 64:
                    yield f"{folder}/{prefix}/{name}", Content(f"{kind}:{digest}")

    def size(self, content: Content) -> int:
        """Return the size of a stored object in bytes, without hashing."""
        target = self._path(content)
        return len(self.tiny.row(content) or b"") if not os.path.lexists(target) else total(target)

    def verify(self, content: Content) -> bool:
        """Hash a stored object and compare its digest; return False if missing or damaged."""
        try:
            return files.scan(self._path(content)) == content
        except files.Unhashable:
            return self.tiny.row(content) is not None

    def intact(self, content: Content) -> bool:
        """Return True if a stored object is usable: sealed, or hashed again and correct.

        A seal is the file status after recipe's last change.
        """
        target = self._path(content)
        size, found = mark(target)
        if not found:
            return self.tiny.row(content) is not None
        seal = self.seals.of(content)
        if seal is not None and seal.mark != found:
            seal = None  # the object changed after it was sealed
        if seal is not None and self._is_on_disk(content, seal, size):
            return True
        if seal is not None and content[0] == "t":
            good = _verify_unsynced(self.manifests, content, target)
        else:
            self._restore_modes(content, target)
            good = self.verify(content)
        if good:
            self._seal(content, target, size)
        else:
            self._damages[content] += 1
        return good

    def count_damages(self, content: Content) -> int:
        """Return how often this process found a stored object damaged, also if it was replaced."""
        return self._damages[content]

    def _is_on_disk(self, content: Content, seal: Seal, size: int) -> bool:
        """Return True if no restart can have lost data of a sealed object."""
        if self.seals.of_this_boot(seal):
            return True
        # A large file is synced before it is sealed. Of a tree, only its large files are synced.
        return content[0] != "t" and size >= SYNCED

    # -- output

    def copy_to(
        self,
        content: Content,
        target: str | Path,
        *,
        link: bool = False,
        spare: Callable[[str], bool] = lambda _path: False,
    ) -> None:
        """Replace `target` atomically by a stored object.

        With `link`, as a read-only hard link if possible.

        `spare` moves a reusable plain file to a path, and returns whether one was available.
        """
        name = str(target)
        source = str(self.path(content)) if link else self._path(content)
        try:
            small = None
            if content[0] != "t" and not link:
                small = self._read_small(content, source)
            if small is None:
                self._demand(content)
            temporary = self.disk.temporary()
            if small is None:
                self._copy_stored(content, source, temporary, link=link)
            elif content[0] == "f" and spare(temporary):
                overwrite(temporary, small, self._mode)
                os.utime(temporary, ns=backdated_times())
            else:
                write(temporary, small, content[0])
            crashpoint("copy-written")
            self.disk.place(temporary, name)
            # Renaming between two hard links of one file does nothing, so delete the source.
            if link and os.path.lexists(temporary):
                os.unlink(temporary)
        except OSError as error:
            fail(name, error)

    def _copy_stored(self, content: Content, source: str, target: str, *, link: bool) -> None:
        """Copy or link the stored file or tree at `source` to a path where nothing exists."""
        make_file = self.disk.link_file if link else self.disk.copy_file
        if content[0] == "t":
            self.disk.copy_tree(self.manifests.entries(content), source, target, make_file)
        else:
            make_file(source, target, content[0])

    def small(self, content: Content) -> bytes | None:
        """Return the verified bytes of a small stored file; None for trees and larger files."""
        return None if content[0] == "t" else self._read_small(content, self._path(content))

    def demand(self, content: Content) -> None:
        """Raise Corrupt unless the stored object exists and is intact."""
        self._demand(content)

    def give(self, content: Content, target: str, below: str = "") -> str:
        """Create `target` with hard links to a stored object, or to its subdirectory `below`.

        `demand` must have checked the object.

        Directories are new, and files are hard links to the read-only object. Returns the reason
        if some files are not hard links; otherwise "".
        """
        top = self._path(content)
        source = f"{top}/{below}" if below else top
        try:
            # objects of another user of a shared workspace
            with contextlib.suppress(PermissionError):
                # Refresh the ctime, so that a concurrent `gc` keeps the object.
                os.chmod(top, MODE["x" if content[0] == "t" else content[0]])
            if content[0] == "t" and os.path.isdir(source):
                return give_tree(
                    self.disk, _rows_below(self.entries(content), below), source, target
                )
            return give_file(self.disk, source, target)
        except OSError as error:
            fail(target, error)

    # -- deletion

    def remove(self, content: Content, *, before: float = math.inf) -> bool:
        """Delete a stored object, unless it was stored again since `before`.

        Delete its traces first.
        """
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
        """Delete partial files of dead processes that are older than `before`.

        Runs on other machines never have files that old.
        """
        folder = f"{self._root}/partial"
        names = os.listdir(folder) if os.path.isdir(folder) else []
        for name in names:
            maker = name.split("-")[0]
            if maker.isdecimal() and os.path.exists(f"/proc/{maker}"):
                continue
            with contextlib.suppress(FileNotFoundError):  # its process was alive and has finished
                if os.lstat(f"{folder}/{name}").st_ctime < before:
                    unlink(f"{folder}/{name}")
        self.manifests.forget(before)

    # -- internals

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
        # the object exists, its directory is missing, or hard links are not supported
        except OSError:
            self._put(name, content, None, mark(name, moves=True), stays=True)
        else:
            crashpoint("object-put")
        self.tiny.keep_recent(content, data)
        return content

    def _seal(self, content: Content, target: str, size: int) -> None:
        if content[0] == "t" or size > SMALL:
            self.seals.make(content, target, size)

    def _keep(self, content: Content, target: str) -> bool:
        """Return True if an intact object exists, and refresh its ctime.

        A concurrent gc then keeps the object.
        """
        if not os.path.lexists(target) or not self.intact(content):
            return False
        with _Turn(f"{self._root}/objects"):
            try:
                # chmod changes the ctime, which `remove` compares, but nothing in a seal.
                os.chmod(target, MODE["x" if content[0] == "t" else content[0]])
            except FileNotFoundError:
                return False
        return True

    def _copy_in(
        self, name: str, content: Content, manifest: list[Entry] | None, *, link: bool
    ) -> str:
        """Create a verified copy of a path below `partial`, or hard links with `link`."""
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
        """Move a tree to its object path.

        An intact tree from another process stays, because it may be in use.
        """
        with _Turn(f"{self._root}/objects"):
            if os.path.lexists(target) and self.intact(content):
                unlink(source)
            else:
                self.disk.place(source, target)
                os.chmod(target, MODE["x"])

    def _restore_modes(self, content: Content, target: str) -> None:
        """Restore the read-only modes of an object's files, which a step may have changed."""
        kinds = {}
        if content[0] != "t":
            kinds[target] = content[0]
        else:
            try:
                for entry in self.manifests.entries(content):
                    if entry.kind in MODE:
                        kinds[f"{target}/{entry.path}"] = entry.kind
            except Corrupt:
                return
        for path, kind in kinds.items():
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != MODE[kind]:
                    os.chmod(path, MODE[kind])

    def _read_small(self, content: Content, source: str) -> bytes | None:
        """Return the verified bytes of a small stored file; otherwise None."""
        recent = self.tiny.recent(content)
        if recent is not None:
            return recent
        try:
            handle = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            row = self.tiny.row(content)
            if row is None:
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
    """Return the manifest entries in the directory `below`, relative to it.

    An empty `below` stands for all entries.
    """
    if not below:
        return manifest
    start = f"{below}/"
    inside = [entry for entry in manifest if entry.path.startswith(start)]
    return [entry._replace(path=entry.path[len(start) :]) for entry in inside]


class _Turn:
    """Lock between processes that keeps an object from removal while its ctime is refreshed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def _verify_unsynced(manifests: Manifests, content: Content, target: str) -> bool:
    """Verify the unsynced small files of a sealed tree after a restart of the machine."""
    try:
        for entry in manifests.entries(content):
            if entry.kind not in "fx" or entry.size >= SYNCED:
                continue
            if files.scan(f"{target}/{entry.path}") != f"{entry.kind}:{entry.value}":
                return False
    except (Corrupt, files.Unhashable):
        return False
    return True


def _raise_missing(content: Content, path: str) -> NoReturn:
    raise Corrupt(
        f"{path}: {content[:14]}… is not in the store",
        fix="run the recipe again: recipe reruns the step that creates this output",
    )


def _raise_damaged(path: str) -> NoReturn:
    raise Corrupt(
        f"{path}: the stored file is damaged: its content does not match its digest",
        fix="run the recipe again: recipe reruns the step that creates this output",
    )
