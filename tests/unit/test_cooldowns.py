"""What failed rests as long as its class says, in virtual time: an offer, its zone, or the provider."""

from __future__ import annotations

import pytest

from drivers.base import Offer
from runner.hosts.renting.cooldowns import (
    COOLDOWNS,
    ZONE_FAILURES,
    account_digest,
    failure_of,
    find_on_cooldown,
    is_denied,
)
from runner.storage.records.ledger import LeaseRow

MACHINE = {"id": "i-1"}
NOW = 2e9


def gone(offer: str, ago: float, zone: str = "", **more: object) -> LeaseRow:
    """A lease that was over so many seconds ago."""
    data = {"data": {"zone": zone}} if zone else {}
    row = LeaseRow(
        "k",
        "gcp",
        "r",
        "/ws",
        {},
        "h",
        "GONE",
        {"id": offer, **data},
        NOW,
        1.0,
        asked=NOW - ago - 60,
        gone=NOW - ago,
    )
    return row._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "more", "seconds"),
    [
        ("taken", {"failure": "taken"}, 600),
        ("failed", {"failure": "failed", "lease": MACHINE}, 3600),
        ("lacks", {"failure": "lacks", "lease": MACHINE, "up": NOW}, 86_400),
    ],
)
def test_an_offer_rests_by_the_class_of_its_failure(
    what: str, more: dict[str, object], seconds: float
) -> None:
    assert failure_of(gone("a", 0, **more)) == what and COOLDOWNS[what] == seconds
    for ago, rests in ((seconds - 1, True), (seconds + 1, False)):
        found = find_on_cooldown([gone("a", ago, **more)], "gcp", NOW)
        assert found.covers(Offer("gcp", "a")) is rests and not found.covers(Offer("gcp", "b"))
    assert not find_on_cooldown([gone("a", 0, **more)], "vastai", NOW).covers(Offer("gcp", "a")), (
        "another provider's"
    )


def test_a_machine_that_was_given_back_or_cancelled_on_its_way_up_does_not_rest() -> None:
    cancelled = [
        gone("a", 1, lease=lease, up=up, reason="the run has finished")
        for lease, up in ((MACHINE, NOW), (MACHINE, None), ({}, None))
    ]
    preempted = gone("a", 1, failure="taken-away", lease=MACHINE, up=NOW)
    coming = gone("a", 1, failure="failed")._replace(state="RELEASING")
    for row in (*cancelled, preempted, coming):
        assert not failure_of(row) and not find_on_cooldown([row], "gcp", NOW).covers(
            Offer("gcp", "a")
        )


def test_a_zone_rests_while_two_of_its_offers_do() -> None:
    rows = [
        gone(f"{zone}/{shape}", ago, zone, failure="taken")
        for zone, shape, ago in (("z1", "a", 300), ("z1", "b", 1), ("z2", "a", 1), ("z2", "a", 2))
    ]
    other = {zone: Offer("gcp", f"{zone}/c", data={"zone": zone}) for zone in ("z1", "z2")}
    found = find_on_cooldown(rows, "gcp", NOW)
    assert ZONE_FAILURES == 2 and found.covers(other["z1"]) and not found.covers(other["z2"]), (
        "one offer that failed twice is one"
    )
    assert not find_on_cooldown(rows, "gcp", NOW + 301).covers(other["z1"]), (
        "one of the two is tried again"
    )
    assert not find_on_cooldown(
        [gone("a", 1, failure="taken"), gone("b", 1, failure="taken")], "gcp", NOW
    ).zones, "a marketplace has no zones"


def test_a_provider_that_denied_the_last_order_rests_until_settings_or_account_change() -> None:
    settings, account = {"term": 24}, [("credit", "$0.00"), ("clock", "3 s behind")]
    row = gone("a", COOLDOWNS["denied"] - 1, failure="denied", reason="no credit")
    assert is_denied(row, NOW) and not is_denied(row, NOW + 2) and not is_denied(None, NOW)
    assert not find_on_cooldown([row], "gcp", NOW).offers, "no machine is to blame"
    digest = account_digest(settings, account)
    assert digest == account_digest(settings, [account[0], ("clock", "fine")])
    assert digest != account_digest({"term": 25}, account)
    assert digest != account_digest(settings, [("credit", "$5.00")])
    assert not is_denied(gone("a", 1, failure="taken"), NOW)
