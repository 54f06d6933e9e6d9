"""The interface of drivers: the classes Driver and Host, and the values that they exchange with the
runner.

Imports nothing of `runner`.  Calls are short, and the caller repeats them.  A `Lease` is
serialisable and stored before use, so that another process can continue after a crash.  Drivers
neither run jobs nor transfer files.  Both go through `Host.call`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias

Argv: TypeAlias = Sequence[str]

ROOT = ".recipe-host"
"""Default work directory on a machine, relative to the login's home directory."""
SAVES = 0.75
"""Fraction of `Ending.grace` in which programs may save and exit.

The rest is for downloading the checkpoints.
"""
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
"""Hours lost per preemption: the time since the last checkpoint, and the start of the next machine.
"""
Market: TypeAlias = Literal["on-demand", "spot"]
"""Billing model of a machine.  A `spot` machine is cheaper and can be preempted."""


@dataclass(frozen=True, slots=True)
class Need(Resources):
    """Requirements for a lease: the resources of each of `nodes` machines, and the markets.

    `image` is the container image to run if `Traits.images` is set. If empty, the driver's default
    image is used.
    """

    nodes: int = 1
    market: Market | Literal["any"] = "on-demand"
    image: str = ""


class Wish(NamedTuple):
    """A request for offers: requirements, filters, and expected use of a machine."""

    need: Need = Need()
    disk: int | None = None  # bytes of disk to rent with the machine
    hours: float | None = None  # expected duration of the lease, if known
    home: int | None = None  # bytes to download from the machine, if known
    filters: Mapping[str, str] = {}
    keep: bool = False  # as in `Order`: the price is for a persistent machine
    # Total resources of concurrent steps on each node; None: the whole node.
    together: Resources = Resources()
    hurry: bool = False  # omit machines that answer slowly, and list them in `Driver.late`


class Traits(NamedTuple):
    """Capabilities of a driver, as data."""

    priced: bool = False
    # Hosts may share a disk with this machine, which is checked for each host.
    shared_disk: bool = False
    replays: bool = False  # ordering again with the same key returns the same lease
    settles: timedelta = timedelta(0)  # how long a new lease may stay unlisted
    # Who ends billing at `Order.until` if recipe has died; with `stops`, the disk is still billed.
    ends: Literal["provider", "machine", "stops", "nothing"] = "nothing"
    identity: Literal["", "given", "attested", "first_use"] = ""
    """Source of a rented machine's host key: set by recipe, attested by the provider, or trusted on
    first use.
    """
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
    # Machines of a zone have private addresses, so they can be nodes of one step.
    joins: bool = False
    exports: bool = False  # it can export its machines as a Pulumi program


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine, or group of nodes, available for rent.

    `price` is US dollars per hour for all nodes, including the requested disk.
    """

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
        """US dollars per hour of progress.

        For a spot machine, includes the time lost by preemptions.
        """
        return self.price * (1 + TAKEN_AWAY * LOST) if self.market == "spot" else self.price


class Order(NamedTuple):
    """An order for one lease: the offer, the key and the end time.

    If `keep`, the machine is stopped at `until` instead of terminated, and its disk stays. `image`
    is the container image of the machine. If empty, the driver's default image is used.
    """

    offer: Offer
    key: str
    until: datetime
    keep: bool = False
    image: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """A billed allocation of machines.

    `price` is the listed US dollars per hour, or 0 if unknown.
    """

    driver: str
    id: str
    key: str
    data: Mapping[str, str] = field(default_factory=dict)
    price: float = field(default=0.0, compare=False)


class Charge(NamedTuple):
    """A provider's charge for a period, in US dollars. Times are seconds since the epoch."""

    since: float
    till: float
    usd: float


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run on a host.

    `env` is the whole environment. `secrets` are added to the environment and appear in no text
    form of this value.
    """

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
    """A command started on a host, identified by its key."""

    key: str
    data: Mapping[str, str] = field(default_factory=dict)


class Exit(NamedTuple):
    """The end of a job.

    `code` is None without an exit status, `signal` is set if a signal ended the job, and `reason`
    names the cause if known. If `busy`, the job never began, because another job holds one of its
    locks. The same key may be started again.
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
    """A machine that runs programs. The agent started there handles jobs and files.

    A subclass must override `call` and set `root`. All other members have a default.
    """

    root: str
    """Work directory on the machine, absolute or relative to the login's home directory."""
    python: str = ""
    """Preferred Python on the machine for the agent, which needs 3.9 or later.

    Empty: search for one.
    """
    deadman: float | None = None
    """Seconds without contact after which the machine's jobs are ended.  None: never."""
    name: str = ""
    """Display name of the machine if its lease has several."""
    address: str = ""
    """Address for connections from the other nodes of a step.

    Empty: no connections are possible.
    """
    until: float = math.inf
    """Time when all programs on the machine are killed, in seconds since the epoch by the local
    clock.  Infinite: no limit.
    """
    grace: float = 0.0
    """Seconds before `until` when no new jobs start on the machine and running jobs are asked to
    save and exit.
    """

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        """Run a program on the host and stream its input and output.

        A cancelled call ends the program with its process group. Processes in sessions of their own
        stay. Raises Rejected with the program's stderr if it fails, and Unreachable if it was
        killed on the host.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close the connection. Programs on the host keep running."""

    def way(self, folder: str) -> Argv:
        """Return the command line of an SSH client for logging in to the host, or () without a
        login.

        Required keys are written below `folder`, which is private and deleted afterwards.
        """
        return ()


