"""The interface of drivers: the classes Driver and Host, and the values that they exchange with the runner.

Imports nothing of `runner`.  Calls are short, and the caller repeats them.  A `Lease` is serialisable and stored before use, so that
another process can continue after a crash.  Drivers neither run jobs nor transfer files.  Both go through `Host.call`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias

Argv: TypeAlias = Sequence[str]

ROOT = ".recipe-host"
"""Default work directory on a machine, relative to the login's home directory."""
SAVES = 0.75
"""Fraction of `Ending.grace` in which programs may save and exit.  The rest is for downloading the checkpoints."""
SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+=,")


@dataclass(frozen=True, slots=True)
class Resources:
    """Required resources of one node.  Sizes are bytes, and None means no requirement."""

    cpus: float | None = None
    memory: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    disk: int | None = None


TAKEN_AWAY = 0.05
"""Assumed number of preemptions of a spot machine per hour."""
LOST = 0.5
"""Hours lost per preemption: the time since the last checkpoint, and the start of the next machine."""
Market: TypeAlias = Literal["on-demand", "spot"]
"""Billing model of a machine.  A `spot` machine is cheaper and can be preempted."""


@dataclass(frozen=True, slots=True)
class Need(Resources):
    """Requirements of a lease: the resources of each of `nodes` machines, and the allowed markets.

    `image` is the container image to run if the driver has `Traits.images`.  Empty selects the driver's image.
    """

    nodes: int = 1
    market: Market | Literal["any"] = "on-demand"
    image: str = ""


class Wish(NamedTuple):
    """A query for offers, the argument of `Driver.offers`."""

    need: Need = Need()
    disk: int | None = None  # bytes of disk to rent with the machine
    hours: float | None = None  # expected duration of the lease, if known
    home: int | None = None  # bytes to download from the machine, if known
    filters: Mapping[str, str] = {}
    keep: bool = False  # as in `Order`: the price is for a persistent machine
    together: Resources = (
        Resources()
    )  # total resources of concurrent steps on each node; None: the whole node
    hurry: bool = False  # omit machines that answer slowly, and list them in `Driver.late`


class Traits(NamedTuple):
    """Capabilities of a driver."""

    priced: bool = False
    shared_disk: bool = (
        False  # hosts may share a disk with this machine, which is checked for each host
    )
    replays: bool = False  # ordering again with the same key returns the same lease
    settles: timedelta = timedelta(0)  # how long a new lease may stay unlisted
    ends: Literal["provider", "machine", "stops", "nothing"] = (
        "nothing"  # who ends billing at `Order.until` if recipe has died; with `stops`, the disk is still billed
    )
    identity: Literal["", "given", "attested", "first_use"] = ""
    """Source of a rented machine's host key: set by recipe, attested by the provider, or trusted on first use."""
    poll: timedelta = timedelta(seconds=0.5)  # interval between checks whether a machine is up
    comes_up: timedelta = timedelta(minutes=15)  # time limit for the start of a machine
    notice: Argv = ()  # a program that exits on a spot machine at its preemption notice; empty: no notice
    prices: str = ""  # description of the prices, if they do not come from the provider
    hosts_at_once: int | None = None  # maximum number of leases per account; None: no known limit
    images: bool = False  # a machine is a container of the ordered image, so steps with that image run directly in it
    image: str = ""  # default image of a machine
    billed: bool = False  # leases cost money but are used like free ones: a cluster with prices in its settings
    allocates: bool = False  # a lease is `Need.nodes` dedicated machines that steps share; releasing it ends all their programs
    visits: bool = False  # its hosts can be inspected without a lease
    prolongs: bool = False  # its machines end themselves at `Order.until`, which can be changed
    pauses: bool = False  # its machines can be stopped and restarted with their disks; `Order.keep` is supported
    works: bool = False  # it can run a worker on one of its machines
    joins: bool = (
        False  # machines of a zone have private addresses, so they can be nodes of one step
    )
    exports: bool = False  # it can export its machines as a Pulumi program


