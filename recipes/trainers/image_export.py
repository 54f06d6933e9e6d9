"""Step `export`: make the folder that people load, an adapter that says where it comes from.  Knows the form of safetensors, not what is in it.

model/pytorch_lora_weights.safetensors    what `pipeline.load_lora_weights("model")` reads, with metadata in its header
model/comfyui-a1111.safetensors           SDXL only: the same weights under kohya's names, for ComfyUI, A1111, Forge and InvokeAI
model/README.md                           the same for people, as the Hub shows it
model/samples.png, images/                what it draws
model/settings.json                       what it was made with, and from which base
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from image_card import Facts, Sample, card
from model_card import base_of

FORMAT = "1.0.1"  # of modelspec, which programs that draw read
NAME = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for
KOHYA_NAME = "comfyui-a1111.safetensors"
# Whose key names of an adapter those programs were seen to take; by the kind of model, as modelspec calls it.
PROGRAMS = {"flux-1-dev": "ComfyUI and Forge", "stable-diffusion-xl-v1-base": "ComfyUI, A1111 and Forge"}
# A1111 takes a file that has metadata, but no such line, for an adapter of Stable Diffusion 1, and does not list it beside an SDXL model.
KOHYA = {
    "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
    "ss_base_model_version": "sdxl_base_v1-0",
    "ss_network_module": "networks.lora",
}


def main() -> None:
    options = _options()
    base, data = base_of(options.base), hashlib.sha256(options.manifest.read_bytes()).hexdigest()
    settings = {**json.loads(options.settings.read_text()), "base": base.name, "base_revision": base.revision}
    report = json.loads(options.report.read_text())
    metadata = {
        "format": "pt",
        "recipe": options.recipe,
        "recipe.key": options.key,
        "recipe.data": data,
        "recipe.settings": json.dumps(settings, sort_keys=True),
        "recipe.report": json.dumps(report, sort_keys=True),
        "modelspec.sai_model_spec": FORMAT,
        "modelspec.architecture": options.architecture,
        "modelspec.implementation": "diffusers",
        "modelspec.title": options.trigger or options.recipe,
        "modelspec.trigger_phrase": options.trigger,
        "modelspec.resolution": "x".join([str(settings["resolution"])] * 2),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    size = described(options.adapter, options.out / NAME, metadata)
    sdxl = options.architecture.startswith("stable-diffusion-xl")
    if sdxl:
        kohya(options.adapter, options.out / KOHYA_NAME, metadata | KOHYA)
    shutil.copyfile(options.sheet, options.out / "samples.png")
    (options.out / "settings.json").write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    facts = Facts(
        options.recipe, options.key, data, options.trigger, base, json.loads((options.base / "model_index.json").read_text())["_class_name"],
        settings, report, pictures(options.samples, options.prompts, options.out), KOHYA_NAME if sdxl else "",
        PROGRAMS.get(options.architecture.partition("/")[0], ""),
    )  # fmt: skip
    (options.out / "README.md").write_text(card(facts), encoding="utf-8")
    print(f"export: an adapter of {size / 1e6:.2f} MB in {options.out / NAME}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("adapter", "base", "manifest", "report", "samples", "prompts", "sheet", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("recipe", "key", "architecture", "trigger"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--settings", type=Path, required=True, help="a JSON object of what it was trained with")
    return parser.parse_args()


def described(source: Path, target: Path, metadata: dict[str, str]) -> int:
    """Copy a safetensors file, with this metadata over its own.  Returns its size, bytes, which are a function of what is given.

    8 bytes of length, that many of JSON padded with spaces to a multiple of 8, the data (https://github.com/huggingface/safetensors, "Format").  The
    library itself writes metadata in another order each time.
    """
    with source.open("rb") as read, target.open("wb") as write:
        header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        text = json.dumps({**header, "__metadata__": {**header.get("__metadata__", {}), **metadata}}, sort_keys=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        write.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(read, write)
    return target.stat().st_size


def kohya(source: Path, target: Path, metadata: dict[str, str]) -> None:
    """Write an SDXL adapter under the names of kohya's trainer, which ComfyUI, A1111 and Forge read.

    Of diffusers' own names they know only those of the feed-forward layers, and leave out the others without an error.  The alphas that are written
    mean a scale of 1: the adapter's own is in its weights.
    """
    from diffusers.utils import convert_state_dict_to_kohya
    from safetensors.torch import load_file, save_file

    renamed = target.with_name(f".{target.name}.renamed")
    save_file(convert_state_dict_to_kohya(load_file(source)), renamed)
    described(renamed, target, metadata)
    renamed.unlink()


def pictures(rows: Path, prompts: Path, out: Path) -> list[Sample]:
    """What the last adapter drew for each prompt, as a picture each; `rows` has those of a model beside each other in one file."""
    from PIL import Image

    texts = json.loads((prompts / "texts.json").read_text())
    (out / "images").mkdir(parents=True, exist_ok=True)
    found = []
    with Image.open(max(rows.glob("step-*.png"))) as row:
        side = row.width // len(texts)
        for place, text in enumerate(texts):
            file = f"images/{place:02}.png"
            row.crop((place * side, 0, (place + 1) * side, row.height)).save(out / file)
            found.append(Sample(text, file))
    return found


if __name__ == "__main__":
    main()
