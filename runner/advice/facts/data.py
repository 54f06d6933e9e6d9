"""Describe a dataset from its first rows and the headers of its images."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from . import GB, LARGE, contents

_DOCUMENTATION: Final = re.compile(
    r"(readme|licen[cs]e|copying|requirements)([-_. ].*)?", re.IGNORECASE
)
"""File names of documentation, which trainers skip in a dataset folder."""
ROWS: Final = 200
"""Maximum number of rows to sample."""
_IMAGE_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".jpe", ".jfif")
_OTHER_IMAGE_SUFFIXES: Final = (
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".jp2",
    ".j2k",
    ".heic",
    ".avif",
    ".jxl",
)
_ALL_IMAGE_SUFFIXES: Final = (*_IMAGE_SUFFIXES, *_OTHER_IMAGE_SUFFIXES)
_CAPTION_TABLES: Final = ("metadata.jsonl", "metadata.csv", "captions.csv", "captions.jsonl")
_ROW_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


_MAX_LABELS: Final = 50  # maximum number of distinct values in a label column
NO_ROWS: Final[dict[str, object]] = {
    "rows": 0,
    "columns": [],
    "conversational": False,
    "truncated": 0.0,
    "tool_rows": 0,
    "layout": None,
    "called": {},
    "values": {},
    "scores": [],
}
COLUMN_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "completion": ("answer", "response", "output", "solution", "target"),
    "chosen": ("better", "preferred", "accepted", "chosen_response", "response_chosen", "winner"),
    "rejected": ("worse", "dispreferred", "rejected_response", "response_rejected", "loser"),
    "messages": ("conversation", "conversations", "chat", "dialogue", "dialog"),
    "text": ("content", "document", "body", "sentence", "review"),
    "label": ("labels", "intent", "category", "class", "sentiment"),
    "anchor": ("query", "question", "sentence1", "sentence_1", "sentence_A", "premise", "text1"),
    "positive": (
        "document",
        "passage",
        "answer",
        "pos",
        "sentence2",
        "sentence_2",
        "sentence_B",
        "entailment",
        "text2",
    ),
    "negative": ("neg", "hard_negative", "negative_1", "contradiction", "sentence3"),
}
"""Alternative column names for each name that trainers expect, likeliest first."""


def facts(path: Path, limit: int | None, model: Path | None) -> dict[str, object]:
    """Return the facts of a local dataset from its first rows or its images.

    `limit` is the maximum sequence length in tokens of the tokenizer in `model`.
    """
    if not path.exists():
        return {}
    files = [path] if path.is_file() else _list_files(path)
    found: dict[str, object] = {"size": round(sum(each.stat().st_size for each in files) / GB, 3)}
    images = [each for each in files if each.suffix.lower() in _ALL_IMAGE_SUFFIXES]
    if images:
        return found | NO_ROWS | _gather_image_facts(images, files)
    found |= {"images": 0, "limit": limit, "tasks": _find_tasks(files)}
    try:
        rows = _sample_rows(path, files)
    except (OSError, ValueError):
        return found  # the recipe reports the invalid row when it reads the data
    found |= _gather_row_facts(rows)
    if all("text" in row and "label" not in row for row in rows):
        return found | {"truncated": 0.0}  # plain text is split into chunks without loss
    lengths = _count_tokens(rows, model) if limit else None
    if lengths is None or not limit:
        return found
    too_long = sum(length > limit for length in lengths)
    found["longest"] = max(lengths, default=0)
    found["longest_text"] = _measure_longest_text(rows, model)
    found["truncated"] = round(100 * too_long / max(1, len(lengths)), 1)
    return found


def _list_files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if _is_visible_file(each))


def _is_visible_file(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _sample_rows(path: Path, files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the first `ROWS` rows of a dataset. Raises OSError, ValueError."""
    rows: list[dict[str, Any]] = []
    for file in files:
        # A file that is the dataset itself may have any name.
        is_about = file != path and _DOCUMENTATION.fullmatch(file.stem) is not None
        has_rows = file.suffix.lower() in _ROW_SUFFIXES and not is_about
        if has_rows and len(rows) < ROWS:
            rows += _read_rows(file, ROWS - len(rows))
    return rows


