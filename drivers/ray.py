"""A cluster of Ray: a lease is a detached placement group, a host the detached actor of one of its bundles.

Nothing is remembered here: the group bears our mark and its key as its name, and the actors are named after it, in a namespace of this installation.
What the actors do is in `ray_node`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from . import machine, ray_node
from .base import (
    NOTHING,
    ROOT,
    Argv,
    Denied,
    Driver,
    DriverError,
    Host,
    HostLost,
    Lease,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unreachable,
    Wish,
)
from .calls import ENDED
from .installation import Installation

_T = TypeVar("_T")
LONGEST = 30.0
"""Seconds for one answer of the cluster."""
SHORT = 2.0
"""The same, for an actor that may still be starting."""
AT_ONCE = 1000
"""Calls that an actor answers beside each other: each open stream has one that waits."""
DIALS = 5.0
"""Seconds in which the head of a cluster takes a connection."""
SILENT = (
    "timed out",
    "connection",
    "unavailable",
    "could not find any running ray instance",
    "failed to connect",
)
"""What is said of a cluster that does not answer."""
GPU = "accelerator_type:"
GONE = "REMOVED"


class Ray(Driver):
    """A cluster that is there, found at `address`: host:port of its head from one of its nodes, ray://host:10001 from elsewhere.

    `cpus`, `memory` (bytes) and `gpus` are a share of each node; by default what steps ask for, or whole nodes.  `queue` is how many hours a
    placement group may wait for its nodes.  `idle` is for how many seconds it is kept on which nothing of ours runs and to which no client is
    connected (0: for ever).  `grace` is how many seconds steps have to save when their actor is gone.  `installation` is the file with the
    secret that names ours.
    """

    traits = Traits(
        shared_disk=True, replays=True, ends="machine", poll=timedelta(seconds=0.2), allocates=True
    )

    def __init__(
        self,
        *,
        address: str = "auto",
        cpus: float | None = None,
        memory: int | None = None,
        gpus: int | None = None,
        queue: float = 24.0,
        idle: float = 120.0,
        grace: float = 10.0,
        root: str = ROOT,
        python: str = "python3",
        installation: str | None = None,
    ) -> None:
        self.traits = self.traits._replace(comes_up=timedelta(hours=queue))
        self.excluded: Mapping[str, int] = {}
        self.waits = ""
        self._installation = Installation.of(installation)
        self._namespace = f"recipe-{self._installation.name}"
        self._address, self._root, self._python, self._idle, self._grace = (
            address,
            root,
            python,
            idle,
            grace,
        )
        self._share = Resources(cpus=cpus, memory=memory, gpus=gpus)
        self._hosts: dict[str, tuple[RayHost, ...]] = {}

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """The cluster, where it has enough nodes that do for `wish`.  `excluded` says why not."""
        nodes = [_resources(node) for node in await self._ask(ray.nodes) if node["Alive"]]
        one = wish._replace(need=replace(wish.need, nodes=1))
        fitting = [
            have
            for have in nodes
            if all(machine.enough(each, one) for each in (have, self._part(have, wish)))
            and self._holds(have)
        ]
        if not fitting or len(fitting) < wish.need.nodes:
            what = (
                f"{len(fitting)} matching nodes, but {wish.need.nodes} are requested"
                if fitting
                else "no matching node"
            )
            self.excluded = {f"the Ray cluster has {what}": len(nodes) or 1}
            return []
        self.excluded = {}
        share = min(
            (self._part(have, wish) for have in fitting),
            key=lambda each: (each.gpus or 0, each.cpus or 0.0, each.memory or 0),
        )
        bundle = {"CPU": share.cpus or 0.0, "GPU": share.gpus or 0}
        if self._share.memory or wish.together.memory:
            bundle["memory"] = share.memory or 0
        if wish.need.gpu and share.gpu:
            bundle[GPU + share.gpu] = 0.001
        data = {name: f"{amount:.15g}" for name, amount in bundle.items() if amount}
        return [Offer("ray", "cluster", share, wish.need.nodes, data=data, fetched=time.time())]

    async def acquire(self, order: Order) -> Lease:
        """Ask for a placement group and its actors, or find those of this key."""
        await self._ask(partial(self._create, order))
        return self._lease(order.key)

    async def hosts(self, lease: Lease) -> Sequence[RayHost] | None:
        """The nodes of a placement group; None while it waits for them.  Raises HostLost once one of its actors is gone."""
        _group, state, bundles = await self._ask(partial(self._find_group, lease.id))
        if state in ("PENDING", "PREPARED"):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
            self.waits = (
                f"Ray has no free capacity yet for {len(bundles)} nodes with {asked}"
                if state == "PENDING"
                else ""
            )
            return None
        if state != "CREATED":
            self._hosts.pop(lease.id, None)
            raise HostLost(
                "lost a Ray node"
                if state == "RESCHEDULING"
                else "the Ray placement group no longer exists"
            )
        self.waits = ""
        if lease.id not in self._hosts:
            found = []
            for name in _names(lease.id, len(bundles)):
                actor = await self._ask(partial(self._actor, name))
                if actor is None:
                    raise HostLost(f"the Ray actor {name} no longer exists")
                try:
                    told = await asyncio.wait_for(self.answer(actor.about.remote()), SHORT)
                except TimeoutError:
                    return None
                found.append(RayHost(self, actor, name, self._python, *told))
            self._hosts[lease.id] = tuple(found)
        return self._hosts[lease.id]

    async def release(self, lease: Lease) -> bool:
        """End what runs there, then its actors, then the group: nothing of ours is left on the nodes when it is gone."""
        self._hosts.pop(lease.id, None)
        group, state, bundles = await self._ask(partial(self._find_group, lease.id))
        if group is None:
            return True
        left = await asyncio.gather(
            *(
                self._leave(name, group, index, state)
                for index, name in enumerate(_names(lease.id, len(bundles)))
            )
        )
        if not all(left):
            return False
        await self._ask(partial(remove_placement_group, group))
        return (await self._ask(partial(self._find_group, lease.id)))[0] is None

    async def leases(self) -> Sequence[Lease]:
        groups = await self._ask(placement_group_table)
        keys = [
            self._installation.key(group["name"])
            for group in groups.values()
            if group["state"] != GONE
        ]
        return [self._lease(key) for key in keys if key is not None]

    async def about(self) -> Sequence[tuple[str, str]]:
        """What the cluster says of itself.  Raises Denied where it is of another version."""
        nodes = [_resources(node) for node in await self._ask(ray.nodes) if node["Alive"]]
        gpus = sorted({have.gpu for have in nodes if have.gpu})
        return [
            ("ray", str(ray.__version__)),
            ("namespace", self._namespace),
            ("nodes", f"{len(nodes)}"),
            ("processors", f"{sum(have.cpus or 0 for have in nodes):g}"),
            (
                "GPUs",
                f"{sum(have.gpus or 0 for have in nodes)}"
                + (f" ({', '.join(gpus)})" if gpus else ""),
            ),
        ]

    async def answer(self, ref: Awaitable[_T]) -> _T:
        """What an actor or a task answers.  Raises DriverError."""
        try:
            async with asyncio.timeout(LONGEST):
                return await ref
        except (RayError, TimeoutError) as error:
            raise foreign(error) from error

    async def _ask(self, question: Callable[[], _T]) -> _T:
        """What the cluster answers, to which we connect first: in a thread, for such questions block.  Raises DriverError."""

        def ask() -> _T:
            if not ray.is_initialized():
                address = (
                    os.environ.get("RAY_ADDRESS", self._address)
                    if self._address == "auto"
                    else self._address
                )
                _dial(address)
                logging.getLogger("ray").setLevel(logging.CRITICAL)
                ray.init(
                    address, namespace=self._namespace, log_to_driver=False, configure_logging=False
                )
            return question()

        try:
            async with asyncio.timeout(LONGEST):
                return await asyncio.to_thread(ask)
        except (RayError, OSError, TimeoutError, RuntimeError, ValueError) as error:
            raise foreign(error) from error

    def _create(self, order: Order) -> None:
        name, bundle = (
            self._installation.mark(order.key),
            {name: float(amount) for name, amount in order.offer.data.items()},
        )
        group, names = self._find_group(name)[0], _names(name, order.offer.nodes)
        if group is None:
            strategy = "STRICT_SPREAD" if order.offer.nodes > 1 else "PACK"
            group = placement_group(
                [bundle] * order.offer.nodes, strategy=strategy, name=name, lifetime="detached"
            )
        text = Path(ray_node.__file__).read_text("utf-8")
        ray.cloudpickle.register_pickle_by_value(ray_node)  # nodes have none of our modules
        for index, each in enumerate(names):
            settings: dict[str, object] = {
                "name": each,
                "namespace": self._namespace,
                "lifetime": "detached",
                "get_if_exists": True,
                "max_restarts": 0,
            }
            settings |= {
                "max_concurrency": AT_ONCE,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            }
            settings |= {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "memory": bundle.get("memory"),
            }
            ray.remote(ray_node.Node).options(**settings).remote(
                text, each, names, self._namespace, self._root, self._grace, self._idle
            )

    def _find_group(self, name: str) -> tuple[PlacementGroup | None, str, list[dict[str, float]]]:
        """A placement group by its name, its state and its bundles."""
        for id, group in placement_group_table().items():
            if group["name"] == name and group["state"] != GONE:
                return (
                    PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id))),
                    group["state"],
                    list(group["bundles"].values()),
                )
        return None, GONE, []

    def _actor(self, name: str) -> Any:
        """The actor of a name; None where it is gone."""
        with suppress(ValueError):
            return ray.get_actor(name, namespace=self._namespace)
        return None

    async def _leave(self, name: str, group: PlacementGroup, index: int, state: str) -> bool:
        """End what runs on one node.  Whether nothing is left there."""
        with suppress(HostLost):
            if (actor := await self._ask(partial(self._actor, name))) is not None:
                return state != "CREATED" or await self.answer(actor.leave.remote())
        if state != "CREATED":
            return True  # its node is gone, or never was
        task = ray.remote(ray_node.over).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        return await self.answer(task.remote(self._root, name))

    def _lease(self, key: str) -> Lease:
        return Lease("ray", self._installation.mark(key), key)

    def _holds(self, have: Resources) -> bool:
        """Whether a node has what the settings ask for."""
        share = self._share
        return (
            (share.cpus or 0) <= (have.cpus or 0)
            and (share.memory or 0) <= (have.memory or 0)
            and (share.gpus or 0) <= (have.gpus or 0)
        )

    def _part(self, have: Resources, wish: Wish) -> Resources:
        """What a bundle has of one node: what the settings say, else as much as steps use at once, else all."""
        wanted, share = wish.together, self._share
        cpus, memory = (
            share.cpus or (wanted.cpus and ceil(wanted.cpus)),
            share.memory or wanted.memory,
        )
        gpus = share.gpus if share.gpus is not None else wanted.gpus
        return replace(
            have,
            cpus=min(have.cpus or 0.0, cpus) if cpus else have.cpus,
            memory=min(have.memory or 0, memory) if memory else have.memory,
            gpus=have.gpus if gpus is None else min(have.gpus or 0, gpus),
        )


class RayHost(Host):
    """A node of a placement group."""

    def __init__(
        self, driver: Ray, actor: Any, name: str, python: str, root: str, address: str
    ) -> None:
        self.name, self.python, self.root, self.address = (
            name.rpartition("/")[2],
            python,
            root,
            address,
        )
        self._driver, self._actor = driver, actor

    async def call(
        self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
    ) -> AsyncGenerator[bytes, None]:
        """Run a program by the actor.  See `Host.call`."""
        answer, actor, id = self._driver.answer, self._actor, secrets.token_hex(8)
        if why := await answer(actor.begin.remote(id, [os.fsencode(word) for word in argv])):
            raise Rejected(f"cannot run {argv[0]}: {why}")
        feeding = asyncio.ensure_future(self._feed(id, stdin))
        try:
            end = None
            while end is None:
                data, end = await answer(actor.read.remote(id))
                if data:
                    yield data
            if feeding.done():
                await feeding  # raises what broke the input
        finally:
            feeding.cancel()  # the program did not want the rest
            with suppress(RayError):
                actor.end.remote(id)
        code, words = end
        if code:
            said = words.decode("utf-8", "replace").strip()
            raise (Unreachable if code in ENDED else Rejected)(
                f"{argv[0]} ended with {code}" + (f": {said}" if said else "")
            )

    async def _feed(self, id: str, stdin: AsyncIterable[bytes]) -> None:
        answer, actor = self._driver.answer, self._actor
        try:
            if stdin is not NOTHING:
                async for data in stdin:
                    if not await answer(actor.write.remote(id, bytes(data))):
                        break
        except BaseException:
            actor.end.remote(id)  # half of the input must not look like the whole
            raise
        await answer(actor.close.remote(id))

    async def aclose(self) -> None:
        """A connection is a call."""


def _dial(address: str) -> None:
    """Raises OSError where nothing listens: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), DIALS).close()


