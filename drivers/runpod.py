"""RunPod driver: pods billed by the second, and the meaning of API replies for a lease.

Uses the REST API v2, which has no spot market.  A pod's name is set by the request that creates it
and holds the lease key, tagged by this installation, so a lost reply loses no pod.  When its lease
expires, a pod deletes itself with the key that RunPod gives each pod.  If that key lacks the
permission, the pod stops itself, and its disk is still billed.  The account's key never leaves this
machine.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from . import cloud
from .base import (
    ROOT,
    Charge,
    Denied,
    HostLost,
    Lease,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unsure,
    Wish,
    suggest,
)
from .cloud import Filters, Value, harmless, markets
from .runpod_wire import HOME, RunpodClient, RunpodGpu, RunpodPod, api_key, none, pod, words
from .ssh import SshHost
from .web import Answer, explain_missing_key

API: Final = "https://api.runpod.io"
IMAGE: Final = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
CLOUDS: Final = {"secure": "SECURE", "community": "COMMUNITY"}
"""RunPod's own data centers, and machines of third-party hosts."""
DISK: Final = 0.10 / 30 / 24
"""Price of a running pod's disk, in US dollars per GB-hour."""
STOPPED: Final = ("EXITED", "ERROR")
CPUS, MEMORY = 2, 8 * 10**9
"""CPUs and bytes of memory that RunPod guarantees per GPU.

These are the defaults of `minVCPUPerGPU` and `minRAMPerGPU` in API v1.  In API v2, neither the
catalog nor a pod tells the CPUs and memory, and an order cannot request them.
"""
LEAST_DISK, MOST_DISK = 20, 10_000  # GB; RunPod documents no maximum
VOLUME: Final = f"{HOME}/{ROOT}"
"""Mount point of a kept pod's persistent volume, which holds all files of recipe.

Files outside the volume are wiped when the pod restarts.
"""
STARTS: Final = timedelta(minutes=2)
"""How long to wait for a started pod to get its GPUs again."""
# The container's command, which then runs the image's own /start.sh. Third-party images have no SSH
# server and no /start.sh.
_COMMAND: Final = "bash -c 'echo {script} | base64 -d | sh; [ -x /start.sh ] && exec /start.sh; exec sleep infinity'"
_SERVER: Final = """[ -n "$RECIPE_SSHD_KEYS" ] || command -v sshd || { apt-get update && apt-get install -y openssh-server; }
"""
# Run by the pod itself when its lease expires, with the pod's own key. A kept pod is only stopped.
_DELETE: Final = """curl -fsS -m 60 -X DELETE -H "$auth" $self || """
_END: Final = """auth="Authorization: Bearer $RUNPOD_API_KEY" self={api}/v2/pods/$RUNPOD_POD_ID
    {delete}curl -fsS -m 60 -H "$auth" -H 'Content-Type: application/json' -d '{{"action":"stop"}}' \
$self/action || runpodctl stop pod $RUNPOD_POD_ID"""


