"""Step `samples` of image-lora@1: draw the same prompts from the same noise with the base and with the adapter, by diffusers' own pipeline.

Trains and judges nothing, and knows no kind of model: what draws is the class that the base names.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from image_columns import RANDOM, row, sheet
from image_lora_base import base_folder
from loop import draw
from PIL import Image
from precision import ASKED, chosen

SAMPLES = 4  # captions that are drawn where no prompts are given
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


def main() -> None:
    options = _options()
    from diffusers import DiffusionPipeline

    precision = chosen(options.precision)
    base = base_folder(options.base, options.init, Path("drawn"))
    pipeline = DiffusionPipeline.from_pretrained(base, torch_dtype=DTYPES[precision], local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(options.adapter.parent, weight_name=options.adapter.name)
    if torch.cuda.is_available():
        pipeline.enable_model_cpu_offload()
    words = _words(pipeline, options)
    rows = (json.loads(line) for line in options.manifest.read_text(encoding="utf-8").splitlines())
    texts = list(dict.fromkeys(options.prompts or [each["caption"] for each in rows][:SAMPLES]))
    options.out.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list[Image.Image]] = {}
    steps = json.loads(options.report.read_text())["steps"]
    for name in ("base", f"step-{steps:06d}"):
        (pipeline.disable_lora if name == "base" else pipeline.enable_lora)()
        drawn = []
        for place, text in enumerate(texts):
            # On the CPU: the same noise on every kind of device.
            draw("sample", options.seed, place)
            noise = torch.Generator().manual_seed(torch.initial_seed())
            drawn.append(pipeline(prompt=text, generator=noise, **words).images[0])
        columns[name] = drawn
        row(drawn).save(options.out / f"{name}.png")
    (options.out / "texts.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    sheet(texts, columns, RANDOM if options.init == "random" else "").save(options.sheet)
    print(f"samples: {len(texts)} prompts with {len(columns)} models by {type(pipeline).__name__}, precision {precision}, in {options.sheet}")


def _words(pipeline: Any, options: argparse.Namespace) -> dict[str, object]:
    """How the pipeline is asked: guidance has two names, and Kontext's takes another size unless it is told the area."""
    known = inspect.signature(pipeline.__call__).parameters
    words: dict[str, object] = {"height": options.size, "width": options.size, "num_inference_steps": options.steps}
    if "max_area" in known:
        words["max_area"] = options.size**2
    # QwenImagePipeline guides by a second prompt; its `guidance_scale` is for models that were taught theirs.
    if type(pipeline).__name__.startswith("QwenImage"):
        return {**words, "true_cfg_scale": options.guidance, "negative_prompt": " "}
    return {**words, "guidance_scale": options.guidance}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "adapter", "manifest", "report", "out", "sheet"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True, help="a JSON list; empty: the first captions")
    parser.add_argument("--init", required=True)
    parser.add_argument("--precision", choices=ASKED, required=True)
    for name in ("size", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--guidance", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
