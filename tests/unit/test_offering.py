"""What is chosen among offers, and when a person is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivers.base import Denied, Need, Offer, Rejected, Resources, Wish
from drivers.cloud import About, Filters, InstallationKeys, public, why_excluded
from drivers.machine import Facts, describe_shortfall, find_cuda_version
from runner.hosts.renting.any_driver import data_notice
from runner.hosts.renting.offering import EGRESS_UNKNOWN, Shelf, cost_to_confirm
from runner.hosts.renting.totals import CostModel
from runner.interface.shelves import as_json, describe_choice, format_offers
from runner.settings import Config
from runner.storage.workspace import Workspace

CARD = Resources(
    cpus=16.0, memory=64 << 30, gpus=2, gpu="RTX 4090", gpu_memory=24564 << 20, disk=500 * 10**9
)
OFFER = Offer("vastai", "1", CARD, price=0.5, region="Sweden, SE", reliability=0.99, longest=10.0)
GOOD = About(verified=True, datacenter=False, inet=500.0, cuda=12.8)


@pytest.mark.parametrize(
    ("need", "given", "why"),
    [
        (Need(gpus=1, gpu="4090", gpu_memory=24 * 10**9), {}, ""),
        (Need(gpus=3), {}, "too few GPUs"),
        (Need(gpus=1, gpu="H100"), {}, "another GPU"),
        (Need(gpu_memory=40 * 10**9), {}, "too little GPU memory"),
        (Need(disk=10**12), {}, "too little disk"),
        (Need(nodes=2), {}, "several machines are one order"),
        (
            Need(),
            {"gpu": "rtx_4090", "regions": "se,us", "max_price": "0.5", "inet": 500, "cuda": 12.8},
            "",
        ),
        (Need(), {"regions": ["US"]}, "another region"),
        (Need(), {"reliability": "0.999"}, "less reliable"),
        (Need(), {"datacenter": "yes"}, "not in a datacenter"),
        (Need(), {"inet": 501}, "network too slow"),
        (Need(), {"cuda": "13"}, "CUDA version too old"),
        (Need(), {"max_price": 0.49}, "above max_price"),
    ],
)
def test_an_offer_is_left_out_for_one_reason_in_words(
    need: Need, given: dict[str, str], why: str
) -> None:
    assert why_excluded(OFFER, GOOD, Wish(need), Filters().with_more(given)) == why


def test_an_offer_that_ends_before_the_work_does_is_left_out() -> None:
    assert (
        why_excluded(OFFER, GOOD, Wish(hours=11.0), Filters()) == "available for too short a time"
    )
    assert why_excluded(OFFER, GOOD._replace(verified=False), Wish(), Filters()) == "not verified"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": "1"}, 'did you mean "gpu"'),
        ({"inet": "fast"}, "must be a number"),
        ({"verified": "maybe"}, "true or false"),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_in_a_sentence(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(Rejected, match=words):
        Filters().with_more(given)


CARDS = ["RTX 4090, 24564"] * 2


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"smi": ["yes"], "gpu": CARDS}, ""),
        ({}, ""),
        ({"smi": ["yes"]}, "it has 0 GPUs, but 2 were expected"),
        ({"smi": ["yes"], "gpu": CARDS[1:]}, "it has 1 GPUs, but 2 were expected"),
        (
            {"smi": ["yes"], "gpu": ["RTX 4090, 12282"] * 2},
            "it has 13 GB of GPU memory, but 26 were expected",
        ),
        ({"memory": ["4000000000"]}, "it has 4 GB of memory, but 8 were expected"),
        ({"disk": ["4000000000"]}, "it has 4 GB of disk, but 9 were expected"),
    ],
)
def test_a_machine_that_has_less_than_was_promised_is_named(told: Facts, words: str) -> None:
    assert describe_shortfall(CARD, Need(memory=8 * 10**9, disk=9 * 10**9), told) == words


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime", (13, 0)),
        ("nvidia/cuda:12.4.1-devel-ubuntu22.04", (12, 4)),
        ("runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404", (12, 8)),
        (
            "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580",
            (12, 9),
        ),
        ("cuda_12_6_pytorch_2_7", (12, 6)),
        ("ubuntu_22_cuda_12", (12, 0)),
        ("nvidia/cuda", None),
        ("acu1234/tool:latest", None),
        ("", None),
    ],
)
def test_the_name_of_an_image_says_which_cuda_it_needs(
    image: str, version: tuple[int, int] | None
) -> None:
    assert find_cuda_version(image) == version


def test_a_driver_that_is_older_than_the_cuda_of_the_image_is_named() -> None:
    told, image = {"smi": ["yes"], "gpu": CARDS, "cuda": ["12.2"]}, "nvidia/cuda:12.10.0-base"
    assert (
        describe_shortfall(CARD, Need(), told, image)
        == f"its driver runs CUDA 12.2 (nvidia-smi: CUDA Version), but {image} needs 12.10"
    )
    assert describe_shortfall(CARD, Need(), told, "python:3.11", "12.4").endswith(
        "the setting `cuda` requires 12.4"
    ), "the name of the image says nothing"
    assert (
        describe_shortfall(CARD, Need(), told, "python:3.11")
        == describe_shortfall(CARD, Need(), told, "nvidia/cuda:12.1.0-base", "12.4")
        == ""
    )
    assert (
        describe_shortfall(CARD, Need(), {**told, "cuda": ["12.10"]}, image)
        == describe_shortfall(CARD, Need(), {**told, "cuda": []}, image)
        == describe_shortfall(CARD, Need(), told)
        == ""
    )


def test_a_person_is_asked_above_two_dollars_unless_the_limit_or_the_settings_say_otherwise(
    tmp_path: Path,
) -> None:
    shelves = [Shelf("vastai", Wish(hours=hours), [OFFER]) for hours in (3.0, 2.0)]
    with Workspace.open(tmp_path) as ws:
        assert cost_to_confirm(ws, shelves, None) == 2.5
        assert (
            cost_to_confirm(ws, shelves, 1.0) is None
            and cost_to_confirm(ws, shelves[:1], None) is None
        )
        assert cost_to_confirm(ws, [Shelf("vastai", Wish(), [OFFER])], None) is None, (
            "how long it takes is not known"
        )
    (tmp_path / "recipe.toml").write_text("[drivers.vastai]\nconfirm = 1\n")
    with Workspace.open(tmp_path) as ws:
        assert cost_to_confirm(ws, shelves[:1], None) == 1.5


def test_the_total_has_the_egress_of_what_comes_home_and_the_lowest_total_is_chosen() -> None:
    far = replace(OFFER, id="far", price=0.4, egress_price=0.1)  # cheaper by the hour
    ranked = CostModel().rank
    much, little = Wish(hours=2.0, home=5 * 10**9), Wish(hours=2.0, home=10**9)
    assert [offer.id for offer in ranked([far, OFFER], much)] == ["1", "far"], "1.00 and 1.30"
    assert [offer.id for offer in ranked([far, OFFER], little)] == ["far", "1"], "0.90 and 1.00"
    assert ranked([OFFER, far], Wish(home=10**9)) == [OFFER, far], "the driver's order"
    shelf = Shelf("vastai", Wish(hours=2.0, home=5 * 10**9), [far])
    _, head, row = format_offers("train", [shelf], 5)
    assert (
        shelf.total == 1.3
        and head.split().count("egress") == 1
        and row.split()[-5:-3] == ["0.50", "1.30"]
    )
    assert "2.0 h, $1.30 with $0.50 of egress" in describe_choice({"train": [shelf]})[0]
    told: Any = as_json("train", shelf)
    assert (
        told["bytes_home"] == 5 * 10**9
        and told["offers"][0]["usd_of_egress"] == 0.5
        and told["offers"][0]["usd"] == 1.3
    )


def test_a_total_without_egress_says_so() -> None:
    charges = replace(OFFER, egress_price=0.1)
    shelf = Shelf("vastai", Wish(hours=2.0), [charges])
    assert (
        shelf.total == 1.0
        and EGRESS_UNKNOWN in format_offers("train", [shelf], 5)
        and EGRESS_UNKNOWN in describe_choice({"train": [shelf]})[1]
    )
    assert format_offers("train", [shelf], 5)[2].split()[-5:-3] == ["?", "1.00"]
    assert EGRESS_UNKNOWN not in format_offers(
        "train", [Shelf("vastai", Wish(hours=2.0), [OFFER])], 5
    ), "nothing is charged"


def test_keys_and_marks_are_derived_again_from_the_secret_of_the_installation(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "config" / "installation")
    one, again, other = (
        InstallationKeys.of(path),
        InstallationKeys.of(path),
        InstallationKeys(b"another"),
    )
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert public(one.login("k")) == public(again.login("k")) != public(
        again.login("l")
    ) and public(one.login("k")) != public(one.host_key("k"))
    assert (
        one.mark("3fa85f645717b3fc") == f"recipe-{one.name}-3fa85f645717b3fc" and len(one.name) == 8
    )
    assert (
        one.key(one.mark("k")) == "k"
        and one.key(other.mark("k")) is None
        and one.key("theirs") is None
    )


@pytest.mark.parametrize(
    ("folder", "secret", "way"),
    [
        ("file", "", "set XDG_CONFIG_HOME to a writable directory"),
        ("", "not a secret", "delete the file if no machine is rented"),
    ],
)
def test_a_secret_of_the_installation_that_cannot_be_used_says_what_to_do(
    tmp_path: Path, folder: str, secret: str, way: str
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / folder / "installation"
    if secret:
        path.write_text(secret)
    with pytest.raises(Denied, match=way):
        InstallationKeys.of(str(path))


def test_the_notice_of_several_providers_says_which_setting_withholds_the_secrets() -> None:
    any_of = "any:vastai,runpod,gcp"
    to = "may be sent to machines of vastai, runpod or gcp"
    assert data_notice(Config(), any_of) == f"the run's data and secrets {to}"
    assert data_notice(Config(), "vastai") == ""
    one = Config(drivers={"runpod": {"secrets": "deny"}, "gcp": {"secrets": "send"}})
    assert data_notice(one, any_of) == (
        f"the run's data {to}; its secrets are sent to none of them "
        '(`secrets = "deny"` in [drivers.runpod])'
    )
    two = Config(drivers={"runpod": {"secrets": "deny"}, "gcp": {"secrets": "deny"}})
    assert data_notice(two, any_of).endswith("in [drivers.runpod] and [drivers.gcp])")
