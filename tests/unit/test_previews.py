"""Previews read little of a file and run nothing in it: every hostile file ends in a sentence."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import pytest

from runner.api import previews
from runner.api.media import step_of, type_of
from runner.api.previews import CannotDraw, Preview, draw, read_preview


def seen(data: bytes, name: str) -> Preview:
    return read_preview(io.BytesIO(data), name, len(data))


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + crc


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    """A grey picture; without `rows` one whose header alone is there."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = b"" if rows is None else zlib.compress(rows)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


GOOD = png(300, 200, b"".join(b"\0" + bytes(range(200)) + bytes(100) for _ in range(200)))


def safetensors(header: object, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def test_a_picture_is_drawn_anew_within_its_width() -> None:
    assert seen(GOOD, "a.png").facts == {"size": "300 × 200 pixels"}
    from PIL import Image

    with Image.open(io.BytesIO(draw(io.BytesIO(GOOD), len(GOOD), 100))) as drawn:
        assert (drawn.format, drawn.size) == ("WEBP", (100, 67))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png(60_000, 60_000, b"\0" * 1000), "more than 40 million"),
        (GOOD[:100], "damaged"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 100, "damaged"),
        (png(0, 0), "damaged"),
    ],
    ids=["a-bomb", "cut", "no-chunks", "no-pixels"],
)
def test_a_picture_that_cannot_be_drawn_is_a_sentence(data: bytes, words: str) -> None:
    with pytest.raises(CannotDraw, match=words):
        draw(io.BytesIO(data), len(data), 256)
    assert seen(data, "a.png").kind in ("none", "picture")


def test_a_large_picture_is_not_read() -> None:
    with pytest.raises(CannotDraw, match="larger than 32 MiB"):
        draw(io.BytesIO(GOOD), previews.LARGEST + 1, 256)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.svg", b"<svg><script>alert(1)</script></svg>"),
        ("a.png", b'<?xml version="1.0"?>\n<!-- x -->\n<svg xmlns="x" onload="alert(1)"/>'),
        ("a.html", b"<!doctype html><script>alert(1)</script>"),
        ("a.txt", b"\xef\xbb\xbf \n<HTML><body>"),
    ],
)
def test_markup_is_not_shown_whatever_its_name(name: str, data: bytes) -> None:
    found = seen(data, name)
    assert found.kind == "none" and "is not shown" in found.words and not found.text
    with pytest.raises(CannotDraw):
        draw(io.BytesIO(data), len(data), 256)


def test_tensors_are_listed_from_the_header() -> None:
    header = {
        "__metadata__": {"format": "pt", "rank": 8},
        "a.weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [48, 50]},
    }
    found = seen(safetensors(header), "model.safetensors")
    assert found.rows == [["a.weight", "F32", "4 × 3"], ["b", "BF16", "scalar"]]
    assert found.facts["parameters"] == "12 of F32, 1 of BF16" and found.facts["rank"] == "8"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (safetensors({}, 10**18), "the header length is 1000000000000000000 bytes"),
        (b"\1\2", "shorter than 8 bytes"),
        (safetensors(b"[" * 100_000), "not a JSON object"),
        (safetensors([1]), "not a JSON object"),
        (safetensors({"a": {"shape": "wide"}}), "the tensor a has no shape"),
        (safetensors({"a": {"shape": [2**70, True]}}), "the tensor a has no shape"),
        (safetensors({"a": {"a": 1} and 7}), "the tensor a has no shape"),
        (safetensors(b'{"a": "' + b"x" * 2_000_000 + b'"}'), "more than the 1048576"),
    ],
)
def test_a_damaged_header_is_a_sentence(data: bytes, words: str) -> None:
    found = seen(data, "model.safetensors")
    assert found.kind == "none" and words in found.words and len(found.words) < 500


def test_a_tensor_without_bound_counts_up_to_a_bound() -> None:
    found = seen(safetensors({"a": {"dtype": "F8", "shape": [2**62] * 9}}), "m.safetensors")
    assert found.facts["parameters"] == "1,000,000,000,000,000,000 of F8"


