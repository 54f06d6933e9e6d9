"""What is chosen among offers, and when a person is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Need, Offer, Rejected, Resources, Wish
from drivers.cloud import Filters, Installation, Market, excluded, less, public
from runner.hosts.offering import Shelf, to_confirm
from runner.storage.workspace import Workspace

CARD = Resources(cpus=16.0, memory=64 << 30, gpus=2, gpu="RTX 4090", gpu_memory=24564 << 20, disk=500 * 10**9)
OFFER = Offer("vastai", "1", CARD, price=0.5, region="Sweden, SE", reliability=0.99, longest=10.0)
GOOD = Market(verified=True, datacenter=False, inet=500.0, cuda=12.8)


@pytest.mark.parametrize(
    ("need", "given", "why"),
    [
        (Need(gpus=1, gpu="4090", gpu_memory=24 * 10**9), {}, ""),
        (Need(gpus=3), {}, "fewer GPUs than needed"),
        (Need(gpus=1, gpu="H100"), {}, "another GPU"),
        (Need(gpu_memory=40 * 10**9), {}, "less GPU memory"),
        (Need(disk=10**12), {}, "less memory, disk or processors"),
        (Need(nodes=2), {}, "several machines are one order"),
        (Need(), {"gpu": "rtx_4090", "regions": "se,us", "max_price": "0.5", "inet": 500, "cuda": 12.8}, ""),
        (Need(), {"regions": ["US"]}, "another region"),
        (Need(), {"reliability": "0.999"}, "less reliable"),
        (Need(), {"datacenter": "yes"}, "not in a datacenter"),
        (Need(), {"inet": 501}, "a slower network"),
        (Need(), {"cuda": "13"}, "an older CUDA"),
        (Need(), {"max_price": 0.49}, "dearer than max_price"),
    ],
)
def test_an_offer_is_left_out_for_one_reason_in_words(need: Need, given: dict[str, str], why: str) -> None:
    assert excluded(OFFER, GOOD, Wish(need), Filters().given(given)) == why


def test_an_offer_that_ends_before_the_work_does_is_left_out() -> None:
    assert excluded(OFFER, GOOD, Wish(hours=11.0), Filters()) == "not for that long"
    assert excluded(OFFER, GOOD._replace(verified=False), Wish(), Filters()) == "not verified"


@pytest.mark.parametrize(
    ("given", "words"), [({"gpus": "1"}, 'did you mean "gpu"'), ({"inet": "fast"}, "is a number"), ({"verified": "maybe"}, "true or false")]
)
def test_a_filter_that_cannot_be_read_is_refused_in_a_sentence(given: dict[str, str], words: str) -> None:
    with pytest.raises(Rejected, match=words):
        Filters().given(given)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (CARD, ""),
        (Resources(gpus=1), "GPUs: it has 1, and 2 were sold"),
        (Resources(gpus=2, gpu_memory=12 << 30), "GPU memory: it has 13 GB, and 26 GB were sold"),
        (Resources(memory=32 << 30), "memory: it has 34 GB, and 69 GB were sold"),
    ],
)
def test_a_machine_that_has_less_than_was_sold_is_named(found: Resources, words: str) -> None:
    assert less(CARD, found) == words


def test_a_person_is_asked_above_two_dollars_unless_the_limit_or_the_settings_say_otherwise(tmp_path: Path) -> None:
    shelves = [Shelf("vastai", Wish(hours=hours), [OFFER]) for hours in (3.0, 2.0)]
    with Workspace.open(tmp_path) as ws:
        assert to_confirm(ws, shelves, None) == 2.5
        assert to_confirm(ws, shelves, 1.0) is None and to_confirm(ws, shelves[:1], None) is None
        assert to_confirm(ws, [Shelf("vastai", Wish(), [OFFER])], None) is None, "how long it takes is not known"
    (tmp_path / "recipe.toml").write_text("[drivers.vastai]\nconfirm = 1\n")
    with Workspace.open(tmp_path) as ws:
        assert to_confirm(ws, shelves[:1], None) == 1.5


def test_keys_and_marks_are_derived_again_from_the_secret_of_the_installation(tmp_path: Path) -> None:
    path = str(tmp_path / "config" / "installation")
    one, again, other = Installation.of(path), Installation.of(path), Installation(b"another")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert public(one.login("k")) == public(again.login("k")) != public(again.login("l")) and public(one.login("k")) != public(one.host_key("k"))
    assert one.mark("3fa85f645717b3fc") == f"recipe-{one.name}-3fa85f645717b3fc" and len(one.name) == 8
    assert one.key(one.mark("k")) == "k" and one.key(other.mark("k")) is None and one.key("theirs") is None
