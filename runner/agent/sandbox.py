"""Run a command in a sandbox: separate namespaces, and a root directory with the given paths only.

A standalone program, `python -I -S -c TEXT WORDS…`, because the other modules are not available
where it runs. The words are

    network   "network" for the network of the machine, "closed" for loopback only
    box       a directory for /tmp and HOME of the command, created here and deleted afterwards
    python    the Python interpreter of the command, whose packages are visible
    count     number of triples that follow: a mode ("r", "w", or "f" for a writable file that may
              be missing), a path, and the path under which the command sees it
    command   …

Three processes take part. This process waits and passes on the exit status. The first process of
the new PID namespace creates the root directory and ends processes that the command leaves behind.
It is killed together with this process, and the kernel then kills all others. The third process
executes the command, without privileges over the machine.

If the namespaces cannot be created, a line that begins with `MARK` gives the reason, and the exit
status is 125.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import select
import struct
import sys
import time

MARK = "recipe: no sandbox: "
REFUSED = 125
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc", "/opt", "/sys", "/nix/store", "/gnu/store", "/run/current-system"),
    *("/run/opengl-driver", "/run/nvidia-persistenced"),
)
"""Directories of system programs, libraries and settings."""
TMP = "/tmp"  # noqa: S108  (in the sandbox)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
ACCELERATORS = ("nvidia", "dri", "kfd", "dxg", "accel", "infiniband", "habana", "davinci", "vfio")
"""Prefixes of device names in /dev for GPUs and their interconnects."""
PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
PREFIXES = (
    *("CONDA_PREFIX", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Environment variables that name directories of programs and libraries, or certificates."""
