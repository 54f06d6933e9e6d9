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

from disk import sha256
from rows import Bad, BadData, Row, files, kind
from sft_data import BATCH
from sifting import SHOWN, Sieve, held_out, no_message, number, renamed
from vocabulary import Vocabulary

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
    good, ignored = files(options.data)
    columns, counts, sieve = renamed(options.columns, NAMES), Counts(), Sieve(options.max_bad_rows)
    pairs = sieve.sift(good, options.data, lambda row: _pair(row, columns, vocabulary))

    made: list[tuple[list[int], list[int], list[int]]] = []
    owners: list[int] = []
    seen: set[bytes] = set()
    highest = 0
    forms: set[str] = set()
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
            made.append((prompt, chosen[:room], rejected[:room]))
            # Rows of one prompt stay on one side: what is judged by was never seen, its question neither.
            owners.append(number(pair.prompt))
            row = hashlib.sha256(repr((prompt, chosen, rejected)).encode()).digest()
            counts.duplicate_rows += row in seen
            seen.add(row)

    sieve.judge(good)
    if vocabulary.size and highest >= vocabulary.size:
        raise BadData(f"the tokenizer made token {highest}, the base model knows {vocabulary.size}: they do not belong together")
    if not made:
        raise BadData(f"none of {sieve.rows} rows leaves two different answers within max_length {options.max_length}")
    kept = held_out(owners, options.eval_fraction, options.seed)
    splits: dict[str, list[tuple[list[int], list[int], list[int]]]] = {name: [] for name in SPLITS}
    for owner, row_of_tokens in zip(owners, made, strict=True):
        splits["held_out" if owner in kept else "train"].append(row_of_tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    digests = {name: _write(options.out / f"{name}.arrow", rows) for name, rows in splits.items()}
    manifest = {
        "format": 1,
        "rows": sieve.rows,
        "pairs": {name: len(rows) for name, rows in splits.items()},
        "prompts_held_out": len(kept),
        "forms": sorted(forms),
        "end_token": vocabulary.end_of(chat="conversations" in forms)._asdict(),
        "max_length": options.max_length,
        "longest": max(len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in made),
        "bad_rows": sieve.bad_rows,
        "truncated_rows": counts.truncated_rows,
        "rows_with_no_room": counts.rows_with_no_room,
        "rows_equal_once_cut": counts.rows_equal_once_cut,
        "duplicate_rows": counts.duplicate_rows,
        "files": [file.name for file in good][:SHOWN],
        "ignored_files": [file.name for file in ignored][:SHOWN],
        "arrays": digests,
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return _summary(manifest, counts, sieve)


def _pair(row: Row, columns: dict[str, str], vocabulary: Vocabulary) -> Pair | Bad:
    names = {name: columns.get(name, name) for name in NAMES}
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
            return _joined(row.where, values, vocabulary)
        return Bad(row.where, f'"{names["prompt"]}" {why}')
    if not (isinstance(values["chosen"], list) and isinstance(values["rejected"], list)):
        return Bad(row.where, f'no column "{names["prompt"]}"; it has: {has}; only whole conversations can do without')
    return _joined(row.where, {**values, "prompt": []}, vocabulary)


def _joined(where: str, values: dict[str, Any], vocabulary: Vocabulary) -> Pair | Bad:
    if not any(isinstance(value, list) for value in values.values()):
        pair = Pair(where, values["prompt"], values["prompt"] + values["chosen"], values["prompt"] + values["rejected"], templated=False)
    else:
        prompt, chosen, rejected = _turns(values)
        if not prompt:
            return Bad(where, "chosen and rejected share no first message that could be the prompt")
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if not answer or answer[-1]["role"] != "assistant":
                return Bad(where, f'"{name}" does not end with a message of the assistant')
        begun = vocabulary.render(prompt, where, answer=True)
        pair = Pair(where, begun, vocabulary.render(prompt + chosen, where), vocabulary.render(prompt + rejected, where), templated=True)
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
            return found
    return value


def _unusable(value: object) -> str:
    """What is wrong with an answer or a conversation, in words; empty: nothing."""
    if isinstance(value, str):
        return "" if value.strip() else "is empty"
    if not isinstance(value, list):
        return f"is {kind(value)}, a string or a list of messages is expected"
    if not value:
        return "is empty"
    if place := no_message(value):
        return f'has a message {place} that is not {{"role": "…", "content": "…"}}'
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
            if prompt and prompt[-1] == vocabulary.end.number:  # a tokenizer that ends every text
                prompt = prompt[:-1]
            chosen, rejected = (ids if ids[-1:] == [vocabulary.end.number] else [*ids, vocabulary.end.number] for ids in (chosen, rejected))
        size = min(_shared(prompt, chosen), _shared(prompt, rejected))
        yield prompt[:size], chosen[size:], rejected[size:]


def _once(ids: list[int], begin: int | None) -> list[int]:
    """One beginning-of-text, also where the text brings one and the tokenizer adds another."""
    while begin is not None and ids[:2] == [begin, begin]:
        ids = ids[1:]
    return ids


def _shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))


def _write(file: Path, rows: list[tuple[list[int], list[int], list[int]]]) -> str:
    """An Arrow stream, which `datasets` maps and does not load.  Its SHA-256 comes back."""
    import pyarrow as arrow  # type: ignore[import-untyped]

    schema = arrow.schema([(f"{name}_ids", arrow.list_(arrow.int32())) for name in NAMES])
    with file.open("wb") as sink, arrow.ipc.new_stream(sink, schema) as stream:
        for at in range(0, len(rows), BATCH):
            part = rows[at : at + BATCH]
            columns = [arrow.array([row[number] for row in part], arrow.list_(arrow.int32())) for number in range(len(NAMES))]
            stream.write_batch(arrow.record_batch(columns, schema=schema))
    return sha256(file)


def _summary(manifest: dict[str, Any], counts: Counts, sieve: Sieve) -> str:
    pairs = manifest["pairs"]
    lines = [
        f"data: {sieve.rows} rows ({' and '.join(manifest['forms'])}), {pairs['train']} pairs to learn from, "
        f"{pairs['held_out']} held out with their {manifest['prompts_held_out']} prompts",
        f"data: {counts.truncated_rows} rows truncated at {manifest['max_length']} tokens ({counts.truncated_rows / sieve.rows:.1%}), "
        f"the longest has {manifest['longest']}, {counts.duplicate_rows} duplicates",
    ]
    if counts.rows_with_no_room:
        lines.append(f"data: {counts.rows_with_no_room} rows left out: the prompt alone fills max_length")
    if counts.rows_equal_once_cut:
        lines.append(f"data: {counts.rows_equal_once_cut} rows left out: cut at max_length, both answers are the same")
    return "\n".join([*lines, *sieve.left_out()])


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
