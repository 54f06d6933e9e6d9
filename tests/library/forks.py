"""Starts programs as forks of one process that has imported torch and what is over it: a start costs no imports.  Knows no trainer.

Such a program is a child of the test like any other: its own argv, folder, environment, output and exit status, and signals reach it as ever.  It
shares with its siblings the seed of Python's hashes, and what libraries read of the environment while they are imported; so do the processes that
`accelerate launch` starts.  Both are real in the runs of `smoke`, where `FORKS_REAL` is set, and wherever a test starts a Python itself.  Run as a
program, this is the process that is forked.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

IMPORTED = (
    "torch.utils.tensorboard", "numpy", "pyarrow.parquet", "accelerate", "peft", "datasets", "transformers.trainer", "trl.trainer.dpo_trainer", "trl.trainer.sft_trainer",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5", "trl.trainer.grpo_trainer", "torch.distributed.run", "diffusers.models.transformers.transformer_flux",
    "diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl",
)  # fmt: skip
"""What costs seconds.  None of it computes when it is imported, or starts a thread: a fork has only the one that forks."""
ENV = {
    "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1", "MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000",
}  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36
HELD = Path(__file__).parent / "held"
LAUNCHER = "accelerate.commands.launch"


class Forked(subprocess.Popen[str]):
    """`python PROGRAM …` or `python -m MODULE …`, without the start of a Python.  Takes `cwd`, `env` and where the streams go, and no more."""

    def _execute_child(
        self, args: Sequence[str], executable: object, preexec_fn: object, close_fds: object, pass_fds: object, cwd: str | None,
        env: Mapping[str, str] | None, startupinfo: object, creationflags: object, shell: object, p2cread: int, p2cwrite: int, c2pread: int,
        c2pwrite: int, errread: int, errwrite: int, restore_signals: bool, gid: object, gids: object, uid: object, umask: int,
        start_new_session: bool, *_: object, line: socket.socket | None = None,
    ) -> None:  # fmt: skip
        asked = {
            "argv": args[1:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        streams = [
            given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        _reap_orphans(
            True
        )  # of a child that forks and ends, as that one does, this process is the parent
        try:
            self.pid = _ask(line or _parent(args[0]), asked, streams)
        finally:
            _reap_orphans(False)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def start(argv: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """What it prints, and what becomes of it, are told as by `subprocess.Popen`."""
    return Forked(argv, text=True, stdout=subprocess.PIPE, **more)


def signal_at(
    line: str,
    argv: Sequence[str],
    number: signal.Signals,
    gate: Path,
    *,
    whole: bool = True,
    **more: Any,
) -> tuple[str, int]:
    """Signal every process of it, or the first one alone, while it is held at a line that it printed.  What it printed after that, and its status."""
    os.mkfifo(gate)
    env = {**more.pop("env"), "HOLD_AT": line, "HOLD_GATE": str(gate), "PYTHONPATH": str(HELD)}
    job = start(argv, env=env, stderr=subprocess.STDOUT, **more)
    assert job.stdout is not None
    said = []
    for text in job.stdout:
        said.append(text)
        if line in text:
            break
    else:
        raise AssertionError("it never said so:\n" + "".join(said))
    first = psutil.Process(job.pid)
    # torch starts workers in sessions of their own: a signal to the group would miss them.
    for process in (*(first.children(recursive=True) if whole else ()), first):
        process.send_signal(number)
    if number == signal.SIGKILL:
        job.wait(60)  # those that outlive it notice that before they go on
    opened = os.open(gate, os.O_RDWR)
    try:
        rest = job.stdout.read()  # to its end: the last process is gone
    finally:
        os.close(opened)
    return rest, job.wait(60)


def run(argv: Sequence[str], *, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with what it printed."""
    with start(argv, stderr=subprocess.PIPE, **more) as job:
        try:
            out, err = job.communicate(timeout=timeout)
        except BaseException:
            job.kill()
            raise
    return subprocess.CompletedProcess(argv, job.returncode, out, err)


@functools.cache
def _parent(python: str) -> socket.socket:
    """A line to a process of this Python that can be forked.  It ends with the line."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RECIPE_", "ACCELERATE_"))
    }
    subprocess.Popen(
        [python, __file__, str(its.fileno())],
        env={**env, **ENV},
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
    )
    its.close()
    return mine


def _ask(line: socket.socket, asked: dict[str, Any], streams: list[int]) -> int:
    socket.send_fds(line, [json.dumps(asked).encode()], streams)
    answer = line.recv(100)
    assert answer, "the process that is forked has ended"
    return int(answer)


def _reap_orphans(yes: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) == 0


def _serve(line: socket.socket) -> dict[str, Any]:
    """Fork for each that is asked for.  Comes back in the child, with what was asked."""
    told, tell = os.pipe()
    while True:
        said, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not said:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            line.send(os.read(told, 100))
            for stream in streams:
                os.close(stream)
            continue
        between = os.getpid()
        if child := os.fork():
            os.write(tell, str(child).encode())
            os._exit(0)
        while os.getppid() == between:  # the program sees the parent that it keeps
            time.sleep(0.001)
        for own, given in enumerate(streams):
            os.dup2(given, own)
        line.close()
        os.closerange(3, max(told, tell, *streams) + 1)
        asked: dict[str, Any] = json.loads(said)
        if asked["session"]:
            os.setsid()
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.modules["numpy"].random.seed()
        return asked


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be forked"
    gc.freeze()
    _become(_serve(line))


def _become(asked: dict[str, Any]) -> None:
    """Run a program in this process."""
    program, *words = asked["argv"][asked["argv"][0] == "-u" :]
    module = program == "-m"
    sys.argv = words if module else [program, *words]
    first = Path.cwd() if module else Path(program).parent
    sys.path[:1] = [str(first), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    if "HOLD_AT" in os.environ:
        runpy.run_path(str(HELD / "sitecustomize.py"))
    if module:
        if words[0] == LAUNCHER and "FORKS_REAL" not in os.environ:
            _fork_what_it_starts()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _fork_what_it_starts() -> None:
    """The Pythons that a launcher starts are forks, too: of a process that is forked now, before the launcher has threads."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        mine.close()
        _become(_serve(its))
        sys.exit()
    its.close()
    real = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, args: Any, *more: Any) -> None:
        if isinstance(args, str) or args[0] != sys.executable:
            return real(self, args, *more)
        Forked._execute_child(self, args, *more, line=mine)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
