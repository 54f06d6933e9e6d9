"""A rent is an intent, its effect, a record and a proof: whatever the provider answers and whenever we die, no machine is lost or rented twice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivers.base import Denied, HostLost, Lease, Need, NoCapacity, Unreachable, Wish
from drivers.loopback import Loopback
from runner.errors import CannotRun
from runner.hosts.link import contact
from runner.hosts.renting import leases as module
from runner.hosts.renting.leases import Leases, lease_of, need_of, offer_of
from runner.hosts.renting.reaper import decide_fate
from runner.storage.records.ledger import Full, LeaseRow, Ledger

NEED = Need(cpus=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "pause", lambda _tried, _first, _longest: 0.001)


def provider(tmp_path: Path) -> list[tuple[str, str]]:
    """What the provider did, in order."""
    path = tmp_path / "cloud" / "provider.jsonl"
    return (
        [(line["what"], line["key"]) for line in map(json.loads, path.read_text().splitlines())]
        if path.exists()
        else []
    )


def alive(tmp_path: Path) -> int:
    told = [what for what, _ in provider(tmp_path)]
    return told.count("created") - told.count("destroyed")


def on(
    tmp_path: Path,
    act: Callable[[Leases], Awaitable[None]],
    faults: dict[str, Any] | None = None,
    run: str = "r1",
    **settings: Any,
) -> None:
    """Do something with the leases of a run, as a process of its own would."""
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        driver = Loopback(
            tmp_path / "cloud", **({"price": 1.2, "hosts": 3, "faults": faults} | settings)
        )
        asyncio.run(act(Leases(driver, "loopback", ledger, run, str(tmp_path))))  # type: ignore[arg-type]


async def rented(leases: Leases) -> LeaseRow | None:
    return await leases.rent(NEED, (await leases.offers(Wish(NEED)))[0])


def states(leases: Leases) -> list[str]:
    return [row.state for row in leases.ledger.of_run(leases.run)]


def test_a_lease_goes_from_the_order_to_the_proof_that_it_is_gone(tmp_path: Path) -> None:
    moves: list[tuple[str, str]] = []

    async def act(leases: Leases) -> None:
        leases.on_change = lambda before, row: moves.append((before, row.state))
        row = await rented(leases)
        assert (
            row is not None
            and need_of(row) == NEED
            and offer_of(row).price == row.price == 1.2
            and lease_of(row).key == row.key
        )
        row, (host, *_) = await leases.wait_until_up(row)
        assert alive(tmp_path) == 1 and await leases.release(row, "done")
        await host.aclose()
        assert leases.ledger.cost_of(row.key) > 0

    on(tmp_path, act)
    assert moves == [
        ("", "ASKED"),
        ("ASKED", "COMING"),
        ("COMING", "UP"),
        ("UP", "RELEASING"),
        ("RELEASING", "GONE"),
    ]
    assert [what for what, _ in provider(tmp_path)] == ["created", "destroyed"]


def test_a_resumed_run_goes_on_without_a_host_that_is_silent_for_long_and_says_first_that_it_waits(
    tmp_path: Path,
) -> None:
    said: list[str] = []

    async def first(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None
        await leases.wait_until_up(row)

    async def resumed(leases: Leases) -> None:
        async def hosts(_lease: Lease) -> None:
            raise Unreachable("host-1 does not answer")

        leases.driver.hosts, leases.say = hosts, said.append  # type: ignore[method-assign]
        (row,) = await leases.adopt()
        with pytest.raises(HostLost, match="for 15 minutes: host-1 does not answer"):
            await leases.wait_until_up(row)

    on(tmp_path, first, price=0.0)
    on(tmp_path, resumed, price=0.0)
    assert len(said) == 1 and said[0].startswith(
        "host-1 does not answer; steps of this run may be running on this host"
    )


def test_the_intent_is_in_the_ledger_before_the_provider_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        async def acquire(order: Any) -> Lease:
            assert [(row.key, row.state) for row in leases.ledger.living_leases()] == [
                (order.key, "ASKED")
            ]
            raise Denied("no money")

        monkeypatch.setattr(leases.driver, "acquire", acquire)
        with pytest.raises(Denied):
            await rented(leases)
        assert states(leases) == ["GONE"]

    on(tmp_path, act)


def test_a_machine_that_takes_long_to_end_keeps_no_other_of_its_run(tmp_path: Path) -> None:
    async def act(leases: Leases) -> None:
        for _ in range(3):
            assert await rented(leases) is not None
        release, asked, all_are = leases.driver.release, list[str](), asyncio.Event()

        async def slowly(lease: Lease) -> bool:
            asked.append(lease.key)
            if len(asked) == 3:
                all_are.set()
            await asyncio.wait_for(all_are.wait(), 20)
            return await release(lease)

        leases.driver.release = slowly  # type: ignore[method-assign]
        assert (
            await leases.close() == [] and states(leases) == ["GONE"] * 3 and alive(tmp_path) == 0
        )

    on(tmp_path, act)


@pytest.mark.parametrize("fault", ["unsure", "garbled"])
def test_an_order_whose_reply_is_lost_or_unreadable_is_found_in_a_listing_and_not_made_again(
    tmp_path: Path, fault: str
) -> None:
    async def act(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None and row.state == "COMING" and alive(tmp_path) == 1

    on(tmp_path, act, {fault: 1, "unlisted": 1})  # the first listing lacks it


def test_an_order_that_two_listings_lack_was_never_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        async def acquire(_order: Any) -> Lease:
            raise ValueError("an empty reply")

        with monkeypatch.context() as broken:
            broken.setattr(leases.driver, "acquire", acquire)
            assert await rented(leases) is None
        assert states(leases) == ["GONE"] and await rented(leases) is not None

    on(tmp_path, act)


def test_a_machine_that_is_there_although_the_order_was_refused_for_want_of_capacity_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        acquire = leases.driver.acquire

        async def outbid(order: Any) -> Lease:
            raise NoCapacity("the bid is too low", lease=await acquire(order))

        monkeypatch.setattr(leases.driver, "acquire", outbid)
        assert await rented(leases) is None and states(leases) == ["GONE"] and alive(tmp_path) == 0

    on(tmp_path, act)


def test_a_provider_that_is_silent_or_busy_is_asked_again_at_every_call(tmp_path: Path) -> None:
    async def act(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None
        row, (host, *_) = await leases.wait_until_up(row)
        await host.aclose()
        assert await leases.release(row, "done")

    on(tmp_path, act, {"silent": 2, "throttled": 2})
    assert alive(tmp_path) == 0


def test_a_lease_that_the_provider_does_not_end_stays_in_the_ledger_and_is_ended_later(
    tmp_path: Path,
) -> None:
    async def first(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None and not await leases.release(row, "done")
        assert states(leases) == ["RELEASING"] and alive(tmp_path) == 1

    async def then(leases: Leases) -> None:
        assert await leases.adopt() == [] and states(leases) == ["GONE"]

    on(tmp_path, first, {"kept": 3})
    on(tmp_path, then)
    assert alive(tmp_path) == 0


def test_a_listing_that_cannot_be_read_creates_nothing_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        async def broken(*_any: Any) -> Any:
            raise ValueError("<html>")

        monkeypatch.setattr(leases.driver, "leases", broken)
        with pytest.raises(Unreachable, match="cannot read the reply"):
            await rented(leases)
        assert states(leases) == ["ASKED"] and alive(tmp_path) == 1
        monkeypatch.undo()
        (row,) = await leases.adopt()
        assert row.state == "COMING" and alive(tmp_path) == 1

    on(tmp_path, act, {"garbled": 1})


def test_a_machine_that_is_gone_or_never_comes_up_is_given_back(tmp_path: Path) -> None:
    async def lost(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None
        with pytest.raises(HostLost):
            await leases.wait_until_up(row)
        assert states(leases)[-1] == "GONE"

    async def late(leases: Leases) -> None:
        leases.driver.traits = leases.driver.traits._replace(comes_up=leases.driver.traits.poll)
        await lost(leases)

    on(tmp_path, lost, {"lost_on_poll": 1})
    on(tmp_path, late, boots=60)
    assert alive(tmp_path) == 0


def test_a_machine_that_takes_long_to_come_up_is_reported_once_and_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW", 0.0)

    async def act(leases: Leases) -> None:
        said, moves = list[str](), list[tuple[str, str, str]]()
        leases.say, leases.on_change = (
            said.append,
            lambda before, row: moves.append((before, row.state, row.reason)),
        )
        row = await rented(leases)
        assert row is not None and (await leases.wait_until_up(row))[0].state == "UP"
        assert said == [
            f"loopback {row.key}: the machine has been starting for 0 minutes; giving up after 15"
        ]
        assert moves[2:] == [
            ("COMING", "COMING", "the machine has been starting for 0 minutes"),
            ("COMING", "UP", ""),
        ]

    on(tmp_path, act, faults={"coming": 3})


def test_of_a_machine_that_does_not_come_up_it_is_reported_what_its_provider_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW", 0.0)

    async def vitals(_lease: object) -> str:
        return "loading: pulling the image"

    async def act(leases: Leases) -> None:
        said = list[str]()
        leases.say, leases.driver.vitals = said.append, vitals  # type: ignore[attr-defined]
        leases.driver.traits = leases.driver.traits._replace(comes_up=leases.driver.traits.poll)
        row = await rented(leases)
        assert row is not None
        with pytest.raises(
            HostLost, match=r"minutes \(loopback says: loading: pulling the image\)"
        ):
            await leases.wait_until_up(row)
        assert (
            len(said) == 1
            and "for 0 minutes (loopback says: loading: pulling the image); giving up" in said[0]
        )

    on(tmp_path, act, boots=60)


def test_the_process_that_lost_its_leases_to_another_moves_them_no_more(tmp_path: Path) -> None:
    async def act(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None
        other = Leases(leases.driver, "loopback", leases.ledger, "r1", str(tmp_path))
        assert [each.key for each in await other.adopt()] == [row.key]
        assert await leases.close() == [] and states(leases) == ["COMING"] and alive(tmp_path) == 1
        assert await other.close() == [] and states(leases) == ["GONE"] and alive(tmp_path) == 0

    on(tmp_path, act)


SCRIPT = """
import asyncio, sys
from drivers.base import Need, Wish
from drivers.loopback import Loopback
from runner.hosts.renting.leases import Leases
from runner.storage.records.ledger import Ledger
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
async def work():
    root = Path(sys.argv[1])
    leases = Leases(Loopback(root / "cloud", price=1.2, hosts=3), "loopback", Ledger.open(root / "ledger.db"), "r1", str(root))
    row = await leases.rent(Need(), (await leases.offers(Wish()))[0])
    row, (host, *_) = await leases.wait_until_up(row)
    await leases.release(row, "done")
