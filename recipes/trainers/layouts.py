"""Rows in the layouts of other tools, alpaca and ShareGPT, as lists of messages.  Knows no template and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rows import Bad, Row, kind

# By layout the columns that a row must have; more are read where they are there.
LAYOUTS = {"alpaca": ("instruction", "output"), "sharegpt": ("conversations",)}
MORE = ("input", "system", "history")
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}

Message = dict[str, str]


class Strange(Exception):
    """A row is not of the layout."""


def layout_of(row: Row, columns: Mapping[str, str]) -> str | None:
    """The layout that a row has by its columns."""
    return next((name for name, wanted in LAYOUTS.items() if all(columns.get(column, column) in row.value for column in wanted)), None)


def messages(row: Row, layout: str, columns: Mapping[str, str]) -> list[Message] | Bad:
    """The conversation of a row; `columns` has what the layout's columns are called here."""
    value = {name: row.value.get(columns.get(name, name)) for wanted in (*LAYOUTS.values(), MORE) for name in wanted}
    try:
        return list(_alpaca(value, columns) if layout == "alpaca" else _sharegpt(value, row.value, columns))
    except Strange as strange:
        return Bad(row.where, str(strange))


def _alpaca(value: Mapping[str, object], columns: Mapping[str, str]) -> Iterator[Message]:
    """https://github.com/tatsu-lab/stanford_alpaca#data-release; `system` and `history`, pairs of question and answer, are LLaMA-Factory's."""

    def text(name: str) -> str:
        found = value[name]
        if not isinstance(found, str) or not found.strip():
            said = "is empty" if isinstance(found, str) else f"is {kind(found)}, a string is expected"
            raise Strange(f'"{columns.get(name, name)}" {said}')
        return found

    if value["system"]:
        yield {"role": "system", "content": text("system")}
    history = value["history"] or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in history
    ):
        raise Strange(f'"{columns.get("history", "history")}" is no list of pairs of question and answer')
    for question, answer in history:
        yield {"role": "user", "content": question}
        yield {"role": "assistant", "content": answer}
    asked = text("instruction")
    yield {"role": "user", "content": f"{asked}\n\n{text('input')}" if value["input"] else asked}
    yield {"role": "assistant", "content": text("output")}


def _sharegpt(value: Mapping[str, object], row: Mapping[str, object], columns: Mapping[str, str]) -> Iterator[Message]:
    name = columns.get("conversations", "conversations" if "conversations" in row else "messages")
    turns = row.get(name)
    if isinstance(turns, str):  # as CSV has it
        try:
            turns = json.loads(turns)
        except json.JSONDecodeError:
            raise Strange(f'"{name}" is a string that is not JSON') from None
    if not isinstance(turns, list) or not turns:
        raise Strange(f'"{name}" is {kind(turns) if turns else "empty"}, a list of turns is expected')
    if isinstance(value["system"], str) and value["system"].strip():
        yield {"role": "system", "content": value["system"]}
    for number, turn in enumerate(turns, 1):
        speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        said = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or not isinstance(said, str):
            raise Strange(f'turn {number} of "{name}" is not {{"from": "…", "value": "…"}}')
        if speaker not in SPEAKERS:
            raise Strange(f'turn {number} of "{name}" is by "{speaker}"; read are {", ".join(SPEAKERS)}: calls of tools are not taken')
        yield {"role": SPEAKERS[speaker], "content": said}
