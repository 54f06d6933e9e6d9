"""Run a command whose changes to its inputs are kept separately and deleted with its attempt.

usage: python -IS overlay.py CHANGES COUNT [SOURCE TARGET]... PROGRAM [WORD]...

The command runs in its own mount namespace, and in a user namespace if that is needed. Each
directory TARGET becomes an overlay of the directory SOURCE, and each file TARGET the read-only file
SOURCE. Changes are written below the directory CHANGES. PROGRAM then replaces this process. It runs
as the same user, who may also write to their read-only files, because these are copies of inputs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED = 125
"""Exit status if inputs cannot be mounted."""
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _ALL_BELOW, _FOLLOW = 1, 32, 4096, 16384, 1 << 19
_KEPT = 0xC0E
"""Mount flags that a user namespace may not drop, as in `statvfs`.

These are nosuid, nodev, noexec, noatime and nodiratime.
"""
_RELATIVE_TIMES, _RELATIVE_TIMES_SEEN = 1 << 21, 4096
_WRITE_ANYWAY = 1
"""CAP_DAC_OVERRIDE."""
_AMBIENT, _RAISE = 47, 2
_CAPABILITIES_VERSION = 0x20080522


def main(words: Sequence[str]) -> int:
    """Replace this process with the command.

    If that fails, print the reason and return `FAILED`.
    """
    changes, count = words[0], int(words[1])
    end = 2 + 2 * count
    inputs = list(zip(words[2:end:2], words[3:end:2], strict=True))
    try:
        here = os.getcwd()
        enter(changes, inputs)
        os.chdir(here)
        _become(words[end:])
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        print(f"recipe: {name}{error.strerror}", file=sys.stderr)
    return FAILED


def _become(command: Sequence[str]) -> None:
    """Execute a program by its path or from PATH, replacing this process. Raises OSError.

    `os.execvp` would import a module, but Python's files may be readable in the outer namespace
    only.
    """
    folders = [""] if "/" in command[0] else os.environ.get("PATH", os.defpath).split(":")
    refusal = OSError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    for folder in folders:
        try:
            os.execv(os.path.join(folder, command[0]), list(command))  # noqa: S606
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refusal = OSError(error.errno, error.strerror, command[0])
    raise refusal


def enter(changes: str, inputs: Sequence[tuple[str, str]]) -> None:
    """Mount each source path at its target path, for this process only. Raises OSError."""
    system = ctypes.CDLL(None, use_errno=True)
    has_user_namespace = _leave_mounts(system)
    for number, (source, target) in enumerate(inputs):
        if os.path.isdir(target):
            _overlay(system, source, target, f"{changes}/{number}")
        else:
            _show_file(system, source, target)
    if has_user_namespace:
        _keep_one_capability(system)


def _leave_mounts(system: ctypes.CDLL) -> bool:
    """Enter a new mount namespace. Return True if this required a user namespace."""
    has_user_namespace = False
    if system.unshare(_NEW_MOUNTS) != 0:
        if ctypes.get_errno() != errno.EPERM:
            raise _no_namespace()
        user, group = os.geteuid(), os.getegid()
        if system.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            raise _no_namespace()
        has_user_namespace = True
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "wb", buffering=0) as file:
                file.write(text.encode())
    _mount(system, None, "/", None, _ALL_BELOW | _FOLLOW, "")
    return has_user_namespace


def _overlay(system: ctypes.CDLL, source: str, target: str, changes: str) -> None:
    folders = [source, f"{changes}/new", f"{changes}/work"]
    for folder in folders[1:]:
        os.makedirs(folder, exist_ok=True)
    # Descriptors avoid escaping paths in the kernel's option list.
    handles = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders]
    lower, upper, work = (f"/proc/self/fd/{handle}" for handle in handles)
    os.chmod(folders[1], os.stat(source).st_mode & 0o777 | 0o700)
    try:
        options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        _mount(system, "overlay", target, "overlay", 0, options)
    finally:
        for handle in handles:
            os.close(handle)


def _show_file(system: ctypes.CDLL, source: str, target: str) -> None:
    _mount(system, source, target, None, _BIND, "")
    found = os.statvfs(target).f_flag
    kept = found & _KEPT | (_RELATIVE_TIMES if found & _RELATIVE_TIMES_SEEN else 0)
    _mount(system, None, target, None, _BIND | _REMOUNT | _READ_ONLY | kept, "")


def _keep_one_capability(system: ctypes.CDLL) -> None:
    """Drop all capabilities except access to the user's own files of any mode, also for the
    command.
    """
    only = 1 << _WRITE_ANYWAY
    head = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0)
    if system.capset(head, sets) != 0:
        raise _error("capset")
    if system.prctl(_AMBIENT, _RAISE, _WRITE_ANYWAY, 0, 0) != 0:
        raise _error("prctl")


def _mount(
    system: ctypes.CDLL, source: str | None, target: str, kind: str | None, flags: int, options: str
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    if system.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)) != 0:
        raise _error(target)


def _no_namespace() -> OSError:
    number = ctypes.get_errno()
    is_full = number == errno.ENOSPC  # a limit such as `user.max_user_namespaces`
    why = "the limit on namespaces is reached" if is_full else os.strerror(number)
    return OSError(number, f"cannot create a namespace: {why}")


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
