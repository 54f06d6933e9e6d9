"""Turn texts into pairs of letters, a tenth of them held out.  Names the file and the line of what it cannot read."""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("dataset", type=Path)
parser.add_argument("pairs", type=Path)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

files = sorted(path for path in args.dataset.rglob("*") if path.suffix in (".txt", ".jsonl")) if args.dataset.is_dir() else [args.dataset]
texts = []
for path in files:
    if path.suffix == ".txt":
        texts.append(path.read_text("utf-8"))
        continue
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            texts.append(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError):
            raise SystemExit(f'{path.name}:{number}: this is not a row with a "text"') from None

text = "".join(char if char in "abcdefghijklmnopqrstuvwxyz" else " " for char in " ".join(texts).lower())
text = " ".join(text.split())
if len(text) < 1000:
    raise SystemExit(f"{args.dataset.name}: {len(text)} letters are too few to learn from; 1000 are the least")
letters = sorted(set(text))
places = [(letters.index(a), letters.index(b)) for a, b in pairwise(text[:200_000])]
random.Random(args.seed).shuffle(places)
held_out = len(places) // 10
args.pairs.write_text(json.dumps({"letters": letters, "held_out": places[:held_out], "train": places[held_out:]}))
print(f"{len(places)} pairs of {len(letters)} letters, {held_out} held out")