asyncio.run(work())
"""
POINTS = {
    "lease-intended": (["ASKED"], 0, "GONE"),
    "lease-asked": (["ASKED"], 1, "COMING"),
    "lease-recorded": (["COMING"], 1, "COMING"),
    "lease-up": (["UP"], 1, "UP"),
    "release-intended": (["RELEASING"], 1, "GONE"),
    "release-asked": (["RELEASING"], 0, "GONE"),
    "release-proved": (["RELEASING"], 0, "GONE"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_leaves_a_machine_that_the_ledger_knows(tmp_path: Path, point: str) -> None:
    found, machines, after = POINTS[point]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "RECIPE_CRASH_AT": point},
        check=False,
    )
    assert done.returncode == -9 and alive(tmp_path) == machines

    async def resumed(leases: Leases) -> None:
        assert states(leases) == found
        await leases.adopt()
        assert states(leases) == [after] and alive(tmp_path) == (after != "GONE")
        assert await leases.close() == [] and alive(tmp_path) == 0

    on(tmp_path, resumed)
    assert [what for what, _ in provider(tmp_path)] == (
        ["created", "destroyed"] if point != "lease-intended" else []
    )


def test_only_what_no_run_can_need_is_ended_by_itself() -> None:
    now = time.time()
    row = LeaseRow("k", "loopback", "r", "/ws", {}, "h", "UP", {}, now + 60, 1.0)
    assert (
        not decide_fate(row, "live", now).end
        and not decide_fate(row._replace(state="RELEASING"), "live", now).end
    )
    assert (
        decide_fate(row, "over", now).end
        and decide_fate(row._replace(until=now - 1), "live", now).end
    )
    assert (
        decide_fate(row._replace(state="RELEASING"), "dead", now).end
        and decide_fate(row._replace(state="RELEASING"), "gone", now).end
    )
    assert not decide_fate(row, "dead", now).end and not decide_fate(row, "gone", now).end
    assert (
        decide_fate(row._replace(price=0.0), "dead", now).end
        and not decide_fate(row._replace(price=0.0), "gone", now).end
    )


def test_an_order_that_is_looked_for_only_after_its_time_counts_as_a_machine_that_was_there(
    tmp_path: Path,
) -> None:
    """Its machine may have come up and ended itself meanwhile."""

    async def act(leases: Leases) -> None:
        leases.budget.limit, now = 2.0, time.time()
        for key, asked, until in (
            ("0" * 16, now - 3600, now - 1800),
            ("1" * 16, now - 60, now + 3600),
        ):
            leases.ledger.ask(
                LeaseRow(
                    key,
                    "loopback",
                    "r1",
                    "/ws",
                    {},
                    "dead",
                    "ASKED",
                    {"id": "x"},
                    until,
                    1.2,
                    asked=asked,
                )
            )
        assert await leases.adopt() == [] and states(leases) == ["GONE", "GONE"]
        assert leases.budget.likely_funds() == pytest.approx(2.0 - 0.6), (
            "half an hour of the first; the second would be there still"
        )

    on(tmp_path, act)


def test_a_machine_past_its_time_is_kept_by_who_resumes_its_run_where_the_limit_pays_for_more_and_else_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begun(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None
        leases.ledger.extend((await leases.wait_until_up(row))[0], time.time() - 60)

    async def refused(_lease: Lease) -> bool:
        raise Unreachable

    for limit, kept in ((None, True), (0.001, False)):
        on(tmp_path, begun, run=f"r{limit}")

        async def resumed(leases: Leases, limit: float | None = limit, kept: bool = kept) -> None:
            leases.budget.limit, leases.driver.traits = (
                limit,
                leases.driver.traits._replace(ends="nothing"),
            )
            if not kept:
                with monkeypatch.context() as out_of_reach:
                    out_of_reach.setattr(leases.driver, "release", refused)
                    assert await leases.adopt() == [] and states(leases) == ["RELEASING"], (
                        "the run goes on, and asks again"
                    )
                assert await leases.repeat_releases() == []
            found = [row for row in await leases.adopt() if row.until > time.time() + 3600]
            assert len(found) == kept and states(leases) == (["UP"] if kept else ["GONE"])
            await leases.close()

        on(tmp_path, resumed, run=f"r{limit}")


def test_the_limits_of_a_user_hold_over_all_runs(tmp_path: Path) -> None:
    async def first(leases: Leases) -> None:
        leases.budget.limits = {"cost_per_day": 10.0, "machines": 1, "price": 2.0}
        assert leases.budget.likely_funds() == 10.0 and not leases.budget.is_full
        row = await rented(leases)
        assert row is not None and leases.budget.is_full and leases.budget.likely_funds() < 1.0, (
            "it may cost nearly all of it by its end"
        )
        assert row.until - row.asked == pytest.approx(10.0 / 1.2 * 3600, rel=0.02)

    async def other(leases: Leases) -> None:
        leases.budget.limits = {"cost_per_day": 10.0, "machines": 1, "price": 2.0}
        assert leases.budget.is_full
        with pytest.raises(CannotRun, match=r"\[limits\] cost_per_day"):
            await rented(leases)
        leases.budget.limits = {"price": 1.0}
        with pytest.raises(
            CannotRun, match=r"costs \$1.20 an hour, but `\[limits\] price` is \$1.00"
        ):
            await rented(leases)

    on(tmp_path, first)
    on(tmp_path, other, run="r2")
    assert alive(tmp_path) == 1


def test_a_provider_that_denied_an_order_is_not_asked_again_until_its_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(leases: Leases) -> None:
        leases.settings = {"term": 24}
        await leases.check_denial()
        with pytest.raises(Denied):
            await rented(leases)

    async def another_run(leases: Leases) -> None:
        leases.settings = {"term": 24}
        with pytest.raises(
            Denied,
            match=r"the account may not rent here \(trying again with other settings of \[drivers.loopback\], or in 10 min",
        ):
            await leases.check_denial()
        monkeypatch.setattr(
            leases.driver, "account", lambda: told([("credit", "$5.00")]), raising=False
        )
        monkeypatch.setattr(leases.driver, "console", "", raising=False)
        monkeypatch.setattr(leases.driver, "solvent", lambda: told([]), raising=False)
        await leases.check_denial()  # what it says of the account is not what it was
        monkeypatch.undo()
        leases.settings = {"term": 25}
        await leases.check_denial()
        assert await rented(leases) is not None
        leases.settings = {"term": 24}
        await leases.check_denial()  # it was given a machine since

    async def told(words: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return words

    on(tmp_path, refused, {"denied": 1})
    on(tmp_path, another_run, run="r2")


def test_money_that_does_not_pay_for_coming_up_and_two_checkpoints_rents_nothing(
    tmp_path: Path,
) -> None:
    async def act(leases: Leases) -> None:
        leases.budget.limit = 1.2 * 0.5  # half an hour, less two minutes
        leases.budget.checkpoint_intervals = {replace(NEED, market="any"): 391.0}
        with pytest.raises(
            CannotRun,
            match=r"at least 1682 s \(900 s to start, and 2 checkpoints, 391 s apart\), \$0.56",
        ):
            await rented(leases)
        assert provider(tmp_path) == [] and states(leases) == []
        leases.budget.min_seconds = 300.0  # what a setting says holds
        assert await rented(leases) is not None
        leases.budget.min_seconds, leases.budget.limit, leases.budget.checkpoint_intervals = (
            None,
            1.2,
            {replace(NEED, market="any"): 389.0},
        )
        assert not leases.budget.explain_shortage(NEED, (await leases.offers(Wish(NEED)))[0])

    on(tmp_path, act)


def test_a_minimum_of_zero_rents_for_the_money_that_is_left_and_never_for_none(
    tmp_path: Path,
) -> None:
    async def act(leases: Leases) -> None:
        offer = (await leases.offers(Wish(NEED)))[0]
        leases.budget.limit = 1.2 / 60  # a minute, less a tenth
        assert "at least 300 s" in leases.budget.explain_shortage(NEED, offer)
        leases.budget.min_seconds = 0.0
        assert not leases.budget.explain_shortage(NEED, offer)
        leases.budget.limit = 0.0
        assert "enough for 0 s" in leases.budget.explain_shortage(NEED, offer)

    on(tmp_path, act)


def test_a_machine_is_rented_with_the_money_of_the_one_that_is_being_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        leases.budget.limit = 1.2
        (offer, *_) = await leases.offers(Wish(NEED))
        row = await leases.rent(NEED, offer)
        assert row is not None
        with pytest.raises(CannotRun, match="is left"):
            await leases.rent(NEED, offer)
        let, release = asyncio.Event(), leases.driver.release

        async def slow(lease: Lease) -> bool:
            await let.wait()
            return await release(lease)

        monkeypatch.setattr(leases.driver, "release", slow)
        giving, asking = (
            asyncio.create_task(leases.release(row, "taken away")),
            asyncio.create_task(leases.rent(NEED, offer)),
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done()
        let.set()
        assert await giving and await asking is not None and states(leases) == ["GONE", "COMING"]

    on(tmp_path, act)


def test_a_worker_counts_the_spot_machines_that_were_taken_from_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        async def lost(_lease: Lease) -> None:
            raise HostLost("outbid")

        for market in ("spot", "on-demand", "spot"):
            offer = replace((await leases.offers(Wish(NEED)))[0], market=market)
            row = await leases.rent(NEED, offer)
            assert row is not None
            row, (host, *_) = await leases.wait_until_up(row)
            await host.aclose()
            with monkeypatch.context() as gone, pytest.raises(HostLost):
                gone.setattr(leases.driver, "hosts", lost)
                await leases.wait_until_up(row)

    async def later(leases: Leases) -> None:
        assert leases.count_preemptions() == 2

    on(tmp_path, act)
    on(tmp_path, later)


def test_machines_at_once_hold_for_orders_of_two_processes_that_saw_room(tmp_path: Path) -> None:
    """Each looked before the other's order was noted: the ledger itself lets one through."""

    async def act(leases: Leases) -> None:
        leases.budget.limits = {"machines": 1}
        offer = (await leases.offers(Wish(NEED)))[0]
        found = await asyncio.gather(
            leases.rent(NEED, offer), leases.rent(NEED, offer), return_exceptions=True
        )
        assert [isinstance(each, LeaseRow) for each in found] == [True, False]
        assert isinstance(found[1], Full) and "[limits] machines" in str(found[1])
        assert states(leases) == ["COMING"]

    on(tmp_path, act)
    assert alive(tmp_path) == 1


