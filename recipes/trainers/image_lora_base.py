"""The base of image-lora@1 as a folder that any program of diffusers loads.  Knows the layout of such folders, no kind of model."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

from loop import draw, fail


def base_folder(base: Path, init: str, into: Path) -> Path:
    """`base` itself; where `init` is random, `into`, with weights that are drawn for each part from its name.

    A script takes weights from files only.  Ends with a message where `base` is no such folder.
    """
    index = base / "model_index.json"
    if not index.is_file():
        fail(f"base: {base.name} is no model folder as diffusers lays it out: it has no model_index.json")
    if init == "pretrained":
        return base
    for name, value in json.loads(index.read_text()).items():
        folder = base / name
        if not (folder / "config.json").is_file():
            continue
        library, kind = value
        found = getattr(importlib.import_module(library), kind)
        draw("init", name)
        if library == "diffusers":
            model = found.from_config(found.load_config(folder))
        else:
            model = found._from_config(found.config_class.from_pretrained(folder))
        model.save_pretrained(into / name)
    shutil.copytree(base, into, dirs_exist_ok=True)
    return into
