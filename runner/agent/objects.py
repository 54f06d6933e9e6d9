"""The object store of a host: stored, partially uploaded and verified objects.

All functions run in the root and may be repeated.

objects/AB/NAME  an object: its SHA-256 in hex, with suffix `.x` for an executable file and `.t` for a tree; AB are the first two digits
objects/AB/NAME.json  a tree's manifest from its sender
seals/NAME       the boot in which the object was hashed, written after its last byte; newer content is hashed again before use
used/NAME        time of the last use
pieces/DIGEST    digests of the blocks (grains) of a large file, for comparison with a derived file; only a hint, because the whole file is hashed
partial/SENDER/  arriving objects of a sender; each of its requests touches `.alive`
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time

from . import sparse, trees
from .tree_hash import hash_blocks, hash_file, kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from .request import AgentRequest

SILENT = 600
"""Seconds after which another sender may continue an unfinished transfer."""
DIGEST = 64
"""Length of the directory name of an agent's program."""
LATEST = 100
"""Number of recently used objects that are searched for similar ones."""


class ObjectGone(Exception):
    """An arriving object no longer exists."""


def place(name: str) -> str:
    """Return the path of an object relative to the agent's root directory."""
    return f"objects/{name[:2]}/{name}"


def is_verified(request: AgentRequest, name: str) -> bool:
    """Return True if an object was hashed in this boot and has not been written since."""
    try:
        with open(f"seals/{name}", encoding="utf-8") as file:
            return (
                file.read() == request.boot
                and trees.newest(place(name)) <= os.fstat(file.fileno()).st_mtime_ns
            )
    except FileNotFoundError:
        return False


def lock_name(name: str) -> TextIO:
    """Lock the name of an object until the returned file is closed.

    Steps with equal outputs may end at once, and a request may be repeated while it is still
    running.
    """
    file = open("names.lock", "w", encoding="utf-8")  # noqa: SIM115  # the caller closes it
    # Lock one byte per name, so that other names are not blocked.
    fcntl.lockf(file, fcntl.LOCK_EX, 1, int(name[:15], 16))
    return file


def seal(request: AgentRequest, name: str, like: str = "") -> None:
    """Record that an object's content is verified, now or when the file `like` was written."""
    with open(f"seals/{name}", "w", encoding="utf-8") as file:
        file.write(request.boot)
    trees.touch(f"used/{name}")
    if like:
        then = os.stat(like).st_mtime_ns
        os.utime(f"seals/{name}", ns=(then, then))


def seals(request: AgentRequest, name: str, stamp: str) -> bool:
    """Record that the files of an object were verified in place.

    Returns False if names, kinds and links of a tree do not match its `stamp`.
    """
    if stamp and not (os.path.isdir(place(name)) and trees.stamp_of(place(name)) == stamp):
        return False
    seal(request, name)
    return True


def have(request: AgentRequest, names: Sequence[str]) -> list[str]:
    """Return the objects that are verified."""
    found = [name for name in names if is_verified(request, name)]
    for name in found:
        trees.touch(f"used/{name}")
    return found


def begin(request: AgentRequest, names: Sequence[str]) -> dict[str, object]:
    """Return the state of these objects, other senders of them, free bytes, and recently used
    trees.
    """
    request.make_arriving(request.partial)
    how: dict[str, str] = {}
    theirs: dict[str, list[str]] = {}
    senders = os.listdir("partial")
    for name in names:
        if is_verified(request, name):
            trees.touch(f"used/{name}")
            how[name] = "here"
        elif os.path.lexists(f"{request.partial}/{name}"):
            how[name] = "partial"
        elif os.path.lexists(place(name)):
            how[name] = "doubtful"
        else:
            how[name] = "absent"
            for sender in senders:
                if os.path.lexists(f"partial/{sender}/{name}"):
                    theirs.setdefault(sender, []).append(name)
    silent = [sender for sender in senders if _age(f"partial/{sender}/.alive") > SILENT]
    latest = [name for name in _latest()[:LATEST] if name.endswith(".t")]
    return {"how": how, "theirs": theirs, "silent": silent, "free": free(request), "trees": latest}


def adopt(request: AgentRequest, sender: str, names: Sequence[str]) -> list[str]:
    """Take over unfinished objects from another sender, and return their names."""
    taken = []
    for name in names:
        try:
            os.rename(f"partial/{sender}/{name}", f"{request.partial}/{name}")
        except OSError:
            continue  # another sender took it first
        taken.append(name)
    try:
        os.unlink(f"partial/{sender}/.alive")
        os.rmdir(f"partial/{sender}")
    except OSError:
        pass  # the directory is not empty
    return taken