class Runpod(cloud.Deadman[RunpodClient]):
    """Driver for RunPod pods.

    `api` is the API's address, `image` the container image, `python` the image's Python.  Every
    other setting is a filter of offers: see `cloud.Filters`.  `verified = false` admits the
    community cloud.
    """

    provider = "RunPod"
    traits = Traits(
        priced=True,
        prolongs=True,
        pauses=True,
        settles=timedelta(seconds=30),
        ends="stops",
        identity="given",
        poll=timedelta(seconds=5),
        comes_up=timedelta(minutes=20),
        images=True,
    )
    console = "https://console.runpod.io/pods"

    def __init__(
        self, *, api: str = "", image: str = IMAGE, python: str = "python3", installation: str | None = None,
        poll: float = 5.0, settles: float = 30.0, **filters: Value,
    ) -> None:  # fmt: skip
        wire = RunpodClient(api or os.environ.get("RUNPOD_API_URL") or API)
        super().__init__(
            wire,
            image=image,
            python=python,
            installation=installation,
            poll=poll,
            settles=settles,
            filters=filters,
        )

    # --- offers

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the matching pod offers, the cheapest first.

        Raises NoCapacity for an unknown region.
        """
        filters = self._filters.with_more(wish.filters)
        if filters.zone:
            filters = filters._replace(regions=(filters.zone,))
        await self._check_regions(filters.regions)
        judged: list[tuple[Offer, str]] = []
        if "on-demand" not in markets(wish.need.market):
            self.excluded = {"no spot market at RunPod": 1}
            return []
        disk = max(LEAST_DISK, -(-max(wish.disk or 0, wish.need.disk or 0, cloud.DISK) // 10**9))
        count = max(1, wish.need.gpus or 0)
        clouds = ("secure",) if filters.verified else tuple(CLOUDS)
        for name in clouds:
            for gpu in await harmless(self._wire.gpus(count, CLOUDS[name])):
                if name not in gpu.prices:
                    continue
                offer = self._offer(gpu, name, count, disk, filters, keep=wish.keep)
                judged.append((offer, _why_excluded(offer, gpu, name, wish, filters)))
        return sorted(self._choose_fitting(judged), key=lambda offer: (offer.price, offer.id))

    async def _check_regions(self, regions: Sequence[str]) -> None:
        if not regions:
            return
        centers = await harmless(self._wire.centers())
        for asked in regions:
            if not any(asked.lower() in center.lower() for center in centers):
                raise NoCapacity(
                    f'RunPod has no data center "{asked}"{suggest(asked.upper(), centers)}'
                )

    def _offer(
        self, gpu: RunpodGpu, name: str, count: int, disk: int, filters: Filters, *, keep: bool
    ) -> Offer:
        centers = _choose_centers(gpu.centers, filters.regions)
        have = Resources(
            cpus=float(CPUS * count),
            memory=MEMORY * count,
            gpus=count,
            gpu=gpu.id,
            gpu_memory=gpu.memory * 10**9,
            disk=disk * 10**9,
        )
        # Without a wanted region, the order names no center, and RunPod chooses among all.
        ordered = ",".join(centers) if filters.regions else ""
        cuda = f"{filters.cuda:g}" if filters.cuda else ""
        data = {
            "gpu": gpu.id,
            "cloud": CLOUDS[name],
            "disk": str(disk),
            "centers": ordered,
            "cuda": cuda,
        }
        volume = disk if keep else 0
        disks = _disks(disk, volume, runs=True)
        price = gpu.prices[name]
        whole = round(price * count + disks, 5) if price else math.nan
        return Offer(
            "runpod",
            f"{gpu.id} x{count} {name}",
            have,
            price=whole,
            region=" ".join(centers),
            data=data,
            disk_price=disks,
            fetched=time.time(),
        )

    # --- leases

    async def acquire(self, order: Order) -> Lease:
        """Rent the offered pod.

        Raises NoCapacity if the pod is no longer available, Denied if the account lacks credit,
        Unsure if it is unknown whether a pod was created.
        """
        answer = await self._wire.create(self._body(order))
        said, offer = words(answer), order.offer
        if answer.status in (200, 201):
            try:
                made = pod(answer.fields)
            except Unsure as error:
                raise Unsure(
                    f"cannot read RunPod's reply to the order: {answer.words[:80]}"
                ) from error
            self._agreed[made.id] = offer.price
            return Lease("runpod", made.id, order.key, self._data)
        if answer.status == 402:
            raise Denied(
                f"RunPod does not rent to this account: {said} See https://console.runpod.io/user/billing"
            )
        # 400 means no capacity or an invalid request; the message tells which.
        if answer.status in (400, 403):
            raise NoCapacity(f"{offer.id} is not available: {said}")
        if answer.status < 400:
            raise Unsure(f"cannot read RunPod's reply to the order: {answer.words[:80]}")
        raise Rejected(f"RunPod rejected the order of {offer.id}: {said}")

    def _body(self, order: Order) -> Mapping[str, object]:
        """Return the body of the request that creates a pod."""
        data = order.offer.data
        delete = "" if order.keep else _DELETE
        end = _END.format(api=self._wire.web.api, delete=delete)
        script = _SERVER + cloud.boot(self._installation, order, datetime.now(UTC), end)
        gpu: dict[str, object] = {"id": data["gpu"], "count": order.offer.resources.gpus}
        if data["cuda"]:
            gpu["minCudaVersion"] = f"{float(data['cuda']):.1f}"
        wanted: dict[str, object] = {
            "name": self._installation.mark(order.key),
            "image": order.image or self._image,
            "gpu": gpu,
            "cloud": data["cloud"],
            "disk": int(data["disk"]),
        }
        if order.keep:
            wanted["mounts"] = {"persistent": {"size": int(data["disk"]), "path": VOLUME}}
        wanted |= {
            "ports": ["22/tcp"],
            "env": {"PUBLIC_KEY": cloud.public(self._installation.login(order.key))},
            "args": _COMMAND.format(script=base64.b64encode(script.encode()).decode()),
        }
        if data["centers"]:
            wanted["dataCenterIds"] = data["centers"].split(",")
        return wanted

    async def _open_machine(self, lease: Lease) -> SshHost | None:
        """Connect to the pod once its SSH server accepts the login key and the host key matches."""
        found = await self._alive(lease)
        if found.status != "RUNNING" or found.address is None:
            return None
        self._as_agreed(lease, _price(found))
        return await self._logins.open(lease, "root", *found.address)

    async def release(self, lease: Lease) -> bool:
        """Terminate the pod.  Return True once RunPod reports that it no longer exists."""
        await self._logins.end(lease)
        await harmless(self._wire.destroy(lease.id))
        return await harmless(self._wire.show(lease.id)) is None

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped pod.  It stops after its ordered time, unless its lease is prolonged.

        If other pods use its GPUs meanwhile, RunPod starts the pod without a GPU, which counts as
        lost.  Raises NoCapacity, Denied if the account lacks credit, HostLost.
        """
        found = await harmless(self._wire.show(lease.id))
        if found is not None and found.status in STOPPED:
            answer = await harmless(self._wire.act(lease.id, "start"))
            if answer.status == 402:
                raise Denied(
                    f"RunPod does not start pods for this account: {words(answer)} See https://console.runpod.io/user/billing"
                )
            if answer.status in (400, 403):
                raise NoCapacity(f"cannot start the pod {lease.id}: {words(answer)}")
            if _is_rejected(answer):
                raise Rejected(f"RunPod cannot start {lease.id}: {words(answer)}")
        deadline = time.monotonic() + STARTS.total_seconds()
        while True:
            found = await harmless(self._wire.show(lease.id))
            if found is None or found.status not in ("PROVISIONING", "STARTING"):
                break
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(self.traits.poll.total_seconds())
        if found is None:
            raise HostLost(f"the pod {lease.id} no longer exists at RunPod")
        if not found.gpus:
            raise HostLost(
                f"the pod {lease.id} started without a GPU: all GPUs of its machine are in use"
            )

    async def stop(self, lease: Lease) -> bool:
        """Stop a pod.  Return True once it is stopped.

        Its volume is still billed, at twice the rate.
        """
        await self._logins.end(lease)
        if await self.stands(lease) == "runs":
            answer = await harmless(self._wire.act(lease.id, "stop"))
            if _is_rejected(answer):
                raise Rejected(f"RunPod cannot stop {lease.id}: {words(answer)}")
        return await self.stands(lease) != "runs"

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        """Return the pod's status, as RunPod reports it."""
        found = await harmless(self._wire.show(lease.id))
        if found is None:
            return "gone"
        return "stopped" if found.status in STOPPED else "runs"

    async def leases(self) -> Sequence[Lease]:
        found: list[Lease] = []
        for each in await harmless(self._wire.listing()):
            key = self._installation.key(each.name)
            if key is not None:
                price = round(_price(each) or 0.0, 5)
                found.append(Lease("runpod", each.id, key, self._data, price=price))
        return found

    async def charges(self, lease: Lease, since: datetime) -> Sequence[Charge]:
        """Return RunPod's charges for a lease."""
        found = await harmless(self._wire.charges(lease.id))
        return [charge for charge in found if charge.till >= since.timestamp()]

    def find_lack(self) -> str:
        return explain_missing_key(api_key)

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the account as names and texts. Changes nothing."""
        pods = await harmless(self._wire.listing())
        hourly = sum(each.price or 0.0 for each in pods)
        return [
            (
                "account",
                f"by the key of RUNPOD_API_KEY; it has {len(pods)} pods, which cost ${hourly:.2f} an hour",
            ),
            ("credit", "not shown by RunPod before an order: it must cover an hour of the pod"),
            self._clock(),
        ]

    async def solvent(self) -> None:
        """Do nothing: RunPod reports insufficient credit only when a pod is ordered."""

    async def _alive(self, lease: Lease) -> RunpodPod:
        """Return RunPod's record of a pod.

        Raises HostLost if it no longer exists or is not running.
        """
        found = await harmless(self._wire.show(lease.id))
        if found is None:
            raise HostLost(f"the pod {lease.id} no longer exists at RunPod")
        if found.status in STOPPED:
            raise HostLost(f"the pod {lease.id} is not running: {found.status}")
        return found


def _why_excluded(offer: Offer, gpu: RunpodGpu, name: str, wish: Wish, filters: Filters) -> str:
    """Explain why an offer of the cloud `name` does not match a wish, or return ""."""
    have = offer.resources
    if (have.disk or 0) > MOST_DISK * 10**9:
        return "disk larger than the maximum"
    if gpu.most[name] < (have.gpus or 0):
        return "too few GPUs"
    # The order itself requests the disk size, the region and the CUDA version.
    about = cloud.About(name == "secure", name == "secure", 1000.0, gpu.cuda)
    why = cloud.priceless(offer) or cloud.why_excluded(offer, about, wish, filters)
    if not why and not gpu.there:
        return "not available now"
    return why


def _is_rejected(answer: Answer) -> bool:
    """Return True if RunPod refused to start or stop a pod.

    A missing pod is no refusal, nor is status 409: then another process was faster.
    """
    return answer.status >= 400 and answer.status != 409 and not none(answer)


def _choose_centers(centers: Sequence[str], regions: Sequence[str]) -> list[str]:
    """Return the data centers whose names contain one of `regions`, or all without regions."""
    if not regions:
        return list(centers)
    return [center for center in centers if cloud.is_in_regions(center, regions)]


def _disks(disk: int, volume: int, *, runs: bool) -> float:
    """Return the disk price of a pod in US dollars per hour, for sizes in GB.

    A stopped pod has no disk of its own, and its volume costs twice as much.
    """
    return DISK * (disk + volume) if runs else 2 * DISK * volume


def _price(found: RunpodPod) -> float | None:
    """Return a pod's price in US dollars per hour, disks included.

    None if the price cannot be read.
    """
    if found.price is None:
        return None
    return found.price + _disks(found.disk, found.volume, runs=found.status not in STOPPED)
