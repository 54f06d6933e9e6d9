"""Conversations of rows: as chat templates take them, with calls of tools and thoughts, or as alpaca and ShareGPT have them.

Knows no template and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rows import Bad, Row, kind, unlike

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

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What chat templates call what an answer was thought about."""

MARKS = ("weight", "train", "training", "loss")
"""What data sets call it that a turn is learned: OpenAI and Mistral, axolotl, ms-swift.  1 or true: it is; 0 or false: it is only read."""

UNREAD_MARKS = ("mask", "masked", "loss_mask", "train_detail", "training_detail", "trainable", "is_train", "do_train", "learn", "ignore")
"""What others call a mark that is not read here, as its yes is the no of another, or as it marks a part of a turn."""

Message = dict[str, Any]
LEARNED = "learned"  # of a message as it comes from here: whether its own marks have it learned; not there where it has none


class Strange(Exception):
    """A row is not of the layout."""


def conversation(value: object, name: str) -> list[Message]:
    """The messages of a column called `name`, as TRL and the chat templates of transformers have them.  Raises Strange."""
    value = _read(value, name)
    if not isinstance(value, list) or not value:
        raise Strange(f'"{name}" is {kind(value) if value else "empty"}, a list of messages is expected')
    return [_message(each, f'message {number} of "{name}"') for number, each in enumerate(value, 1)]


def functions(value: object, name: str) -> list[dict[str, Any]]:
    """The tools that a conversation may call, each a JSON schema; none where the row has no such column.  Raises Strange."""
    value = _read(value, name) if value else []
    if not isinstance(value, list) or not all(isinstance(each, dict) and _called(each) for each in value):
        raise Strange(f'"{name}" is no list of functions, each {{"type": "function", "function": {{"name": "…", "parameters": …}}}}')
    return [without_nulls(each) for each in value]


def without_nulls(value: Any) -> Any:
    """A value without what is null in its objects, at any depth: tables have each key in every row, as null where it is not there."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def plain(message: Message) -> Message:
    """The message without our own mark on it, for templates."""
    return {key: value for key, value in message.items() if key != LEARNED}


def _marked(message: Message, where: str) -> Message:
    """The message with its marks as our own one.  Raises Strange where a mark is neither yes nor no."""
    learned: dict[str, bool] = {}
    for name in MARKS:
        value = message.pop(name, None)
        if value is None or value != value:  # a table says NaN where there is no number
            continue
        if value not in (0, 1):
            raise Strange(f'"{name}" of {where} is {json.dumps(value)[:40]}: a turn is learned (1, true) or only read (0, false)')
        learned[name] = bool(value)
    if unread := next((name for name in UNREAD_MARKS if message.get(name) is not None), None):
        raise Strange(f'"{unread}" of {where} is not read: mark a turn that is not to be learned with "weight": 0, and take "{unread}" out')
    return {**message, LEARNED: all(learned.values())} if learned else message


def names(message: Message) -> list[str]:
    """The functions that a message calls."""
    return [_called(call) for call in message.get("tool_calls", [])]


def thought(message: Message) -> str:
    """What a message was thought about, or nothing."""
    return next((str(message[name]).strip() for name in THOUGHTS if name in message), "")


def _message(found: object, where: str) -> Message:
    if isinstance(found, dict) and {"from", "value"} <= set(found):
        raise Strange(f'{where} has "from" and "value": format=sharegpt reads such')
    # Parquet has each key in every message, as null where it is not there.
    made = _marked(without_nulls(found), where) if isinstance(found, dict) else {}
    calls = made.pop("tool_calls", None) or []
    if calls or any(name in made for name in THOUGHTS):
        made.setdefault("content", "")
    if not isinstance(made.get("role"), str) or not isinstance(made.get("content"), str):
        raise Strange(f"{where} {unlike(made or found)}")
    if wrong := [name for name in THOUGHTS if not isinstance(made.get(name, ""), str)]:
        raise Strange(f'"{wrong[0]}" of {where} is {kind(made[wrong[0]])}, a string is expected')
    if not isinstance(calls, list) or not all(isinstance(call, dict) and _called(call) for call in calls):
        raise Strange(f'"tool_calls" of {where} is no list of {{"type": "function", "function": {{"name": "…", "arguments": {{…}}}}}}')
    return made | ({"tool_calls": [_call(call, where) for call in calls]} if calls else {})


def _called(call: Mapping[str, Any]) -> str:
    """The name of a function that is called, or declared."""
    inside = call.get("function", call)
    name = inside.get("name") if isinstance(inside, dict) else None
    return name if isinstance(name, str) else ""


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call as templates take it: its arguments are an object, where OpenAI has the same as text."""
    inside = dict(call.get("function", call))
    arguments = _read(inside.get("arguments") or {}, f"arguments of {inside['name']}")
    if not isinstance(arguments, dict):
        raise Strange(f'"arguments" of a call in {where} is {kind(arguments)}, an object is expected')
    beside = {key: value for key, value in call.items() if key == "id" and value is not None}
    return {**beside, "type": "function", "function": {**inside, "arguments": arguments}}


def _read(value: object, name: str) -> object:
    """A column that may be JSON in a string, as CSV has it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise Strange(f'"{name}" is a string that is not JSON') from None


def layout_of(row: Row, columns: Mapping[str, str]) -> str | None:
    """The layout that a row has by its columns."""
    return next((name for name, wanted in LAYOUTS.items() if has_columns(row, wanted, columns)), None)


def has_columns(row: Row, wanted: Iterable[str], columns: Mapping[str, str]) -> bool:
    """Whether a row has each of these columns."""
    return all(columns.get(column, column) in row.value for column in wanted)


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
    history = _read(value["history"], columns.get("history", "history")) if value["history"] else []
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
    turns = _read(row.get(name), name)
    if not isinstance(turns, list) or not turns:
        raise Strange(f'"{name}" is {kind(turns) if turns else "empty"}, a list of turns is expected')
    if isinstance(value["system"], str) and value["system"].strip():
        yield {"role": "system", "content": value["system"]}
    for number, turn in enumerate(turns, 1):
        speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        said = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or not isinstance(said, str):
            raise Strange(f'turn {number} of "{name}" is not {{"from": "…", "value": "…"}}')
        assert isinstance(turn, dict)
        mark = {name: turn[name] for name in MARKS if name in turn}
        if speaker not in SPEAKERS:
            raise Strange(f'turn {number} of "{name}" is by "{speaker}"; read are {", ".join(SPEAKERS)}; calls of tools are read from messages alone')
        yield _marked({"role": SPEAKERS[speaker], "content": said} | mark, f'turn {number} of "{name}"')
