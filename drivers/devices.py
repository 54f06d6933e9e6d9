"""GPU discovery with `nvidia-smi -L`, and the GPUs selected by CUDA_VISIBLE_DEVICES under CUDA's
own rules.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
PATIENCE = 6.0
"""Seconds that nvidia-smi may take, here and on hosts."""
_CARD = re.compile(r"GPU (\d+):.*\(UUID: (GPU-[^)\s]+)\)")
_PART = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)\s]+)\)")
_INDEX = re.compile(r"\+?(\d+)")


class Hung(Exception):
    """Error for nvidia-smi that did not exit in time, so the GPUs are unknown."""


class Device(NamedTuple):
    """A GPU or a MIG device that a program can use."""

    name: str  # in CUDA_VISIBLE_DEVICES, as it was written
    uuid: str = ""  # empty where no tool lists it
    place: str = ""  # as nvidia-smi counts: 1, or 1:0 for a MIG device of that card

    @property
    def lock(self) -> str:
        """Lock name of the GPU on its machine.

        It is the UUID if known, so that every spelling in CUDA_VISIBLE_DEVICES gives the same lock.
        """
        return re.sub(r"[^A-Za-z0-9._-]", ".", self.uuid or self.name)


class Card(NamedTuple):
    """A physical GPU in the output of `nvidia-smi -L`."""

    number: int
    uuid: str = ""
    parts: tuple[str, ...] = ()  # the UUIDs of its MIG devices


def parse_cards(text: str) -> tuple[Card, ...]:
    """Parse the output of `nvidia-smi -L` to physical GPUs. An error message gives none."""
    cards: list[Card] = []
    for line in text.splitlines():
        card, part = _CARD.match(line), _PART.match(line)
        if card:
            cards.append(Card(int(card[1]), card[2]))
        elif part and cards:
            cards[-1] = cards[-1]._replace(parts=(*cards[-1].parts, part[1]))
    return tuple(cards)


def visible(value: str | None, cards: Sequence[Card]) -> tuple[Device, ...]:
    """Return the GPUs visible to a program with CUDA_VISIBLE_DEVICES set to `value` (None: unset).

    CUDA stops at the first invalid entry, and shows no GPU if one is named twice. If `cards` is
    empty, every name counts.
    """
    found: list[Device] = []
    if value is None:
        for card in cards:
            found += _whole(card)
        return tuple(found)
    for entry in value.split(","):
        device = _find_device(entry.strip(), cards)
        if device is None:
            break
        # CUDA does not mix indices, UUIDs of cards and UUIDs of MIG devices.
        if found and _kind(device) != _kind(found[0]):
            break
        if any(device.lock == other.lock for other in found):
            return ()
        found.append(device)
    return tuple(found)


def device_variables(devices: Sequence[Device], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that restrict a program to these GPUs.

    Unless inherited, the order is nvidia-smi's.
    """
    env = {VISIBLE: ",".join(device.name for device in devices)}
    if devices and VISIBLE not in inherited and ORDER not in inherited:
        env[ORDER] = "PCI_BUS_ID"
    return env


def here(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return this machine's GPUs that are visible with these environment variables.

    Runs nvidia-smi if installed. Raises Hung if nvidia-smi does not exit.
    """
    return visible(environ.get(VISIBLE), _ask() or _nodes())


def _ask() -> tuple[Card, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        # What it prints goes to a file: of a GPU whose driver is wedged no signal ends it, and so a
        # pipe of it has no end.
        with tempfile.TemporaryFile() as printed:
            asked = subprocess.Popen(
                ("nvidia-smi", "-L"), stdout=printed, stderr=subprocess.DEVNULL
            )
            try:
                asked.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                asked.kill()
                raise Hung from None
            printed.seek(0)
            return parse_cards(printed.read().decode("utf-8", "replace"))
    except OSError:
        return ()


def _nodes() -> tuple[Card, ...]:
    gpus = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return tuple(Card(number) for number in range(len(gpus)))


def _whole(card: Card) -> list[Device]:
    if not card.parts:
        return [Device(str(card.number), card.uuid, str(card.number))]
    return [Device(uuid, uuid, f"{card.number}:{part}") for part, uuid in enumerate(card.parts)]


def _find_device(text: str, cards: Sequence[Card]) -> Device | None:
    """Return the GPU named by one entry of CUDA_VISIBLE_DEVICES, or None."""
    if index := _INDEX.match(text):
        return _find_by_index(str(int(index[1])), cards)
    if text.startswith(("GPU-", "MIG-")):
        return _find_by_uuid(text, cards)
    return None


def _find_by_index(name: str, cards: Sequence[Card]) -> Device | None:
    if not cards:
        return Device(name, "", name)
    for card in cards:
        if str(card.number) == name:
            return _whole(card)[0]._replace(name=name)  # CUDA uses a card's first MIG device
    return None


def _find_by_uuid(prefix: str, cards: Sequence[Card]) -> Device | None:
    """Return the only GPU whose UUID starts with `prefix`, or None if not exactly one matches."""
    has_uuids = any(card.uuid for card in cards)
    is_old_name = prefix.startswith("MIG-GPU-")  # of drivers before 470: nvidia-smi omits them
    if is_old_name or not has_uuids:
        return Device(prefix, prefix)
    known: dict[str, Device] = {}
    for card in cards:
        for device in (Device("", card.uuid, str(card.number)), *_whole(card)):
            known[device.uuid] = device
    found = [device for uuid, device in known.items() if uuid.startswith(prefix)]
    return found[0]._replace(name=prefix) if len(found) == 1 else None


def _kind(device: Device) -> str:
    return device.name[:4] if device.name.startswith(("GPU-", "MIG-")) else ""
