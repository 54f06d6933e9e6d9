"""Step `export` of sft: make the folder that people load, the adapter alone or merged into its base.  Trains and judges nothing."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
             "merges.txt", "chat_template.jinja")  # fmt: skip


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.kind == "adapter":
        for file in sorted(options.adapter.iterdir()):
            shutil.copyfile(file, options.out / file.name)
    else:
        _merge(options)
    for name in TOKENIZER:
        if (options.base / name).exists():
            shutil.copyfile(options.base / name, options.out / name)
    if options.chat_template:
        shutil.copyfile(options.chat_template, options.out / "chat_template.jinja")
    print(f"export: {options.kind} of {sum(file.stat().st_size for file in options.out.iterdir()) / 1e6:.1f} MB in {options.out}")


def _merge(options: argparse.Namespace) -> None:
    # Only here: to copy an adapter takes none of this.
    from peft import PeftModel
    from sft_model import load_base

    base = load_base(options.base, options.init, options.seed, options.precision)
    merged = PeftModel.from_pretrained(base, str(options.adapter)).merge_and_unload()
    merged.save_pretrained(str(options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "adapter", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--kind", choices=["adapter", "merged"], required=True)
    parser.add_argument("--init", choices=["pretrained", "random"], required=True)
    parser.add_argument("--precision", choices=["bf16", "fp16", "no"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--chat-template", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