def _gather_row_facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    columns = _list_columns(rows)
    return {
        "rows": len(rows),
        "sampled": len(rows),
        "columns": columns,
        "conversational": any(map(_is_conversation, rows)),
        "tool_rows": sum(map(_has_tools, rows)),
        "layout": _detect_layout(rows, columns),
        "called": _find_columns(columns),
        "values": _find_label_values(rows, columns),
        "scores": [name for name in columns if _has_scores(rows, name)],
    }


def _list_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return list(columns)


def _has_scores(rows: Iterable[Mapping[str, Any]], column: str) -> bool:
    return any(_is_score(row.get(column)) for row in rows)


def _is_conversation(row: Mapping[str, Any]) -> bool:
    names = ("messages", "conversations", "prompt", "chosen")
    return any(isinstance(row.get(name), list) for name in names)


def _find_tasks(files: Iterable[Path]) -> list[str]:
    """Return the task and group names in task files of lm-evaluation-harness."""
    found: list[str] = []
    for file in files:
        if file.suffix == ".yaml":
            data = contents(file, LARGE) or b""
            names = re.findall(rb"^(?:task|group): *([^\s\[#]+)", data, re.MULTILINE)
            found += [name.decode(errors="replace") for name in names]
    return found


def _find_columns(columns: Sequence[str]) -> dict[str, str | None]:
    """Map each column name that trainers expect to the dataset's column, or None.

    Columns with the expected name come first, then common alternatives.
    """
    found: dict[str, str | None] = {}
    for name, others in COLUMN_NAMES.items():
        found[name] = next((each for each in (name, *others) if each in columns), None)
    return found


