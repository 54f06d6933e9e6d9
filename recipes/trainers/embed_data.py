"""Step `data` of embed: check pairs and triplets of texts, count their tokens, hold a part out.  Knows tokenizers, not models."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import embed_base
from notices import warn
from rows import Bad, BadData, Row
from sifting import Sieve, data_files, number, parts, renamed, text_of
from splits import BATCH, write
from vocabulary import most_tokens, tokenizer_of, without_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("anchor", "positive", "negative")
VERDICTS = ("label", "labels", "score", "scores", "similarity", "similarity_score")
"""Columns that say of a pair how well it matches."""
MATCH = ("1", "1.0", "true")
NO_MATCH = ("0", "0.0", "-1", "-1.0", "false")
FEW = 16  # rows of a batch, below which there is little to tell a text from


@dataclass(frozen=True, slots=True)
class Example:
    """A text, one that belongs to it, and perhaps one that does not."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of the data set."""

    examples: list[Example]
    learned: int  # how many of the first ones are of files to learn from
    columns: list[str]  # of all rows, in their order
    bad_rows: int


@dataclass(slots=True)
class Counts:
    """What is said of the rows, in the manifest and to people."""

    truncated_rows: int = 0
    duplicate_rows: int = 0
    contradictions: int = 0  # rows with a negative that is the positive of the same anchor in another row
    equal_pairs: int = 0
    longest: int = 0


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
    """Write the rows as texts; the summary for people comes back.  Raises BadData."""
    tokenizer = tokenizer_of(options.base)
    base = embed_base.described(options.base)
    _refuse(options, base, tokenizer)
    prompts = _prompts(options.prompts, base)
    names = _names(options.columns)
    found = _read(options, names)
    examples = found.examples
    columns = _columns(examples, names, options.loss)
    splits = parts([number(example.texts[0]) for example in examples], found.learned, options.eval_fraction, options.seed, "anchor")
    _refuse_batch([examples[place] for place in splits["train"]], options)
    counts = _counted(examples)
    _measure(examples, tokenizer, prompts, options.max_length, counts)
    options.out.mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": 1,
        "rows": len(examples),
        "examples": {name: len(places) for name, places in splits.items()},
        "columns": columns,
        "prompts": prompts,
        "max_length": options.max_length,
        "bad_rows": found.bad_rows,
        **asdict(counts),
        "arrays": {
            name: write(options.out / f"{name}.arrow", columns, [examples[place].texts for place in places], texts=columns)
            for name, places in splits.items()
        },
    }
    for line in [*_doubts(manifest, base, options), *_unread(found.columns, names)]:
        warn(line)
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return (
        f"data: {len(examples)} {'triplets' if len(columns) == 3 else 'pairs'}, {len(splits['train'])} to learn from, "
        f"{len(splits['held_out'])} held out\n"
        f"data: {counts.truncated_rows} rows truncated at {options.max_length} tokens, the longest text has {counts.longest}, "
        f"{counts.duplicate_rows} duplicates"
    )


def _names(columns: str) -> dict[str, str]:
    """Return what each column is called in the data."""
    names = {name: name for name in COLUMNS} | renamed(columns, COLUMNS)
    if len(set(names.values())) < len(names):
        raise BadData(f"columns: two of {', '.join(COLUMNS)} are the same column: {', '.join(names.values())}")
    return names


def _read(options: argparse.Namespace, names: Mapping[str, str]) -> Found:
    files = data_files(options.data, options.eval_fraction)
    sieve = Sieve(options.max_bad_rows)
    columns: dict[str, None] = {}

    def usable(row: Row) -> Example | Bad:
        columns.update(dict.fromkeys(row.value))
        return _usable(row, names)

    examples = list(sieve.sift(files.train, options.data, usable))
    learned = len(examples)
    examples += sieve.sift(files.held_out, options.data, usable)
    sieve.judge(files)
    return Found(examples, learned, list(columns), sieve.bad_rows)


