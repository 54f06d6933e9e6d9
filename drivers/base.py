"""The contract between a caller of commands and the place where they run: Driver, Host and the values between them.  Imports nothing of `runner`.

Every call is short and asked again by the caller; a `Lease` is serialisable and stored before it is used, so that another process can go on where
this one died.  A driver runs no jobs and moves no files: all that travels through `Host.call`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias

Argv: TypeAlias = Sequence[str]

ROOT = ".recipe-host"
"""Our folder on a machine, below the login's home, unless a setting says otherwise."""
SAVES = 0.75
"""Of `Ending.grace`, the part in which what runs may save and end; in the rest what it saved is brought home."""
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
"""How often an hour a spot machine is taken away, unless said."""
LOST = 0.5
"""Hours that each time costs: since the last checkpoint, and until the next machine is up."""
Market: TypeAlias = Literal["on-demand", "spot"]
"""How a machine is sold: `spot` is cheaper and may be taken away again."""


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
    disk: int | None = None  # bytes that will be rented with the machine
    hours: float | None = None  # for how long it is wanted, as far as that is known
    home: int | None = None  # bytes that will be brought here from it, as far as that is known
    filters: Mapping[str, str] = {}
    keep: bool = False  # as of `Order`: the price is that of a machine that is kept
    together: Resources = Resources()  # what steps would use of each node at once, where they may run beside each other; None: all that it has
    hurry: bool = (
        False  # leave out machines that answer later than others do: `Driver.late` has them
    )


class Traits(NamedTuple):
    """Capabilities of a driver, as data."""

    priced: bool = False
    shared_disk: bool = False  # hosts may see our disk, and we theirs: each is asked
    replays: bool = False  # the same key is the same lease
    settles: timedelta = timedelta(0)  # how long a new lease may stay unlisted
    ends: Literal["provider", "machine", "stops", "nothing"] = (
        "nothing"  # what stops the billing at `Order.until` when we are dead; `stops`: but a disk's
    )
    identity: Literal["", "given", "attested", "first_use"] = ""
    """Whence we know a rented machine's host key: we gave it, the provider says it, or the first one is believed."""
    poll: timedelta = timedelta(seconds=0.5)  # between two looks whether a machine is up
    comes_up: timedelta = timedelta(
        minutes=15
    )  # in which a machine that was asked for is up, or is given up
    notice: Argv = ()  # a program that ends on a spot machine when it is about to be taken away; empty: there is no notice
    prices: str = ""  # what prices are, in words, where they are not asked of the provider
    hosts_at_once: int | None = (
        None  # how many leases one account may have; None: no limit that we know
    )
    images: bool = False  # a machine is a container of the image that is ordered, so a step with that image runs in it as it is
    image: str = ""  # what a machine runs where no other image is ordered
    billed: bool = False  # what it gives costs money, and is taken as what costs nothing is: a cluster with prices in its settings
    allocates: bool = False  # a lease is machines of its own, as many as `Need.nodes`, that steps share; given back, all that runs there ends
    visits: bool = False  # its hosts can be looked at without a lease; others are rented for a look
    prolongs: bool = False  # its machines end themselves at `Order.until`, which can be moved
    pauses: bool = (
        False  # its machines may be stopped and started again, disks and all: it heeds `Order.keep`
    )
    works: bool = False  # it can carry out a run itself, on one of its machines
    joins: bool = False  # machines of one zone reach each other at addresses of their own: they may be the nodes of one step
    exports: bool = False  # it can write what it would rent as a program for another tool


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
        0.0  # the part of `price` that is for the disk: what a stopped machine costs an hour
    )
    egress_price: float = 0.0  # US dollars for a GB that leaves it
    longest: float | None = None  # hours after which it is taken away; None: no limit that we know
    fetched: float = 0.0  # seconds since the epoch: when the price was asked
    queued: bool = False  # it is waited for, and costs nothing before it is up

    @property
    def hourly(self) -> float:
        """US dollars per hour of progress, because a spot machine loses some hours."""
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
    """A billed allocation of machines. `price` is the listed US dollars per hour, or 0 if unknown."""

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
    timeout: float | None = None  # seconds of wall time, kept by the supervisor of the job
    idle_timeout: float | None = None  # seconds without a byte of log
    log: str | None = None  # a path on the host for stdout and stderr; None: the agent chooses
    locks: tuple[
        str, ...
    ] = ()  # names, per machine and login, that the job holds while any process of it lives
    outlives: bool = False  # its end is to be known even if its supervisor is killed meanwhile, at the price of a shell above it


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
    strays: int = 0  # background processes that the command left behind and we ended
    detail: str = ""  # what kept the command from starting, in words


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


NOTHING: AsyncIterable[bytes] = _nothing()


class Host:
    """A machine that runs programs. The agent started there handles jobs and files.

    A subclass must override `call` and set `root`. All other members have a default.
    """

    root: str
    """The folder there that is ours: absolute, or below the login's home."""
    python: str = ""
    """A Python there that is tried first for the agent, which needs 3.9 or later; empty: look for one."""
    deadman: float | None = None
    """Seconds without contact after which all that we began there is ended; None: never."""
    name: str = ""
    """What people call it, where it is one of several of its lease."""
    address: str = ""
    """What other nodes of a step dial; empty: it cannot be dialled."""
    until: float = math.inf
    """Seconds since the epoch, by our clock, when all that runs there is killed; infinite: no limit."""
    grace: float = 0.0
    """Seconds before `until`, from which on nothing new begins there and what runs is asked to save and to end."""

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
        """Return the command line of an SSH client for logging in to the host, or () without a login.

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
    """Where a person sees, and ends, what is rented; empty: there is no account."""
    left_out: Mapping[str, str] = {}
    """Machines that the last `offers` could not ask -> why, as a sentence."""
    late: Collection[str] = ()
    """Machines that the last `offers`, of a wish in a hurry, did not wait for: the next without hurry does."""
    notices: Sequence[str] = ()
    """What it passes over of the files that it goes by, a sentence each; known once it is made."""
    excluded: Mapping[str, int] = {}
    """Why the last `offers` left some out, in a few words -> how many."""
    waits: str = ""
    """Why the last `hosts` answered None, in words: the state of a queue."""

    # --- what every driver has

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
        raise Rejected("its machines are looked at by a lease only")

    # --- what is known of the provider

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
        raise Rejected("it writes no program of its machines")

    # --- what is asked of one lease

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
        raise Rejected("its machines do not end themselves")

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
        """Return the provider's status of a machine. A starting or stopping machine counts as `runs`.

        Raises Rejected unless `Traits.pauses`.
        """
        raise Rejected("its machines cannot be stopped and started again")

    async def work(self, command: Argv, cwd: str, log: str) -> str:
        """Run a long command on the cluster, and return its name there.

        The command is restarted if its machine is lost.

        Paths are those of this machine, so the disk must be shared. Raises DriverError, and
        Rejected unless `Traits.works`.
        """
        raise Rejected("it carries out no run itself")


def suggest(word: str, known: Iterable[str], all: str = "known:") -> str:
    """Return a hint for an unknown word: the nearest known word, or all known words."""
    from difflib import get_close_matches

    near = get_close_matches(word, known := list(known), n=1)
    return f', did you mean "{near[0]}"?' if near else f" ({all} {', '.join(known)})"


def file_name(key: str) -> str:
    """Return a key as a file name without special characters."""
    if 0 < len(key) <= 150 and SAFE.issuperset(key) and key[0] not in ".-":
        return key
    from hashlib import sha256

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