class Driver:
    """A source of machines on demand, such as a cloud provider or a cluster.

    A subclass sets `traits` and overrides `offers`, `acquire`, `hosts`, `release` and `leases`.
    Every other member has a default that means "cannot" or "nothing to do". Traits announce
    optional members to the runner: `Traits.visits` stands for `visit`, `prolongs` for `prolong`,
    `pauses` for `start`, `stop` and `stands`, `works` for `work`, `exports` for `program`.
    """

    traits: Traits
    console: str = ""
    """URL of the provider's web console.  Empty: no account is needed."""
    left_out: Mapping[str, str] = {}
    """Reason, as a sentence, for each machine that the last `offers` call could not query."""
    late: Collection[str] = ()
    """Machines that the last `offers` call with `Wish.hurry` did not wait for."""
    notices: Sequence[str] = ()
    """Sentences about ignored parts of the driver's configuration files, complete after
    construction.
    """
    excluded: Mapping[str, int] = {}
    """Number of offers that the last `offers` call excluded, by reason."""
    waits: str = ""
    """Reason why the last `hosts` call returned None, such as the state of a queue."""

    # --- required

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the offers that satisfy `wish`, best first."""
        raise NotImplementedError

    async def acquire(self, order: Order) -> Lease:
        """Rent the machines of an order."""
        raise NotImplementedError

    async def hosts(self, lease: Lease) -> Sequence[Host] | None:
        """Return one Host per node of a lease, or None while the machines start.

        Raises HostLost if a machine no longer exists.
        """
        raise NotImplementedError

    async def release(self, lease: Lease) -> bool:
        """Terminate a lease. Return True once the provider confirms that nothing is billed.

        An unknown lease also returns True.
        """
        raise NotImplementedError

    async def leases(self) -> Sequence[Lease]:
        """Return all leases tagged by this installation. Raises if the list may be incomplete."""
        raise NotImplementedError

    # --- connections

    async def connect(self) -> None:
        """Connect to all machines in advance, before a slot is requested.

        Errors are raised by the next request.
        """

    def connected_hosts(self) -> Mapping[str, Host]:
        """Return all connected machines by offer ID.

        They are for queries and preparations only. No job is started on them.
        """
        return {}

    async def aclose(self) -> None:
        """Close all connections of the driver. Leases and jobs stay. Idempotent."""

    def visit(self) -> AsyncIterator[tuple[str, Host | DriverError]]:
        """Yield each machine by name without a lease, as a Host or with the connection error.

        The caller closes the Host. Raises Rejected unless `Traits.visits`.
        """
        raise Rejected("cannot list its machines without a lease")

    # --- the provider

    async def about(self) -> Sequence[tuple[str, str]]:
        """Describe a cluster as names and texts, for `recipe doctor`.

        Raises Denied with a remedy if the cluster cannot be used.
        """
        return ()

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the provider account as names and texts. Changes nothing.

        Raises Denied if the API key is rejected.
        """
        return ()

    def find_lack(self) -> str:
        """Return the missing requirement for contacting the provider, with a remedy, or "".

        Sends no request.
        """
        return ""

    async def unusable(self) -> Sequence[tuple[str, str]]:
        """Return the unusable parts of the account, with reasons. Changes nothing.

        With such parts, machines could be rented without being able to log in.
        """
        return ()

    async def solvent(self) -> None:
        """Raise Denied if the provider reports that the account has no credit."""

    async def update(self) -> str:
        """Download the newest price list for later runs, and return a description.

        Returns "" if prices are always requested from the provider. Raises DriverError, and then
        the old list stays.
        """
        return ""

    async def ensure(self) -> Sequence[str]:
        """Create auxiliary cloud resources for machines, such as a firewall rule.

        Returns descriptions of the created resources.
        """
        return ()

    async def drop(self) -> Sequence[str]:
        """Delete the resources created by `ensure`, unless machines of this installation use them.

        Returns descriptions of the deleted resources, and of the remaining ones with reasons.
        """
        return ()

    def look_for(self, installation: str) -> bool:
        """Make `leases` list the machines of another installation of this user.

        They can be released, but not logged in to.  Returns False if machines do not bear the name
        of the installation that rented them.
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
        """Return a Pulumi program that creates the machine defined by the settings.

        It also creates their surroundings, and the bucket if one is named.  Asks no server.
        Raises Rejected if the settings do not define one machine, and unless `Traits.exports`.
        """
        raise Rejected("cannot export a program for its machines")

    # --- one lease

    def highest_price(self, lease: Lease) -> float:
        """Return the highest price seen for a machine, in US dollars per hour, or 0."""
        return 0.0

    async def charges(self, lease: Lease, since: datetime) -> Sequence[Charge]:
        """Return the provider's charges for a lease, as far as known by now."""
        return ()

    async def vitals(self, lease: Lease) -> str:
        """Return the provider's status of a machine in one line, or "". Raises DriverError."""
        return ""

    async def prolong(self, lease: Lease, until: datetime) -> None:
        """Change the time at which the machine terminates itself.

        Raises Rejected unless `Traits.prolongs`.

        """
        raise Rejected("cannot change the end of a lease")

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped machine, to be stopped automatically at `until`.

        The machine may still be starting on return. A running machine stays unchanged. Raises
        NoCapacity if the zone has no capacity now, HostLost if the machine no longer exists,
        Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def stop(self, lease: Lease) -> bool:
        """Stop a machine. Return True once the provider confirms that only its disk is billed.

        Also returns True if the machine no longer exists. Raises Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        """Return the provider's status of a machine.

        A starting or stopping machine counts as `runs`.

        Raises Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def work(self, command: Argv, cwd: str, log: str) -> str:
        """Run a long command on the cluster, and return its name there.

        The command is restarted if its machine is lost.

        Paths are those of this machine, so the disk must be shared. Raises DriverError, and
        Rejected unless `Traits.works`.
        """
        raise Rejected("cannot execute a run in a job")


