"""Rows of tokens or texts in two parts, to learn and to judge by, as steps `data` write and trainings read them.  Does not know what they mean."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disk import sha256
from tokens import order

if TYPE_CHECKING:
    from datasets import Dataset

GLANCE = 256  # rows to judge by that are looked at while training; step `evaluate` reads all of them
BATCH = 512
Row = Sequence[Sequence[int] | int | str]


class Splits:
    """A folder with `manifest.json`, and the rows to learn and to judge by: mapped, and not loaded."""

    def __init__(self, folder: Path) -> None:
        from datasets import Dataset

        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.digest = hashlib.sha256(json.dumps(self.manifest["arrays"], sort_keys=True).encode()).hexdigest()
        self.train, self.held_out = (Dataset.from_file(str(folder / f"{name}.arrow")) for name in ("train", "held_out"))

    @property
    def glance(self) -> Dataset | None:
        """The first rows to judge by, None where none are held out."""
        count = min(GLANCE, len(self.held_out))
        return self.held_out.select(range(count)) if count else None


def scheduled(rows: Dataset, options: argparse.Namespace) -> Dataset:
    """All rows that a training reads, in its order: one epoch shuffled after the other, so that a longer training begins with the shorter one's."""
    return rows.select(order(len(rows), options.seed, 0, options.max_steps * options.global_batch))


def write(file: Path, names: Sequence[str], rows: Sequence[Row], *, numbers: Sequence[str] = (), texts: Sequence[str] = ()) -> str:
    """Write rows as an Arrow stream, which `datasets` maps and does not load, and return its SHA-256.

    A row has a value for each of `names`: a list of numbers below 2³¹, one number for those in `numbers`, or a text for those in `texts`.
    """
    import pyarrow as arrow  # type: ignore[import-untyped]

    kinds = [arrow.int32() if name in numbers else arrow.string() if name in texts else arrow.list_(arrow.int32()) for name in names]
    schema = arrow.schema(list(zip(names, kinds, strict=True)))
    with file.open("wb") as sink, arrow.ipc.new_stream(sink, schema) as stream:
        for at in range(0, len(rows), BATCH):
            part = rows[at : at + BATCH]
            columns = [arrow.array([row[number] for row in part], kind) for number, kind in enumerate(kinds)]
            stream.write_batch(arrow.record_batch(columns, schema=schema))
    return sha256(file)
