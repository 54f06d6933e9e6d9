"""Promise: whatever a provider replies, each driver ends in a sentence, rents nothing twice, and takes no machine for gone."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import asyncssh
import httpx
import pytest

from drivers import load, web
from drivers.base import (
    Driver,
    DriverError,
    HostLost,
    Lease,
    Need,
    NoCapacity,
    Offer,
    Order,
    Unreachable,
    Unsure,
    Wish,
)
from runner.hosts.renting import offering

ORDERS: Final = {
    "vastai": {"disk": "32"},
    "gcp": {"zone": "us-central1-a", "shape": "g2-standard-4", "disk": "50"},
    "runpod": {"gpu": "NVIDIA L40S", "cloud": "SECURE", "disk": "32", "centers": "", "cuda": ""},
    "prime": {
        **dict.fromkeys(
            ("cloudId", "gpuType", "socket", "dataCenter", "country", "security", "provider"), "x"
        ),
        "disk": "80",
    },
}
LARGEST: Final = 100_000
LEASES: Final = {"vastai": "7", "gcp": "us-central1-a/recipe-x", "runpod": "p1", "prime": "p1"}
SETTINGS: Final[dict[str, dict[str, object]]] = {
    "vastai": {},
    "gcp": {"project": "p"},
    "runpod": {},
    "prime": {"first_use": True},
}
VALUES: Final[tuple[object, ...]] = (
    None, True, -1, 1e308, 10**400, "x" * 5000, "\x1b[2J\x00\u202e", [], {}, [[]], [None], [{}], {"id": {}}, "7", [["a", "b"]],
)  # fmt: skip
NAMES: Final = (
    *(
        "offers",
        "instances",
        "gpus",
        "dataCenters",
        "pods",
        "items",
        "data",
        "results",
        "records",
        "error",
        "success",
        "id",
        "name",
        "status",
    ),
    *(
        "new_contract",
        "pagination",
        "nextCursor",
        "nextPageToken",
        "unreachables",
        "totalCount",
        "total_count",
        "zone",
        "quotas",
        "credit",
        "msg",
    ),
    *(
        "balance_usd",
        "ssh",
        "sshConnection",
        "metadata",
        "networkInterfaces",
        "ports",
        "price",
        "prices",
        "next_token",
        "detail",
        "errors",
    ),
)
TEXTS: Final = (
    b"", b"<html><body>502 Bad Gateway</body></html>", b"[]", b'"yes"', b"1e999", b'{"id": NaN}',
    b'{"offers": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"\x1b[2J\x1b[31m\x00\x07 rented", b'{"offers": [{"id": 7',
    b'{"id": ' + b"9" * 10_000 + b"}", b"\xff\xfe{}", b" " * (LARGEST + 1),
)  # fmt: skip

Act = Callable[[Driver], Coroutine[None, None, object]]


def made(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(web, "LARGEST", LARGEST)
    for variable in (
        "VAST_API_KEY",
        "CLOUDSDK_AUTH_ACCESS_TOKEN",
        "RUNPOD_API_KEY",
        "PRIME_API_KEY",
    ):
        monkeypatch.setenv(variable, "k")
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(place / "key")
    more = {"key": str(place / "key")} if name == "prime" else {}
    driver: Driver = load(name)(
        api="http://x", installation=str(place / "installation"), **SETTINGS[name], **more
    )
    return driver


def acts(name: str) -> dict[str, Act]:
    """Each call that a driver makes."""
    lease = Lease(name, LEASES[name], "0" * 16)
    order = Order(
        Offer(name, "o", data=ORDERS[name]), "0" * 16, datetime.now(UTC) + timedelta(hours=1)
    )

    async def account(driver: Driver) -> object:
        return await driver.account()

    async def charges(driver: Driver) -> object:
        return await driver.charges(lease, datetime.now(UTC))

    return {
        "offers": lambda driver: driver.offers(Wish()),
        "acquire": lambda driver: driver.acquire(order),
        "hosts": lambda driver: driver.hosts(lease),
        "release": lambda driver: driver.release(lease),
        "leases": lambda driver: driver.leases(),
        "account": account,
        "charges": charges,
    }


async def outcome(act: Act, driver: Driver) -> object:
    """What a call answers, or the DriverError that it ends in, whose words are one short printable line."""
    try:
        return await act(driver)
    except DriverError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return error


def check(driver: Driver, name: str, replies: Sequence[tuple[int, bytes]]) -> None:
    """Each call of a driver, where the provider replies so."""

    async def all() -> None:
        for status, body in replies:
            client = httpx.AsyncClient(
                transport=httpx.MockTransport(
                    lambda _, status=status, body=body: httpx.Response(status, content=body)
                )
            )
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(web.Web, "_of_loop", lambda self, client=client: client)
                for what, act in acts(name).items():
                    found = await outcome(act, driver)
                    where = (what, status, body[:80], found)
                    if what == "release":
                        assert found is not True, where
                    if what == "acquire" and status < 300:
                        assert not isinstance(found, (NoCapacity, HostLost)), where
                    if what == "leases" and status >= 300:
                        assert isinstance(found, DriverError), where

    asyncio.run(all())


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_no_reply_of_the_provider_ends_in_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(
        made(name, tmp_path, monkeypatch),
        name,
        [(status, text) for text in TEXTS for status in (200, 302, 404, 500)],
    )


@pytest.mark.parametrize("name", ORDERS)
def test_a_reply_with_other_values_than_documented_ends_in_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = [dict.fromkeys(NAMES, value) for value in VALUES]
    found = [
        each
        for row in flat
        for each in (row, dict.fromkeys(NAMES, row), {key: [row] for key in NAMES})
    ]
    check(
        made(name, tmp_path, monkeypatch),
        name,
        [(200, json.dumps({**each, "instances": "x"}).encode()) for each in found],
    )


@pytest.mark.parametrize("written", ["²", "2²", "٢٢", "0", "-22", "22.5", "70000", "9" * 5000])
@pytest.mark.parametrize("name", ["vastai", "runpod", "prime"])
def test_a_machine_whose_port_is_no_port_has_no_address_yet(
    name: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = {
        "id": 7,
        "actual_status": "running",
        "intended_status": "running",
        "public_ipaddr": "127.0.0.1",
        "ports": {"22/tcp": [{"HostPort": written}]},
    }
    pod = {
        "id": "p1",
        "status": "ACTIVE" if name == "prime" else "RUNNING",
        "installationStatus": "FINISHED",
        "sshConnection": f"root@127.0.0.1 -p {written}",
        "ssh": {"direct": {"host": "127.0.0.1", "port": written}},
    }
    reply = {"instances": instance, "data": [pod], **pod}
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json=reply))
    )
    driver = made(name, tmp_path, monkeypatch)
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    assert asyncio.run(outcome(acts(name)["hosts"], driver)) is None


@pytest.mark.parametrize("written", ["²", "12.²", "١٢.٨", "1.2.3", ""])
def test_a_cuda_version_that_cannot_be_read_is_none(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {
        "id": "NVIDIA L40S",
        "memory": 48,
        "secure": True,
        "price": {"secure": 0.9},
        "maxCount": {"secure": 8},
        "availability": "HIGH",
        "dataCenters": [],
        "cudaVersions": [{"version": written, "available": True}],
    }
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json={"gpus": [gpu]}))
    )
    driver = made("runpod", tmp_path, monkeypatch)
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    assert len(asyncio.run(driver.offers(Wish()))) == 1
    assert asyncio.run(driver.offers(Wish(filters={"cuda": "1.0"}))) == []
    assert driver.excluded == {"CUDA version too old": 1}


@pytest.mark.parametrize("written", ["²", "٣", "9" * 30, "9" * 5000, "soon", ""])
def test_a_limit_of_searches_without_a_readable_end_ends_at_midnight(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(
            lambda _: httpx.Response(
                429,
                json={"error": "search_quota_exceeded"},
                headers={b"x-ratelimit-reset": written.encode()},
            )
        )
    )
    driver = made("vastai", tmp_path, monkeypatch)
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    found = asyncio.run(outcome(acts("vastai")["offers"], driver))
    assert str(found) == "Vast.ai allows no more searches until midnight UTC"


@pytest.mark.parametrize("name", ORDERS)
def test_a_listing_without_end_is_no_listing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its pages lead in a circle or are always new ones."""
    monkeypatch.setattr(web, "PAGES", 5)
    monkeypatch.setattr("drivers.prime_wire.PAGES", 5)
    driver, pages = made(name, tmp_path, monkeypatch), itertools.count(1)
    for new in (True, False):

        def reply(_: httpx.Request, new: bool = new) -> httpx.Response:
            page = f"{next(pages) if new else 7}"
            tokens = dict.fromkeys(("nextPageToken", "nextCursor", "next_token"), page)
            rows = [
                {"id": page if name != "vastai" else int(page), "name": "x", "status": "x"}
                for _ in range(100)
            ]
            lists = {
                **dict.fromkeys(("instances", "pods", "data"), rows),
                "items": {},
                "total_count": 10**6,
            }
            return httpx.Response(200, json={**tokens, **lists})

        with pytest.MonkeyPatch.context() as patched:
            client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
            patched.setattr(web.Web, "_of_loop", lambda self, client=client: client)
            assert isinstance(asyncio.run(outcome(lambda each: each.leases(), driver)), Unreachable)