def suggest(word: str, known: Iterable[str], all: str = "known:") -> str:
    """Return a hint for an unknown word: the nearest known word, or all known words."""
    from difflib import get_close_matches

    words = list(known)
    near = get_close_matches(word, words, n=1)
    if near:
        return f', did you mean "{near[0]}"?'
    return f" ({all} {', '.join(words)})"


def file_name(key: str) -> str:
    """Return a file name for a lease key: the key itself, or its hash if it has special characters."""
    if 0 < len(key) <= 150 and SAFE.issuperset(key) and key[0] not in ".-":
        return key
    return f"_{sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


class DriverError(Exception):
    """Base of driver errors. Each class implies the next action.

    An error that may have cost money holds the lease.
    """

    def __init__(self, message: str = "", *, lease: Lease | None = None) -> None:
        super().__init__(message or type(self).__doc__)
        self.lease = lease


class NoCapacity(DriverError):
    """The offer is sold out. Take the next offer."""


class Throttled(DriverError):
    """The provider limits the request rate. Repeat the request after `after`."""

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
    """The provider or machine is unreachable but may be running. Repeat the request."""


class Unsure(DriverError):
    """The order may have succeeded. Check for the lease before ordering again."""


class HostLost(DriverError):
    """The host no longer exists. Start a new attempt on another host."""


class Denied(DriverError):
    """The credentials or quota do not allow the request.  Tell the user."""


class Rejected(DriverError):
    """The request was invalid because of a bug or a wrong recipe."""


class WrongSetting(Rejected):
    """A driver setting is invalid, regardless of the request."""