def _find_label_values(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> dict[str, list[str]]:
    """Return the distinct values, as text, of low-cardinality columns such as labels."""
    found: dict[str, list[str]] = {}
    for name in columns:
        there = [row[name] for row in rows if row.get(name) is not None]
        if all(isinstance(value, str | int | float) for value in there):
            texts = sorted({str(value).strip() for value in there})
            if len(texts) <= _MAX_LABELS:
                found[name] = texts
    return found


def _is_score(value: object) -> bool:
    """Return True if a value is a fractional number, or text with a fractional number."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+\.\d+", value.strip()):
        value = float(value)
    return isinstance(value, float) and not value.is_integer()


def _detect_layout(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str | None:
    """Return the name of a dataset layout that needs conversion, or None.

    `alpaca`: an `input` column that some rows use. `sharegpt`: turns with `from` and `value`.
    """
    if {"instruction", "output"} <= set(columns):
        has_inputs = any(row.get("input") for row in rows)
        return "alpaca" if has_inputs else None
    turns: list[Mapping[str, Any]] = []
    for row in rows:
        turns += _list_turns(row, ("conversations", "messages"))
    if turns and all(turn.keys() >= _SHAREGPT_KEYS for turn in turns):
        return "sharegpt"
    return None


_SHAREGPT_KEYS: Final = {"from", "value"}
_TURN_COLUMNS: Final = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "rejected",
)


def _has_tools(row: Mapping[str, Any]) -> bool:
    """Return True if a row's conversation calls tools or has a message without text."""
    turns = [turn for turn in _list_turns(row, _TURN_COLUMNS) if "role" in turn]
    if not turns:
        return False
    if row.get("tools"):
        return True
    return any(map(_needs_tool_template, turns))


def _needs_tool_template(turn: Mapping[str, Any]) -> bool:
    """Return True if a message calls tools or has no plain text."""
    return bool(turn.get("tool_calls")) or not isinstance(turn.get("content"), str)


def _list_turns(row: Mapping[str, Any], names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for name in names:
        value = row.get(name)
        if isinstance(value, list):
            for turn in value:
                if isinstance(turn, Mapping):
                    yield turn


def _read_rows(file: Path, most: int) -> list[dict[str, Any]]:
    """Return the first rows of a file.

    Raises OSError, and ValueError if the rows cannot be read.
    """
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(file, most)
    if suffix == ".json":
        return _read_json(file, most)
    lines = _read_first_lines(file, most)
    if suffix == ".jsonl":
        return _select_mappings(map(json.loads, lines))
    if suffix == ".txt":
        return [{"text": line} for line in lines]
    delimiter = "\t" if suffix == ".tsv" else ","
    return [dict(row) for row in csv.DictReader(lines, delimiter=delimiter)]


def _select_mappings(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def _read_parquet(file: Path, most: int) -> list[dict[str, Any]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError("pyarrow is not installed") from None
    batch = next(parquet.ParquetFile(file).iter_batches(batch_size=most), None)
    return list(batch.to_pylist()) if batch is not None else []


def _read_json(file: Path, most: int) -> list[dict[str, Any]]:
    with file.open("rb") as opened:
        value = json.loads(opened.read(64 * LARGE).decode("utf-8-sig"))
    if not isinstance(value, list):
        return []
    return _select_mappings(value[:most])


def _read_first_lines(file: Path, most: int) -> list[str]:
    with file.open("rb") as opened:
        lines = [opened.readline(LARGE).decode("utf-8", "replace") for _ in range(most)]
    return [line.removeprefix("\ufeff") for line in lines if line.strip()]


def _count_tokens(rows: Sequence[Mapping[str, Any]], model: Path | None) -> list[int] | None:
    """Return the token count of each dataset row, or None without a local tokenizer."""
    tokenizer = _load_tokenizer(model)
    if tokenizer is None:
        return None

    def count(values: Iterable[object]) -> int:
        texts: list[str] = []
        for value in values:
            texts += _collect_texts(value)
        return len(tokenizer.encode(" ".join(texts)).ids)

    return [max(map(count, _list_sequences(row))) for row in rows]


def _list_sequences(row: Mapping[str, Any]) -> list[list[object]]:
    """Return the column values of each training sequence in a row.

    A preference pair has two sequences, the prompt with each of the answers.
    """
    learnt = _select_learnt_columns(row)
    prompt = [value for name, value in learnt.items() if name not in _ANSWER_COLUMNS]
    answers = [learnt[name] for name in _ANSWER_COLUMNS if name in learnt] or [""]
    return [[*prompt, answer] for answer in answers]


def _select_learnt_columns(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns with usual names of training data, or else all columns."""
    learnt = {name: value for name, value in row.items() if name in _LEARNT_COLUMNS}
    return learnt or row


def _measure_longest_text(rows: Sequence[Mapping[str, Any]], model: Path | None) -> int | None:
    """Return the token count of the longest text value; None if there is no tokenizer or text."""
    tokenizer = _load_tokenizer(model)
    if tokenizer is None:
        return None
    texts: set[str] = set()
    for row in rows:
        texts.update(value for value in row.values() if isinstance(value, str))
    if not texts:
        return None
    # Counting the tokens of every text takes too long; the longest texts have the most of them.
    longest = sorted(texts, key=len)[-ROWS:]
    return max(len(tokenizer.encode(text).ids) for text in longest)


def _load_tokenizer(model: Path | None) -> Any:
    """Return the tokenizer of a local model; None without a file or the `tokenizers` package."""
    if model is None or not (model / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # The file may enable both; transformers resets them with each call.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


_ANSWER_COLUMNS: Final = ("chosen", "rejected")
_LEARNT_COLUMNS: Final = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "instruction",
    "input",
    "output",
    "question",
    "answer",
    "response",
    "content",
)
"""Usual names of the columns that trainers learn from."""


def _collect_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in ("role", "from"):
                yield from _collect_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _collect_texts(item)


def _gather_image_facts(images: Sequence[Path], files: Sequence[Path]) -> dict[str, object]:
    stems = [each.with_suffix("") for each in images]
    texts = [each for each in files if each.suffix.lower() in (".txt", ".caption")]
    captioned = {each.with_suffix("") for each in texts}
    has_table = any(each.name in _CAPTION_TABLES for each in files)
    missing = 0 if has_table else sum(stem not in captioned for stem in stems)
    return {
        "images": len(images),
        "captions_missing": missing,
        "stems_twice": len(stems) - len(set(stems)),
        "odd_formats": sum(each.suffix.lower() in _OTHER_IMAGE_SUFFIXES for each in images),
        "alpha": sum(map(_is_transparent, images[:5000])),
    }


def _is_transparent(path: Path) -> bool:
    """Return whether a PNG header declares an alpha channel (colour types 4 and 6)."""
    if path.suffix.lower() != ".png":
        return False
    try:
        with path.open("rb") as file:
            head = file.read(26)
    except OSError:
        return False
    if not head.startswith(b"\x89PNG\r\n\x1a\n") or len(head) < 26:
        return False
    return head[25] in (4, 6)