def retract(request: AgentRequest, name: str) -> None:
    """Move a corrupt object back to the partial uploads, so that only its wrong files are sent
    again.
    """
    trees.remove(f"seals/{name}")
    at, here = place(name), f"{request.partial}/{name}"
    if os.path.lexists(at):
        if os.path.isdir(at):
            os.chmod(at, 0o700)
        os.rename(at, here)
    trees.open_up(here)


def base(
    request: AgentRequest,
    name: str,
    older: str,
    without: Sequence[str],
    grain: int,
    alike: Sequence[tuple[str, str]],
) -> dict[str, tuple[int, list[str]]] | None:
    """Start the upload of a tree with hard links to an older tree, except for changed paths.

    None if not possible.

    Returns the sizes and block digests of large files of the older tree, if the digests are
    recorded.
    """
    here, there = f"{request.partial}/{name}", place(older)
    trees.remove(here)
    try:
        os.mkdir(here)
        for path, kind in trees.below(there):
            if kind == "d":
                os.mkdir(f"{here}/{path}")
            else:
                os.link(f"{there}/{path}", f"{here}/{path}", follow_symlinks=False)
    except OSError:
        trees.remove(here)
        return None
    if not is_verified(request, older):
        trees.remove(here)
        return None
    delete(request, here, without)
    known = {}
    for path, digest in alike:
        grains = _load_block_digests(digest, grain)
        if grains:
            known[path] = (os.path.getsize(f"{there}/{path}"), grains)
    return known


