"""Previews of output files: text, table rows, tensors, or a re-encoded image.

Runs no file content.

Files are untrusted, so only a limited part is read. Call `read_preview` in a process with time and
memory limits.
"""

from __future__ import annotations

import csv
import io
import json
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from ..reading import parse_json
from .media import (
    AUDIO,
    HEAD,
    HTML,
    PARQUET,
    PICTURES,
    SAFETENSORS,
    SVG,
    TABLES,
    is_text,
    type_of,
)
from .values import whole

if TYPE_CHECKING:
    from PIL.Image import Image

READ: Final = 1 << 20
"""Maximum number of bytes read from a file that is not an image."""
TEXT: Final = 64 << 10
"""Maximum number of characters of text shown."""
ROWS: Final = 50
COLUMNS: Final = 40
CELL: Final = 300
"""Maximum number of characters in a cell."""
SIDES: Final = 9
"""Number of dimensions of a tensor that are shown."""
TENSORS: Final = 500
LARGEST: Final = 32 << 20
"""Maximum size in bytes of an image to re-encode."""
PIXELS: Final = 40_000_000
"""Maximum number of pixels of an image, to limit memory."""
WIDEST: Final = 2048
"""Maximum length in pixels of a re-encoded image's longer side."""
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
_SAVE: Final = "save the file to open it with its own program"
_DAMAGED: Final = f"the image is damaged or of an unknown format; {_SAVE}"
_TOO_MANY: Final = f"the image has more than {PIXELS // 1_000_000} million pixels; {_SAVE}"
_NO_PYARROW: Final = "to preview Parquet files, install pyarrow in the server's environment"


class Preview(NamedTuple):
    """Preview of a file. `words` tells which part is missing, or why nothing is shown."""

    kind: str
    """picture, audio, text, table, tensors, or none."""
    type: str
    """Media type, detected from the content if possible."""
    words: str = ""
    text: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    facts: Mapping[str, str] = {}


class CannotDraw(Exception):
    """Error for a file that cannot be re-encoded as an image. The message tells why."""


def read_preview(file: BinaryIO, name: str, size: int) -> Preview:
    """Return a preview of the file `name`, `size` bytes long."""
    head = file.read(HEAD)
    file.seek(0)
    kind = type_of(name, head) if head else "text/plain"
    if kind in (HTML, SVG):
        word = "an HTML page" if kind == HTML else "an SVG drawing"
        return Preview("none", kind, f"{word} may contain scripts and is not shown; {_SAVE}")
    if kind in PICTURES:
        return _preview_image(file, kind, size)
    if kind in AUDIO:
        return _preview_audio(head, kind)
    if kind == SAFETENSORS:
        return _preview_tensors(file, size)
    if kind == PARQUET:
        return _preview_parquet(file, size)
    if head and not is_text(head):
        return Preview("none", kind, f"the file is binary; {_SAVE}")
    data = file.read(READ)
    cut = size > len(data)
    if kind in TABLES:
        return _preview_table(kind, data, cut)
    return _preview_text(kind, data, cut)


# -- pictures -------------------------------------------------------------------------------------


def draw(file: BinaryIO, size: int, width: int) -> bytes:
    """Re-encode an image as WebP, at most `width` pixels wide and high.

    For an animation, use the first frame. Raises CannotDraw.
    """
    picture = _open_image(file, size)
    try:
        if picture.mode not in ("RGB", "RGBA"):
            alpha = "A" in picture.getbands() or "transparency" in picture.info
            mode = "RGBA" if alpha else "RGB"
            picture = picture.convert(mode)
        picture.thumbnail((min(width, WIDEST), min(width, WIDEST)))
        found = io.BytesIO()
        picture.save(found, "WEBP", quality=82, method=2)
    except MemoryError:
        raise
    except Exception as error:
        raise CannotDraw(_DAMAGED) from error
    return found.getvalue()


