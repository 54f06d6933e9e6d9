"""Start the first process of a job, or explain why it cannot start."""

from __future__ import annotations

import os

from .job import SIGKILL
from .processes import words
from .slots import DESCRIPTOR, SHELL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .job import Job
    from .loop import Poller

_OOM_SCORE = b"500"  # higher than the agent's, so that the kernel kills a job first
_RESTORED = (1, 2, 3, 13, 15, 17, 25)
"""Signals that this process may ignore, and whose default action is restored for jobs."""


def spawn(
    loop: Poller,
    job: Job,
    cwd: bytes,
    argv: list[bytes],
    env: dict[bytes, bytes],
    inherited: tuple[int, ...],
) -> int:
    """Start the first process of a job in a new session, watch it, and return its PID.

    It inherits the descriptors `inherited`. Raises OSError.
    """
    os.chdir(cwd)
    program, whole = _program(argv[0], env), argv
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, b"/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    if job.outlives:
        whole = [*SHELL, job.name, program, *argv[1:]]
        program = SHELL[0]
        actions.append((os.POSIX_SPAWN_DUP2, job.held[-1], DESCRIPTOR))
    try:
        for fd in inherited:
            os.set_inheritable(fd, True)
        pid = os.posix_spawn(
            program,
            whole,
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_RESTORED,
        )
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)
    _raise_oom_score(pid)
    try:
        loop.watch_process(pid)
    except OSError:  # no descriptor to watch the process: do not let it run unwatched
        os.killpg(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
    return pid


def _program(name: bytes, env: dict[bytes, bytes]) -> bytes:
    """Return the program that execvp would find in the job's PATH."""
    if b"/" in name:
        return name
    candidates = [
        os.path.join(part or b".", name) for part in env.get(b"PATH", b"/bin:/usr/bin").split(b":")
    ]
    there = [candidate for candidate in candidates if os.path.isfile(candidate)]
    if not there:
        raise FileNotFoundError(2, "No such file or directory")
    return next((candidate for candidate in there if os.access(candidate, os.X_OK)), there[0])


def explain_failure(log: bytes, program: bytes, cwd: bytes, error: OSError) -> tuple[int, bytes]:
    """Return a shell's exit code and a message for a failed start, and write the message to the
    log.

    posix_spawn does not tell which part failed.
    """
    code = 126
    what = b"cannot run " + program
    why = words(error)
    try:
        os.chdir(cwd)
    except OSError as cause:
        what, why = b"cannot enter the working directory " + cwd, words(cause)
    else:
        if error.errno == 2:
            code = 127
            if b"/" not in program:
                why = b"no such program in PATH"
            elif os.path.exists(program):
                why = b"the interpreter named in its first line does not exist"
        elif error.errno == 8:
            why += b" (a script must begin with #! and its interpreter)"
    try:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as cause:
        code, what, why = 126, b"cannot write the log " + log, words(cause)
    else:
        try:
            os.write(fd, b"recipe: %s: %s\n" % (what, why))
        except OSError as cause:
            what, why = b"cannot write the log " + log, words(cause)
        os.close(fd)
    return code, what + b": " + why


def _raise_oom_score(pid: int) -> None:
    """Make the kernel kill this process before the agent when memory runs out."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
    except OSError:
        return  # exited, or no such file
    try:
        os.write(fd, _OOM_SCORE)
    except OSError:
        pass
    finally:
        os.close(fd)