def test_two_who_give_a_lease_back_at_once_have_the_same_answer(tmp_path: Path) -> None:
    async def act(leases: Leases) -> None:
        row = await rented(leases)
        assert row is not None
        assert await asyncio.gather(
            leases.release(row, "done"), leases.release(row, "done"), leases.close()
        ) == [True, True, []]
        assert states(leases) == ["GONE"] and await leases.release(row, "done")

    on(tmp_path, act)


def test_a_lease_that_is_being_given_back_holds_back_more_the_longer_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        leases.budget.limit = 1.2 * 10  # ten hours
        row = await rented(leases)
        assert row is not None and not await leases.release(row, "taken away")
        assert leases.budget.likely_funds() == pytest.approx(12.0 - 1.2 * 120 / 3600, abs=0.01)
        assert leases.budget.guaranteed_funds() < 0.1, "up to its own end it may cost nearly all"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        assert leases.budget.likely_funds() == pytest.approx(12.0 - 1.2 * 2, abs=0.01)

    on(tmp_path, act, {"kept": 3})


def test_an_order_waits_for_the_proof_that_another_machine_is_gone_and_no_longer_than_for_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(leases: Leases) -> None:
        leases.budget.limit, said = 1.2 * 10, list[str]()
        leases.say = said.append
        leases.driver.traits = leases.driver.traits._replace(comes_up=timedelta(seconds=0.3))
        row = await rented(leases)
        assert row is not None and not await leases.release(row, "taken away")
        with pytest.raises(
            CannotRun, match=rf"has not terminated loopback {row.key} within .* minutes"
        ) as why:
            await rented(leases)
        assert row.key in str(why.value.fix) and len(said) == 1 and row.key in said[0]
        asking = asyncio.create_task(rented(leases))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done()
        assert await leases.repeat_releases() == [] and await asking is not None
        assert states(leases) == ["GONE", "COMING"]

    on(tmp_path, act, {"kept": 3})


