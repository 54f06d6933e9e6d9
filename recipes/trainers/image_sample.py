"""Step `samples`: draw the same prompts from the same noise with the base and with every kept adapter, side by side.  Trains and judges nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from image_columns import RANDOM, row, sheet
from image_model import DTYPES, FAMILIES, INITS, STORAGES, away, caption_file, decoded, device, family, stored, vae_of
from loop import draw
from PIL import Image
from precision import ASKED, chosen
from safetensors.torch import load_file


def main() -> None:
    options = _options()
    where, precision = device(), chosen(options.precision)
    torch.use_deterministic_algorithms(True, warn_only=True)
    kind = family(options.family)
    dtype = DTYPES[precision]
    pipeline = kind.pipeline(options.base, options.init, dtype, options.objective)
    adapters = sorted(options.snapshots.glob("step-*.safetensors"))
    # An adapter takes the precision of the base that it is put on: the first comes before the base is stored in less, the others in its place.
    put(pipeline, adapters[0])
    denoiser = getattr(pipeline, kind.PREFIX)
    stored(denoiser, options.base_storage, dtype)
    away(denoiser, options.offload_blocks)
    pipeline.to(where)
    pipeline.set_progress_bar_config(disable=True)
    vae = vae_of(options.vae, options.init, DTYPES[chosen(options.vae_precision)]).to(where)
    texts = json.loads((options.prompts / "texts.json").read_text())
    embedded = [{name: value.to(where, dtype) for name, value in load_file(options.prompts / caption_file(text)).items()} for text in texts]

    options.out.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list[Image.Image]] = {}
    for adapter in (None, *adapters):
        if adapter is None:
            pipeline.disable_lora()
        else:
            pipeline.enable_lora()
            put(pipeline, adapter, instead=True)
        drawn = []
        for place, text in enumerate(embedded):
            # On the CPU: the same noise on every kind of device.
            draw("sample", options.seed, place)
            noise = torch.Generator().manual_seed(torch.initial_seed())
            latent = kind.drawn(pipeline, text, options.guidance, options.steps, options.size, noise)
            drawn.append(Image.fromarray(decoded(vae, latent).numpy()))
        name = "base" if adapter is None else adapter.stem
        columns[name] = drawn
        row(drawn).save(options.out / f"{name}.png")
    sheet(texts, columns, RANDOM if options.init == "random" else "").save(options.sheet)
    print(f"samples: {len(texts)} prompts with {len(columns)} models on {where.type}, precision {precision}, in {options.sheet}")


def put(pipeline: Any, adapter: Path, *, instead: bool = False) -> None:
    """Put an adapter on the pipeline's denoiser, or in the place of one of the same shape that is there."""
    pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name, adapter_name="sample", hotswap=instead)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    for name in ("base", "vae", "prompts", "snapshots", "out", "sheet"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--init", choices=INITS, required=True)
    for name in ("precision", "vae-precision"):
        parser.add_argument(f"--{name}", choices=ASKED, required=True)
    parser.add_argument("--base-storage", choices=STORAGES, default="same", help="what the base's weights lie in memory as")
    parser.add_argument("--offload-blocks", type=int, default=0, help="transformer blocks whose weights stay in main memory")
    parser.add_argument("--objective", required=True, help="sdxl: what the model predicts")
    parser.add_argument("--size", type=int, required=True, help="pixels a side")
    parser.add_argument("--steps", type=int, required=True, help="of denoising")
    parser.add_argument("--guidance", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
