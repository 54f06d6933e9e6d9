"""Attempt directories on a host: made, looked at when their command is over, deleted.  Every function runs in the root, and may run twice.

`attempts/NAME` is the directory; beside it lie `NAME.sh`, `NAME.metrics`, and `NAME.in`: what it was given, written after all of it, so that what is
newer has changed since.  `NAME.out` is touched when it is looked at, before its outputs are hashed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time

from . import objects, trees
from .regular import is_regular, open_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Request
    from .trees import Row


AWAITED = 2.0
"""Seconds for what an attempt is given, which is sent while the attempt is."""


def stage(
    request: Request,
    name: str,
    stamp: str,
    states: Sequence[str],
    coming: Sequence[str],
    given: Sequence[tuple[str, bool]] = (),
) -> list[str] | None:
    """Make an attempt from a tar that holds it as `at/NAME`, unless it stands.  None where what was made is not what `stamp` says.

    It stands once the objects `coming`, which are on their way, are there.  Raises Gone when they do not come soon.  Each of
    `given` is a link in it that becomes what it leads to, by hard links where that is an object.  Answers those that stay links.
    """
    if os.path.lexists(f"attempts/{name}.in") and os.path.isdir(f"attempts/{name}"):
        return []
    for state in states:
        os.makedirs(state, exist_ok=True)
    aside = f"{request.partial}/attempt.{os.getpid()}"
    trees.remove(aside)
    request.arriving(aside)
    try:
        os.chdir(aside)
        trees.unpack(request.read, request.into, 0o755)
        os.chdir(request.root)
        if stamp and trees.stamp_of(f"{aside}/at") != stamp:
            return None
        trees.remove(f"attempts/{name}")
        _await(request, coming)
        linked = [
            path
            for path, is_object in given
            if not trees.make_real(f"{aside}/at/{name}/{path}", is_object)
        ]
        last = f"{name}.in"  # what was given is named last: then all of it is there
        trees.touch(f"{aside}/at/{last}")
        for each in sorted(os.listdir(f"{aside}/at"), key=lambda each: each == last):
            os.rename(f"{aside}/at/{each}", f"attempts/{each}")
    finally:
        os.chdir(request.root)
        trees.remove(aside)
        request.tidy()
    return linked


def _await(request: Request, names: Sequence[str]) -> None:
    give_up_at = time.monotonic() + AWAITED
    for name in names:
        while not (os.path.lexists(objects.place(name)) and objects.sealed(request, name)):
            if time.monotonic() > give_up_at:
                raise objects.Gone
            time.sleep(0.002)


def take(
    request: Request, path: str, outputs: Sequence[str]
) -> tuple[list[tuple[str, list[Row]]], list[str]]:
    """What each output of the attempt at `path` is, with its rows hashed, and which of what it was given is not so any more.

    An output is f, x, d (a folder), - (nothing) or o (something else).  Raises Gone where there is no attempt.
    """
    if not os.path.isdir(path):
        raise objects.Gone
    if os.path.exists(f"{path}.in"):
        trees.touch(f"{path}.out")
    top = os.path.realpath(path)
    inside = (f"{top}/", f"{os.path.realpath(request.root)}/states/")
    found = [_output(f"{path}/{name}", inside) for name in outputs]
    return found, _changed(f"{path}.in")


def _output(at: str, inside: tuple[str, ...]) -> tuple[str, list[Row]]:
    if not f"{os.path.realpath(os.path.dirname(at))}/".startswith(inside):
        return "o", []  # behind a link that leads out
    try:
        kind = trees.kind_of(os.stat(at).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return ("o" if os.path.islink(at) else "-"), []
    except OSError:  # a link to itself
        return "o", []
    try:
        if kind == "d":
            return "d", trees.rows(at)
        return (
            (kind, [("", kind, os.stat(at).st_size, trees.digest_of(at))])
            if kind in "fx"
            else ("o", [])
        )
    except FileNotFoundError:
        if os.path.lexists(at):
            raise
        return (
            "-",
            [],
        )  # what a worker that was killed asked for last is still under way: `keep` has just moved it


def _changed(note: str) -> list[str]:
    """What an attempt was given and is newer than the note of it, or is not there."""
    try:
        with open(note, encoding="utf-8", errors="surrogateescape") as file:
            given, then = file.read().split("\0")[:-1], os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return []
    found = []
    for path in given:
        try:
            newest = trees.newest(path)
        except FileNotFoundError:
            newest = then + 1
        if newest > then:
            found.append(path)
    return found


def remains(
    request: Request, path: str, each: int, whole: int, count: int
) -> tuple[list[tuple[str, int]], int]:
    """Small files of the attempt at `path`, at most `count`, of `each` bytes and together `whole`: names and sizes, the bytes behind each other.

    And how many other files it has; what cannot be looked into is left out, and what is another name of an object.
    """
    if not os.path.isdir(path):
        return [], 0
    names = sorted(
        name
        for name, found in trees.seen(path)
        if not isinstance(found, OSError)
        and stat.S_ISREG(found.st_mode)
        and (found.st_mode & 0o222 or found.st_nlink == 1)
    )
    sent: list[tuple[str, int]] = []
    for name in names:
        if len(sent) == count:
            break
        try:
            with open_regular(f"{path}/{name}") as file:
                data = file.read(each + 1)
        except OSError:
            continue
        if len(data) <= min(each, whole - sum(size for _, size in sent)):
            sent.append((name, len(data)))
            request.emit(data)
    return sent, len(names) - len(sent)


def keep(request: Request, path: str, outputs: Sequence[tuple[str, str, bool]]) -> list[str]:
    """Make outputs of the attempt at `path` objects: path, name as an object, and whether it is copied, not moved.  Those that are objects now."""
    request.arriving(request.partial)
    kept = []
    for output, name, copied in sorted(
        outputs, key=lambda each: not os.path.islink(f"{path}/{each[0]}")
    ):  # before what they lead to is moved
        with objects.naming(name):
            if _kept(request, path, output, name, copied):
                kept.append(name)
    request.tidy()
    return kept


def _kept(request: Request, path: str, output: str, name: str, copied: bool) -> bool:
    source, aside, at = f"{path}/{output}", f"{request.partial}/{name}", objects.place(name)
    os.makedirs(os.path.dirname(at), exist_ok=True)
    if objects.sealed(request, name):
        return True
    if os.path.lexists(source):
        trees.remove(aside)
        try:
            _moved(source, aside, copied or os.path.islink(source))
        except FileNotFoundError:
            if os.path.lexists(source):
                raise  # else another, for a worker that was killed, was faster
    looked = f"{path}.out" if os.path.exists(f"{path}.out") else ""
    if os.path.lexists(aside):
        trees.remove(at)
        _freeze(aside, name)
        _date(aside, os.stat(looked).st_mtime_ns if looked else time.time_ns())
        os.rename(aside, at)
        if os.path.isdir(at):
            os.chmod(at, 0o555)  # noqa: S103
    elif not os.path.lexists(at):
        return False
    objects.seal(request, name, looked)
    return True


def _moved(source: str, target: str, copied: bool) -> None:
    if not copied:
        os.rename(source, target)
        return
    if os.path.isdir(source):
        import shutil

        shutil.copytree(source, target, symlinks=True, copy_function=trees.copy_with_mode)
    else:
        trees.copy(source, target)


def _freeze(path: str, name: str) -> None:
    """Protect it from accidental writes."""
    if not os.path.isdir(path):
        os.chmod(path, 0o555 if name.endswith(".x") else 0o444)
        return
    trees.open_up(path)
    for each, kind in list(trees.below(path)):
        if kind in "fxd":
            os.chmod(f"{path}/{each}", 0o444 if kind == "f" else 0o555)


def _date(path: str, then: int) -> None:
    """Let what has a time that is yet to come, as from an archive, have the time `then`: it would look as if it were written to for ever."""
    now = time.time_ns()
    for each in (
        [path, *(f"{path}/{name}" for name, _ in trees.below(path))]
        if os.path.isdir(path)
        else [path]
    ):
        if os.lstat(each).st_mtime_ns > now:
            os.utime(each, ns=(then, then), follow_symlinks=False)


def read(request: Request, path: str, offset: int, limit: int) -> bool:
    """Bytes of a file from `offset` on, at most `limit`; none where there is no file.  True where something is there that is no regular file."""
    if not is_regular(path):
        return os.path.lexists(path)
    try:
        with open_regular(path) as file:
            file.seek(offset)
            while limit and (data := file.read(min(limit, trees.BLOCK // 2))):
                limit -= len(data)
                request.emit(data)
    except FileNotFoundError:
        pass
    return False


def send(
    request: Request, folder: str, spans: Sequence[tuple[str, int, int]], squeeze: bool
) -> None:
    """Bytes of files in a folder, behind each other: of each its name, the first and how many."""
    if squeeze:
        request.squeeze()
    view = memoryview(bytearray(trees.BLOCK // 2))
    for name, start, count in spans:
        with open(f"{folder}/{name}" if name else folder, "rb", buffering=0) as file:
            file.seek(start)
            while count and (got := file.readinto(view[: min(count, len(view))])):
                request.emit(view[:got])
                count -= got


def matching(request: Request, path: str, pattern: str) -> list[str]:
    """Files of the attempt at `path` whose names a pattern fits, in folders of any depth where it says `**`."""
    import pathlib  # what reads them where we see the disk

    return sorted(
        str(each.relative_to(path)) for each in pathlib.Path(path).glob(pattern) if each.is_file()
    )


def note(request: Request, path: str) -> None:
    """Write down below the root that something was done."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write("done\n")


