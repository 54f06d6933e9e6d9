"""Slurm driver: a lease is an allocation, and a host is one of its nodes.

`slurm_commands` holds the commands.  The driver keeps no state of its own: jobs are found again by
their comment, which holds the lease key, tagged by the driver, and by their name, a hash of the
key.  Programs on a node are started by `slurm_keeper`, a step that lasts as long as the allocation.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from math import ceil, inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from . import calls, load, machine, slurm_keeper
from . import slurm_commands as commands
from .base import (
    NOTHING,
    ROOT,
    SAVES,
    Argv,
    Denied,
    Driver,
    DriverError,
    Host,
    Lease,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unreachable,
    Unsure,
    Wish,
    WrongSetting,
)
from .slurm_commands import NodeGroup, QueuedJob

LONGEST = 30.0
"""Timeout for a Slurm command, in seconds.

Slurm's own timeout for a controller that does not respond is shorter.
"""
WORDS = 10.0
"""Timeout for commands that only explain why a job is over, in seconds.

A controller that is down takes nine.
"""
DECIDED = ("time", "gres", "cpus", "memory")
"""Job options in an offer's data."""
PATIENCE = 60.0
"""Seconds after which a job that can never start is given up.

Before that, administrators may be changing partitions and accounts.
"""
LATER = 2.0
"""Seconds by which a node's own request to end jobs comes after the request of a connected run."""
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF")
"""Environment variables for Slurm's commands.

sbatch passes its whole environment to the job and stores it where other users may read it.
"""