def test_rows_of_csv_and_json_lines_are_a_table() -> None:
    found = seen(b'a,b\n1,"x, y"\n2\n', "a.csv")
    assert (found.columns, found.rows, found.words) == (["a", "b"], [["1", "x, y"], ["2"]], "")
    found = seen(b'{"a": 1, "b": [1, 2]}\n{"c": null}\n3\n', "a.jsonl")
    assert found.columns == ["a", "b", "c", "value"]
    assert found.rows == [["1", "[1, 2]", "", ""], ["", "", "null", ""], ["", "", "", "3"]]
    many = b"".join(b'{"n": %d}\n' % n for n in range(200_000))
    found = seen(many, "a.jsonl")
    assert len(found.rows) == previews.ROWS and found.words == "the first 50 rows"


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl", "deep.csv"])
def test_deep_json_is_shown_as_it_stands(name: str) -> None:
    found = seen(b"[" * 200_000, name)
    assert found.kind in ("text", "table") and len(found.text) <= previews.TEXT


def test_a_cell_a_text_and_a_name_have_bounds() -> None:
    found = seen(b"x" * 900_000 + b",b\n" + b"y" * 900_000, "a.csv")
    assert found.kind in ("text", "table") and sum(map(len, found.columns)) < 1000
    assert len(seen(b"z" * 3_000_000, "a.txt").text) == previews.TEXT
    assert seen(b'{"a":[1,2]}', "a.json").text == '{\n  "a": [\n    1,\n    2\n  ]\n}'


def test_a_gigabyte_is_read_no_further_than_a_preview_needs(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    with open(path, "wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 300_000)
        file.truncate(1 << 30)
    with open(path, "rb") as file:
        found = read_preview(file, "large.csv", 1 << 30)
        assert file.tell() <= previews.READ and len(found.rows) == 50


def test_bytes_that_are_no_text_are_a_sentence() -> None:
    assert "binary" in seen(b"\0\1\2" * 100, "weights.bin").words
    assert seen(b"", "empty").words == "the file is empty"


def test_rows_of_parquet_are_a_table_where_pyarrow_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    target = io.BytesIO()
    rows = {"a": list(range(80)), "<b>": [{"x": [1]}] * 80, "c": [b"\xff" * 9] * 80}
    parquet.write_table(pyarrow.table(rows), target)
    found = seen(target.getvalue(), "a.parquet")
    assert found.columns == ["a", "<b>", "c"] and found.rows[1] == ["1", '{"x": [1]}', "9 bytes"]
    assert found.words == "the first 50 of 80 rows" and found.facts == {
        "rows": "80",
        "columns": "3",
    }
    damaged = target.getvalue()[:-20] + b"\xff" * 12 + b"PAR1" * 2
    assert "damaged" in seen(damaged, "a.parquet").words
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "install pyarrow" in seen(target.getvalue(), "a.parquet").words


def test_a_type_is_known_by_the_first_bytes_before_the_name() -> None:
    assert type_of("a.png", GOOD[:64]) == "image/png" and type_of("a.png") == "image/png"
    assert type_of("a.png", b"text") == "application/octet-stream"
    assert type_of("plot", GOOD[:64]) == "image/png"
    assert type_of("a", b"words") == "text/plain"
    assert type_of("a.wav", b"RIFF\0\0\0\0WAVEfmt ") == "audio/wav"


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("samples/step-000250/cat.png", 250), ("step_60.png", 60), ("epoch=3.png", 3), ("checkpoint-500", 500),
        ("000060.png", None), ("lastep1.png", None), ("sample_00001_3.wav", 1), ("step-1/sample_2.txt", 2), ("", None),
    ],
)  # fmt: skip
def test_a_path_tells_the_step_of_a_training(path: str, step: int | None) -> None:
    assert step_of(path) == step
