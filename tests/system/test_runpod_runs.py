"""Promise: a run on pods of RunPod brings home what a run here makes, and gives every pod back; what cannot work ends in a sentence."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from drivers import web
from drivers.base import (
    Denied,
    DriverError,
    Lease,
    NoCapacity,
    Order,
    Rejected,
    Throttled,
    Unreachable,
    Unsure,
    Wish,
)
from drivers.runpod import Runpod
from runner.execution.terms import Settings
from tests.fake_provider import Provider, provider
from tests.rented import alive, ours, rents, same_as_here
from tests.support import Space
from tests.tools import published_schemas

RECIPE = "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"


@pytest.fixture(scope="module")
def real() -> Iterator[Provider]:
    with provider(
        "runpod",
        "--hosts",
        "real",
        "--clock",
        "real",
        "--faults",
        "boot=0.1,foreign=3,taken@create=once",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with provider("runpod", "--faults", "balance=0.05") as found:
        yield found


def test_a_run_at_runpod_makes_what_a_run_here_makes(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 is no capacity: it costs nothing, and the next type of GPU is asked for."""
    rents(space, real, monkeypatch, "runpod")
    same_as_here(space, "runpod")
    assert ours(real) == ["created", "started", "destroyed"] and len(alive(real, foreign=True)) == 3


def test_a_pod_whose_key_may_not_delete_it_stops_itself_at_its_time(
    tmp_path: Path, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", real.exports["RUNPOD_API_KEY"])

    async def left_alone() -> None:
        driver = Runpod(api=real.url, installation=str(tmp_path / "installation"))
        offer = (await driver.offers(Wish()))[0]
        lease = await driver.acquire(
            Order(offer, "0" * 16, datetime.now(UTC) + timedelta(seconds=1))
        )
        while (found := await driver._wire.show(lease.id)) is not None and found.status != "EXITED":  # noqa: ASYNC110  # it does not call
            await asyncio.sleep(0.05)
        assert found is not None, "its disk is there still"
        assert (
            lease in await driver.leases()
            and await driver.release(lease)
            and lease not in await driver.leases()
        )
        await driver.aclose()

    asyncio.run(left_alone())


# --- refusals


def refused(space: Space, *words: str) -> tuple[int, str]:
    space.recipe(RECIPE)
    code, _, said = space.command(*words)
    return code, said


def test_without_a_key_the_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    with pytest.raises(
        Denied, match="no API key for RunPod in RUNPOD_API_KEY; create one at https://"
    ):
        asyncio.run(
            Runpod(api="http://x", installation=str(tmp_path / "installation")).offers(Wish())
        )


def test_an_account_that_cannot_pay_for_an_hour_rents_nothing(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "runpod")
    space.recipe(RECIPE)
    space.attempt(settings=Settings(driver="runpod"))
    assert space.summary is not None
    [failed] = space.summary.failed
    words = "Your balance must cover at least one hour of this pod. See https://console.runpod.io/user/billing"
    assert failed.is_unplaced and words in failed.reason and ours(market) == []


def test_a_data_center_that_runpod_does_not_have_is_refused_with_the_one_that_was_meant(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "runpod", regions="EU-RO-2")
    code, said = refused(space, "run", "--driver", "runpod")
    assert (
        code == 5
        and 'RunPod has no data center "EU-RO-2", did you mean "EU-RO-1"?' in said
        and ours(market) == []
    )


def test_offers_and_doctor_show_the_market_and_who_ends_a_pod(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "runpod", verified=False)
    space.recipe(RECIPE)
    code, out, _ = space.command("offers", "./recipe.yaml", "--driver", "runpod")
    assert code == 0 and "NVIDIA GeForce RTX" in out and "its disk is still billed" in out
    code, out, _ = space.command("doctor", "--driver", "runpod")
    assert (
        code == 0
        and "by the key of RUNPOD_API_KEY; it has 0 pods" in out
        and "not shown by RunPod before an order" in out
    )


# --- replies


def answer(
    monkeypatch: pytest.MonkeyPatch,
    reply: Callable[[httpx.Request], httpx.Response],
    act: Callable[[Runpod], Any],
    tmp_path: Path,
) -> Any:
    monkeypatch.setenv("RUNPOD_API_KEY", "k")
    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    return asyncio.run(act(Runpod(api="http://x", installation=str(tmp_path / "installation"))))


def problem(status: int, detail: str = "no", **headers: str) -> httpx.Response:
    return httpx.Response(
        status,
        json={"title": "Problem", "status": status, "detail": detail},
        headers={"retry-after": "7", **headers},
    )


GPU = {
    "id": "NVIDIA L40S", "name": "L40S", "memory": 48, "secure": True, "community": False, "price": {"secure": 0.9, "community": 0.0},
    "maxCount": {"secure": 8, "community": 8}, "availability": "LOW", "dataCenters": [{"id": "EU-RO-1", "name": "x", "availability": "LOW"}],
    "cudaVersions": [{"version": "12.8", "available": True}],
}  # fmt: skip
POD = {"id": "p1", "name": "theirs", "status": "RUNNING", "cost": 0.9, "disk": 32}


async def order(driver: Runpod) -> Lease:
    offer = driver._offer(_gpu(), "secure", 1, 32, driver._filters, keep=False)
    return await driver.acquire(Order(offer, "0" * 16, datetime.now(UTC) + timedelta(hours=1)))


def _gpu() -> Any:
    from drivers.runpod_wire import _gpu as read

    return read(GPU)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (problem(400, "There are no instances currently available"), NoCapacity),
        (problem(403), NoCapacity),
        (problem(402), Denied),
        (problem(401), Denied),
        (problem(410), Denied),
        (problem(422), Rejected),
        (problem(429), Throttled),
        (problem(500), Unsure),
        (httpx.Response(201, html="<html>"), Unsure),
        (httpx.Response(201, json={"id": 7}), Unsure),
        (httpx.Response(302), Unsure),
    ],
)
def test_a_refused_order_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: httpx.Response, kind: type[DriverError]
) -> None:
    with pytest.raises(kind) as error:
        answer(monkeypatch, lambda _: reply, order, tmp_path)
    assert str(error.value).isprintable()
    if isinstance(error.value, Throttled):
        assert error.value.after == timedelta(seconds=7)


