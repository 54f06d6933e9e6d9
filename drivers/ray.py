"""Ray driver: a lease is a detached placement group, and a host the detached actor of one bundle.

The driver keeps no state of its own.  A placement group's name holds the lease key, tagged by this
installation.  Its actors are named after the group, in a namespace of this installation.  The
actors' code is in `ray_node`.
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
from .calls import explain_failure
from .installation import Installation

_T = TypeVar("_T")
LONGEST = 30.0
"""Timeout for one reply of the cluster, in seconds."""
SHORT = 2.0
"""Timeout for a reply of an actor that may still be starting, in seconds."""
AT_ONCE = 1000
"""Concurrent calls per actor.  Each open stream occupies one call with a pending read."""
DIALS = 5.0
"""Timeout for a connection to the cluster's head node, in seconds."""
SILENT = (
    "timed out",
    "connection",
    "unavailable",
    "could not find any running ray instance",
    "failed to connect",
)
"""Lower-case parts of Ray's error messages that mean the cluster does not respond."""
GPU = "accelerator_type:"
GONE = "REMOVED"


class Ray(Driver):
    """Driver for an existing Ray cluster at `address`.

    `address` is host:port of the head node from inside the cluster, or ray://host:10001 from
    outside.  `cpus`, `memory` (bytes) and `gpus` are the share of each node to request.  By
    default, this is the peak use of the steps, or the whole node.  `queue` limits how many hours a
    placement group may wait for its nodes.  After `idle` seconds without a running program and a
    connected client, the group is removed (0: never).  `grace` is how many seconds steps have to
    save after their actor is lost.  `installation` is the file with the secret that identifies this
    installation.
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
        self._address = address
        self._root = root
        self._python = python
        self._idle = idle
        self._grace = grace
        self._share = Resources(cpus=cpus, memory=memory, gpus=gpus)
        self._hosts: dict[str, tuple[RayHost, ...]] = {}

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the cluster as one offer if enough of its nodes match `wish`, otherwise nothing.

        `excluded` then holds the reason.
        """
        nodes = await self._find_nodes()
        matching = [node for node in nodes if self._matches(node, wish)]
        if len(matching) < max(1, wish.need.nodes):
            self.excluded = {_describe_shortage(len(matching), wish.need.nodes): len(nodes) or 1}
            return []
        self.excluded = {}
        share = min((self._part(node, wish) for node in matching), key=_size_key)
        bundle = self._bundle(share, wish)
        data = {name: f"{amount:.15g}" for name, amount in bundle.items() if amount}
        return [Offer("ray", "cluster", share, wish.need.nodes, data=data, fetched=time.time())]

    def _matches(self, node: Resources, wish: Wish) -> bool:
        """Return whether a node, and the part of it to reserve, satisfy the need of one node."""
        of_one_node = wish._replace(need=replace(wish.need, nodes=1))
        if not machine.satisfies(node, of_one_node) or not self._holds(node):
            return False
        return machine.satisfies(self._part(node, wish), of_one_node)

    def _bundle(self, share: Resources, wish: Wish) -> dict[str, float]:
        """Return the resources to reserve on each node, by their names in Ray."""
        bundle: dict[str, float] = {"CPU": share.cpus or 0.0, "GPU": share.gpus or 0}
        if self._share.memory or wish.together.memory:
            bundle["memory"] = share.memory or 0
        if wish.need.gpu and share.gpu:
            bundle[GPU + share.gpu] = 0.001
        return bundle

    async def acquire(self, order: Order) -> Lease:
        """Create an order's placement group and actors, or find those with its key."""
        await self._ask(partial(self._create, order))
        return self._lease(order.key)

    async def hosts(self, lease: Lease) -> Sequence[RayHost] | None:
        """Return the nodes of a placement group.  None while the group waits for its nodes.

        Raises HostLost if a node, an actor or the group is lost.
        """
        _group, state, bundles = await self._ask(partial(self._find_group, lease.id))
        if state in ("PENDING", "PREPARED"):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
            self.waits = ""
            if state == "PENDING":
                self.waits = f"Ray has no free capacity yet for {len(bundles)} nodes with {asked}"
            return None
        if state != "CREATED":
            self._hosts.pop(lease.id, None)
            if state == "RESCHEDULING":
                raise HostLost("lost a Ray node")
            raise HostLost("the Ray placement group no longer exists")
        self.waits = ""
        if lease.id not in self._hosts:
            found = []
            for name in _actor_names(lease.id, len(bundles)):
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
        """Stop all programs of a lease, then remove its placement group.

        Return True once the group is gone.
        """
        self._hosts.pop(lease.id, None)
        group, state, bundles = await self._ask(partial(self._find_group, lease.id))
        if group is None:
            return True
        names = _actor_names(lease.id, len(bundles))
        left = await asyncio.gather(
            *(self._leave(name, group, index, state) for index, name in enumerate(names))
        )
        if not all(left):
            return False
        await self._ask(partial(remove_placement_group, group))
        return (await self._ask(partial(self._find_group, lease.id)))[0] is None

    async def leases(self) -> Sequence[Lease]:
        groups = await self._ask(placement_group_table)
        found: list[Lease] = []
        for group in groups.values():
            if group["state"] == GONE:
                continue
            key = self._installation.key(group["name"])
            if key is not None:
                found.append(self._lease(key))
        return found

    async def about(self) -> Sequence[tuple[str, str]]:
        """Describe the cluster for `recipe doctor`.  Raises Denied if its Ray version differs."""
        nodes = await self._find_nodes()
        processors = sum(have.cpus or 0 for have in nodes)
        gpus = sum(have.gpus or 0 for have in nodes)
        models = sorted({have.gpu for have in nodes if have.gpu})
        named = f"{gpus} ({', '.join(models)})" if models else f"{gpus}"
        return [
            ("ray", str(ray.__version__)),
            ("namespace", self._namespace),
            ("nodes", f"{len(nodes)}"),
            ("processors", f"{processors:g}"),
            ("GPUs", named),
        ]

    async def _find_nodes(self) -> list[Resources]:
        """Return the resources of each node of the cluster that is alive."""
        nodes = await self._ask(ray.nodes)
        return [_resources(node) for node in nodes if node["Alive"]]

    async def answer(self, ref: Awaitable[_T]) -> _T:
        """Await the reply of a Ray actor or task. Raises DriverError."""
        try:
            async with asyncio.timeout(LONGEST):
                return await ref
        except (RayError, TimeoutError) as error:
            raise translate_error(error) from error

    async def _ask(self, question: Callable[[], _T]) -> _T:
        """Run a blocking Ray call in a thread, connecting to the cluster first.

        Raises DriverError.
        """

        def ask() -> _T:
            if not ray.is_initialized():
                address = (
                    os.environ.get("RAY_ADDRESS", self._address)
                    if self._address == "auto"
                    else self._address
                )
                _check_address(address)
                logging.getLogger("ray").setLevel(logging.CRITICAL)
                ray.init(
                    address, namespace=self._namespace, log_to_driver=False, configure_logging=False
                )
            return question()

        try:
            async with asyncio.timeout(LONGEST):
                return await asyncio.to_thread(ask)
        except (RayError, OSError, TimeoutError, RuntimeError, ValueError) as error:
            raise translate_error(error) from error

    def _create(self, order: Order) -> None:
        name, bundle = (
            self._installation.mark(order.key),
            {name: float(amount) for name, amount in order.offer.data.items()},
        )
        group, names = self._find_group(name)[0], _actor_names(name, order.offer.nodes)
        if group is None:
            strategy = "STRICT_SPREAD" if order.offer.nodes > 1 else "PACK"
            group = placement_group(
                [bundle] * order.offer.nodes, strategy=strategy, name=name, lifetime="detached"
            )
        text = Path(ray_node.__file__).read_text("utf-8")
        # This module is not installed on the nodes.
        ray.cloudpickle.register_pickle_by_value(ray_node)
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
        """Return the live placement group called `name`, with its state and its bundles."""
        for id, group in placement_group_table().items():
            if group["name"] == name and group["state"] != GONE:
                return (
                    PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id))),
                    group["state"],
                    list(group["bundles"].values()),
                )
        return None, GONE, []

    def _actor(self, name: str) -> Any:
        """Return the actor called `name`, or None if it no longer exists."""
        with suppress(ValueError):
            return ray.get_actor(name, namespace=self._namespace)
        return None

    async def _leave(self, name: str, group: PlacementGroup, index: int, state: str) -> bool:
        """Stop all programs on one node. Return True once no program runs there."""
        with suppress(HostLost):
            actor = await self._ask(partial(self._actor, name))
            if actor is not None:
                return state != "CREATED" or await self.answer(actor.leave.remote())
        if state != "CREATED":
            return True  # the node is lost, or was never allocated
        task = ray.remote(ray_node.over).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        return await self.answer(task.remote(self._root, name))

    def _lease(self, key: str) -> Lease:
        return Lease("ray", self._installation.mark(key), key)

    def _holds(self, have: Resources) -> bool:
        """Return True if a node has at least the configured resources."""
        share = self._share
        if (share.cpus or 0) > (have.cpus or 0):
            return False
        if (share.memory or 0) > (have.memory or 0):
            return False
        return (share.gpus or 0) <= (have.gpus or 0)

    def _part(self, have: Resources, wish: Wish) -> Resources:
        """Return the share of a node that one bundle of a placement group requests.

        This is the configured share, otherwise the peak use of the steps, otherwise the whole node.
        """
        wanted, share = wish.together, self._share
        cpus = share.cpus or (wanted.cpus and ceil(wanted.cpus))
        gpus = wanted.gpus if share.gpus is None else share.gpus
        part_of_gpus = have.gpus if gpus is None else min(have.gpus or 0, gpus)
        return replace(
            have,
            cpus=machine.limit(have.cpus, cpus),
            memory=machine.limit(have.memory, share.memory or wanted.memory),
            gpus=part_of_gpus,
        )


