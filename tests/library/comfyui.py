"""What ComfyUI makes of a LoRA file, as far as it goes by names: written from how its `comfy/lora.py` and `comfy/weight_adapter/lora.py` behave.

ComfyUI has a list of names for each weight of the model, and looks for each of them in the file.  What it does not find stays as it is, and what the
file has beyond that is left out with a warning in the log: a file of which half has no place loads, and is half an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Layers of the denoisers that ComfyUI knows under their names in diffusers, without first and last layers, norms and time embeddings.
SDXL_LAYERS = re.compile(
    r"(down_blocks\.\d+|mid_block|up_blocks\.\d+)\.attentions\.\d+\."
    r"(proj_in|proj_out|transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)))"
)
FLUX_LAYERS = re.compile(
    r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj|to_out\.0|to_add_out)|ff(_context)?\.net\.(0\.proj|2))"
    r"|single_transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out)"
)
ENDINGS = (
    (".lora_up.weight", ".lora_down.weight"),
    (".lora_B.weight", ".lora_A.weight"),
    (".lora.up.weight", ".lora.down.weight"),
)


def names(family: str, layer: str) -> Iterator[str]:
    """What a layer, as diffusers calls it, may be called in a file."""
    flat = layer.replace(".", "_")
    if family == "flux" and FLUX_LAYERS.fullmatch(layer):
        yield from (layer, f"transformer.{layer}", f"lycoris_{flat}", f"lora_transformer_{flat}")
    if family == "sdxl" and SDXL_LAYERS.fullmatch(layer):
        yield from (f"lora_unet_{flat}", f"lycoris_{flat}")
        # As diffusers called them before it took to PEFT.
        old = layer.replace(".to_", ".processor.to_").removesuffix(
            ".0" if layer.endswith(".to_out.0") else ""
        )
        yield from (old, f"unet.{old}")


def put(family: str, model: Any, file: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Add a file's matrices to the model's weights.  How many layers were changed, and the names in the file that were left out."""
    taken: set[str] = set()
    changed = 0
    for layer, module in model.named_modules():
        for name in names(family, layer):
            ending = next((each for each in ENDINGS if name + each[0] in file), None)
            if ending is None:
                continue
            up, down = file[name + ending[0]], file[name + ending[1]]
            alpha = file.get(f"{name}.alpha")
            module.weight.data += (1.0 if alpha is None else float(alpha) / down.shape[0]) * (
                up @ down
            )
            taken |= {name + ending[0], name + ending[1], f"{name}.alpha"}
            changed += 1
    return changed, sorted(file.keys() - taken)
