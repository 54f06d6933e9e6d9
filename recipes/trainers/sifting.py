"""What steps `data` do with rows, whatever they are for: take the good, gather what is wrong with the bad, hold a part out.  Knows no tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from notices import warn
from rows import ONE_ROW, Bad, BadData, DataFiles, Row, files, files_to_judge_by, kind, read

SHOWN = 20  # complaints that are printed
ENOUGH = 1000  # bad rows after which reading stops: the file is not what one thought
Usable = TypeVar("Usable")


@dataclass(slots=True)
class Sieve:
    """Rows go through it once; it counts them.  `allowed` bad ones may be left out."""

    allowed: int
    rows: int = 0
    bad_rows: int = 0
    complaints: list[str] = field(default_factory=list)

    def sift(self, files: Iterable[Path], root: Path, check: Callable[[Row], Usable | Bad]) -> Iterator[Usable]:
        """What `check` makes of the rows of the files, but for bad ones.  `root` is what people gave: files are named from there."""
        for file in files:
            for row in _read(file, file.name if file == root else str(file.relative_to(root))):
                found = check(row) if isinstance(row, Row) else row
                if not isinstance(found, Bad):
                    self.rows += 1
                    yield found
                    continue
                self.bad_rows += 1
                if len(self.complaints) < SHOWN:
                    self.complaints.append(f"{found.where}: {found.why}")
                if self.bad_rows > max(self.allowed, ENOUGH):
                    return

    def judge(self, found: DataFiles) -> None:
        """Raises BadData, which names the first bad rows, where there are more than allowed; and where there is no good one."""
        if self.bad_rows > self.allowed:
            more = self.bad_rows - len(self.complaints)
            complaints = "\n  ".join(self.complaints + ([f"… and {more} more"] if more else []))
            hint = f"; max_bad_rows={self.bad_rows} would leave them out" if self.rows else ""
            raise BadData(f"{self.bad_rows} bad rows beside {self.rows} good ones{hint}\n  {complaints}")
        if not self.rows:
            raise BadData(f"the data set is empty: no row in {', '.join(found.names[:3])}{' …' if len(found.names) > 3 else ''}")
        if self.bad_rows:
            warn(f"{self.bad_rows} bad rows left out: {'; '.join(self.complaints)}")


def data_files(path: Path, eval_fraction: float) -> DataFiles:
    """Find the files of a data set, and tell people which of them are left out or held out.  Raises BadData."""
    found = files(path)
    for line in [*found.notices(), *files_to_judge_by(found, eval_fraction)]:
        warn(line)
    return found


def split(learned: Sequence[int], to_judge_by: Sequence[int], fraction: float, seed: int, owner: str = "row") -> set[int]:
    """The owners of rows that are kept from training: all of those in files to judge by where there are some, else a `fraction` of all.

    `owner` is what an owner is called.

    Raises BadData where nothing would be left to learn from.
    """
    if not to_judge_by:
        return held_out(learned, fraction, seed, owner)
    kept = set(to_judge_by)
    if also := sum(owner in kept for owner in learned):
        warn(f"{also} rows to learn from left out: they are among the held-out ones too")
    if also == len(learned):
        raise BadData("each row to learn from is among the held-out ones too: nothing is left to learn")
    return kept


def parts(owners: Sequence[int], learned: int, fraction: float, seed: int, owner: str = "row") -> dict[str, list[int]]:
    """Return the places of rows to learn from and to judge by, from the owner of each row.

    The first `learned` rows are of files to learn from, the others of files to judge by.  Raises BadData as `split` does.
    """
    kept = split(owners[:learned], owners[learned:], fraction, seed, owner)
    places = range(learned)
    named = list(range(learned, len(owners)))
    return {
        "train": [place for place in places if owners[place] not in kept],
        "held_out": named or [place for place in places if owners[place] in kept],
    }


def text_of(row: Row, name: str) -> str | Bad:
    """Return the text in a column of a row, or what is wrong with it."""
    value = row.value.get(name)
    if not isinstance(value, str):
        return Bad(row.where, f'"{name}" is {kind(value)}, a string is expected')
    if not value.strip():
        return Bad(row.where, f'"{name}" is empty')
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        return Bad(row.where, f'"{name}" holds half a surrogate pair, which no UTF-8 has')
    return value


def _read(file: Path, name: str) -> Iterator[Row | Bad]:
    try:
        yield from read(file, name)
    except ValueError as error:
        # A number of thousands of digits, two columns of one name: what a reader finds and does not call a fault of its format.
        raise BadData(f"{name}: cannot be read: {error}") from error


def number(text: str) -> int:
    """A text as 64 bits of its SHA-256, for `held_out`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def held_out(owners: Iterable[int], fraction: float, seed: int, owner: str = "row") -> set[int]:
    """The owners of rows that are kept from training, by their hash: all rows of one are on one side, and more data moves no row across.

    `fraction` of them, one at least, unless it is 0.  Raises BadData where there is only one.
    """
    if not fraction:
        return set()
    rank = {owner: hashlib.sha256(f"{seed}:{owner}".encode()).digest() for owner in owners}
    if len(rank) < 2:
        one = ONE_ROW if owner == "row" else f"rows of one {owner}"
        raise BadData(f"{one} cannot be both learned and held out: more {owner}s, or eval_fraction=0")
    limit = int(fraction * 2**64).to_bytes(8, "big")
    chosen = {owner for owner, digest in rank.items() if digest[:8] < limit} or {min(rank, key=rank.__getitem__)}
    if len(chosen) == len(rank):
        chosen.remove(max(rank, key=rank.__getitem__))
    return chosen


def renamed(text: str, known: Collection[str] = ()) -> dict[str, str]:
    """What columns are called where they have other names, from JSON such as {"prompt": "question"}.  Raises BadData for one that is not `known`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadData(f"columns: {text} is not JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise BadData(f'columns: {text} is not {{"{next(iter(known), "prompt")}": "YOUR NAME"}}')
    if known and (wrong := sorted(set(value) - set(known))):
        raise BadData(f"columns: {wrong[0]} is none of {', '.join(known)}")
    return value


def no_message(messages: Iterable[object]) -> int:
    """The place, from 1, of the first that is no message with a role and a text; 0 where all are."""
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return place
    return 0
