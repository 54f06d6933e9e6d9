"""Vast.ai driver: third-party hosts billed by the second, and API replies' meaning for a lease.

A machine's label is set by the request that creates it and holds the lease key, tagged by this
installation, so a lost reply loses no machine.  When its lease expires, a machine destroys or stops
itself with the key that Vast.ai gives every instance.  The account's key never leaves this machine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from . import cloud
from .base import (
    Charge,
    Denied,
    HostLost,
    Lease,
    Market,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Traits,
    Unsure,
    Wish,
)
from .cloud import Filters, Value, harmless, markets
from .ssh import SshHost
from .vastai_wire import Ask, VastaiClient, VastaiInstance, api_key, key_source
from .web import explain_missing_key, number

API: Final = "https://console.vast.ai"
IMAGE: Final = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
EMPTY: Final = ": renting is impossible; add credit at https://cloud.vast.ai/billing/"
SEARCHED: Final = 3000  # offers in one reply
OVER_BID: Final = (
    1.1  # factor above the minimum bid: machines bid at the minimum are preempted at once
)
# Run by the machine itself when its lease expires, with the instance's own key.
_ITSELF: Final = """curl -fsS -m 60 -X {method} -H "Authorization: Bearer $CONTAINER_API_KEY" -H 'Content-Type: application/json' -d '{body}' \
{api}/api/v0/instances/$CONTAINER_ID/ || python3 -c "import os, urllib.request as u
u.urlopen(u.Request('{api}/api/v0/instances/%s/' % os.environ['CONTAINER_ID'], b'{quoted}',
    {{'Authorization': 'Bearer ' + os.environ['CONTAINER_API_KEY'], 'Content-Type': 'application/json'}}, method='{method}'), timeout=60)\""""


class Vastai(cloud.Deadman[VastaiClient]):
    """Driver for Vast.ai machines.

    `api` is the API's address, `image` the container image, `python` the image's Python, `bid` the
    highest spot bid in US dollars per hour.  Every other setting is a filter of offers: see
    `cloud.Filters`.
    """

    provider = "Vast.ai"
    traits = Traits(
        priced=True,
        prolongs=True,
        pauses=True,
        settles=timedelta(seconds=90),
        ends="machine",
        identity="given",
        poll=timedelta(seconds=5),
        comes_up=timedelta(minutes=20),
        images=True,
    )
    console = "https://cloud.vast.ai/instances/"

    def __init__(
        self, *, api: str = "", image: str = IMAGE, python: str = "python3", bid: float = 128.0, installation: str | None = None,
        poll: float = 5.0, settles: float = 90.0, **filters: Value,
    ) -> None:  # fmt: skip
        wire = VastaiClient(api or os.environ.get("VAST_URL") or API)
        super().__init__(
            wire,
            image=image,
            python=python,
            installation=installation,
            poll=poll,
            settles=settles,
            filters=filters,
            let_in=self._attach,
        )
        self._bid = float(bid)
        self._attached: set[str] = set()

    # --- offers

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the matching machines, cheapest first."""
        filters = self._filters.with_more(wish.filters)
        disk = max(8, -(-max(wish.disk or 0, wish.need.disk or 0, cloud.DISK) // 10**9))
        judged: list[tuple[Offer, str]] = []
        for market in markets(wish.need.market):
            for ask in await harmless(self._search(market, disk, filters)):
                offer = self._offer(ask, market, disk)
                why = (
                    cloud.priceless(offer)
                    or _why_unsuited(ask, market, disk, self._bid)
                    or cloud.why_excluded(offer, ask.traits, wish, filters)
                )
                judged.append((offer, why))
        return sorted(
            self._choose_fitting(judged),
            key=lambda offer: (offer.hourly, -(offer.reliability or 0.0), offer.id),
        )

    async def _search(self, market: Market, disk: int, filters: Filters) -> list[Ask]:
        # Without "verified" in the query, Vast.ai shows only verified machines.
        verified = {"eq": True} if filters.verified else {"in": [True, False]}
        kind = "bid" if market == "spot" else "ondemand"
        query = {
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "verified": verified,
            "type": kind,
            "order": [["dph_total", "asc"]],
            "limit": SEARCHED,
            "allocated_storage": disk,
        }
        return await self._wire.search(query)

    def _offer(self, ask: Ask, market: Market, disk: int) -> Offer:
        data = {"disk": str(disk)}
        price, stored = ask.price, (ask.disk_price or 0.0) * disk
        if market == "spot":
            price = ask.least_bid
            if price:
                price = round(min(self._bid, price * OVER_BID), 4)
            data["bid"] = str(price)
        # Without the price of the machine or of its disk, the whole price is unknown, not lower.
        whole = math.nan
        if price and ask.disk_price is not None:
            whole = price + stored
        have = replace(ask.resources, disk=disk * 10**9)
        return Offer(
            "vastai",
            ask.id,
            have,
            price=whole,
            region=ask.region,
            data=data,
            market=market,
            reliability=ask.reliability,
            disk_price=stored,
            egress_price=ask.egress_price,
            longest=ask.longest or None,
            fetched=time.time(),
        )

    # --- leases

    async def acquire(self, order: Order) -> Lease:
        """Rent the offered machine.

        Raises NoCapacity if the offer is taken or its price has risen, Denied if the account lacks
        credit, Unsure if it is unknown whether a machine was rented.
        """
        offer = order.offer
        answer = await self._wire.create(offer.id, self._body(order))
        made = int(number(answer.fields, "new_contract"))
        # Errors hold the lease, too: a reply that looks like an error may have made a machine.
        lease = Lease("vastai", str(made), order.key, self._data) if made else None
        self._agreed[str(made)] = offer.price
        is_accepted = answer.status == 200 and answer.fields.get("success") is not False
        if is_accepted and lease is not None:
            return lease
        if answer.status < 400:
            raise Unsure(
                f"cannot read Vast.ai's reply to the order: {answer.words[:80]}",
                lease=lease,
            )
        if "no_such_ask" in answer.words + answer.code or answer.status == 410:
            raise NoCapacity(f"{offer.id} is no longer offered", lease=lease)
        if answer.code == "invalid_price":
            raise NoCapacity(f"the price of {offer.id} has risen: {answer.words}", lease=lease)
        said = answer.words.lower() + answer.code
        if any(word in said for word in ("credit", "billing", "spend_rate")):
            raise Denied(
                f"Vast.ai does not rent to this account: {answer.words} See https://cloud.vast.ai/billing/",
                lease=lease,
            )
        raise Rejected(f"Vast.ai rejected the order of {offer.id}: {answer.words}", lease=lease)

    def _body(self, order: Order) -> Mapping[str, object]:
        """Return the body of the request that rents a machine."""
        data = order.offer.data
        script = cloud.boot(
            self._installation, order, datetime.now(UTC), _itself(self._wire.web.api, order.keep)
        )
        wanted: dict[str, object] = {
            "client_id": "me",
            "image": order.image or self._image,
            "disk": int(data.get("disk", "32")),
            "label": self._installation.mark(order.key),
            "runtype": "ssh_direc ssh_proxy",
            "onstart": script,
            "env": {},
            "cancel_unavail": True,
            "target_state": "running",
        }
        if "bid" in data:
            wanted["price"] = float(data["bid"])
        return wanted

    async def _open_machine(self, lease: Lease) -> SshHost | None:
        """Connect to the machine once it accepts the login key and the host key matches."""
        found = await self._alive(lease)
        if found.states[:2] != ("running", "running") or found.address is None:
            return None
        self._as_agreed(lease, found.price)
        if lease.id not in self._attached:
            await self._attach(lease)
        return await self._logins.open(lease, "root", *found.address)

    async def release(self, lease: Lease) -> bool:
        """Destroy the machine.  Return True once Vast.ai reports that it no longer exists."""
        await self._logins.end(lease)
        await harmless(self._wire.destroy(lease.id))
        return await harmless(self._wire.show(lease.id)) is None

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped machine.  It stops after its ordered time, unless its lease is prolonged.

        If others use its GPUs meanwhile, Vast.ai still accepts the request, but the machine does
        not start.  Raises HostLost if the machine no longer exists.
        """
        if await self.stands(lease) == "runs":
            return
        if not await harmless(self._wire.become(lease.id, "running")):
            raise HostLost(f"the instance {lease.id} no longer exists at Vast.ai")

    async def stop(self, lease: Lease) -> bool:
        """Stop a machine.  Return True once it is stopped.  Its disk is still billed."""
        await self._logins.end(lease)
        self._attached.discard(lease.id)
        await harmless(self._wire.become(lease.id, "stopped"))
        return await self.stands(lease) != "runs"

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        """Return the machine's status, as Vast.ai reports it."""
        found = await harmless(self._wire.show(lease.id))
        if found is None:
            return "gone"
        return "stopped" if found.is_stopped else "runs"

    async def leases(self) -> Sequence[Lease]:
        found: list[Lease] = []
        for each in await harmless(self._wire.listing()):
            key = self._installation.key(each.label)
            if key is not None:
                found.append(Lease("vastai", each.id, key, self._data, price=each.price or 0.0))
        return found

    async def charges(self, lease: Lease, since: datetime) -> Sequence[Charge]:
        """Return Vast.ai's charges for a lease."""
        mark = self._installation.mark(lease.key)
        found = await harmless(self._wire.charges(since.timestamp()))
        return [charge for label, charge in found if label == mark]

    def find_lack(self) -> str:
        return explain_missing_key(api_key)

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the account as names and texts. Changes nothing."""
        fields = await harmless(self._wire.user())
        credit = number(fields, "credit")
        user = fields.get("username") or fields.get("id")
        shown = f"${credit:.2f}"
        if credit <= 0:
            shown += EMPTY
        return [
            ("account", f"{user}, by the key of {key_source()}"),
            ("credit", shown),
            self._clock(),
        ]

    async def solvent(self) -> None:
        credit = number(await harmless(self._wire.user()), "credit")
        if credit <= 0:
            raise Denied(f"the account at Vast.ai has ${credit:.2f}{EMPTY}")

    # --- one machine

    async def _alive(self, lease: Lease) -> VastaiInstance:
        """Return Vast.ai's record of a machine.

        Raises HostLost if the machine no longer exists, was stopped or cannot start.
        """
        found = await harmless(self._wire.show(lease.id))
        if found is None:
            raise HostLost(f"the instance {lease.id} no longer exists at Vast.ai")
        if found.is_stopped:
            raise HostLost(
                f"the instance {lease.id} was stopped: outbid, or the account has no credit left"
            )
        if found.is_broken:
            raise HostLost(
                f"the instance {lease.id} cannot start: {found.states[0]} {found.said[:200]}".strip()
            )
        return found

    async def _attach(self, lease: Lease) -> None:
        await harmless(
            self._wire.attach(lease.id, cloud.public(self._installation.login(lease.key)))
        )
        self._attached.add(lease.id)


def _itself(api: str, keep: bool) -> str:
    """Return the shell command with which a machine destroys or stops itself."""
    method, body = ("PUT", '{"state":"stopped"}') if keep else ("DELETE", "{}")
    return _ITSELF.format(api=api, method=method, body=body, quoted=body.replace('"', '\\"'))


def _why_unsuited(ask: Ask, market: Market, disk: int, bid: float) -> str:
    """Explain why a machine cannot be rented with `disk` GB or for `bid`.  Empty if it can."""
    if (ask.resources.disk or 0) < disk * 10**9:
        return "too little disk"
    if market == "spot" and (ask.least_bid or 0.0) > bid:
        return "above the highest bid"
    return ""
