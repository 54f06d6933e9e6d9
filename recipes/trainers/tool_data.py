"""Step `data` of recipes that wrap a tool: check rows one by one, write them under the names that the tool reads, hold a part out.  No tokenizer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from layouts import MARKS
from rows import Bad, BadData, Row, kind, unlike
from sft_data import COLUMNS
from sifting import Sieve, data_files, no_message, number, renamed, split


def main() -> None:
    options = _options()
    try:
        print(prepare(options))
    except BadData as error:
        sys.exit(f"data: {error}")


def prepare(options: argparse.Namespace) -> str:
    """Write `train.jsonl`, `held_out.jsonl` and `data.json`; the summary for people comes back."""
    found = data_files(options.data, options.eval_fraction)
    columns = renamed(options.columns, sorted({column for names in COLUMNS.values() for column in names}))
    sieve = Sieve(options.max_bad_rows)
    form = options.format

    def usable(row: Row) -> str | Bad:
        nonlocal form
        if form == "auto":
            form = _detect(row, columns, options.kinds)
        checked = _checked(row, form, columns)
        return checked if isinstance(checked, Bad) else json.dumps(checked, ensure_ascii=False)

    lines = list(sieve.sift(found.train, options.data, usable))
    learned = len(lines)
    lines += sieve.sift(found.held_out, options.data, usable)
    sieve.judge(found)
    owners = [number(line) for line in lines]
    chosen = split(owners[:learned], owners[learned:], options.eval_fraction, options.seed)
    if found.held_out:  # a row that is in both stands among those to judge by
        lines = [line for at, line in enumerate(lines) if at >= learned or owners[at] not in chosen]
        owners = [number(line) for line in lines]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, there in (("train", False), ("held_out", True)):
        with (options.out / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line, owner in zip(lines, owners, strict=True) if (owner in chosen) is there)
    kept = sum(owner in chosen for owner in owners)
    told = {"format": form, "rows": sieve.rows, "rows_held_out": kept, "bad_rows": sieve.bad_rows}
    (options.out / "data.json").write_text(json.dumps(told, indent=2) + "\n")
    return f"data: {sieve.rows} rows ({form}), {kept} held out"


def _detect(row: Row, columns: dict[str, str], kinds: list[str]) -> str:
    for name in kinds:
        if all(columns.get(column, column) in row.value for column in COLUMNS[name]):
            return name
    has = ", ".join(row.value) or "none"
    wanted = ", or ".join(" and ".join(COLUMNS[name]) for name in kinds)
    raise BadData(f"{row.where}: no column to learn from; it has: {has}; read are {wanted} (other names: columns={{prompt: NAME}})")


def _checked(row: Row, form: str, columns: dict[str, str]) -> dict[str, Any] | Bad:
    """The row under the tool's names, and nothing else of it."""
    made: dict[str, Any] = {}
    for column in COLUMNS[form]:
        name = columns.get(column, column)
        if name not in row.value:
            return Bad(row.where, f'no column "{name}"; it has: {", ".join(row.value) or "none"}')
        value = row.value[name]
        if column == "messages":
            value = _messages(row.where, name, value)
            if isinstance(value, Bad):
                return value
        elif not isinstance(value, str):
            return Bad(row.where, f'"{name}" is {kind(value)}, a string is expected')
        elif not value.strip() and column != "prompt":
            return Bad(row.where, f'"{name}" is empty')
        elif any("\ud800" <= letter <= "\udfff" for letter in value):
            return Bad(row.where, f'"{name}" holds half a surrogate pair, which no UTF-8 has')
        made[column] = value
    if form == "messages" and row.value.get("tools"):
        return Bad(row.where, '"tools" are not read by this recipe: leave the column out, or train with sft@1')
    return made


def _messages(where: str, name: str, value: object) -> list[dict[str, str]] | Bad:
    if isinstance(value, str):  # as CSV has it
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return Bad(where, f'"{name}" is a string that is not JSON')
    if not isinstance(value, list) or not value:
        return Bad(where, f'"{name}" is {kind(value) if value else "empty"}, a list of messages is expected')
    if place := no_message(value):
        return Bad(where, f'message {place} of "{name}" {unlike(value[place - 1])}')
    for place, message in enumerate(value, 1):
        if mark := next((mark for mark in MARKS if message.get(mark) not in (None, 1)), None):
            return Bad(where, f'"{mark}" of message {place} is not read by this recipe, which would learn it: leave the row out, or train with sft@1')
        if message.get("tool_calls"):
            return Bad(where, f'"tool_calls" of message {place} are not read by this recipe: train with sft@1')
    if not any(message["role"] == "assistant" for message in value):
        return Bad(where, f'"{name}" has no message of the assistant to learn from')
    if any("\ud800" <= letter <= "\udfff" for message in value for letter in message["role"] + message["content"]):
        return Bad(where, f'"{name}" holds half a surrogate pair, which no UTF-8 has')
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", choices=["auto", *COLUMNS], default="auto")
    parser.add_argument("--kinds", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), help="of rows, that the tool reads")
    parser.add_argument("--columns", default="{}")
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--eval-fraction", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