@dataclass(frozen=True, slots=True)
class Offer:
    """A rentable machine or group of nodes.  `price` is US dollars per hour for all nodes and the requested disk."""

    driver: str
    id: str
    resources: Resources = Resources()
    nodes: int = 1
    price: float = 0.0
    region: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    market: Market = "on-demand"
    reliability: float | None = None  # from 0 to 1, as the provider measures it
    disk_price: float = (
        0.0  # the part of `price` for the disk, which is the price of a stopped machine
    )
    egress_price: float = 0.0  # US dollars per GB of outgoing traffic
    longest: float | None = None  # maximum rental time in hours; None: no known limit
    fetched: float = 0.0  # time of the price query, in seconds since the epoch
    queued: bool = False  # the order waits in a queue, and costs nothing before it starts

    @property
    def hourly(self) -> float:
        """US dollars per hour of progress.  For a spot machine, includes the time lost by preemptions."""
        return self.price * (1 + TAKEN_AWAY * LOST) if self.market == "spot" else self.price


class Order(NamedTuple):
    """An order for one lease: the offer, the key and the end time.

    With `keep`, the machine is stopped at `until` instead of deleted, and its disk is kept.
    `image` is the machine's container image.  Empty selects the driver's image.
    """

    offer: Offer
    key: str
    until: datetime
    keep: bool = False
    image: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """A billed allocation.  `price` is the provider's listed US dollars per hour, or 0 if unknown."""

    driver: str
    id: str
    key: str
    data: Mapping[str, str] = field(default_factory=dict)
    price: float = field(default=0.0, compare=False)


class Charge(NamedTuple):
    """A provider's charge for a period, in US dollars.  Times are seconds since the epoch."""

    since: float
    till: float
    usd: float


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run on a host.  `env` is its whole environment.  `secrets` are added to it but never shown in `repr`."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float | None = None  # seconds of wall time, enforced by the job's supervisor
    idle_timeout: float | None = None  # seconds without log output
    log: str | None = None  # a path on the host for stdout and stderr; None: the agent chooses
    locks: tuple[
        str, ...
    ] = ()  # lock names, per machine and login, held while any process of the job lives
    outlives: bool = (
        False  # record its exit even if its supervisor is killed, by running it below a shell
    )


@dataclass(frozen=True, slots=True)
class Job:
    """A command that was started on a host, identified by its key."""

    key: str
    data: Mapping[str, str] = field(default_factory=dict)


class Exit(NamedTuple):
    """The end of a job.  `code` is None without an exit status, `signal` is set if a signal ended the job, `reason` names the cause if known.

    The reason `busy` means that the job never started, because another job holds one of its locks.  The same key can be started again.
    """

    code: int | None
    signal: int | None = None
    reason: Literal["exit", "signal", "oom", "timeout", "idle", "stopped", "lost", "busy"] = "exit"
    started: float = 0.0  # seconds since the epoch, by the host's clock
    ended: float = 0.0
    cpu: float = 0.0  # seconds of user and system time
    peak_memory: int = 0  # bytes, the largest single process
    strays: int = 0  # number of leftover background processes that were killed
    detail: str = ""  # why the command could not start


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


NOTHING: AsyncIterable[bytes] = _nothing()


class Host:
    """A machine that runs programs.  The runner starts an agent there, which handles jobs and files.

    A subclass must override `call` and set `root`.  All other members have defaults.
    """

    root: str
    """Work directory on the machine, absolute or relative to the login's home directory."""
    python: str = ""
    """Preferred Python on the machine for the agent, which needs 3.9 or later.  Empty: search for one."""
    deadman: float | None = None
    """Seconds without contact after which the machine's jobs are ended.  None: never."""
    name: str = ""
    """Display name of the machine if its lease has several."""
    address: str = ""
    """Address for connections from the other nodes of a step.  Empty: no connections are possible."""
    until: float = math.inf
    """Time when all programs on the machine are killed, in seconds since the epoch by the local clock.  Infinite: no limit."""
    grace: float = 0.0
    """Seconds before `until` when no new jobs start on the machine and running jobs are asked to save and exit."""

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        """Run a program on the machine, stream `stdin` to it, and yield its output.

        Abandoning the call kills the program with its process group, but not processes in their own session.

        Raises Rejected with the program's stderr if it fails, and Unreachable if it was killed on the machine.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close the connection.  Programs on the machine continue to run."""

    def way(self, folder: str) -> Argv:
        """Return the SSH command line that logs in to the machine.  Empty if no login is possible.

        Required keys are written to `folder`, which is private and removed afterwards.
        """
        return ()


