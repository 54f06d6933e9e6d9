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
from .gcp_prices import PriceList
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
        judged = [
            (
                offer,
                "disk larger than the maximum"
                if disk > MOST_DISK
                else cloud.why_excluded(offer, ABOUT, wish, filters),
            )
            for offer in self._list_offers(await self._zones(), markets(wish.need.market), disk)
        ]
        fit = [offer for offer, why in judged if not why]
        barred = await self._find_barred(fit)
        found = self._choose_fitting(
            (offer, why or barred.get(offer.id, "")) for offer, why in judged
        )
        if fit and not found:
            raise Denied(
                f"{'; '.join(dict.fromkeys(barred.values()))}. Ask for more at {self._wire.quotas_page}"
            )
        now = time.monotonic()
        return sorted(
            found,
            key=lambda offer: (
                now - self._empty.get(offer.id, -RESTS) < RESTS,
                offer.hourly,
                offer.id,
            ),
        )

    def _list_offers(
        self, zones: Mapping[str, set[str]], wanted: Sequence[Market], disk: int
    ) -> list[Offer]:
        found = []
        for zone, gpus in zones.items():
            region = zone.rpartition("-")[0]
            for name, shape in gcp_prices.SHAPES.items():
                rate = self._prices.price(region, name) if shape.gpu in gpus else None
                if rate is None:
                    continue
                have, stored = _resources(name, disk), gcp_prices.DISK * disk
                for market in wanted:
                    price = rate.spot if market == "spot" else rate.on_demand
                    if market == "on-demand" and shape.spot_only:
                        continue
                    data = {"zone": zone, "shape": name, "disk": str(disk)}
                    found.append(Offer(
                        "gcp", f"{zone}/{name}{'/spot' * (market == 'spot')}", have, price=round(price + stored, 5), region=region, data=data,
                        market=market, disk_price=stored, egress_price=gcp_prices.EGRESS, fetched=time.time(),
                    ))  # fmt: skip
        return found

    async def _zones(self) -> Mapping[str, set[str]]:
        """Return the GPU types of each zone, for regions with known prices."""
        asked, known = self._accelerators
        if time.monotonic() - asked >= KNOWN:
            every = await harmless(self._wire.accelerators())
            known = {
                zone: gpus
                for zone, gpus in sorted(every.items())
                if zone.rpartition("-")[0] in self._prices.rates
            }
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
            metric = f"{'PREEMPTIBLE_' * (offer.market == 'spot')}{gcp_prices.CARDS[gcp_prices.SHAPES[offer.data['shape']].gpu].metric}"
            wanted = offer.resources.gpus or 0
            for name, quotas, where in (
                (metric, of_region[offer.region], f" in {offer.region}"),
                ("GPUS_ALL_REGIONS", total, ""),
            ):
                if short := _short(name, quotas.get(name), wanted, where):
                    found[offer.id] = short
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
        wish, listed = (
            Wish(Need(market=market)),
            self._list_offers({zone: set(gcp_prices.CARDS)}, markets(market), LEAST_DISK),
        )
        fit = [
            offer for offer in listed if not cloud.why_excluded(offer, ABOUT, wish, self._filters)
        ]
        if not fit:
            raise Rejected(f"no machine in the {self._prices.words} for {zone} matches the stack")
        offer = min(fit, key=lambda each: (each.hourly, each.id))
        shape, kind = gcp_prices.SHAPES[offer.data["shape"]], offer.data["shape"].partition("+")[0]
        own = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "stack"
        return gcp_pulumi.program(gcp_pulumi.PulumiMachine(
            own, self._project, zone, kind, self._image, int(offer.data["disk"]), self._network, self._port, USER, offer.market == "spot", keep,
            seconds, {shape.gpu: shape.gpus} if shape.attached else {}, _TOLD, bucket, nodes,
        ))  # fmt: skip

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
        if asked is None or (asked.done and not asked.code):
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
        host_key = cloud.public(self._installation.host_key(order.key))
        kind, value = host_key.split()[:2]
        script = cloud.prove(self._installation, order.key) + _ATTEST.format(
            ask=_ASK, value=value, metadata=_METADATA, kind=kind
        )
        items = {
            "recipe-key": order.key, "startup-script": f"#!/bin/sh\n{script}", **_TOLD,
            "ssh-keys": f"{USER}:{cloud.public(self._installation.login(order.key))}",
        }  # fmt: skip
        attached = (
            [
                {
                    "acceleratorType": f"zones/{zone}/acceleratorTypes/{shape.gpu}",
                    "acceleratorCount": shape.gpus,
                }
            ]
            if shape.attached
            else []
        )
        disk = {
            "sourceImage": self._image,
            "diskSizeGb": offer.data["disk"],
            "diskType": f"zones/{zone}/diskTypes/pd-balanced",
        }
        seconds = max(LEAST, int(order.until.timestamp() - time.time()))
        return {
            "name": self._name(order.key),
            "machineType": f"zones/{zone}/machineTypes/{offer.data['shape'].partition('+')[0]}",
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
            "networkInterfaces": [
                {
                    "network": self._network,
                    "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}],
                }
            ],
            **({"guestAccelerators": attached} if attached else {}),
            "metadata": {"items": [{"key": key, "value": value} for key, value in items.items()]},
            "labels": {"recipe": self._installation.name},
            "tags": {"items": [self._installation.mark("machine")]},
            "scheduling": {
                "onHostMaintenance": "TERMINATE",
                "automaticRestart": False,
                "provisioningModel": "SPOT" if offer.market == "spot" else "STANDARD",
                "instanceTerminationAction": "STOP" if order.keep else "DELETE",
                "maxRunDuration": {"seconds": str(seconds)},
            },
        }

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
        if (
            asked := await harmless(self._wire.delete(*_place(lease)))
        ) is not None and not asked.done:
            await harmless(self._wire.wait(asked))
        return await harmless(self._wire.show(*_place(lease))) is None

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped machine. Google stops it at `until`.

        Raises NoCapacity if its zone has no capacity, HostLost if the machine no longer exists.
        """
        found = await harmless(self._wire.show(*_place(lease)))
        if found is not None and found.status not in ENDED:
            return
        if found is not None and found.status not in STOPPED:
            raise Unreachable(f"the instance {lease.id} is {found.status}")
        seconds = max(LEAST, int(until.timestamp() - time.time()))
        asked = (
            await harmless(self._wire.start(*_place(lease), seconds)) if found is not None else None
        )
        if asked is None:
            raise HostLost(f"the instance {lease.id} no longer exists at Google")
        if not asked.done:
            asked = await harmless(self._wire.wait(asked))
        if asked.code.startswith((*FULL, *QUOTAS)):
            raise NoCapacity(f"{lease.id}: {asked.words or asked.code}")
        if asked.code:
            raise Rejected(f"Google cannot start {lease.id}: {asked.words}")

    async def stop(self, lease: Lease) -> bool:
        """Stop a machine. Return True once Google reports it stopped. Its disk is still billed."""
        await self._logins.end(lease)
        asked = (
            await harmless(self._wire.stop(*_place(lease)))
            if await self.stands(lease) == "runs"
            else None
        )
        if asked is not None and not asked.done:
            await harmless(self._wire.wait(asked))
        return await self.stands(lease) != "runs"

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        """Return the machine's status, as Google reports it."""
        found = await harmless(self._wire.show(*_place(lease)))
        return "gone" if found is None else "stopped" if found.status in STOPPED else "runs"

    async def leases(self) -> Sequence[Lease]:
        ours = self._installation.name
        found = await harmless(self._wire.listing(f"labels.recipe={ours}"))
        return [
            Lease(
                "gcp", f"{each.zone}/{each.name}", key, self._data, price=_price(self._prices, each)
            )
            for each in found
            if each.labels.get("recipe") == ours
            and (key := each.items.get("recipe-key") or self._installation.key(each.name))
            is not None
        ]

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
        if left := await self.leases():
            return [f"kept the firewall rule {name}: {len(left)} other machine(s) use it"]
        return (
            [f"deleted the firewall rule {name}"]
            if await harmless(self._wire.drop_rule(name))
            else []
        )

    def find_lack(self) -> str:
        return find_lack_of_credentials()

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the account as names and texts. Changes nothing."""
        project = await self._wire.project()
        total = (await harmless(self._wire.quotas())).get("GPUS_ALL_REGIONS")
        none = f": renting is impossible; request a quota at {self._wire.quotas_page}"
        quota = (
            "not listed"
            if total is None
            else f"{total.usage:g} of {total.limit:g} GPUs in all regions{'' if total.limit else none}"
        )
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
        raise HostLost(
            f"the instance {lease.id} no longer exists at Google"
            if found is None
            else f"the instance {lease.id} was stopped"
        )


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
    return (
        0.0
        if rate is None
        else round((rate.spot if made.spot else rate.on_demand) + made.disk * gcp_prices.DISK, 5)
    )


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
    return f"the quota {name} is {quota.limit:g}{where}" + (
        f", of which {quota.usage:g} are used" if quota.usage else ""
    )
