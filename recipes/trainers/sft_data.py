"""Step `data` of sft: check a data set row by row, turn it into tokens, hold a part out.  Knows tokenizers, not models."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import packing
import rows
from layouts import LAYOUTS, LEARNED, MARKS, MORE, Message, Strange, conversation, functions, has_columns, layout_of, messages, names, plain, thought
from notices import other_tokens, warn
from rows import ONE_ROW, Bad, BadData, DataFiles, Place, Row, files, files_to_judge_by, kind, read
from tokens import Writer, pack
from vocabulary import Refused, Vocabulary, without_torch

COLUMNS = {"text": ("text",), "prompt-completion": ("prompt", "completion"), "messages": ("messages",)}
TEMPLATE = "chat_template.jinja"  # beside the tokens of a data set that is read while training
TOOLS = "tools"  # a column that rows of messages may have
SHOWN = 20  # complaints that are printed
ENOUGH = 1000  # bad rows after which reading stops: the file is not what one thought
BATCH = 512  # rows tokenised at a time
HEAD = 20 * BATCH  # rows that a data set is judged by which is read while training
MOST = 1 << 24  # … or so many tokens, whichever come first


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as text, with the spans of it that are learned; no spans: all of it."""

    where: str
    digest: int
    text: str
    spans: tuple[tuple[int, int], ...] | None
    after: tuple[int, Place] = (0, (0, 0))  # where the next row begins: the number of a file, and where in it


@dataclass(slots=True)
class Counts:
    rows: int = 0
    bad_rows: int = 0
    duplicate_rows: int = 0
    truncated_rows: int = 0
    split_rows: int = 0
    rows_without_anything_to_learn: int = 0
    turns_not_learned: int = 0
    turns_marked_as_read_only: int = 0
    rows_also_held_out: int = 0
    complaints: list[str] = field(default_factory=list)


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
    """Write the token store; the summary for people comes back."""
    vocabulary = Vocabulary(options.base, options.chat_template, options.eos_token)
    if vocabulary.positions and options.max_length > vocabulary.positions:
        raise BadData(f"max_length {options.max_length} is more than the {vocabulary.positions} positions of the base model")
    with nullcontext() if options.packing == "false" else packing.asking(options.base) as asked:
        return _prepare(options, vocabulary, asked)