def test_an_order_that_the_proof_alone_pays_for_waits_for_it_however_soon_the_other_would_end(
    tmp_path: Path,
) -> None:
    """The money pays for 400 s: not for 300 s beside two minutes of a machine that is on its way out."""

    async def act(leases: Leases) -> None:
        leases.budget.limit, waits = 1.2 * 400 / 3600, asyncio.Event()
        leases.say = lambda _words: waits.set()
        row = await rented(leases)
        assert row is not None and not await leases.release(row, "taken away")
        asking, waiting = asyncio.create_task(rented(leases)), asyncio.create_task(waits.wait())
        await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert not asking.done(), asking.result()
        assert await leases.repeat_releases() == [] and await asking is not None
        assert states(leases) == ["GONE", "COMING"]

    on(tmp_path, act, {"kept": 3})


def test_money_that_becomes_free_wakes_those_who_may_have_it(tmp_path: Path) -> None:
    async def act(leases: Leases) -> None:
        leases.budget.limit = 1.2
        (offer, *_) = await leases.offers(Wish(NEED))
        one = await leases.rent(NEED, offer, 2)
        assert one is not None
        two = leases.make_intent(
            NEED, offer, leases.budget.lease_end(1.2, leases.budget.guaranteed_funds())
        )
        leases.ledger.ask(two)
        assert not leases.freed.is_set()
        one, _ = await leases.wait_until_up(one)
        short = one.until
        assert await leases.release(two, "done") and leases.freed.is_set()
        assert (await leases.renew(one)).until > short + 600

    on(tmp_path, act)


