"""Promise: a run on machines of Vast.ai brings home what a run here makes, and gives every machine back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncssh
import psutil
import pytest

from drivers import cloud
from drivers.base import Host, HostLost, Lease, Order, Unreachable, Wish
from drivers.fakes.world import _digest as digest
from drivers.installation import Installation
from drivers.vastai import Vastai
from runner.interface.cli.main import main
from tests.fake_provider import Provider, provider
from tests.rented import alive, installation, ours, rents, same_as_here
from tests.support import Space, until


@pytest.fixture(scope="module")
def real() -> Iterator[Provider]:
    with provider(
        "vastai", "--hosts", "real", "--clock", "real", "--faults", "boot=0.3,foreign=30"
    ) as found:
        yield found


def test_a_run_on_a_rented_machine_makes_what_a_run_here_makes(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch)
    same_as_here(space, "vastai")
    assert (
        ours(real) == ["created", "started", "destroyed"] and len(alive(real, foreign=True)) == 30
    )
    assert installation(space).stat().st_mode & 0o777 == 0o600
    assert (
        space.command("run", "--driver", "vastai")[0] == 0 and ours(real).count("created") == 1
    ), "a run with nothing to do rents nothing"
    made = (space.root / "model.txt").stat().st_size
    (space.root / "train.py").write_text(f"{space.read('train.py')}\n")
    (shelf,) = json.loads(space.command("offers", "recipe.yaml", "--driver", "vastai", "--json")[1])
    offer = shelf["offers"][0]
    assert shelf["bytes_home"] == made and offer["usd"] == pytest.approx(
        offer["usd_an_hour"] * shelf["hours"] + offer["usd_of_boot"] + offer["usd_of_egress"]
    )


def test_a_machine_with_our_mark_that_no_ledger_knows_is_reported_with_its_cost_and_ended_when_asked(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch)

    async def lose() -> list[str]:
        driver = Vastai(installation=str(installation(space)))
        offers = await driver.offers(Wish())
        leases = [
            await driver.acquire(
                Order(offer, os.urandom(8).hex(), datetime.now(UTC) + timedelta(hours=1))
            )
            for offer in offers[:2]
        ]
        await driver.aclose()
        return [lease.key for lease in leases]

    before = alive(real)
    first, second = asyncio.run(lose())
    space.recipe("steps:\n  s: {run: 'echo 1 > o', outputs: {o: o}}\n")
    code, _, said = space.command("run", "--driver", "vastai")
    assert (
        code == 0
        and f"vastai {first} (machine " in said
        and " a day; add it to the ledger with `recipe reap --adopt " in said
    )
    code, out, _ = space.command("reap", "--adopt", first)
    assert (
        code == 0
        and f"kept         vastai {first}" in out
        and f"unknown      vastai {second}" in out
    )
    assert space.command("reap", "--unknown")[0] == 3 and len(alive(real) - before) == 2, (
        "a pipe cannot be asked"
    )
    assert (
        space.command("reap", "--unknown", "--yes", first)[0] == 0
        and alive(real) == before
        and len(alive(real, foreign=True)) == 30
    )
    assert space.command("reap", "--adopt", first)[0] == 3


def test_the_machines_of_another_installation_are_listed_and_ended_when_asked(
    space: Space,
    real: Provider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rents(space, real, monkeypatch)

    async def lose(count: int) -> tuple[str, list[str]]:
        driver = Vastai(installation=str(space.root / "other"))
        offers = await driver.offers(Wish())
        leases = [
            await driver.acquire(
                Order(offer, os.urandom(8).hex(), datetime.now(UTC) + timedelta(hours=1))
            )
            for offer in offers[:count]
        ]
        await driver.aclose()
        return Installation.of(str(space.root / "other")).name, [lease.key for lease in leases]

    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = alive(real)
    name, keys = asyncio.run(lose(2))

    def reap(*words: str) -> tuple[int, str]:
        code = main(["reap", "-C", str(space.root), "--installation", name, *words])
        return code, capsys.readouterr().out

    code, out = reap()
    assert code == 0 and out.count(f"of the installation {name} has no lease in the ledger: $") == 2
    assert len(alive(real) - before) == 2, "listing ends nothing"
    code, out = reap(keys[0])
    assert code == 0 and f"ended        vastai {keys[0]}" in out and len(alive(real) - before) == 1
    assert reap("--unknown")[0] == 3 and len(alive(real) - before) == 1, "a pipe cannot be asked"
    assert (
        reap("--unknown", "--yes")[0] == 0
        and alive(real) == before
        and len(alive(real, foreign=True)) == 30
    )
    for wrong in (("--installation", "../x"), ("--dead",), ("--adopt", keys[1])):
        assert reap(*wrong)[0] == 3


def test_offers_are_shown_the_cheapest_first_with_what_was_left_out_and_why(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch)
    code, out, _ = space.command(
        "offers", "--json", "--driver", "vastai", "--where", "gpu_memory=30"
    )
    (shelf,) = json.loads(out)
    prices = [offer["usd_an_hour"] for offer in shelf["offers"]]
    assert (
        code == 0
        and prices == sorted(prices)
        and prices
        and all(offer["gpu_memory"] >= 30e9 for offer in shelf["offers"])
    )
    assert (
        shelf["left_out"]["too little GPU memory"] > 0
        and shelf["ends"] == "the machine terminates itself when its rental period ends"
    )
    code, _, said = space.command("offers", "--driver", "vastai", "--where", "gpu_memroy=30")
    assert code == 3 and 'did you mean "gpu_memory"?' in said
    space.recipe(
        "steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n  t: {run: 'echo 1 > p', outputs: {o: p}}\n"
    )
    code, out, _ = space.command("offers", "recipe.yaml", "--driver", "vastai")
    assert code == 0 and out.startswith("vastai for s: ")
    code, out, _ = space.command("plan", "--driver", "vastai")
    assert (
        code == 0
        and "\nrents for s: vastai " in out
        and out.count(f"\n{'':9}else: vastai ") == 2
        and "the machine terminates itself when its rental period ends" in out
    )
    assert "rents for t" not in out


def test_an_offer_without_a_readable_price_is_left_out_by_every_verb_and_never_rented(
    space: Space,
    real: Provider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rents(space, real, monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    space.recipe("steps:\n  s: {run: 'echo 1 > o', resources: {gpus: 1}, outputs: {o: o}}\n")
    before = len(ours(real))
    real.ask("/_faults", "boot=0.3,foreign=30,unpriced=1")
    try:
        for words, expected in (
            (("offers",), 0),
            (("offers", "./recipe.yaml"), 0),
            (("plan", "./recipe.yaml"), 0),
            (("run", "./recipe.yaml"), 5),
            (("run", "./recipe.yaml", "--yes"), 5),
        ):
            code = main([*words, "-C", str(space.root), "--driver", "vastai"])
            out, said = capsys.readouterr()
            assert code == expected and " no price" in out + said, (words, out, said)
            assert "$0.00" not in out + said
    finally:
        real.ask("/_faults", "boot=0.3,foreign=30")
    assert len(ours(real)) == before


def test_a_machine_with_fewer_gpus_than_were_sold_is_given_back_and_the_next_is_rented(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch)
    space.recipe(
        "steps:\n  s: {run: 'nvidia-smi -L | wc -l > o', resources: {gpus: 2}, outputs: {o: o}}\n"
    )
    before = len(ours(real))
    real.ask("/_faults", "boot=0.1,fewer@create=once")
    code, _, said = space.command("run", "--driver", "vastai")
    assert (
        code == 0
        and "it has 3 GPUs, but " in said
        and " were expected" in said
        and int(space.read("o")) >= 2
    ), said
    assert ours(real)[before:].count("destroyed") == ours(real)[before:].count("created") >= 2


def test_a_machine_whose_gpu_is_wedged_is_given_back_and_the_next_is_rented(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch)
    space.recipe("steps:\n  s: {run: 'echo > o', resources: {gpus: 1}, outputs: {o: o}}\n")
    before = len(ours(real))
    real.ask("/_faults", "boot=0.1,wedged=once")
    code, _, said = space.command("run", "--driver", "vastai")
    assert code == 0 and "nvidia-smi did not answer" in said, said
    assert ours(real)[before:].count("destroyed") == ours(real)[before:].count("created") == 2


def test_a_step_with_an_image_runs_on_a_machine_of_it_and_one_with_another_image_on_another(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no container engine: nothing is wrapped."""
    rents(space, real, monkeypatch, container_engine="/nowhere/docker")
    step = "{run: 'echo 1 > %s', image: 'team/trainer:%s', resources: {gpus: 1}, outputs: {o: %s}}"
    space.recipe(
        f"steps:\n  a: {step % ('a', 1, 'a')}\n  b: {step % ('b', 2, 'b')}\n  c: {step % ('c', 1, 'c')}\n"
    )
    before = {entry["machine"] for entry in real.ledger()}
    code, _, said = space.command("run", "--driver", "vastai")
    assert code == 0, said
    made = {entry["machine"] for entry in real.ledger()} - before
    assert sorted(real.ask(f"/_logs/{id}/0").split("\n")[0] for id in made) == [
        "team/trainer:1",
        "team/trainer:2",
    ] and not alive(real)


