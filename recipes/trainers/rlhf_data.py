"""Step `data` of rlhf and ppo: check prompts row by row, count their tokens, hold a part out.  Knows tokenizers, not models or rewards.

Written are `train.jsonl` and `held_out.jsonl`, one object a line: `prompt`, a string or a list of messages, and the row's other columns as they are;
and `manifest.json` with the counts.  What a completion is worth may depend on any of those columns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rows import Bad, BadData, Row, files, kind, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 20  # complaints that are printed
ENOUGH = 1000  # bad rows after which reading stops: the file is not what one thought
SPLITS = ("train", "held_out")

Prompt = str | list[dict[str, str]]


@dataclass(slots=True)
class Prompts:
    """What has been read so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    bad: int = 0
    complaints: list[str] = field(default_factory=list)
    longest: int = 0  # tokens

    def refuse(self, bad: Bad) -> None:
        self.bad += 1
        if len(self.complaints) < SHOWN:
            self.complaints.append(f"{bad.where}: {bad.why}")


def main() -> None:
    options = _options()
    try:
        print(prepare(options))
    except BadData as error:
        sys.exit(f"data: {error}")


def prepare(options: argparse.Namespace) -> str:
    """Write the prompts; the summary for people comes back.  Raises BadData."""
    columns = _columns(options.columns)
    tokenizer = load_tokenizer(options.base, options.chat_template)
    good, ignored = files(options.data)
    found = Prompts()
    form = _read(good, options, columns, tokenizer, found)
    _judge(found, options.max_bad_rows, [file.name for file in good])

    digests = [hashlib.sha256(json.dumps(row["prompt"]).encode()).digest() for row in found.rows]
    held_out = _held_out(set(digests), options.eval_fraction, options.seed)
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS}
    for row, digest in zip(found.rows, digests, strict=True):
        parts["held_out" if digest in held_out else "train"].append(row)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))
    facts = {
        "format_of_rows": form,
        "rows": len(found.rows),
        "rows_held_out": len(parts["held_out"]),
        "bad_rows": found.bad,
        "duplicate_rows": len(digests) - len(set(digests)),
        "longest_prompt": found.longest,
        "columns": sorted({name for row in found.rows for name in row}),
        "files": [file.name for file in good][:SHOWN],
        "ignored_files": [file.name for file in ignored][:SHOWN],
    }
    (options.out / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n")
    lines = [f"data: {len(found.rows)} prompts ({form}), {len(parts['held_out'])} held out, the longest of {found.longest} tokens, "
             f"{facts['duplicate_rows']} duplicates"]  # fmt: skip
    if found.bad:
        lines += [f"data: {found.bad} bad rows left out", *(f"  {complaint}" for complaint in found.complaints)]
    return "\n".join(lines)


def load(folder: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a split, as `prepare` wrote them."""
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def load_tokenizer(base: Path, chat_template: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, padding on the left as generation wants it.  Raises BadData where it cannot be used to sample."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base, local_files_only=True, padding_side="left", truncation_side="left")
    except (OSError, ValueError) as error:
        raise BadData(f"{base}: no usable tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise BadData(f"{base}: the tokenizer names no end-of-text token (eos_token in tokenizer_config.json): no completion would ever end")
    if chat_template:
        tokenizer.chat_template = chat_template.read_text()
    return tokenizer


def _read(good: list[Path], options: argparse.Namespace, columns: dict[str, str], tokenizer: PreTrainedTokenizerBase, found: Prompts) -> str:
    forms: Counter[str] = Counter()
    for file in good:
        name = file.name if file == options.data else str(file.relative_to(options.data))
        for row in read(file, name):
            usable = _prompt(row, columns, options) if isinstance(row, Row) else row
            if not isinstance(usable, Bad):
                usable = _measured(row.where, usable, tokenizer, options.max_prompt_length, found)
            if isinstance(usable, Bad):
                found.refuse(usable)
                if found.bad > max(options.max_bad_rows, ENOUGH):
                    return "unknown"
                continue
            forms["plain" if isinstance(usable["prompt"], str) else "conversations"] += 1
            if len(forms) > 1:
                # A batch is either text or conversations, to everything that trains on it.
                raise BadData(f"{row.where}: some prompts are plain text and others conversations; chat=true makes conversations of all")
            found.rows.append(usable)
    return next(iter(forms), "none")


def _prompt(row: Row, columns: dict[str, str], options: argparse.Namespace) -> dict[str, Any] | Bad:
    """The row under our names, with the prompt as it is put to the model."""
    back = {theirs: ours for ours, theirs in columns.items()}
    named = {back.get(name, name): value for name, value in row.value.items()}
    if missing := [name for name in ("prompt", *options.need) if named.get(name) is None]:
        theirs = columns.get(missing[0], missing[0])
        return Bad(row.where, f'no column "{theirs}"; it has: {", ".join(row.value) or "none"}; another name: columns={{"{missing[0]}": "NAME"}}')
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
        for number, message in enumerate(prompt, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                return Bad(row.where, f'message {number} of "prompt" is not {{"role": "…", "content": "…"}}')
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


def _measured(where: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, limit: int, found: Prompts) -> dict[str, Any] | Bad:
    length = len(prompt_ids(row["prompt"], tokenizer, where))
    if length > limit:
        # Cut on the left it would lose its instructions, on the right its question.
        return Bad(where, f"the prompt has {length} tokens, more than max_prompt_length {limit}")
    found.longest = max(found.longest, length)
    return row


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, where: str = "") -> list[int]:
    """The tokens of a prompt, as the model sees it before its first own token."""
    import jinja2

    if isinstance(prompt, str):
        plain: list[int] = tokenizer(text=prompt)["input_ids"]
        return plain
    if not tokenizer.chat_template:
        raise BadData("the base model has no chat template, which conversations need: give one with chat_template=FILE")
    try:
        told: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    except (jinja2.TemplateError, ValueError) as error:
        raise BadData(f"{where}: the chat template does not take this conversation: {error}") from error
    ids: list[int] = told["input_ids"]
    return ids


def _judge(found: Prompts, allowed: int, names: list[str]) -> None:
    if found.bad > allowed:
        more = found.bad - len(found.complaints)
        complaints = "\n  ".join(found.complaints + ([f"… and {more} more"] if more else []))
        hint = f"; max_bad_rows={found.bad} would leave them out" if found.rows else ""
        raise BadData(f"{found.bad} bad rows beside {len(found.rows)} good ones{hint}\n  {complaints}")
    if not found.rows:
        raise BadData(f"the data set is empty: no row in {', '.join(names[:3])}{' …' if len(names) > 3 else ''}")


def _held_out(digests: set[bytes], fraction: float, seed: int) -> set[bytes]:
    """The prompts kept from training, by the hash of their text: equal ones are never on both sides, and more data moves no prompt across."""
    if not fraction:
        return set()
    if len(digests) < 2:
        raise BadData("one prompt cannot be both learned and held out: more data, or eval_fraction=0")
    rank = {digest: hashlib.sha256(f"{seed}:".encode() + digest).digest() for digest in digests}
    limit = int(fraction * 2**64).to_bytes(8, "big")
    chosen = {digest for digest, place in rank.items() if place[:8] < limit} or {min(rank, key=rank.__getitem__)}
    if len(chosen) == len(rank):
        chosen.remove(max(rank, key=rank.__getitem__))
    return chosen


def _columns(text: str) -> dict[str, str]:
    value = json.loads(text)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise BadData(f'columns: {text} is not {{"prompt": "NAME"}}')
    return value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--columns", default="{}", help="JSON: what the columns are called here")
    parser.add_argument("--chat", type=lambda word: word == "true", default=False)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--need", action="append", default=[], help="a column that every row must have, as a reward reads it")
    parser.add_argument("--max-prompt-length", type=int, required=True, help="tokens")
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
