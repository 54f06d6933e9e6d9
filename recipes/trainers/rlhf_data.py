"""Step `data` of rlhf and ppo: check prompts row by row, count their tokens, hold a part out.  Knows tokenizers, not models or rewards.

Written are `train.jsonl` and `held_out.jsonl`, one object a line: `prompt`, a string or a list of messages, and the row's other columns as they are;
and `manifest.json` with the counts.  What a completion is worth may depend on any of those columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rows import Bad, BadData, Row, kind, unlike
from sifting import SHOWN, Sieve, data_files, no_message, number, renamed, split
from vocabulary import Refused, Vocabulary, leave_open, tokenizer_of, without_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "held_out")

Prompt = str | list[dict[str, str]]


def main() -> None:
    options = _options()
    without_torch()
    try:
        print(prepare(options))
    except BadData as error:
        sys.exit(f"data: {error}")


def prepare(options: argparse.Namespace) -> str:
    """Write the prompts; the summary for people comes back.  Raises BadData."""
    columns = renamed(options.columns)
    vocabulary = Vocabulary(options.base, options.chat_template, options.eos_token)
    tokenizer = load_tokenizer(options.base, options.chat_template)
    found = data_files(options.data, options.eval_fraction)
    sieve, reading = Sieve(options.max_bad_rows), _Reading(options, columns, tokenizer)
    rows = list(sieve.sift(found.train, options.data, reading.usable))
    to_judge_by = list(sieve.sift(found.held_out, options.data, reading.usable))
    sieve.judge(found)

    owners = [number(json.dumps(row["prompt"])) for row in rows]
    kept = split(owners, [number(json.dumps(row["prompt"])) for row in to_judge_by], options.eval_fraction, options.seed, "prompt")
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": to_judge_by}
    for row, owner in zip(rows, owners, strict=True):
        if owner not in kept:
            parts["train"].append(row)
        elif not found.held_out:
            parts["held_out"].append(row)
    rows += to_judge_by
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part), encoding="utf-8")
    facts = {
        "format_of_rows": reading.form,
        "end_token": vocabulary.end_of(chat=reading.form == "conversations")._asdict(),
        "rows": len(rows),
        "rows_held_out": len(parts["held_out"]),
        "bad_rows": sieve.bad_rows,
        "duplicate_rows": len(owners) - len(set(owners)),
        "longest_prompt": reading.longest,
        "columns": sorted({name for row in rows for name in row}),
        "files": [file.name for file in found.train][:SHOWN],
        "held_out_files": [file.name for file in found.held_out][:SHOWN],
        "ignored_files": [name for name, _ in found.left_out],
    }
    (options.out / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n")
    return (
        f"data: {len(rows)} prompts ({reading.form}), {len(parts['held_out'])} held out, the longest of {reading.longest} tokens, "
        f"{facts['duplicate_rows']} duplicates"
    )


def load(folder: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a split, as `prepare` wrote them."""
    # Line by line as files have them: to a string, U+2028 and its like in a prompt end a line too.
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def end_token(folder: Path) -> dict[str, Any]:
    """The `text` and `number` of the token at which completions of these prompts end."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["end_token"]
    return found


def load_tokenizer(base: Path, chat_template: Path | None, end: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, padding on the left as generation wants it.  `end` is its end token, where that is not the folder's own.

    Raises BadData where it cannot be used to sample.
    """
    tokenizer = tokenizer_of(base, padding_side="left", truncation_side="left")
    leave_open(tokenizer, base)
    if end is not None:
        tokenizer.eos_token = end
    if tokenizer.eos_token_id is None:
        raise BadData(f"{base}: the tokenizer names no end-of-text token (eos_token in tokenizer_config.json): no completion would ever end")
    if chat_template:
        tokenizer.chat_template = chat_template.read_text()
    return tokenizer


