"""Steps `text` and `prompts`: put captions, or the prompts of samples, through the text encoders, once.  Knows no pixels.

One file for each different text, with what the family's text encoder makes of it, and `texts.json`, which says which file is whose.  The encoders are
larger than what is trained (Flux's T5 alone has 4.7e9 weights): here is the only place where they are in memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from image_model import DTYPES, FAMILIES, INITS, caption_file, device, family, orders, rows
from precision import ASKED, chosen
from safetensors.torch import save_file

SAMPLES = 4  # captions that are drawn where no prompts are given
SHOWN = 5  # texts that are printed of those that are too long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    for name in ("base", "manifest", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--report", type=Path, help="a JSON file for how many texts are longer than an encoder reads")
    parser.add_argument("--prompts", type=json.loads, help="a JSON list: embed these and not the captions; empty: the first captions")
    parser.add_argument("--tag-orders", type=int, default=1, help="orders of its tags in which a caption that is learned from is embedded")
    parser.add_argument("--keep-tags", type=int, default=1, help="tags that stay in front")
    parser.add_argument("--init", choices=INITS, required=True)
    parser.add_argument("--precision", choices=ASKED, required=True)
    options = parser.parse_args()

    every = rows(options.manifest)
    texts = list(dict.fromkeys(row.caption for row in every))
    if options.prompts is not None:
        texts = list(dict.fromkeys(options.prompts or texts[:SAMPLES]))
    else:
        learned = {row.caption for row in every if not row.held_out}
        texts = list(dict.fromkeys(each for text in texts for each in orders(text, options.tag_orders * (text in learned), options.keep_tags)))
    where, precision = device(), chosen(options.precision)
    torch.use_deterministic_algorithms(True, warn_only=True)
    encoder = family(options.family).TextEncoder(options.base, options.init, DTYPES[precision], where)
    options.out.mkdir(parents=True, exist_ok=True)
    # An image that is learned without its caption has an empty one.
    for text in texts if options.prompts is not None else dict.fromkeys([*texts, ""]):
        with torch.no_grad():
            found = {name: value.cpu().contiguous() for name, value in encoder.encode(text).items()}
        if not all(value.isfinite().all() for value in found.values()):
            sys.exit(f'text: the text encoders give numbers that are none in precision {precision} for "{text}"; take precision=bf16 or no')
        save_file(found, options.out / caption_file(text))
    (options.out / "texts.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    cut = too_long(encoder, texts)
    if options.report:
        report = {"texts": len(texts), "cut": {what: len(those) for what, those in cut.items()}}
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    for what, those in cut.items():
        more = f"\n  and {len(those) - SHOWN} more" if len(those) > SHOWN else ""
        print(f"text: {what}; {len(those)} of {len(texts)} texts are longer:\n" + "\n".join(f"  {text}" for text in those[:SHOWN]) + more)
    print(f"text: {len(texts)} texts on {where.type}, precision {precision}")


def too_long(encoder: Any, texts: Sequence[str]) -> dict[str, list[str]]:
    """The texts of which something reads only the beginning, by what does."""
    found: dict[str, list[str]] = {}
    for text in texts:
        for what in encoder.cut(text):
            found.setdefault(what, []).append(text)
    return found


if __name__ == "__main__":
    main()
