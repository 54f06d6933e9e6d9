"""The fake providers, used by their own wire: one Account for each, with the few calls that every provider has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlencode

from drivers.fakes import kind
from drivers.fakes.faults import parse
from drivers.fakes.world import Reply, Request, World

KEY = {"authorization": "Bearer k"}


class Account:
    """One account in one World, whose time stands still between calls."""

    name: str
    pauses = True
    """Whether machines can be stopped and started."""

    def __init__(self, faults: str = "", seed: int = 0) -> None:
        self.world: World[Any] = kind(self.name)(seed, parse(faults))
        self.now = self.world.account.now
        self.replies: list[tuple[str, str, Reply]] = []

    def call(
        self, method: str, path: str, body: object = None, key: bool = True, **query: object
    ) -> Reply:
        text = urlencode(
            {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in query.items()
            }
        )
        sent = b"" if body is None else json.dumps(body).encode()
        reply = self.world.handle(Request(method, path, text, KEY if key else {}, sent), self.now)
        self.replies.append((method, path, reply))
        return reply

    def data(self, reply: Reply) -> dict[str, Any]:
        """The JSON object of a good reply that arrived; else an empty one."""
        return (
            reply.body
            if isinstance(reply.body, dict) and reply.status < 300 and not reply.lost
            else {}
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.world.account.advance(self.now)

    def events(self) -> list[str]:
        return [entry.event for entry in self.world.account.settle() if entry.event != "billed"]

    def billed(self, machine: str = "") -> float:
        return sum(
            entry.usd
            for entry in self.world.account.settle()
            if entry.machine == machine or not machine
        )

    def create(self, mark: str) -> str | None:
        raise NotImplementedError

    def listing(self) -> list[str]:
        raise NotImplementedError

    def destroy(self, machine: str) -> Reply:
        raise NotImplementedError

    def pause(self, machine: str, running: bool) -> Reply:
        raise NotImplementedError


class VastaiAccount(Account):
    name = "vastai"

    def offers(self, **filters: object) -> list[dict[str, Any]]:
        body = self.call(
            "POST", "/api/v0/bundles/", {"limit": 100, "order": [["dph_total", "asc"]], **filters}
        )
        return list(self.data(body).get("offers", []))

    def rent(self, offer: int, **body: object) -> Reply:
        return self.call(
            "PUT",
            f"/api/v0/asks/{offer}/",
            {
                "client_id": "me",
                "image": "pytorch/pytorch",
                "disk": 20,
                "runtype": "ssh_direc ssh_proxy",
                **body,
            },
        )

    def create(self, mark: str) -> str | None:
        found = self.offers()
        made = self.data(self.rent(found[0]["id"], label=mark)) if found else {}
        return str(made["new_contract"]) if made else None

    def show(self, machine: str) -> dict[str, Any] | None:
        body = self.call("GET", f"/api/v0/instances/{machine}/", owner="me").body
        assert isinstance(body, dict)
        found: dict[str, Any] | None = body["instances"]
        return found

    def pages(self, size: int = 25) -> Iterator[list[dict[str, Any]]]:
        token: str | None = ""
        while token is not None:
            body = self.data(
                self.call(
                    "GET",
                    "/api/v1/instances/",
                    limit=size,
                    **({"after_token": token} if token else {}),
                )
            )
            yield body.get("instances", [])
            token = body.get("next_token")

    def listing(self) -> list[str]:
        return [str(row["id"]) for page in self.pages(2) for row in page]

    def destroy(self, machine: str) -> Reply:
        return self.call("DELETE", f"/api/v0/instances/{machine}/", {})

    def pause(self, machine: str, running: bool) -> Reply:
        return self.call(
            "PUT", f"/api/v0/instances/{machine}/", {"state": "running" if running else "stopped"}
        )


class RunpodAccount(Account):
    name = "runpod"

    def gpu(self, count: int = 1) -> str:
        found = self.data(
            self.call("GET", "/v2/catalog/gpus", include="AVAILABILITY", count=str(count))
        ).get("gpus", [])
        return next(
            (gpu["id"] for gpu in found if gpu["availability"] != "NONE"), "NVIDIA GeForce RTX 4090"
        )

    def rent(self, mark: str, gpu: str, **body: object) -> Reply:
        return self.call(
            "POST",
            "/v2/pods",
            {
                "name": mark,
                "image": "pytorch/pytorch",
                "gpu": {"id": gpu},
                "ports": ["22/tcp"],
                **body,
            },
        )

    def create(self, mark: str) -> str | None:
        made = self.data(self.rent(mark, self.gpu()))
        return made["id"] if made else None

    def show(self, machine: str) -> dict[str, Any]:
        return self.data(self.call("GET", f"/v2/pods/{machine}"))

    def listing(self) -> list[str]:
        return [pod["id"] for pod in self.data(self.call("GET", "/v2/pods")).get("pods", [])]

    def destroy(self, machine: str) -> Reply:
        return self.call("DELETE", f"/v2/pods/{machine}")

    def pause(self, machine: str, running: bool) -> Reply:
        return self.call(
            "POST", f"/v2/pods/{machine}/action", {"action": "start" if running else "stop"}
        )


class GcpAccount(Account):
    name = "gcp"
    zone = "us-central1-a"

    @property
    def project(self) -> str:
        return "/compute/v1/projects/fake"

    def instance(self, name: str, **body: object) -> dict[str, object]:
        disk = {"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "50"}}
        return {
            "name": name,
            "machineType": f"zones/{self.zone}/machineTypes/e2-standard-4",
            "disks": [disk],
            **body,
        }

    def gpu_instance(
        self, name: str, kind: str = "g2-standard-4", **scheduling: object
    ) -> dict[str, object]:
        kinds = f"zones/{self.zone}/machineTypes/{kind}"
        return self.instance(
            name, machineType=kinds, scheduling={"onHostMaintenance": "TERMINATE", **scheduling}
        )

    def insert(self, body: object, zone: str = "", **query: str) -> Reply:
        return self.call(
            "POST", f"{self.project}/zones/{zone or self.zone}/instances", body, **query
        )

    def of(self, name: str, action: str = "", method: str = "POST", body: object = None) -> Reply:
        return self.call(
            method,
            f"{self.project}/zones/{self.zone}/instances/{name}{action and '/'}{action}",
            body,
        )

    def create(self, mark: str) -> str | None:
        return mark if self.data(self.insert(self.instance(mark))) else None

    def show(self, machine: str) -> dict[str, Any]:
        return self.data(self.of(machine, method="GET"))

    def operation(self, reply: Reply) -> dict[str, Any]:
        return self.data(
            self.call(
                "POST",
                f"{self.project}/zones/{self.zone}/operations/{self.data(reply)['name']}/wait",
            )
        )

    def pages(self, size: int = 2, **query: str) -> Iterator[list[dict[str, Any]]]:
        token = ""
        while True:
            path = f"{self.project}/aggregated/instances"
            body = self.data(
                self.call(
                    "GET",
                    path,
                    maxResults=str(size),
                    **query,
                    **({"pageToken": token} if token else {}),
                )
            )
            yield [
                row
                for scope in body.get("items", {}).values()
                for row in scope.get("instances", [])
            ]
            if not (token := body.get("nextPageToken", "")):
                return

    def listing(self) -> list[str]:
        return [row["name"] for page in self.pages() for row in page]

    def destroy(self, machine: str) -> Reply:
        return self.of(machine, method="DELETE")

    def pause(self, machine: str, running: bool) -> Reply:
        return self.of(machine, "start" if running else "stop")


class PrimeAccount(Account):
    name = "prime"
    pauses = False

    def offers(self, nodes: str = "gpus", **query: str) -> list[dict[str, Any]]:
        found = self.data(self.call("GET", f"/api/v1/availability/{nodes}", **query)).get(
            "items", []
        )
        return [offer for offer in found if offer["stockStatus"] != "Unavailable"]

    def rent(self, offer: dict[str, Any], mark: str, **body: object) -> Reply:
        pod = {
            "name": mark,
            "maxPrice": 0,
            **{name: offer[name] for name in ("cloudId", "gpuType", "socket", "gpuCount")},
            **body,
        }
        return self.call(
            "POST",
            "/api/v1/pods",
            {"pod": pod, "provider": {"type": offer["provider"]}, "disks": [], "team": None},
        )

    def create(self, mark: str) -> str | None:
        found = self.offers()
        made = self.data(self.rent(found[0], mark)) if found else {}
        return made["id"] if made else None

    def show(self, machine: str) -> dict[str, Any]:
        return self.data(self.call("GET", f"/api/v1/pods/{machine}"))

    def listing(self) -> list[str]:
        found: list[str] = []
        while True:
            body = self.data(self.call("GET", "/api/v1/pods", offset=str(len(found)), limit="2"))
            found += [pod["id"] for pod in body.get("data", [])]
            if not body.get("data"):
                return found

    def destroy(self, machine: str) -> Reply:
        return self.call("DELETE", f"/api/v1/pods/{machine}")


ACCOUNTS: Iterable[type[Account]] = (VastaiAccount, RunpodAccount, GcpAccount, PrimeAccount)