STRAY_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for processes that a command leaves behind."""

SIGKILL, SIGTERM, SIGCHLD = 9, 15, 17
IGNORED = (1, 2, 3, 10, 12, 15)
"""Signals to the process group that only the command handles."""
RESTORED = (*IGNORED, 13, 25)

NEWNS, NEWUSER, NEWPID, NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME = 1, 2, 4, 8, 32, 1024
NODIRATIME, BIND, REC, PRIVATE, RELATIME = 2048, 4096, 16384, 1 << 18, 1 << 21
DETACH = 2
KEPT = (0, 1, 3, 4, 5, 6, 7)
"""Capabilities that root keeps over its own files and processes."""
SET_DUMPABLE, SET_PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS = 4, 1, 24, 38
CLONE, PIVOT_ROOT = {"x86_64": (56, 155), "aarch64": (220, 41)}.get(os.uname().machine, (0, 0))
MOUNT_SETATTR, AT_FDCWD, RECURSIVE = 442, -100, 0x8000

libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter lock over a fork


class SandboxRefused(Exception):
    """The machine does not permit a sandbox."""


class VisiblePath:
    """A file or directory that the command sees."""

    def __init__(self, real: str, at: str, writable: bool) -> None:
        """`real` is the resolved path outside the sandbox, `at` the path inside."""
        self.real, self.at, self.writable = real, at, writable


class SandboxedCommand:
    """A command and its sandbox."""

    def __init__(
        self, network: bool, box: str, folder: str, shown: list[VisiblePath], command: list[str]
    ) -> None:
        """`folder` is the working directory. In `shown`, parent directories come first."""
        self.network, self.box, self.folder = network, box, folder
        self.shown, self.command = shown, command


def main(words: list[str]) -> int:
    network, box, python, count = words[0] == "network", words[1], words[2], int(words[3])
    rest = words[4:]
    triples = [(rest[n], rest[n + 1], rest[n + 2]) for n in range(0, 3 * count, 3)]
    try:
        command = rest[3 * count :]
        wanted = SandboxedCommand(
            network, box, os.getcwd(), _visible_paths(triples, python), command
        )
        _make_box(box)
        try:
            return _run_and_wait(wanted)
        finally:
            _remove(box)
    except (SandboxRefused, OSError) as error:
        return _refuse(error)


def _refuse(error: Exception) -> int:
    """Print why the sandbox cannot be created, and return the exit status."""
    why = str(error)
    if isinstance(error, OSError):
        why = f"{error.filename or 'the kernel'}: {os.strerror(error.errno or 0)}"
    os.write(2, os.fsencode(f"{MARK}{why}\n"))
    return REFUSED


# -- outside the sandbox


def _run_and_wait(wanted: SandboxedCommand) -> int:
    """Start the first process, wait, and exit like the command."""
    go_read, go = os.pipe()
    alive_read, alive = os.pipe()
    status_read, status = os.pipe()
    pid, has_users = _clone(NEWNS | NEWPID | (0 if wanted.network else NEWNET))
    if pid == 0:
        for fd in (go, alive, status_read):
            os.close(fd)
        os._exit(_run_first_process(go_read, alive_read, status, wanted))
    for number in IGNORED:
        libc.signal(number, ctypes.c_void_p(1))
    for fd in (go_read, alive_read, status):
        os.close(fd)
    if has_users:
        try:
            _map_users(pid)
        except OSError as error:
            os.kill(pid, SIGKILL)
            why = f"cannot map users into the namespace: {os.strerror(error.errno or 0)}"
            raise SandboxRefused(why + _remedy(error.errno or 0)) from error
    os.write(go, b"1")
    said = os.read(status_read, 4)
    ended = os.waitpid(pid, 0)[1]
    if len(said) == 4:
        ended = struct.unpack("i", said)[0]
    if os.WIFSIGNALED(ended):
        return _die(os.WTERMSIG(ended), wanted.box)
    return os.WEXITSTATUS(ended)


def _clone(flags: int) -> tuple[int, bool]:
    """Fork a child in new namespaces, and return its PID and whether it has a user namespace.

    Raises Refused.
    """
    if not CLONE:
        raise SandboxRefused(f"the processor architecture {os.uname().machine} is not supported")
    pid = libc.syscall(CLONE, ctypes.c_ulong(flags | NEWUSER | SIGCHLD), 0, 0, 0, 0)
    if pid >= 0:
        return pid, True
    error = ctypes.get_errno()
    if os.getuid() == 0:
        pid = libc.syscall(CLONE, ctypes.c_ulong(flags | SIGCHLD), 0, 0, 0, 0)
        if pid >= 0:
            return pid, False
    why = f"cannot create namespaces on this machine: {os.strerror(error)}"
    raise SandboxRefused(why + _remedy(error))


def _remedy(error: int) -> str:
    """Return a hint about the kernel setting that forbids namespaces, or "" if unknown."""
    if _setting("user/max_user_namespaces") == "0":
        return " (user.max_user_namespaces is 0)"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return " (kernel.unprivileged_userns_clone is 0)"
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return " (kernel.apparmor_restrict_unprivileged_userns is 1)"
    return " (containers often forbid namespaces)" if error == 1 else ""


def _setting(name: str) -> str:
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _map_users(pid: int) -> None:
    """Map users to themselves in the user namespace: all users for root, otherwise the current
    user.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        try:
            for name in ("uid_map", "gid_map"):
                with open("/proc/self/" + name, encoding="ascii") as file:
                    known = [line.split() for line in file]
                text = "".join(f"{first} {first} {length}\n" for first, _, length in known)
                _write(f"/proc/{pid}/{name}", text)
            return
        except PermissionError:
            pass
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", f"{gid} {gid} 1\n")
    _write(f"/proc/{pid}/uid_map", f"{uid} {uid} 1\n")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _die(number: int, box: str) -> int:
    """End this process by the signal that ended the sandboxed command."""
    _remove(box)
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    libc.signal(number, ctypes.c_void_p(0))
    os.kill(os.getpid(), number)
    return 128 + number  # for a signal that does not end a process


def _make_box(box: str) -> None:
    _remove(box)
    for path in (box, f"{box}{TMP}", f"{box}{TMP}/home"):
        os.mkdir(path, 0o700)


def _remove(path: str) -> None:
    try:
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove(entry.path)
                else:
                    os.unlink(entry.path)
        os.rmdir(path)
    except OSError:
        pass  # missing, or deleted later with the attempt


# -- visible paths


def _visible_paths(triples: list[tuple[str, str, str]], python: str) -> list[VisiblePath]:
    """Return the paths visible to the command besides the system, without redundant nested paths."""
    found: dict[str, VisiblePath] = {}
    for mode, path, at in triples:
        if mode == "f" and not os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        _add(found, path, at, mode != "r")
    for path in _programs(python):
        _add(found, path, path, False)
    kept: list[VisiblePath] = []
    for each in sorted(found.values(), key=lambda each: (each.at.count("/"), each.at)):
        above = [other for other in kept if each.at.startswith(other.at + "/")]
        if not above or not _is_inside(each, above[-1]):
            kept.append(each)
    return kept


