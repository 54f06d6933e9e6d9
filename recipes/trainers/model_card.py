"""What an exported folder says about itself: the base it belongs to, its licence, how to load it.  Does not know how it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

ORIGIN = ".origin.json"  # in what was fetched from the Hub: {"repo": "org/name", "revision": "COMMIT"}
EMBEDDING = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")  # where this file is
similarity = model.similarity(model.encode_query(["a question"]), model.encode_document(["a text that answers it"]))
```"""
LICENCE = ("license", "license_name", "license_link")


class Base(NamedTuple):
    """A base model as those who load an adapter find it."""

    name: str  # org/name on the Hub, else ./FOLDER: never a path of the machine that trained
    revision: str | None  # the commit; None: not from the Hub
    licence: dict[str, str]  # as its own card has it


class Export(NamedTuple):
    """What a folder holds."""

    adapter: bool
    outputs: int  # numbers that its head makes of a text; 0: it writes text
    trainer: str  # sft, dpo, …
    random: bool  # the base's weights were drawn, and are nowhere to be had
    embeds: bool = False  # sentence-transformers loads it, and it makes embeddings of texts


def base_of(folder: Path) -> Base:
    """Where the model in `folder` is from.  A folder that was not fetched from the Hub has no name but its own."""
    licence = {name: value for name, value in _header(folder / "README.md").items() if name in LICENCE and isinstance(value, str)}
    if (folder / ORIGIN).exists():
        origin = json.loads((folder / ORIGIN).read_text())
        return Base(origin["repo"], origin["revision"], licence)
    return Base(f"./{folder.name}", None, licence)


def name_base(config: Path, base: Base, export: Export) -> None:
    """Name the base in an adapter's `adapter_config.json`, so that peft finds it.  Drawn weights are found nowhere, and are not named."""
    named = (
        {"base_model_name_or_path": None, "revision": None} if export.random else {"base_model_name_or_path": base.name, "revision": base.revision}
    )
    config.write_text(json.dumps({**json.loads(config.read_text()), **named}, indent=2, sort_keys=True) + "\n")


def text(base: Base, export: Export, made: Mapping[str, object]) -> str:
    """README.md: a header that the Hub reads, and how the folder is loaded."""
    header: dict[str, object] = {}
    if base.revision and not export.random:
        header |= {"base_model": base.name, "base_model_relation": "adapter" if export.adapter else "finetune"}
    library = "sentence-transformers" if export.embeds else "peft" if export.adapter else "transformers"
    header |= {"library_name": library, **base.licence}
    task = "sentence-similarity" if export.embeds else "text-classification" if export.outputs else "text-generation"
    header |= {"pipeline_tag": task}
    header |= {"tags": [*(["lora"] if export.adapter else []), export.trainer]}
    of = "a base with random weights" if export.random else f"{base.name} at {base.revision[:12]}" if base.revision else f"the folder {base.name}"
    known = ", ".join(f"{name} {made[name]}" for name in ("method", "rank", "max_steps", "learning_rate", "global_batch", "seed") if name in made)
    labels = made.get("labels")
    classes = f"Its outputs: {', '.join(f'{number} {label}' for number, label in enumerate(labels))}.\n\n" if isinstance(labels, list) else ""
    training = f"Training: {known}. All settings are in `training.json`.\n\n" if made else ""
    return f"""---
{yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip()}
---

# {"LoRA adapter" if export.adapter else "Model"} made by {export.trainer} from {of}

{classes}{training}## Load it

{_loading(base, export)}
"""


def _loading(base: Base, export: Export) -> str:
    if export.embeds:
        return EMBEDDING
    task = "SequenceClassification" if export.outputs else "CausalLM"
    labels = f", num_labels={export.outputs}" if export.outputs else ""
    auto, package = (f"AutoPeftModelFor{task}", "peft") if export.adapter else (f"AutoModelFor{task}", "transformers")
    lines = [f"from {package} import {auto}", "from transformers import AutoTokenizer", "", 'folder = "."  # where this file is']
    if export.adapter and export.random:
        return "This adapter belongs to weights that were drawn from a seed, to test the training. Nothing can be loaded beneath it."
    lines += [f"model = {auto}.from_pretrained(folder{labels if export.adapter else ''})", "tokenizer = AutoTokenizer.from_pretrained(folder)"]
    if export.adapter and not export.outputs:
        lines[1] += ", GenerationConfig"
        lines.append("model.generation_config = GenerationConfig.from_pretrained(folder)  # which token ends a text")
    shown = "\n".join(["```python", *lines, "```"])
    if not export.adapter or base.revision:
        return shown
    return (
        f"The base was no model of the Hub but a folder, `{base.name[2:]}`. Run this where that folder is, or write where it is as\n"
        f"`base_model_name_or_path` in `adapter_config.json`.\n\n{shown}"
    )


def _header(card: Path) -> dict[str, object]:
    """The YAML between the first two lines of dashes; nothing where there is none, or none that can be read."""
    words = card.read_text("utf-8", errors="replace") if card.exists() else ""
    if not words.startswith("---\n"):
        return {}
    try:
        found = yaml.safe_load(words[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
