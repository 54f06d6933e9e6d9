"""Attempt directories on a host: create, inspect and delete them.

All functions run in the root and may be repeated. `attempts/NAME` is the directory. Next to it are
`NAME.sh`, `NAME.metrics`, `NAME.in` and `NAME.marks`. `NAME.in` lists the inputs and is written
after them, so an object with a newer timestamp has changed. `NAME.marks` has the marks of the
copied inputs. `NAME.out` is touched before outputs are hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time

from . import objects, trees
from .outputs import find_changed_copies, find_mark, look_at_output
from .regular import is_regular, open_regular
from .tree_hash import hash_file, hash_tree, kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import AgentRequest
    from .tree_hash import Row


AWAITED = 2.0
"""Seconds to wait for inputs that are sent at the same time as the attempt."""


def stage(
    request: AgentRequest,
    name: str,
    stamp: str,
    states: Sequence[str],
    coming: Sequence[str],
    given: Sequence[tuple[str, bool]] = (),
) -> list[str] | None:
    """Create an attempt directory from a tar with the directory `at/NAME`, unless it exists.

    The attempt is created once the arriving objects `coming` are present. Each path in `given` is a
    link to an input. It is replaced by the input's content, as hard links if the input is an
    object. Returns the paths that remain links, or None if the unpacked tree does not match
    `stamp`. Raises ObjectGone if the objects do not arrive in time.
    """
    if os.path.lexists(f"attempts/{name}.in") and os.path.isdir(f"attempts/{name}"):
        return []
    for state in states:
        os.makedirs(state, exist_ok=True)
    aside = f"{request.partial}/attempt.{os.getpid()}"
    trees.remove(aside)
    request.make_arriving(aside)
    try:
        os.chdir(aside)
        trees.unpack(request.read, request.into, 0o755)
        os.chdir(request.root)
        if stamp and trees.stamp_of(f"{aside}/at") != stamp:
            return None
        trees.remove(f"attempts/{name}")
        _wait_for_objects(request, coming)
        linked = [
            path
            for path, is_object in given
            if not trees.make_real(f"{aside}/at/{name}/{path}", is_object)
        ]
        last = f"{name}.in"  # rename the list of inputs last: it marks a complete attempt
        _record_marks(f"{aside}/at", name, f"{request.root}/attempts/{name}/")
        trees.touch(f"{aside}/at/{last}")
        for each in sorted(os.listdir(f"{aside}/at"), key=lambda each: each == last):
            os.rename(f"{aside}/at/{each}", f"attempts/{each}")
    finally:
        os.chdir(request.root)
        trees.remove(aside)
        request.tidy()
    return linked


def _wait_for_objects(request: AgentRequest, names: Sequence[str]) -> None:
    give_up_at = time.monotonic() + AWAITED
    for name in names:
        while not (os.path.lexists(objects.place(name)) and objects.is_verified(request, name)):
            if time.monotonic() > give_up_at:
                raise objects.ObjectGone
            time.sleep(0.002)


def take(
    request: AgentRequest, path: str, outputs: Sequence[str]
) -> tuple[list[tuple[str, list[Row]]], list[str]]:
    """Return the kind and hashed entries of each output, and the inputs that have changed.

    The kinds are those of `look_at_output`. Raises ObjectGone if the attempt does not exist.
    """
    if not os.path.isdir(path):
        raise objects.ObjectGone
    if os.path.exists(f"{path}.in"):
        trees.touch(f"{path}.out")
    found = [_hash_output(request, path, name) for name in outputs]
    return found, _find_changed_inputs(path)


def _hash_output(request: AgentRequest, path: str, name: str) -> tuple[str, list[Row]]:
    at = f"{path}/{name}"
    kind, _ = look_at_output(path, name, (f"{request.root}/states",))
    try:
        if kind == "d":
            return kind, hash_tree(at)
        if kind in "fx":
            return kind, [("", kind, os.stat(at).st_size, hash_file(at))]
        return kind, []
    except FileNotFoundError:
        if os.path.lexists(at):
            raise
        # A request of a killed worker is still running: its `keep` has just moved the output.
        return "-", []


def _record_marks(top: str, name: str, prefix: str) -> None:
    """Write the marks of the staged copies of an attempt to `NAME.marks` in the directory `top`."""
    copies = [
        path[len(prefix) :]
        for path in _read_inputs(f"{top}/{name}.in")[0]
        if path.startswith(prefix)
    ]
    if copies:
        with open(f"{top}/{name}.marks", "w", encoding="ascii") as file:
            json.dump({copy: find_mark(f"{top}/{name}/{copy}") for copy in copies}, file)


def _find_changed_inputs(path: str) -> list[str]:
    """Return the copies of an attempt with another mark, and the objects written since the staging."""
    given, then = _read_inputs(f"{path}.in")
    try:
        with open(f"{path}.marks", encoding="ascii") as file:
            marks = {copy: tuple(mark) for copy, mark in json.load(file).items()}
    except FileNotFoundError:
        marks = {}  # there are no copies, or an older version staged the attempt
    changed = [f"{path}/{copy}" for copy in find_changed_copies(marks, path)]
    copies = {f"{path}/{copy}" for copy in marks}
    for each in given:
        if each not in copies and _is_newer(each, then):
            changed.append(each)
    return changed


def _is_newer(path: str, then: int) -> bool:
    """Return True if a file or tree was written after the time `then`, or deleted."""
    try:
        return trees.newest(path) > then
    except FileNotFoundError:
        return True


def _read_inputs(note: str) -> tuple[list[str], int]:
    """Return the input paths in the file `note`, and the time of the staging in nanoseconds."""
    try:
        with open(note, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().split("\0")[:-1], os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return [], 0


def remains(
    request: AgentRequest, path: str, each: int, whole: int, count: int
) -> tuple[list[tuple[str, int]], int]:
    """Send small files of an attempt.

    Return their names and sizes, and the number of skipped files.

    At most `count` files of `each` bytes and `whole` bytes in total are sent, one after the other.
    Unreadable directories and hard links to objects are ignored.
    """
    if not os.path.isdir(path):
        return [], 0
    names = []
    for name, found in trees.walk(path):
        if isinstance(found, OSError) or not stat.S_ISREG(found.st_mode):
            continue
        is_object = found.st_nlink > 1 and not found.st_mode & 0o222
        if not is_object:
            names.append(name)
    sent: list[tuple[str, int]] = []
    for name in sorted(names):
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


def keep(request: AgentRequest, path: str, outputs: Sequence[tuple[str, str, bool]]) -> list[str]:
    """Convert outputs of an attempt to objects, and return the names of those that exist now.

    Each output is given by its path, its object name, and whether to copy it instead of moving it.
    """
    request.make_arriving(request.partial)
    kept = []
    # Links first, before their targets are moved.
    links_first = sorted(outputs, key=lambda each: not os.path.islink(f"{path}/{each[0]}"))
    for output, name, copied in links_first:
        with objects.lock_name(name):
            if _keep_output(request, path, output, name, copied):
                kept.append(name)
    request.tidy()
    return kept


def _keep_output(request: AgentRequest, path: str, output: str, name: str, copied: bool) -> bool:
    source, aside, at = f"{path}/{output}", f"{request.partial}/{name}", objects.place(name)
    os.makedirs(os.path.dirname(at), exist_ok=True)
    if objects.is_verified(request, name):
        return True
    if os.path.lexists(source):
        trees.remove(aside)
        try:
            _move(source, aside, copied or os.path.islink(source))
        except FileNotFoundError:
            if os.path.lexists(source):
                raise  # otherwise a request of a killed worker moved it first
    looked = f"{path}.out" if os.path.exists(f"{path}.out") else ""
    if os.path.lexists(aside):
        trees.remove(at)
        _freeze(aside, name)
        _reset_future_times(aside, os.stat(looked).st_mtime_ns if looked else time.time_ns())
        os.rename(aside, at)
        if os.path.isdir(at):
            os.chmod(at, 0o555)  # noqa: S103
    elif not os.path.lexists(at):
        return False
    objects.seal(request, name, looked)
    return True


def _move(source: str, target: str, copied: bool) -> None:
    if not copied:
        os.rename(source, target)
        return
    if os.path.isdir(source):
        import shutil

        shutil.copytree(source, target, symlinks=True, copy_function=trees.copy_with_mode)
    else:
        trees.copy(source, target)


def _freeze(path: str, name: str) -> None:
    """Make a file or directory read-only, against accidental writes."""
    if not os.path.isdir(path):
        os.chmod(path, 0o555 if name.endswith(".x") else 0o444)
        return
    trees.open_up(path)
    for each, kind in list(trees.below(path)):
        if kind in "fxd":
            os.chmod(f"{path}/{each}", 0o444 if kind == "f" else 0o555)


def _reset_future_times(path: str, then: int) -> None:
    """Reset modification times that lie in the future, for example from archives, to `then`.

    Otherwise the files would always look modified.
    """
    now = time.time_ns()
    paths = [path]
    if os.path.isdir(path):
        paths += [f"{path}/{name}" for name, _ in trees.below(path)]
    for each in paths:
        if os.lstat(each).st_mtime_ns > now:
            os.utime(each, ns=(then, then), follow_symlinks=False)


def read(request: AgentRequest, path: str, offset: int, limit: int) -> bool:
    """Send at most `limit` bytes of a file from `offset`, or nothing if there is no file.

    Returns True if the path exists but is not a regular file.
    """
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
    request: AgentRequest, folder: str, spans: Sequence[tuple[str, int, int]], squeeze: bool
) -> None:
    """Send parts of files in a directory, one after the other: name, start and length of each.

    The name "" stands for `folder` itself, which is then a file. With `squeeze`, the data is sent
    compressed.
    """
    if squeeze:
        request.squeeze()
    view = memoryview(bytearray(trees.BLOCK // 2))
    for name, start, count in spans:
        with open(f"{folder}/{name}" if name else folder, "rb", buffering=0) as file:
            file.seek(start)
            while count and (got := file.readinto(view[: min(count, len(view))])):
                request.emit(view[:got])
                count -= got


def matching(request: AgentRequest, path: str, pattern: str) -> list[str]:
    """Return the files of an attempt that match a glob pattern.

    `**` matches directories of any depth.
    """
    # Matches like the client, which uses pathlib for local directories. Few requests need it, and
    # its import would delay the start of each agent.
    import pathlib

    return sorted(
        str(each.relative_to(path)) for each in pathlib.Path(path).glob(pattern) if each.is_file()
    )


def note(request: AgentRequest, path: str) -> None:
    """Create a marker file below the root."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write("done\n")


