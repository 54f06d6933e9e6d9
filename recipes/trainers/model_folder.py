"""A model folder as people hand it on: a whole model, or an adapter and the base that it belongs to.  Says what does not fit; loads it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import text_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter_config.json"
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT")  # peft's kinds that change no weight
SAVED = "modules_to_save.default."


class Unfit(Exception):
    """A folder that is no model, or an adapter and a base that do not belong together."""


class Folder(NamedTuple):
    """What is to be loaded."""

    model: Path
    base: Path | None  # below the adapter; None: the model is whole
    adapter: dict[str, Any]  # what adapter_config.json says; empty: the model is whole
    made: dict[str, Any]  # what training.json says, which models of this library have


def read(model: Path, base: Path | None) -> Folder:
    """What is in `model`, with the base that it needs.  Raises Unfit."""
    if not (model / ADAPTER).exists():
        if not (model / "config.json").exists():
            raise Unfit(f"{model.name} is no model folder: it holds neither config.json nor {ADAPTER}")
        return Folder(model, None, {}, _json(model / text_record.NAME))
    adapter = _json(model / ADAPTER)
    named = adapter.get("base_model_name_or_path")
    if base is None:
        raise Unfit(f"{model.name} is an adapter: give the model that it belongs to, base={named or 'ORG/NAME'}")
    if (kind := adapter.get("task_type")) not in ("CAUSAL_LM", None):
        raise Unfit(f"{model.name} is an adapter for {kind}, which writes no text; reward@1 with export=merged makes a whole model of such a one")
    found = Folder(model, base, adapter, _json(model / text_record.NAME))
    if found.made.get("init") != "random" and not _weights(base):
        raise Unfit(f"{base.name} holds no weights (*.safetensors, *.bin): it cannot be the base of {model.name}")
    if misfits := _misfits(found):
        told = "; ".join(misfits[:3]) + (f"; {len(misfits) - 3} more" if len(misfits) > 3 else "")
        raise Unfit(f"{model.name} does not belong to {base.name}: {told}" + (f".  It was made for {named}" if named else ""))
    return found


def mergeable(folder: Folder) -> None:
    """Whether weights of the base can take up the adapter, or be written in another type.  Raises Unfit."""
    if (kind := folder.adapter.get("peft_type")) in PROMPTS:
        raise Unfit(f"{folder.model.name} is of peft's kind {kind}, which changes no weight: there is nothing to merge")
    whole = folder.base or folder.model
    quantised = _json(whole / "config.json").get("quantization_config")
    if isinstance(quantised, dict):
        method = quantised.get("quant_method", "some way")
        into = "what is merged would be rounded to it once more; give the base in 16 bits" if folder.base else "give the model in 16 bits"
        raise Unfit(f"{whole.name} is quantised ({method}): {into}")


def load(folder: Folder, precision: str, *, init: str = "pretrained", seed: int = 0) -> PreTrainedModel:
    """The model, with its adapter on it where it is one, in `precision` (bf16, fp16, no).

    With `init` random the base's weights are drawn from `seed`; the record of an adapter goes before.  Raises Unfit.
    """
    from text_model import load_base

    whole = folder.base or folder.model
    drawn = (folder.made.get("init", init), folder.made.get("seed", seed)) if folder.base else (init, seed)
    if drawn[0] != "random" and not _weights(whole):
        raise Unfit(f"{whole.name} holds no weights (*.safetensors, *.bin)")
    found = load_base(whole, *drawn, precision)
    if folder.base is None:
        return found
    from peft import PeftModel

    adapted: PreTrainedModel = PeftModel.from_pretrained(found, str(folder.model))
    return adapted


def _misfits(folder: Folder) -> list[str]:
    """What the adapter changes and the base does not have, or has in another shape.  Told from the file's head and an empty model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    assert folder.base is not None
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder.base, local_files_only=True))  # type: ignore[no-untyped-call]
    weights = {name: module for name, module in empty.named_modules() if getattr(module, "weight", None) is not None}
    shapes = {name: tuple(module.weight.shape) for name, module in weights.items()}
    # What a module gives and takes: GPT-2 keeps its weights the other way round.
    sizes = {name: shapes[name][::-1] if isinstance(module, Conv1D) else shapes[name] for name, module in weights.items()}
    wrong: dict[str, str] = {}
    for name, shape in _shapes(folder.model / "adapter_model.safetensors").items():
        module, part = name.removeprefix("base_model.model.").rpartition(".")[0], name.rpartition(".")[0].rpartition(".")[2]
        if part in ("lora_A", "lora_B") and len(shape) == 2:
            module = module.removesuffix(f".{part}")
            there = sizes.get(module)
            along = -1 if part == "lora_A" else 0
            if there is None:
                wrong[module] = f"it has no {module}"
            elif len(there) == 2 and shape[1 if part == "lora_A" else 0] != there[along]:
                wrong[module] = f"{module} has {there[along]} there and {shape[1 if part == 'lora_A' else 0]} in the adapter"
        elif module in shapes and not part.startswith("lora_") and name.endswith(".weight") and tuple(shape) != shapes[module]:
            wrong[module] = f"{module} has {' × '.join(map(str, shapes[module]))} there and {' × '.join(map(str, shape))} in the adapter"
    return list(wrong.values())


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a file of safetensors, from its head; nothing where there is no such file."""
    if not file.exists():
        return {}
    with file.open("rb") as data:
        (size,) = struct.unpack("<Q", data.read(8))
        head = json.loads(data.read(size))
    return {name: tensor["shape"] for name, tensor in head.items() if name != "__metadata__"}


def _weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _json(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text()) if file.exists() else {}
    return value if isinstance(value, dict) else {}