class Driver:
    """A source of machines: a provider, a cluster or a pool of servers.

    A subclass sets `traits` and overrides `offers`, `acquire`, `hosts`, `release` and `leases`.  The defaults of all other members
    do nothing or raise Rejected.  Traits announce optional methods to the runner: `Traits.visits` for `visit`,
    `prolongs` for `prolong`, `pauses` for `start`, `stop` and `stands`, `works` for `work`, `exports` for `program`.
    """

    traits: Traits
    console: str = ""
    """URL of the provider's web console.  Empty: no account is needed."""
    left_out: Mapping[str, str] = {}
    """Reason, as a sentence, for each machine that the last `offers` call could not query."""
    late: Collection[str] = ()
    """Machines that the last `offers` call with `Wish.hurry` did not wait for."""
    notices: Sequence[str] = ()
    """Sentences about ignored parts of the driver's configuration files, complete after construction."""
    excluded: Mapping[str, int] = {}
    """Number of offers that the last `offers` call excluded, by reason."""
    waits: str = ""
    """Reason why the last `hosts` call returned None, such as the state of a queue."""

    # --- required

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the offers that satisfy `wish`, best first.  Empty if there are none."""
        raise NotImplementedError

    async def acquire(self, order: Order) -> Lease:
        """Rent the offered machines and return the lease."""
        raise NotImplementedError

    async def hosts(self, lease: Lease) -> Sequence[Host] | None:
        """Return one Host per node of a lease, or None while the nodes start.  Raises HostLost if the machine is gone."""
        raise NotImplementedError

    async def release(self, lease: Lease) -> bool:
        """End a lease.  Return True once it is verified that nothing is billed, also for an unknown lease."""
        raise NotImplementedError

    async def leases(self) -> Sequence[Lease]:
        """Return all leases of this installation.  Raises DriverError if the list may be incomplete."""
        raise NotImplementedError

    # --- connections

    async def connect(self) -> None:
        """Connect to every machine in advance.  Errors are raised by the next request."""

    def connected_hosts(self) -> Mapping[str, Host]:
        """Return the connected machines by the ids of their offers.

        Use them for queries and preparations only, and start no jobs on them.
        """
        return {}

    async def aclose(self) -> None:
        """Close all connections of the driver.  Leases and jobs continue.  Idempotent."""

    def visit(self) -> AsyncIterator[tuple[str, Host | DriverError]]:
        """Yield every machine without a lease: its name, and a Host to query and close or the error that prevents it.

        Raises Rejected unless `Traits.visits`.
        """
        raise Rejected("its machines are looked at by a lease only")

    # --- the provider

    async def about(self) -> Sequence[tuple[str, str]]:
        """Return pairs of a name and a text that describe a cluster, for `recipe doctor`.

        Raises Denied with the remedy if the cluster cannot be used.
        """
        return ()

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the account as pairs of a name and a text.  Changes nothing.  Raises Denied if the key is rejected."""
        return ()

    def find_lack(self) -> str:
        """Explain which prerequisite, such as an API key, is missing, and a fix.  Empty if none.  Sends no request."""
        return ""

    async def unusable(self) -> Sequence[tuple[str, str]]:
        """Return unusable parts of the account, with reasons.  Changes nothing.

        Machines rented with these parts might not allow a login.
        """
        return ()

    async def solvent(self) -> None:
        """Check the account's credit, if the provider reports it before an order.  Raises Denied without credit."""

    async def update(self) -> str:
        """Download the newest price list for later runs of this installation, and return its description.

        Returns an empty text if the driver queries the provider for each price.  On DriverError, the old list is kept.
        """
        return ""

    async def ensure(self) -> Sequence[str]:
        """Create shared resources of the machines, such as a firewall rule.  Return descriptions of the new ones."""
        return ()

    async def drop(self) -> Sequence[str]:
        """Delete the resources that `ensure` created, unless rented machines use them.  Return descriptions."""
        return ()

    def look_for(self, installation: str) -> bool:
        """Make `leases` list the machines of another installation of this user.

        They can be released, but allow no login.  Returns False if the names of machines do not contain
        their installation.
        """
        return False

    def program(
        self,
        name: str,
        *,
        market: Market | Literal["any"],
        keep: bool,
        seconds: int,
        bucket: str,
        nodes: int,
    ) -> str:
        """Return a Pulumi program that creates the machines of the settings.

        It also creates their firewall rules and, if named, the bucket.  Sends no requests.
        Raises Rejected if the settings do not define one machine, and unless `Traits.exports`.
        """
        raise Rejected("it writes no program of its machines")

    # --- one lease

    def highest_price(self, lease: Lease) -> float:
        """Return the highest price in US dollars per hour that this process has read for a lease, or 0."""
        return 0.0

    async def charges(self, lease: Lease, since: datetime) -> Sequence[Charge]:
        """Return the provider's charges for a lease so far."""
        return ()

    async def vitals(self, lease: Lease) -> str:
        """Return the machine's state in one line, as the provider reports it.  Empty if unknown.  Raises DriverError."""
        return ""

    async def prolong(self, lease: Lease, until: datetime) -> None:
        """Change the time when a machine ends itself.  Raises Rejected unless `Traits.prolongs`."""
        raise Rejected("its machines do not end themselves")

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped machine, which then stops by itself at `until`.  A running machine is unchanged.

        May return before the machine is up.  Raises NoCapacity if the provider has no capacity for the machine now, HostLost if
        it no longer exists, and Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def stop(self, lease: Lease) -> bool:
        """Stop a machine.  Return True once it is verified that only its disk is billed, or that it no longer exists.

        Raises Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        """Return the machine's state, as the provider reports it.  A machine that is starting or stopping counts as `runs`.

        Raises Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def work(self, command: Argv, cwd: str, log: str) -> str:
        """Run a worker on the cluster and return its name there.  The cluster restarts it if its machine is lost.

        `cwd` and `log` are local paths, so the disk must be shared.  Raises DriverError, and Rejected unless `Traits.works`.
        """
        raise Rejected("it carries out no run itself")


