"""Claims about what the data steps of every family say of hostile files, and about which rows are held out."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.library.siblings import siblings

BASE = Path(__file__).resolve().parents[2] / "fixtures" / "tiny-llama"
GOOD = {"text": "a row", "prompt": "Which is even?", "chosen": "Two.", "rejected": "Three."}
LINE = json.dumps(GOOD).encode() + b"\n"
HEADER = b"text,prompt,chosen,rejected\n"
FAMILIES = {
    "sft_data": ("--base", BASE, "--max-length", 64),
    "preference_data": ("--base", BASE, "--max-length", 64),
    "rlhf_data": ("--base", BASE, "--max-prompt-length", 64),
    "tool_data": ("--eval-fraction", 0),
}
HOSTILE = {
    "nothing": ("d.jsonl", b"", "the data set is empty: no row in d.jsonl"),
    "a header alone": ("d.csv", HEADER, "the data set is empty: no row in d.csv"),
    "a number": (
        "d.jsonl",
        LINE + b'{"text": 1, "prompt": 1, "chosen": 1, "rejected": "x"}\n',
        "d.jsonl:2: ",
    ),
    "no number": (
        "d.jsonl",
        LINE + b'{"text": NaN, "prompt": NaN, "chosen": NaN, "rejected": "x"}\n',
        "d.jsonl:2: ",
    ),
    "no column": ("d.jsonl", LINE + b'{"title": "x"}\n', 'd.jsonl:2: no column "'),
    "half a line": ("d.jsonl", LINE + LINE[:-9], "d.jsonl:2: not JSON: "),
    "zeros": ("d.jsonl", LINE + bytes(9) + b"\n", "d.jsonl:2: not JSON: "),
    "no UTF-8": ("d.csv", HEADER + b"a,a,b,c\n\xe9,\xe9,b,c\n", "d.csv:3: not UTF-8: byte 0xe9"),
    "UTF-16": ("d.jsonl", LINE.decode().encode("utf-16"), "d.jsonl:1: not UTF-8: byte 0xff"),
    "a column twice": (
        "d.csv",
        b"text,text,prompt,chosen,rejected\na,a,a,b,c\n",
        "d.csv:1: the header names a column twice",
    ),
    "semicolons": ("d.csv", HEADER.replace(b",", b";") + b"a;a;b;c\n", "d.csv:2: no column "),
    "no Parquet": ("d.parquet", LINE * 9, "d.parquet: not Parquet: "),
}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with siblings():
        yield


def prepared(family: str, data: Path, out: Path, *more: object) -> None:
    """Run a family's data step in this process."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        sys, "argv", [family, *map(str, ("--data", data, "--out", out, *FAMILIES[family], *more))]
    )
    module = importlib.import_module(family)
    # In this process torch is for the tests that follow, too.
    patch.setattr(module, "without_torch", lambda: None, raising=False)
    try:
        module.main()
    finally:
        patch.undo()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_named_with_the_place_and_leaves_nothing(
    case: str, family: str, tmp_path: Path
) -> None:
    name, content, complaint = HOSTILE[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=r"^data: ") as ended:
        prepared(family, tmp_path / name, tmp_path / "out")
    assert complaint in str(ended.value)
    assert not list(tmp_path.glob("out/*.json*"))


@pytest.mark.parametrize("family", ["preference_data", "rlhf_data", "tool_data"])
def test_what_a_reader_cannot_take_names_the_file(family: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINE + b'{"text": ' + b"1" * 5000 + b"}\n")
    with pytest.raises(
        SystemExit,
        match=r"^data: 1 bad rows beside 1 good ones.*\n  d\.jsonl:2: not usable JSON: Exceeds the limit",
    ):
        prepared(family, tmp_path / "d.jsonl", tmp_path / "out")


def test_a_prompt_of_a_megabyte_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.jsonl").write_bytes(
        LINE + json.dumps({**GOOD, "prompt": "word " * 200_000}).encode() + b"\n"
    )
    with pytest.raises(
        SystemExit,
        match=r"d\.jsonl:2: the prompt has 400000 tokens, more than max_prompt_length 64$",
    ):
        prepared("rlhf_data", tmp_path / "d.jsonl", tmp_path / "rlhf")
    assert capsys.readouterr().err == ""
    prepared("preference_data", tmp_path / "d.jsonl", tmp_path / "pairs")
    assert "1 rows left out: the prompt alone fills max_length" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["rlhf_data", "tool_data"])
def test_a_text_with_other_line_ends_in_it_stays_one_row(family: str, tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0bfour\r\nfive"
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": text, "prompt": text}) + "\n")
    prepared(family, tmp_path / "d.jsonl", tmp_path / "out")
    if family == "rlhf_data":
        assert [
            row["prompt"]
            for row in importlib.import_module("rlhf_data").load(tmp_path / "out", "train")
        ] == [text]
        return
    with (tmp_path / "out" / "train.jsonl").open(encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == [{"text": text}]


def test_all_bad_rows_are_counted_some_are_reported_and_reading_stops_when_it_is_hopeless(
    tmp_path: Path,
) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINE + b"no\n" * 50)
    with pytest.raises(SystemExit) as ended:
        prepared("preference_data", tmp_path / "d.jsonl", tmp_path / "out")
    lines = str(ended.value).splitlines()
    assert (
        lines[0] == "data: 50 bad rows beside 1 good ones; max_bad_rows=50 would leave them out"
        and len(lines) == 22
    )
    assert lines[-1] == "  … and 30 more"
    (tmp_path / "d.jsonl").write_bytes(b"no\n" * 5000)
    with pytest.raises(SystemExit, match="1001 bad rows beside 0 good ones"):
        prepared("preference_data", tmp_path / "d.jsonl", tmp_path / "out")


@pytest.mark.parametrize(("columns", "complaint"), [
    ("{", "columns: { is not JSON"), ('["a"]', r'columns: \["a"\] is not {"prompt": "YOUR NAME"}'), ('{"promt": "a"}', "columns: promt is none of prompt, chosen"),
])  # fmt: skip
def test_names_of_columns_that_cannot_be_are_refused(
    columns: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINE)
    with pytest.raises(SystemExit, match=complaint):
        prepared("preference_data", tmp_path / "d.jsonl", tmp_path / "out", "--columns", columns)


def test_who_is_held_out_stays_so_when_there_is_more() -> None:
    sifting: Any = importlib.import_module("sifting")
    some, more = ({sifting.number(str(number)) for number in range(count)} for count in (200, 1000))
    kept = sifting.held_out(some, 0.2, 0)
    assert (
        20 < len(kept) < 60
        and kept == sifting.held_out(more, 0.2, 0) & some
        and kept != sifting.held_out(some, 0.2, 1)
    )
    assert (
        len(sifting.held_out({1, 2}, 0.001, 0)) == len(sifting.held_out({1, 2}, 0.999, 0)) == 1
        and sifting.held_out({1}, 0, 0) == set()
    )
    with pytest.raises(Exception, match="one row, or several that are equal, cannot be both"):
        sifting.held_out({1}, 0.5, 0)
