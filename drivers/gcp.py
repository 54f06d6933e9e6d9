"""Google Compute Engine driver: GPU instances by zone, and the meaning of API replies for a lease.

The insert request already sets the installation's mark in the instance's name and labels.  Google
itself deletes the instance with its disk when the lease expires.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final, Literal
from uuid import NAMESPACE_URL, uuid5

from . import cloud, gcp_catalog, gcp_prices, gcp_pulumi
from .base import (
    Denied,
    DriverError,
    HostLost,
    Lease,
    Market,
    Need,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unreachable,
    Wish,
    suggest,
)
from .cloud import Filters, Value, harmless, markets
from .gcp_prices import PriceList, Rate
from .gcp_wire import (
    API,
    FULL,
    QUOTAS,
    GcpClient,
    GcpInstance,
    Operation,
    Quota,
    find_lack_of_credentials,
)
from .ssh import SshHost

IMAGE: Final = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580"
USER: Final = "recipe"
LEAST_DISK: Final = 50  # GB: the image alone has this size
MOST_DISK: Final = 65_536  # GB of one disk
CUDA: Final = 13.0  # newest CUDA version that the image's GPU driver supports
ABOUT: Final = cloud.About(verified=True, datacenter=True, inet=10_000.0, cuda=CUDA)
RESTS: Final = 600.0  # seconds for which a zone without capacity is offered last
KNOWN: Final = 3600.0  # seconds for which the GPU types of the zones are cached
LEAST: Final = 30  # seconds: the shortest maxRunDuration
ENDED: Final = (
    "STOPPING",
    "PENDING_STOP",
    "TERMINATED",
    "STOPPED",
    "SUSPENDING",
    "SUSPENDED",
    "DEPROVISIONING",
)
STOPPED: Final = ("TERMINATED", "STOPPED", "SUSPENDED")
"""Statuses of a stopped instance, of which only the disk is billed."""
_METADATA: Final = (
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance"
)
_ASK: Final = "curl -fsS -m 90 -H 'Metadata-Flavor: Google'"
# Google transmits guest attributes from the instance to the API, so no third party can change them.
_ATTEST: Final = (
    """{ask} -X PUT --data-binary '{value}' "{metadata}/guest-attributes/hostkeys/{kind}"\n"""
)
_TOLD: Final = {
    "enable-guest-attributes": "TRUE", "enable-oslogin": "FALSE", "block-project-ssh-keys": "TRUE", "install-nvidia-driver": "True",
}  # fmt: skip
"""Metadata of every instance."""
NOTICE: Final = (
    "/bin/sh",
    "-c",
    f'until [ "$({_ASK} "{_METADATA}/preempted?wait_for_change=true&timeout_sec=60")" = TRUE ]; do sleep 1; done',
)
"""Command that exits on a Spot instance at its preemption notice."""


class Gcp(cloud.RentingDriver[GcpClient]):
    """Driver for Google Compute Engine machines.

    `project` is the billed project, `image` the boot image, `network` the VPC network, `port` the
    SSH port. Every other setting is a filter of offers: see `cloud.Filters`.
    """

    provider = "Google"
    traits = Traits(
        priced=True,
        pauses=True,
        exports=True,
        joins=True,
        settles=timedelta(seconds=30),
        ends="provider",
        identity="attested",
        poll=timedelta(seconds=5),
        comes_up=timedelta(minutes=15),
        notice=NOTICE,
        prices=gcp_prices.SHIPPED.words,
    )
    console = "https://console.cloud.google.com/compute/instances"

    def __init__(
        self, *, api: str = "", project: str = "", image: str = IMAGE, network: str = "global/networks/default", port: int = 0,
        python: str = "python3", installation: str | None = None, poll: float = 5.0, settles: float = 30.0, **filters: Value,
    ) -> None:  # fmt: skip
        wire = GcpClient(
            api or os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE") or API, project
        )
        super().__init__(
            wire,
            image=image,
            python=python,
            installation=installation,
            poll=poll,
            settles=settles,
            filters=filters,
        )
        self._project, self._network = project, network
        self._port = port or int(os.environ.get("GCP_SSH_PORT", "22"))
        self._prices = gcp_catalog.latest(gcp_catalog.file_of(self._installation))
        self.traits = self.traits._replace(prices=self._prices.words)
        _regions(self._prices, self._filters)
        self._accelerators: tuple[float, Mapping[str, set[str]]] = (-KNOWN, {})
        self._empty: dict[str, float] = {}  # time of the last capacity error, by offer

    # --- offers

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the suitable machines by list price. Zones recently out of capacity come last.

        Raises Denied if only quotas prevent an offer.
        """
        filters = _regions(self._prices, self._filters.with_more(wish.filters))
        disk = max(LEAST_DISK, -(-max(wish.disk or 0, wish.need.disk or 0) // 10**9))
        zones = await self._zones()
        judged: list[tuple[Offer, str]] = []
        for offer in self._list_offers(zones, markets(wish.need.market), disk):
            if disk > MOST_DISK:
                why = "disk larger than the maximum"
            else:
                why = cloud.why_excluded(offer, ABOUT, wish, filters)
            judged.append((offer, why))
        fit = [offer for offer, why in judged if not why]
        barred = await self._find_barred(fit)
        found = self._choose_fitting(
            (offer, why or barred.get(offer.id, "")) for offer, why in judged
        )
        if fit and not found:
            reasons = "; ".join(dict.fromkeys(barred.values()))
            raise Denied(f"{reasons}. Ask for more at {self._wire.quotas_page}")
        now = time.monotonic()

        def rank(offer: Offer) -> tuple[bool, float, str]:
            is_resting = now - self._empty.get(offer.id, -RESTS) < RESTS
            return is_resting, offer.hourly, offer.id

        return sorted(found, key=rank)

    def _list_offers(
        self, zones: Mapping[str, set[str]], wanted: Sequence[Market], disk: int
    ) -> list[Offer]:
        found = []
        for zone, gpus in zones.items():
            region = zone.rpartition("-")[0]
            for name, shape in gcp_prices.SHAPES.items():
                if shape.gpu not in gpus:
                    continue
                rate = self._prices.price(region, name)
                if rate is None:
                    continue
                for market in wanted:
                    if market == "on-demand" and shape.spot_only:
                        continue
                    found.append(_offer(zone, name, disk, market, rate))
        return found

    async def _zones(self) -> Mapping[str, set[str]]:
        """Return the GPU types of each zone, for regions with known prices."""
        asked, known = self._accelerators
        if time.monotonic() - asked >= KNOWN:
            every = await harmless(self._wire.accelerators())
            known = {}
            for zone, gpus in sorted(every.items()):
                if zone.rpartition("-")[0] in self._prices.rates:
                    known[zone] = gpus
            self._accelerators = time.monotonic(), known
        return known

    async def _find_barred(self, offers: Sequence[Offer]) -> dict[str, str]:
        """Return the offers that exceed the project's quotas, with reasons.

        Unlisted quotas count as met.
        """
        if not offers:
            return {}
        regions = sorted({offer.region for offer in offers})
        total, *several = await asyncio.gather(
            *(harmless(self._wire.quotas(region)) for region in ("", *regions))
        )
        of_region = dict(zip(regions, several, strict=True))
        found = {}
        for offer in offers:
            metric = gcp_prices.CARDS[gcp_prices.SHAPES[offer.data["shape"]].gpu].metric
            if offer.market == "spot":
                metric = f"PREEMPTIBLE_{metric}"
            wanted = offer.resources.gpus or 0
            quota = of_region[offer.region].get(metric)
            in_region = _short(metric, quota, wanted, f" in {offer.region}")
            everywhere = _short("GPUS_ALL_REGIONS", total.get("GPUS_ALL_REGIONS"), wanted, "")
            # If both quotas are too small, a larger one of the region alone would not help.
            if everywhere or in_region:
                found[offer.id] = everywhere or in_region
        return found

    async def update(self) -> str:
        self._prices = await asyncio.to_thread(
            gcp_catalog.update, gcp_catalog.file_of(self._installation)
        )
        self.traits = self.traits._replace(prices=self._prices.words)
        return self._prices.description

    def program(
        self, name: str, *, market: Market | Literal["any"], keep: bool, seconds: int, bucket: str, nodes: int,
    ) -> str:  # fmt: skip
        zone = self._filters.zone
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", zone):
            raise Rejected(
                'a Pulumi program requires a zone, but the stack has none: set `zone`, for example zone = "us-central1-a"'
            )
        wish = Wish(Need(market=market))
        fit: list[Offer] = []
        for each in self._list_offers({zone: set(gcp_prices.CARDS)}, markets(market), LEAST_DISK):
            if not cloud.why_excluded(each, ABOUT, wish, self._filters):
                fit.append(each)
        if not fit:
            raise Rejected(f"no machine in the {self._prices.words} for {zone} matches the stack")
        offer = min(fit, key=lambda each: (each.hourly, each.id))
        shape = gcp_prices.SHAPES[offer.data["shape"]]
        machine = gcp_pulumi.PulumiMachine(
            name=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "stack",
            project=self._project,
            zone=zone,
            kind=_machine_type(offer),
            image=self._image,
            disk=int(offer.data["disk"]),
            network=self._network,
            port=self._port,
            user=USER,
            spot=offer.market == "spot",
            keep=keep,
            seconds=seconds,
            gpus={shape.gpu: shape.gpus} if shape.attached else {},
            metadata=_TOLD,
            bucket=bucket,
            nodes=nodes,
        )
        return gcp_pulumi.program(machine)

    # --- leases

    async def acquire(self, order: Order) -> Lease:
        """Rent the offered machine.

        Raises NoCapacity if the zone has no capacity, Unsure if it is unknown whether a machine was
        created.
        """
        offer, zone, name = order.offer, order.offer.data["zone"], self._name(order.key)
        lease = Lease("gcp", f"{zone}/{name}", order.key, self._data)
        asked = await self._wire.insert(
            zone, self._body(order), str(uuid5(NAMESPACE_URL, self._installation.mark(order.key)))
        )
        # None: an earlier request, whose reply was lost, made it.
        if asked is None:
            return lease
        if asked.done and not asked.code:
            return lease
        if not asked.done:
            with suppress(DriverError):  # the order was accepted; `hosts` reports its result
                asked = await self._wire.wait(asked)
        if asked.code.startswith((*FULL, *QUOTAS)):
            raise self._full(offer, asked)
        if asked.code:
            raise Rejected(f"Google cannot create {offer.id}: {asked.words}")
        return lease

    def _full(self, offer: Offer, failed: Operation) -> NoCapacity:
        """Mark a zone as out of capacity. Zones that Google suggests instead are unmarked."""
        self._empty[offer.id] = time.monotonic()
        for zone in failed.zones:
            self._empty.pop(offer.id.replace(offer.data["zone"], zone, 1), None)
        some = f"; available in {', '.join(failed.zones)}" if failed.zones else ""
        return NoCapacity(f"{offer.id} is not available: {failed.words or failed.code}{some}")

    def _body(self, order: Order) -> Mapping[str, object]:
        """Return the body of an instance insert request.

        Google deletes the instance with its disk, or stops it, at `until`, even if none of our
        programs runs.
        """
        offer, zone = order.offer, order.offer.data["zone"]
        shape = gcp_prices.SHAPES[offer.data["shape"]]
        metadata = self._metadata(order.key)
        disk = {
            "sourceImage": self._image,
            "diskSizeGb": offer.data["disk"],
            "diskType": f"zones/{zone}/diskTypes/pd-balanced",
        }
        seconds = max(LEAST, int(order.until.timestamp() - time.time()))
        model = "SPOT" if offer.market == "spot" else "STANDARD"
        action = "STOP" if order.keep else "DELETE"
        scheduling = {
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
            "provisioningModel": model,
            "instanceTerminationAction": action,
            "maxRunDuration": {"seconds": str(seconds)},
        }
        access = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
        body: dict[str, object] = {
            "name": self._name(order.key),
            "machineType": f"zones/{zone}/machineTypes/{_machine_type(offer)}",
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
            "networkInterfaces": [{"network": self._network, "accessConfigs": access}],
        }
        if shape.attached:
            gpu = f"zones/{zone}/acceleratorTypes/{shape.gpu}"
            body["guestAccelerators"] = [{"acceleratorType": gpu, "acceleratorCount": shape.gpus}]
        return body | {
            "metadata": {"items": metadata},
            "labels": {"recipe": self._installation.name},
            "tags": {"items": [self._installation.mark("machine")]},
            "scheduling": scheduling,
        }

    def _metadata(self, key: str) -> list[Mapping[str, str]]:
        """Return the metadata of a lease's instance, with its boot script and our login key."""
        kind, value = cloud.public(self._installation.host_key(key)).split()[:2]
        script = cloud.prove(self._installation, key) + _ATTEST.format(
            ask=_ASK, value=value, metadata=_METADATA, kind=kind
        )
        items = {
            "recipe-key": key,
            "startup-script": f"#!/bin/sh\n{script}",
            **_TOLD,
            "ssh-keys": f"{USER}:{cloud.public(self._installation.login(key))}",
        }
        return [{"key": name, "value": text} for name, text in items.items()]

    def _name(self, key: str) -> str:
        """Return the instance name of a lease, which includes this installation's tag."""
        mark = self._installation.mark(key)
        if re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", mark):
            return mark
        return self._installation.mark(
            hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        )

    async def _open_machine(self, lease: Lease) -> SshHost | None:
        """Return the machine once login works and its attested host key is ours, or None."""
        found = await self._alive(lease)
        if found.status != "RUNNING" or not found.address:
            return None
        ours = " ".join(cloud.public(self._installation.host_key(lease.key)).split()[:2])
        if ours not in await harmless(self._wire.host_keys(*_place(lease))):
            return None
        host = await self._logins.open(lease, USER, found.address, self._port)
        if host is not None:
            host.address = found.internal
        return host

    async def release(self, lease: Lease) -> bool:
        """Delete the machine. Return True once Google reports that it no longer exists."""
        await self._logins.end(lease)
        asked = await harmless(self._wire.delete(*_place(lease)))
        if asked is not None and not asked.done:
            await harmless(self._wire.wait(asked))
        return await harmless(self._wire.show(*_place(lease))) is None

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped machine. Google stops it at `until`.

        Raises NoCapacity if its zone has no capacity, HostLost if the machine no longer exists.
        """
        found = await harmless(self._wire.show(*_place(lease)))
        gone = f"the instance {lease.id} no longer exists at Google"
        if found is None:
            raise HostLost(gone)
        if found.status not in ENDED:
            return
        if found.status not in STOPPED:
            raise Unreachable(f"the instance {lease.id} is {found.status}")
        seconds = max(LEAST, int(until.timestamp() - time.time()))
        asked = await harmless(self._wire.start(*_place(lease), seconds))
        if asked is None:
            raise HostLost(gone)
        if not asked.done:
            asked = await harmless(self._wire.wait(asked))
        if asked.code.startswith((*FULL, *QUOTAS)):
            raise NoCapacity(f"{lease.id}: {asked.words or asked.code}")
        if asked.code:
            raise Rejected(f"Google cannot start {lease.id}: {asked.words}")

    async def stop(self, lease: Lease) -> bool:
        """Stop a machine. Return True once Google reports it stopped. Its disk is still billed."""
        await self._logins.end(lease)
        if await self.stands(lease) == "runs":
            asked = await harmless(self._wire.stop(*_place(lease)))
            if asked is not None and not asked.done:
                await harmless(self._wire.wait(asked))
        return await self.stands(lease) != "runs"

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        """Return the machine's status, as Google reports it."""
        found = await harmless(self._wire.show(*_place(lease)))
        if found is None:
            return "gone"
        return "stopped" if found.status in STOPPED else "runs"

    async def leases(self) -> Sequence[Lease]:
        ours = self._installation.name
        found: list[Lease] = []
        for each in await harmless(self._wire.listing(f"labels.recipe={ours}")):
            if each.labels.get("recipe") != ours:
                continue
            # The name holds a hash of the key if Google does not allow the key itself in a name.
            key = each.items.get("recipe-key") or self._installation.key(each.name)
            if key is not None:
                id, price = f"{each.zone}/{each.name}", _price(self._prices, each)
                found.append(Lease("gcp", id, key, self._data, price=price))
        return found

    async def ensure(self) -> Sequence[str]:
        """Create a firewall rule that allows SSH to machines of this installation, if missing."""
        name = self._installation.mark("ssh")
        if await harmless(self._wire.rule(name)):
            return []
        made = await harmless(
            self._wire.make_rule(
                name, self._network, self._installation.mark("machine"), self._port
            )
        )
        return [f"the firewall rule {name}"] if made else []

    async def drop(self) -> Sequence[str]:
        name = self._installation.mark("ssh")
        if not await harmless(self._wire.rule(name)):
            return []
        left = await self.leases()
        if left:
            return [f"kept the firewall rule {name}: {len(left)} other machine(s) use it"]
        if not await harmless(self._wire.drop_rule(name)):
            return []
        return [f"deleted the firewall rule {name}"]

    def find_lack(self) -> str:
        return find_lack_of_credentials()

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the account as names and texts. Changes nothing."""
        project = await self._wire.project()
        total = (await harmless(self._wire.quotas())).get("GPUS_ALL_REGIONS")
        quota = "not listed"
        if total is not None:
            quota = f"{total.usage:g} of {total.limit:g} GPUs in all regions"
            if not total.limit:
                quota += f": renting is impossible; request a quota at {self._wire.quotas_page}"
        return [
            ("account", f"the project {project}, by {self._wire.source}"),
            ("quota", quota),
            ("prices", self._prices.description),
            self._clock(),
        ]

    async def solvent(self) -> None:
        """Do nothing: Google reports missing billing only when a machine is ordered."""

    async def _alive(self, lease: Lease) -> GcpInstance:
        """Return Google's record of a machine. Raises HostLost if it is lost or cannot start."""
        found = await harmless(self._wire.show(*_place(lease)))
        if found is not None and found.status not in ENDED:
            return found
        taken = False
        with suppress(DriverError):
            taken = await self._wire.was_preempted(*_place(lease))
        if taken:
            raise HostLost(f"Google preempted the spot machine {lease.id}")
        if found is None:
            raise HostLost(f"the instance {lease.id} no longer exists at Google")
        raise HostLost(f"the instance {lease.id} was stopped")


def _place(lease: Lease) -> tuple[str, str]:
    """Return the zone and the instance name of a lease."""
    zone, _, name = lease.id.partition("/")
    return zone, name


def _regions(prices: PriceList, filters: Filters) -> Filters:
    """Return the filters if all their regions have known prices. Raises NoCapacity otherwise."""
    for asked in filters.regions:
        if not any(asked.lower() in known for known in prices.rates):
            raise NoCapacity(f'no prices for the region "{asked}"{suggest(asked, prices.rates)}')
    return filters


def _price(prices: PriceList, made: GcpInstance) -> float:
    """Return a machine's list price in US dollars per hour, or 0 if unknown."""
    rate = prices.price(made.zone.rpartition("-")[0], made.kind)
    if rate is None:
        return 0.0
    price = rate.spot if made.spot else rate.on_demand
    return round(price + made.disk * gcp_prices.DISK, 5)


def _offer(zone: str, name: str, disk: int, market: Market, rate: Rate) -> Offer:
    """Return the offer of a machine shape with `disk` GB in a zone."""
    stored = gcp_prices.DISK * disk
    id, price = f"{zone}/{name}", rate.on_demand
    if market == "spot":
        id, price = f"{id}/spot", rate.spot
    return Offer(
        "gcp",
        id,
        _resources(name, disk),
        price=round(price + stored, 5),
        region=zone.rpartition("-")[0],
        data={"zone": zone, "shape": name, "disk": str(disk)},
        market=market,
        disk_price=stored,
        egress_price=gcp_prices.EGRESS,
        fetched=time.time(),
    )


def _machine_type(offer: Offer) -> str:
    """Return Google's machine type of an offer, without the GPUs that are requested separately."""
    return offer.data["shape"].partition("+")[0]


def _resources(name: str, disk: int) -> Resources:
    shape = gcp_prices.SHAPES[name]
    card = gcp_prices.CARDS[shape.gpu]
    return Resources(
        float(shape.cpus),
        shape.memory << 20,
        shape.gpus,
        card.name,
        card.memory << 20,
        disk * 10**9,
    )


def _short(name: str, quota: Quota | None, wanted: int, where: str) -> str:
    """Explain why a quota does not allow `wanted` more GPUs, or return "" if it does."""
    if quota is None or quota.limit - quota.usage >= wanted:
        return ""
    short = f"the quota {name} is {quota.limit:g}{where}"
    if quota.usage:
        short += f", of which {quota.usage:g} are used"
    return short