def alike(
    request: AgentRequest, least: int, size: int, blocks: Sequence[int]
) -> dict[str, list[str]]:
    """Return at most four recently used files larger than `least` bytes, with digests of some
    blocks.
    """
    found: dict[str, list[str]] = {}
    for name in [name for name in _latest()[: 2 * LATEST] if not name.endswith(".t")]:
        try:
            with open(place(name), "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size > least:
                    found[name] = [
                        hashlib.sha256(os.pread(file.fileno(), size, at * size)).hexdigest()
                        for at in blocks
                    ]
        except OSError:
            continue
        if len(found) == 4:
            break
    return found


def batch(
    request: AgentRequest,
    folder: str,
    tree: str,
    manifest: str,
    expected: str,
    stamp: str,
    loose: Sequence[str],
) -> dict[str, object]:
    """Unpack a tar into a directory of partial uploads.

    Returns the digest over the file digests, and whether arrived objects were placed. `manifest` is
    the name of the tree's manifest in the tar. The last batch also names the objects to place: the
    tree with its `stamp`, or the files `loose`.
    """
    into = f"{request.partial}/{folder}"
    request.make_arriving(into)
    os.chdir(into)
    try:
        digests = trees.unpack(request.read, request.into, 0o555)
    finally:
        os.chdir(request.root)
    arrived = hashlib.sha256("".join(f"{each}\n" for each in digests).encode()).hexdigest()
    if manifest and arrived == expected:
        os.rename(f"{into}/{manifest}", f"{request.partial}/{tree}.json")
    placed = False
    if arrived == expected and stamp:
        placed = place_tree(request, tree, stamp, False)
    elif arrived == expected and loose:
        placed = len(place_files(request, loose)) == len(loose)
    return {"digest": arrived, "placed": placed}


def write(
    request: AgentRequest,
    folder: str,
    name: str,
    grain: int,
    size: int,
    mode: int,
    holes: Sequence[tuple[int, int]],
    grains: Sequence[str],
    older: str,
) -> tuple[str, list[str]]:
    """Write received bytes into the missing block ranges of a large file.

    A new file starts as a copy of the file `older`, if given. The last request has a mode, and
    `grains` if all block digests are known. It returns the digest of the file. Other requests
    return the digests of the received blocks. Raises ObjectGone.
    """
    path = f"{folder}/{name}"
    request.make_arriving(os.path.dirname(path))
    if older:
        _begin_with(older, path, size)
    if os.path.lexists(path):
        os.chmod(path, 0o600)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not mode:
            return "", _receive_blocks(request, fd, size, grain, holes)
        digest = _receive_rest(request, fd, size, grain, holes)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
    if grains:
        _save_block_digests(digest, grain, grains)
    return digest, []


def _receive_blocks(
    request: AgentRequest, fd: int, size: int, grain: int, holes: Sequence[tuple[int, int]]
) -> list[str]:
    """Write received bytes into block ranges of a file. Return the digests of these blocks."""
    view = memoryview(bytearray(trees.BLOCK))
    digests: list[str] = []
    for first, count in holes:
        at, end = first * grain, min(size, (first + count) * grain)
        hasher = hashlib.sha256()
        for data in _store_received(request, fd, view, at, end, grain):
            hasher.update(data)
            at += len(data)
            if at == end or not at % grain:
                digests.append(hasher.hexdigest())
                hasher = hashlib.sha256()
    return digests


def _receive_rest(
    request: AgentRequest, fd: int, size: int, grain: int, holes: Sequence[tuple[int, int]]
) -> str:
    """Write received bytes into block ranges of a file. Return the digest of the whole file."""
    view = memoryview(bytearray(trees.BLOCK))
    hasher, at = hashlib.sha256(), 0
    for first, count in [*holes, (-(-size // grain), 0)]:
        # Up to the border of the block: bytes after the end of the file change its digest, too.
        start, end = first * grain, min(size, (first + count) * grain)
        while at < min(size, start) and (got := os.preadv(fd, [view[: start - at]], at)):
            hasher.update(view[:got])
            at += got
        for data in _store_received(request, fd, view, at, end, grain):
            hasher.update(data)
            at += len(data)
    return hasher.hexdigest()


def _store_received(
    request: AgentRequest, fd: int, view: memoryview, start: int, end: int, grain: int
) -> Iterator[memoryview]:
    """Write received bytes from `start` to `end` of a file, and yield them. None spans two blocks."""
    os.lseek(fd, start, os.SEEK_SET)
    at = start
    while at < end:
        border = min(end, (at // grain + 1) * grain)
        got = request.into(view[: border - at])
        if not got:
            return
        sparse.write(fd, view[:got])
        at += got
        if at == end:
            sparse.extend(fd, end)
        yield view[:got]


def survey(request: AgentRequest, folder: str, names: Sequence[str]) -> list[list[str]]:
    """Return the kind and digest of each file, or empty texts for missing ones.

    Raises ObjectGone.
    """
    _require_directory(folder)
    found = []
    for name in names:
        path = f"{folder}/{name}"
        try:
            kind = kind_of(os.lstat(path).st_mode)
            found.append([kind, hash_file(path)] if kind in "fx" else ["", ""])
        except (FileNotFoundError, NotADirectoryError):
            found.append(["", ""])
    return found


def chunks(
    request: AgentRequest, folder: str, name: str, grain: int, older: str, known: str, limit: int
) -> tuple[int, list[str]]:
    """Return the size of a large file and its block digests, or (0, []) if it does not exist.

    A new file starts as a copy of the first `limit` bytes of the file `older`, if given, with the
    digest `known`. Raises ObjectGone.
    """
    _require_directory(folder)
    path = f"{folder}/{name}"
    if os.path.islink(path):
        return 0, []
    if not os.path.lexists(path):
        if not older or not os.path.isfile(older):
            return 0, []
        _begin_with(older, path, limit)
        if remembered := _load_block_digests(known, grain):
            size = os.path.getsize(path)
            return size, remembered[: -(-size // grain)]
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found = hash_blocks(file.fileno(), size, grain)
    if len(found) * grain < size:
        return 0, []  # the file was truncated meanwhile
    if older and size == os.path.getsize(older):
        _save_block_digests(known, grain, found)
    return size, found


def _begin_with(older: str, path: str, limit: int) -> None:
    """Create a large file from the first `limit` bytes of another file, unless it exists.

    Raises ObjectGone.
    """
    # Several streams write parts of the file.
    with lock_name(hashlib.sha256(os.fsencode(path)).hexdigest()):
        if os.path.lexists(path):
            return
        if not os.path.isfile(older):
            raise ObjectGone
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = f"{path}.{os.getpid()}"
        trees.remove(new)
        trees.copy(older, new, limit)
        os.rename(new, path)


def listing(request: AgentRequest, folder: str) -> list[list[str]]:
    """Return path, kind and link target of all entries in a directory, or [] if it does not exist."""
    try:
        return [
            [path, kind, os.readlink(f"{folder}/{path}") if kind == "l" else ""]
            for path, kind in trees.below(folder)
        ]
    except FileNotFoundError:
        return []


def delete(request: AgentRequest, folder: str, names: Sequence[str]) -> None:
    """Delete these names in a directory of arriving objects."""
    trees.open_up(folder)
    for name in names:
        try:
            trees.remove(f"{folder}/{name}")
        except NotADirectoryError:
            continue  # its parent was a directory that is deleted already


def place_tree(request: AgentRequest, name: str, stamp: str, rough: bool) -> bool:
    """Move an arrived tree to its object path.

    Returns False if names, kinds and links do not match `stamp`. Raises ObjectGone.
    """
    here, at = f"{request.partial}/{name}", place(name)
    with lock_name(name):
        _require_directory(here)
        if trees.stamp_of(here) != stamp:
            return False
        if is_verified(request, name):
            trees.remove(here)  # another sender placed it first
            trees.remove(f"{here}.json")
        else:
            for path, kind in list(trees.below(here)):
                if kind == "d" or (rough and kind in "fx"):
                    os.chmod(f"{here}/{path}", 0o444 if kind == "f" else 0o555)
            os.makedirs(os.path.dirname(at), exist_ok=True)
            if os.path.lexists(f"{here}.json"):
                os.rename(f"{here}.json", f"{at}.json")
            trees.remove(at)
            os.rename(here, at)
            os.chmod(at, 0o555)  # noqa: S103
            seal(request, name)
    request.tidy()
    return True


def place_files(request: AgentRequest, names: Sequence[str]) -> list[str]:
    """Move arrived files to their object paths, and return the names that are placed now."""
    placed = []
    for name in names:
        here, at = f"{request.partial}/{name}", place(name)
        with lock_name(name):
            if not os.path.lexists(here):
                continue  # placed by an earlier request, whose answer was lost
            if is_verified(request, name):
                trees.remove(here)  # another sender placed it first
            else:
                os.makedirs(os.path.dirname(at), exist_ok=True)
                os.chmod(here, 0o555 if name.endswith(".x") else 0o444)
                os.rename(here, at)
                seal(request, name)
        placed.append(name)
    request.tidy()
    return placed


def free(request: AgentRequest) -> int:
    """Return the free disk space of the root in bytes."""
    found = os.statvfs(request.root)
    return found.f_bavail * found.f_frsize


def sweep(request: AgentRequest, unused: int, every: int) -> int:
    """Delete objects unused for `unused` seconds, unless an attempt uses them.

    Return their number.

    Unused agent programs are deleted, too, and if there are no attempts, unused states. Nothing is
    done if the last sweep was less than `every` seconds ago.
    """
    if every and _age("swept") < every:
        return 0
    trees.touch("swept")
    attempts = os.listdir("attempts")
    count = _delete_unused_objects(_inputs_of(attempts), unused)
    for name in os.listdir("pieces"):
        if _age(f"pieces/{name}") > unused:
            trees.remove(f"pieces/{name}")
    for name in os.listdir("agent"):
        if len(name) == DIGEST and _age(f"agent/{name}") > unused:
            trees.remove(f"agent/{name}")  # agent program of an unused version
    for sender in os.listdir("partial"):
        if 86400 < _age(f"partial/{sender}/.alive") < float("inf"):
            trees.remove(f"partial/{sender}")
    if not attempts:
        count += _delete_unused_states(unused)
    return count


def _inputs_of(attempts: Sequence[str]) -> set[str]:
    """Return the names of the objects that the attempts use."""
    found: set[str] = set()
    for name in attempts:
        if not name.endswith(".in"):
            continue
        try:
            with open(f"attempts/{name}", encoding="utf-8", errors="surrogateescape") as file:
                paths = file.read().split("\0")
        except FileNotFoundError:
            continue  # the attempt has ended
        found.update(map(os.path.basename, paths))
    return found


def _delete_unused_objects(needed: set[str], unused: int) -> int:
    count = 0
    for name in os.listdir("used"):
        if name not in needed and _age(f"used/{name}") > unused:
            for path in (f"seals/{name}", f"used/{name}", place(name), f"{place(name)}.json"):
                trees.remove(path)
            count += 1
    return count


def _delete_unused_states(unused: int) -> int:
    count = 0
    for name in os.listdir("states"):
        if time.time() - trees.newest(f"states/{name}") / 1e9 > unused:
            trees.remove(f"states/{name}")
            count += 1
    return count


def _save_block_digests(digest: str, grain: int, digests: Sequence[str]) -> None:
    new = f"pieces/{digest}.{os.getpid()}"
    with open(new, "w", encoding="utf-8") as file:
        json.dump([grain, digests], file)
    os.rename(new, f"pieces/{digest}")


def _load_block_digests(digest: str, grain: int) -> list[str]:
    """Return the recorded block digests of a file, or [] if unknown or of another block size."""
    try:
        with open(f"pieces/{digest}", encoding="utf-8") as file:
            size, digests = json.load(file)
    except (OSError, ValueError):
        return []
    trees.touch(f"pieces/{digest}")
    return list(digests) if size == grain else []


def _require_directory(folder: str) -> None:
    if not os.path.isdir(folder):
        raise ObjectGone


def _latest() -> list[str]:
    """Return the names of objects, most recently used first."""
    times = {}
    for name in os.listdir("used"):
        try:
            times[name] = os.stat(f"used/{name}").st_mtime_ns
        except FileNotFoundError:
            continue
    return sorted(times, key=lambda name: -times[name])


def _age(path: str) -> float:
    """Return the seconds since the last change of a file, infinite if it does not exist."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return float("inf")