class RayHost(Host):
    """A node of a placement group, reached through its actor."""

    def __init__(
        self, driver: Ray, actor: Any, name: str, python: str, root: str, address: str
    ) -> None:
        self.name = name.rpartition("/")[2]
        self.python = python
        self.root = root
        self.address = address
        self._driver, self._actor = driver, actor

    async def call(
        self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
    ) -> AsyncGenerator[bytes, None]:
        """Run a program through the node's actor.  See `Host.call`."""
        answer, actor, id = self._driver.answer, self._actor, secrets.token_hex(8)
        words = [os.fsencode(word) for word in argv]
        why = await answer(actor.begin.remote(id, words))
        if why:
            raise Rejected(f"cannot run {argv[0]}: {why}")
        feeding = asyncio.ensure_future(self._feed(id, stdin))
        try:
            end = None
            while end is None:
                data, end = await answer(actor.read.remote(id))
                if data:
                    yield data
            if feeding.done():
                await feeding  # raises the input's own error
        finally:
            feeding.cancel()  # the program exited before reading all input
            with suppress(RayError):
                actor.end.remote(id)
        code, said = end
        if code:
            raise explain_failure(argv[0], code, said)

    async def _feed(self, id: str, stdin: AsyncIterable[bytes]) -> None:
        answer, actor = self._driver.answer, self._actor
        try:
            if stdin is not NOTHING:
                async for data in stdin:
                    if not await answer(actor.write.remote(id, bytes(data))):
                        break
        except BaseException:
            actor.end.remote(id)  # truncated input must not look complete
            raise
        await answer(actor.close.remote(id))

    async def aclose(self) -> None:
        """Do nothing: the host holds no connection between calls."""


