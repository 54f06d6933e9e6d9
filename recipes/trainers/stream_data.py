"""A data set that is read, cut into tokens and packed while a training learns from it: `tokens.Sequences` without files.  Knows no models.

Rows are read in blocks.  The sequences of a block are packed and shuffled among each other, and the block that begins after so many sequences is a
function of data, settings and seed: to resume from a checkpoint takes the place in the files at which its block begins, and reads that block again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import rows
from rows import BadData
from sft_data import BATCH, MOST, TEMPLATE, Counts, Reading, encode, is_held_out, pieces
from tokens import Integers, pack, shuffled
from vocabulary import Vocabulary

UNSHUFFLED = 1000  # rows whose pieces are packed together where nothing is shuffled


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block begins."""

    number: int = 0  # blocks before it
    sequences: int = 0  # … and sequences in them
    file: int = 0
    place: rows.Place = (0, 0)
    rows: int = 0  # good rows of this reading of the data set before it
    bad: int = 0  # … and bad ones
    useless: bool = True  # nothing of this reading was to be learned so far


class Stream:
    """The rows at `data` as sequences 0, 1, 2, … without an end, as the manifest in `folder` wants them.

    They are asked for in rising order.  Raises BadData where rows cannot be used.
    """

    def __init__(self, data: Path, folder: Path, base: Path, max_bad_rows: int) -> None:
        self.manifest = json.loads((folder / "manifest.json").read_text())
        wanted = self.manifest["stream"]
        rows.BLOCK = wanted["text_block"]
        self._data, self._wanted, self._max_bad_rows = data, wanted, max_bad_rows
        self._files = rows.files(data).train
        self._held_out = frozenset(wanted["held_out_rows"])
        told = [self.manifest, [(str(file.relative_to(data)), file.stat().st_size) for file in self._files]]
        self.digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        template = folder / TEMPLATE
        self._vocabulary = Vocabulary(base, template if template.exists() else None, wanted["eos_token"])
        self._begun: list[Block] = []
        self._next = Block()
        self._documents: list[tuple[Integers, Integers]] = []
        self._sequences: list[list[int]] = []

    def begin(self, at: Mapping[str, object]) -> None:
        """Resume from what `place` told."""
        self._next = Block(**{**at, "place": tuple(at["place"])})  # type: ignore[arg-type]

    def place(self, sequence: int) -> dict[str, object]:
        """Where to begin, to go on with this sequence."""
        blocks = [block for block in self._begun if block.sequences <= sequence]
        self._begun = [*blocks[-1:], *self._begun[len(blocks) :]]
        return asdict(blocks[-1] if blocks else Block())

    def documents(self, sequence: int) -> list[tuple[Integers, Integers]]:
        while not self._begun or sequence >= self._next.sequences:
            self._read()
        return [self._documents[number] for number in self._sequences[sequence - self._begun[-1].sequences]]

    def _is_held_out(self, row: int) -> bool:
        return row in self._held_out or is_held_out(row, self._wanted["seed"], bytes.fromhex(self._wanted["held_out_below"]))

    def _read(self) -> None:
        """Take the next block into memory, in the place of the last."""
        begin = self._next
        self._begun.append(begin)
        counts = Counts(rows=begin.rows, bad_rows=begin.bad)
        reading = Reading(self._wanted["format"], self._wanted["columns"], self._vocabulary, counts)
        samples = reading.samples(self._files, self._data, self._max_bad_rows, (begin.file, begin.place))
        size, most, tokens = self.manifest["max_length"], self._wanted["shuffle_rows"] or UNSHUFFLED, 0
        self._documents, left, after, whole = [], most, (begin.file, begin.place), False
        while left and tokens < MOST and not whole:
            batch = list(islice(samples, min(BATCH, left)))
            whole, left = len(batch) < min(BATCH, left), left - len(batch)
            after = batch[-1].after if batch else after
            learnt = [each for each in batch if not self._is_held_out(each.digest)]
            for ids, marks in encode(learnt, self._vocabulary, reading.format):
                for piece, learned in pieces(ids, marks, size, reading.format, counts):
                    self._documents.append(_arrays(piece, learned, self.manifest["dtype"]))
                    tokens += len(piece)
        if counts.bad_rows > self._max_bad_rows:
            complaints = "\n  ".join(counts.complaints)
            raise BadData(f"{counts.bad_rows} bad rows beside {counts.rows} good ones so far, max_bad_rows is {self._max_bad_rows}\n  {complaints}")
        lengths = [len(ids) for ids, _ in self._documents]
        packed = pack(lengths, range(len(lengths)), size) if self.manifest["packing"] else [[number] for number in range(len(lengths))]
        if self._wanted["shuffle_rows"]:
            self._sequences = [packed[number] for number in shuffled(len(packed), self._wanted["seed"], begin.number)]
        else:
            self._sequences = sorted(packed, key=min)
        useless = begin.useless and not packed
        if whole and useless:
            raise BadData(f"none of {counts.rows} rows leaves anything to learn within max_length {size}")
        self._next = Block(begin.number + 1, begin.sequences + len(packed), *after, counts.rows, counts.bad_rows, useless)
        if whole:  # the next one begins at the front again
            self._next = Block(begin.number + 1, begin.sequences + len(packed))


def _arrays(tokens: list[int], learned: list[int] | None, dtype: str) -> tuple[Integers, Integers]:
    marks = np.ones(len(tokens), "u1") if learned is None else np.array(learned, "u1")
    marks[0] = 0
    return np.array(tokens, dtype), marks