def test_a_pod_is_ordered_with_our_key_alone_and_the_keys_of_the_account_are_never_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(201, json=POD)

    answer(monkeypatch, reply, order, tmp_path)
    [request] = asked
    body: dict[str, Any] = json.loads(request.content)
    script = base64.b64decode(body["args"].split()[3]).decode()
    assert (
        (request.method, request.url.path) == ("POST", "/v2/pods")
        and body["ports"] == ["22/tcp"]
        and "startSsh" not in body
    )
    assert (
        body["env"].keys() == {"PUBLIC_KEY"}
        and body["env"]["PUBLIC_KEY"] in script
        and body["name"].startswith("recipe-")
    )
    assert "Bearer k" not in request.content.decode() + script, (
        "the key of the account is not sent to the pod"
    )


def test_an_order_has_the_form_of_the_providers_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = json.loads(
        (published_schemas() / "runpod_v2_openapi_2026-08-20.json").read_text("utf-8")
    )
    schema = {"$ref": "#/components/schemas/CreatePodRequest", "components": document["components"]}

    def reply(request: httpx.Request) -> httpx.Response:
        jsonschema.validate(json.loads(request.content), schema, jsonschema.Draft202012Validator)
        return httpx.Response(201, json=POD)

    assert answer(monkeypatch, reply, order, tmp_path).id == "p1"


def test_the_pages_of_a_listing_are_followed_and_a_proxy_is_no_way_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proxy = {"host": "ssh.runpod.io", "port": 22, "username": "p", "command": "ssh"}

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/p1"):
            return httpx.Response(200, json={**POD, "ssh": {"proxy": proxy, "direct": None}})
        second = "cursor" in request.url.params
        return httpx.Response(
            200,
            json={
                "pods": [{**POD, "id": f"p{1 + second}"}],
                **({} if second else {"nextCursor": "c"}),
            },
        )

    assert [
        pod.id
        for pod in answer(monkeypatch, reply, lambda driver: driver._wire.listing(), tmp_path)
    ] == ["p1", "p2"]
    assert (
        answer(
            monkeypatch, reply, lambda driver: driver.hosts(Lease("runpod", "p1", "k")), tmp_path
        )
        is None
    )


def test_a_404_is_no_proof_unless_runpod_says_it_in_its_own_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(reply: httpx.Response) -> Any:
        return answer(
            monkeypatch,
            lambda _: reply,
            lambda driver: driver.release(Lease("runpod", "p1", "k")),
            tmp_path,
        )

    assert gone(problem(404)) is True
    for other in (
        httpx.Response(404, html="<html>"),
        httpx.Response(404, json={"message": "no route"}),
        problem(401),
    ):
        with pytest.raises(DriverError):
            gone(other)


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, content=b'{"gpus": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        httpx.Response(200, html="<html>502</html>"),
        httpx.Response(200, json={"gpus": {}}),
        httpx.Response(200, json={"gpus": [{**GPU, "price": 3}]}),
        httpx.Response(500, text="\x1b[31mred"),
    ],
    ids=["deep", "html", "other", "price", "broken"],
)
def test_a_reply_that_cannot_be_read_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: httpx.Response
) -> None:
    with pytest.raises(Unreachable) as error:
        answer(monkeypatch, lambda _: reply, lambda driver: driver.offers(Wish()), tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.skipif(
    os.environ.get("RECIPE_LIVE") != "runpod",
    reason="RECIPE_LIVE=runpod rents a real machine, for at most 0.05 USD",
)
def test_a_real_pod_is_rented_and_given_back(space: Space) -> None:
    space.write("recipe.toml", "[drivers.runpod]\nmax_price = 0.5\nleast = 60\n")
    space.recipe(
        "limits: {cost: 0.05 USD}\nsteps:\n  s: {run: 'nvidia-smi -L > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    code, _, said = space.command("run", "--driver", "runpod", "--yes")
    assert code == 0 and space.read("o").startswith("GPU 0"), said
    assert space.command("reap", "-n")[1] == "no leases\n"