def _open_image(file: BinaryIO, size: int) -> Image:
    """Open an image and read its header only. Raises CannotDraw."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise CannotDraw("to preview images, install Pillow in the server's environment") from None
    if size > LARGEST:
        raise CannotDraw(f"the image is larger than {LARGEST >> 20} MiB; {_SAVE}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own pixel limit, which is above PIXELS
            picture = Image.open(file, formats=_FORMATS)
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise CannotDraw(_TOO_MANY) from error
    except Exception as error:  # a decoder may raise anything for a damaged file
        raise CannotDraw(_DAMAGED) from error
    if picture.width * picture.height > PIXELS:
        raise CannotDraw(_TOO_MANY)
    return picture


def _preview_image(file: BinaryIO, kind: str, size: int) -> Preview:
    try:
        picture = _open_image(file, size)
    except CannotDraw as error:
        return Preview("none", kind, str(error))
    words = "the first frame of an animation" if getattr(picture, "is_animated", False) else ""
    return Preview(
        "picture", kind, words, facts={"size": f"{picture.width} × {picture.height} pixels"}
    )


# -- sound ----------------------------------------------------------------------------------------


def _preview_audio(head: bytes, kind: str) -> Preview:
    facts: dict[str, str] = {}
    is_wav = head[:4] == b"RIFF" and head[12:16] == b"fmt "
    if is_wav and len(head) >= 36:
        channels, rate = struct.unpack_from("<HI", head, 22)
        facts = {"channels": str(channels), "rate": f"{rate} Hz"}
    return Preview("audio", kind, facts=facts)


# -- weights --------------------------------------------------------------------------------------


def _preview_tensors(file: BinaryIO, size: int) -> Preview:
    """Return a preview of the tensors listed in a safetensors header.

    The header is an 8-byte length, followed by JSON.
    """
    start = file.read(8)
    if len(start) < 8:
        return _damaged_preview("shorter than 8 bytes")
    (length,) = struct.unpack("<Q", start)
    if length > size - 8:
        return _damaged_preview(f"the header length is {length} bytes, but the file has {size}")
    if length > READ:
        words = f"the header has {length} bytes, more than the {READ} that a preview reads"
        return Preview("none", SAFETENSORS, words)
    try:
        header = parse_json(file.read(length))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        return _damaged_preview("the header is not a JSON object")
    said = header.pop("__metadata__", {})
    facts = _format_entries(said) if isinstance(said, dict) else {}
    return _list_tensors(header, facts)


def _damaged_preview(why: str) -> Preview:
    return Preview("none", SAFETENSORS, f"the safetensors file is damaged: {why}")


def _list_tensors(header: Mapping[str, Any], said: Mapping[str, str]) -> Preview:
    rows: list[list[str]] = []
    numbers: Counter[str] = Counter()
    for name, each in header.items():
        shape = _shape_of(each)
        if shape is None:
            return _damaged_preview(f"the tensor {_shorten(whole(name), CELL)} has no shape")
        kind = _format_cell(each.get("dtype"))
        numbers[kind] += _count_elements(shape)
        if len(rows) < TENSORS:
            sides = " × ".join(map(str, shape[:SIDES]))
            rows.append([_format_cell(name), kind, sides or "scalar"])
    parts = ", ".join(f"{count:,} of {kind}" for kind, count in numbers.most_common(8))
    facts = {"tensors": f"{len(header):,}", "parameters": parts or "0", **said}
    words = f"the first {TENSORS} of {len(header):,} tensors" if len(header) > TENSORS else ""
    return Preview("tensors", SAFETENSORS, words, "", ("tensor", "type", "shape"), rows, facts)


def _shape_of(entry: object) -> list[int] | None:
    """Return the shape in the header entry of a tensor; None if it is damaged."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list):
        return None
    # Not `isinstance`: true and false are integers in Python.
    if all(type(side) is int for side in shape[:SIDES]):
        return shape
    return None


def _count_elements(shape: Sequence[int]) -> int:
    found = 1
    for side in shape[:SIDES]:
        found = min(found * max(side, 0), 10**18)
    return found


# -- rows -----------------------------------------------------------------------------------------


