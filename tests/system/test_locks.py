"""A lock ends with its holder, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from runner.storage.locks import Locks

HOLDER = """
import sys
from pathlib import Path
from runner.storage.locks import Locks
lock = Locks(Path(sys.argv[1])).hold("a/b")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_keeps_others_out_until_it_is_let_go(tmp_path: Path) -> None:
    one, other = Locks(tmp_path / "locks"), Locks(tmp_path / "locks")
    with one.hold("run/1 ü") as lock:
        assert other.try_hold("run/1 ü") is None and other.is_held("run/1 ü")
        assert f"process {os.getpid()}" in other.holder("run/1 ü")
        again = other.try_hold("run/2")
        assert again is not None
        again.release()
    lock.release()
    assert not other.is_held("run/1 ü")
    with other.hold("run/1 ü"):
        assert one.try_hold("run/1 ü") is None


def test_the_kernel_lets_go_of_a_lock_whose_holder_was_killed(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        locks = Locks(tmp_path)
        assert locks.try_hold("a/b") is None and f"process {process.pid}" in locks.holder("a/b")
        process.send_signal(signal.SIGKILL)
        process.wait()
    lock = locks.try_hold("a/b")
    assert lock is not None and f"process {os.getpid()}" in locks.holder("a/b")
    lock.release()


def test_a_lock_file_that_was_removed_protects_nothing_and_is_made_again(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    first = locks.hold("a")
    (tmp_path / "a").unlink()
    second = locks.try_hold("a")
    assert (
        second is not None
        and locks.try_hold("a") is None
        and not Locks(tmp_path / "none").is_held("a")
    )
    first.release()
    second.release()


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    Locks(tmp_path / "locks").hold("../x").release()
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