def _prepare(options: argparse.Namespace, vocabulary: Vocabulary, asked: Callable[[], packing.Finding] | None) -> str:
    found = files(options.data)
    lines = [*found.notices(), *files_to_judge_by(found, options.eval_fraction)]
    columns = _columns(options.columns)
    counts = Counts()
    reading = Reading(options.format, columns, vocabulary, counts)

    store = Writer(options.out, wide=vocabulary.tokenizer.get_vocab_size() > 1 << 16)
    owners: list[int] = []  # row digest of each document
    documents: dict[str, list[int]] = {"train": [], "held_out": []}
    seen: set[int] = set()
    highest = 0

    def learn(these: list[Path], into: list[int]) -> None:
        nonlocal highest
        begun = store.starts[-1], counts.rows
        samples = reading.samples(these, options.data, max(options.max_bad_rows, ENOUGH))
        while batch := list(islice(samples, BATCH)):
            for sample, (tokens, learned) in zip(batch, encode(batch, vocabulary, reading.format), strict=True):
                highest = max(highest, *tokens)
                for piece, marks in pieces(tokens, learned, options.max_length, reading.format, counts):
                    into.append(store.add(piece, marks))
                    owners.append(sample.digest)
                counts.duplicate_rows += sample.digest in seen
                seen.add(sample.digest)
            if options.streaming and (counts.rows - begun[1] >= HEAD or store.starts[-1] - begun[0] >= MOST):
                break

    learn(found.train, documents["train"])
    if found.held_out:
        rows_to_learn = set(owners)
        learn(found.held_out, documents["held_out"])
    _judge(counts, options.max_bad_rows, found.names)
    if vocabulary.size and highest >= vocabulary.size:
        raise BadData(f"the tokenizer made token {highest}, the base model knows {vocabulary.size}: they do not belong together")
    if not owners:
        raise BadData(f"none of {counts.rows} rows leaves anything to learn within max_length {options.max_length}")
    if found.held_out:
        below, held_out = b"", {owners[document] for document in documents["held_out"]}
        counts.rows_also_held_out = len(rows_to_learn & held_out)
        if not held_out or (rows_to_learn <= held_out and not options.streaming):
            raise BadData(f"{'nothing to judge by' if not held_out else 'nothing to learn that is not judged by'} in {', '.join(found.names[:3])}")
        splits = {"train": [document for document in documents["train"] if owners[document] not in held_out], "held_out": documents["held_out"]}
    else:
        below = _held_out_below(owners, options.eval_fraction, options.seed)
        held_out = {row for row in set(owners) if is_held_out(row, options.seed, below)}
        splits = {
            "train": [document for document, owner in enumerate(owners) if owner not in held_out],
            "held_out": [document for document, owner in enumerate(owners) if owner in held_out],
        }
    if options.streaming:
        splits["train"] = []
    packs, probed = _packs(asked(), demanded=options.packing == "true") if asked else (False, None)
    lengths = [end - begin for begin, end in zip(store.starts, store.starts[1:], strict=False)]
    sequences = {name: pack(lengths, members, options.max_length) if packs else [[n] for n in members] for name, members in splits.items()}
    end = vocabulary.end_of(chat=reading.format == "messages")
    manifest = store.close(sequences, {
        "columns": {name: columns.get(name, name) for name in (LAYOUTS[reading.layout] if reading.layout else COLUMNS[reading.format])},
        "format_of_rows": reading.format,
        "layout": reading.layout,
        "end_token": end._asdict(),
        "max_length": options.max_length,
        "packing": packs,
        "packing_probe": probed,
        "files": [file.name for file in found.train][:SHOWN],
        "held_out_files": [file.name for file in found.held_out][:SHOWN],
        "ignored_files": [name for name, _ in found.left_out],
        "rows": counts.rows,
        "rows_held_out": len(held_out),
        "rows_also_held_out": counts.rows_also_held_out,
        "bad_rows": counts.bad_rows,
        "duplicate_rows": counts.duplicate_rows,
        "truncated_rows": counts.truncated_rows,
        "split_rows": counts.split_rows,
        "rows_without_anything_to_learn": counts.rows_without_anything_to_learn,
        "turns_not_learned": counts.turns_not_learned,
        "turns_marked_as_read_only": counts.turns_marked_as_read_only,
        **({"stream": _for_stream(options, reading, columns, below, held_out if found.held_out else set())} if options.streaming else {}),
    })  # fmt: skip
    for line in [*lines, *_doubts(manifest, reading, counts), *other_tokens(list(_learned_otherwise(found, vocabulary, reading, counts)))]:
        warn(line)
    if reading.format == "messages" and vocabulary.turn_end != end:
        if vocabulary.turn_end:
            written = f"the chat template ends an answer with {vocabulary.turn_end.text}"
            return f"{_summary(manifest, counts)}\ndata: the trained model stops at {end.text}; {written}"
        warn(
            f"the trained model stops at {end.text}; the chat template ends an answer with no token of its own, so nothing teaches the model to stop"
        )
    return _summary(manifest, counts)


def _learned_otherwise(found: DataFiles, vocabulary: Vocabulary, reading: Reading, counts: Counts) -> Iterator[str]:
    """What in these inputs release 0.1.0 learned wrongly."""
    yield from vocabulary.saved_with
    if vocabulary.ends_texts and reading.format == "prompt-completion":
        yield "the end token that the base's tokenizer adds"
    if counts.turns_marked_as_read_only:
        yield "turns marked as not to be learned"
    if found.held_out or any("by its name" in why for _, why in found.left_out):
        yield "files that are left out or held out by their names"
    if reading.tools and reading.layout:
        yield f"tools in {reading.layout} rows"
    elif reading.tools and any(file.suffix.lower() == ".parquet" for file in found.train):
        yield "tools in Parquet rows"


def _packs(found: packing.Finding, *, demanded: bool) -> tuple[bool, dict[str, object]]:
    """Decide whether sequences hold several documents; and return what was found out about the base for that.

    Raises BadData where packing is demanded, and documents would see each other.
    """
    if found.leaks and demanded:
        raise BadData(
            f"packing=true: in this base documents that share a sequence see each other (logits differ by {found.difference:.1g} deviations): "
            "say packing=false"
        )
    if found.leaks:
        warn(
            "packing is off: in this base documents that share a sequence would see each other; each has a sequence of its own now, so a step learns "
            "fewer tokens: raise max_steps or global_batch"
        )
    elif found.difference is None:
        told = f"whether documents that share a sequence see each other is not known of this base ({found.why})"
        warn(f"{told}: packing=true was asked for; the training asks the model itself" if demanded else f"packing is off: {told}")
    return not found.leaks and (found.difference is not None or demanded), found.facts()