class Slurm(Driver):
    """Driver for a Slurm cluster, controlled through Slurm's own commands.

    `cpus` and `memory` (as in `--mem`) are the share of each node to request.  Without `cpus`,
    allocations are whole nodes.  `gres` is per node.  `time` is the walltime.  By default, this is
    the run's expected time if known, otherwise the partition's limit.  `grace` is how many seconds
    before the walltime programs get SIGTERM, to save.  By default, this is 120, or a quarter of a
    shorter walltime.  `queue` limits how many hours a job may wait.  After `idle` seconds without a
    running program and a connected client, an allocation ends (0: at the walltime).  `setup` holds
    shell lines to run before any program.

    `container` is only validated here, and obeyed by the code that runs steps.  `prices` are US
    dollars per node-hour by partition, such as "1.20 USD".  `login` is a login node on which to run
    Slurm's commands over SSH: user@name:port, or a table of `host` and settings of the ssh driver.
    By default, the commands run on this machine.
    """

    traits = Traits(
        works=True,
        shared_disk=True,
        replays=True,
        settles=timedelta(seconds=10),
        ends="machine",
        poll=timedelta(seconds=0.2),
        comes_up=timedelta(hours=24),
        allocates=True,
    )

    def __init__(
        self,
        *,
        partition: str = "",
        account: str = "",
        qos: str = "",
        gres: str = "",
        constraint: str = "",
        time: str | int = "",
        cpus: int | None = None,
        memory: str = "",
        queue: float = 24.0,
        idle: float = 120.0,
        grace: float | None = None,
        root: str = ROOT,
        setup: str | Sequence[str] = (),
        python: str = "python3",
        options: Sequence[str] = (),
        container: str = "",
        prices: Mapping[str, str] = MappingProxyType({}),
        login: str | Mapping[str, Any] = "",
    ) -> None:
        wrong = commands.check_settings(options, container)
        if wrong:
            raise WrongSetting(wrong)
        # The schema allows no other form of a price.
        self._prices = {
            partition: float(price.removesuffix(" USD")) for partition, price in prices.items()
        }
        billed = any(self._prices.values())
        self.traits = self.traits._replace(
            comes_up=timedelta(hours=queue),
            billed=billed,
            prices="by `prices` of [drivers.slurm]" * billed,
        )
        self.excluded: Mapping[str, int] = {}
        self.waits = ""
        self._pattern = commands.SbatchOptions(
            "",
            "",
            1,
            partition,
            account,
            qos,
            gres,
            constraint,
            str(time),
            cpus,
            memory,
            tuple(options),
        )
        self._root, self._python, self._idle, self._grace = root, python, idle, grace
        self._setup = (setup,) if isinstance(setup, str) else tuple(setup)
        self._mark = hashlib.sha256(root.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        self._env = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._login = _load_login_driver(login) if login else None
        self.notices = self._login.notices if self._login else ()
        self._node: Host | None = None  # the login node, once connected
        self._hosts: dict[str, tuple[SlurmHost, ...]] = {}
        self._again: dict[str, float] = {}
        # By lease key: the start that Slurm estimated before the job was submitted.
        self._begins: dict[str, str] = {}

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return partitions with enough nodes that match `wish`, the default one first.

        `excluded` then holds the reasons against the other partitions.
        """
        said = await self._ask(commands.sinfo())
        partition, known = self._pattern.partition, commands.parse_partitions(said)
        if partition and partition not in known:
            message = f"invalid partition specified: {partition}"
            raise commands.why_refused("sbatch", message, known)
        self._check_prices(known)
        by_name: dict[str, list[NodeGroup]] = {}
        for group in commands.parse_groups(said):
            if partition in ("", group.partition):
                by_name.setdefault(group.partition, []).append(group)
        found, left_out = [], dict[str, int]()
        for name, groups in by_name.items():
            fitting = [group for group in groups if self._fits(group, wish)]
            nodes = sum(group.nodes for group in fitting)
            if fitting and nodes >= wish.need.nodes:
                found.append(self._offer(name, fitting, wish))
                continue
            if fitting:
                short = f"{nodes} nodes, but {wish.need.nodes} are requested"
            else:
                short = "no matching node"
                nodes = sum(group.nodes for group in groups)
            left_out[f"partition {name} has {short}"] = nodes or 1
        self.excluded = left_out
        return found

    def _offer(self, partition: str, groups: Sequence[NodeGroup], wish: Wish) -> Offer:
        """Return the offer of a partition, of which these groups have the wanted nodes."""
        longest = min(group.longest for group in groups)
        share = self._share(commands.find_common_resources(groups), wish)
        asked = self._pattern._asdict() | {
            "time": commands.walltime(self._pattern.time, wish.hours, longest),
            **self._request_share(share, wish),
        }
        hours = None if longest == inf else longest / 3600
        data = {key: str(asked[key]) for key in DECIDED if asked[key]}
        return Offer(
            "slurm",
            partition,
            share,
            wish.need.nodes,
            price=wish.need.nodes * self._prices.get(partition, 0.0),
            data=data,
            longest=hours,
            fetched=time.time(),
            queued=True,
        )

    async def acquire(self, order: Order) -> Lease:
        """Submit a job, or find the existing job of this key.

        Raises Denied if Slurm rejects the job, Unsure if its reply was lost.
        """
        for job in await self._list_jobs(_job_name(order.key)):
            if commands.key_of(job.comment, self._mark) == order.key:
                return self._lease(job.id, order.key)
        data = order.offer.data
        cpus = int(data["cpus"]) if "cpus" in data else None
        asked = self._pattern._replace(
            name=_job_name(order.key),
            comment=commands.comment(self._mark, order.key),
            nodes=order.offer.nodes,
            partition=order.offer.id,
            time=data.get("time", ""),
            gres=data.get("gres", ""),
            cpus=cpus,
            memory=data.get("memory", ""),
        )
        keeper = (Path(__file__).parent / "slurm_keeper.py").read_text("utf-8")
        script = commands.script(
            keeper,
            self._python,
            self._build_keeper_settings(commands.parse_time(asked.time)),
            self._setup,
        )
        try:
            said = await self._ask(commands.trial(commands.sbatch(asked)), script, "sbatch")
        except Unsure as error:  # nothing was submitted
            raise Unreachable(str(error)) from error
        self._begins[order.key] = commands.begins(said, datetime.now())
        said = await self._ask(commands.sbatch(asked), script)
        return self._lease(commands.parse_job_id(said), order.key)

    async def hosts(self, lease: Lease) -> Sequence[SlurmHost] | None:
        """Return the nodes of an allocation.  None while its job is pending.

        A pending job is polled ever more rarely.  Raises Denied if the job can never start,
        HostLost once it has finished.
        """
        if self._again.get(lease.id, 0.0) > time.monotonic():
            return None
        job = await self._job(lease)
        if job.state == "RUNNING":
            self.waits = ""
            if lease.id not in self._hosts:
                self._hosts[lease.id] = await self._open_hosts(lease, job)
            return self._hosts[lease.id]
        age = max(0.0, time.time() - job.submitted) if job.submitted else 0.0
        begins = self._begins.get(lease.key)
        self.waits = ""
        if job.reason != "None":
            self.waits = f"job {job.id} is waiting in the Slurm queue ({job.reason})"
            if begins:
                self.waits += f", expected start {begins}"
        why = commands.hopeless(job.reason)
        if why and age > PATIENCE:
            raise Denied(f"job {job.id} cannot start: {why} ({job.reason})")
        self._again[lease.id] = time.monotonic() + commands.pause(age)
        return None

    async def _open_hosts(self, lease: Lease, job: QueuedJob) -> tuple[SlurmHost, ...]:
        nodes = commands.parse_addresses(await self._ask(commands.names(job.nodes)))
        until = time.time() + job.left
        grace = commands.grace(self._grace, job.walltime)
        folders = await asyncio.gather(*(self._folder(lease, name) for name, _ in nodes))
        found: list[SlurmHost] = []
        for (name, address), folder in zip(nodes, folders, strict=True):
            found.append(SlurmHost(self, lease, name, address, folder, until, grace))
        return tuple(found)

    async def release(self, lease: Lease) -> bool:
        self._hosts.pop(lease.id, None)
        with suppress(Denied):  # the job is unknown or has finished
            await self._ask(commands.scancel(lease.id))
        unfinished = await self._list_jobs(_job_name(lease.key))
        return all(job.id != lease.id for job in unfinished)

    async def leases(self) -> Sequence[Lease]:
        found: list[Lease] = []
        for job in await self._list_jobs():
            key = commands.key_of(job.comment, self._mark)
            if key is not None:
                found.append(self._lease(job.id, key))
        return found

    async def work(self, command: Argv, cwd: str, log: str) -> str:
        """Submit a one-CPU worker job, which submits its successor before its walltime ends.

        The walltime is the partition's limit.  Raises DriverError.
        """
        if self._login is not None:
            raise Denied(
                "a worker in the cluster requires the disk of this machine, but `login` is another machine: run the command on that machine"
            )
        wanted = self._pattern.partition
        groups = commands.parse_groups(await self._ask(commands.sinfo()))
        group = next((each for each in groups if wanted in ("", each.partition)), None)
        if group is None:
            raise Denied(f"no node of partition {wanted or 'any'} can start a job now")
        asked = self._pattern._replace(
            name="recipe-worker",
            partition=group.partition,
            time=commands.walltime("", None, group.longest),
            cpus=1,
            gres="",
            memory="",
        )
        job = commands.worker_job(asked, cwd, log, commands.grace(None, group.longest))
        script = commands.worker_script(job, command, f"{log.removesuffix('.log')}.sh")
        return commands.parse_job_id(await self._ask(job, script))

    async def about(self) -> Sequence[tuple[str, str]]:
        """Describe the cluster as names and texts.

        Raises Denied if its Slurm version is not supported.
        """
        told = commands.parse_config(await self._ask(commands.config_of()))
        wrong = commands.too_old(told.get("SLURM_VERSION", ""))
        if wrong:
            raise Denied(wrong)
        said = await self._ask(commands.sinfo())
        self._check_prices(commands.parse_partitions(said))
        names = {
            "slurm": "SLURM_VERSION",
            "proctrack": "ProctrackType",
            "accounting": "AccountingStorageType",
            "largest job array": "MaxArraySize",
        }
        shown = [(name, told.get(key, "unknown")) for name, key in names.items()]
        limits = commands.describe_limits(commands.parse_groups(said))
        return [*shown, ("partitions", limits), *await self._look()]

    def _check_prices(self, known: Sequence[str]) -> None:
        """Raise Denied if a price names an unknown partition."""
        for name in self._prices:
            if name not in known:
                raise Denied(f"`prices` of [drivers.slurm]: {commands.no_partition(name, known)}")

    async def _look(self) -> Sequence[tuple[str, str]]:
        """Check the equipment of a node that is currently idle.

        A file that this machine creates shows whether the node sees the same disk. Raises Denied
        if the node lacks Python or a writable work directory.
        """
        root = Path.home() / self._root  # an absolute path stays as it is
        probe = f".probe-{secrets.token_hex(8)}"
        made = [each for each in (root, *root.parents) if not each.exists()]
        may_share_disk = self._login is None  # commands run on this machine
        try:
            if may_share_disk:
                with suppress(OSError):
                    root.mkdir(parents=True, exist_ok=True)
                    (root / probe).touch()
            said = await self._ask(
                commands.look(self._pattern, self._python, self._root, probe, self._setup)
            )
        except (Denied, Unreachable) as error:
            return [("a node", f"cannot check a node now: {error}")]
        finally:
            with suppress(OSError):
                (root / probe).unlink()
                for each in made:
                    each.rmdir()
        has = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        if "python" not in has:
            raise Denied(commands.WITHOUT_PYTHON)
        if "root" not in has:
            raise Denied(commands.WITHOUT_ROOM)
        disk = ""
        if "shared" in has:
            disk = ", on a disk that this machine sees"
        elif may_share_disk:
            disk = ", not seen from this machine"
        return [
            ("a node", f"{has.get('node', '')}: Python {has['python']}"),
            ("root there", has["root"] + disk),
        ]

    async def call(
        self, lease: Lease, node: str, argv: Argv, stdin: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Run a program on one node.  See `Host.call`."""
        mark = f"\x1e{secrets.token_hex(8)} "
        keeper = (Path(__file__).parent / "slurm_keeper.py").read_text("utf-8")
        program = (
            self._python or "python3",
            "-I",
            "-S",
            "-c",
            keeper,
            "call",
            commands.keeper_name(lease.id, node),
            mark,
            *argv,
        )
        end = _End(mark.encode())
        try:
            async with aclosing(
                await self._run(commands.srun(lease.id, node, program), stdin)
            ) as stream:
                async for data in stream:
                    ours = end.feed(data)
                    if ours:
                        yield ours
        except Rejected as error:
            if not end.words:
                await self._job(lease)  # raises HostLost if the job has finished
                if "execve()" in str(error):
                    raise Denied(commands.WITHOUT_PYTHON) from error
                raise Unreachable(f"{node} does not answer: {error}") from error
        if not end.words:
            await self._job(lease)
            raise Unreachable(f"lost the connection to {node} while {argv[0]} ran")
        how, _, words = end.words.decode("utf-8", "replace").partition("\n")
        if how != "ended with 0":
            said = f": {words.strip()}" if words.strip() else ""
            raise Rejected(f"{argv[0]} {how}{said}")

    async def _folder(self, lease: Lease, node: str) -> str:
        """Return the allocation's own work directory on a node.

        Several allocations may share a node.
        """
        said = self.call(lease, node, (slurm_keeper.FOLDER,), NOTHING)
        return b"".join([data async for data in said]).decode("utf-8", "surrogateescape")

    async def _job(self, lease: Lease) -> QueuedJob:
        """Return the unfinished job of a lease.  Raises HostLost if the job has finished."""
        for job in await self._list_jobs(_job_name(lease.key)):
            if job.id == lease.id:
                return job
        self._hosts.pop(lease.id, None)
        raise commands.why_ended(
            lease.id,
            await self._ask_quietly(commands.story(lease.id)),
            await self._ask_quietly(commands.record(lease.id)),
            self._user,
        )

    async def _ask_quietly(self, argv: Argv) -> str:
        """Return the output of an informational Slurm command.

        Empty if the command fails or takes long.
        """
        with suppress(DriverError, TimeoutError):
            async with asyncio.timeout(WORDS):
                return await self._ask(argv)
        return ""

    def _user(self, number: str) -> str:
        """Return the user name for a user id.  If a login node is set, return the id itself."""
        with suppress(KeyError, ValueError):
            return number if self._login else pwd.getpwuid(int(number)).pw_name
        return number

    async def _list_jobs(self, name: str = "") -> list[QueuedJob]:
        return commands.parse_jobs(await self._ask(commands.squeue(name)))

    async def _ask(self, argv: Argv, script: bytes = b"", program: str = "") -> str:
        """Run a Slurm command and return its output.  Raises its error output as a DriverError.

        `program` is the actual program if `argv` runs it through a shell.
        """

        async def input() -> AsyncIterator[bytes]:
            yield script

        try:
            async with asyncio.timeout(LONGEST):
                given = input() if script else NOTHING
                stream = await self._run(argv, given)
                return b"".join([data async for data in stream]).decode("utf-8", "surrogateescape")
        except Rejected as error:
            raise commands.why_refused(program or argv[0], str(error)) from error
        except TimeoutError as error:
            raise commands.why_refused(program or argv[0], "Socket timed out") from error

    async def _run(self, argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Run a program on this machine, or on the login node if set.

        Raises DriverError if that node cannot be reached.
        """
        if self._login is None:
            return calls.call(argv, stdin, self._env, Path("/"))
        if self._node is None:
            async for _name, node in self._login.visit():
                if isinstance(node, DriverError):
                    raise node
                self._node = node
        assert self._node is not None
        return cast("AsyncGenerator[bytes, None]", self._node.call(argv, stdin))

    async def aclose(self) -> None:
        """Disconnect from the login node.  Allocations stay."""
        node, self._node = self._node, None
        if node is not None:
            await node.aclose()

    def _build_keeper_settings(self, walltime: float) -> commands.KeeperParameters:
        if walltime == inf:
            return commands.KeeperParameters(self._root, self._idle)
        grace = commands.grace(self._grace, walltime)
        return commands.KeeperParameters(
            self._root, self._idle, walltime - grace + LATER, grace * SAVES
        )

    def _lease(self, job: str, key: str) -> Lease:
        return Lease("slurm", job, key, {"python": self._python})

    def _fits(self, group: NodeGroup, wish: Wish) -> bool:
        """Return True if a node group satisfies one node of a wish and the driver's settings."""
        pattern, have = self._pattern, group.have
        # Only one feature is compared here. Slurm itself evaluates expressions of several.
        is_one_feature = commands.FEATURE.fullmatch(pattern.constraint) is not None
        if is_one_feature and pattern.constraint not in group.features:
            return False
        if (pattern.cpus or 0) > (have.cpus or 0):
            return False
        if commands.count_gpus(pattern.gres) > (have.gpus or 0):
            return False
        model = wish.need.gpu and wish.need.gpu.replace(" ", "_")  # no name in Slurm has a space
        return machine.satisfies(
            self._share(have, wish),
            wish._replace(need=replace(wish.need, nodes=1, gpu=model)),
        )

    def _share(self, have: Resources, wish: Wish) -> Resources:
        """Return an allocation's share of one node.

        This is the configured share, otherwise the peak use of the steps, otherwise the whole node.
        """
        wanted = wish.together
        cpus = self._pattern.cpus or (wanted.cpus and ceil(wanted.cpus))
        memory = wanted.memory if cpus and not self._pattern.memory else None
        return Resources(
            cpus=machine.limit(have.cpus, cpus),
            memory=machine.limit(have.memory, memory),
            gpus=self._share_of_gpus(have.gpus or 0, wanted.gpus),
            gpu=have.gpu,
            disk=have.disk,
        )

    def _share_of_gpus(self, have: int, wanted: int | None) -> int:
        """Return an allocation's GPUs on one node: as configured, otherwise as the steps need."""
        if self._pattern.gres:
            return commands.count_gpus(self._pattern.gres)
        return have if wanted is None else min(have, wanted)

    def _request_share(self, share: Resources, wish: Wish) -> dict[str, object]:
        """Return the sbatch options for the share of a node that the settings leave open."""
        pattern, wanted = self._pattern, wish.together
        asked: dict[str, object] = {}
        if share.gpus and not pattern.gres:
            model = share.gpu if wish.need.gpu else None
            asked["gres"] = commands.request_gpus(share.gpus, model)
        if wanted.cpus and not pattern.cpus:
            asked["cpus"] = int(share.cpus or 1)
            if wanted.memory and not pattern.memory:
                asked["memory"] = commands.request_memory(share.memory or 0)
        return asked


class SlurmHost(Host):
    """A node of a Slurm allocation."""

    def __init__(
        self,
        driver: Slurm,
        lease: Lease,
        name: str,
        address: str,
        root: str,
        until: float = inf,
        grace: float = 0.0,
    ) -> None:
        self.name = name
        self.address = address
        self.root = root
        self.until = until
        self.grace = grace
        self.python = lease.data.get("python", "python3")
        self._driver, self._lease = driver, lease

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        return self._driver.call(self._lease, self.name, argv, stdin)

    async def aclose(self) -> None:
        """Do nothing: the host holds no connection between calls."""


class _End:
    """Parser of the relay's report after a program's output, between two marks.

    The report says how the program ended and holds the end of its stderr.
    """

    def __init__(self, mark: bytes) -> None:
        self.words = b""
        self._mark, self._held, self._over = mark, b"", False

    def feed(self, data: bytes) -> bytes:
        """Return the program's own part of some output."""
        self._held += data
        if self._over:
            return self._close()
        ours, over, rest = self._held.partition(self._mark)
        if over:
            self._held, self._over = rest, True
            self._close()
            return ours
        end = len(ours) - self._count_begun(ours)
        self._held = ours[end:]
        return ours[:end]

    def _count_begun(self, data: bytes) -> int:
        """Return how many bytes at the end of `data` may be the beginning of the mark."""
        for n in range(min(len(self._mark) - 1, len(data)), 0, -1):
            if self._mark.startswith(data[-n:]):
                return n
        return 0

    def _close(self) -> bytes:
        words, whole, _ = self._held.partition(self._mark)
        if whole:
            self.words = words
        return b""


def _load_login_driver(given: str | Mapping[str, Any]) -> Driver:
    """Return an ssh driver whose only server is the login node.

    `given` is the node's address, or a table of `host` and settings of the ssh driver.
    """
    settings = {"host": given} if isinstance(given, str) else dict(given)
    return load("ssh")(hosts=[settings.pop("host", "")], **settings)


def _job_name(key: str) -> str:
    return f"recipe-{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
