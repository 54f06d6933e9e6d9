"""The token store between `sft_data` and those who read it: flat arrays that are mapped, not loaded, and a manifest.  Knows nothing of models.

tokens.bin    all documents one after another, <u2 or <u4       learned.bin   1 where a token is learned from, 0 where it is only read
starts.bin    <u8, where each document begins, and the end      manifest.json counts, settings, SHA-256 of each array
SPLIT.documents.bin <u4 and SPLIT.bounds.bin <u8: sequence i of `train` or `held_out` is documents[bounds[i]:bounds[i+1]]
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "held_out")
Integers = npt.NDArray[np.integer]


class Writer:
    """Appends documents, then writes which of them make up the sequences."""

    def __init__(self, folder: Path, wide: bool) -> None:
        self.folder = folder
        self.dtype = np.dtype("<u4" if wide else "<u2")
        self._tokens = (folder / "tokens.bin").open("wb")
        self._learned = (folder / "learned.bin").open("wb")
        self.starts = [0]

    def add(self, tokens: Sequence[int], learned: Sequence[int] | None) -> int:
        """One document, whose number comes back.  Without `learned` every token is."""
        self._tokens.write(np.asarray(tokens, self.dtype).tobytes())
        self._learned.write(bytes(learned) if learned is not None else b"\1" * len(tokens))
        self.starts.append(self.starts[-1] + len(tokens))
        return len(self.starts) - 2

    def close(self, splits: dict[str, list[list[int]]], facts: dict[str, object]) -> dict[str, object]:
        """Write the sequences of each split and the manifest, which comes back."""
        self._tokens.close()
        self._learned.close()
        np.asarray(self.starts, "<u8").tofile(self.folder / "starts.bin")
        for name in SPLITS:
            sequences = splits[name]
            np.asarray([document for sequence in sequences for document in sequence], "<u4").tofile(self.folder / f"{name}.documents.bin")
            np.cumsum([0, *map(len, sequences)], dtype="<u8").tofile(self.folder / f"{name}.bounds.bin")
        arrays = {file.name: _sha256(file) for file in sorted(self.folder.glob("*.bin"))}
        manifest: dict[str, object] = {
            "format": 1,
            "dtype": self.dtype.str,
            **facts,
            "sequences": {name: len(splits[name]) for name in SPLITS},
            "tokens": self.starts[-1],
            "arrays": arrays,
        }
        (self.folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        return manifest


class Sequences(Protocol):
    """What batches are made of."""

    def documents(self, sequence: int) -> list[tuple[Integers, Integers]]:
        """Tokens and learned marks of each document in a sequence.  The first token of a document follows nothing, so it is not learned."""


class Tokens:
    """One split of a store, read through memory maps."""

    def __init__(self, folder: Path, split: str) -> None:
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.digest = hashlib.sha256(json.dumps(self.manifest["arrays"], sort_keys=True).encode()).hexdigest()
        self._tokens = _mapped(folder / "tokens.bin", self.manifest["dtype"])
        self._learned = _mapped(folder / "learned.bin", "u1")
        self._starts = _mapped(folder / "starts.bin", "<u8")
        self._documents = _mapped(folder / f"{split}.documents.bin", "<u4")
        self._bounds = _mapped(folder / f"{split}.bounds.bin", "<u8")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def documents(self, sequence: int) -> list[tuple[Integers, Integers]]:
        found = []
        for document in self._documents[int(self._bounds[sequence]) : int(self._bounds[sequence + 1])]:
            begin, end = int(self._starts[document]), int(self._starts[document + 1])
            learned = np.array(self._learned[begin:end])
            learned[0] = 0
            found.append((self._tokens[begin:end], learned))
        return found

    def learned(self, sequence: int) -> int:
        """How many tokens of a sequence are learned from."""
        return sum(int(learned.sum()) for _, learned in self.documents(sequence))


def pack(lengths: Sequence[int], documents: Sequence[int], size: int) -> list[list[int]]:
    """Documents put together into sequences of at most `size` tokens: the longest first, each into the fullest sequence that has room."""
    sequences: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> sequences
    rooms: list[int] = []  # the keys of with_room, ascending
    for document in sorted(documents, key=lambda number: (-lengths[number], number)):
        need = lengths[document]
        at = bisect_left(rooms, need)
        if at == len(rooms):
            sequences.append([document])
            index, room = len(sequences) - 1, size
        else:
            room = rooms[at]
            index = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
            sequences[index].append(document)
        left = room - need
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(index)
    return sequences


def order(length: int, seed: int, first: int, count: int) -> list[int]:
    """Sequences number `first` to `first + count` of an endless, shuffled reading of `length` sequences: a function of the seed and nothing else."""
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, begin = divmod(first + len(chosen), length)
        chosen += shuffled(length, seed, epoch)[begin : begin + count - len(chosen)].tolist()
    return chosen


_epoch: dict[tuple[int, int, int], Integers] = {}


def shuffled(length: int, seed: int, epoch: int) -> Integers:
    """The order in which one reading of `length` sequences has them."""
    key = (length, seed, epoch)
    if key not in _epoch:
        _epoch.clear()
        # RandomState, not Generator: its stream is the same in every version of numpy.
        start = int.from_bytes(hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()[:4], "big")
        _epoch[key] = np.random.RandomState(start).permutation(length)
    return _epoch[key]


def _mapped(file: Path, dtype: str) -> Integers:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
