"""Read a data set, a file or a folder, row by row; say where each row stands and what is wrong with it.  Does not know what the rows are for."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".txt")
BLOCK = 1 << 20  # bytes of a text file that make one row, at most; a cut falls on a line end


class BadData(Exception):
    """The data set cannot be used."""


Place = tuple[int, int]
"""Where in a file reading may go on: at a byte, after so many lines; of CSV and Parquet, whose rows only a reader finds, at 0 after so many rows."""


@dataclass(frozen=True, slots=True)
class Row:
    where: str  # FILE:LINE, or FILE row N where a format has no lines
    value: dict[str, object]
    after: Place = (0, 0)  # where the next one begins


@dataclass(frozen=True, slots=True)
class Bad:
    where: str
    why: str


def files(path: Path) -> tuple[list[Path], list[Path]]:
    """The data files at `path` in name order, and the files there that are none."""
    if not path.exists():
        raise BadData(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise BadData(f"{path.name}: not a data file; its name must end in one of {' '.join(SUFFIXES)}")
        return [path], []
    inside = sorted(item for item in path.rglob("*") if item.is_file() and not any(part.startswith(".") for part in item.relative_to(path).parts))
    good = [item for item in inside if item.suffix.lower() in SUFFIXES]
    if not good:
        raise BadData(f"{path}: no data file in this folder; {len(inside)} others, none ending in {' '.join(SUFFIXES)}")
    return good, [item for item in inside if item.suffix.lower() not in SUFFIXES]


def read(file: Path, name: str, begin: Place = (0, 0)) -> Iterator[Row | Bad]:
    """The rows of one file from `begin` on, under the name that messages give it."""
    readers = {".jsonl": _jsonl, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".txt": _text}
    try:
        yield from readers[file.suffix.lower()](file, name, begin)
    except OSError as error:
        raise BadData(f"{name}: cannot be read: {error.strerror or error}") from error


def _jsonl(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    at, before = begin
    with file.open("rb") as lines:
        lines.seek(at)
        for number, line in enumerate(lines, before + 1):
            where = f"{name}:{number}"
            at += len(line)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                value = json.loads(line.rstrip(b"\r\n").decode())
            except UnicodeDecodeError as error:
                yield Bad(where, _not_utf8(error))
                continue
            except json.JSONDecodeError as error:
                yield Bad(where, f"not JSON: {error.msg} at column {error.colno}")
                continue
            except RecursionError:
                yield Bad(where, "not usable JSON: nested too deeply")
                continue
            if isinstance(value, dict):
                yield Row(where, value, (at, number))
            else:
                yield Bad(where, f'{kind(value)} where an object is expected; each line holds one object, as in {{"text": "…"}}')


def _csv(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    # A line end may be inside a field: only who reads from the front knows where a row begins.
    for number, row in enumerate(islice(_csv_rows(file, name), begin[1], None), begin[1] + 1):
        yield Row(row.where, row.value, (0, number)) if isinstance(row, Row) else row


def _csv_rows(file: Path, name: str) -> Iterator[Row | Bad]:
    csv.field_size_limit(1 << 30)
    # A byte that is no UTF-8 becomes a surrogate here and is found again below: a strict decoder would end the reader with the row.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            where = f"{name}:{reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Bad(where, f"not CSV: {error}")
                continue
            if not cells:
                continue
            if (escaped := _escaped(cells)) is not None:
                yield Bad(where, f"not UTF-8: byte 0x{escaped:02x}")
            elif header is None:
                header = cells
                if len(set(header)) < len(header):
                    raise BadData(f"{where}: the header names a column twice: {', '.join(header)}")
            elif len(cells) != len(header):
                yield Bad(where, f"{len(cells)} fields where the header has {len(header)}")
            else:
                yield Row(where, dict(zip(header, cells, strict=True)))


def _parquet(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    import pyarrow as arrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                if number + (rows := table.metadata.row_group(group).num_rows) <= begin[1]:
                    number += rows
                    continue
                for batch in table.iter_batches(1024, row_groups=[group]):
                    for value in batch.to_pylist():
                        number += 1
                        if number > begin[1]:
                            yield Row(f"{name} row {number}", value, (0, number))
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        yield Bad(f"{name} row {number + 1}" if number else name, f"not Parquet: {str(error).splitlines()[0]}")


def _text(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    at, before = begin
    with file.open("rb") as lines:
        lines.seek(at)
        block: list[bytes] = []
        size, first, number = 0, before + 1, before
        for number, line in enumerate(lines, before + 1):
            if block and size + len(line) > BLOCK:
                at += size
                yield _text_row(f"{name}:{first}", b"".join(block), (at, number - 1))
                block, size, first = [], 0, number
            block.append(line)
            size += len(line)
        if block:
            yield _text_row(f"{name}:{first}", b"".join(block), (at + size, number))


def _text_row(where: str, data: bytes, after: Place) -> Row | Bad:
    try:
        return Row(where, {"text": data.decode("utf-8-sig")}, after)
    except UnicodeDecodeError as error:
        file, _, first = where.rpartition(":")
        return Bad(f"{file}:{int(first) + data.count(10, 0, error.start)}", _not_utf8(error))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x}"


def _escaped(cells: list[str]) -> int | None:
    return next((ord(letter) - 0xDC00 for cell in cells if not cell.isascii() for letter in cell if "\udc80" <= letter <= "\udcff"), None)


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