def _for_stream(options: argparse.Namespace, reading: Reading, columns: dict[str, str], below: bytes, held_out: set[int]) -> dict[str, object]:
    """What the training has to know to read the rows as they were read here."""
    if options.chat_template:
        shutil.copyfile(options.chat_template, options.out / TEMPLATE)
    return {
        "format": reading.layout or reading.format,
        "columns": columns,
        "eos_token": options.eos_token,
        "seed": options.seed,
        "held_out_below": below.hex(),
        "held_out_rows": sorted(held_out),
        "shuffle_rows": options.shuffle_rows,
        "text_block": rows.BLOCK,
    }


class Reading:
    """From rows to samples; decides the format at the first row.  Rows of another layout become messages."""

    def __init__(self, wanted: str, columns: dict[str, str], vocabulary: Vocabulary, counts: Counts) -> None:
        self.layout = wanted if wanted in LAYOUTS else None
        self.format = "messages" if self.layout else wanted
        self.tools = False  # whether a row has some
        self.others: list[str] = []  # formats that the first row has the columns of, too
        self.marks: set[str] = set()  # columns that mark rows, and are not read
        self._columns = columns
        self._vocabulary = vocabulary
        self._counts = counts

    def samples(self, good: list[Path], root: Path, enough: int, begin: tuple[int, Place] = (0, (0, 0))) -> Iterator[Sample]:
        """What the files at `root` have to learn from, from `begin` on.  It ends after `enough` bad rows."""
        for number, file in enumerate(good[begin[0] :], begin[0]):
            name = file.name if file == root else str(file.relative_to(root))
            for row in read(file, name, begin[1] if number == begin[0] else (0, 0)):
                found = self._sample(row) if isinstance(row, Row) else row
                if isinstance(found, Sample):
                    assert isinstance(row, Row)
                    self._counts.rows += 1
                    yield replace(found, after=(number, row.after))
                    continue
                self._counts.bad_rows += 1
                if len(self._counts.complaints) < SHOWN:
                    self._counts.complaints.append(f"{found.where}: {found.why}")
                if self._counts.bad_rows > enough:
                    return

    def _sample(self, row: Row) -> Sample | Bad:
        if self.format == "auto":
            self.format = self._detect(row)
            self.others = self._also(row)
        self.marks |= {name for name in MARKS if row.value.get(name) in (0, 1) and name not in self._columns.values()}
        if self.layout == "alpaca" and not self._vocabulary.chat_template:
            raise BadData(
                "alpaca rows become conversations, and the base model has no chat template: give one with chat_template=FILE, or learn them as plain "
                "text with format=prompt-completion columns={prompt: instruction, completion: output}"
            )
        if self.layout:
            tools = self._columns.get(TOOLS, TOOLS)
            try:
                told = messages(row, self.layout, self._columns)
                return told if isinstance(told, Bad) else self._conversation(row.where, "conversations", told, functions(row.value.get(tools), tools))
            except (Strange, Refused) as error:
                return Bad(row.where, str(error))
        called = [self._columns.get(column, column) for column in COLUMNS[self.format]]
        if missing := [name for name in called if name not in row.value]:
            return Bad(row.where, f'no column "{missing[0]}"; it has: {", ".join(row.value) or "none"}')
        values = [row.value[name] for name in called]
        if self.format == "messages":
            tools = self._columns.get(TOOLS, TOOLS)
            try:
                return self._conversation(row.where, called[0], conversation(values[0], called[0]), functions(row.value.get(tools), tools))
            except (Strange, Refused) as error:
                return Bad(row.where, str(error))
        texts: list[str] = []
        for name, value in zip(called, values, strict=True):
            if not isinstance(value, str):
                return Bad(row.where, f'"{name}" is {kind(value)}, a string is expected')
            if not value.strip() and name != "prompt":
                return Bad(row.where, f'"{name}" is empty')
            texts.append(value)
        text = "".join(texts)
        spans = ((len(texts[0]), len(text)),) if self.format == "prompt-completion" else None
        return _checked(row.where, text, spans)

    def _detect(self, row: Row) -> str:
        # A table has the columns of all its rows in each, as null where there is nothing: what is there counts first.
        for there in (Row(row.where, {name: value for name, value in row.value.items() if value is not None}), row):
            for name, wanted in COLUMNS.items():
                if has_columns(there, wanted, self._columns):
                    return name
            self.layout = layout_of(there, self._columns)
            if self.layout:
                return "messages"
        raise BadData(
            f"{row.where}: no column to learn from; it has: {', '.join(row.value) or 'none'}; sft reads text, or prompt and completion, or messages, "
            "or instruction and output (alpaca), or conversations (ShareGPT) (other names: columns={text: NAME})"
        )

    def _also(self, row: Row) -> list[str]:
        """The other formats that a row might be read as."""
        there = Row(row.where, {name: value for name, value in row.value.items() if value is not None})
        fit = [name for name, wanted in (COLUMNS | LAYOUTS).items() if has_columns(there, wanted, self._columns)]
        return [name for name in fit if name != (self.layout or self.format)]

    def _conversation(self, where: str, name: str, messages: list[Message], tools: list[dict[str, Any]]) -> Sample | Bad:
        self.tools |= bool(tools)
        if not any(message["role"] == "assistant" for message in messages):
            return Bad(where, f'"{name}" has no message of the assistant to learn from')
        turns, messages = messages, [plain(message) for message in messages]
        text = self._vocabulary.render(messages, tools=tools)
        # A template leaves out what it does not know, without a word.
        if lost := [each for each in (*names({"tool_calls": tools}), *(each for message in messages for each in names(message))) if each not in text]:
            return Bad(where, f"the chat template writes nothing of the tool {lost[0]}: give one that takes tools with chat_template=FILE")
        if (last := thought(messages[-1])) and last not in text:
            return Bad(where, f'the chat template writes nothing of what the last message of "{name}" was thought about: give one that does with '
                       "chat_template=FILE")  # fmt: skip
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not turns[number].get(LEARNED, True):
                self._counts.turns_marked_as_read_only += 1
                continue
            if not (message["content"].strip() or names(message) or thought(message)):
                return Bad(where, f'message {number + 1} of "{name}" is an empty answer: with "weight": 0 it is read and not learned')
            before = self._vocabulary.render(messages[:number], answer=True, tools=tools)
            after = self._vocabulary.render(messages[: number + 1], tools=tools)
            # Some templates write an earlier turn differently once later ones follow; what is not there as asked cannot be learned.
            if text.startswith(after) and after.startswith(before):
                spans.append((len(before), len(after)))
            else:
                self._counts.turns_not_learned += 1
        return _checked(where, text, tuple(spans))


