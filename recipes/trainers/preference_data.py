"""Step `data` of dpo, orpo and reward: check pairs of answers row by row, turn them into tokens, hold a part out.  Knows tokenizers, not models.

Written are `train.arrow` and `held_out.arrow`, each row three lists of tokens: `prompt_ids`, `chosen_ids`, `rejected_ids`; and `manifest.json`, with
counts, settings and the SHA-256 of both.  An answer's tokens begin where those of prompt and answer together differ from those of the prompt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from layouts import Strange, functions, names, without_nulls
from notices import other_tokens, warn
from rows import Bad, BadData, Row, kind, unlike
from sft_data import BATCH
from sifting import SHOWN, Sieve, data_files, no_message, number, renamed, split
from splits import write
from vocabulary import Refused, Vocabulary, without_torch

NAMES = ("prompt", "chosen", "rejected")
SPLITS = ("train", "held_out")
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """One row as text: a prompt, and each answer with the prompt before it."""

    where: str
    prompt: str
    chosen: str
    rejected: str
    templated: bool  # a chat template wrote it, with all its special tokens


@dataclass(slots=True)
class Counts:
    """Of good rows."""

    truncated_rows: int = 0
    rows_with_no_room: int = 0
    rows_equal_once_cut: int = 0
    duplicate_rows: int = 0


def main() -> None:
    options = _options()
    without_torch()
    if options.workers:
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    try:
        print(prepare(options))
    except BadData as error:
        sys.exit(f"data: {error}")


def prepare(options: argparse.Namespace) -> str:
    """Write the pairs as tokens; the summary for people comes back.  Raises BadData."""
    vocabulary = Vocabulary(options.base, options.chat_template, options.eos_token)
    if vocabulary.positions and options.max_length > vocabulary.positions:
        raise BadData(f"max_length {options.max_length} is more than the {vocabulary.positions} positions of the base model")
    found = data_files(options.data, options.eval_fraction)
    columns, counts, sieve = renamed(options.columns, NAMES), Counts(), Sieve(options.max_bad_rows)

    made: dict[str, list[tuple[list[int], list[int], list[int]]]] = {"train": [], "held_out": []}
    owners: dict[str, list[int]] = {"train": [], "held_out": []}
    seen: set[bytes] = set()
    highest = 0
    forms: set[str] = set()

    def take(these: list[Path], name: str) -> None:
        nonlocal highest
        pairs = sieve.sift(these, options.data, lambda row: _pair(row, columns, vocabulary))
        while batch := list(islice(pairs, BATCH)):
            for pair, (prompt, chosen, rejected) in zip(batch, _encode(batch, vocabulary), strict=True):
                forms.add("conversations" if pair.templated else "plain text")
                highest = max(highest, *prompt, *chosen, *rejected)
                if len(prompt) >= options.max_length:
                    counts.rows_with_no_room += 1
                    continue
                room = options.max_length - len(prompt)
                counts.truncated_rows += max(len(chosen), len(rejected)) > room
                if chosen[:room] == rejected[:room]:
                    counts.rows_equal_once_cut += 1
                    continue
                made[name].append((prompt, chosen[:room], rejected[:room]))
                # Rows of one prompt stay on one side: what is judged by was never seen, its question neither.
                owners[name].append(number(pair.prompt))
                row = hashlib.sha256(repr((prompt, chosen, rejected)).encode()).digest()
                counts.duplicate_rows += row in seen
                seen.add(row)

    take(found.train, "train")
    take(found.held_out, "held_out")
    sieve.judge(found)
    if vocabulary.size and highest >= vocabulary.size:
        raise BadData(f"the tokenizer made token {highest}, the base model knows {vocabulary.size}: they do not belong together")
    if not made["train"]:
        raise BadData(f"none of {sieve.rows} rows leaves two different answers within max_length {options.max_length}")
    kept = split(owners["train"], owners["held_out"], options.eval_fraction, options.seed, "prompt")
    splits: dict[str, list[tuple[list[int], list[int], list[int]]]] = {"train": [], "held_out": made["held_out"]}
    for owner, row_of_tokens in zip(owners["train"], made["train"], strict=True):
        if owner not in kept:
            splits["train"].append(row_of_tokens)
        elif not found.held_out:
            splits["held_out"].append(row_of_tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    digests = {name: write(options.out / f"{name}.arrow", [f"{name}_ids" for name in NAMES], rows) for name, rows in splits.items()}
    manifest = {
        "format": 1,
        "rows": sieve.rows,
        "pairs": {name: len(rows) for name, rows in splits.items()},
        "prompts_held_out": len(kept),
        "forms": sorted(forms),
        "end_token": vocabulary.end_of(chat="conversations" in forms)._asdict(),
        "max_length": options.max_length,
        "longest": max(len(prompt) + max(len(chosen), len(rejected)) for rows in made.values() for prompt, chosen, rejected in rows),
        "bad_rows": sieve.bad_rows,
        "truncated_rows": counts.truncated_rows,
        "rows_with_no_room": counts.rows_with_no_room,
        "rows_equal_once_cut": counts.rows_equal_once_cut,
        "duplicate_rows": counts.duplicate_rows,
        "files": [file.name for file in found.train][:SHOWN],
        "held_out_files": [file.name for file in found.held_out][:SHOWN],
        "ignored_files": [name for name, _ in found.left_out],
        "arrays": digests,
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    for line in [*_doubts(manifest, counts, sieve), *other_tokens(vocabulary.saved_with)]:
        warn(line)
    return _summary(manifest, counts, sieve)


def _pair(row: Row, columns: dict[str, str], vocabulary: Vocabulary) -> Pair | Bad:
    try:
        return _read(row, columns, vocabulary)
    except (Strange, Refused) as error:
        return Bad(row.where, str(error))


def _read(row: Row, columns: dict[str, str], vocabulary: Vocabulary) -> Pair | Bad:
    names = {name: columns.get(name, name) for name in NAMES}
    tools = functions(row.value.get("tools"), "tools")
    has = ", ".join(row.value) or "none"
    for name in ("chosen", "rejected"):
        if names[name] not in row.value:
            return Bad(row.where, f'no column "{names[name]}"; it has: {has}')
    values = {name: _conversation(row.value.get(names[name])) for name in NAMES}
    if values["chosen"] == values["rejected"]:
        return Bad(row.where, f'"{names["chosen"]}" and "{names["rejected"]}" are equal: nothing is preferred')
    for name in ("chosen", "rejected"):
        if why := _unusable(values[name]):
            return Bad(row.where, f'"{names[name]}" {why}')
    if names["prompt"] in row.value:
        if isinstance(values["prompt"], str) or (why := _unusable(values["prompt"])) == "":
            return _joined(row.where, values, vocabulary, tools)
        return Bad(row.where, f'"{names["prompt"]}" {why}')
    if not (isinstance(values["chosen"], list) and isinstance(values["rejected"], list)):
        return Bad(row.where, f'no column "{names["prompt"]}"; it has: {has}; only whole conversations can do without')
    return _joined(row.where, {**values, "prompt": []}, vocabulary, tools)


def _joined(where: str, values: dict[str, Any], vocabulary: Vocabulary, tools: list[dict[str, Any]]) -> Pair | Bad:
    if not any(isinstance(value, list) for value in values.values()):
        pair = Pair(where, values["prompt"], values["prompt"] + values["chosen"], values["prompt"] + values["rejected"], templated=False)
    else:
        prompt, chosen, rejected = _turns(values)
        if not prompt:
            return Bad(where, "chosen and rejected share no first message that could be the prompt")
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if not answer or answer[-1]["role"] != "assistant":
                return Bad(where, f'"{name}" does not end with a message of the assistant')
        begun = vocabulary.render(prompt, answer=True, tools=tools)
        # A template leaves out what it does not know, without a word.
        if lost := [each for each in names({"tool_calls": tools}) if each not in begun]:
            return Bad(where, f"the chat template writes nothing of the tool {lost[0]}: give one that takes tools with chat_template=FILE")
        whole = [vocabulary.render(prompt + answer, tools=tools) for answer in (chosen, rejected)]
        pair = Pair(where, begun, *whole, templated=True)
    try:
        f"{pair.prompt}{pair.chosen}{pair.rejected}".encode()
    except UnicodeEncodeError:
        return Bad(where, "the text holds half a surrogate pair, which no UTF-8 has")
    return pair


def _turns(values: dict[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt, and the turns that follow it in each answer.  An answer may repeat the prompt's messages, as published sets do."""
    said, chosen, rejected = (
        value if isinstance(value, list) else [{"role": role, "content": value}]
        for value, role in ((values["prompt"], "user"), (values["chosen"], "assistant"), (values["rejected"], "assistant"))
    )
    if not said or (chosen[: len(said)] == said and rejected[: len(said)] == said):
        shared = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), min(len(chosen), len(rejected)))
        # A last answer of the assistant that both share would leave nothing to prefer.
        shared = min(shared, len(chosen) - 1, len(rejected) - 1)
        return chosen[:shared], chosen[shared:], rejected[shared:]
    return said, chosen, rejected


