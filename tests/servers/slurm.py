"""A Slurm cluster of two nodes on loopback ports: munged, slurmctld and two slurmd, all of them ours.  Knows nothing of the driver that asks it.

    with Slurm() as cluster:
        cluster.env       # what the commands of Slurm need in their environment: SLURM_CONF
        cluster.ask("squeue", "-h")
        cluster.jobs()    # what waits or runs
        cluster.clear()   # cancels all that is there, and waits until it is gone
        cluster.restart("n2", everything=True)  # a machine that fails and comes back

`proctrack` is `cgroup` where this machine lets us make some, for there whatever a step leaves behind dies with it, and else `linuxproc`.  The fixture
`slurm` lasts as long as a module.  Where Slurm is not installed a test is skipped.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Self

import psutil  # type: ignore[import-untyped]
import pytest

from tests.servers.sshd import free_port
from tests.tools import needs

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldTimeout=60
SlurmdTimeout=30
InactiveLimit=0
MinJobAge=300
FirstJobId={first}
KillWait=2
UnkillableStepTimeout=10
MessageTimeout=10
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n[1-2] MaxTime=1 State=UP
"""
COMES_UP = 20.0
CGROUPS = os.geteuid() == 0 and os.access("/sys/fs/cgroup/freezer", os.W_OK)
"""Whether Slurm may make cgroups of version 1; those of version 2 it has from systemd alone."""


class Slurm:
    """The cluster.  `proctrack` says how Slurm finds the processes of a step."""

    def __init__(
        self, proctrack: Literal["cgroup", "linuxproc"] = "cgroup" if CGROUPS else "linuxproc"
    ) -> None:
        for program in (
            "munged",
            "slurmctld",
            "slurmd",
            "sbatch",
            "srun",
            "squeue",
            "sinfo",
            "scancel",
            "scontrol",
        ):
            needs(program)
        self.place = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
        self.env = {"SLURM_CONF": str(self.place / "slurm.conf")}
        self._proctrack = proctrack
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.place.chmod(0o755)
        (self.place / "state").mkdir()
        key = self.place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        first = (
            random.randrange(1, 60_000) * 1000
        )  # cgroups and keepers have names by job and node: two clusters at once share none
        ports = {f"port{number}": free_port() for number in ("", 1, 2)}
        host = socket.gethostname().partition(".")[0]
        text = CONF.format(
            place=self.place,
            host=host,
            user=getpass.getuser(),
            first=first,
            proctrack=self._proctrack,
            **ports,
        )
        (self.place / "slurm.conf").write_text(text)
        (self.place / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
        )
        try:
            names = {
                "socket": "munge.sock",
                "pid-file": "munged.pid",
                "log-file": "munged.log",
                "seed-file": "munge.seed",
            }
            self._begin(
                "munged",
                "munged",
                "-F",
                "--force",
                f"--key-file={key}",
                *(f"--{option}={self.place / name}" for option, name in names.items()),
            )
            self._wait(lambda: (self.place / "munge.sock").exists())
            self._begin("slurmctld", "slurmctld", "-D")
            for name in ("n1", "n2"):
                self._begin(name, "slurmd", "-D", "-N", name)
            self._wait(
                lambda: (
                    self.ask("sinfo", "-h", "-p", "main", "-o", "%D %t", check=False) == "2 idle"
                )
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            if len(self._daemons) == 4:
                self.clear()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.place, ignore_errors=True)

    def ask(self, *argv: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(
            argv,
            env={**os.environ, **self.env},
            check=check,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.strip()

    def jobs(self) -> list[str]:
        """The ids of all jobs that wait or run."""
        return self.ask("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i").split()

    def cancel(self) -> None:
        """Cancel all jobs."""
        if jobs := self.jobs():
            self.ask("scancel", *jobs)

    def clear(self) -> None:
        """Cancel all jobs, and wait until nothing of them is left on the nodes."""
        self.cancel()
        self._wait(lambda: not self.ask("squeue", "-h"))

    def restart(self, node: str, *, everything: bool) -> None:
        """Kill the slurmd of a node (-9), or everything that runs there, as a machine that fails; then start it again."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        victims: set[int] = set()
        while everything and (more := self._tasks(node) - victims):
            _signal(signal.SIGSTOP, more)  # nobody may begin another, or tell how another ended
            victims |= more
        _signal(signal.SIGKILL, victims)
        self._begin(node, "slurmd", "-D", "-N", node)

    def _tasks(self, node: str) -> set[int]:
        """What runs in our jobs on a node, and each slurmstepd above it."""
        found: set[int] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    above = [each for each in process.parents() if "slurmstepd" in each.name()]
                    found |= {
                        each.pid
                        for each in (process, *above)
                        if above and above[0].environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
                    }
        return found

    def _begin(self, name: str, program: str, *words: str) -> None:
        argv = [needs("setpriv"), "--pdeathsig", "TERM", needs(program), *words]
        with (self.place / f"{program}.out").open("ab") as said:
            daemon = subprocess.Popen(
                argv,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._daemons[name] = daemon

    def _wait(self, ready: object) -> None:
        assert callable(ready)
        give_up_at = time.monotonic() + COMES_UP
        while not ready():
            said = {path.name: path.read_text()[-2000:] for path in self.place.glob("*.out")}
            assert all(daemon.poll() is None for daemon in self._daemons.values()), said
            assert time.monotonic() < give_up_at, said
            time.sleep(0.02)


def _signal(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster for the tests of a module."""
    with Slurm() as cluster:
        yield cluster
