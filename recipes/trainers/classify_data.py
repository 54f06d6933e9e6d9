"""Step `data` of classify: check rows of a text and its label, turn them into tokens, hold a part out.  Knows tokenizers, not models."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notices import warn
from rows import Bad, BadData, Row, kind
from sifting import SHOWN, Sieve, data_files, number, parts, renamed, text_of
from splits import BATCH, write
from vocabulary import most_tokens, tokenizer_of, without_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("text", "text_pair", "label")
UNKNOWN = "-1"  # what data sets of benchmarks have where a label is kept secret
MANY = 20  # labels, of which no data set has a new one in every second row
LOPSIDED = 0.9  # share of one label from which on accuracy says little


@dataclass(frozen=True, slots=True)
class Example:
    """One row: a text, or two of which the label says how they belong together."""

    texts: tuple[str, ...]
    label: str


@dataclass(slots=True)
class Counts:
    truncated_rows: int = 0
    duplicate_rows: int = 0
    contradictions: int = 0
    longest: int = 0
    seen: dict[tuple[str, ...], str] = field(default_factory=dict)

    def meet(self, example: Example) -> None:
        before = self.seen.get(example.texts)
        self.duplicate_rows += before == example.label
        self.contradictions += before is not None and before != example.label
        self.seen.setdefault(example.texts, example.label)


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
    """Write the rows as tokens; the summary for people comes back.  Raises BadData."""
    tokenizer = tokenizer_of(options.base)
    config = json.loads((options.base / "config.json").read_text())
    if (most := most_tokens(tokenizer, config)) is not None and options.max_length > most:
        raise BadData(f"max_length {options.max_length} is more than the {most} tokens that the base model takes: say max_length={most}")
    columns = renamed(options.columns, COLUMNS)
    names = {name: columns.get(name, name) for name in COLUMNS}
    found = data_files(options.data, options.eval_fraction)
    sieve, counts = Sieve(options.max_bad_rows), Counts()

    def usable(row: Row) -> Example | Bad:
        return _usable(row, names)

    examples = list(sieve.sift(found.train, options.data, usable))
    learned = len(examples)
    examples += sieve.sift(found.held_out, options.data, usable)
    sieve.judge(found)
    labels = _labels(Counter(example.label for example in examples), options.labels, config)
    known = {label: place for place, label in enumerate(labels)}
    if options.labels and all(example.label.isdecimal() and int(example.label) < len(labels) for example in examples):
        known |= {str(place): place for place in range(len(labels)) if str(place) not in known}
    if strange := sorted({example.label for example in examples} - set(known)):
        raise BadData(f'the label "{strange[0]}" is none of labels={",".join(labels)}')

    owners = [number(json.dumps(example.texts)) for example in examples]
    for example in examples:
        counts.meet(example)
    splits = parts(owners, learned, options.eval_fraction, options.seed, "text")
    encoded = list(_encoded(examples, tokenizer, options.max_length, counts))
    inputs = [name for name in encoded[0] if name != "attention_mask"]
    options.out.mkdir(parents=True, exist_ok=True)
    digests = {
        name: write(
            options.out / f"{name}.arrow",
            [*inputs, "label"],
            [[*(encoded[place][each] for each in inputs), known[examples[place].label]] for place in places],
            numbers=["label"],
        )
        for name, places in splits.items()
    }
    shares = {
        label: [sum(known[examples[place].label] == number for place in places) for places in splits.values()] for number, label in enumerate(labels)
    }
    manifest = {
        "format": 1,
        "rows": sieve.rows,
        "examples": {name: len(places) for name, places in splits.items()},
        "labels": labels,
        "rows_by_label": shares,
        "max_length": options.max_length,
        "longest": counts.longest,
        "bad_rows": sieve.bad_rows,
        "truncated_rows": counts.truncated_rows,
        "duplicate_rows": counts.duplicate_rows,
        "contradictions": counts.contradictions,
        "arrays": digests,
    }
    for line in _doubts(manifest):
        warn(line)
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    shown = ", ".join(f"{label} {sum(shares[label])}" for label in labels[:SHOWN])
    return (
        f"data: {sieve.rows} rows, {len(splits['train'])} to learn from, {len(splits['held_out'])} held out; {len(labels)} labels: {shown}"
        f"{' …' if len(labels) > SHOWN else ''}\n"
        f"data: {counts.truncated_rows} rows truncated at {options.max_length} tokens, the longest has {counts.longest}, "
        f"{counts.duplicate_rows} duplicates"
    )


def _usable(row: Row, names: dict[str, str]) -> Example | Bad:
    for name in ("text", "label"):
        if names[name] not in row.value:
            return Bad(row.where, f'no column "{names[name]}"; it has: {", ".join(row.value) or "none"}')
    texts = []
    for name in ("text", "text_pair"):
        if row.value.get(names[name]) is None and name == "text_pair":
            continue
        value = text_of(row, names[name])
        if isinstance(value, Bad):
            return value
        texts.append(value)
    label = _label(row.value[names["label"]])
    return Bad(row.where, f'"{names["label"]}" {label.why}') if isinstance(label, Bad) else Example(tuple(texts), label)


def _label(value: object) -> str | Bad:
    """A label as text, the same from JSON, CSV and Parquet."""
    if isinstance(value, list):
        return Bad("", "is a list: one label a row is learned")
    if isinstance(value, str) and re.fullmatch(r"-?\d+\.\d+", value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():  # as tables have numbers beside an empty cell
        value = int(value)
    if isinstance(value, float):
        return Bad("", f"is {value}: classes are learned, and no numbers between them")
    if not isinstance(value, str | int):
        return Bad("", f"is {kind(value)}, a string or a whole number is expected")
    text = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if text == UNKNOWN:
        return Bad("", "is -1, as data sets have it where a label is kept secret: leave these rows out")
    return text if text else Bad("", "is empty")


def _labels(there: Counter[str], given: list[str], config: dict[str, Any]) -> list[str]:
    """The labels in their order: as given, as the base's own head has them where it has all of them, else as they are sorted.  Raises BadData."""
    if len(there) < 2:
        raise BadData(f'all rows have the label "{next(iter(there))}": there is nothing to tell apart')
    if len(there) > max(MANY, sum(there.values()) // 2):
        raise BadData(
            f'{len(there)} different labels in {sum(there.values())} rows: the column of labels seems to be another (columns={{"label": …}})'
        )
    if given:
        if twice := [label for label, times in Counter(given).items() if times > 1]:
            raise BadData(f'labels names "{twice[0]}" twice')
        return given
    own = config.get("id2label") if str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification") else None
    if own and set(there) <= set(map(str, own.values())):
        return [str(own[key]) for key in sorted(own, key=int)]
    numbers = all(label.isdecimal() for label in there)
    if numbers and max(map(int, there)) < 2 * len(there):
        return [str(place) for place in range(max(map(int, there)) + 1)]
    return sorted(there, key=int) if numbers else sorted(there)


def _encoded(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, most: int, counts: Counts) -> Iterator[dict[str, list[int]]]:
    """What transformers' tokenizer makes of each, cut at `most` tokens with the end that it puts behind a text kept."""
    for at in range(0, len(examples), BATCH):
        batch = examples[at : at + BATCH]
        made: dict[int, dict[str, list[int]]] = {}
        by_form: dict[int, list[int]] = defaultdict(list)
        for place, example in enumerate(batch):
            by_form[len(example.texts)].append(place)
        for places in by_form.values():
            columns = [list(texts) for texts in zip(*(batch[place].texts for place in places), strict=True)]
            whole = tokenizer(*columns, verbose=False)
            for row, place in enumerate(places):
                length = len(whole["input_ids"][row])
                counts.longest = max(counts.longest, length)
                counts.truncated_rows += length > most
                cut = tokenizer(*batch[place].texts, truncation=True, max_length=most) if length > most else None
                made[place] = {name: cut[name] if cut else whole[name][row] for name in whole}
        yield from (made[place] for place in range(len(batch)))


def _doubts(manifest: dict[str, Any]) -> Iterator[str]:
    """What people have to know who look at no log."""
    rows = manifest["rows"]
    if cut := manifest["truncated_rows"]:
        yield f"{cut} rows truncated at {manifest['max_length']} tokens ({cut / rows:.1%}): raise max_length to read them whole"
    if manifest["contradictions"]:
        yield f"{manifest['contradictions']} rows have the text of an earlier one and another label: no model can learn both"
    shares = manifest["rows_by_label"]
    label, most = max(((label, sum(counts)) for label, counts in shares.items()), key=lambda pair: pair[1])
    if most / rows > LOPSIDED:
        yield f'{most / rows:.1%} of the rows are "{label}": always saying so would be right as often; judge by macro-F1, not by accuracy'
    never = [label for label, (learned, _) in shares.items() if not learned]
    if never:
        yield f"no row to learn from has the label {', '.join(never[:SHOWN])}: the model cannot come to say it"
    if manifest["examples"]["held_out"] and (unjudged := [label for label, (_, held) in shares.items() if not held and label not in never]):
        yield f"no held-out row has the label {', '.join(unjudged[:SHOWN])}: nothing is known of it; more data, or a greater eval_fraction"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--columns", default="{}", help="JSON: what the columns are called here")
    parser.add_argument("--labels", nargs="*", default=[], help="all labels in the order of the model's outputs")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--max-bad-rows", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