def _preview_parquet(file: BinaryIO, size: int) -> Preview:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        return Preview("none", PARQUET, _NO_PYARROW)
    try:
        found = parquet.ParquetFile(file)
        names = list(found.schema_arrow.names)
        total = found.metadata.num_rows
        facts = {"rows": f"{total:,}", "columns": f"{len(names):,}"}
        chosen = list(range(min(len(names), COLUMNS)))
        largest = 0
        if found.num_row_groups > 0:
            largest = found.metadata.row_group(0).total_byte_size
        if largest > LARGEST:
            fields = map(found.schema_arrow.field, chosen)
            types = [_format_row((each.name, each.type)) for each in fields]
            words = f"the first row group has {largest} bytes, too many for a preview"
            return Preview("table", PARQUET, words, "", ("column", "type"), types, facts)
        batch = next(
            found.iter_batches(ROWS, columns=[names[n] for n in chosen], use_threads=False), None
        )
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        return Preview(
            "none", PARQUET, f"the Parquet file is damaged: {_shorten(str(error), CELL)}"
        )
    lines = batch.to_pylist() if batch is not None else []
    columns = [_format_cell(names[n]) for n in chosen]
    rows = [_format_row(line.values()) for line in lines]
    return Preview("table", PARQUET, _describe_cut(len(rows), total), "", columns, rows, facts)


def _describe_cut(shown: int, total: int) -> str:
    return f"the first {shown:,} of {total:,} rows" if total > shown else ""


def _preview_table(kind: str, data: bytes, cut: bool) -> Preview:
    text = whole(data.decode("utf-8", "replace"))
    if cut:  # the last line may be incomplete
        text = text.rpartition("\n")[0] or text
    read: Callable[[str, str], tuple[list[str], list[list[str]], bool]]
    read = _parse_json_lines if kind == "application/jsonl" else _parse_csv
    try:
        columns, rows, is_more = read(text, kind)
    except (ValueError, csv.Error, RecursionError) as error:
        shown = _preview_text(kind, data, cut)
        return shown._replace(words=f"shown as text, because the rows cannot be parsed: {error}")
    words = f"the first {len(rows)} rows" if is_more or cut else ""
    return Preview("table", kind, words, "", columns, rows)


def _parse_csv(text: str, kind: str) -> tuple[list[str], list[list[str]], bool]:
    """Return the header and first rows of CSV text, and whether more rows follow."""
    mark = "\t" if kind.startswith("text/tab") else ","
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    found = [line for line, _ in zip(lines, range(ROWS + 2), strict=False)]
    columns, *rows = found or [[]]
    shown = [_format_row(row[:COLUMNS]) for row in rows[:ROWS]]
    return _format_row(columns[:COLUMNS]), shown, len(rows) > ROWS


def _parse_json_lines(text: str, _kind: str) -> tuple[list[str], list[list[str]], bool]:
    """Parse JSON Lines to columns, first rows, and whether more rows follow.

    The first rows have a column for each of their keys. Raises ValueError.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    records: list[dict[str, Any]] = []
    names: dict[str, None] = {}  # in order of appearance
    for line in lines[:ROWS]:
        value = parse_json(line)
        record = value if isinstance(value, dict) else {"value": value}
        records.append(record)
        names |= dict.fromkeys(record)
    columns = list(names)[:COLUMNS]
    rows = [_row_of(record, columns) for record in records]
    return _format_row(columns), rows, len(lines) > ROWS


def _row_of(record: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    cells = []
    for name in columns:
        # An empty cell is no value; null is shown as `null`.
        cell = _format_cell(record[name]) if name in record else ""
        cells.append(cell)
    return cells


# -- text -----------------------------------------------------------------------------------------


def _preview_text(kind: str, data: bytes, cut: bool) -> Preview:
    text = whole(data.decode("utf-8", "replace"))
    if kind == "application/json" and not cut:
        try:
            text = json.dumps(parse_json(text), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # show the text unchanged
    shown = text[:TEXT]
    words = ""
    if not data:
        words = "the file is empty"
    elif cut or len(text) > TEXT:
        words = f"the first {len(shown):,} characters"
    return Preview("text", kind, words, shown)


def _format_entries(said: Mapping[Any, Any]) -> dict[str, str]:
    return {_format_cell(name): _format_cell(value) for name, value in list(said.items())[:20]}


def _format_row(values: Iterable[object]) -> list[str]:
    return [_format_cell(value) for value in values]


def _format_cell(value: object) -> str:
    """Format a value as text for a cell of a table preview."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return _shorten(whole(value), CELL)
    try:
        text = json.dumps(value, ensure_ascii=False, default=_format_other)
    except (ValueError, RecursionError):
        return "…"
    return _shorten(whole(text), CELL)


def _format_other(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else _shorten(str(value), CELL)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
