"""GPUs by name: what `nvidia-smi -L` lists, and which of them a value of CUDA_VISIBLE_DEVICES lets a program see, by CUDA's own rules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
PATIENCE = 6.0
"""Seconds that nvidia-smi may take, here and on hosts."""
_CARD = re.compile(r"GPU (\d+):.*\(UUID: (GPU-[^)\s]+)\)")
_PART = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)\s]+)\)")
_INDEX = re.compile(r"\+?(\d+)")


class Hung(Exception):
    """nvidia-smi does not end, so nothing is known of the GPUs."""


class Device(NamedTuple):
    """A GPU, or a MIG device of one, that a program can be given."""

    name: str  # in CUDA_VISIBLE_DEVICES, as it was written
    uuid: str = ""  # empty where no tool lists it
    place: str = ""  # as nvidia-smi counts: 1, or 1:0 for a MIG device of that card

    @property
    def lock(self) -> str:
        """Its name among the locks of its machine: the same however CUDA_VISIBLE_DEVICES names it."""
        return re.sub(r"[^A-Za-z0-9._-]", ".", self.uuid or self.name)


class Card(NamedTuple):
    """What `nvidia-smi -L` lists of one card."""

    number: int
    uuid: str = ""
    parts: tuple[str, ...] = ()  # the UUIDs of its MIG devices


def parse_cards(text: str) -> tuple[Card, ...]:
    """The cards in the output of `nvidia-smi -L`; none in an error message."""
    cards: list[Card] = []
    for line in text.splitlines():
        if card := _CARD.match(line):
            cards.append(Card(int(card[1]), card[2]))
        elif cards and (part := _PART.match(line)):
            cards[-1] = cards[-1]._replace(parts=(*cards[-1].parts, part[1]))
    return tuple(cards)


def visible(value: str | None, cards: Sequence[Card]) -> tuple[Device, ...]:
    """What a program sees whose CUDA_VISIBLE_DEVICES is `value`, or None where it is not set.

    CUDA stops at the first entry that names no device, and sees nothing where a device is named twice.  Without `cards` every name counts.
    """
    if value is None:
        return tuple(device for card in cards for device in _whole(card))
    found: list[Device] = []
    for entry in value.split(","):
        device = _find_device(entry.strip(), cards)
        if device is None or (found and _kind(device) != _kind(found[0])):
            break
        if any(device.lock == other.lock for other in found):
            return ()
        found.append(device)
    return tuple(found)


def device_variables(devices: Sequence[Device], inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that give a program these devices and no other.  Without a given order, the indices are ours, which is nvidia-smi's order."""
    env = {VISIBLE: ",".join(device.name for device in devices)}
    if devices and VISIBLE not in inherited and ORDER not in inherited:
        env[ORDER] = "PCI_BUS_ID"
    return env


def here(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """What a program on this machine with that environment sees.  Takes as long as nvidia-smi does, where it is installed.

    Raises Hung where nvidia-smi does not end.
    """
    return visible(environ.get(VISIBLE), _ask() or _nodes())


def _ask() -> tuple[Card, ...]:
    import shutil
    import subprocess
    import tempfile

    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        # What it prints goes to a file: of a GPU whose driver is wedged no signal ends it, and so a pipe of it has no end.
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
    return tuple(
        Card(number)
        for number in range(
            sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
        )
    )


def _whole(card: Card) -> list[Device]:
    if not card.parts:
        return [Device(str(card.number), card.uuid, str(card.number))]
    return [Device(uuid, uuid, f"{card.number}:{part}") for part, uuid in enumerate(card.parts)]


def _find_device(text: str, cards: Sequence[Card]) -> Device | None:
    if index := _INDEX.match(text):
        name = str(int(index[1]))
        card = next((card for card in cards if str(card.number) == name), None)
        if card is None:
            return None if cards else Device(name, "", name)
        return _whole(card)[0]._replace(name=name)  # of a card with MIG devices CUDA sees the first
    if not text.startswith(("GPU-", "MIG-")):
        return None
    if not any(card.uuid for card in cards) or text.startswith(
        "MIG-GPU-"
    ):  # names of drivers before 470: nvidia-smi lists them no more
        return Device(text, text)
    known = {
        device.uuid: device
        for card in cards
        for device in (Device("", card.uuid, str(card.number)), *_whole(card))
    }
    found = [device for uuid, device in known.items() if uuid.startswith(text)]
    return found[0]._replace(name=text) if len(found) == 1 else None


def _kind(device: Device) -> str:
    return device.name[:4] if device.name.startswith(("GPU-", "MIG-")) else ""
