"""Prime Intellect driver: pods of many providers through one account, and the meaning of API
replies for a lease.

The create request already names the pod with the installation's mark, so a lost reply loses no pod.
Prime has no boot scripts.  A pod's host key is therefore trusted on first use, and no timer ends a
pod if recipe dies.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import asyncssh

from . import cloud
from .base import (
    Charge,
    Denied,
    HostLost,
    Lease,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Traits,
    Unsure,
    Wish,
)
from .cloud import Value, harmless, markets
from .prime_wire import (
    FULL,
    PrimeClient,
    PrimeOffer,
    PrimePod,
    api_key,
    config,
    key_source,
    pod,
    words,
)
from .ssh import SshHost
from .web import explain_missing_key

API: Final = "https://api.primeintellect.ai"
IMAGE: Final = "ubuntu_22_cuda_12"
ENDED: Final = ("STOPPED", "ERROR", "DELETING", "TERMINATED")
REPEATED: Final = ("cloudId", "gpuType", "socket", "country", "security")
"""Fields of an offer that its order repeats as they are."""
PATIENCE: Final = 20.0  # seconds in which a pod must show its host key
EMPTY: Final = (
    ": renting is impossible; add credit at https://app.primeintellect.ai/dashboard/billing"
)
FIRST_USE: Final = (
    "Prime Intellect publishes no SSH host keys of its pods, so recipe must trust the first host key that a pod shows. To rent there, set "
    "`first_use = true` below [drivers.prime]. An attacker who intercepts the first connection can read all data of the step, including secrets"
)


class Prime(cloud.RentingDriver[PrimeClient]):
    """Driver for Prime Intellect pods.

    `api` is the API's address, `image` the pods' image, `team` the billed team, `key` the path of a
    private SSH key. Every other setting is a filter of offers: see `cloud.Filters`.
    """

    provider = "Prime"
    traits = Traits(
        priced=True,
        settles=timedelta(seconds=60),
        ends="nothing",
        identity="first_use",
        poll=timedelta(seconds=10),
        comes_up=timedelta(minutes=30),
        images=True,
    )
    console = "https://app.primeintellect.ai/dashboard/instances"

    def __init__(
        self, *, api: str = "", image: str = IMAGE, python: str = "python3", team: str = "", key: str = "", first_use: bool = False,
        installation: str | None = None, poll: float = 10.0, settles: float = 60.0, **filters: Value,
    ) -> None:  # fmt: skip
        address = api or os.environ.get("PRIME_API_BASE_URL") or os.environ.get("PRIME_BASE_URL")
        payer = team or os.environ.get("PRIME_TEAM_ID") or config("team_id")
        wire = PrimeClient(address or config("base_url") or API, payer)
        self._key = Path(os.path.expanduser(key or config("ssh_key_path") or "~/.ssh/id_rsa"))
        super().__init__(
            wire,
            image=image,
            python=python,
            installation=installation,
            poll=poll,
            settles=settles,
            filters=filters,
        )
        self._first_use = first_use

    # --- offers

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the suitable pods, cheapest first."""
        filters = self._filters.with_more(wish.filters)
        disk = -(-max(wish.disk or 0, wish.need.disk or 0, cloud.DISK) // 10**9)
        judged: list[tuple[Offer, str]] = []
        wanted = markets(wish.need.market)
        for ask in await harmless(self._wire.search(disk)):
            offer = _offer(ask)
            if ask.market not in wanted:
                why = "on another market"
            else:
                # The CUDA version of a pod is unknown before it starts.
                about = cloud.About(ask.secure, ask.secure, ask.inet, 0.0)
                why = (
                    cloud.priceless(offer)
                    or cloud.why_excluded(offer, about, wish, filters)
                    or _why_unsuited(ask, disk, wish.need.image or self._image)
                )
            judged.append((offer, why))
        return sorted(self._choose_fitting(judged), key=lambda offer: (offer.hourly, offer.id))

    # --- leases

    async def acquire(self, order: Order) -> Lease:
        """Rent the offered pod.

        Raises NoCapacity if it is no longer available or has become more expensive, Unsure if it is
        unknown whether a pod was created.
        """
        await self.solvent()
        offer = order.offer
        answer = await self._wire.create(self._body(order))
        said = words(answer)
        if _is_sold_out(answer.status, said):
            raise NoCapacity(f"{offer.id} is not available: {said}")
        if answer.status >= 400:
            raise Rejected(f"Prime rejected the order of {offer.id}: {said}")
        try:
            made = pod(answer.fields)
        except Unsure as error:
            raise Unsure(f"cannot read Prime's reply to the order: {answer.words[:80]}") from error
        self._agreed[made.id] = offer.price
        return Lease("prime", made.id, order.key, self._data)

    def _body(self, order: Order) -> Mapping[str, object]:
        """Return the body of the request that creates a pod."""
        offer = order.offer
        wanted: dict[str, object] = {"name": self._installation.mark(order.key)}
        wanted |= {name: offer.data[name] for name in REPEATED if offer.data[name]}
        wanted |= {
            "gpuCount": offer.resources.gpus,
            "image": order.image or self._image,
            "diskSize": int(offer.data["disk"]),
            "maxPrice": round(offer.price * cloud.RISE, 4),
            "autoRestart": False,
        }
        if offer.data["dataCenter"]:
            wanted["dataCenterId"] = offer.data["dataCenter"]
        team = {"teamId": self._wire.team} if self._wire.team else None
        provider = {"type": offer.data["provider"]}
        return {"pod": wanted, "provider": provider, "disks": [], "team": team}

    async def _open_machine(self, lease: Lease) -> SshHost | None:
        """Return the pod's Host once login works with the host key that it showed first, or None."""
        found = await self._alive(lease)
        if found.status != "ACTIVE" or not found.ready or found.login is None:
            return None
        self._as_agreed(lease, found.price)
        user, name, port = found.login
        trust = await self._host_key_of(lease, name, port)
        if trust is None:
            return None
        return await self._logins.open(lease, user, name, port, trust=trust, login=self._private())

    async def _host_key_of(self, lease: Lease, name: str, port: int) -> str | None:
        """Return the host key that a pod showed first, or None while it shows none.

        The first key counts, whichever process of this installation saw it.
        """
        known = self._installation.first_seen(lease.key)
        if known.exists():
            return known.read_text("ascii")
        try:
            async with asyncio.timeout(PATIENCE):
                shown = await asyncssh.get_server_host_key(name, port, config=None)
        except (OSError, asyncssh.Error):  # TimeoutError is an OSError
            return None
        if shown is None:
            return None
        return self._installation.believe(lease.key, shown.export_public_key().decode())

    async def release(self, lease: Lease) -> bool:
        """Delete the pod. Return True once neither its address nor the complete list shows it."""
        await self._logins.end(lease)
        await harmless(self._wire.destroy(lease.id))
        found = await harmless(self._wire.show(lease.id))
        if found is not None and found.status != "TERMINATED":
            return False
        # Any unknown address gets a 404, so only the list proves that the pod is gone.
        for each in await harmless(self._wire.listing()):
            if each.id == lease.id and each.status != "TERMINATED":
                return False
        self._installation.first_seen(lease.key).unlink(missing_ok=True)
        return True

    async def leases(self) -> Sequence[Lease]:
        found: list[Lease] = []
        for each in await harmless(self._wire.listing()):
            if each.status == "TERMINATED":
                continue
            key = self._installation.key(each.name)
            if key is not None:
                found.append(Lease("prime", each.id, key, self._data, price=each.price or 0.0))
        return found

    async def charges(self, lease: Lease, since: datetime) -> Sequence[Charge]:
        """Return Prime's charges for an ended lease."""
        return [charge for id, charge in await harmless(self._wire.history()) if id == lease.id]

    def find_lack(self) -> str:
        return explain_missing_key(api_key)

    async def account(self) -> Sequence[tuple[str, str]]:
        """Describe the account as names and texts. Changes nothing."""
        balance = await harmless(self._wire.balance())
        usable = not await self.unusable()
        account = f"by the key of {key_source()}"
        if self._wire.team:
            account += f", team {self._wire.team}"
        credit = f"${balance:.2f}"
        if balance <= 0:
            credit += EMPTY
        lines = [("account", account), ("credit", credit)]
        if usable:
            lines.append(("login", f"{self._key}, which the account has"))
        lines.append(("host keys", "trusted on first use" if self._first_use else FIRST_USE))
        lines.append(self._clock())
        return lines

    async def unusable(self) -> Sequence[tuple[str, str]]:
        try:
            await self._let_in()
        except Denied as error:
            return [("login", str(error))]
        return ()

    async def solvent(self) -> None:
        """Raise Denied if nothing can be rented.

        Reasons are missing consent to first-use host keys, an SSH key that opens no pod, and
        missing credit.
        """
        if not self._first_use:
            raise Denied(FIRST_USE)
        await self._let_in()
        balance = await harmless(self._wire.balance())
        if balance <= 0:
            raise Denied(f"the account at Prime has ${balance:.2f}{EMPTY}")

    async def _let_in(self) -> None:
        """Raise Denied if the account lacks our SSH key, without which pods allow no login."""
        ours = " ".join(cloud.public(self._private()).split()[:2])
        if ours not in await harmless(self._wire.keys()):
            raise Denied(
                f"the account at Prime has no SSH key {self._key}; add its public key at https://app.primeintellect.ai/dashboard/profile"
            )

    def _private(self) -> bytes:
        try:
            found = self._key.read_bytes()
            asyncssh.import_private_key(found)
        except (OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise Denied(
                f"cannot use the SSH key {self._key}: {error}; set another `key` in `[drivers.prime]`"
            ) from error
        return found

    async def _alive(self, lease: Lease) -> PrimePod:
        """Return Prime's record of a pod.

        Raises HostLost if it no longer exists or cannot start.
        """
        found = await harmless(self._wire.show(lease.id))
        if found is None:
            raise HostLost(f"the pod {lease.id} no longer exists at Prime")
        if found.status in ENDED or found.failure:
            raise HostLost(f"the pod {lease.id} is not running: {found.failure or found.status}")
        return found


_FULL: Final = tuple(word.replace(" ", "") for word in FULL)


def _is_sold_out(status: int, said: str) -> bool:
    """Return True if Prime's reply to an order means that this offer cannot be had."""
    if status == 404:
        return True
    if status not in (400, 409):
        return False
    # Prime writes these errors as codes or as sentences: NO_CAPACITY, "no capacity".
    squeezed = said.lower().replace(" ", "")
    return any(word in squeezed for word in _FULL)


def _offer(ask: PrimeOffer) -> Offer:
    return Offer(
        "prime",
        ask.id,
        ask.resources,
        price=math.nan if ask.price is None else round(ask.price, 5),
        region=ask.region,
        data={**ask.order, "disk": str(ask.disk)},
        market=ask.market,
        disk_price=ask.disk_price,
        fetched=time.time(),
    )


def _why_unsuited(ask: PrimeOffer, disk: int, image: str) -> str:
    """Explain why an offer has no `image`, no free pod or fewer than `disk` GB, or return ""."""
    if ask.images and image not in ask.images:
        return f"without the image {image}"
    if not ask.there:
        return "not available now"
    if (ask.resources.disk or 0) < disk * 10**9:
        return "too little disk"
    return ""