@pytest.mark.parametrize(
    ("name", "image"),
    [("vastai", "team/trainer:1"), ("vastai", ""), ("runpod", "team/trainer:1"), ("runpod", "")],
)
def test_a_machine_is_ordered_with_the_image_of_its_step_or_else_the_drivers(
    name: str, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, object]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={})

    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    driver = made(name, tmp_path, monkeypatch)
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    order = Order(
        Offer(name, "7", data=ORDERS[name]),
        "0" * 16,
        datetime.now(UTC) + timedelta(hours=1),
        image=image,
    )
    with pytest.raises(Unsure):
        asyncio.run(driver.acquire(order))
    assert driver.traits.images and str(sent[0]["image"]).startswith(
        image or ("pytorch/" if name == "vastai" else "runpod/")
    )


def test_prime_offers_only_what_has_the_image_and_a_virtual_machine_says_that_it_boots_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "cloudId": "c",
        "gpuCount": 1,
        "gpuType": "H100",
        "gpuMemory": 80,
        "prices": {"onDemand": 2.0},
        "security": "secure_cloud",
    }
    row |= {
        "images": ["ubuntu_22_cuda_12", "theirs"],
        "stockStatus": "Low",
        "disk": {"minCount": 10, "defaultCount": 100, "maxCount": 500},
    }
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(
            lambda _: httpx.Response(200, json={"totalCount": 1, "items": [row]})
        )
    )
    driver = made("prime", tmp_path, monkeypatch)
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    found = {
        image: len(asyncio.run(_offers(driver, image)))
        for image in ("", "theirs", "team/trainer:1")
    }
    assert found == {"": 1, "theirs": 1, "team/trainer:1": 0}
    assert driver.excluded == {"without the image team/trainer:1": 1}

    virtual = made("gcp", tmp_path, monkeypatch)
    monkeypatch.setattr(virtual, "offers", _none)
    [shelf] = asyncio.run(
        offering.ask_offers({"gcp": (virtual, [Wish(Need(image="team/trainer:1"))])})
    )
    assert (
        "team/trainer:1 runs in a container engine on the machine: the machine is a VM"
        in shelf.ends
    )


async def _offers(driver: Driver, image: str) -> Sequence[Offer]:
    return await driver.offers(Wish(Need(image=image)))


async def _none(_: Wish) -> Sequence[Offer]:
    return ()