def _check_address(address: str) -> None:
    """Check that the cluster's address accepts connections.

    Raises OSError if nothing listens.  Ray itself would retry for minutes.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isascii() and port.isdecimal():
        socket.create_connection((host, int(port)), DIALS).close()


def _actor_names(lease: str, nodes: int) -> list[str]:
    return [f"{lease}/{index}" for index in range(nodes)]


def _describe_shortage(matching: int, requested: int) -> str:
    if not matching:
        return "the Ray cluster has no matching node"
    return f"the Ray cluster has {matching} matching nodes, but {requested} are requested"


def _size_key(resources: Resources) -> tuple[int, float, int]:
    """Return a sort key: GPUs, then CPUs, then memory."""
    return resources.gpus or 0, resources.cpus or 0.0, resources.memory or 0


def _resources(node: Mapping[str, Any]) -> Resources:
    """Return a node's resources, as Ray reports them."""
    told = node["Resources"]
    gpu = next((name.removeprefix(GPU) for name in told if name.startswith(GPU)), None)
    return Resources(
        cpus=told.get("CPU", 0.0),
        memory=int(told.get("memory", 0)),
        gpus=int(told.get("GPU", 0)),
        gpu=gpu,
    )


def translate_error(error: Exception) -> DriverError:
    """Translate an error of Ray into a driver error with a remedy."""
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
