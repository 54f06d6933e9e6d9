"""Prices as providers write them: what can be read is read, and what cannot is no price."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from drivers.base import HostLost, Lease, Need, Unreachable, Wish
from drivers.fakes.faults import parse
from drivers.web import number, parse_charge, price
from tests.virtual import ModelWeb, driver, market, virtual

NEED = Wish(Need(gpus=1))


@pytest.mark.parametrize(
    ("written", "usd"),
    [
        (0.83, 0.83),
        (2, 2.0),
        ("0.83", 0.83),
        (" 0.83 ", 0.83),
        ("$0.83", 0.83),
        ("$0.83/hr", 0.83),
        ("0.83 USD", 0.83),
        ("0.83 USD per hour", 0.83),
        ("19.92 USD/day", 0.83),
        ("19.92/day", 0.83),
        ("83 cents", 0.83),
        ("83¢/h", 0.83),
        ("8.3e-1", 0.83),
        ("0.000230555556/s", 0.83),
        (0, 0.0),
    ],
)
def test_a_readable_price_is_read(written: object, usd: float) -> None:
    assert price(written) == pytest.approx(usd)


@pytest.mark.parametrize(
    "written",
    [
        None, "", "n/a", "-0.83", -0.83, "0.83 EUR", "€0.83", "0,83", "1,000.5", True, [], {}, "NaN", "inf",
        float("nan"), float("inf"), 1e30, "9" * 400, "$0.83 cents", "0.83 per GB", "٣", "0x1",
    ],
)  # fmt: skip
def test_what_is_no_price_is_none(written: object) -> None:
    assert price(written) is None
    with pytest.raises(Unreachable, match=r"cannot read a charge of Vast\.ai"):
        parse_charge({"amount": written}, "amount", "Vast.ai")


def test_a_price_for_a_month_is_read_as_that_of_an_hour() -> None:
    assert price("0.72", 720) == pytest.approx(0.001) and price("0.72/h", 720) == 0.72


def test_a_number_may_be_decimal_text() -> None:
    row = {"a": "0.8343", "b": "x", "c": "-2.5", "d": "9" * 400, "e": True}
    assert number(row, "a") == 0.8343 and number(row, "b", "c") == -2.5
    assert number(row, "b") == number(row, "d") == number(row, "e") == number(row, "none") == 0.0


def _offers(name: str, faults: str, tmp_path: Path) -> tuple[dict[str, float], dict[str, int]]:
    """The prices that a driver offers at a provider with these faults, and what it left out."""

    async def asked() -> tuple[dict[str, float], dict[str, int]]:
        world = market(name, 7, parse(f"foreign=0,{faults}"))
        made: Any = driver(
            name,
            ModelWeb("http://model", world, random.Random(0), lambda: None),
            str(tmp_path / "installation"),
        )
        found = await made.offers(NEED._replace(filters={"reliability": "0", "verified": "false"}))
        return {each.id: each.price for each in found}, dict(made.excluded)

    with virtual() as loop:
        return loop.run_until_complete(asked())


@pytest.mark.parametrize("name", ["vastai", "runpod", "prime"])
def test_offers_with_prices_as_text_are_those_with_numbers(name: str, tmp_path: Path) -> None:
    plain, left_out = _offers(name, "", tmp_path)
    spelled, same = _offers(name, "spelled=1", tmp_path)
    assert plain and spelled == pytest.approx(plain, abs=1e-4) and left_out == same


@pytest.mark.parametrize("name", ["vastai", "runpod", "prime"])
def test_an_offer_without_a_readable_price_is_left_out_as_no_price(
    name: str, tmp_path: Path
) -> None:
    plain, _ = _offers(name, "", tmp_path)
    none, left_out = _offers(name, "unpriced=1", tmp_path)
    assert none == {} and left_out["no price"] >= len(plain)
    some, left_out = _offers(name, "unpriced=0.5", tmp_path)
    assert left_out["no price"] and some.items() <= plain.items()


@pytest.mark.parametrize("name", ["vastai", "runpod", "prime"])
def test_the_highest_price_that_was_named_counts_when_it_cannot_be_read_any_more(
    name: str, tmp_path: Path
) -> None:
    with virtual() as loop:

        async def named() -> None:
            world = market(name, 7, ())
            wire = ModelWeb("http://model", world, random.Random(0), lambda: None)
            made: Any = driver(name, wire, str(tmp_path / "installation"))
            lease = Lease(name, "1", "k")
            made._agreed["1"] = 1.0
            for told in (1.02, None, 1.01):
                made._as_agreed(lease, told)
            assert made.highest_price(lease) == 1.02
            with pytest.raises(HostLost, match=r"it costs \$1.060 an hour, and was offered for"):
                made._as_agreed(lease, 1.06)

        loop.run_until_complete(named())


@pytest.mark.parametrize("written", ["null", '"n/a"', "-1"])
def test_a_price_list_with_a_row_that_cannot_be_read_has_the_others(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drivers import gcp_catalog
    from drivers.gcp_prices import SHAPES, SHIPPED

    name, other = [*SHAPES][:2]
    kept = tmp_path / "prices.json"
    rates = f'{{"us-central1": {{"{name}": [{written}, 0.5], "{other}": ["1.5", "0.5"]}}}}'
    kept.write_text(f'{{"date": "2999-01-01", "rates": {rates}}}')
    found = gcp_catalog.latest(kept)
    assert found is not SHIPPED and found.price("us-central1", name) is None
    rate = found.price("us-central1", other)
    assert rate is not None and (rate.on_demand, rate.spot) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("states", "broken"),
    [
        (("exited", "running", "running", "running"), True),
        (("exited", "running", "stopped", "running"), False),  # it is being started
        (("running", "running", "running", "running"), False),
        (("offline", "running", "running", "running"), True),
        (("loading", "running", "running", "running"), False),
    ],
)
def test_an_instance_of_vastai_whose_container_has_ended_is_broken(
    states: tuple[str, ...], broken: bool
) -> None:
    from drivers.vastai_wire import _instance

    names = ("actual_status", "intended_status", "cur_state", "next_state")
    assert _instance({"id": 1, **dict(zip(names, states, strict=True))}).is_broken is broken