def remove(request: Request, paths: Sequence[str]) -> None:
    """Delete files and folders, whatever their modes; of attempts also what is noted beside them."""
    for path in paths:
        for each in (
            (path, f"{path}.in", f"{path}.out")
            if os.path.basename(os.path.dirname(path)) == "attempts"
            else (path,)
        ):
            trees.remove(each)


def clear(request: Request, paths: Sequence[str], unused: int, every: int) -> int:
    """Delete what attempts leave, and sweep (see `objects.sweep`): how many objects and states went."""
    remove(request, paths)
    try:
        return objects.sweep(request, unused, every)
    except OSError:
        return 0  # the next one does it


def look(request: Request, path: str) -> tuple[list[tuple[str, int, int, bool]], int, int]:
    """Files and links below a folder: path, bytes, nanoseconds of the last writing, whether it is a link.  And bytes of its disk, free and all."""
    found = []
    for name, seen in trees.seen(path) if os.path.isdir(path) else ():
        if isinstance(seen, FileNotFoundError):
            continue  # its trainer is at work
        if isinstance(seen, OSError):
            raise seen
        kind = trees.kind_of(seen.st_mode)
        if kind in "fxl":
            found.append((name, seen.st_size, seen.st_mtime_ns, kind == "l"))
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "/"
    disk = os.statvfs(folder)
    return found, disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def release(request: Request, name: str, path: str) -> None:
    """Make an object something of a state: out of the objects, shared with no other of them, writable."""
    at, aside = (
        objects.place(name),
        f"states/.arriving-{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}",
    )
    if os.path.lexists(at):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        trees.remove(aside)
        if os.path.isdir(at):
            os.chmod(at, 0o700)
        os.rename(at, aside)
        trees.remove(f"{at}.json")
    for each in (f"seals/{name}", f"used/{name}"):
        trees.remove(each)
    if not os.path.lexists(aside):
        if os.path.lexists(path):
            return  # the answer to an earlier try was lost
        raise objects.Gone
    trees.open_up(aside)
    _own(aside)
    for each, kind in list(trees.below(aside)) if os.path.isdir(aside) else ():
        if kind in "fx":
            _own(f"{aside}/{each}")
    trees.remove(path)
    os.rename(aside, path)


def _own(path: str) -> None:
    """A file that no other name leads to, and that may be written to."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return
    if found.st_nlink > 1:
        trees.copy_with_mode(path, f"{path}.own")
        os.rename(f"{path}.own", path)
    os.chmod(path, stat.S_IMODE(found.st_mode) | stat.S_IWUSR)
