"""How a job begins, and what is said of one that cannot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runner.agent.job import Job
from runner.agent.spawning import explain_failure, spawn


class Poller:
    """Watches processes, or has no descriptor left for it."""

    def __init__(self, *, full: bool = False) -> None:
        self.watched, self.full, self.score = list[int](), full, ""

    def watch_process(self, pid: int) -> None:
        self.watched.append(pid)
        if self.full:
            self.score = Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
            raise OSError(24, "Too many open files")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def started(
    log: Path,
    *argv: str,
    loop: Poller | None = None,
    cwd: Path | None = None,
    inherited: tuple[int, ...] = (),
    **env: str,
) -> int:
    """Start a job, wait for its end, and return its exit code."""
    poller: Any = loop or Poller()
    here = os.getcwd()
    variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    words = [os.fsencode(word) for word in argv]
    try:
        job = Job(b"job", os.fsencode(log))
        pid = spawn(poller, job, os.fsencode(cwd or log.parent), words, variables, inherited)
    finally:
        os.chdir(here)
    assert poller.watched == [pid]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_job_has_its_directory_its_environment_and_its_log(log: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    log.write_text("a line of recipe\n")
    script = 'pwd; echo "$WORD"; echo wrong >&2; exit 3'
    code = started(log, "/bin/sh", "-c", script, cwd=tmp_path / "in", WORD="hello")
    assert code == 3
    assert log.read_text() == f"a line of recipe\n{tmp_path}/in\nhello\nwrong\n"


def test_a_job_is_the_first_of_its_session_and_reads_nothing(log: Path) -> None:
    script = "cat; ps -o sid= -p $$ | tr -d ' '; echo $$"
    assert started(log, "/bin/sh", "-c", script, PATH="/bin:/usr/bin") == 0
    session, own = log.read_text().split()
    assert session == own


def test_only_a_job_has_the_descriptors_that_it_inherits(log: Path) -> None:
    reading, writing = os.pipe()
    script = f"echo hello > /proc/self/fd/{writing}"
    assert started(log, "/bin/sh", "-c", script, inherited=(writing,)) == 0
    assert os.read(reading, 100) == b"hello\n" and not os.get_inheritable(writing)
    for handle in (reading, writing):
        os.close(handle)


@pytest.mark.parametrize("name", ["PIPE", "USR1"])
def test_signals_that_the_agent_ignores_or_blocks_end_a_job(log: Path, name: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        code = started(log, "/bin/sh", "-c", f"kill -{name} $$; echo still here")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert code == -getattr(signal, f"SIG{name}") and log.read_text() == ""


def test_of_programs_that_cannot_run_the_first_in_the_path_is_named(
    log: Path, tmp_path: Path
) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").write_text("no program")
    with pytest.raises(PermissionError) as caught:
        started(log, "tool", PATH=f"{tmp_path}/first:{tmp_path}/second")
    assert os.fsdecode(caught.value.filename) == str(tmp_path / "first" / "tool")


def test_the_program_is_found_in_the_path_of_the_job(log: Path, tmp_path: Path) -> None:
    for folder, mode in (("first", 0o644), ("second", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").write_text(f"#!/bin/sh\necho {folder}\n")
        (tmp_path / folder / "tool").chmod(mode)
    path = f"{tmp_path}/none:{tmp_path}/first:{tmp_path}/second"
    assert started(log, "tool", PATH=path) == 0 and log.read_text() == "second\n"


def test_an_empty_part_of_the_path_is_the_directory_of_the_job(log: Path) -> None:
    (log.parent / "tool").write_text("#!/bin/sh\necho here\n")
    (log.parent / "tool").chmod(0o755)
    assert started(log, "tool", PATH="/no/such/folder:") == 0 and log.read_text() == "here\n"


def test_a_job_that_cannot_be_watched_does_not_run(log: Path, tmp_path: Path) -> None:
    script = f"sleep 60; touch {tmp_path}/ran"
    poller = Poller(full=True)
    with pytest.raises(OSError, match="Too many open files"):
        started(log, "/bin/sh", "-c", script, loop=poller)
    assert poller.score == "500"  # the kernel ends a job before the agent
    with pytest.raises(ProcessLookupError):
        os.kill(poller.watched[0], 0)


@pytest.mark.parametrize(
    ("program", "content", "code", "words"),
    [
        ("no-such-tool", None, 127, "cannot run no-such-tool: no such program in PATH"),
        ("{}/gone", None, 127, "No such file or directory"),
        ("{}/tool", "#!/no/such/shell\n", 127, "the interpreter named in its first line does not"),
        ("{}/tool", "just text", 126, "(a script must begin with #! and its interpreter)"),
        ("{}", None, 126, "Permission denied"),
    ],
)
def test_a_job_that_cannot_start_says_why_in_its_log(
    log: Path, tmp_path: Path, program: str, content: str | None, code: int, words: str
) -> None:
    program = program.format(tmp_path)
    if content is not None:
        Path(program).write_text(content)
        Path(program).chmod(0o755)
    with pytest.raises(OSError) as caught:
        started(log, program, PATH="/bin:/usr/bin")
    where = os.fsencode(log), os.fsencode(program), os.fsencode(tmp_path)
    here = os.getcwd()
    found, said = explain_failure(*where, caught.value)
    os.chdir(here)
    assert found == code and words in said.decode()
    assert log.read_text().endswith(f"recipe: {said.decode()}\n")


def test_a_directory_or_a_log_that_is_not_there_is_the_reason(tmp_path: Path, log: Path) -> None:
    gone, program = os.fsencode(tmp_path / "gone"), b"/bin/true"
    error = FileNotFoundError(2, "No such file or directory")
    code, said = explain_failure(os.fsencode(log), program, gone, error)
    assert code == 126 and said.startswith(b"cannot enter the working directory " + gone)
    code, said = explain_failure(gone + b"/log", program, os.fsencode(tmp_path), error)
    assert code == 126 and said.startswith(b"cannot write the log " + gone + b"/log: ")
