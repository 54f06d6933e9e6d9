"""Sizes, durations and money are read exactly, written back canonically, and refused without a unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.language import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("16GiB", 16 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("5 MB", 5 * 10**6),
        ("12B", 12),
        ("1kB", 1000),
        ("0.5KiB", 512),
    ],
)
def test_a_size_is_a_number_of_bytes(text: str, size: int) -> None:
    assert units.size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("6h", 21600),
        ("2d", 172800),
        ("1h30m", 5400),
        ("0.5s", 0.5),
        ("1d2h3m4s", 93784),
    ],
)
def test_a_duration_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert units.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "dollars"), [("5 USD", 5), ("0.50 USD", 0.5), ("0.0012 USD", 0.0012)]
)
def test_money_is_in_dollars(text: str, dollars: float) -> None:
    assert units.money(text) == dollars


@pytest.mark.parametrize(
    "text",
    [
        "24",
        "",
        "GB",
        "24gb",
        "24 G",
        "-1GB",
        "1e3GB",
        "24GB\n",
        "２GB",
        "9" * 400 + "GB",
        "1.GB",
        "24kiB",
    ],
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        units.size(text)


@pytest.mark.parametrize(
    "text", ["300", "", "5min", "30m5h", "1h 30m", "-5m", "5m\n", "5m5m", "inf", "0s", "0h0m"]
)
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration|no duration"):
        units.duration(text)


@pytest.mark.parametrize("text", ["5", "$5", "5USD", "5 EUR", "-1 USD", "5 USD "])
def test_what_is_not_money_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        units.money(text)


@given(st.integers(0, 10**15))
def test_a_size_survives_its_text(size: int) -> None:
    assert units.size(units.size_text(size)) == size


@given(st.integers(1, 10**7).map(lambda thousandths: thousandths / 1000))
def test_a_duration_survives_its_text(seconds: float) -> None:
    assert units.duration(units.duration_text(seconds)) == seconds


@given(st.integers(0, 10**8).map(lambda hundredths: hundredths / 100))
def test_money_survives_its_text(dollars: float) -> None:
    assert units.money(units.money_text(dollars)) == dollars


def test_texts_are_the_shortest_that_are_exact() -> None:
    assert [units.size_text(n) for n in (0, 24 * 10**9, 16 * 2**30, 1001, 1000)] == [
        "0B",
        "24GB",
        "16GiB",
        "1001B",
        "1kB",
    ]
    assert [units.duration_text(s) for s in (5400, 0.25, 172800, 61)] == [
        "1h30m",
        "0.25s",
        "2d",
        "1m1s",
    ]
    assert [units.money_text(d) for d in (5, 0.5, 0.0012)] == ["5 USD", "0.50 USD", "0.0012 USD"]


@pytest.mark.parametrize(
    ("number", "words", "shown"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (2, ("step",), "2 steps"),
        (1, ("entry", "entries"), "1 entry"),
        (2, ("entry", "entries"), "2 entries"),
    ],
)
def test_a_count_takes_the_number_of_its_noun(
    number: int, words: tuple[str, ...], shown: str
) -> None:
    assert units.count_text(number, *words) == shown


def test_a_count_is_formatted_as_asked() -> None:
    assert units.count_text(1234, "file", form=",") == "1,234 files"
    assert units.count_text(1.0, "CPU", form="g") == "1 CPU"
    assert units.count_text(0.5, "CPU", form="g") == "0.5 CPUs"