def _conversation(value: object) -> object:
    """Messages, where a string holds them as JSON, as CSV has it; the value itself else."""
    if isinstance(value, str) and value.lstrip()[:2].replace(" ", "") in ("[", "[{"):
        try:
            found = json.loads(value)
        except json.JSONDecodeError:
            return value
        if isinstance(found, list) and found and all(isinstance(message, dict) and "role" in message for message in found):
            value = found
    # Parquet has each key in every message, as null where it is not there.
    return without_nulls(value) if isinstance(value, list) else value


def _unusable(value: object) -> str:
    """What is wrong with an answer or a conversation, in words; empty: nothing."""
    if isinstance(value, str):
        return "" if value.strip() else "is empty"
    if not isinstance(value, list):
        return f"is {kind(value)}, a string or a list of messages is expected"
    if not value:
        return "is empty"
    if place := no_message(value):
        return f"has a message {place} that {unlike(value[place - 1])}"
    return "" if str(value[-1]["content"]).strip() else "ends with an empty message"


def _encode(batch: Sequence[Pair], vocabulary: Vocabulary) -> Iterator[tuple[list[int], list[int], list[int]]]:
    encoded: dict[bool, Iterator[Any]] = {}
    for templated in {pair.templated for pair in batch}:
        texts = [text for pair in batch if pair.templated == templated for text in (pair.prompt, pair.chosen, pair.rejected)]
        # A chat template writes its own special tokens; a second beginning-of-text would be read as content.
        encoded[templated] = iter(vocabulary.tokenizer.encode_batch(texts, add_special_tokens=not templated))
    begin = vocabulary.tokenizer.token_to_id(vocabulary.special.get("bos_token", "")) if vocabulary.special.get("bos_token") else None
    for pair in batch:
        prompt, chosen, rejected = (_once(list(next(encoded[pair.templated]).ids), begin) for _ in NAMES)
        if not pair.templated:
            prompt, chosen, rejected = vocabulary.unended(prompt), vocabulary.ended(chosen), vocabulary.ended(rejected)
        size = min(_shared(prompt, chosen), _shared(prompt, rejected))
        yield prompt[:size], chosen[size:], rejected[size:]


