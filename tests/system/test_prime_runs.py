"""Promise: a run on pods of Prime Intellect brings home what a run here makes, and gives every pod back; what cannot work ends in a sentence."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncssh
import httpx
import pytest

from drivers import web
from drivers.base import (
    Denied,
    DriverError,
    HostLost,
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
from drivers.cloud import InstallationKeys
from drivers.prime import Prime
from tests.fake_provider import Provider, provider
from tests.rented import alive, key_of_the_account, ours, rents, same_as_here
from tests.support import Space
from tests.tools import needs

RECIPE = "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n"


@pytest.fixture(scope="module")
def real() -> Iterator[Provider]:
    with provider(
        "prime",
        "--hosts",
        "real",
        "--clock",
        "real",
        "--faults",
        "boot=0.4,foreign=3,taken@create=once",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with provider("prime") as found:
        yield found


def test_a_run_at_prime_makes_what_a_run_here_makes(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first offer is out of stock: it costs nothing, and the next is asked for.  A pod is ACTIVE before it is ready."""
    rents(
        space,
        real,
        monkeypatch,
        "prime",
        key=key_of_the_account(real, space.root.parent),
        first_use=True,
    )
    same_as_here(space, "prime", "--unattended")
    assert ours(real) == ["created", "started", "destroyed"] and len(alive(real, foreign=True)) == 3
    assert not [*(space.root.parent / "config" / "recipe" / "first-use").iterdir()], (
        "the host key of a pod that is gone is forgotten"
    )


def test_a_pod_that_shows_another_host_key_than_at_first_is_not_let_near_anything(
    tmp_path: Path, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_API_KEY", real.exports["PRIME_API_KEY"])
    secret = tmp_path / "installation"
    given: dict[str, Any] = {
        "api": real.url,
        "installation": str(secret),
        "key": key_of_the_account(real, tmp_path),
        "first_use": True,
    }

    async def act() -> None:
        driver = Prime(**given)
        lease = await driver.acquire(
            Order(
                (await driver.offers(Wish()))[0], "f" * 16, datetime.now(UTC) + timedelta(hours=1)
            )
        )
        other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
        assert InstallationKeys.of(str(secret)).believe(lease.key, other) == " ".join(
            other.split()[:2]
        )
        while (  # noqa: ASYNC110
            (found := await driver._wire.show(lease.id)) is None
            or not found.ready
            or found.login is None
        ):  # it does not call
            await asyncio.sleep(0.05)
        assert await driver.hosts(lease) is None
        InstallationKeys.of(str(secret)).first_seen(lease.key).unlink()
        assert await driver.hosts(lease) is not None
        assert await driver.release(lease)
        await driver.aclose()

    asyncio.run(act())


# --- refusals


def refused(space: Space, *words: str) -> tuple[int, str]:
    space.recipe(RECIPE)
    code, _, said = space.command(*words)
    return code, said


def test_without_first_use_nothing_is_rented_and_no_secret_is_sent(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "prime", key=key_of_the_account(market, space.root.parent))
    code, said = refused(space, "run", "--driver", "prime", "--unattended")
    assert (
        code == 5
        and "set `first_use = true` below [drivers.prime]" in said
        and "including secrets" in said
        and ours(market) == []
    )


def test_in_a_pipe_a_provider_that_ends_nothing_needs_a_word(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "prime", first_use=True)
    code, said = refused(space, "run", "--driver", "prime", "--yes")
    assert (
        code == 3
        and "nothing terminates the machine if recipe dies" in said
        and "--unattended" in said
        and ours(market) == []
    )


def test_a_key_that_the_account_does_not_have_opens_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: asyncssh.SSHKey
) -> None:
    with pytest.raises(Denied, match=r"has no SSH key .*; add its public key at https://"):
        answer(
            monkeypatch,
            lambda _: page({"id": "1", "publicKey": "ssh-ed25519 AAAA"}),
            lambda driver: driver.solvent(),
            tmp_path,
        )
    (tmp_path / "key").write_text("no key")
    with pytest.raises(
        Denied, match=r"cannot use the SSH key .*; set another `key` in `\[drivers.prime\]`"
    ):
        answer(monkeypatch, lambda _: page(), lambda driver: driver.solvent(), tmp_path)


def test_without_a_key_the_variable_and_the_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        Denied,
        match=r"no API key for Prime in PRIME_API_KEY or .*\.prime/config\.json; create one at https://",
    ):
        asyncio.run(
            Prime(api="http://x", installation=str(tmp_path / "installation")).offers(Wish())
        )