def suggest(word: str, known: Iterable[str], all: str = "known:") -> str:
    """Return a hint for an unknown word: the nearest known word, or all known words."""
    from difflib import get_close_matches

    near = get_close_matches(word, known := list(known), n=1)
    return f', did you mean "{near[0]}"?' if near else f" ({all} {', '.join(known)})"


def file_name(key: str) -> str:
    """Return a file name for a lease key: the key itself, or its hash if it has special characters."""
    if 0 < len(key) <= 150 and SAFE.issuperset(key) and key[0] not in ".-":
        return key
    from hashlib import sha256

    return f"_{sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


class DriverError(Exception):
    """Base class of driver errors.  `lease` is set if a lease may have cost money."""

    def __init__(self, message: str = "", *, lease: Lease | None = None) -> None:
        super().__init__(message or type(self).__doc__)
        self.lease = lease


class NoCapacity(DriverError):
    """The offer is sold out.  Take the next offer."""


class Throttled(DriverError):
    """The provider limits the request rate.  Ask again after `after`."""

    def __init__(
        self,
        message: str = "",
        *,
        after: timedelta = timedelta(seconds=5),
        lease: Lease | None = None,
    ) -> None:
        super().__init__(message, lease=lease)
        self.after = after


class Unreachable(DriverError):
    """The provider or machine cannot be reached, but may be fine.  Ask again."""


class Unsure(DriverError):
    """The purchase may have succeeded.  Check before buying again."""


class HostLost(DriverError):
    """The host is gone.  Start a new attempt on another host."""


class Denied(DriverError):
    """The credentials or quota do not allow the request.  Tell the user."""


class Rejected(DriverError):
    """The request was invalid because of a bug or a wrong recipe."""


class WrongSetting(Rejected):
    """A driver setting is invalid, regardless of the request."""
