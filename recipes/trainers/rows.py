"""Read a data set, a file or a folder, row by row; say where each row stands and what is wrong with it.  Does not know what the rows are for."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
COMPRESSED = (".gz", ".zst")  # what may follow the name of a file of text
ONE_ROW = "one row, or several that are equal,"
LFS = b"version https://git-lfs.github.com/spec/"
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


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a data set, each list in the order of names."""

    train: list[Path]
    held_out: list[Path] = field(default_factory=list)  # named as the rows to judge by, such as test.jsonl
    left_out: list[tuple[str, str]] = field(default_factory=list)  # the name of each other file, and why it is none

    @property
    def names(self) -> list[str]:
        return [file.name for file in (*self.train, *self.held_out)]

    def notices(self) -> list[str]:
        """Return a line for people for each reason for which files are left out, with their names."""
        reasons = dict.fromkeys(why for _, why in self.left_out)
        return [f"left out, {why}: {', '.join(name for name, other in self.left_out if other == why)}" for why in reasons]


TRAINED_ON = {"train", "training"}
JUDGED_BY = {"test", "tests", "testing", "eval", "evals", "evaluation", "validation", "valid", "val", "dev", "holdout", "heldout", "unseen"}
"""Words in the names of files that say which split they are, as the Hugging Face Hub has them."""
PART = re.compile(r"(data|(data)?sets?|splits?)$")
"""What may follow such a word, as in testset and test_data."""
ABOUT = re.compile(r"(readme|licen[cs]e|copying|requirements)([-_. ].*)?", re.DOTALL | re.IGNORECASE)
ABOUT_IN_CAPITALS = re.compile(r"[A-Z0-9]*(AUTHORS|CHANGE(LOG|S)|CITATION|CONTRIBUTING|NOTICE|SUMS)")
"""Names of files about a data set.  A document may be called notice.txt; NOTICE.txt is none."""
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def files(path: Path) -> DataFiles:
    """Find the data files at `path`, a file or a folder.  Raises BadData where there is none to learn from."""
    if not path.exists():
        raise BadData(f"{path}: no such file or folder")
    if path.is_file():
        if format_of(path) is None:
            raise BadData(f"{path.name}: not a data file; its name must end in one of {' '.join(FORMATS)}, or in {' or '.join(COMPRESSED)} behind it")
        return DataFiles([path])
    found = DataFiles([])
    hidden: dict[str, None] = {}
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        inside = file.relative_to(path)
        depth = next((number for number, part in enumerate(inside.parts, 1) if part.startswith(".")), 0)
        if depth:
            hidden[str(Path(*inside.parts[:depth]))] = None
        elif why := _no_data(file):
            found.left_out.append((str(inside), why))
        else:
            (found.held_out if _is_to_judge_by(inside) else found.train).append(file)
    found.left_out.extend((name, "hidden") for name in hidden)
    if not found.train and found.held_out:
        told = ", ".join(found.names[:3])
        raise BadData(f"{path}: nothing to learn from: each data file is named as one to judge by ({told}); rename it, or give the file itself")
    if not found.train:
        others = f"; {'; '.join(found.notices())}" if found.left_out else ""
        raise BadData(f"{path}: no data file in this folder, none ends in {' '.join(FORMATS)}{others}"[:2000])
    return found


def files_to_judge_by(found: DataFiles, eval_fraction: float) -> list[str]:
    """Return lines for people about files that are held out.  Raises BadData where there are some and nothing is judged, with `eval_fraction` 0."""
    if not found.held_out:
        return []
    told = ", ".join(str(file.name) for file in found.held_out)
    if not eval_fraction:
        raise BadData(
            f"{told}: named as rows to judge by, and eval_fraction=0 judges nothing; say eval_fraction=0.05, or give the file to learn from itself"
        )
    return [f"held out, by its name: {told}; eval_fraction {eval_fraction:g} is ignored; rename a file to learn from it"]


