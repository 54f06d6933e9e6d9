"""Machine metrics and progress of running jobs, one line every 5 seconds next to the job's log.

Linux only: /proc, cgroups and nvidia-smi. For a job with the log `NAME.log`, each sample is a JSON
line in `NAME.host` and the content of `NAME.latest`, which is deleted when the job ends:

    at                         seconds since the epoch
    step total percent eta     from `NAME.metrics`: last step, total steps, and remaining seconds at the measured pace
    gpu_utilization_percent gpu_memory_used_gb gpu_temperature_c gpu_power_w
                               of the job's GPUs, or of all GPUs: mean, maximum, maximum, sum
    cpu_percent ram_used_gb    of all processors or of the cgroup's quota; in 10^9 bytes without caches
    disk_free_gb               of the disk with the log
    net_received_mb_per_s net_sent_mb_per_s

Unknown values are left out. After an hour, a line is written once a minute.
"""

from __future__ import annotations

import json
import os
import time

from . import cgroups
from .processes import kill, read
from .regular import open_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

EVERY = 5.0  # seconds between samples, and from a job's start to its first sample
OFTEN = 3600.0  # seconds during which every sample is written; afterwards one in SELDOM
SELDOM = 12
PATIENCE = 60.0  # seconds before an nvidia-smi without answers is started again
TAIL = 16 << 10  # bytes read from the end of a metrics file
QUERY = ("uuid", "utilization.gpu", "memory.used", "temperature.gpu", "power.draw")
_SIGKILL = 9


class _Watched:
    """A job whose progress and GPUs are sampled."""

    def __init__(self, log: bytes, locks: bytes, total: bytes, path: bytes) -> None:
        self.path = os.fsdecode(log)[: -len(".log")]
        self.gpus = frozenset(name.rpartition("/")[2] for name in os.fsdecode(locks).split())
        self.total = float(total) if total.replace(b".", b"", 1).isdigit() else 0.0
        self.programs = os.fsdecode(path) or os.defpath
        self.looks = 0
        self.first: tuple[float, float] | None = None  # step and time of the first sample


class Sampler:
    """Sampler of machine metrics, with the previous counters and a running nvidia-smi."""

    def __init__(self) -> None:
        self.child = 0  # PID of nvidia-smi, which belongs to no job
        self._watched: dict[bytes, _Watched] = {}
        self._output = -1
        self._answer = b""
        self._asked_at = 0.0
        self._gpus: dict[str, list[float | None]] = {}
        self._times = (0.0, 0.0)
        self._network = (0.0, 0, 0)

    def look(self, jobs: Iterable[tuple[bytes, bytes, bytes, bytes, bytes]]) -> None:
        """Write a sample for each job: name, log, names of locks (including GPUs), total steps, and
        PATH.
        """
        now = time.time()
        for name, *about in jobs:
            if name not in self._watched:
                self._watched[name] = _Watched(*about)
        self._ask_gpus()
        host = {**self._processors(), **_memory(), **self._net(time.monotonic())}
        for job in self._watched.values():
            sample = {"at": round(now, 1), **_progress(job, now), **self._of_gpus(job.gpus), **host}
            try:
                sample["disk_free_gb"] = _giga(_free(os.path.dirname(job.path)))
            except OSError:
                pass
            line = json.dumps(sample) + "\n"
            try:
                if job.looks * EVERY < OFTEN or job.looks % SELDOM == 0:
                    _write(f"{job.path}.host", line, os.O_APPEND)
                _write(f"{job.path}.latest.new", line, os.O_TRUNC)
                os.rename(f"{job.path}.latest.new", f"{job.path}.latest")
            except OSError:
                pass  # full disk, or a deleted attempt
            job.looks += 1

    def over(self, name: bytes) -> None:
        """Stop sampling an ended job."""
        job = self._watched.pop(name, None)
        if job is not None:
            try:
                os.unlink(f"{job.path}.latest")
            except OSError:
                pass
            if not self._watched:
                self._end_child()

    def _end_child(self) -> None:
        if self.child:
            try:
                if os.waitpid(self.child, os.WNOHANG)[0] == 0:
                    kill(self.child, _SIGKILL)
            except ChildProcessError:
                pass
            os.close(self._output)
            self.child = 0

    # --- GPUs

    def _ask_gpus(self) -> None:
        """Read new output of nvidia-smi, and start it if it is not running."""
        if self.child:
            ended = self._hear()
            if ended:
                self._end_child()
        now = time.monotonic()
        if self.child or (not self._gpus and self._asked_at and now - self._asked_at < PATIENCE):
            return
        self._asked_at = now
        program = _find_program("nvidia-smi", [job.programs for job in self._watched.values()])
        if not program:
            return
        output, written = os.pipe()
        os.set_blocking(output, False)
        argv = [
            program,
            f"--query-gpu={','.join(QUERY)}",
            "--format=csv,noheader,nounits",
            "-l",
            f"{EVERY:.0f}",
        ]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, written, 1),
            (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
        ]
        try:
            self.child = os.posix_spawn(
                program, argv, os.environ, file_actions=actions, setsid=True, setsigdef=(13,)
            )
            self._output, self._answer = output, b""
        except OSError:
            os.close(output)  # not executable on this machine
        finally:
            os.close(written)

    def _hear(self) -> bool:
        """Read new output of nvidia-smi, and return True if it has ended."""
        while True:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return False
            except OSError:
                return True
            *lines, self._answer = (self._answer + data).split(b"\n")
            for line in lines:
                uuid, *values = line.decode(errors="replace").split(",")
                if len(values) == len(QUERY) - 1:
                    self._gpus[uuid.strip()] = [_number(value) for value in values]
            if not data:
                return True

    def _of_gpus(self, held: frozenset[str]) -> dict[str, float]:
        """Return the metrics of the GPUs locked by a job, or of all GPUs if these are unknown."""
        gpus = [values for uuid, values in self._gpus.items() if uuid in held]
        return _summarize_gpus(gpus or list(self._gpus.values()))

    # --- processors and network

    def _processors(self) -> dict[str, float]:
        """Return the CPU utilization since the last sample, relative to the cgroup's quota if there
        is one.
        """
        try:
            quota, group = cgroups.processors()
            if group:
                used, whole = _cpu_seconds(group), time.monotonic() * quota
            else:
                ticks = [int(word) for word in read("/proc/stat").split(b"\n", 1)[0].split()[1:9]]
                used, whole = float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))
        except (OSError, ValueError, IndexError):
            return {}
        before, self._times = self._times, (used, whole)
        return (
            {"cpu_percent": round(100 * (used - before[0]) / (whole - before[1]), 1)}
            if before[1] and whole > before[1]
            else {}
        )

    def _net(self, now: float) -> dict[str, float]:
        received = sent = 0
        try:
            for line in read("/proc/net/dev").split(b"\n")[2:]:
                name, colon, numbers = line.partition(b":")
                if colon and name.strip() != b"lo":
                    words = numbers.split()
                    received, sent = received + int(words[0]), sent + int(words[8])
        except (OSError, ValueError, IndexError):
            return {}
        (then, had, gave), self._network = self._network, (now, received, sent)
        if not then or now <= then:
            return {}
        return {
            "net_received_mb_per_s": round((received - had) / (now - then) / 1e6, 3),
            "net_sent_mb_per_s": round((sent - gave) / (now - then) / 1e6, 3),
        }