def _once(ids: list[int], begin: int | None) -> list[int]:
    """One beginning-of-text, also where the text brings one and the tokenizer adds another."""
    while begin is not None and ids[:2] == [begin, begin]:
        ids = ids[1:]
    return ids


def _shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))


def _summary(manifest: dict[str, Any], counts: Counts, sieve: Sieve) -> str:
    pairs = manifest["pairs"]
    lines = [
        f"data: {sieve.rows} rows ({' and '.join(manifest['forms'])}), {pairs['train']} pairs to learn from, "
        f"{pairs['held_out']} held out with their {manifest['prompts_held_out']} prompts",
        f"data: {counts.truncated_rows} rows truncated at {manifest['max_length']} tokens ({counts.truncated_rows / sieve.rows:.1%}), "
        f"the longest has {manifest['longest']}, {counts.duplicate_rows} duplicates",
    ]
    return "\n".join(lines)


def _doubts(manifest: dict[str, Any], counts: Counts, sieve: Sieve) -> Iterator[str]:
    """What people have to know who look at no log: rows that are learned in part, or not at all."""
    if counts.truncated_rows:
        share = counts.truncated_rows / sieve.rows
        yield f"{counts.truncated_rows} rows truncated at {manifest['max_length']} tokens ({share:.1%}): raise max_length to learn them whole"
    if counts.rows_with_no_room:
        yield f"{counts.rows_with_no_room} rows left out: the prompt alone fills max_length"
    if counts.rows_equal_once_cut:
        yield f"{counts.rows_equal_once_cut} rows left out: cut at max_length, both answers are the same"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", default="{}", help="JSON: what the columns are called here")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--eos-token", help="the token at which the trained model stops, in place of the one that is found")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