def format_of(file: Path) -> str | None:
    """Return which of FORMATS a file has by its name, also if it is compressed; None if it has none of them."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in COMPRESSED:
        return suffixes[0] if suffixes[0] in FORMATS and suffixes[0] != ".parquet" else None
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def _no_data(file: Path) -> str:
    """Return why a file of a folder is no data; empty if it is."""
    form = format_of(file)
    if form is None:
        return "no data by the end of its name"
    name = file.name.removesuffix("".join(file.suffixes[-2:])) if file.suffix.lower() in COMPRESSED else file.stem
    if form in (".txt", ".json", ".csv", ".tsv") and (ABOUT.fullmatch(name) or ABOUT_IN_CAPITALS.fullmatch(name)):
        return "about the data, by its name"
    if file.name in ABOUT_DATA:
        return "about the data, by its name"
    return "one JSON object, not rows" if form == ".json" and _is_one_object(file) else ""


def _is_one_object(file: Path) -> bool:
    """Tell whether a .json file is neither a list nor one object a line."""
    try:
        with opened(file) as data:
            first, second = _line(data), _line(data)
    except (OSError, EOFError, ValueError, zlib.error):
        return False  # reading it will say what is wrong
    return first.startswith(b"{") and not (second and _is_whole(first))


def _line(data: BinaryIO) -> bytes:
    """Return the next line that is not blank, without a byte order mark; empty at the end."""
    return next((text for line in data if (text := line.removeprefix(b"\xef\xbb\xbf").strip())), b"")


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_to_judge_by(inside: Path) -> bool:
    """Tell whether the name of a file, or the folder that it is in, says that it is to judge by and not to learn from."""
    *folders, name = inside.parts
    words = _words_of(name)
    if words & TRAINED_ON:
        return False
    return bool(words & JUDGED_BY) or any(_is_split(folder) for folder in folders)


def _words_of(name: str) -> set[str]:
    """Return the words of a name: `holdout` of hold_out-2.jsonl, `test` of testset.jsonl."""
    joined = re.sub(r"h(o|e)ld[-_ ]?out", r"h\1ldout", name.lower())
    return {PART.sub("", word) or word for word in re.split(r"[^a-z]+", joined) if word}


def _is_split(folder: str) -> bool:
    """Tell whether a folder is called after a split, and after nothing else."""
    words = {word for word in _words_of(folder) if PART.fullmatch(word) is None}
    return bool(words) and words <= JUDGED_BY


def opened(file: Path) -> BinaryIO:
    """Open a file to read the bytes in it, which may lie there compressed."""
    if file.suffix.lower() == ".gz":
        return cast("BinaryIO", gzip.open(file))
    if file.suffix.lower() == ".zst":
        import pyarrow as arrow  # type: ignore[import-untyped]

        return io.BufferedReader(cast(Any, _Raw(arrow.input_stream(str(file), compression="zstd"))))
    return file.open("rb")


class _Raw(io.RawIOBase):
    """A stream of Arrow as Python's own readers want it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _skip(data: BinaryIO, count: int) -> None:
    """Go on in a stream by so many bytes, which not every one can do at once."""
    if data.seekable():
        data.seek(count)
        return
    while count and (read := len(data.read(min(count, 1 << 20)))):
        count -= read


def read(file: Path, name: str, begin: Place = (0, 0)) -> Iterator[Row | Bad]:
    """The rows of one file from `begin` on, under the name that messages give it."""
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".txt": _text}
    form = format_of(file)
    if form is None:
        raise BadData(f"{name}: not a data file")
    try:
        if file.suffix.lower() not in COMPRESSED:
            _refuse_pointer(file, name)
        yield from readers[form](file, name, begin)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _refuse_pointer(file: Path, name: str) -> None:
    """Raise BadData if a file is what a checkout without Git LFS has in place of the data."""
    with file.open("rb") as data:
        if data.read(len(LFS)) == LFS:
            raise BadData(f"{name}: a pointer of Git LFS, not the data: run git lfs pull in the checkout")


def _jsonl(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    at, before = begin
    with opened(file) as lines:
        _skip(lines, at)
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
            except (ValueError, RecursionError) as error:
                yield Bad(where, _not_json(error))
                continue
            if isinstance(value, dict):
                yield Row(where, value, (at, number))
            else:
                yield Bad(where, f'{kind(value)} where an object is expected; each line holds one object, as in {{"text": "…"}}')


def _json(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    """Read a list of objects, or one object a line, as some call .json."""
    with opened(file) as data:
        first = _line(data)
    if first.startswith(b"{") and _is_whole(first):
        yield from _jsonl(file, name, begin)
        return
    with opened(file) as data:
        content = data.read()
    if not content.strip():
        return
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Bad(name, _not_utf8(error))
        return
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        yield Bad(f"{name}{line}", _not_json(error))
        return
    if not isinstance(value, list):
        yield Bad(name, f"{kind(value)} where a list of objects is expected")
        return
    for number, each in enumerate(islice(value, begin[1], None), begin[1] + 1):
        where = f"{name} row {number}"
        yield Row(where, each, (0, number)) if isinstance(each, dict) else Bad(where, f"{kind(each)} where an object is expected")


def _not_json(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return "not usable JSON: nested too deeply" if isinstance(error, RecursionError) else f"not usable JSON: {str(error).partition(';')[0]}"


def _csv(file: Path, name: str, begin: Place) -> Iterator[Row | Bad]:
    # A line end may be inside a field: only who reads from the front knows where a row begins.
    for number, row in enumerate(islice(_csv_rows(file, name), begin[1], None), begin[1] + 1):
        yield Row(row.where, row.value, (0, number)) if isinstance(row, Row) else row


def _csv_rows(file: Path, name: str) -> Iterator[Row | Bad]:
    csv.field_size_limit(1 << 30)
    # A byte that is no UTF-8 becomes a surrogate here and is found again below: a strict decoder would end the reader with the row.
    with io.TextIOWrapper(opened(file), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if format_of(file) == ".tsv" else ",", strict=True)
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
    with opened(file) as lines:
        _skip(lines, at)
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


def unlike(message: object) -> str:
    """What is wrong with a message that is none, in words that follow its place."""
    shape = 'is not {"role": "…", "content": "…"}'
    if not isinstance(message, dict):
        return f"{shape} but {kind(message)}"
    name = next((name for name in ("role", "content") if not isinstance(message.get(name), str)), "content")
    if message.get(name) is None:
        return f'{shape}: it has no "{name}"'
    parts = "; write the text of its parts as one string" if name == "content" and isinstance(message[name], list) else ""
    return f'{shape}: its "{name}" is {kind(message[name])}, a string is expected{parts}'
