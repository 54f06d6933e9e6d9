"""What cannot work at Vast.ai ends in a sentence, and rents nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
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
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Throttled,
    Unreachable,
    Unsure,
    Wish,
)
from drivers.vastai import Vastai
from tests.fake_provider import Provider, provider
from tests.rented import ours, rents
from tests.support import Space

RECIPE = "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with provider("vastai") as found:
        yield found


def refused(space: Space, *words: str) -> tuple[int, str]:
    space.recipe(RECIPE)
    code, _, said = space.command(*words)
    return code, said


def test_without_a_key_the_variable_and_the_file_are_named(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch)
    monkeypatch.delenv("VAST_API_KEY")
    code, said = refused(space, "run", "--driver", "vastai")
    assert (
        code == 5
        and "no API key for Vast.ai in VAST_API_KEY or " in said
        and "config/vastai/vast_api_key" in said
        and ours(market) == []
    )
    assert space.command("doctor", "--driver", "vastai")[0] == 2


def test_doctor_shows_the_account_and_what_is_offered(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch)
    code, out, _ = space.command("doctor", "--driver", "vastai")
    assert (
        code == 0
        and "by the key of VAST_API_KEY" in out
        and "$100.00" in out
        and "machines with a GPU, from $" in out
    )


def test_a_provider_that_cannot_be_reached_is_named(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, api="http://127.0.0.1:1")
    code, said = refused(space, "plan", "--driver", "vastai")
    assert code == 0 and not said.count("Traceback")
    code, said = refused(space, "run", "--driver", "vastai")
    assert code == 5 and "cannot reach http://127.0.0.1:1" in said


def test_a_misspelt_setting_is_refused_before_anything_is_asked(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, regoins="SE")
    code, said = refused(space, "run", "--driver", "vastai")
    assert code == 3 and 'did you mean "regions"?' in said and ours(market) == []


@pytest.mark.parametrize(
    ("where", "resources", "words"),
    [
        (
            "gpu=RTX 4091",
            "gpus: 1",
            (
                "excluded",
                "another GPU",
                'did you mean "rtx 4090"?',
                "recipe offers --driver vastai",
            ),
        ),
        ("max_price=0.0001", "gpus: 1", ("above max_price", "relax the filters")),
        ("gpu=", "gpus: 1, disk: 900 TB", ("too little disk",)),
    ],
)
def test_what_no_provider_offers_is_refused_with_why_and_rents_nothing(
    space: Space,
    market: Provider,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    resources: str,
    words: tuple[str, ...],
) -> None:
    rents(space, market, monkeypatch)
    space.recipe(
        f"steps:\n  s: {{run: 'echo 1 > o', resources: {{{resources}}}, outputs: {{o: o}}}}\n"
    )
    code, _, said = space.command("run", "--driver", "vastai", "--where", where)
    assert code == 5 and all(word in said for word in words) and ours(market) == [], said


def test_machines_that_are_there_for_less_time_than_the_steps_take_are_left_out(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch)
    space.recipe(RECIPE.replace("resources: {gpus: 1}, ", "").replace("echo 1", "echo 2"))
    space.run()
    with contextlib.closing(sqlite3.connect(space.root / ".recipe/recipe.db")) as db, db:
        db.execute("UPDATE traces SET seconds = 1e9")
    code, said = refused(space, "run", "--driver", "vastai", "--yes")
    assert code == 5 and "available for too short a time" in said and ours(market) == []


def test_an_order_that_the_provider_refuses_names_where_to_look_and_rents_nothing(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, image="x" * 1100)
    code, said = refused(space, "run", "--driver", "vastai")
    assert (
        code == 5
        and "image has at most 1024 characters" in said
        and "`recipe offers --driver vastai`" in said
        and ours(market) == []
    )


def test_secrets_that_a_setting_denies_are_named_and_nothing_is_rented(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, secrets="deny")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef0123")
    monkeypatch.setenv("JOB_TOKEN", "abcdefghijklmnop")
    space.recipe(
        "inputs: {hf_token: {type: secret, env: HF_TOKEN}}\n"
        "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, secrets: [hf_token], pass_env: [JOB_TOKEN], outputs: {o: o}}\n"
    )
    code, out, _ = space.command("plan", "--driver", "vastai")
    assert code == 0 and "secrets sent to vastai machines: HF_TOKEN, JOB_TOKEN" in out
    code, _, said = space.command("run", "--driver", "vastai")
    assert (
        code == 3
        and "s would send HF_TOKEN, JOB_TOKEN to a rented machine" in said
        and "in [drivers.vastai]" in said
        and ours(market) == []
    )


def test_a_plan_names_the_inputs_for_whose_objects_machines_are_given_signed_addresses(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe(
        "inputs: {data: {type: dataset}}\nsteps:\n  s: {run: 'ls {{ inputs.data }} > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    space.write("recipe.lock", '{"s3://b/rows": "etag:0"}')
    for settings, expected in ({}, True), ({"secrets": "deny"}, False):
        rents(space, market, monkeypatch, **settings)
        code, out, said = space.command("plan", "--driver", "vastai", "data=s3://b/rows")
        assert code == 0, said
        assert (
            "secrets sent to vastai machines: signed URLs of the objects in s3://b/rows" in out
        ) is expected


# --- replies


def answer(
    monkeypatch: pytest.MonkeyPatch,
    reply: Callable[[httpx.Request], httpx.Response],
    act: Callable[[Vastai], Any],
    tmp_path: Path,
) -> Any:
    monkeypatch.setenv("VAST_API_KEY", "k")
    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    return asyncio.run(act(Vastai(api="http://x", installation=str(tmp_path / "installation"))))


ORDER = Order(
    Offer("vastai", "7", data={"disk": "32"}), "0" * 16, datetime.now(UTC) + timedelta(hours=1)
)
DEEP = b'{"offers": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, content=DEEP),
        httpx.Response(200, html="<html>502</html>"),
        httpx.Response(200, json={"offers": {}}),
        httpx.Response(200, json=[]),
        httpx.Response(500, text="\x1b[31mred"),
        httpx.Response(200, json={"offers": ["x"]}),
    ],
    ids=["deep", "html", "other", "list", "broken", "texts"],
)
def test_a_reply_that_cannot_be_read_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: httpx.Response
) -> None:
    with pytest.raises(Unreachable) as error:
        answer(monkeypatch, lambda _: reply, lambda driver: driver.offers(Wish()), tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (410, {"error": "no_such_ask"}, NoCapacity),
        (
            404,
            {"msg": "error 404/3603: no_such_ask  Instance type by id 7 is not available."},
            NoCapacity,
        ),
        (400, {"error": "invalid_price", "new_contract": 9}, NoCapacity),
        (404, {"error": "auth_error", "msg": "Invalid user key"}, Denied),
        (403, {"error": "auth_error"}, Denied),
        (400, {"error": "missing_billing", "msg": "Your account lacks credit"}, Denied),
        (400, {"error": "invalid_args", "msg": "image is required"}, Rejected),
        (429, {"detail": "API requests too frequent endpoint threshold=4.5"}, Throttled),
        (500, {}, Unsure),
        (200, {}, Unsure),
    ],
)
def test_a_refused_order_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
    body: dict[str, Any],
    kind: type[DriverError],
) -> None:
    with pytest.raises(kind) as error:
        answer(
            monkeypatch,
            lambda _: httpx.Response(status, json=body),
            lambda driver: driver.acquire(ORDER),
            tmp_path,
        )
    assert (error.value.lease is not None) is ("new_contract" in body)
    if kind is Throttled:
        assert error.value.after == timedelta(seconds=4.5)  # type: ignore[attr-defined]


def test_an_account_without_credit_rents_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        Denied,
        match=r"has \$0.00: renting is impossible; add credit at https://cloud.vast.ai/billing/",
    ):
        answer(
            monkeypatch,
            lambda _: httpx.Response(200, json={"credit": 0}),
            lambda driver: driver.solvent(),
            tmp_path,
        )


def test_a_404_is_no_proof_unless_it_says_that_there_is_no_such_instance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(body: dict[str, Any]) -> Any:
        return answer(
            monkeypatch,
            lambda _: httpx.Response(404, json=body),
            lambda driver: driver.release(Lease("vastai", "9", "k")),
            tmp_path,
        )

    assert gone({"error": "no_such_instance"}) is True
    with pytest.raises(DriverError):
        gone({"error": "not_found"})
    with pytest.raises(Denied):
        gone({"error": "auth_error"})


@pytest.mark.skipif(
    os.environ.get("RECIPE_LIVE") != "vastai",
    reason="RECIPE_LIVE=vastai rents a real machine, for at most 0.05 USD",
)
def test_a_real_machine_is_rented_and_given_back(space: Space) -> None:
    space.write("recipe.toml", "[drivers.vastai]\nmax_price = 0.3\nleast = 60\n")
    space.recipe(
        "limits: {cost: 0.05 USD}\nsteps:\n  s: {run: 'nvidia-smi -L > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    code, _, said = space.command("run", "--driver", "vastai", "--yes")
    assert code == 0 and space.read("o").startswith("GPU 0"), said
    assert space.command("reap", "-n")[1] == "no leases\n"
