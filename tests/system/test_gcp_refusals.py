"""What cannot work at Compute Engine ends in a sentence, and rents nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from drivers import web
from drivers.base import (
    Denied,
    DriverError,
    Lease,
    Need,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Throttled,
    Unreachable,
    Unsure,
    Wish,
)
from drivers.gcp import Gcp
from tests.fake_provider import Provider, provider
from tests.rented import ours, rents
from tests.support import Space

RECIPE = "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with provider("gcp", "--faults", "quota=0") as found:
        yield found


def test_a_quota_of_none_is_named_with_the_page_to_ask_for_more(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "gcp")
    space.recipe(RECIPE)
    code, _, said = space.command("run", "--driver", "gcp")
    assert (
        code == 5
        and "the quota GPUS_ALL_REGIONS is 0" in said
        and "https://console.cloud.google.com/iam-admin/quotas?project=fake" in said
    )
    assert (
        "the quota GPUS_ALL_REGIONS is 0. Ask for more at https://"
        in space.command("doctor", "--driver", "gcp")[1]
    )
    assert ours(market) == []


def test_without_credentials_it_is_said_where_they_were_looked_for(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "gcp")
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(space.root))
    space.recipe(RECIPE)
    code, _, said = space.command("run", "--driver", "gcp")
    assert (
        code == 5
        and "neither CLOUDSDK_AUTH_ACCESS_TOKEN nor GOOGLE_APPLICATION_CREDENTIALS" in said
    )
    assert "gcloud auth application-default login" in said and ours(market) == []


def test_a_misspelt_region_is_refused_with_the_one_that_was_meant(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "gcp", regions="us-centrall1")
    space.recipe(RECIPE)
    code, _, said = space.command("run", "--driver", "gcp")
    assert (
        code == 5
        and 'did you mean "us-central1"?' in said
        and "correct `[drivers.gcp]`" in said
        and ours(market) == []
    )


# --- replies

ORDER = Order(
    Offer("gcp", "z", data={"zone": "us-central1-a", "shape": "g2-standard-4", "disk": "50"}),
    "0" * 16,
    datetime.now(UTC) + timedelta(hours=1),
)


def answer(
    monkeypatch: pytest.MonkeyPatch,
    reply: Callable[[httpx.Request], httpx.Response],
    act: Callable[[Gcp], Any],
    tmp_path: Path,
) -> Any:
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "t")
    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    return asyncio.run(
        act(Gcp(api="http://x", project="p", installation=str(tmp_path / "installation")))
    )


def error(status: int, reason: str, message: str = "no") -> httpx.Response:
    return httpx.Response(
        status,
        json={
            "error": {
                "code": status,
                "message": message,
                "errors": [{"reason": reason, "message": message}],
            }
        },
    )


def done(code: str) -> httpx.Response:
    return httpx.Response(
        200,
        json={
            "name": "o",
            "status": "DONE",
            "operationType": "insert",
            "error": {"errors": [{"code": code}]},
        },
    )


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (done("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"), NoCapacity),
        (done("QUOTA_EXCEEDED"), NoCapacity),
        (done("VPC_NOT_FOUND"), Rejected),
        (error(403, "quotaExceeded"), NoCapacity),
        (error(403, "rateLimitExceeded"), Throttled),
        (error(429, "x"), Throttled),
        (error(403, "forbidden"), Denied),
        (error(401, "authError"), Denied),
        (error(400, "invalid"), Rejected),
        (error(503, "backendError"), Unsure),
        (httpx.Response(200, html="<html>"), Unsure),
        (httpx.Response(200, json=[]), Unsure),
        (httpx.Response(200, json={"name": "o", "status": "DONE", "error": []}), Unsure),
    ],
)
def test_a_refused_order_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: httpx.Response, kind: type[DriverError]
) -> None:
    with pytest.raises(kind) as refused:
        answer(monkeypatch, lambda _: reply, lambda driver: driver.acquire(ORDER), tmp_path)
    assert str(refused.value).isprintable()


def test_an_order_that_was_made_already_is_ours_and_says_who_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return error(409, "alreadyExists")

    first = answer(monkeypatch, reply, lambda driver: driver.acquire(ORDER), tmp_path)
    assert answer(monkeypatch, reply, lambda driver: driver.acquire(ORDER), tmp_path) == first
    assert len({request.url.params["requestId"] for request in sent}) == 1, (
        "the key of the lease decides it"
    )
    body = json.loads(sent[0].content)
    assert body["scheduling"]["instanceTerminationAction"] == "DELETE"
    left = (ORDER.until - datetime.now(UTC)).total_seconds()
    assert abs(int(body["scheduling"]["maxRunDuration"]["seconds"]) - left) < 30
    assert (
        all(disk["autoDelete"] for disk in body["disks"])
        and body["name"].startswith("recipe-")
        and body["labels"]["recipe"] in body["name"]
    )


def test_a_404_is_no_proof_unless_it_names_the_instance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lease = Lease("gcp", "us-central1-a/recipe-x", "k")

    def gone(message: str) -> Any:
        return answer(
            monkeypatch,
            lambda _: error(404, "notFound", message),
            lambda driver: driver.release(lease),
            tmp_path,
        )

    assert (
        gone("The resource 'projects/p/zones/us-central1-a/instances/recipe-x' was not found")
        is True
    )
    with pytest.raises(DriverError):
        gone("The resource 'projects/p' was not found")


@pytest.mark.parametrize(
    "body",
    [
        {"unreachables": ["zones/a"]},
        {"items": {"zones/a": {"warning": {"code": "UNREACHABLE"}}}},
        {"items": 3},
    ],
)
def test_a_listing_that_misses_a_zone_is_no_listing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: object
) -> None:
    with pytest.raises(Unreachable):
        answer(
            monkeypatch,
            lambda _: httpx.Response(200, json=body),
            lambda driver: driver.leases(),
            tmp_path,
        )


def test_a_zone_without_room_is_tried_last_and_those_that_have_some_are_not(
    market: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in market.exports.items():
        monkeypatch.setenv(name, value)
    market.ask("/_faults", "taken@create=once,takes=0")

    async def act() -> None:
        driver = Gcp(installation=str(tmp_path / "installation"))
        wish = Wish(Need(gpus=1, gpu="L4"))
        first, *others = await driver.offers(wish)
        with pytest.raises(NoCapacity, match="there are some in us-central1"):
            await driver.acquire(Order(first, "1" * 16, ORDER.until))
        again = await driver.offers(wish)
        assert again[0].id == others[0].id
        assert again[-1].id == first.id and len(again) == len(others) + 1
        await driver.aclose()

    asyncio.run(act())


@pytest.mark.skipif(
    os.environ.get("RECIPE_LIVE") != "gcp",
    reason="RECIPE_LIVE=gcp rents a real machine, for at most 0.05 USD",
)
def test_a_real_machine_is_rented_and_given_back(space: Space) -> None:
    space.write("recipe.toml", '[drivers.gcp]\nmarket = "spot"\nmax_price = 0.4\nleast = 60\n')
    space.recipe(
        "limits: {cost: 0.05 USD}\nsteps:\n  s: {run: 'nvidia-smi -L > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    code, _, said = space.command("run", "--driver", "gcp", "--yes")
    assert code == 0 and space.read("o").startswith("GPU 0"), said
    assert space.command("reap", "-n")[1] == "no leases\n"
