"""What a test starts as a fork is to it what a program of its own is: what it is given, what it says, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.library import forks
from tests.system.test_sft_trainer import launched

LOOK = """
import json, os, random, sys
import helper
import numpy
seen = {name: sys.modules[name].__name__ for name in ("__main__", "torch", "trl")}
told = {
    "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path[:2], "modules": seen, "parent": os.getppid(),
    "group": os.getpgid(0), "files": len(os.listdir("/proc/self/fd")) - 1, "drawn": [random.random(), numpy.random.rand()],
}
print(json.dumps(told))
print("beside", file=sys.stderr)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "helper.py").write_text("")
    (tmp_path / "look.py").write_text(LOOK)
    return tmp_path / "look.py"


def test_it_is_given_what_a_program_of_its_own_is_given(program: Path) -> None:
    env = {"A": "1", "PYTHONPATH": str(program.parent / "beside"), "PATH": os.environ["PATH"]}
    argv = [sys.executable, str(program), "x", "y z"]
    twice = [forks.run(argv, env=env, timeout=120, cwd=program.parent) for _ in range(2)]
    assert all((done.returncode, done.stderr) == (0, "beside\n") for done in twice), twice
    first, second = (json.loads(done.stdout) for done in twice)
    assert first["argv"] == argv[1:] and first["cwd"] == str(program.parent) and first["env"] == env
    assert first["path"] == [str(program.parent), str(program.parent / "beside")]
    assert first["modules"] == {
        "__main__": "__main__",
        "torch": "torch",
        "trl": "trl",
    }  # imported, though not by it
    assert (
        first["parent"] == os.getpid() and first["group"] == os.getpgid(0) and first["files"] == 3
    )
    assert first["drawn"][0] != second["drawn"][0] and first["drawn"][1] != second["drawn"][1]


def test_a_module_is_run_from_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("import sys; print(sys.argv, sys.path[0], __name__)")
    done = forks.run([sys.executable, "-m", "here", "x"], env={}, timeout=120, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (
        f"{[str(tmp_path / 'here.py'), 'x']} {tmp_path} __main__\n",
        "",
    )


@pytest.mark.parametrize(("line", "status", "said"), [
    ("pass", 0, ""), ("import sys; sys.exit(7)", 7, ""), ("raise SystemExit('no such file')", 1, "no such file\n"), ("1 / 0", 1, "ZeroDivisionError"),
    ("import os; os.abort()", -signal.SIGABRT, ""), ("import atexit, sys; atexit.register(sys.stderr.write, 'over'); sys.exit(3)", 3, "over"),
])  # fmt: skip
def test_it_ends_as_it_would(line: str, status: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(line)
    done = forks.run([sys.executable, str(tmp_path / "end.py")], env={}, timeout=120)
    assert done.returncode == status and said in done.stderr and bool(done.stderr) == bool(said)


@pytest.mark.parametrize("real", [False, True])
def test_what_a_launcher_starts_is_a_fork_of_its_own_session_too(
    real: bool, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], sys.argv[1:], os.getsid(0) == os.getpid(), 'trl' in sys.modules, os.getpgid(0) == os.getpgid(os.getppid()))"
    )
    env = {"PATH": os.environ["PATH"], **({"FORKS_REAL": "1"} if real else {})}
    done = forks.run(
        launched([sys.executable, str(tmp_path / "rank.py"), "x"], 2), env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} ['x'] True {not real} False" for rank in (0, 1)
    ]


def test_a_signal_reaches_it_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()")
    argv = [sys.executable, str(tmp_path / "wait.py")]
    with (
        forks.start(argv, stderr=subprocess.STDOUT) as one,
        forks.start(argv, stderr=subprocess.STDOUT) as other,
    ):
        assert (
            one.stdout
            and other.stdout
            and one.stdout.readline() == other.stdout.readline() == "up\n"
        )
        assert {one.pid, other.pid} <= {child.pid for child in psutil.Process().children()}
        one.send_signal(signal.SIGTERM)
        assert one.wait(60) == -signal.SIGTERM and other.poll() is None
        other.kill()
        assert other.wait(60) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(
            argv, env={}, timeout=0.5
        )  # which is back at all: this program ends by a signal only