def _add(found: dict[str, VisiblePath], path: str, at: str, writable: bool) -> None:
    """Add a path, and also its resolved path, because other links may lead there."""
    real = os.path.realpath(path)
    if not os.path.exists(real):
        return
    for name in (at, real) if at == path else (at,):
        if writable or not _is_in_system(name):
            found.setdefault(name, VisiblePath(real, name, writable))


def _is_in_system(path: str) -> bool:
    """Return True if the sandbox shows this path anyway."""
    return any(path == each or path.startswith(each + "/") for each in SYSTEM)


def _is_inside(each: VisiblePath, outer: VisiblePath) -> bool:
    same = outer.real + each.at[len(outer.at) :] == each.real
    return same and outer.writable == each.writable


def _programs(python: str) -> list[str]:
    """Return the directories of programs and packages from the command's environment variables."""
    folders = [os.path.normpath(os.environ[name]) for name in PREFIXES if os.environ.get(name)]
    for name in PROGRAMS:
        for part in os.environ.get(name, "").split(":"):
            if part.startswith("/"):
                part = os.path.normpath(part)
                folders += [part, *_prefix(part)]
    if python.startswith("/"):
        folders += _interpreter(python)
    home = _home_of_login() + "/"
    return [path for path in folders if not home.startswith(path.rstrip("/") + "/")]


def _home_of_login() -> str:
    """Return the user's home directory. It and its parents are not shown as program directories."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir.rstrip("/")
    except KeyError:
        return ""


def _prefix(folder: str) -> list[str]:
    """Return the prefix of a program directory: a Python environment, or the versions behind shims."""
    above, name = os.path.split(folder)
    if name == "shims" and os.path.isdir(above + "/versions"):
        return [above]
    if name == "bin" and (os.path.exists(above + "/pyvenv.cfg") or _is_python(above)):
        return _interpreter(above + "/bin/python3")
    return []


def _is_python(folder: str) -> bool:
    return os.path.isdir(folder + "/lib") and os.path.exists(folder + "/bin/python3")


def _interpreter(python: str) -> list[str]:
    """Return the prefixes of an interpreter and of its base interpreter."""
    found = []
    for path in (python, os.path.realpath(python)):
        prefix = os.path.dirname(os.path.dirname(path))
        found.append(prefix)
        try:
            with open(prefix + "/pyvenv.cfg", encoding="utf-8") as file:
                homes = [line.partition("=")[2].strip() for line in file if line[:4] == "home"]
        except OSError:
            continue
        found += [os.path.dirname(home) for home in homes]
        found += [os.path.dirname(os.path.realpath(home)) for home in homes]
    return found


# -- inside the sandbox


def _run_first_process(go: int, alive: int, status: int, wanted: SandboxedCommand) -> int:
    """Run as the first process: wait for `go`, and write the command's wait status to `status`.

    `alive` becomes readable when the outer process is gone.
    """
    libc.prctl(SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    for number in IGNORED:
        libc.signal(number, ctypes.c_void_p(1))
    if os.read(go, 1) != b"1" or select.select([alive], [], [], 0)[0]:
        return REFUSED
    try:
        _make_root(wanted.box, wanted.shown)
        if not wanted.network:
            _loopback()
    except (SandboxRefused, OSError) as error:
        return _refuse(error)
    pid = os.fork()
    if pid == 0:
        os._exit(_execute(wanted.folder, wanted.command))
    ended = _wait(pid)
    _end_leftovers()
    os.write(status, struct.pack("i", ended))
    return 0


def _wait(pid: int) -> int:
    """Wait for the command and return its wait status. Reap other processes meanwhile."""
    while True:
        found, ended = os.waitpid(-1, 0)
        if found == pid:
            return ended


def _end_leftovers() -> None:
    """Send SIGTERM to the remaining processes of the sandbox, and wait a second.

    When this process exits, the kernel kills the others.
    """
    try:
        os.kill(-1, SIGTERM)
    except OSError:
        return
    until = time.monotonic() + STRAY_GRACE
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def _make_root(box: str, shown: list[VisiblePath]) -> None:
    """Create the root directory of the command and leave the machine's root."""
    _mount("", "/", "", REC | PRIVATE)
    _mount("tmpfs", box, "tmpfs", NOSUID | NODEV, "mode=755")
    for name in ("old", "new"):
        os.mkdir(f"{box}/{name}")
    real = os.path.realpath(box)
    _pivot(box, f"{box}/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", NOSUID | NODEV, "mode=755")
    for path in SYSTEM:
        _show_system(path)
    _make_devices()
    _bind(f"/old{real}{TMP}", _folder(TMP), True)
    for path in ("/var", "/run"):
        _folder(path)
    os.symlink(TMP, "/new/var/tmp")
    for each in shown:
        _show(each.real, each.at, each.writable)
    _mount("proc", _folder("/proc"), "proc", NOSUID | NODEV | NOEXEC)
    _mount("", "/new", "", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir("/new")
    _pivot(".", ".")
    if libc.umount2(b".", DETACH):
        raise SandboxRefused(f"cannot leave the machine's root: {_errno()}")
    os.chdir("/")


def _show_system(path: str) -> None:
    if os.path.islink("/old" + path):
        _folder(os.path.dirname(path))
        os.symlink(os.readlink("/old" + path), "/new" + path)
    elif os.path.isdir("/old" + path):
        _bind("/old" + path, _folder(path), False)


def _show(real: str, at: str, writable: bool) -> None:
    source = "/old" + real
    _bind(source, _folder(at) if os.path.isdir(source) else _file(at), writable)


def _make_devices() -> None:
    """Create the sandbox's /dev with GPUs and standard devices."""
    _mount("tmpfs", _folder("/dev"), "tmpfs", NOSUID, "mode=755")
    names = [name for name in os.listdir("/old/dev") if name.startswith(ACCELERATORS)]
    for name in (*DEVICES, *names):
        if os.path.exists(f"/old/dev/{name}"):
            _show(f"/dev/{name}", f"/dev/{name}", True)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, f"/new/dev/{name}")
    _mount("tmpfs", _folder("/dev/shm"), "tmpfs", NOSUID | NODEV, "mode=1777")  # noqa: S108
    _mount("devpts", _folder("/dev/pts"), "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=666")
    os.symlink("pts/ptmx", "/new/dev/ptmx")


