"""Step `samples`: draw the same prompts from the same noise with the base and with every kept adapter, side by side.  Trains and judges nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from image_model import DTYPES, FAMILIES, INITS, STORAGES, away, caption_file, decoded, device, family, stored, vae_of
from loop import draw
from PIL import Image, ImageDraw, ImageFont
from precision import ASKED, chosen
from safetensors.torch import load_file

MARGIN = 8
LABEL = 18  # pixels of a line
INK, PAPER, NOTE = "#222222", "#ffffff", "#c0504d"
RANDOM = "random weights: the base was never trained, so all it draws is noise; this shows only that drawing works"
CELL = 256  # the most pixels that an image has on the sheet


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
        _row(drawn).save(options.out / f"{name}.png")
    _sheet(texts, columns, RANDOM if options.init == "random" else "").save(options.sheet)
    print(f"samples: {len(texts)} prompts with {len(columns)} models on {where.type}, precision {precision}, in {options.sheet}")


def put(pipeline: Any, adapter: Path, *, instead: bool = False) -> None:
    """Put an adapter on the pipeline's denoiser, or in the place of one of the same shape that is there."""
    pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name, adapter_name="sample", hotswap=instead)


def _row(images: list[Image.Image]) -> Image.Image:
    """The images of all prompts, beside each other, as they are."""
    width, height = images[0].size
    row = Image.new("RGB", (width * len(images), height))
    for place, image in enumerate(images):
        row.paste(image, (place * width, 0))
    return row


def _sheet(texts: list[str], columns: dict[str, list[Image.Image]], note: str) -> Image.Image:
    """A line for each prompt, a column for each model, and a note below."""
    font = ImageFont.load_default(12)
    first = next(iter(columns.values()))[0]
    # Small images are shown whole pixels large.
    cell = min(CELL, first.width) if first.width >= CELL // 2 else first.width * (CELL // 2 // first.width)
    line = cell + LABEL + MARGIN
    width, height = MARGIN + len(columns) * (cell + MARGIN), LABEL + MARGIN + len(texts) * line
    words = _wrapped(note, font, width - 2 * MARGIN)
    sheet = Image.new("RGB", (width, height + len(words) * LABEL), PAPER)
    pen = ImageDraw.Draw(sheet)
    for row, text in enumerate(words):
        pen.text((MARGIN, height + row * LABEL), text, NOTE, font)
    for column, (name, images) in enumerate(columns.items()):
        left = MARGIN + column * (cell + MARGIN)
        pen.text((left, MARGIN // 2), name, INK, font)
        for place, image in enumerate(images):
            sheet.paste(image.resize((cell, cell), Image.Resampling.NEAREST if cell > image.width else Image.Resampling.LANCZOS),
                        (left, LABEL + MARGIN + place * line + LABEL))  # fmt: skip
    for place, text in enumerate(texts):
        pen.text((MARGIN, LABEL + MARGIN + place * line), text, INK, font)
    return sheet


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """A text in lines of no more than so many pixels."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


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