def _checked(where: str, text: str, spans: tuple[tuple[int, int], ...] | None) -> Sample | Bad:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return Bad(where, "the text holds half a surrogate pair, which no UTF-8 has")
    return Sample(where, int.from_bytes(hashlib.sha256(data).digest()[:8], "big"), text, spans)


def encode(batch: list[Sample], vocabulary: Vocabulary, form: str) -> Iterator[tuple[list[int], list[int] | None]]:
    # A chat template writes its own special tokens; a second beginning-of-text would be read as content.
    encoded = vocabulary.tokenizer.encode_batch([sample.text for sample in batch], add_special_tokens=form != "messages")
    for sample, row in zip(batch, encoded, strict=True):
        ids = list(row.ids)
        if form == "messages":
            size = len(ids)
        else:
            size = len(vocabulary.unended(ids))
            ids = vocabulary.ended(ids)
        if sample.spans is None:
            yield ids, None
            continue
        offsets = row.offsets[:size]
        learned = [int(any(start < stop and finish > begin for begin, stop in sample.spans)) for start, finish in offsets]
        yield ids, learned + [1] * (len(ids) - size)


def pieces(tokens: list[int], learned: list[int] | None, size: int, form: str, counts: Counts) -> list[tuple[list[int], list[int] | None]]:
    """Plain text is cut into pieces, so that all of it is learned; an answer is cut off at the end, where it is learned least."""
    if form == "text":
        counts.split_rows += len(tokens) > size
        cuts = [*range(0, len(tokens), size), len(tokens)]
        if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
            cuts[-2] -= 1  # the first token of a piece follows nothing and is not learned: the end token must not be one
        return [(tokens[begin:end], None) for begin, end in pairwise(cuts) if end - begin > 1]
    assert learned is not None
    if len(tokens) > size:
        counts.truncated_rows += 1
        tokens, learned = tokens[:size], learned[:size]
    if not any(learned[1:]):
        counts.rows_without_anything_to_learn += 1
        return []
    return [(tokens, learned)]


