"""What failed rests as long as its class says, in virtual time: an offer, its zone, or the provider."""

from __future__ import annotations

import pytest

from drivers.base import Offer
from runner.hosts.renting.resting import (
    DENIED,
    FAILED,
    LACKS,
    RESTS,
    TAKEN,
    ZONE,
    denial,
    denied,
    failure,
    resting,
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
        ("taken", {"reason": f"{TAKEN}: none left"}, 600),
        ("failed", {"reason": f"{FAILED} within 20 minutes", "lease": MACHINE}, 3600),
        (
            "lacks",
            {"reason": f"{LACKS}: it has 1 GPUs, and 2 were promised", "lease": MACHINE, "up": NOW},
            86_400,
        ),
    ],
)
def test_an_offer_rests_by_the_class_of_its_failure(
    what: str, more: dict[str, object], seconds: float
) -> None:
    assert (
        failure(gone("a", 0, **more)) == what
        and RESTS[failure(gone("a", 0, **more)) or "denied"] == seconds
    )
    for ago, rests in ((seconds - 1, True), (seconds + 1, False)):
        found = resting([gone("a", ago, **more)], "gcp", NOW)
        assert found.has(Offer("gcp", "a")) is rests and not found.has(Offer("gcp", "b"))
    assert not resting([gone("a", 0, **more)], "vastai", NOW).has(Offer("gcp", "a")), (
        "another provider's"
    )


def test_a_machine_that_was_given_back_or_cancelled_on_its_way_up_does_not_rest() -> None:
    cancelled = [
        gone("a", 1, lease=lease, up=up, reason="the run is over")
        for lease, up in ((MACHINE, NOW), (MACHINE, None), ({}, None))
    ]
    for row in (*cancelled, gone("a", 1, reason=FAILED)._replace(state="RELEASING")):
        assert failure(row) is None and not resting([row], "gcp", NOW).has(Offer("gcp", "a"))


def test_a_zone_rests_while_two_of_its_offers_do() -> None:
    rows = [
        gone(f"{zone}/{shape}", ago, zone, reason=TAKEN)
        for zone, shape, ago in (("z1", "a", 300), ("z1", "b", 1), ("z2", "a", 1), ("z2", "a", 2))
    ]
    other = {zone: Offer("gcp", f"{zone}/c", data={"zone": zone}) for zone in ("z1", "z2")}
    found = resting(rows, "gcp", NOW)
    assert ZONE == 2 and found.has(other["z1"]) and not found.has(other["z2"]), (
        "one offer that failed twice is one"
    )
    assert not resting(rows, "gcp", NOW + 301).has(other["z1"]), "one of the two is tried again"
    assert not resting(
        [gone("a", 1, reason=TAKEN), gone("b", 1, reason=TAKEN)], "gcp", NOW
    ).zones, "a marketplace has no zones"


def test_a_provider_that_denied_the_last_order_rests_until_settings_or_account_change() -> None:
    settings, account = {"term": 24}, [("credit", "$0.00"), ("clock", "3 s behind")]
    row = gone("a", RESTS["denied"] - 1, reason=denial(settings, account, "no credit"))
    assert (
        row.reason.startswith(DENIED)
        and denied(row, NOW)
        and not denied(row, NOW + 2)
        and not denied(None, NOW)
    )
    assert not resting([row], "gcp", NOW).offers, "no machine is to blame"
    assert row.reason == denial(settings, [account[0], ("clock", "fine")], "no credit")
    assert row.reason != denial({"term": 25}, account, "no credit") and row.reason != denial(
        settings, [("credit", "$5.00")], "no credit"
    )
    assert not denied(gone("a", 1, reason=TAKEN), NOW)
