"""Prime Intellect as a World: offers of many providers, pods, their history, and a wallet."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final, NamedTuple

from .account import Machine
from .world import (
    Boot,
    Call,
    Document,
    Part,
    Refused,
    Reply,
    Route,
    World,
    date,
    document,
    number,
    parse_digits,
)

GPUS: Final = (  # type, socket, GB, $/h for one
    ("RTX4090_24GB", "PCIe", 24, 0.37),
    ("L40S_48GB", "PCIe", 48, 0.79),
    ("A100_80GB", "SXM4", 80, 1.25),
    ("H100_80GB", "SXM5", 80, 2.15),
    ("H200_141GB", "SXM5", 141, 2.85),
    ("B200_180GB", "SXM6", 180, 4.99),
)
PROVIDERS: Final = ("hyperstack", "datacrunch", "runpod", "lambdalabs", "massedcompute")
PLACES: Final = (("US-1", "US"), ("CANADA-1", "CA"), ("FIN-02", "FI"), ("NORWAY-1", "NO"))
IMAGES: Final = ("ubuntu_22_cuda_12", "cuda_12_6_pytorch_2_7")
NEEDED: Final = ("cloudId", "gpuType", "socket", "gpuCount")
PAGE: Final = 100
FOREIGN: Final = "somebody"
"""Owner of the machines that exist from the start (fault `foreign`).  These accept no logins."""


class Offer(NamedTuple):
    """A GPU offer of a provider behind Prime.

    `stock` is the number of such pods for rent, `price` US dollars per hour for all GPUs of one.
    """

    cloud: str
    gpu: str
    socket: str
    memory: int
    gpus: int
    price: float
    provider: str
    center: str
    country: str
    secure: bool
    spot: bool
    nodes: int
    stock: int


@dataclass(kw_only=True)
class Pod(Machine):
    offer: Offer
    body: Document
    count: int
    price: float
    status: str = "PROVISIONING"
    progress: int = 0
    failure: str | None = None


class Offers(Part["Prime"]):
    """GPU offers of the providers behind Prime."""

    def __init__(self, world: Prime) -> None:
        super().__init__(world)
        luck = Random(f"{world.seed}/market")
        self.market = [_offer(luck, n) for n in range(40)]
        self.market[0] = self.market[0]._replace(stock=16, nodes=1, spot=False)

    def left(self, offer: Offer) -> int:
        taken = sum(pod.offer.cloud == offer.cloud for pod in self._world.account.alive())
        return offer.stock - taken

    def find(self, cloud: object, gpu: object, count: int) -> Offer | None:
        for offer in self.market:
            if (offer.cloud, offer.gpu, offer.gpus) == (cloud, gpu, count):
                return offer
        return None

    def offers(self, call: Call) -> Reply:
        return self._page(call, [offer for offer in self.market if offer.nodes == 1])

    def clusters(self, call: Call) -> Reply:
        return self._page(call, [offer for offer in self.market if offer.nodes > 1])

    def _page(self, call: Call, rows: list[Offer]) -> Reply:
        count, kind = call.query.get("gpu_count"), call.query.get("gpu_type")
        kept = rows
        if count is not None:
            kept = [offer for offer in kept if count == str(offer.gpus)]
        if kind is not None:
            kept = [offer for offer in kept if kind == offer.gpu]
        size = _whole(call.query.get("page_size", ""), PAGE)
        page = _whole(call.query.get("page", ""), 1)
        if not 1 <= size <= PAGE or page < 1:
            return self._world.unfit(["query", "page_size"], f"Input should be from 1 to {PAGE}")
        items: list[Document] = []
        for offer in kept[(page - 1) * size : page * size]:
            shown = self._show_offer(offer)
            items.append({**shown, "prices": _distort_prices(document(shown["prices"]), call)})
        return Reply(200, {"items": items, "totalCount": len(kept)})

    def _show_offer(self, offer: Offer) -> Document:
        units = {
            "pricePerUnit": 0.0,
            "step": 1,
            "defaultIncludedInPrice": True,
            "additionalInfo": None,
        }
        on_demand, community = (offer.price, None) if offer.secure else (None, offer.price)
        prices = {
            "onDemand": on_demand,
            "communityPrice": community,
            "isVariable": False,
            "currency": "USD",
        }
        security = "secure_cloud" if offer.secure else "community_cloud"
        return {
            "cloudId": offer.cloud, "gpuType": offer.gpu, "socket": offer.socket, "provider": offer.provider, "dataCenter": offer.center,
            "country": offer.country, "gpuCount": offer.gpus, "gpuMemory": offer.memory, "internetSpeed": 1000.0, "interconnect": None,
            "disk": {"minCount": 80, "defaultCount": 250, "maxCount": 1000, **units}, "interconnectType": None, "provisioningTime": 5,
            "vcpu": {"minCount": None, "defaultCount": 16 * offer.gpus, "maxCount": None, **units},
            "memory": {"minCount": None, "defaultCount": 64 * offer.gpus, "maxCount": None, **units},
            "stockStatus": _describe_stock(self.left(offer)),
            "security": security, "images": list(IMAGES), "isSpot": offer.spot, "prepaidTime": None,
            "prices": prices,
        }  # fmt: skip

    def summary(self, call: Call) -> Reply:
        shown: dict[str, list[Document]] = {}
        for offer in self.market:
            shown.setdefault(offer.gpu, []).append(self._show_offer(offer))
        return Reply(200, shown)


def _distort_prices(prices: Document, call: Call) -> Document:
    """Return prices as the faults of a request show them."""
    shown = dict(prices)
    for name, usd in prices.items():
        if isinstance(usd, float):
            shown[name] = call.luck.price(usd)
    return shown


def _describe_stock(left: int) -> str:
    if left <= 0:
        return "Unavailable"
    if left < 3:
        return "Low"
    return "Medium" if left < 8 else "High"


class Prime(World[Pod]):
    """Fake Prime Intellect with one account."""

    routes: ClassVar = (
        Route("GET", "/api/v1/availability/gpus", "offers", 1.0),
        Route("GET", "/api/v1/availability/multi-node", "clusters", 1.0),
        Route("GET", "/api/v1/availability/gpu-summary", "summary", 1.0),
        Route("POST", "/api/v1/pods", "create", 1.0),
        Route("GET", "/api/v1/pods", "listing", 1.0),
        Route("GET", "/api/v1/pods/status", "status", 1.0),
        Route("GET", "/api/v1/pods/history", "history", 1.0),
        Route("GET", "/api/v1/pods/{id}", "show", 1.0),
        Route("DELETE", "/api/v1/pods/{id}", "destroy", 1.0),
        Route("GET", "/api/v1/ssh_keys", "keys", 1.0),
        Route("POST", "/api/v1/ssh_keys", "add_key", 1.0),
        Route("GET", "/api/v1/billing/wallet", "wallet", 1.0),
    )
    exports: ClassVar = ("PRIME_API_BASE_URL={url}", "PRIME_API_KEY={key}")

    def begin(self) -> None:
        self.shop = Offers(self)
        self.parts = [self.shop]
        self.public_keys: list[Document] = []
        for n in range(int(self.amount("foreign"))):
            self._make_pod(self.shop.market[0], {"name": f"theirs-{n}"}, FOREIGN, None)

    # -- its own words -----------------------------------------------------------------------------

    def problem(self, status: int, code: str, message: str) -> Reply:
        return Reply(status, {"detail": message})

    def malformed_reply(self) -> Reply:
        return self.unfit(["body"], "Input should be a valid dictionary")

    def unfit(self, where: list[str], message: str) -> Reply:
        return Reply(422, {"detail": [{"loc": where, "msg": message, "type": "value_error"}]})

    def happen(self, machine: Pod, what: str) -> None:
        if what == "active" and machine.status == "PROVISIONING":
            machine.status, machine.up, machine.progress = "ACTIVE", True, 40
            self.account.bill(machine, gpu=machine.price)
            self.account.note("started", machine)
        elif what == "up" and machine.status == "ACTIVE":
            if machine.fails:
                machine.failure = "Installation failed: cannot reach the package mirror"
                self.account.note("failed", machine)
            else:
                machine.progress = 100
        elif what == "preempted" and machine.up:
            self.account.note("preempted", machine)
            self._end(machine, "provider")

    def boot(self, machine: Pod) -> Boot | None:
        """Return the boot data of a pod: all keys of the account, and no boot script."""
        if machine.by == FOREIGN:
            return None
        keys = tuple(str(key["publicKey"]) for key in self.public_keys)
        return Boot(keys, (), "", machine.offer.gpu, machine.count, machine.offer.memory * 954)

    def halt(self, machine: Pod) -> None:
        self._end(machine, "provider")

    def _end(self, machine: Pod, by: str) -> None:
        machine.status = "TERMINATED"
        self.account.end(machine, by)

    # -- pods --------------------------------------------------------------------------------------

    def create(self, call: Call) -> Reply:
        body, provider = call.inner("pod"), document(call.fields.get("provider")).get("type")
        missing = next((name for name in NEEDED if not body.get(name)), None)
        if missing is not None:
            return self.unfit(["body", "pod", missing], "Field required")
        if self.amount("team") and not document(call.fields.get("team")).get("teamId"):
            return self.problem(403, "forbidden", "This key is of a team: give its teamId.")
        cloud, kind, count = body["cloudId"], body["gpuType"], int(number(body["gpuCount"]))
        offer = self.shop.find(cloud, kind, count)
        if offer is None or provider not in (None, offer.provider):
            return self.problem(404, "not_found", f"No offer {cloud} of {kind} at {provider}.")
        if self.account.credit <= 0:
            return self.problem(402, "payment_required", "Insufficient balance.")
        if self.shop.left(offer) <= 0 or call.luck.strikes("taken"):
            return self.problem(
                400,
                "no_capacity",
                "The selected provider has no capacity for this configuration: out of stock.",
            )
        if call.luck.strikes("dearer"):
            place = self.shop.market.index(offer)
            offer = offer._replace(price=round(offer.price * 1.1, 4))
            self.shop.market[place] = offer
        if 0 < number(body.get("maxPrice")) < offer.price:
            return self.problem(400, "max_price", f"The price is {offer.price}, above maxPrice.")
        return Reply(200, self._show_pod(self._make_pod(offer, body, call.by, call)))

    def _make_pod(self, offer: Offer, body: Document, by: str, call: Call | None) -> Pod:
        name = hashlib.sha256(f"{self.seed}/{len(self.account.machines)}".encode()).hexdigest()[:32]
        made = Pod(
            id=name,
            mark=str(body.get("name") or ""),
            by=by,
            offer=offer,
            body=body,
            count=offer.gpus,
            price=offer.price,
        )
        self.account.enter(made, call.luck if call else None)
        if call is not None and made.count > 1 and call.luck.strikes("fewer"):
            made.count -= 1
        self.account.boots(made, 0.5, "active")
        self.account.boots(made)
        if call is not None and offer.spot:
            self.account.interruptible(made, call.luck)
        return made

    def _find_pod(self, call: Call) -> Pod:
        """Return the pod named in a request. Raises Refused if it does not exist."""
        found = self.account.find_living(call.names["id"])
        if found is None:
            raise Refused(self.problem(404, "not_found", "Pod not found"))
        return found

    def listing(self, call: Call) -> Reply:
        return self._page(call, [self._show_pod(pod) for pod in self.account.list_machines()])

    def _page(self, call: Call, rows: list[Document]) -> Reply:
        offset = _whole(call.query.get("offset", ""), 0)
        limit = _whole(call.query.get("limit", ""), PAGE)
        if offset < 0 or not 1 <= limit <= PAGE:
            return self.unfit(["query", "limit"], f"Input should be from 1 to {PAGE}")
        return Reply(
            200,
            {
                "total_count": len(rows),
                "offset": offset,
                "limit": limit,
                "data": rows[offset : offset + limit],
            },
        )

    def show(self, call: Call) -> Reply:
        found = self._find_pod(call)
        return Reply(200, {**self._show_pod(found), "priceHr": call.luck.price(found.price)})

    def status(self, call: Call) -> Reply:
        """Return the statuses of the requested pods. Pods that no longer exist are left out."""
        fields = (
            "providerType",
            "status",
            "sshConnection",
            "priceHr",
            "primePortMapping",
            "ip",
            "installationFailure",
            "installationProgress",
        )
        rows: list[Document] = []
        for id in call.values("pod_ids"):
            pod = self.account.find_living(id)
            if pod is not None:
                shown = self._show_pod(pod)
                rows.append({"podId": pod.id, **{name: shown[name] for name in fields}})
        return Reply(200, {"data": rows})

    def destroy(self, call: Call) -> Reply:
        pod = self._find_pod(call)
        if self.account.is_held(pod):
            return self.problem(
                400, "reserved", "The minimum rental period of this provider is not over."
            )
        if self.account.is_doomed(pod, call.luck):
            self._end(pod, call.by)
        return Reply(200, {"success": True})

    def _addresses(self, pod: Pod) -> tuple[list[str], int]:
        """Return the addresses of a pod's nodes and their SSH port. No addresses: unknown yet."""
        if not pod.up:
            return [], 22
        if self.ports is not None:
            if pod.id not in self.ports:
                return [], 0
            return ["127.0.0.1"], self.ports[pod.id]
        first = int(pod.id[:6], 16)
        return [f"203.0.113.{(first + node) % 250}" for node in range(pod.offer.nodes)], 22

    def _show_pod(self, pod: Pod) -> Document:
        offer = pod.offer
        return {
            "id": pod.id, "name": pod.mark or None, "gpuName": offer.gpu, "gpuCount": pod.count, "status": pod.status,
            "createdAt": date(pod.created), "updatedAt": date(self.account.now), "providerType": offer.provider, "installationFailure": pod.failure,
            "installationProgress": pod.progress,
            "installationStatus": _describe_installation(pod),
            "teamId": None, "resources": {}, "attachedResources": [],
            **self._show_ssh(pod),
            "priceHr": pod.price, "stoppedPriceHr": 0.0, "provisioningPriceHr": 0.0, "basePriceHr": pod.price, "baseCurrency": "USD",
            "environmentType": pod.body.get("image") or IMAGES[0], "socket": offer.socket, "type": "HOSTED",
            "userId": "user-1", "walletId": "wallet-1",
            "jupyterPassword": None, "customTemplateId": None, "isSpot": offer.spot, "autoRestart": False,
        }  # fmt: skip

    def _show_ssh(self, pod: Pod) -> Document:
        """Return a pod's fields about its SSH servers."""
        known, port = self._addresses(pod)
        addresses: list[str | None] = [*known] or [None]
        logins: list[str | None] = [f"root@{address} -p {port}" for address in known] or [None]
        mapped = {
            "internal": "22",
            "external": str(port),
            "protocol": "TCP",
            "usedBy": "SSH",
            "description": "SSH",
        }
        # A pod of one node has a single address, but a list while it is starting.
        is_list = pod.offer.nodes > 1 or not pod.up
        return {
            "primePortMapping": [mapped] if pod.up else [],
            "sshConnection": logins if is_list else logins[0],
            "ip": addresses if is_list else addresses[0],
        }

    def history(self, call: Call) -> Reply:
        rows: list[Document] = []
        for pod in self.account.machines.values():
            if pod.gone is None:
                continue
            rows.append({
                "id": pod.id, "name": pod.mark, "providerType": pod.offer.provider, "provisionedBy": None, "type": "HOSTED",
                "createdAt": date(pod.created),
                "terminatedAt": date(pod.gone or self.account.now), "gpuName": pod.offer.gpu, "gpuCount": pod.count, "socket": pod.offer.socket,
                "priceHr": pod.price, "userId": "user-1", "teamId": None,
                "totalBilledPrice": self._sum_bills(pod),
            })  # fmt: skip
        return self._page(call, rows)

    def _sum_bills(self, pod: Pod) -> float:
        """Return the costs of a pod up to now in US dollars."""
        return sum(entry.usd for entry in self.account.settle() if entry.machine == pod.id)

    # -- keys, money -------------------------------------------------------------------------------

    def keys(self, call: Call) -> Reply:
        return self._page(call, self.public_keys)

    def add_key(self, call: Call) -> Reply:
        if not call.text("name") or not call.text("publicKey").startswith(("ssh-", "ecdsa-")):
            return self.unfit(["body", "publicKey"], "Input should be a public key")
        key = {
            "id": f"key-{len(self.public_keys)}",
            "name": call.text("name"),
            "publicKey": call.text("publicKey"),
            "isPrimary": False,
        }
        self.public_keys.append(key)
        return Reply(200, key)

    def wallet(self, call: Call) -> Reply:
        rows: list[Document] = []
        for pod in self.account.machines.values():
            usd = self._sum_bills(pod)
            if not usd:
                continue
            rows.append({
                "id": f"billing-{pod.id}", "created_at": date(pod.created), "updated_at": date(self.account.now), "last_billed_at": date(pod.billed),
                "amount_usd": usd, "currency": "USD", "resource_type": "pod", "resource_id": pod.id,
            })  # fmt: skip
        limit = max(1, min(PAGE, _whole(call.query.get("limit", ""), 20)))
        shown = {
            "wallet_id": "wallet-1",
            "team_id": None,
            "balance_usd": self.account.credit,
            "currency": "USD",
            "total_billings": len(rows),
            "recent_billings": rows[-limit:],
        }
        return Reply(200, shown)


def _describe_installation(pod: Pod) -> str:
    if pod.progress == 100:
        return "FINISHED"
    if pod.failure:
        return "ERROR"
    return "INSTALLING" if pod.up else "PENDING"


def _offer(luck: Random, name: int) -> Offer:
    gpu, socket, memory, price = luck.choice(GPUS)
    count, nodes = luck.choice((1, 1, 2, 4, 8)), 2 if name % 10 == 9 else 1
    center, country = luck.choice(PLACES)
    secure, spot = luck.random() < 0.7, luck.random() < 0.2
    cost = round(price * count * nodes * luck.uniform(0.8, 1.4) * (0.6 if spot else 1), 4)
    provider = luck.choice(PROVIDERS)
    cloud = f"{provider}-{gpu.lower()}-x{count}-{name}"
    return Offer(
        cloud,
        gpu,
        socket,
        memory,
        count,
        cost,
        provider,
        center,
        country,
        secure,
        spot,
        nodes,
        luck.choice((0, 1, 4, 12)),
    )


def _whole(text: str, default: int) -> int:
    """Parse a number in a query. Returns `default` if empty, or -1 if invalid."""
    if not text:
        return default
    found = parse_digits(text, 8)
    return -1 if found is None else found