class _Reading:
    """From rows to prompts."""

    def __init__(self, options: argparse.Namespace, columns: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._options, self._columns, self._tokenizer = options, columns, tokenizer
        self.form = "none"
        self.longest = 0  # tokens

    def usable(self, row: Row) -> dict[str, Any] | Bad:
        """The row with its prompt as it is put to the model."""
        found = _prompt(row, self._columns, self._options)
        if isinstance(found, Bad):
            return found
        try:
            length = len(prompt_ids(found["prompt"], self._tokenizer))
        except Refused as error:
            return Bad(row.where, str(error))
        if length > self._options.max_prompt_length:
            # Cut on the left it would lose its instructions, on the right its question.
            return Bad(row.where, f"the prompt has {length} tokens, more than max_prompt_length {self._options.max_prompt_length}")
        form = "plain" if isinstance(found["prompt"], str) else "conversations"
        if self.form not in ("none", form):
            # A batch is either text or conversations, to everything that trains on it.
            raise BadData(f"{row.where}: some prompts are plain text and others conversations; chat=true makes conversations of all")
        self.form, self.longest = form, max(self.longest, length)
        return found


def _prompt(row: Row, columns: dict[str, str], options: argparse.Namespace) -> dict[str, Any] | Bad:
    """The row under our names, with the prompt as it is put to the model."""
    back = {theirs: ours for ours, theirs in columns.items()}
    named = {back.get(name, name): value for name, value in row.value.items()}
    for name in ("prompt", *options.need):
        theirs, value = columns.get(name, name), named.get(name)
        if name not in named:
            return Bad(row.where, f'no column "{theirs}"; it has: {", ".join(row.value) or "none"}; another name: columns={{"{name}": "NAME"}}')
        if value is None or value != value:
            # As tables say that a cell is empty.
            return Bad(row.where, f'"{theirs}" is {"null" if value is None else "NaN"}')
    prompt = named["prompt"]
    if isinstance(prompt, str) and prompt.lstrip().startswith('[{"role"'):  # a conversation as CSV has it
        try:
            prompt = json.loads(prompt)
        except json.JSONDecodeError:
            return Bad(row.where, '"prompt" begins as a list of messages and is not JSON')
    if isinstance(prompt, str):
        if not prompt.strip():
            return Bad(row.where, '"prompt" is empty')
        if options.chat:
            prompt = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        if place := no_message(prompt):
            return Bad(row.where, f'message {place} of "prompt" {unlike(prompt[place - 1])}')
        if prompt[-1]["role"] == "assistant":
            return Bad(row.where, '"prompt" ends with a message of the assistant, which is what the model has to write')
        prompt = [{"role": message["role"], "content": message["content"]} for message in prompt]
    else:
        return Bad(row.where, f'"prompt" is {kind(prompt) if prompt != [] else "empty"}, a string or a list of messages is expected')
    try:
        json.dumps({**named, "prompt": prompt}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Bad(row.where, "the text holds half a surrogate pair, which no UTF-8 has")
    except TypeError as error:
        return Bad(row.where, f"a column cannot be written as JSON: {error}")
    return {**named, "prompt": prompt}


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a prompt, as the model sees it before its first own token.  Raises Refused."""

    if isinstance(prompt, str):
        plain: list[int] = tokenizer(text=prompt, verbose=False)["input_ids"]
        return plain
    if not tokenizer.chat_template:
        raise BadData("the base model has no chat template, which conversations need: give one with chat_template=FILE")
    try:
        told: Any = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, tokenizer_kwargs={"verbose": False}
        )
    except Exception as error:  # it is a program of somebody else: what it raises is its own
        raise Refused(f"the chat template does not take this conversation: {error}") from error
    ids: list[int] = told["input_ids"]
    return ids


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--columns", default="{}", help="JSON: what the columns are called here")
    parser.add_argument("--chat", type=lambda word: word == "true", default=False)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--eos-token", help="the token at which a completion ends, in place of the one that is found")
    parser.add_argument("--need", action="append", default=[], help="a column that every row must have, as a reward reads it")
    parser.add_argument("--max-prompt-length", type=int, required=True, help="tokens")
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