def test_whenever_an_order_is_cancelled_its_machine_is_given_back_and_no_lease_is_lost(
    tmp_path: Path,
) -> None:
    """As Ctrl-C does, which cancels what orders and gives back all that there is, in one turn of the loop."""

    class Slow:
        """A driver each of whose calls takes a few turns of the loop, before and after its effect."""

        def __init__(self, inner: Loopback) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._inner, name)
            if name not in ("acquire", "hosts", "release", "leases"):
                return found

            async def slowly(*words: Any) -> Any:
                await asyncio.sleep(0)
                answer = await found(*words)
                await asyncio.sleep(0)
                return answer

            return slowly

    async def act(leases: Leases) -> None:
        leases.driver = Slow(leases.driver)  # type: ignore[assignment, arg-type]

        async def get() -> None:
            row = await leases.rent(NEED, offer)
            assert row is not None
            try:
                await leases.wait_until_up(row)
            except asyncio.CancelledError:
                await leases.close({row.key}, "it cannot be used")
                raise

        offer, seen = (await leases.offers(Wish(NEED)))[0], set[str]()
        for turns in range(9):
            getting = asyncio.ensure_future(get())
            for _ in range(turns):
                await asyncio.sleep(0)
            seen |= {*states(leases)}
            getting.cancel()
            await asyncio.sleep(0)  # what was ordered begins to give back, too
            assert await leases.close() == []
            await asyncio.wait({getting})
            assert {*states(leases)} <= {"GONE"} and not alive(tmp_path)
        assert seen >= {"ASKED", "COMING", "UP"}

    on(tmp_path, act)