def _summarize_gpus(gpus: list[list[float | None]]) -> dict[str, float]:
    """Return mean utilization, maximum memory and temperature, and total power of some GPUs.

    Each GPU is a list of values in the order of `QUERY` without the UUID.
    """
    if not gpus:
        return {}
    utilization, memory_mib, temperature, power = map(_known_values, zip(*gpus))
    found: dict[str, float] = {}
    if utilization:
        found["gpu_utilization_percent"] = round(sum(utilization) / len(utilization), 1)
    if memory_mib:
        found["gpu_memory_used_gb"] = round(max(memory_mib) * (1 << 20) / 1e9, 3)
    if temperature:
        found["gpu_temperature_c"] = max(temperature)
    if power:
        found["gpu_power_w"] = round(sum(power), 1)
    return found


def _known_values(column: Iterable[float | None]) -> list[float]:
    return [value for value in column if value is not None]


def _progress(job: _Watched, now: float) -> dict[str, float]:
    """Read the training progress of a job from the end of its metrics file."""
    try:
        with open_regular(f"{job.path}.metrics") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines[:-1]):
        try:
            point = json.loads(line)
            step = float(point["step"])
            total = float(point.get("max_steps") or point.get("total_steps") or job.total)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        job.first = job.first or (step, now)
        found = {"step": step}
        if total > 0:
            found["total"], found["percent"] = total, round(100 * step / total, 1)
            first_step, began = job.first
            if step > first_step:
                found["eta"] = round((total - step) * (now - began) / (step - first_step), 1)
        return {name: _plain_number(value) for name, value in found.items() if abs(value) < 1e15}
    return {}


def _plain_number(value: float) -> float:
    """Return a whole number as an int, which JSON writes without `.0`."""
    return int(value) if value == int(value) else value


def _memory() -> dict[str, float]:
    _, group = cgroups.memory()
    if group:
        try:
            if os.path.exists(f"{group}/memory.max"):
                used = int(read(f"{group}/memory.current")) - _field(
                    f"{group}/memory.stat", b"inactive_file"
                )
            else:
                used = int(read(f"{group}/memory.usage_in_bytes")) - _field(
                    f"{group}/memory.stat", b"total_inactive_file"
                )
            return {"ram_used_gb": _giga(used)}
        except (OSError, ValueError):
            pass  # unknown for the cgroup, use the machine's value
    try:
        table = {}
        for line in read("/proc/meminfo").splitlines():
            name, kib, *_ = line.split()
            table[name] = int(kib) * 1024
        used = table[b"MemTotal:"] - table[b"MemAvailable:"]
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    return {"ram_used_gb": _giga(used)}


def _find_program(program: str, paths: Iterable[str]) -> str:
    """Return the path of a program in these PATHs, or ""."""
    for path in paths:
        for folder in path.split(":"):
            found = f"{folder}/{program}"
            if os.path.isabs(folder) and os.access(found, os.X_OK) and os.path.isfile(found):
                return found
    return ""


def _cpu_seconds(group: str) -> float:
    """Return the total CPU seconds used by a cgroup."""
    try:
        return _field(f"{group}/cpu.stat", b"usage_usec") / 1e6
    except ValueError:
        return int(read(f"{group}/cpuacct.usage")) / 1e9


def _field(path: str, name: bytes) -> int:
    for line in read(path).split(b"\n"):
        if line.startswith(name + b" "):
            return int(line.split()[1])
    raise ValueError(path)


def _free(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _giga(count: int) -> float:
    return round(count / 1e9, 3)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]"


def _write(path: str, text: str, how: int) -> None:
    # A step may have replaced the file with a pipe or a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags | how, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
