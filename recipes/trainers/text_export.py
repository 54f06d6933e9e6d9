"""Step `export` of language models: make the folder that people load: the adapter, or a whole model.  Trains and judges nothing."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import model_card
import text_record

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
             "merges.txt", "chat_template.jinja")  # fmt: skip


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    made = text_record.read(options.weights)
    merge = options.kind == "merged" and made["method"] != "full"
    if merge:
        # Only here: to copy an adapter takes none of this.
        import tuned

        merged = tuned.load(options.base, options.weights, judge=options.judge).merge_and_unload()  # type: ignore[operator]
        merged.save_pretrained(str(options.out))
    for file in sorted(options.weights.iterdir()):
        if file.is_dir():
            shutil.copytree(file, options.out / file.name, dirs_exist_ok=True)
        elif not merge or file.name in (*TOKENIZER, text_record.NAME):
            shutil.copyfile(file, options.out / file.name)
    # A training that has changed its tokenizer, to fill up with another token than the end token, has written it beside the weights.
    for name in TOKENIZER if not (options.out / "tokenizer_config.json").exists() else ():
        if (options.base / name).exists():
            shutil.copyfile(options.base / name, options.out / name)
    if options.chat_template:
        shutil.copyfile(options.chat_template, options.out / "chat_template.jinja")
    if "end_token" in made and not options.judge:
        stop_at(options.out, options.base, made["end_token"]["text"], made["end_token"]["number"])
    base = model_card.base_of(options.base)
    outputs = len(made.get("labels", [None])) if options.judge else 0
    export = model_card.Export(
        adapter=(options.out / "adapter_config.json").exists(),
        outputs=outputs,
        trainer=options.trainer,
        random=made.get("init") == "random",
        embeds=(options.out / "modules.json").exists(),
    )
    if export.adapter:
        model_card.name_base(options.out / "adapter_config.json", base, export)
    (options.out / "README.md").write_text(model_card.text(base, export, made), "utf-8")
    kind = "a model, fully trained" if made["method"] == "full" else "a model, its adapter merged in" if merge else "an adapter"
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"export: {kind}, {size / 1e6:.1f} MB in {options.out}")


def stop_at(folder: Path, base: Path, token: str, number: int) -> None:
    """Make `token` the end for tokenizer and generation alike.  Where generation stopped at several and at this one, it goes on to."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            named = _json(folder / name)
            whole = named.get("eos_token")
            _dump(folder / name, {**named, "eos_token": {**whole, "content": token} if isinstance(whole, dict) else token})
    generation = next((file for at in (folder, base) if (file := at / "generation_config.json").exists()), None)
    settings = _json(generation) if generation else {}
    ends = settings.get("eos_token_id")
    _dump(folder / "generation_config.json", {**settings, "eos_token_id": ends if isinstance(ends, list) and number in ends else number})
    if (folder / "config.json").exists():
        _dump(folder / "config.json", {**_json(folder / "config.json"), "eos_token_id": number})


def _json(file: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads(file.read_text())
    return value


def _dump(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--kind", choices=["adapter", "merged"], required=True, help="of a model that was trained in full, all of it comes out")
    parser.add_argument("--trainer", required=True, help="what made it, in a word")
    parser.add_argument("--judge", action="store_true", help="the model has a head, and writes no text")
    parser.add_argument("--chat-template", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