def remove(request: AgentRequest, paths: Sequence[str]) -> None:
    """Delete files and directories of any mode.

    For attempts, delete the files next to them, too.
    """
    for path in paths:
        for each in (
            (path, f"{path}.in", f"{path}.marks", f"{path}.out")
            if os.path.basename(os.path.dirname(path)) == "attempts"
            else (path,)
        ):
            trees.remove(each)


def clear(request: AgentRequest, paths: Sequence[str], unused: int, every: int) -> int:
    """Delete files of attempts, and sweep. Return the number of deleted objects and states."""
    remove(request, paths)
    try:
        return objects.sweep(request, unused, every)
    except OSError:
        return 0  # the next sweep continues


def look(request: AgentRequest, path: str) -> tuple[list[tuple[str, int, int, bool]], int, int]:
    """Return the files and links in a directory, and the free and total bytes of its disk.

    Each entry has a path, size, modification time in nanoseconds, and whether it is a link.
    """
    found = []
    for name, seen in trees.walk(path) if os.path.isdir(path) else ():
        if isinstance(seen, FileNotFoundError):
            continue  # deleted by the running trainer
        if isinstance(seen, OSError):
            raise seen
        kind = kind_of(seen.st_mode)
        if kind in "fxl":
            found.append((name, seen.st_size, seen.st_mtime_ns, kind == "l"))
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "/"
    disk = os.statvfs(folder)
    return found, disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def release(request: AgentRequest, name: str, path: str) -> None:
    """Move an object to `path` in a state directory, and make it writable and independent of
    objects.
    """
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
            return  # done by an earlier request, whose answer was lost
        raise objects.ObjectGone
    trees.open_up(aside)
    _make_independent(aside)
    for each, kind in list(trees.below(aside)) if os.path.isdir(aside) else ():
        if kind in "fx":
            _make_independent(f"{aside}/{each}")
    trees.remove(path)
    os.rename(aside, path)


def _make_independent(path: str) -> None:
    """Replace a hard link by a copy, and make the file writable."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return
    if found.st_nlink > 1:
        trees.copy_with_mode(path, f"{path}.own")
        os.rename(f"{path}.own", path)
    os.chmod(path, stat.S_IMODE(found.st_mode) | stat.S_IWUSR)