def test_doctor_fails_where_no_pod_would_let_us_in(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = space.root.parent
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(place / "other")
    keygen = [str(needs("ssh-keygen")), "-q", "-t", "ed25519", "-N", "a secret", "-f"]
    subprocess.run([*keygen, str(place / "locked")], check=True)
    for key, words in (
        (place / "absent", "cannot use"),
        (place / "other", "has no SSH key"),
        (place / "locked", "cannot use"),
    ):
        rents(space, market, monkeypatch, "prime", key=str(key), first_use=True)
        code, out, said = space.command("doctor", "--driver", "prime")
        line = next(each for each in out.splitlines() if " login " in each)
        assert code == 2 and line.startswith("missing") and words in line, (out, said)
    rents(
        space, market, monkeypatch, "prime", key=key_of_the_account(market, place), first_use=True
    )
    code, out, said = space.command("doctor", "--driver", "prime")
    assert code == 0 and ", which the account has" in out, (out, said)


def test_offers_plan_and_doctor_say_that_nothing_ends_a_pod(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, "prime", key=key_of_the_account(market, space.root.parent))
    space.recipe(RECIPE)
    code, out, _ = space.command("plan", "./recipe.yaml", "--driver", "prime")
    assert (
        code == 0
        and "rents for s: prime " in out
        and "nothing terminates the machine if recipe dies; the host key is trusted on first use"
        in out
    )
    code, out, _ = space.command("doctor", "--driver", "prime")
    assert (
        "by the key of PRIME_API_KEY" in out
        and "$100.00" in out
        and "which the account has" in out
        and "first_use = true" in out
    )


# --- replies

ASK = {
    "cloudId": "c1", "gpuType": "H100_80GB", "socket": "SXM5", "provider": "hyperstack", "dataCenter": "US-1", "country": "US", "gpuCount": 1,
    "gpuMemory": 80, "disk": {"minCount": 80, "defaultCount": 100, "maxCount": 1000, "pricePerUnit": 0.001, "defaultIncludedInPrice": True},
    "vcpu": {"defaultCount": 16}, "memory": {"defaultCount": 64}, "stockStatus": "Low", "security": "secure_cloud", "isSpot": False,
    "prices": {"onDemand": 2.0, "communityPrice": None, "currency": "USD"},
}  # fmt: skip
POD = {
    "id": "p1",
    "name": "theirs",
    "status": "ACTIVE",
    "sshConnection": [None],
    "installationStatus": "INSTALLING",
    "priceHr": 2.0,
}


@pytest.fixture
def key(tmp_path: Path) -> asyncssh.SSHKey:
    made = asyncssh.generate_private_key("ssh-ed25519")
    made.write_private_key(tmp_path / "key")
    return made


def answer(
    monkeypatch: pytest.MonkeyPatch,
    reply: Callable[[httpx.Request], httpx.Response],
    act: Callable[[Prime], Any],
    tmp_path: Path,
) -> Any:
    monkeypatch.setenv("PRIME_API_KEY", "k")
    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    monkeypatch.setattr(web.Web, "_of_loop", lambda self: client)
    return asyncio.run(
        act(
            Prime(
                api="http://x",
                installation=str(tmp_path / "installation"),
                key=str(tmp_path / "key"),
                first_use=True,
            )
        )
    )


def page(*rows: object) -> httpx.Response:
    return httpx.Response(200, json={"total_count": len(rows), "data": list(rows)})


ORDER = Order(
    Offer(
        "prime",
        "c1",
        data={
            **{
                name: "x"
                for name in (
                    "cloudId",
                    "gpuType",
                    "socket",
                    "dataCenter",
                    "country",
                    "security",
                    "provider",
                )
            },
            "disk": "80",
        },
    ),
    "0" * 16,
    datetime.now(UTC) + timedelta(hours=1),
)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (
            httpx.Response(
                400, json={"detail": "The selected provider has no capacity: out of stock."}
            ),
            NoCapacity,
        ),
        (httpx.Response(400, json={"detail": "The price is 3, above maxPrice."}), NoCapacity),
        (httpx.Response(404, json={"detail": "No offer c1"}), NoCapacity),
        (httpx.Response(400, json={"detail": "no such image"}), Rejected),
        (
            httpx.Response(
                422, json={"detail": [{"loc": ["body", "pod", "socket"], "msg": "Field required"}]}
            ),
            Rejected,
        ),
        (httpx.Response(401, json={"detail": "no"}), Denied),
        (httpx.Response(402, json={"detail": "Insufficient balance"}), Denied),
        (httpx.Response(403, json={"detail": "This key is of a team"}), Denied),
        (httpx.Response(429, json={"detail": "slow"}), Throttled),
        (httpx.Response(502, html="<html>"), Unsure),
        (httpx.Response(200, html="<html>"), Unsure),
        (httpx.Response(200, json={"id": None}), Unsure),
    ],
)
def test_a_refused_order_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    key: asyncssh.SSHKey,
    reply: httpx.Response,
    kind: type[DriverError],
) -> None:
    def replies(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/wallet"):
            return httpx.Response(200, json={"balance_usd": 5.0})
        return (
            reply
            if request.method == "POST"
            else page({"id": "1", "publicKey": key.export_public_key().decode()})
        )

    with pytest.raises(kind) as error:
        answer(monkeypatch, replies, lambda driver: driver.acquire(ORDER), tmp_path)
    assert str(error.value).isprintable()


def test_an_offer_costs_what_its_disk_costs_beyond_what_is_included(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = httpx.Response(200, json={"totalCount": 1, "items": [ASK]})
    [offer] = answer(
        monkeypatch, lambda _: found, lambda driver: driver.offers(Wish(disk=300 * 10**9)), tmp_path
    )
    assert (
        offer.price == pytest.approx(2.2)
        and offer.disk_price == pytest.approx(0.2)
        and offer.resources.disk == 300 * 10**9
    )
    assert offer.resources.gpu == "H100 80GB" and offer.region == "US-1, US"
    assert not answer(
        monkeypatch, lambda _: found, lambda driver: driver.offers(Wish(disk=2 * 10**12)), tmp_path
    )


@pytest.mark.parametrize("login", [[None], None, [], "root@h -p 22; reboot"])
def test_a_pod_without_a_login_is_coming_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, login: object
) -> None:
    shown = httpx.Response(
        200, json={**POD, "installationStatus": "FINISHED", "sshConnection": login}
    )
    assert (
        answer(
            monkeypatch,
            lambda _: shown,
            lambda driver: driver.hosts(Lease("prime", "p1", "k")),
            tmp_path,
        )
        is None
    )


def test_a_pod_whose_installation_failed_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = httpx.Response(200, json={**POD, "installationFailure": "cannot reach the mirror"})
    with pytest.raises(HostLost, match="cannot reach the mirror"):
        answer(
            monkeypatch,
            lambda _: shown,
            lambda driver: driver.hosts(Lease("prime", "p1", "k")),
            tmp_path,
        )


def test_a_404_is_proof_only_with_a_complete_list_that_lacks_the_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(listing: httpx.Response) -> Any:
        def reply(request: httpx.Request) -> httpx.Response:
            return (
                listing
                if request.url.path == "/api/v1/pods"
                else httpx.Response(404, json={"detail": "Not Found"})
            )

        return answer(
            monkeypatch, reply, lambda driver: driver.release(Lease("prime", "p1", "k")), tmp_path
        )

    assert gone(page({**POD, "id": "p2"})) is True and gone(page(POD)) is False
    for other in (
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(200, json={"total_count": 2, "data": [{**POD, "id": "p2"}]}),
    ):
        with pytest.raises(DriverError):
            gone(other)


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, content=b'{"items": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        httpx.Response(200, html="<html>502</html>"),
        httpx.Response(200, json={"items": {}}),
        httpx.Response(200, json={"items": [{**ASK, "prices": 3}]}),
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
    os.environ.get("RECIPE_LIVE") != "prime",
    reason="RECIPE_LIVE=prime rents a real machine, for at most 0.05 USD",
)
def test_a_real_pod_is_rented_and_given_back(space: Space) -> None:
    space.write("recipe.toml", "[drivers.prime]\nmax_price = 0.5\nleast = 60\nfirst_use = true\n")
    space.recipe(
        "limits: {cost: 0.05 USD}\nsteps:\n  s: {run: 'nvidia-smi -L > o', resources: {gpus: 1}, outputs: {o: o}}\n"
    )
    code, _, said = space.command("run", "--driver", "prime", "--yes", "--unattended")
    assert code == 0 and space.read("o").startswith("GPU 0"), said
    assert space.command("reap", "-n")[1] == "no leases\n"