def _counted(examples: Sequence[Example]) -> Counts:
    """Return what can be said without tokens."""
    matches = {example.texts[:2] for example in examples}
    return Counts(
        duplicate_rows=len(examples) - len({example.texts for example in examples}),
        contradictions=sum(len(example.texts) == 3 and (example.texts[0], example.texts[2]) in matches for example in examples),
        equal_pairs=sum(example.texts[0] == example.texts[1] for example in examples),
    )


def _prompts(asked: str, base: embed_base.Base) -> dict[str, str]:
    """Return the texts that go before queries and documents: those that are asked for, else the base's own."""
    known = (embed_base.QUERY, embed_base.DOCUMENT)
    try:
        given = json.loads(asked)
    except json.JSONDecodeError as error:
        raise BadData(f"prompts: {asked} is not JSON: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise BadData(f'prompts: {asked} is not {{"query": "TEXT", "document": "TEXT"}}')
    if wrong := sorted(set(given) - set(known)):
        raise BadData(f"prompts: {wrong[0]} is none of {', '.join(known)}")
    return base.prompts | given


def _refuse(options: argparse.Namespace, base: embed_base.Base, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BadData if the base cannot do what is asked for."""
    config = json.loads((options.base / "config.json").read_text())
    if (most := most_tokens(tokenizer, config)) is not None and options.max_length > most:
        raise BadData(f"max_length {options.max_length} is more than the {most} tokens that the base model takes: say max_length={most}")
    if base.pooling is not None and options.pooling not in ("auto", base.pooling):
        raise BadData(f"pooling={options.pooling}, and the base was trained with pooling {base.pooling}: say pooling=auto to keep it")
    if wrong := [size for size in options.matryoshka if size < 1 or options.matryoshka.count(size) > 1]:
        raise BadData(f"matryoshka: {wrong[0]} is {'there twice' if wrong[0] > 0 else 'no number of dimensions'}")
    if base.dimension is not None and (wide := [size for size in options.matryoshka if size > base.dimension]):
        raise BadData(f"matryoshka: {wide[0]} is more than the {base.dimension} numbers of the base's embeddings")


def _usable(row: Row, names: Mapping[str, str]) -> Example | Bad:
    for name in COLUMNS[:2]:
        if names[name] not in row.value:
            return Bad(row.where, f'no column "{names[name]}"; it has: {", ".join(row.value) or "none"}')
    read = [name for name in COLUMNS if name != "negative" or row.value.get(names[name]) not in (None, "")]
    texts = []
    for name in read:
        if isinstance(row.value[names[name]], list):
            return Bad(row.where, f'"{names[name]}" is a list: write a row for each text in it')
        text = text_of(row, names[name])
        if isinstance(text, Bad):
            return text
        texts.append(text)
    for name in VERDICTS:
        if name in row.value and name not in names.values() and (why := _no_match(row.value[name])):
            return Bad(row.where, f'"{name}" {why}')
    if len(texts) == 3 and texts[2] in texts[:2]:
        other = names[COLUMNS[texts.index(texts[2])]]
        return Bad(row.where, f'"{names["negative"]}" is the same text as "{other}"')
    return Example(tuple(texts))


def _no_match(verdict: object) -> str:
    """Return why a pair with this label is no pair to learn; empty if it is one."""
    told = str(verdict).strip().lower()
    if verdict is None or told in ("", *MATCH):
        return ""
    if told in NO_MATCH:
        return f"is {verdict}: the texts do not match, and each row is learned as a match; leave the row out, or make its text a negative"
    return f"is {verdict}: each row is learned as a match, and degrees or classes of it are not; keep the rows that match, without this column"


def _columns(examples: Sequence[Example], names: Mapping[str, str], loss: str) -> list[str]:
    """Return the columns that each row has.  Raises BadData if some rows have a negative and others have none."""
    with_negative = sum(len(example.texts) == 3 for example in examples)
    if with_negative not in (0, len(examples)):
        raise BadData(
            f'{len(examples) - with_negative} of {len(examples)} rows have no "{names["negative"]}": give each row one, or remove the column'
        )
    if loss == "triplet" and not with_negative:
        raise BadData(f'loss=triplet needs a "{names["negative"]}" in each row, and there is none: say loss=mnrl')
    return list(COLUMNS if with_negative else COLUMNS[:2])


def _refuse_batch(examples: Sequence[Example], options: argparse.Namespace) -> None:
    """Raise BadData if no batch without a text twice can be made, as in-batch negatives need one."""
    if options.loss != "mnrl":
        return
    taken: set[str] = set()
    rows = 0
    for example in examples:
        if taken.isdisjoint(example.texts):
            taken.update(example.texts)
            rows += 1
        if rows == options.global_batch:
            return
    raise BadData(
        f"global_batch {options.global_batch} is more than the rows that share no text, of which there are {rows} to learn from: "
        f"a text that is in a batch twice would be its own negative; say global_batch={rows}, or give more data"
    )


def _measure(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, prompts: Mapping[str, str], most: int, counts: Counts) -> None:
    """Count tokens as transformers' tokenizer makes them, with the prompts."""
    for batch in _batches(examples):
        texts = [prompts[embed_base.DOCUMENT if place else embed_base.QUERY] + text for example in batch for place, text in enumerate(example.texts)]
        lengths = iter([len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]])
        for example in batch:
            longest = max(next(lengths) for _ in example.texts)
            counts.longest = max(counts.longest, longest)
            counts.truncated_rows += longest > most


def _batches(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    for at in range(0, len(examples), BATCH):
        yield examples[at : at + BATCH]


def _doubts(manifest: Mapping[str, Any], base: embed_base.Base, options: argparse.Namespace) -> Iterator[str]:
    """What people have to know who look at no log."""
    rows = manifest["rows"]
    if cut := manifest["truncated_rows"]:
        yield f"{cut} rows truncated at {manifest['max_length']} tokens ({cut / rows:.1%}): raise max_length to read them whole"
    if manifest["contradictions"]:
        yield f"{manifest['contradictions']} rows have a negative that is a positive of the same anchor in another row: remove one of the two"
    if manifest["equal_pairs"]:
        yield f"{manifest['equal_pairs']} rows have the same text as anchor and positive: only a model with dropout learns from them"
    if base.prompts != manifest["prompts"]:
        yield f"prompts {manifest['prompts']} replace the base's own, {base.prompts}"
    if options.matryoshka and base.dimension is not None and base.dimension not in options.matryoshka:
        yield f"matryoshka does not name {base.dimension}, the base's own dimension: whole embeddings are not trained; add it"
    if base.similarity not in (None, "cosine"):
        yield f"the base compares embeddings by {base.similarity}, and this training by cosine: the result is saved to be compared by cosine"
    if options.loss == "mnrl" and options.global_batch < FEW:
        yield f"a batch of {options.global_batch} rows has few negatives for each anchor: raise global_batch; micro_batch limits the memory"


def _unread(columns: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    """Return what people have to know of columns that nothing is learned from."""
    unread = [name for name in columns if name not in (*names.values(), *VERDICTS)]
    if not unread:
        return
    negatives = [name for name in unread if "neg" in name.lower()]
    hint = f"""; for negatives say columns='{{negative: {negatives[0]}}}'""" if negatives and names["negative"] == "negative" else ""
    yield f"columns that are not read: {', '.join(unread)}{hint}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--columns", default="{}", help="JSON: what the columns are called here")
    parser.add_argument("--prompts", default="{}", help="JSON: what goes before each query, and each document")
    parser.add_argument("--loss", choices=["mnrl", "triplet"], default="mnrl")
    parser.add_argument("--pooling", default="auto")
    parser.add_argument("--matryoshka", type=int, nargs="*", default=[])
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