Act = Callable[[Vastai, Lease], Coroutine[None, None, None]]


def on_machine(
    real: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Act, lasts: float = 3600.0
) -> None:
    """Do something with a lease of a machine that has just been ordered, and end it."""
    monkeypatch.setenv("VAST_API_KEY", real.exports["VAST_API_KEY"])

    async def acting() -> None:
        driver = Vastai(api=real.url, installation=str(tmp_path / "installation"), poll=0.1)
        until = datetime.now(UTC) + timedelta(seconds=lasts)
        lease = await driver.acquire(
            Order((await driver.offers(Wish()))[0], os.urandom(8).hex(), until)
        )
        try:
            await act(driver, lease)
        finally:
            assert await driver.release(lease)
            await driver.aclose()

    asyncio.run(acting())


async def up(driver: Vastai, lease: Lease) -> Host:
    while (hosts := await driver.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
        await asyncio.sleep(0.05)
    return hosts[0]


async def said(host: Host, script: str) -> str:
    return b"".join([data async for data in host.call(("sh", "-c", script))]).decode()


def test_a_machine_ends_itself_when_its_time_is_over_without_a_request(
    real: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(driver: Vastai, lease: Lease) -> None:
        async with asyncio.timeout(30):
            while lease in await driver.leases():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(HostLost):
            await driver.hosts(lease)

    on_machine(real, tmp_path, monkeypatch, act, lasts=1.0)
    ended = [entry for entry in real.ledger() if entry["event"] == "destroyed"][-1]
    assert ended["by"] == digest(f"instance-{ended['machine']}"), (
        "with the key of the instance, not of the account"
    )


def test_the_time_of_a_machine_is_moved(
    real: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(driver: Vastai, lease: Lease) -> None:
        host = await up(driver, lease)
        await driver.prolong(lease, datetime.now(UTC) + timedelta(seconds=7200))
        assert (
            7100 < float(await said(host, "echo $(($(cat ~/.recipe-until) - $(date +%s)))")) <= 7200
        )

    on_machine(real, tmp_path, monkeypatch, act)


def test_the_key_of_the_account_and_our_private_key_are_not_on_the_machine(
    real: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(driver: Vastai, lease: Lease) -> None:
        found = await said(await up(driver, lease), "env; cd; cat .ssh/* .recipe-*")
        private = driver._installation.login(lease.key).decode().split("\n")[2]
        assert (
            real.exports["VAST_API_KEY"] not in found
            and private not in found
            and "ssh-ed25519" in found
        )

    on_machine(real, tmp_path, monkeypatch, act)


def test_a_machine_that_shows_another_host_key_than_it_was_given_is_never_used(
    real: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who answers in its place gets no data."""

    async def act(driver: Vastai, lease: Lease) -> None:
        given = cloud.public(driver._installation.host_key(lease.key))
        login = asyncssh.import_private_key(driver._installation.login(lease.key))
        has, address = "", None
        async with asyncio.timeout(30):
            while (
                has.split()[:2] != given.split()[:2]
            ):  # as a client that believes whatever key is shown
                assert await driver.hosts(lease) is None
                if address is None and (address := (await driver._alive(lease)).address) is None:
                    continue
                with contextlib.suppress(OSError, asyncssh.Error):
                    async with asyncssh.connect(
                        *address,
                        known_hosts=None,
                        username="root",
                        client_keys=[login],
                        config=None,
                    ) as there:
                        has = str((await there.run("cat $RECIPE_SSHD_KEYS/*.pub")).stdout)
        assert (
            address is not None
            and (shown := await asyncssh.get_server_host_key(*address)) is not None
        )
        assert shown.export_public_key().decode().split()[1] != given.split()[1]
        assert [await driver.hosts(lease) for _ in range(3)] == [None] * 3

    real.ask("/_faults", "boot=0.3,foreign=30,impostor@create=once")
    on_machine(real, tmp_path, monkeypatch, act)
    assert "impostor" not in json.loads(real.ask("/_faults"))["faults"]


def test_a_login_that_is_refused_is_let_in_again_and_a_destroyed_machine_is_lost(
    real: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(driver: Vastai, lease: Lease) -> None:
        host = await up(driver, lease)
        keys = json.loads(
            str(
                (await driver._wire.ask("GET", f"/api/v0/instances/{lease.id}/ssh/")).fields[
                    "ssh_keys"
                ]
            )
        )
        await said(host, "rm ~/.ssh/authorized_keys")
        for key in keys:
            await driver._wire.ask("DELETE", f"/api/v0/instances/{lease.id}/ssh/{key['id']}/", {})
        with pytest.raises(Unreachable):
            while True:  # until the machine has heard of it
                await driver._logins.hosts[lease.id].machine.link.aclose()
                await said(host, "true")
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await said(host, "echo again") == "again\n"
                    break
                except Unreachable:
                    await asyncio.sleep(0.05)
        await driver._wire.destroy(lease.id)
        with pytest.raises(HostLost):
            async with asyncio.timeout(20):
                while True:
                    try:
                        await said(host, "true")
                    except Unreachable:
                        await asyncio.sleep(0.05)

    on_machine(real, tmp_path, monkeypatch, act)


def test_a_machine_that_exited_is_given_back_at_once_and_its_step_runs_on_another(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider's own word ends the wait for a machine that does not answer."""
    rents(space, real, monkeypatch)
    began = space.root / "began"
    space.recipe(
        f"steps:\n  s: {{run: 'echo >> {began}; [ $(wc -l < {began}) = 2 ] || sleep 600', resources: {{gpus: 1}}}}\n"
    )
    before = len(ours(real))
    run = space.start("run", "--driver", "vastai")
    until(lambda: began.exists() or run.poll() is not None)
    assert json.loads(real.ask("/_exit", "")) == {"exited": 1}
    _, said = run.communicate(timeout=60)
    assert run.returncode == 0 and "lost host vastai " in said and "the instance " in said, said
    assert ours(real)[before:].count("destroyed") == 2 and not alive(real)


def test_ctrl_c_right_after_an_order_ends_as_interrupted_and_leaves_no_machine(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, real, monkeypatch)
    space.recipe("steps:\n  s: {run: 'sleep 600', resources: {gpus: 1}}\n")
    before = len(ours(real))
    run = space.start("run", "--driver", "vastai")
    until(lambda: "created" in ours(real)[before:] or run.poll() is not None)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "held by another process" not in said, said
    assert "destroyed" in ours(real)[before:] and not alive(real)


@pytest.mark.proof
def test_sigterm_ends_a_run_and_its_bill_in_time_though_its_machine_is_silent(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds for the step, twenty in which its machine may answer."""
    rents(space, real, monkeypatch)
    began = space.root / "began"
    space.recipe(f"steps:\n  s: {{run: 'touch {began}; sleep 600', resources: {{gpus: 1}}}}\n")
    before = len(ours(real))
    run = space.start("run", "--driver", "vastai")
    until(lambda: began.exists() or run.poll() is not None)
    for process in psutil.Process().children(recursive=True):
        if process.name() == "sshd":
            process.suspend()
    asked = time.monotonic()
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=120)
    assert run.returncode in (130, 143), said
    assert "destroyed" in ours(real)[before:] and not alive(real)
    assert time.monotonic() - asked < 60
