"""Choose the local agent of a run.

The agent has the same limits, groups and namespaces as the process that executes the run.

A job inherits most limits from its agent, because a start message cannot contain them.  So each
workspace has these entries below `.recipe/local`:

    IDENTITY/          the root of the agent for all processes with the same inherited limits
    claims/RUN.FENCE   a link whose target names the agent root of the jobs of this claim

A process that resumes a run asks the agents of earlier claims for their jobs, and starts new jobs
with its own agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import resource
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from ...agent.reach import answers, context_of
from ...agent.slots import ALL
from ...storage.content import disk

_STATUS: Final = (
    *("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Seccomp_filters", "Cpus_allowed", "Mems_allowed"),
)
"""Lines of /proc/self/status that a child process inherits."""
_FILES: Final = (
    *("limits", "cgroup", "oom_score_adj", "attr/current", "personality", "coredump_filter"),
)
_NAMESPACES: Final = (
    *("mnt", "user", "pid", "pid_for_children", "net", "uts", "ipc", "cgroup"),
    *("time", "time_for_children"),
)
_ALLOCATIONS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
"""Variables that name a cluster allocation.

At its end the cluster kills all processes of the allocation.
"""
_CLAIMS: Final = "claims"
_LONGEST: Final = 1 << 18
"""Bytes to read of a file in /proc."""
_PROC: Final = ("/proc/thread-self", "/proc/self")


def process_identity() -> str:
    """Return a digest of the limits and namespaces that a child of this thread inherits.

    A start message cannot contain them.
    """
    facts = [os.uname().nodename, *(os.environ.get(name, "") for name in _ALLOCATIONS)]
    proc = next((path for path in _PROC if os.path.exists(f"{path}/status")), "")
    facts += _facts_of_proc(proc) if proc else _facts_without_proc()
    top = os.stat("/")
    facts += [f"{top.st_dev}:{top.st_ino}", f"{os.getpriority(os.PRIO_PROCESS, 0)}"]
    if hasattr(os, "sched_getscheduler"):
        facts.append(f"{os.sched_getscheduler(0)}")
    return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _facts_of_proc(proc: str) -> list[str]:
    """Return the inherited properties of a process from its directory in /proc, and the boot id."""
    lines = _read(f"{proc}/status").split("\n")
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = [f"{name}{status.get(name, '')}" for name in _STATUS]
    facts += [_read(f"{proc}/{name}") for name in _FILES]
    facts += [_target(f"{proc}/ns/{name}") for name in _NAMESPACES]
    return [*facts, _read("/proc/sys/kernel/random/boot_id")]


def _facts_without_proc() -> list[str]:
    """Return the inherited properties of this process on a system without /proc."""
    return [
        f"{_umask()}",
        f"{os.getuid()}:{os.geteuid()}:{os.getgid()}:{os.getegid()}",
        f"{os.getgroups()}",
        *(f"{resource.getrlimit(number)}" for number in _limits()),
    ]


def choose_root(home: Path, ours: str) -> Path:
    """Return the agent root for the identity `ours`; `home` is the workspace's `.recipe`.

    If the agent of a root was killed, a process with another identity may have restarted the agent
    for its jobs. Then this function chooses another root.
    """
    with contextlib.suppress(OSError):
        (home / "local").mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1
    while True:
        name = ours if number == 1 else f"{ours}.{number}"
        root = home / "local" / name
        if context_of(str(root)) in ("", ours) or not _is_held(root):
            return root
        number += 1


def note_claim(home: Path, run: str, fence: int, root: str) -> None:
    """Record the agent root of this claim's jobs on this machine.

    Called before the first job starts.
    """
    folder = home / "local" / _CLAIMS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.symlink(os.path.basename(root), folder / f"{run}.{fence}")


def root_of(home: Path, run: str, fence: str) -> Path:
    """Return the agent root of a claim's jobs.

    Earlier versions had one agent per workspace and recorded nothing.
    """
    try:
        return home / "local" / os.path.basename(os.readlink(_claim_path(home, run, fence)))
    except FileNotFoundError:
        return home / "local"


def forget_claims(home: Path, run: str) -> None:
    """Delete the claim records of a run that has no attempt left."""
    folder = home / "local" / _CLAIMS
    for note in folder.glob(f"{run}.*"):
        note.unlink(missing_ok=True)


def is_reachable(root: Path) -> bool:
    """Return whether the agent of `root` answers or has exited.

    False means that the agent lives on another machine, or in a container with sockets that this
    process cannot reach.
    """
    return not _is_held(root) or answers(str(root))


def find_spent_roots(home: Path, needed: Collection[str]) -> list[Path]:
    """Return unused agent roots, and the claim records of runs outside `needed`.

    An unused root has no agent, no job and no claim of the runs `needed`.
    """
    folder = home / "local"
    spent, named = list[Path](), set[str]()
    for note in sorted((folder / _CLAIMS).glob("*.*")):
        run = note.name.rpartition(".")[0]
        if run in needed:
            named.add(os.path.basename(os.readlink(note)))
        else:
            spent.append(note)
    if folder.is_dir():
        for root in sorted(folder.iterdir()):
            if root.name not in named and (root / "lock").exists() and not _in_use(root):
                spent.append(root)
    return spent


def forget_root(path: Path) -> bool:
    """Delete an agent root or a claim record; False if an agent or a job uses the root again."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return True
    with _hold_briefly(path / "lock") as free, _hold_briefly(path / ALL) as without_jobs:
        if free and without_jobs:
            disk.delete_whole(path)
        return free and without_jobs


def _in_use(root: Path) -> bool:
    """Return whether an agent or a job uses an agent root."""
    with _hold_briefly(root / "lock") as free, _hold_briefly(root / ALL) as without_jobs:
        return not (free and without_jobs)


def _claim_path(home: Path, run: str, fence: str) -> Path:
    return home / "local" / _CLAIMS / f"{run}.{fence}"


def _is_held(root: Path) -> bool:
    """Return whether a running agent holds the lock of its root."""
    with _hold_briefly(root / "lock") as free:
        return not free


@contextlib.contextmanager
def _hold_briefly(path: Path) -> Iterator[bool]:
    """Try to take a lock, and release it at the end of the block; False if another process holds it.  A missing file counts as free."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""  # older kernels lack some of these files
    try:
        return os.read(fd, _LONGEST).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _umask() -> int:
    # The mask can be read only by setting another one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _limits() -> list[int]:
    return sorted(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