def _folder(path: str) -> str:
    """Create a directory in the sandbox's root unless it exists, and return its path."""
    os.makedirs("/new" + path, mode=0o755, exist_ok=True)
    return "/new" + path


def _file(path: str) -> str:
    _folder(os.path.dirname(path))
    if not os.path.lexists("/new" + path):
        os.close(os.open("/new" + path, os.O_WRONLY | os.O_CREAT, 0o600))
    return "/new" + path


def _bind(source: str, target: str, writable: bool) -> None:
    _mount(source, target, "", BIND | REC)
    wanted = struct.pack("4Q", NOSUID | (0 if writable else RDONLY), 0, 0, 0)
    path = os.fsencode(target)
    if not libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, path, RECURSIVE, ctypes.c_char_p(wanted), ctypes.c_size_t(32)
    ):
        return
    if not writable:  # kernels before 5.12: without submounts
        flags = os.statvfs(target).f_flag  # keep the existing flags
        kept = flags & (NOSUID | NODEV | NOEXEC | NOATIME | NODIRATIME)
        kept |= RELATIME if flags & 4096 else 0
        _mount("", target, "", REMOUNT | BIND | RDONLY | kept)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None):
        what = f"cannot mount {kind or source or target}"
        raise SandboxRefused(f"{what}: {_errno()}{_remedy(ctypes.get_errno())}")


def _pivot(new: str, old: str) -> None:
    if libc.syscall(PIVOT_ROOT, os.fsencode(new), os.fsencode(old)):
        raise SandboxRefused(f"cannot change the root: {_errno()}")


def _errno() -> str:
    return os.strerror(ctypes.get_errno())


def _loopback() -> None:
    """Enable the loopback interface `lo`, so that processes of a step can communicate."""
    fd = libc.socket(2, 2, 0)
    fcntl.ioctl(fd, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
    os.close(fd)


# -- the command


def _execute(folder: str, command: list[str]) -> int:
    """Execute the command. If execution fails, return the exit code that a shell would return."""
    for number in RESTORED:
        libc.signal(number, ctypes.c_void_p(0))
    for capability in range(64):
        if capability not in KEPT:
            libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        os.chdir(folder)
        os.execvp(command[0], command)  # noqa: S606
    except FileNotFoundError:
        absent = "/" not in command[0]
        why = "no such program in PATH" if absent else "No such file or directory"
    except OSError as error:
        why = os.strerror(error.errno or 0)
        os.write(2, os.fsencode(f"recipe: cannot run {command[0]}: {why}\n"))
        return 126
    os.write(2, os.fsencode(f"recipe: cannot run {command[0]}: {why}\n"))
    return 127


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