def _judge(counts: Counts, allowed: int, names: list[str]) -> None:
    if counts.bad_rows > allowed:
        more = counts.bad_rows - len(counts.complaints)
        complaints = "\n  ".join(counts.complaints + ([f"… and {more} more"] if more else []))
        hint = f"; max_bad_rows={counts.bad_rows} would leave them out" if counts.rows else ""
        raise BadData(f"{counts.bad_rows} bad rows beside {counts.rows} good ones{hint}\n  {complaints}")
    if not counts.rows:
        raise BadData(f"the data set is empty: no row in {', '.join(names[:3])}{' …' if len(names) > 3 else ''}")


def _held_out_below(owners: list[int], fraction: float, seed: int) -> bytes:
    """The rank below which a row is kept from training: rows that are known to have one on either side, unless nothing is held out."""
    if not fraction:
        return b""
    ranks = {_rank(row, seed) for row in set(owners)}
    if len(ranks) < 2:
        raise BadData(f"{ONE_ROW} cannot be both learned and held out: more rows, or eval_fraction=0")
    limit = int(fraction * 2**64).to_bytes(8, "big")
    return min(max(limit, sorted(ranks)[1]), max(ranks))


def is_held_out(row: int, seed: int, below: bytes) -> bool:
    """Whether a row is kept from training, by the hash of its text: equal rows are never on both sides, and more data moves no row across."""
    return _rank(row, seed) < below


def _rank(row: int, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{row}".encode()).digest()[:8]


def _summary(manifest: dict[str, object], counts: Counts) -> str:
    layout, first = manifest["layout"], "the first " if "stream" in manifest else ""
    form = f"{manifest['format_of_rows']} of {layout} rows" if layout else manifest["format_of_rows"]
    lines = [
        f"data: {first}{counts.rows} rows ({form}), {manifest['tokens']} tokens, sequences {manifest['sequences']}",
        f"data: {counts.truncated_rows} rows truncated at {manifest['max_length']} tokens ({counts.truncated_rows / counts.rows:.1%}), "
        f"{counts.split_rows} cut into pieces, {counts.duplicate_rows} duplicates",
    ]
    return "\n".join(lines)


def _doubts(manifest: dict[str, Any], reading: Reading, counts: Counts) -> Iterator[str]:
    """What people have to know who look at no log: rows that are learned in part, or not at all."""
    if counts.truncated_rows:
        share = counts.truncated_rows / counts.rows
        yield f"{counts.truncated_rows} rows truncated at {manifest['max_length']} tokens ({share:.1%}): raise max_length to learn them whole"
    if counts.bad_rows:
        yield f"{counts.bad_rows} bad rows left out: {'; '.join(counts.complaints)}"
    if counts.rows_without_anything_to_learn:
        marked = ", or each answer is marked as not to be learned" if counts.turns_marked_as_read_only else ""
        yield f"{counts.rows_without_anything_to_learn} rows left out: nothing to learn within max_length{marked}"
    if counts.turns_marked_as_read_only:
        yield f"{counts.turns_marked_as_read_only} turns are read but not learned, as they are marked (weight: 0, train: false)"
    if counts.rows_also_held_out:
        yield f"{counts.rows_also_held_out} rows left out: they are among the held-out ones too"
    if reading.others:
        others = " and of ".join(reading.others)
        yield f"the rows are read as {reading.layout or reading.format}, and have the columns of {others}, too: say format=NAME"
    if reading.marks:
        marks = " and the column ".join(sorted(reading.marks))
        yield f"the column {marks} is not read: each row is learned; take out those that are not to be learned"
    if counts.turns_not_learned:
        yield f"{counts.turns_not_learned} turns are read but not learned: the chat template writes them differently once others follow"


def _columns(text: str) -> dict[str, str]:
    value = json.loads(text)
    known = [name for group in (*COLUMNS.values(), (TOOLS,), *LAYOUTS.values(), MORE) for name in group]
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()) or (wrong := set(value) - set(known)):
        raise BadData(f"columns: {sorted(wrong)[0] if isinstance(value, dict) and wrong else text} is none of {', '.join(known)}")
    return value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", choices=["auto", *COLUMNS, *LAYOUTS], default="auto")
    parser.add_argument("--columns", default="{}", help="JSON: what the columns are called here")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--eos-token", help="the token at which the trained model stops, in place of the one that is found")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument(
        "--packing", choices=["auto", "true", "false"], default="false", help="auto: unless documents see each other; true: refused then"
    )
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streaming", action="store_true", help="judge the first rows, and take held-out ones from them")
    parser.add_argument("--shuffle-rows", type=int, default=0, help="streaming: rows in memory that are shuffled among each other; 0: none")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
