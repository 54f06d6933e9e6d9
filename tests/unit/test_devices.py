"""Which GPUs a value of CUDA_VISIBLE_DEVICES means, as CUDA reads it."""

from __future__ import annotations

import pytest

from drivers.devices import Card, Device, device_variables, parse_cards, visible

PLAIN = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa2222-0000)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb0000-0000)
"""
DIVIDED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-0000)
  MIG 3g.20gb     Device  0: (UUID: MIG-cccc0000-0000)
  MIG 3g.20gb     Device  1: (UUID: MIG-cccc1111-0000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa2222-0000)
"""


def names(value: str | None, text: str = PLAIN) -> list[str]:
    return [device.name for device in visible(value, parse_cards(text))]


def locks(value: str | None, text: str = PLAIN) -> list[str]:
    return [device.lock for device in visible(value, parse_cards(text))]


def test_cards_and_their_mig_devices_are_read() -> None:
    assert parse_cards(DIVIDED) == (
        Card(0, "GPU-aaaa1111-0000", ("MIG-cccc0000-0000", "MIG-cccc1111-0000")),
        Card(1, "GPU-aaaa2222-0000"),
    )
    assert (
        parse_cards(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
        )
        == ()
    )


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, ["0", "1", "2"]),
        ("1,0", ["1", "0"]),
        (" 2 , 0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        ("0,none,1", ["0"]),
        ("0,,1", ["0"]),
        ("1,1", []),
        ("0,1,0", []),
        ("+1,2x", ["1", "2"]),
        ("GPU-bbbb", ["GPU-bbbb"]),
        ("GPU-bbbb,GPU-aaaa1", ["GPU-bbbb", "GPU-aaaa1"]),
        ("GPU-aaaa", []),  # it could be either
        ("GPU-bbbb,GPU-bbbb0000-0000", []),
        ("GPU-dddd,GPU-bbbb", []),
        ("0,GPU-bbbb", ["0"]),
        ("GPU-bbbb,0", ["GPU-bbbb"]),
        ("MIG-cccc0000-0000", []),
    ],
)
def test_a_value_means_what_cuda_makes_of_it(value: str | None, seen: list[str]) -> None:
    assert names(value) == seen


def test_every_name_of_a_device_has_one_lock() -> None:
    assert locks("1") == locks("GPU-aaaa2") == locks("GPU-aaaa2222-0000") == ["GPU-aaaa2222-0000"]
    assert locks("0", DIVIDED) == locks("MIG-cccc0", DIVIDED) == ["MIG-cccc0000-0000"]


def test_mig_devices_are_given_singly() -> None:
    assert names(None, DIVIDED) == ["MIG-cccc0000-0000", "MIG-cccc1111-0000", "1"]
    assert [device.place for device in visible(None, parse_cards(DIVIDED))] == ["0:0", "0:1", "1"]
    assert names("MIG-cccc1111-0000,MIG-cccc0000-0000", DIVIDED) == [
        "MIG-cccc1111-0000",
        "MIG-cccc0000-0000",
    ]


def test_without_a_tool_that_lists_devices_names_are_taken_as_they_are() -> None:
    assert visible("1,0", ()) == (Device("1", "", "1"), Device("0", "", "0"))
    assert visible("GPU-x,GPU-y", ()) == (Device("GPU-x", "GPU-x"), Device("GPU-y", "GPU-y"))
    assert visible(None, ()) == () == visible("-1", ()) == visible("1,1", ())
    assert [device.lock for device in visible("MIG-GPU-x/7/0", ())] == ["MIG-GPU-x.7.0"]
    assert visible("1,2", (Card(0), Card(1))) == (Device("1", "", "1"),)


def test_what_is_assigned_is_named_as_the_caller_named_it() -> None:
    devices = visible("2,0", parse_cards(PLAIN))
    assert device_variables(devices[:1], {"CUDA_VISIBLE_DEVICES": "2,0"}) == {
        "CUDA_VISIBLE_DEVICES": "2"
    }
    assert device_variables((), {}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_an_index_that_the_caller_did_not_write_is_counted_as_nvidia_smi_counts() -> None:
    devices = visible(None, parse_cards(PLAIN))
    assert device_variables(devices[1:], {}) == {
        "CUDA_VISIBLE_DEVICES": "1,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert device_variables(devices[1:], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {
        "CUDA_VISIBLE_DEVICES": "1,2"
    }
