"""What the folder of a base says about embeddings, if sentence-transformers has saved it: prompts, pooling, dimension.  Loads no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MODULES = "modules.json"
QUERY, DOCUMENT = "query", "document"
NAMES_OF_DOCUMENTS = (DOCUMENT, "passage", "corpus")
"""What models call the prompt of a document."""


class Base(NamedTuple):
    """A folder as sentence-transformers would load it."""

    saved: bool  # by sentence-transformers, with modules of its own
    prompts: dict[str, str]  # of queries and of documents
    pooling: str | None  # None: not decided by the folder
    dimension: int | None  # numbers of an embedding
    similarity: str | None  # what its embeddings are compared by


def described(folder: Path) -> Base:
    """Read the files of a folder that describe it."""
    config = _json(folder / "config.json")
    width = (config.get("text_config") or config).get("hidden_size")
    if not (folder / MODULES).exists():
        return Base(False, {QUERY: "", DOCUMENT: ""}, None, width, None)
    ours = _json(folder / "config_sentence_transformers.json")
    prompts = ours.get("prompts") or {}
    documents = next((prompts[name] for name in NAMES_OF_DOCUMENTS if prompts.get(name)), "")
    modules = json.loads((folder / MODULES).read_text())
    configs = {str(module["type"]).rpartition(".")[2]: _json(folder / module["path"] / "config.json") for module in modules if module["path"]}
    dimension = configs.get("Dense", {}).get("out_features") or width
    return Base(
        True, {QUERY: prompts.get(QUERY) or "", DOCUMENT: documents}, _pooling(configs.get("Pooling", {})), dimension, ours.get("similarity_fn_name")
    )


def _pooling(config: Mapping[str, Any]) -> str | None:
    """Return the pooling of a module's config, which older releases wrote as a boolean for each mode."""
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return mode
    older = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken", "max_tokens": "max"}
    found = [name for key, name in older.items() if config.get(f"pooling_mode_{key}")]
    return found[0] if len(found) == 1 else None


def _json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return value