def _names(lease: str, nodes: int) -> list[str]:
    return [f"{lease}/{index}" for index in range(nodes)]


def _resources(node: Mapping[str, Any]) -> Resources:
    """What a node has, by the resources that Ray knows of it."""
    told = node["Resources"]
    gpu = next((name.removeprefix(GPU) for name in told if name.startswith(GPU)), None)
    return Resources(
        cpus=told.get("CPU", 0.0),
        memory=int(told.get("memory", 0)),
        gpus=int(told.get("GPU", 0)),
        gpu=gpu,
    )


def foreign(error: Exception) -> DriverError:
    """An error of Ray as one that says what to do."""
    words = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, RayTaskError):
        cause = error.cause
        return Denied(
            f"cannot use the work directory on a Ray node: {cause}: set another `root` in [drivers.ray]"
        )
    if isinstance(error, ActorUnavailableError | GetTimeoutError | RaySystemError) or not str(
        error
    ):
        return Unreachable(f"no response from the Ray cluster: {words}")
    if isinstance(error, RayActorError):
        return HostLost(f"lost its Ray actor: {words}")
    if "ersion mismatch" in words:
        return Denied(f"the Ray cluster has another Ray or Python version: {words}")
    if isinstance(error, OSError) or any(sign in words.lower() for sign in SILENT):
        return Unreachable(
            f"cannot reach a Ray cluster: {words}: start one, or set its `address` in [drivers.ray]"
        )
    return Denied(f"Ray rejected the request: {words}")
