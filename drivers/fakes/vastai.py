"""Vast.ai as a World: offer search, instances rented from offers, bids, keys, logs and charges."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import NoneType
from typing import ClassVar, Final, NamedTuple

from .account import Entry, Machine
from .vastai_offers import DAY, SEARCHED, Ask, draw, hardware, passes_all, row, search
from .world import (
    Boot,
    Call,
    Document,
    Part,
    Refused,
    Reply,
    Route,
    World,
    array,
    document,
    json_value,
    number,
    parse_digits,
)

PAGE: Final = 25
FOREIGN: Final = "somebody"
"""Owner of the machines that exist from the start (fault `foreign`).  These accept no logins."""


@dataclass(kw_only=True)
class Instance(Machine):
    ask: Ask
    gpus: int
    disk: float
    price: float
    interruptible: bool
    image: str
    runtype: str
    env: list[list[str]]
    onstart: str | None
    arguments: list[str]
    actual: str | None = None
    wanted: str = "running"
    current: str = "running"
    coming: str = "running"
    message: str | None = None
    started: float | None = None
    keys: dict[int, str] = field(default_factory=dict)


class Keys(Part["Vastai"]):
    """SSH keys of the account and of single instances."""

    def __init__(self, world: Vastai) -> None:
        super().__init__(world)
        self.account_keys: dict[int, str] = {}

    def _key(self, call: Call, keys: dict[int, str]) -> int:
        """Add the SSH key in a request and return its ID. Raises Refused for an invalid key."""
        text = call.text("ssh_key").strip()
        if not text.startswith(("ssh-", "ecdsa-")):
            raise Refused(self._world.problem(400, "no_ssh_key", "ssh_key is no public key"))
        self._world.last_id += 1
        keys[self._world.last_id] = text
        return self._world.last_id

    def attach_key(self, call: Call) -> Reply:
        self._key(call, self._world.find_instance(call.names["id"]).keys)
        return Reply(200, {"success": True, "msg": "SSH key added to instance."})

    def instance_keys(self, call: Call) -> Reply:
        found = self._world.find_instance(call.names["id"])
        rows = [{"id": number_of, "public_key": text} for number_of, text in found.keys.items()]
        return Reply(200, {"success": True, "ssh_keys": json.dumps(rows)})

    def detach_key(self, call: Call) -> Reply:
        found = self._world.find_instance(call.names["id"])
        if found.keys.pop(_id(call.names["key"]), None) is None:
            return self._world.problem(
                404, "no_such_ssh_key", f"there is no key {call.names['key']}"
            )
        return Reply(200, {"success": True, "msg": "SSH key removed from instance."})

    def keys(self, call: Call) -> Reply:
        rows = [
            {
                "id": name,
                "user_id": 1,
                "key": text,
                "public_key": text,
                "created_at": _DATE,
                "deleted_at": None,
            }
            for name, text in self.account_keys.items()
        ]
        return Reply(200, rows)

    def add_key(self, call: Call) -> Reply:
        if self._world.amount("team"):
            return self._world.problem(
                400, "team_ssh_keys_not_supported", "Team accounts have no SSH keys of their own."
            )
        added = self._key(call, self.account_keys)
        key = {
            "id": added,
            "user_id": 1,
            "public_key": self.account_keys[added],
            "created_at": _DATE,
            "deleted_at": None,
        }
        return Reply(200, {"success": True, "key": key})

    def remove_key(self, call: Call) -> Reply:
        if self.account_keys.pop(_id(call.names["key"]), None) is None:
            return self._world.problem(
                404, "no_such_ssh_key", f"there is no key {call.names['key']}"
            )
        return Reply(200, {"success": True})


class SshEndpoint(NamedTuple):
    """Where an instance's SSH server is reached, directly and through the provider's proxy."""

    address: str
    port: int
    proxy: str
    proxy_port: int
    listens: bool


class Lists(Part["Vastai"]):
    """Instances as JSON, singly or in paginated listings."""

    def listing(self, call: Call) -> Reply:
        size = int(number(json_value(call.query.get("limit", "")), PAGE))
        if not 1 <= size <= PAGE:
            return Reply(
                400, {"error": "invalid_request", "msg": f"limit must be from 1 to {PAGE}"}
            )
        rows = [self.show_instance(machine) for machine in self._world.account.list_machines()]
        try:
            filters = document(json_value(call.query.get("select_filters", "")))
            kept = [row for row in rows if passes_all(row, filters)]
            after = _token(call.query.get("after_token", ""))
        except (TypeError, KeyError) as error:
            return Reply(400, {"error": "invalid_request", "msg": str(error)})
        except ValueError as error:
            return Reply(400, {"error": "invalid_token", "msg": str(error)})
        order = array(json_value(call.query.get("order_by", "")))
        down = bool(order) and document(order[0]).get("dir") == "desc"
        kept.sort(key=lambda row: number(row["id"]), reverse=down)
        rest = _skip_earlier(kept, after, down)
        page = rest[:size]
        token = None
        if len(rest) > size:
            token = self._next_token(page, after, size)
        labels = [str(row["label"] or "") for row in kept]
        return Reply(200, {
            "success": True, "instances_found": len(page), "total_instances": len(kept), "instances": page, "next_token": token,
            "label_counts": {label: labels.count(label) for label in labels},
        })  # fmt: skip

    def _next_token(self, page: list[Document], after: Document, size: int) -> str:
        """Return the token of the page after `page`, which itself came after the token `after`."""
        position: Document
        # Restless pages are counted, so instances that vanish meanwhile shift the later ones.
        if self._world.amount("restless"):
            position = {"skip": int(number(after.get("skip"))) + size}
        else:
            position = {"id": page[-1]["id"]}
        return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()

    def old_list(self, call: Call) -> Reply:
        return self._world.problem(410, "gone", "This endpoint is gone; use /api/v1/instances/")

    def show(self, call: Call) -> Reply:
        found = self._world.account.find_living(call.names["id"])
        if found is None:
            return Reply(200, {"instances": None})
        shown = self.show_instance(found)
        named = {"dph_total": call.luck.price(number(shown["dph_total"]))}
        return Reply(200, {"instances": {**shown, **named}})

    def show_instance(self, made: Instance) -> Document:
        ask, ssh = made.ask, self._find_ssh_server(made)
        stored = ask.storage_price(made.disk)
        total = made.price + stored
        costs = {
            "gpuCostPerHour": made.price,
            "diskHour": stored,
            "totalHour": total,
            "discountTotalHour": 0,
            "discountedTotalPerHour": total,
        }
        current = {
            **costs,
            "gpuCostPerHour": made.rates.get("gpu", 0.0),
            "totalHour": sum(made.rates.values()),
        }
        ports: dict[str, object] = {}
        if ssh.listens and "direc" in made.runtype:
            ports["22/tcp"] = [{"HostIp": "0.0.0.0", "HostPort": str(ssh.port)}]
        uptime = None
        if made.started is not None:
            uptime = (self._world.account.now - made.started) / 60
        use, heat = (0.0, 41.0) if made.up else (None, None)
        return {
            **hardware(ask, made.gpus), "id": int(made.id), "actual_status": made.actual, "intended_status": made.wanted, "cur_state": made.current,
            "next_state": made.coming, "label": made.mark or None, "template_id": None, "template_hash_id": None, "template_name": None,
            "image_uuid": made.image, "image_args": made.arguments, "image_runtype": made.runtype, "extra_env": made.env,
            "onstart": made.onstart or "",
            "jupyter_token": "", "status_msg": made.message, "local_ipaddrs": "10.0.0.7 172.17.0.1 \n",
            "public_ipaddr": f"{ssh.address}\n",
            "ssh_host": ssh.proxy, "ssh_idx": str(int(made.id) % 9 + 1), "ssh_port": ssh.proxy_port,
            "machine_dir_ssh_port": ssh.port - 2000, "start_date": made.created, "end_date": made.created + ask.longest, "duration": ask.longest,
            "uptime_mins": uptime, "cpu_util": 0.0,
            "mem_limit": None, "mem_usage": None,
            "vmem_usage": None, "gpu_totalram": ask.vram * made.gpus, "gpu_util": use, "gpu_temp": heat,
            "disk_space": made.disk, "disk_util": -1.0, "disk_usage": -1.0, "direct_port_start": -1, "direct_port_end": -1,
            "ports": ports,
            "rentable": True, "is_bid": made.interruptible, "dph_base": made.price, "dph_total": total,
            "search": costs, "instance": current,
            "storage_total_cost": stored, "credit_balance": None, "credit_discount": None, "client_run_time": 1.1, "host_run_time": 2_592_000.0,
            "external": False, "time_remaining": "", "time_remaining_isbid": "", "country_code": ask.place[-2:], "volume_info": [],
        }  # fmt: skip

    def _find_ssh_server(self, made: Instance) -> SshEndpoint:
        ports = self._world.ports
        if ports is not None:
            port = ports.get(made.id, 0)
            return SshEndpoint("127.0.0.1", port, "127.0.0.1", port, made.id in ports)
        id = int(made.id)
        port = 20_000 + id % 20_000
        proxy = f"ssh{id % 9 + 1}.vast.example"
        return SshEndpoint(f"203.0.113.{id % 250}", port, proxy, port - 1000, made.up)


class Logs(Part["Vastai"]):
    """Logs of instances, downloaded from a separate URL."""

    def logs(self, call: Call) -> Reply:
        found = self._world.find_instance(call.names["id"])
        address = f"http://{call.headers.get('host', 'localhost')}/_logs/{found.id}/{int(self._world.account.now * 1000)}"
        return Reply(
            200, {"success": True, "result_url": address, "msg": "The logs are on their way."}
        )

    def log_text(self, call: Call) -> Reply:
        """Return a log, or status 403 in the first half second, like an unfinished upload."""
        if self._world.account.now * 1000 < _id(call.names["at"]) + 500:
            return Reply(
                403, "<Error><Code>AccessDenied</Code></Error>", {"content-type": "application/xml"}
            )
        found = self._world.account.machines.get(call.names["id"])
        return Reply(200, f"{found.image}\n{found.message or ''}\n" if found else "")


class Money(Part["Vastai"]):
    """User and charges of the account."""

    def user(self, call: Call) -> Reply:
        return Reply(200, {
            "id": 1, "key_id": 1, "email": "nobody@example.com", "username": "nobody", "balance": 0.0, "credit": round(self._world.account.credit, 6),
            "balance_threshold": 0.0, "balance_threshold_enabled": False, "ssh_key": "", "sid": "", "has_billing": True, "can_pay": True,
        })  # fmt: skip

    def charges(self, call: Call) -> Reply:
        day = document(document(json_value(call.query.get("select_filters", ""))).get("day"))
        since, till = number(day.get("gte"), 0.0), number(day.get("lte"), self._world.account.now)
        by_instance: dict[str, list[Entry]] = {}
        for entry in self._world.account.settle():
            if entry.event != "billed" or entry.by == FOREIGN:
                continue
            if since <= entry.at <= till:
                by_instance.setdefault(entry.machine, []).append(entry)
        rows = [_show_charge(name, billed) for name, billed in by_instance.items()]
        return Reply(
            200,
            {
                "success": True,
                "count": len(rows),
                "total": len(rows),
                "next_token": None,
                "results": rows,
            },
        )


def _show_charge(name: str, billed: Sequence[Entry]) -> Document:
    """Return the charge of one instance with its items."""
    items: list[Document] = []
    for entry in billed:
        item = {
            "start": int(entry.since),
            "end": int(entry.at),
            "type": entry.what,
            "source": None,
            "amount": entry.usd,
            "metadata": {},
            "items": [],
        }
        items.append(item)
    return {
        "start": int(billed[0].since),
        "end": int(billed[-1].at),
        "type": "instance",
        "source": f"instance-{name}",
        "amount": sum(entry.usd for entry in billed),
        "metadata": {"label": billed[0].mark},
        "items": items,
    }


class Vastai(World[Instance]):
    """Fake Vast.ai with one account and a market of offers."""

    routes: ClassVar = (
        Route("GET", "/api/v0/users/current", "user"),
        Route("GET", "/api/v0/users/current/", "user"),
        Route("POST", "/api/v0/bundles/", "search", 1.0),
        Route("PUT", "/api/v0/search/asks/", "search", 1.0),
        Route("PUT", "/api/v0/asks/{id}/", "create", 4.5),
        Route("GET", "/api/v1/instances/", "listing", 1.0),
        Route("GET", "/api/v0/instances/", "old_list"),
        Route("PUT", "/api/v0/instances/", "manage_many", 1.0),
        Route("DELETE", "/api/v0/instances/", "destroy_many", 3.0),
        Route("GET", "/api/v0/instances/{id}/", "show", 2.0),
        Route("PUT", "/api/v0/instances/{id}/", "manage", 1.0),
        Route("DELETE", "/api/v0/instances/{id}/", "destroy", 3.0),
        Route("PUT", "/api/v0/instances/bid_price/{id}/", "bid", 5.5),
        Route("PUT", "/api/v0/instances/request_logs/{id}", "logs"),
        Route("PUT", "/api/v0/instances/request_logs/{id}/", "logs"),
        Route("GET", "/_logs/{id}/{at}", "log_text"),
        Route("POST", "/api/v0/instances/{id}/ssh/", "attach_key", 1.0),
        Route("GET", "/api/v0/instances/{id}/ssh/", "instance_keys", 1.0),
        Route("DELETE", "/api/v0/instances/{id}/ssh/{key}/", "detach_key", 1.0),
        Route("GET", "/api/v0/ssh/", "keys", 1.0),
        Route("POST", "/api/v0/ssh/", "add_key", 1.0),
        Route("DELETE", "/api/v0/ssh/{key}/", "remove_key", 1.0),
        Route("GET", "/api/v0/charges/", "charges", 1.0),
    )
    open: ClassVar = frozenset({"search", "log_text"})
    exports: ClassVar = ("VAST_URL={url}", "VAST_API_KEY={key}")

    def begin(self) -> None:
        self.logins = Keys(self)
        self.lists = Lists(self)
        self.said = Logs(self)
        self.money = Money(self)
        self.parts = [self.logins, self.lists, self.said, self.money]
        luck = Random(f"{self.seed}/market")
        drawn = [draw(luck, 7_000_000 + n * 131) for n in range(48)]
        self.asks = {ask.id: ask for ask in drawn}
        self.holders: dict[int, str] = {}
        self.last_id = 31_000_000
        self._searches: dict[int, int] = {}
        for n in range(int(self.amount("foreign"))):
            ask = [*self.asks.values()][n % len(self.asks)]
            if ask.id not in self.holders:
                fields = {"image": "somebody/else", "disk": 20, "label": f"theirs-{n}"}
                self._rent(ask, self._body(ask, fields), by=FOREIGN)

    # -- its own words -----------------------------------------------------------------------------

    def problem(self, status: int, code: str, message: str, **more: int) -> Reply:
        return Reply(status, {"success": False, "error": code, "msg": message, **more})

    def refusal(self, call: Call) -> Reply:
        if not call.by:
            return self.problem(403, "auth_error", "This action requires login.")
        return self.problem(call.luck.random.choice((401, 404)), "auth_error", "Invalid user key")

    def throttle_reply(self, route: Route) -> Reply:
        if self.calls % 2:
            return Reply(429, f"API requests too frequent: endpoint threshold={route.gap:g}")
        return Reply(429, {"detail": f"API requests too frequent endpoint threshold={route.gap:g}"})

    def happen(self, machine: Instance, what: str) -> None:
        if what == "up" and machine.wanted == "running":
            if self.holders.get(machine.ask.id) == machine.id:
                self._up(machine)
        elif what == "loading" and machine.actual is None:
            machine.actual, machine.message = "loading", f"{machine.image}: Pulling from library"
        elif what == "preempted" and machine.up:
            self._stop(machine, "preempted")
        elif what == "exited" and machine.by != FOREIGN:  # it is to run, does not, and is billed on
            machine.actual, machine.up = "exited", False
            self.account.note("exited", machine)

    def _up(self, machine: Instance) -> None:
        if machine.fails:
            machine.actual = "created"
            machine.message = (
                "Error response from daemon: OCI runtime create failed: exec format error"
            )
            self.account.note("failed", machine)
            return
        machine.actual = machine.current = "running"
        machine.message = f"success, running {machine.image}"
        machine.up = True
        machine.started = self.account.now
        self.account.bill(machine, gpu=machine.price, disk=machine.ask.storage_price(machine.disk))
        self.account.note("started", machine)

    def halt(self, machine: Instance) -> None:
        self._stop(machine, "stopped")

    def boot(self, machine: Instance) -> Boot | None:
        if machine.by == FOREIGN:
            return None
        keys: tuple[str, ...] = ()
        if "ssh" in machine.runtype:
            keys = (*self.logins.account_keys.values(), *machine.keys.values())
        env = [(name, value) for name, value in machine.env if not name.startswith("-")]
        own = (("CONTAINER_ID", machine.id), ("CONTAINER_API_KEY", f"instance-{machine.id}"))
        return Boot(
            keys,
            (*env, *own),
            machine.onstart or "",
            f"NVIDIA {machine.ask.gpu}",
            machine.gpus,
            machine.ask.vram,
            self._is_swept(machine),
        )

    def _is_swept(self, machine: Instance) -> bool:
        """Return True if a machine has run long enough to lose the keys that it wrote itself."""
        after = self.amount("swept")
        if not after or machine.started is None:
            return False
        return self.account.now >= machine.started + after

    def own_keys(self, machine: str) -> tuple[str, ...]:
        return (f"instance-{machine}",) if machine in self.account.machines else ()

    # -- offers ------------------------------------------------------------------------------------

    def search(self, call: Call) -> Reply:
        asked = call.inner("q") if "q" in call.fields else call.fields
        day = int(self.account.now // DAY)
        self._searches[day] = self._searches.get(day, 0) + 1
        most = self.amount("quota")
        if most and self._searches[day] > most:
            reset = {"x-ratelimit-reset": str(int((day + 1) * DAY))}
            reply = self.problem(429, "search_quota_exceeded", "Daily search quota exceeded")
            return reply._replace(headers=reset)
        kind = str(asked.get("type", "ondemand"))
        kind = {"on-demand": "ondemand", "interruptible": "bid"}.get(kind, kind)
        if kind not in ("ondemand", "bid", "reserved"):
            return self.problem(400, "invalid_args", f"type {kind} is not known")
        disk = number(asked.get("allocated_storage"), 8.0)
        rows = [
            row(ask, kind == "bid", disk, self.account.now, ask.id not in self.holders)
            for ask in self.asks.values()
        ]
        try:
            kept = search(rows, asked)
        except (TypeError, KeyError) as error:
            return self.problem(400, "invalid_args", f"invalid filter: {error}")
        if call.luck.strikes("loose") and len(kept) < len(rows):
            excluded = [each for each in rows if each not in kept]
            kept.append(excluded[0])
        priced = "min_bid" if kind == "bid" else "dph_base"
        limit = max(0, int(number(asked.get("limit"), SEARCHED)))
        shown = [{**each, priced: call.luck.price(number(each[priced]))} for each in kept[:limit]]
        return Reply(200, {"offers": shown})

    # -- instances ---------------------------------------------------------------------------------

    def create(self, call: Call) -> Reply:
        ask = self.asks.get(_id(call.names["id"]))
        number_of = _id(call.names["id"])
        if ask is None:
            return self.problem(
                404,
                "no_such_ask",
                f"error 404/3603: no_such_ask  Instance type by id {number_of} is not available.",
                ask_id=number_of,
            )
        refused = self._refuse_order(ask, call)
        if refused is not None:
            return refused
        price = call.fields.get("price")
        if call.luck.strikes("dearer"):
            ask = self.asks[ask.id] = ask._replace(price=round(ask.price * 1.1, 4))
        low = price is not None and number(price) < ask.bid
        made = self._rent(
            ask,
            self._body(ask, call.fields),
            call,
            idle=low or call.text("target_state") == "stopped",
        )
        if low:
            return self.problem(
                400,
                "invalid_price",
                f"bid {price} is below the minimum of {ask.bid}",
                ask_id=ask.id,
                new_contract=int(made.id),
            )
        return Reply(
            200,
            {
                "success": True,
                "new_contract": int(made.id),
                "instance_api_key": f"instance-{made.id}",
            },
        )

    def _refuse_order(self, ask: Ask, call: Call) -> Reply | None:
        """Return the error reply to an order that cannot be accepted."""
        price = call.fields.get("price")
        wrong = _check_order(call)
        if wrong:
            return self.problem(400, "invalid_args", wrong, ask_id=ask.id)
        if price is not None and not 0.001 <= number(price) <= 128:
            return self.problem(
                400, "invalid_price", "price must be from 0.001 to 128", ask_id=ask.id
            )
        if self.account.credit <= 0:
            return self.problem(
                400, "missing_billing", "Your account lacks credit; see the billing page."
            )
        if ask.id in self.holders or call.luck.strikes("taken"):
            # Vast.ai reports a taken offer with different statuses.
            return self.problem(
                call.luck.random.choice((410, 410, 400, 404)),
                "no_such_ask",
                f"no_such_ask {ask.id} is no longer available",
                ask_id=ask.id,
            )
        return None

    def _body(self, ask: Ask, fields: Document) -> Instance:
        """Create the instance of an order, without an ID yet."""
        bid, onstart = fields.get("price"), fields.get("onstart")
        env = [[str(name), str(value)] for name, value in document(fields.get("env")).items()]
        price = ask.price if bid is None else number(bid)
        script = str(onstart) if onstart else None
        return Instance(
            id="",
            mark=str(fields.get("label") or ""),
            by="",
            ask=ask,
            gpus=ask.gpus,
            disk=number(fields.get("disk"), 10.0),
            price=price,
            interruptible=bid is not None,
            image=str(fields.get("image") or "vastai/base-image"),
            runtype=str(fields.get("runtype") or "ssh"),
            env=env,
            onstart=script,
            arguments=list(map(str, array(fields.get("args")))),
        )

    def _rent(
        self,
        ask: Ask,
        ordered: Instance,
        call: Call | None = None,
        by: str = "",
        idle: bool = False,
    ) -> Instance:
        self.last_id += 17
        owner, luck = (call.by, call.luck) if call else (by, None)
        made = replace(ordered, id=str(self.last_id), by=owner)
        self.account.enter(made, luck)
        self.account.bill(made, disk=ask.storage_price(made.disk))
        if call is not None and ask.gpus > 1 and call.luck.strikes("fewer"):
            made.gpus -= 1
        if idle:
            made.wanted = made.current = made.coming = "stopped"
            made.actual = "exited"
            return made
        self.holders[ask.id] = made.id
        self.account.later(made, 2, "loading")
        self.account.boots(made)
        if call is not None and made.interruptible:
            self.account.interruptible(made, call.luck)
        return made

    def _stop(self, machine: Instance, event: str, by: str = "") -> None:
        """Stop an instance: free its GPUs, and continue billing its disk."""
        machine.wanted = machine.current = machine.coming = "stopped"
        machine.actual, machine.up, machine.started = "exited", False, None
        self.account.bill(machine, disk=machine.ask.storage_price(machine.disk))
        self._free(machine)
        self.account.note(event, machine, by)

    def _free(self, machine: Instance) -> None:
        if self.holders.get(machine.ask.id) == machine.id:
            del self.holders[machine.ask.id]

    def find_instance(self, name: str) -> Instance:
        """Return the instance with this id.  Raises Refused if it does not exist."""
        found = self.account.find_living(name)
        if found is None:
            raise Refused(self.problem(404, "no_such_instance", f"Instance {name} not found."))
        return found

    def manage(self, call: Call) -> Reply:
        return self._manage(self.find_instance(call.names["id"]), call)

    def _manage(self, found: Instance, call: Call) -> Reply:
        state, label = call.fields.get("state"), call.fields.get("label")
        if state not in (None, "running", "stopped") or (state is None and label is None):
            return self.problem(400, "invalid_args", "give a state, running or stopped, or a label")
        if isinstance(label, str):
            if len(label) > 1024:
                return self.problem(400, "label_too_long", "a label has at most 1024 characters")
            found.mark = label
        if state == "stopped" and found.wanted == "running":
            self._stop(found, "stopped", call.by)
        if state == "running" and found.wanted == "stopped":
            if self.account.credit <= 0:
                return self.problem(
                    400, "missing_billing", "Your account lacks credit; see the billing page."
                )
            found.wanted = found.coming = "running"
            found.actual = "scheduling"
            if found.ask.id not in self.holders:
                self.holders[found.ask.id], found.actual = found.id, "loading"
                self.account.boots(found, 0.4)
        return Reply(200, {"success": True})

    def manage_many(self, call: Call) -> Reply:
        return self._each(call, "ids", lambda found: self._manage(found, call))

    def destroy(self, call: Call) -> Reply:
        return self._destroy(self.find_instance(call.names["id"]), call)

    def _destroy(self, found: Instance, call: Call) -> Reply:
        if self.account.is_held(found):
            return self.problem(
                400, "invalid_request", "the minimum rental period of this instance is not over"
            )
        # A faulty provider confirms the destruction, but the machine stays.
        if self.account.is_doomed(found, call.luck):
            self._free(found)
            self.account.end(found, call.by)
        return Reply(200, {"success": True, "msg": f"Instance {found.id} destroyed."})

    def destroy_many(self, call: Call) -> Reply:
        return self._each(call, "instance_ids", lambda found: self._destroy(found, call))

    def _each(self, call: Call, field: str, do: Callable[[Instance], Reply]) -> Reply:
        names = call.fields.get(field)
        if not isinstance(names, list):
            return self.problem(400, "invalid_args", f"{field} must be a list")
        for name in names:
            reply = do(self.find_instance(str(name)))
            if reply.status != 200:
                return reply
        return Reply(200, {"success": True})

    def bid(self, call: Call) -> Reply:
        found = self.find_instance(call.names["id"])
        price = call.number("price", found.ask.bid)
        if not found.interruptible or not 0.001 <= price <= 32 * found.gpus:
            return self.problem(
                400,
                "invalid_args",
                f"the bid must be from 0.001 to {32 * found.gpus}, of an interruptible instance",
            )
        found.price = price
        if found.up:
            self.account.bill(found, gpu=price, disk=found.ask.storage_price(found.disk))
        return Reply(200, {"success": True})


_DATE: Final = "2026-01-01T00:00:00Z"


def _check_order(call: Call) -> str:
    """Return the error in the body of an order, or "" if the body is valid."""
    image, label = call.text("image"), call.text("label")
    env = call.fields.get("env")
    if not image and not call.text("template_hash_id"):
        return "image is required"
    if len(image) > 1024 or len(label) > 256:
        return "image has at most 1024 characters, label 256"
    if call.number("disk", 10.0) < 8:
        return "disk must be at least 8"
    if not isinstance(env, (dict, str, NoneType)):
        return "env must be an object"
    if _count_start_characters(call) > 4096:
        return "args and onstart together have at most 4096 characters"
    return ""


def _count_start_characters(call: Call) -> int:
    """Return the length of an order's arguments and start script."""
    arguments = call.fields.get("args")
    words = "".join(map(str, arguments)) if isinstance(arguments, list) else ""
    return len(words + call.text("args_str") + call.text("onstart"))


def _id(text: str) -> int:
    """Parse a numeric path component, or return -1 if invalid."""
    found = parse_digits(text, 15)
    return -1 if found is None else found


def _token(text: str) -> Document:
    """Parse a page token.  Raises ValueError for a token that this listing did not create."""
    found = json.loads(base64.urlsafe_b64decode(text)) if text else {}
    if not isinstance(found, dict) or not all(isinstance(value, int) for value in found.values()):
        raise ValueError("after_token is not a token of this listing")
    return found


def _skip_earlier(rows: list[Document], after: Document, down: bool) -> list[Document]:
    """Return the sorted rows that come after the rows of a page token."""
    if "skip" in after:
        return rows[int(number(after["skip"])) :]
    if after.get("id") is None:
        return rows
    last = number(after["id"])
    if down:
        return [row for row in rows if number(row["id"]) < last]
    return [row for row in rows if number(row["id"]) > last]
